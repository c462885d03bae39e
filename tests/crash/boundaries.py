"""Kill something of a run at one of its journal writes, go on with it, and compare with the run that nobody disturbed.

python tests/crash/boundaries.py --points 250 prints one JSON object. Each run is a child that was forked after the
imports, so that a place costs what a run costs. What is killed in turn: the run's process right after a line; the same
in the middle of a line, as a power cut leaves it; the run and then the run that goes on with it; the slot server, after
which the run goes on by itself. The points go round the settings: scripted, token-exact, and agents of every form that
give two pieces of work away at once, token-exact or over chat. Calls of the engine are counted: killing a run may cost
one call for each conversation in flight and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from crash.by_prompt import served
from palaestra.cli import main as command_line
from palaestra.rollouts.events import RolloutEnded, RolloutResumed
from palaestra.rollouts.journal.journal import Journal, read_journal
from palaestra_slots.sandbox.local.client import SlotClient
from palaestra_tokens.engines.scripted import ScriptedSession

STEPS = ("wc -l < a.txt > lines.txt", "cat a.txt lines.txt", "cp lines.txt answer.txt; cat answer.txt")
ENVIRONMENT = f"""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def lines(n: int = 8):
    for i in range(n):
        yield Task(id=f"lines-{{i}}", prompt="Write the number of lines of a.txt to answer.txt",
                   files={{"a.txt": "x\\n" * i}}, solution={list(STEPS)!r}, answer=str(i))

@lines.score
async def correct(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
"""
DELEGATING = ENVIRONMENT.replace('["terminal"]', '["terminal", "delegation"]')
DELEGATING_CLASS = """
from palaestra import AgentEnv, HermesAgentBaseEnv

class Items:
    async def get_next_item(self):
        return next(self.items, None)

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool("write_file", {"path": "a.txt", "content": "x\\n" * item})
        return {}

class Calls(Items, HermesAgentBaseEnv):
    name = "lines"

    async def setup(self):
        self.items = iter(range(8))

    def format_prompt(self, item):
        return f"Lines of a.txt, {item}"

    async def evaluate(self, *args, **kwargs): ...

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat answer.txt")["output"].strip() == str(item))

class Texts(Items, AgentEnv):
    name = "lines"

    async def setup_agent_env(self):
        self.items = iter(range(8))

    def build_task(self, item):
        return f"Lines of a.txt, {item}"

    async def score_trajectory(self, item, final_response):
        return 0.0

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result=None):
        seen = await exec_tool("terminal", {"command": "cat answer.txt"})
        return float(seen.output.strip() == str(item)), {}
"""


def called(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


GOALS = ("Count them", "Copy them")
REPLIES = {
    f"user\n{GOALS[0]}": [called("terminal", command=STEPS[0]), "They are counted."],
    f"user\n{GOALS[1]}": [called("terminal", command="cp a.txt b.txt"), called("terminal", command="cat b.txt"), "Yes"],
    "delegate_task": [
        called("delegate_task", tasks=[{"goal": goal} for goal in GOALS]),
        called("terminal", command="cp lines.txt answer.txt"),
        called("delegate_task", goal=GOALS[1]),
        "Done.",
    ],
    "": [*(called("terminal", command=step) for step in STEPS), "Done."],
}
GROUPS, SIZE, AT_ONCE = 8, 3, 2
ROLLOUTS, IN_FLIGHT = GROUPS * SIZE, SIZE * AT_ONCE
KINDS = ("run", "torn", "twice", "server")


@dataclass(frozen=True)
class Setting:
    """One way of running an environment. `calls` is where calls of its engine are counted, None for the run's own
    folder; `turns` is how many a rollout takes, at most `together` of them at once."""

    name: str
    flags: Sequence[str]
    calls: Path | None = None
    script: str = ENVIRONMENT
    form: str = ""
    turns: int = len(STEPS) + 1
    together: int = 1

    @property
    def run(self) -> list[str]:
        return ["run", f"lines_env.py{self.form}", *self.flags, "--group", str(SIZE), "--concurrency", str(AT_ONCE)]

    def counted(self, folder: Path) -> int:
        """Calls of the engine so far."""
        path = self.calls or folder / "calls"
        return path.stat().st_size if path.exists() else 0


@dataclass(frozen=True)
class Undisturbed:
    """What a run comes to that nothing happens to."""

    whole: bytes
    calls: int
    lines: int


def forked(folder: Path, argv: list[str], before: Callable[[], None]) -> int:
    """The command in a child; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.chdir(folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            before()
            code = command_line.main(argv)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_calls() -> None:
    """Every call of the engine adds a byte to the file `calls`."""
    asked = ScriptedSession.chat_completion
    calls = os.open("calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def counted(self: ScriptedSession, **request: Any) -> Any:
        os.write(calls, b".")
        return await asked(self, **request)

    ScriptedSession.chat_completion = counted  # type: ignore[method-assign]


def striking(place: int, kind: str) -> Callable[[], None]:
    """Kill at the journal's `place`th line."""

    def patch() -> None:
        count_calls()
        servers: list[SlotClient] = []
        append, spawn, lines = Journal.append, SlotClient._spawn, 0

        async def spawned(self: SlotClient, *args: Any) -> None:
            await spawn(self, *args)
            servers.append(self)

        def appended(self: Journal, *args: Any) -> Any:
            nonlocal lines
            lines += 1
            if lines == place and kind == "torn":
                os.write(self.file.fd, b'{"event":"messages","at":17')
                os.kill(os.getpid(), signal.SIGKILL)
            written = append(self, *args)
            if lines == place and kind == "run":
                os.kill(os.getpid(), signal.SIGKILL)
            if lines == place and kind == "server":
                os.kill(servers[-1].pid, signal.SIGKILL)
            return written

        Journal.append = appended  # type: ignore[method-assign]
        SlotClient._spawn = spawned  # type: ignore[method-assign]

    return patch


def disturbed(folder: Path, setting: Setting, place: int, kind: str, known: Undisturbed, counts: Counter[str]) -> str:
    """What was wrong after the kill at one place, or nothing. Adds to what was counted."""
    before = setting.counted(folder)
    code = forked(folder, setting.run, striking(place, "run" if kind == "twice" else kind))
    kills = 1
    if kind == "server":
        if code != 0:
            return f"the run ended with {code}"
    elif code != -signal.SIGKILL:
        return f"the run was not killed: {code}"
    else:
        if kind == "twice":
            code = forked(folder, going_on(folder, setting), striking(max(1, known.lines - place) // 2, "run"))
            kills += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL):
                return f"going on ended with {code}"
        if code != 0:
            code = forked(folder, going_on(folder, setting), count_calls)
    if code != 0:
        return f"going on ended with {code}"
    (groups, *others) = sorted(folder.glob("runs/*/*/groups.jsonl"), key=lambda path: -path.stat().st_size)
    if groups.read_bytes() != known.whole:
        return "the data set differs"
    if any(path.stat().st_size for path in others):
        return f"there are {len(others) + 1} data sets"
    more = setting.counted(folder) - before - known.calls
    counts["kills"] += kills
    counts[f"calls more after {kind}"] += more
    return _ends(folder, counts) or _calls(more, kind, kills, setting)


def going_on(folder: Path, setting: Setting) -> list[str]:
    """The command that goes on with what was killed; a run that had not yet said what it runs is begun again."""
    runs = [path for path in folder.glob("runs/*/*") if (path / "journal.jsonl").read_bytes().count(b"\n")]
    return [*setting.run, "--resume", str(runs[0].relative_to(folder))] if runs else setting.run


def _ends(folder: Path, counts: Counter[str]) -> str:
    """Every rollout ended once, and none that was under way had to begin anew."""
    events = list(read_journal(max(folder.glob("runs/*/*")) / "journal.jsonl"))
    ended = [event.trajectory for event in events if isinstance(event, RolloutEnded)]
    times = Counter((each.rollout_id, each.beside.started_at) for each in ended)
    if len({rollout for rollout, _ in times}) != ROLLOUTS or len(times) != ROLLOUTS:
        return f"{len(times)} rollouts ended, not {ROLLOUTS}"
    taken_up = [event for event in events if isinstance(event, RolloutResumed)]
    counts["taken up"] += len(taken_up)
    counts["turns not asked again"] += sum(event.turns for event in taken_up)
    anew = [event.anew for event in taken_up if event.anew]
    return f"begun anew: {anew[0]}" if anew else ""


def _calls(more: int, kind: str, kills: int, setting: Setting) -> str:
    """A killed run may ask again for what was in flight; attempts whose slot was lost are made again as a whole."""
    most = IN_FLIGHT * (setting.turns if kind == "server" else setting.together * kills)
    return "" if 0 <= more <= most else f"{more} calls of the engine more"


def undisturbed(folder: Path, setting: Setting) -> Undisturbed:
    """Run with nobody there."""
    _prepare(folder, setting)
    before = setting.counted(folder)
    code = forked(folder, setting.run, count_calls)
    assert code == 0, (folder / "log").read_text()
    (journal,) = folder.glob("runs/*/*/journal.jsonl")
    whole = journal.with_name("groups.jsonl").read_bytes()
    return Undisturbed(whole, setting.counted(folder) - before, journal.read_bytes().count(b"\n"))


def tried(top: Path, settings: Sequence[Setting], points: int, part: int, parts: int) -> dict[str, Any]:
    """Disturb that many runs, or every `parts`th of them from `part` on."""
    known = {setting.name: undisturbed(top / setting.name, setting) for setting in settings}
    wrong: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for point in range(part, points, parts):
        setting = settings[point % len(settings)]
        kind, lines = KINDS[point // len(settings) % len(KINDS)], known[setting.name].lines
        place = max(1 + (point * lines // points) % lines, 2 if kind == "server" else 1)
        folder = top / str(point)
        _prepare(folder, setting)
        if problem := disturbed(folder, setting, place, kind, known[setting.name], counts):
            said = (folder / "log").read_text()[-600:]
            wrong[f"{setting.name}: {kind} at line {place}"] = f"{problem}: {said}"
    runs = {name: {"calls": each.calls, "lines": each.lines} for name, each in known.items()}
    return {"points": len(range(part, points, parts)), "undisturbed": runs, "counted": counts, "wrong": wrong}


def one_agent(url: str, top: Path) -> list[Setting]:
    """The settings of one agent each."""
    return [Setting("one, scripted", ["--policy", "oracle"]), Setting("one, exact", exact(url, top), top / "requests")]


def agents_that_give_work_away(url: str, top: Path) -> Iterator[Setting]:
    """Those whose rollouts have sub-agents: every form of an environment, token-exact and over chat."""
    chat = ["--base-url", f"{url}/v1", "--model", "by-prompt"]
    toolsets = ["--env.enabled_toolsets", "terminal", "file", "delegation"]
    for engine, flags in (("exact", exact(url, top)), ("chat", chat)):
        for form, given in (("", []), (":Calls", toolsets), (":Texts", toolsets)):
            script = DELEGATING_CLASS if form else DELEGATING
            name = f"giving away, {engine}{form}"
            yield Setting(name, [*flags, *given], top / "requests", script, form, turns=12, together=2)


def exact(url: str, top: Path) -> list[str]:
    """The flags of a token-exact run."""
    server = ["--openai.server_type", "sglang", "--base-url", url, "--model", "by-prompt"]
    return [*server, "--openai.tokenizer_name", str(top / "model"), "--openai.tool_parser", "hermes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=250)
    parser.add_argument("--part", default="0/1", help="I/N: only every Nth point from I on, to try them side by side")
    parser.add_argument("--only", default="", help="only settings whose names hold this")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        with served(top / "model", REPLIES, top / "requests") as url:
            settings = [*one_agent(url, top), *agents_that_give_work_away(url, top)]
            settings = [each for each in settings if options.only in each.name]
            report = tried(top, settings, options.points, part, parts)
    json.dump(report, sys.stdout, indent=2)
    return bool(report["wrong"])


def _prepare(folder: Path, setting: Setting) -> None:
    folder.mkdir()
    (folder / "lines_env.py").write_text(setting.script)


if __name__ == "__main__":
    sys.exit(main())
