"""Kill something of a run at one of its journal writes, go on with it, and compare with the run that nobody disturbed.

python tests/crash/boundaries.py --points 250 prints one JSON object. Each run is a child that was forked after the
imports, so that a place costs what a run costs. What is killed in turn: the run's process right after a line; the same
in the middle of a line, as a power cut leaves it; the slot server, after which the run goes on by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palaestra.cli.exits import run_guarded
from palaestra.cli.main import cli
from palaestra.inference.engines.scripted import ScriptedSession
from palaestra.rollouts.journal import Journal, RolloutEnded, read_journal
from palaestra.sandbox.client import SlotServer

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def lines(n: int = 8):
    for i in range(n):
        yield Task(id=f"lines-{i}", prompt="Write the number of lines of a.txt to answer.txt",
                   files={"a.txt": "x\\n" * i}, solution="wc -l < a.txt > answer.txt", answer=str(i))

@lines.score
async def correct(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
"""
GROUPS, SIZE, AT_ONCE = 8, 3, 2
RUN = ["run", "lines_env.py", "--policy", "oracle", "--group", str(SIZE), "--concurrency", str(AT_ONCE)]
ROLLOUTS = GROUPS * SIZE
KINDS = ("run", "torn", "server")


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
            code = run_guarded(lambda: cli.main(argv, standalone_mode=False))
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
        servers: list[SlotServer] = []
        append, spawn, lines = Journal.append, SlotServer._spawn, 0

        async def spawned(self: SlotServer, *args: Any) -> None:
            await spawn(self, *args)
            servers.append(self)

        def appended(self: Journal, event: Any) -> None:
            nonlocal lines
            lines += 1
            if lines == place and kind == "torn":
                os.write(self.file.fd, b'{"event":"rollout_ended","at":17')
                os.kill(os.getpid(), signal.SIGKILL)
            append(self, event)
            if lines == place and kind == "run":
                os.kill(os.getpid(), signal.SIGKILL)
            if lines == place and kind == "server":
                os.kill(servers[-1].pid, signal.SIGKILL)

        Journal.append = appended  # type: ignore[method-assign]
        SlotServer._spawn = spawned  # type: ignore[method-assign]

    return patch


def disturbed(folder: Path, place: int, kind: str, whole: bytes, calls: int) -> str:
    """What was wrong after the kill at one place, or nothing."""
    code = forked(folder, RUN, striking(place, kind))
    runs = list(folder.glob("runs/*/*"))
    if kind == "server":
        if code != 0:
            return f"the run ended with {code}"
    elif code != -signal.SIGKILL:
        return f"the run was not killed: {code}"
    elif runs and (runs[0] / "journal.jsonl").read_bytes().count(b"\n"):
        code = forked(folder, [*RUN, "--resume", str(runs[0].relative_to(folder))], count_calls)
    else:
        code = forked(folder, RUN, count_calls)  # it had not yet said what it runs: nothing to go on with
    if code != 0:
        return f"going on ended with {code}"
    (groups, *others) = sorted(folder.glob("data/*.jsonl"), key=lambda path: -path.stat().st_size)
    if groups.read_bytes() != whole:
        return "the data set differs"
    if any(path.stat().st_size for path in others):
        return f"there are {len(others) + 1} data sets"
    run = max(folder.glob("runs/*/*"))
    ended = [event.trajectory for event in read_journal(run / "journal.jsonl") if isinstance(event, RolloutEnded)]
    times = Counter((each.rollout_id, each.beside.started_at) for each in ended)
    if len({rollout for rollout, _ in times}) != ROLLOUTS or len(times) != ROLLOUTS:
        return f"{len(times)} rollouts ended, not {ROLLOUTS}"
    more = (folder / "calls").stat().st_size - calls
    turns = calls // ROLLOUTS
    return f"{more} calls of the engine more" if more > AT_ONCE * SIZE * turns else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=250)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        first = Path(top, "undisturbed")
        _prepare(first)
        code = forked(first, RUN, count_calls)
        assert code == 0, (first / "log").read_text()
        whole, calls = (first / "data/lines.jsonl").read_bytes(), (first / "calls").stat().st_size
        (journal,) = first.glob("runs/*/*/journal.jsonl")
        lines = journal.read_bytes().count(b"\n")
        wrong = {}
        for point in range(options.points):
            kind, place = KINDS[point % len(KINDS)], 1 + (point * lines // options.points) % lines
            folder = Path(top, f"{point}")
            _prepare(folder)
            if problem := disturbed(folder, max(place, 2 if kind == "server" else 1), kind, whole, calls):
                wrong[f"{kind} at line {place}"] = f"{problem}: {(folder / 'log').read_text()[-600:]}"
        json.dump({"points": options.points, "lines": lines, "calls": calls, "wrong": wrong}, sys.stdout, indent=2)
    return bool(wrong)


def _prepare(folder: Path) -> None:
    folder.mkdir()
    (folder / "lines_env.py").write_text(ENVIRONMENT)


if __name__ == "__main__":
    sys.exit(main())
