"""The commands of the chat, each a function of the desk and the words after the command's name."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from palaestra_chat.terminal.desk import Desk
from palaestra_chat.terminal.styles import BOLD, CYAN, DIM, GREEN, PLAIN, YELLOW
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import one_line, printable

if TYPE_CHECKING:
    from palaestra_chat.store import StoredTurn

Run: TypeAlias = Callable[[Desk, str], Awaitable[None]]

KEYS = (
    "Enter sends; Alt-Enter, or \\ at the end, begins a new line; Ctrl-G opens your editor. @FILE adds a text file or\n"
    "an image, @https://ADDRESS a web page. !COMMAND runs a command in the sandbox.\n"
    "While a turn runs: Enter queues a message, which the agent reads after its next tool call; Esc or Ctrl-C stops.\n"
    "Shift-Tab switches between the modes plan, ask and auto. Ctrl-O shows the last output whole, Esc Esc lists the\n"
    "turns to go back to. Ctrl-X and a letter: n new, u undo, g rewind, l resume, m model (or Alt-P), c compact,\n"
    "d diff, s cost, x export, e editor. Ctrl-D ends the chat."
)

_DIGITS_OF_IDS = 4  # a shorter number is a place in the list of conversations

_WRITE_INSTRUCTIONS = (
    "Read this project and write the file AGENTS.md in its top folder, for agents and people who are new to it: in at "
    "most 60 lines, what the project is, the commands that build, test and check it (try them), where the important "
    "parts are, and the rules of its code that are not obvious. If there is an AGENTS.md or a CLAUDE.md, keep what is "
    "right in it. Do not guess: leave out what you cannot see."
)


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: its arguments for the list, what it does, and its function. If it is `at_once`, it runs also while a
    turn runs; otherwise it waits for the end of the turn."""

    arguments: str
    about: str
    run: Run
    at_once: bool = False

    @property
    def description(self) -> str:
        return f"{self.arguments}  {self.about}" if self.arguments else self.about


async def _help(desk: Desk, rest: str) -> None:
    for name, about in described(desk).items():
        desk.screen.prose(f"{CYAN}{name:<12}{PLAIN} {printable(about)}")
    desk.screen.prose(KEYS)


async def _exit(desk: Desk, rest: str) -> None:
    desk.finish()


async def _new(desk: Desk, rest: str) -> None:
    from palaestra_chat.conversation import Conversation

    if desk.changes.would_be_lost():
        return
    kept = {name: value for name, value in desk.talk.history.record.settings.items() if name in ("cwd", "workdir")}
    await desk.talk.close()
    desk.use(Conversation.begin(desk.opened.service, desk.people.people(), title=rest, settings=kept))
    desk.screen.prose(f"{DIM}a new conversation: {desk.talk.id}{PLAIN}")


async def _resume(desk: Desk, rest: str) -> None:
    from palaestra_chat.conversation import Conversation
    from palaestra_chat.one_shot import list_conversations

    store = desk.opened.store
    if not rest:
        for place, line in enumerate(list_conversations(store, as_json=False).split("\n"), 1):
            desk.screen.prose(f"{CYAN}{place:>3}{PLAIN} {printable(line)}")
        desk.screen.prose("/resume N continues one of them, and so does its id or title")
        return
    place = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < _DIGITS_OF_IDS else 0
    listed = store.conversations() if place else []
    record = listed[place - 1] if 0 < place <= len(listed) else store.find(rest)
    if record.id == desk.talk.id:
        desk.screen.prose(f"{DIM}{record.id} is this conversation{PLAIN}")
        return
    known = desk.opened.service.conversations.get(record.id)  # its sandbox is still open
    if isinstance(known, Conversation):
        desk.use(known)
    elif desk.changes.would_be_lost():
        return
    else:
        other = Conversation.open(desk.opened.service, record.id, desk.people.people())
        await desk.talk.close()
        desk.use(other)
    await desk.show_last()


async def _fork(desk: Desk, rest: str) -> None:
    before = desk.talk
    desk.use(await before.fork(_number(rest) if rest else None))
    turns = len(desk.talk.history.messages_sent())
    desk.screen.prose(
        f"{DIM}forked as {desk.talk.id}, with {plural(turns, 'turn')}; /resume {before.id} goes back{PLAIN}"
    )
    for notice in desk.talk.notices.take():
        desk.people.notice(notice)


async def _undo(desk: Desk, rest: str) -> None:
    turns = desk.talk.history.messages_sent()
    if not turns:
        desk.screen.prose("there is nothing to undo")
        return
    await _rewound(desk, turns[-1].number)


async def _rewind(desk: Desk, rest: str) -> None:
    turns = desk.talk.history.messages_sent()
    if not rest:
        for turn in turns:
            desk.screen.prose(
                f"{CYAN}{turn.number:>4}{PLAIN} {one_line(_turn_text(turn), desk.screen.scrollback.columns - 8)}"
            )
        desk.screen.prose("/rewind N goes back to the end of turn N, /rewind 0 to the beginning")
        return
    to = _number(rest)
    later = [turn.number for turn in turns if turn.number > to]
    if to and to not in [turn.number for turn in turns]:
        raise ConfigError(f"there is no turn {to}; /rewind lists the turns")
    if not later:
        desk.screen.prose(f"turn {to} is the last one")
        return
    await _rewound(desk, later[0])


async def _rewound(desk: Desk, before: int) -> None:
    undone = await desk.talk.rewind(before=before)
    what = "undone" if undone.turns == 1 else f"{undone.turns} turns undone"
    desk.screen.prose(f"{DIM}{what}{'; ' if undone.files else ''}{printable(undone.files)}{PLAIN}")
    for change in undone.left:
        desk.screen.prose(f"{YELLOW}not restored: {printable(change.path)}: {printable(change.problem)}{PLAIN}")


async def _init(desk: Desk, rest: str) -> None:
    await desk.show_turn(desk.talk.send(f"{_WRITE_INSTRUCTIONS} {rest}".rstrip()))


async def _diff(desk: Desk, rest: str) -> None:
    await _sandbox(desk, "diff")


async def _retry(desk: Desk, rest: str) -> None:
    await desk.show_turn(desk.talk.retry())


async def _stop(desk: Desk, rest: str) -> None:
    talk = desk.talk
    if not rest and desk.screen.live.running:
        desk.stop()
        return
    if rest != "processes":
        running = desk.opened.service.running(talk.id)
        more = f"; background processes running: {running}; /stop processes ends them" if running else ""
        raise ConfigError(
            f"unknown command /stop {rest}; use /stop or /stop processes" if rest else f"no turn is running{more}"
        )
    ended = await desk.opened.service.processes.kill_all(talk.id)
    desk.screen.prose(f"ended {ended} background process{'' if ended == 1 else 'es'}")


async def _mode(desk: Desk, rest: str) -> None:
    from palaestra_chat.permissions import ABOUT, Mode

    if rest:
        if rest not in list(Mode):
            raise ConfigError(f"unknown mode {rest!r}; the modes are {', '.join(Mode)}")
        desk.talk.permissions.switch(Mode(rest))
    for mode, about in ABOUT.items():
        mark = f"{GREEN}▸" if mode is desk.talk.permissions.mode else " "
        desk.screen.prose(f"{mark} {mode.value:<5}{PLAIN} {about}")


async def _permissions(desk: Desk, rest: str) -> None:
    from palaestra_chat.conversation import rules_of

    name = rules_of(desk.talk.history.record, desk.opened.service.settings.rules_folder)
    rules = sorted(desk.opened.store.users.allowed(name))
    word, _, number = rest.partition(" ")
    if word == "forget":
        place = _number(number.strip())
        if not 1 <= place <= len(rules):
            raise ConfigError(f"there is no rule {place}; /permissions lists the rules")
        desk.opened.store.users.disallow(name, [rules[place - 1]])
        desk.talk.permissions.approvals.allowed.discard(rules[place - 1])
        desk.screen.prose(f"forgotten: {printable(rules[place - 1])}")
        return
    if rest:
        raise ConfigError(f"unknown command /permissions {rest}; use /permissions or /permissions forget N")
    for place, rule in enumerate(rules, 1):
        desk.screen.prose(f"{CYAN}{place:>3}{PLAIN} {printable(rule)}")
    desk.screen.prose(
        f"always allowed in {printable(name.rpartition(chr(0))[2]) or 'every folder'}: {plural(len(rules), 'rule')}"
    )


async def _model(desk: Desk, rest: str) -> None:
    if rest and not await desk.talk.use_model(rest):
        desk.screen.prose(f"{YELLOW}note: the server lists no models, so this name is not checked{PLAIN}")
    desk.screen.prose(printable(desk.talk.model.name))
    if not rest:
        for name, server in desk.opened.service.settings.models.items():
            desk.screen.prose(
                f"{CYAN}{printable(name):<18}{PLAIN} {printable(f'{server.model_name} at {server.base_url}')}"
            )
        for name in await desk.opened.service.models():
            desk.screen.prose(f"{DIM}{printable(name)}{PLAIN}")


async def _list_tools(desk: Desk, rest: str) -> None:
    registry = desk.opened.service.registry(desk.talk.toolsets)
    for name in registry.list_tools():
        tool = registry.get(name)
        about = "" if tool is None else tool.schema.description.partition(". ")[0]
        desk.screen.prose(f"{CYAN}{name:<18}{PLAIN} {printable(about)}")
    for name, reason in registry.missing.items():
        desk.screen.prose(f"{DIM}{name:<18} left out: {printable(reason)}{PLAIN}")


async def _toolset(desk: Desk, rest: str) -> None:
    if rest:
        await desk.talk.use_toolsets(rest.replace(",", " ").split())
    desk.screen.prose(" ".join(desk.talk.toolsets))


async def _sandbox(desk: Desk, rest: str) -> None:
    from palaestra_chat.current_folder import short
    from palaestra_chat.folder_changes import edits
    from palaestra_chat.model_servers import some
    from palaestra_chat.one_shot import day

    talk, screen = desk.talk, desk.screen
    if rest in ("write ask", "write yes", "write no"):
        desk.remember_write_mode(rest.rpartition(" ")[2])
        screen.prose(desk.folder())
    elif rest == "new":
        if desk.changes.would_be_lost():
            return
        await talk.drop_slot()
        screen.prose("the next command gets a new sandbox")
    elif rest in ("diff", "write"):
        if talk.slots.folder is None:
            raise ConfigError(
                f"/sandbox {rest} compares with the folder that the sandbox has a copy of, and there is none; "
                "start the chat in a project, or with --workdir DIR"
            )
        changes = await desk.changes.of(talk)
        if rest == "write":
            desk.changes.write(talk, await desk.changes.settled(talk, changes))
            desk.changes.keep(talk, await desk.changes.of(talk))
            return
        found = edits(changes)
        for edit in found:
            screen.diff(edit.diff())
        verb = "differs" if len(found) == 1 else "differ"
        stay = talk.slots.folder.staying
        more = f"; {plural(stay, 'generated file')} stay{'s' if stay == 1 else ''} in the sandbox" if stay else ""
        screen.prose(f"{plural(len(found), 'file')} {verb} from {talk.slots.folder.root}{more}")
    elif rest:
        raise ConfigError(
            f"unknown command /sandbox {rest}; use /sandbox, /sandbox diff, /sandbox write [ask, yes or no] or "
            "/sandbox new"
        )
    else:
        slot, since, settings = talk.seat.slot, talk.history.record.created_at, desk.opened.service.settings
        screen.prose(f"{desk.folder()}\nthe conversation began {day(since)}")
        screen.prose(
            "no sandbox yet: the first command creates one" if slot is None else
            f"{slot.slot_id}: backend {desk.opened.service.pool.backend.name}, isolation {slot.rung.label}"
        )  # fmt: skip
        if settings.spec.mounts:
            names = [short(mount.target) for mount in settings.spec.mounts]
            screen.prose(printable(f"programs of your PATH, read-only: {some(names, 20)}"))
        if settings.missing_tools:
            names = [short(each) for each in settings.missing_tools]
            screen.prose(printable(f"in your PATH, but not in the sandbox: {some(names, 20)}"))


async def _port(desk: Desk, rest: str) -> None:
    action, _, number = rest.partition(" ")
    if action == "close":
        if not await desk.ports.close(_number(number.strip())):
            raise ConfigError(f"port {number.strip()} is not open; /port lists the open ports")
    elif rest:
        inside, colon, outside = rest.partition(":")
        await desk.ports.open(_number(inside), _number(outside if colon else inside))
    for here, port in desk.ports.numbers.items():
        desk.screen.prose(f"http://127.0.0.1:{here} leads to port {port} of the sandbox")
    if not desk.ports.numbers:
        desk.screen.prose("no port of the sandbox is open; /port 8000 opens http://127.0.0.1:8000 on this machine")


async def _background(desk: Desk, rest: str) -> None:
    processes, task = desk.opened.service.processes, desk.talk.id
    action, _, more = rest.partition(" ")
    if not rest:
        sessions = await processes.list_sessions(task)
        if not sessions:
            desk.screen.prose("no background processes")
        for each in sessions:
            desk.screen.prose(printable(f"{each['session_id']}  {each['status']}  {each['command']}"))
        return
    if action == "kill":
        reply = await processes.kill_process(more.strip(), task_id=task)
    elif action == "write":
        name, _, text = more.partition(" ")
        reply = await processes.submit_stdin(name, text, task_id=task)
    elif more:
        raise ConfigError(f"unknown command /background {rest}; use /background ID, write ID TEXT or kill ID")
    else:
        reply = await processes.read_log(action, task_id=task)
    desk.screen.prose(printable(str(reply.get("output") or reply.get("error") or reply.get("status"))))


async def _cost(desk: Desk, rest: str) -> None:
    spent: dict[str, list[float]] = {}
    reports = desk.opened.store.turns.reports(desk.talk.id)
    for report in reports:
        figures = spent.setdefault(str(report.get("model") or desk.talk.model.name), [0, 0, 0, 0.0])
        for place, name in enumerate(("model_calls", "prompt_tokens", "completion_tokens", "cost")):
            figures[place] += float(report.get(name) or 0)
    priced = desk.opened.service.settings.prices is not None
    for model, (calls, read, written, cost) in spent.items() or {desk.talk.model.name: [0, 0, 0, 0.0]}.items():
        name = f"{model}: " if len(spent) > 1 else ""
        text = f"{name}{plural(int(calls), 'model call')}, {int(read)} tokens read, {int(written)} written"
        desk.screen.prose(printable(text + (f", cost {cost:.4f}" if priced else " (set prices to see a cost)")))
    if any(report.get("estimated") for report in reports):
        desk.screen.prose("The tokens of replies that were interrupted are estimates: servers do not report them.")


async def _compact(desk: Desk, rest: str) -> None:
    desk.screen.markdown(await desk.talk.compact())


async def _save(desk: Desk, rest: str) -> None:
    if not rest:
        raise ConfigError("/save needs a title")
    desk.talk.history.rename(rest)
    desk.screen.prose(f"{DIM}named; continue with: palaestra chat --resume {printable(rest)!r}{PLAIN}")


async def _export(desk: Desk, rest: str) -> None:
    from palaestra_slots.core.io.durable_files import private

    talk = desk.talk
    path = Path(rest or f"{talk.id}.json").expanduser()
    content = {
        "id": talk.id, "title": talk.history.title, "model": talk.model.name, "messages": talk.history.messages,
    }  # fmt: skip
    try:
        with open(path, "w", opener=private) as file:  # noqa: ASYNC230 - a small file
            file.write(json.dumps(content, indent=1, ensure_ascii=False))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    desk.screen.prose(f"wrote {path}")


async def _search(desk: Desk, rest: str) -> None:
    from palaestra_chat.one_shot import list_conversations

    desk.screen.prose(printable(list_conversations(desk.opened.store, as_json=False, query=rest)))


async def _show(desk: Desk, rest: str) -> None:
    number = _number(rest.strip()) if rest.strip() else None
    text = desk.screen.whole(number)
    desk.screen.line("\n".join(f"{DIM}│{PLAIN} {printable(line)}" for line in text.rstrip("\n").split("\n")))


async def _skills(desk: Desk, rest: str) -> None:
    found = desk.project.skills()
    for skill in found.values():
        about = one_line(skill.description, 200)
        desk.screen.prose(f"{BOLD}{printable(skill.name)}{PLAIN} {about} {DIM}{printable(str(skill.folder))}{PLAIN}")
    if not found:
        desk.screen.prose("no skills in .agents/skills, .claude/skills or the folder skills beside chat.yaml")


async def _hooks(desk: Desk, rest: str) -> None:
    hooks = desk.opened.service.settings.hooks
    if hooks is None or not (hooks.before or hooks.after or hooks.ignored):
        desk.screen.prose("no hooks in the file hooks.json beside chat.yaml")
        return
    for when, listed in (("before", hooks.before), ("after", hooks.after)):
        for hook in listed:
            desk.screen.prose(printable(f"{when} {hook.about}: {hook.command} (at most {hook.timeout_s:g} s)"))
    if hooks.ignored:
        desk.screen.prose(printable(f"never run here: hooks for {', '.join(hooks.ignored)}"))


def _turn_text(turn: StoredTurn) -> str:
    from palaestra_toolsets.tools.session_search import message_text

    return message_text(turn.content)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{text!r} is not a number")
    return int(text)


COMMANDS: Mapping[str, SlashCommand] = {
    "/help": SlashCommand("", "list the commands", _help, at_once=True),
    "/new": SlashCommand("[TITLE]", "begin a new conversation", _new),
    "/resume": SlashCommand("[N | NAME]", "list the conversations, or continue one", _resume),
    "/fork": SlashCommand("[TURN]", "continue in a copy of this conversation and its files, up to the turn", _fork),
    "/init": SlashCommand("[WORDS]", "let the agent read the project and write its AGENTS.md", _init),
    "/diff": SlashCommand("", "show the sandbox's changes to your folder", _diff),
    "/undo": SlashCommand("", "undo the last message, its answer and its changes to files", _undo),
    "/rewind": SlashCommand("[TURN]", "list the turns, or go back to the end of one, with its files", _rewind),
    "/retry": SlashCommand("", "undo the last message, and send it again", _retry),
    "/stop": SlashCommand(
        "[processes]", "stop the running turn (also Esc), or end all background processes", _stop, at_once=True
    ),
    "/show": SlashCommand("[NUMBER]", "show the whole output of a tool call, by default the last", _show, at_once=True),
    "/mode": SlashCommand(
        "[plan|ask|auto]", "what the agent may do without a question (Shift-Tab)", _mode, at_once=True
    ),
    "/permissions": SlashCommand("[forget N]", "list what is always allowed, or forget a rule", _permissions),
    "/model": SlashCommand("[NAME]", "show or change the model", _model),
    "/tools": SlashCommand("", "list the tools", _list_tools, at_once=True),
    "/toolset": SlashCommand("[NAME …]", "show or change the toolsets", _toolset),
    "/skills": SlashCommand("", "list the skills that the agent can read", _skills, at_once=True),
    "/hooks": SlashCommand("", "list your hooks, which run before and after tool calls", _hooks, at_once=True),
    "/sandbox": SlashCommand(
        "[diff|write [ask|yes|no]|new]", "show the sandbox or its changes, write them back, or get a new one", _sandbox
    ),
    "/port": SlashCommand(
        "[NUMBER[:HERE] | close HERE]", "open a port of the sandbox here, such as that of a server", _port, at_once=True
    ),
    "/background": SlashCommand(
        "[ID | write ID TEXT | kill ID]", "list, read, write to or end background processes", _background, at_once=True
    ),
    "/cost": SlashCommand("", "tokens and cost of this conversation", _cost, at_once=True),
    "/compact": SlashCommand(
        "", "replace the history with a summary (also automatic, before the context window is full)", _compact
    ),
    "/save": SlashCommand("TITLE", "name the conversation", _save),
    "/export": SlashCommand("[FILE]", "write the conversation as JSON", _export),
    "/search": SlashCommand("WORDS", "find earlier conversations", _search),
    "/exit": SlashCommand("", "end the chat (also Ctrl-D)", _exit),
}


def described(desk: Desk) -> dict[str, str]:
    """Return the descriptions of the commands, also of those of the person and the project."""
    found = {name: command.description for name, command in COMMANDS.items()}
    if desk.ready:
        from palaestra_chat.project import command_description

        for name, path in desk.project.commands().items():
            found.setdefault(name, command_description(path))
    return found
