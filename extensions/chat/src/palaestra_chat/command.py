"""`palaestra chat`: talk to an agent in the terminal, or send it one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from palaestra_slots.core.errors import ConfigError

if TYPE_CHECKING:
    from palaestra_chat.config import ChatOptions
    from palaestra_chat.one_shot import Which

_HELP = """Talk to an agent that works in a sandbox.

\b
  palaestra chat                                          # in a project: the agent works on a copy of it
  palaestra chat -c                                       # continue the last conversation about this folder
  palaestra chat --base-url http://localhost:8000/v1 --model NAME
  palaestra chat -p "Explain this error" < build.log      # one answer, without a terminal
  palaestra chat -p "Run the tests" --json                # events as JSON lines

\b
  -p TEXT              send one message and print the answer; stdin is added to the message
  --json               with -p: every event as a line of JSON        --yes  with -p: allow what asks
  -c                   continue the last conversation about this folder
  --resume NAME        continue the one with this id (or its beginning) or title, with its own folder
  --fork NAME[:TURN]   start a new conversation as a copy of NAME, up to TURN
  --name TITLE         set the title   --list   list conversations   --search WORDS  list those with these words
  --consent yes|no     whether palaestra export --from sessions may use your conversations [no]
  --setup              choose the model server and the model again
  --message-id ID      with -p: if a message with this id was answered before, print the stored answer

\b
  --workdir DIR|none   the sandbox works on a copy of DIR, or starts empty [the current folder, if it is a project]
  --write ask|yes|no   write changes back; remembered for the folder [ask]
  --toolsets T …       the agent's tools (palaestra tools)           --mcp FILE  MCP servers, in the mcpServers format
  --backend NAME       where the sandbox is: local, docker, ssh, …   --image IMAGE
  --no-network         no network in the sandbox                     --system TEXT  the system prompt
  --mode MODE          plan: only tools that read; ask: asks before each change; auto: free in the sandbox [auto]

In the terminal: /help lists the commands, Esc stops the model or the command, Ctrl-D ends. @file adds a file or an
image, @https://ADDRESS a web page. You are asked before a dangerous command runs. The agent reads AGENTS.md. Settings
are also read from ~/.config/palaestra/chat.yaml, your hooks for tool calls from hooks.json beside it. The settings of
`palaestra run` for servers, tools and slots work too (--help-all).
Exit codes with -p: 0 answered, 1 failed, 2 usage, 4 model server, 5 isolation, 130 interrupted."""

_SETTINGS = {
    "--workdir": "--env.workdir",
    "--write": "--env.write",
    "--tools-from-path": "--env.tools_from_path",
    "--mode": "--env.mode",
    "--toolsets": "--env.enabled_toolsets",
    "--image": "--env.image",
    "--system": "--env.system_prompt",
    "--max-turns": "--env.max_agent_turns",
    "--api-key": "--openai.api_key",
}
_VALUES = ("-p", "--prompt", "--resume", "-r", "--fork", "--name", "--search", "--message-id", "--consent")
_SWITCHES = ("--json", "--yes", "-c", "--continue", "--list", "--setup")


FLAGS_OF_CHAT = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""The click settings of the commands that accept the flags of a chat."""


@click.command("chat", context_settings=FLAGS_OF_CHAT, help=_HELP)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    own, rest = own_flags(words)
    consent = own.pop("--consent", None)
    in_terminal = not {"-p", "--list", "--search"} & own.keys()
    if in_terminal and consent is None:
        context.exit(_talk(own, rest))
    import asyncio

    from palaestra_chat.config import open_store
    from palaestra_chat.one_shot import answer_once, list_conversations, read_stdin

    options = options_or_answer(rest, "palaestra chat")
    if options is None:
        return
    if consent is not None:
        _set_consent(options, consent)
        if not own:
            return
        if in_terminal:
            context.exit(_talk(own, rest))
    if "--list" in own or "--search" in own:
        with open_store(options.config) as store:
            click.echo(list_conversations(store, as_json="--json" in own, query=own.get("--search", "")))
        return
    piped, how = read_stdin(own["-p"]), {"as_json": "--json" in own, "allow": "--yes" in own}
    context.exit(asyncio.run(answer_once(options, which(own), own["-p"], piped=piped, **how)))


def _talk(own: Mapping[str, str], words: Sequence[str]) -> int:
    """Talk in the terminal; returns the exit code."""
    from palaestra_chat.terminal.chat_terminal import run_terminal

    return run_terminal(which, own, words)


def _set_consent(options: ChatOptions, given: str) -> None:
    """Store whether conversations may be exported. Raises `ConfigError`."""
    from palaestra_chat.config import open_store

    if given not in ("yes", "no"):
        raise ConfigError(f"--consent must be yes or no, not {given!r}")
    with open_store(options.config) as store:
        store.users.set_consent("", given == "yes")
    may = "may export" if given == "yes" else "does not export"
    click.echo(f"palaestra export --from sessions {may} your conversations", err=True)


def options_or_answer(words: Sequence[str], program: str) -> ChatOptions | None:
    """Return the settings of a chat. If the words request help or the current values, print them and return None."""
    from palaestra_chat.config import read_options

    options = read_options(words, program)
    if options.show:
        click.echo(options.show, nl=False)
        return None
    for notice in options.notices:
        click.echo(f"note: {notice}", err=True)
    return options


def own_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words into the chat's own flags with their values, and the words that are settings. Raises
    `ConfigError`."""
    own: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        written, equals, value = waiting.pop(0).partition("=")
        if written in _VALUES:
            if not equals and not waiting:
                raise ConfigError(f"{written} needs a value. See `palaestra chat --help`")
            own[{"--prompt": "-p", "-r": "--resume"}.get(written, written)] = value if equals else waiting.pop(0)
        elif written in _SWITCHES and not equals:
            own[{"--continue": "-c"}.get(written, written)] = ""
        elif written == "--no-network":
            rest += ["--env.allow_network", "false"]
        else:
            rest.append(f"{_SETTINGS.get(written, written)}{equals}{value}")
    if rest and not rest[0].startswith("-"):
        raise ConfigError(
            f"unexpected word {rest[0]!r}: send a message with -p {rest[0]!r}, or type it in the terminal"
        )
    if sum(name in own for name in ("-c", "--resume", "--fork")) > 1:
        raise ConfigError("use only one of -c, --resume and --fork")
    return own, rest


def which(own: Mapping[str, str]) -> Which:
    """Return which conversation the flags select. Raises `ConfigError` if the turn of `--fork` is not a number."""
    from palaestra_chat.one_shot import Which

    fork, colon, turn = own.get("--fork", "").partition(":")
    if colon and not turn.isdigit():
        raise ConfigError(f"--fork {own['--fork']}: the turn after the colon must be a number")
    return Which(
        resume="last" if "-c" in own else own.get("--resume"),
        fork=fork or None,
        fork_turn=int(turn) if turn else None,
        title=own.get("--name", ""),
        message_id=own.get("--message-id"),
    )
