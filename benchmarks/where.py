"""Where the processor time of a rollout goes: python benchmarks/where.py [--quick] [--waterfall] [--json FILE]

The rollout is the one of `throughput.py`: five turns with a shell command each, and a sixth command that scores it.
With 1 and with 16 concurrent rollouts, the script reads the processor time of each process, as the kernel counts it:

- `main process`: the run itself, split into the interpreter (user time) and the kernel.
- `slot server`: the same for the process that makes and ends the slots.
- `commands`: the programs in the slots.
- `inits and namespaces`: the first processes of the slots, which make the namespaces and end with them.
- `bare commands`: the six commands as plain subprocesses, with the process that starts them, for comparison.

The kernel's own threads, which free the namespaces later, are not counted; nor is the model server. The first rollouts
warm up and are not counted. `main process` is also divided by stage and by function: a timer interrupts it after every
4 ms of its processor time, and the sample counts for the innermost function of the package on the stack, and
for the innermost stage. Processor time says more than wall time on a machine that others use too.

With 1 rollout at a time, the script also shows the `waterfall` of a rollout, and nothing else with `--waterfall`: what
the fastest one waits for and, between the waits, what the process itself does, in wall time (the ratio is the share of
the whole). The JSON has for each step when it begins, and the processor time of the main process and of the slot server
meanwhile. The rest is the kernel, the programs in the slot, and waiting for a processor.

Target: at 16, the bare commands take at least 0.55 of the time of the rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import _measure as measure
import throughput

SIZES = {1: 48, 16: 192}
QUICK = {1: 8, 16: 32}
TARGET = 0.55
BARE = "bare commands"
EVERY_S = 0.004
FUNCTIONS = 15
"""The number of functions in the table."""

STAGES = {
    "engines/openai.py": "model call",
    "sandbox/local/local_slot.py": "command or file",
    "rollouts/journal/journal.py": "journal",
    "tools/runtime/runtime.py": "tool call",
    "rollouts/grading/grader.py": "grade",
    "agent/loop.py": "agent loop",
    "sandbox/server_backend.py": "make or end a slot",
    "sandbox/pool.py": "lease",
    "rollouts/rollout.py": "rollout",
    "rollouts/group.py": "group",
}
"""The stages by the end of the path of the file whose innermost frame decides; the rest is the event loop."""


WAITS = {
    "palaestra_tokens.engines.openai:OpenAIEngine.chat_completion": "model call",
    "palaestra_slots.sandbox.pool:Snapshots.compose": "prepare the files",
    "palaestra_slots.sandbox.pool:SlotPool.acquire": "get a slot",
    "palaestra_slots.sandbox.local.direct.direct_slot:DirectClient.start_deferred": "make the second slot",
    "palaestra_slots.sandbox.local.local_slot:LocalSlot.execute": "command",
    "palaestra_slots.sandbox.local.local_slot:LocalSlot.freeze": "stop the processes",
    "palaestra_slots.sandbox.pool:SlotPool.seal": "seal the slot",
    "palaestra_slots.sandbox.pool:SlotPool.changes": "list the changes",
    "palaestra_slots.sandbox.pool:SlotPool.release": "end a slot",
    "palaestra_slots.sandbox.pool:Snapshots.forget": "drop a layer",
    "palaestra.rollouts.journal.journal:Journal.commit": "write to the disk",
}
"""What a rollout waits for, by the coroutine methods that wait. A wait within another one ends the first part of it."""

GAPS = {
    ("", "prepare the files"): "begin the group",
    ("prepare the files", "model call"): "begin the rollout",
    ("model call", "get a slot"): "check the call",
    ("model call", "command"): "check the call",
    ("get a slot", "command"): "begin the command",
    ("command", "model call"): "record the turn",
    ("model call", "stop the processes"): "end the agent",
    ("stop the processes", "seal the slot"): "close the tools",
    ("seal the slot", "list the changes"): "begin the view",
    ("list the changes", "get a slot"): "choose the view",
    ("get a slot", "make the second slot"): "examine the work",
    ("make the second slot", "command"): "begin the command",
    ("command", "write to the disk"): "write the record",
    ("command", "end a slot"): "write the record",
    ("write to the disk", "write to the disk"): "end the group",
    ("end a slot", "write to the disk"): "end the group",
    ("drop a layer", "write to the disk"): "end the group",
    ("", ""): "between the ends",
}
"""What the process does between two waits."""

LEAST_MS = 0.5
"""Shorter gaps between the waits are counted together."""
SHORT = "gaps below 0.5 ms"


class Step(NamedTuple):
    """A wait of one rollout: its beginning since that of the rollout, its length, and the processor time that this
    process and the slot server used meanwhile. Times are in seconds."""

    name: str
    at_s: float
    took_s: float
    own_s: float
    server_s: float


class Waterfall:
    """The waits of rollouts that run one after the other, each by its kind and its number in the rollout."""

    def __init__(self) -> None:
        self._rollouts: list[list[Step]] = []
        self._current: list[Step] = []
        self._open: ContextVar[list[tuple[float, float, float]] | None] = ContextVar("open", default=None)
        """When and at which processor times the wait of this task began that is not over yet."""
        self._server = 0

    def record(self) -> None:
        """Wrap the methods from now on."""
        for place, name in {**WAITS, "palaestra.rollouts.group:GroupRun.run": ""}.items():
            module, _, path = place.partition(":")
            owner, method = path.split(".")
            kind = getattr(import_module(module), owner)
            setattr(kind, method, self._timed(getattr(kind, method), name))

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), _running_s(self._server)

    def _timed(self, method, name: str):
        async def call(*arguments, **settings):
            outer = self._open.get()
            within = outer is not None and name != "make the second slot"
            if within or (name and not self._server):
                return await method(*arguments, **settings)
            if not name:
                self._server = self._server or _server_pid()
                self._current = []
                self._rollouts.append(self._current)
                self._began_s = time.perf_counter()
                try:
                    return await method(*arguments, **settings)
                finally:
                    self._current = []  # what follows belongs to no rollout
            began = [self._now()]
            token = self._open.set(began)
            try:
                return await method(*arguments, **settings)
            finally:
                self._open.reset(token)
                now = self._now()
                took = [end - start for end, start in zip(now, began[-1], strict=True)]
                self._current.append(Step(name, began[-1][0] - self._began_s, *took))
                if outer is not None:
                    outer.append(now)

        return call

    def steps(self) -> list[Step]:
        """Return the waits of the fastest rollout in the order of their beginnings, with the gaps between them. It is
        the fastest one, because others use the machine too. The last step is the whole rollout."""
        fastest = min(self._rollouts, key=_end_s)
        found: list[Step] = []
        seen = Counter[str]()
        short_s = 0.0
        for step in _with_gaps(sorted(fastest, key=lambda step: step.at_s)):
            if step.name in GAPS.values() and step.took_s * 1e3 < LEAST_MS:
                short_s += step.took_s
            else:
                seen[step.name] += 1
                found.append(step._replace(name=f"{step.name} {seen[step.name]}"))
        end_s = _end_s(fastest)
        return [*found, Step(SHORT, 0.0, short_s, short_s, 0.0), Step("a rollout", 0.0, end_s, 0.0, 0.0)]


def _end_s(steps: list[Step]) -> float:
    return max(step.at_s + step.took_s for step in steps)


def _with_gaps(steps: list[Step]) -> Iterator[Step]:
    """Yield the steps of a rollout and what its own code does between them."""
    last, end_s = "", 0.0
    for step in steps:
        what = GAPS.get((last, step.name), GAPS["", ""])
        yield Step(what, end_s, gap_s := max(0.0, step.at_s - end_s), gap_s, 0.0)
        yield step
        last, end_s = step.name, max(end_s, step.at_s + step.took_s)


def _running_s(pid: int) -> float:
    """Return how long a process has run, in seconds. Source: the kernel's `Documentation/scheduler/sched-stats.rst`."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class Sampler:
    """Counts samples of this process's stack by function and by stage."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to count."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        """Stop counting."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        function = stage = ""
        while frame is not None:
            if file := measure.own_file(frame.f_code.co_filename):
                function = function or f"{file}:{frame.f_code.co_qualname}"
                stage = stage or next((name for end, name in STAGES.items() if file.endswith(end)), "")
            frame = frame.f_back
        self.functions[function or "(event loop)"] += 1
        self.stages[stage or "event loop"] += 1


class Accounts:
    """The processor time of the run's processes since it was made, in seconds."""

    def __init__(self) -> None:
        self._server = _server_pid()
        self._before = self._read()

    def since(self) -> dict[str, float]:
        """Return the seconds of each part."""
        return {name: seconds - self._before[name] for name, seconds in self._read().items()}

    def _read(self) -> dict[str, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        user, kernel, *children = _times(self._server)
        return {
            "main process: interpreter": own.ru_utime,
            "main process: kernel": own.ru_stime,
            "slot server: interpreter": user,
            "slot server: kernel": kernel,
            "slots": sum(children),
        }


def _times(pid: int) -> list[float]:
    """Return the user and kernel seconds of a process, and those of the children that it has waited for. Source:
    proc(5), stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[11:15]]


def _server_pid() -> int:
    """Return the pid of the slot server, the descendant of this process that has the name `slotd` and used most
    time."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)] = (name, int(fields.split()[1]))
    found = [pid for pid, (name, _) in parents.items() if name == "slotd" and _descends(pid, parents)]
    return max(found, key=lambda pid: sum(_times(pid)))


def _descends(pid: int, parents: dict[int, tuple[str, int]]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid][1]
    return pid == os.getpid()


async def bare(concurrency: int, rollouts: int) -> float:
    """Return the milliseconds per rollout of the six commands alone."""
    before = _used_s()
    await throughput.commands("", concurrency, rollouts)
    return (_used_s() - before) * 1e3 / rollouts


def _used_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def sample(url: str, concurrency: int, rollouts: int) -> measure.Sample:
    """Run the rollouts, and return the milliseconds per rollout of each part, and the shares in the main process."""
    from palaestra.rollouts.runner import Runner
    from palaestra_slots.sandbox.local.local_slot import LocalSlot

    found: dict[str, float] = {}
    commands = [0.0]
    sampler, play, result = Sampler(), Runner.run, LocalSlot.result

    def counted(*arguments, **settings):
        made = result(*arguments, **settings)
        commands[0] += made.metadata["cpu_s"]
        return made

    async def measured(runner: Runner):
        accounts, commands[0] = Accounts(), 0.0
        sampler.start()
        try:
            return await play(runner)
        finally:
            sampler.stop()
            found.update(accounts.since())

    LocalSlot.result = counted  # the only place that has the times of the commands
    await throughput.palaestra(url, concurrency, max(4, rollouts // 8))
    Runner.run = measured
    await throughput.palaestra(url, concurrency, rollouts)
    found["inits and namespaces"] = max(0.0, found.pop("slots") - commands[0])
    found["commands"] = commands[0]
    numbers = {name: seconds * 1e3 / rollouts for name, seconds in found.items()}
    numbers[BARE] = await bare(concurrency, rollouts)
    samples = sampler.stages.total() or 1
    numbers |= {f"stage {name}": count / samples for name, count in sampler.stages.items()}
    numbers |= {f"in {name}": count / samples for name, count in sampler.functions.most_common(FUNCTIONS)}
    return numbers


async def waterfall(url: str, rollouts: int) -> list[dict[str, object]]:
    """Return the steps of a rollout that runs alone, in milliseconds."""
    await throughput.palaestra(url, 1, 4)
    found = Waterfall()
    found.record()
    await throughput.palaestra(url, 1, rollouts)
    return [
        {
            "name": step.name,
            **{key[:-1] + "ms": round(each * 1e3, 3) for key, each in step._asdict().items() if key != "name"},
        }
        for step in found.steps()
    ]


def rows(concurrency: int, numbers: measure.Sample) -> list[measure.Row]:
    """Return the rows of one concurrency; ratios are shares of the whole or, below `main process`, shares of it."""
    parts = {name: value for name, value in numbers.items() if not name.startswith(("stage ", "in ", BARE))}
    whole = sum(parts.values())
    main = sum(value for name, value in parts.items() if name.startswith("main process"))
    table = [measure.Row(f"at {concurrency}: a rollout", whole, "ms", 1.0)]
    for name, value in parts.items():
        table.append(measure.Row(f"at {concurrency}: {name}", value, "ms", value / whole))
    alone = measure.Row(f"at {concurrency}: {BARE}", numbers[BARE], "ms", numbers[BARE] / whole)
    table.append(alone if concurrency == 1 else measure.judged(alone, TARGET, numbers[BARE] / whole >= TARGET))
    for kind, start in (("stage", "stage "), ("function", "in ")):
        some = {name.removeprefix(start): share for name, share in numbers.items() if name.startswith(start)}
        for name, share in sorted(some.items(), key=lambda each: -each[1]):
            table.append(measure.Row(f"at {concurrency}: main, {kind} {name}", share * main, "ms", share))
    return table


def falls(url: str, options: argparse.Namespace) -> tuple[list[measure.Row], list[dict[str, Any]]]:
    """Return the rows of the waterfall, and its steps; both are those of the fastest round."""
    rollouts = str(QUICK[1] if options.quick else SIZES[1])
    found: list[Any] = [measure.fresh_process(__file__, "--steps", url, rollouts) for _ in range(options.rounds)]
    steps = min(found, key=lambda each: each[-1]["took_ms"])
    whole = steps[-1]["took_ms"]
    return [
        measure.Row(f"waterfall: {step['name']}", step["took_ms"], "ms", step["took_ms"] / whole) for step in steps
    ], steps


def main() -> int:
    """Measure and print the table. The stages and functions are those of the last round."""
    parser = measure.options_parser(__doc__, rounds=3)
    parser.add_argument("--waterfall", action="store_true", help="only show the waits of one rollout")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    table: list[measure.Row] = []
    with measure.serving(throughput.__file__, "--serve") as url:
        for concurrency, rollouts in {} if options.waterfall else (QUICK if options.quick else SIZES).items():
            sizes = (str(concurrency), str(rollouts))
            samples = [measure.fresh_process(__file__, "--sample", url, *sizes) for _ in range(options.rounds)]
            by_whole = sorted(samples, key=lambda each: rows(concurrency, each)[0].value)
            table += rows(concurrency, by_whole[len(by_whole) // 2])  # the shares belong to one run, so no medians
        waits, steps = falls(url, options)
    title = f"Time of a rollout, the middle one of {options.rounds} runs, waterfall: the fastest; ratios are shares"
    return measure.report(title, [*table, *waits], options.json, steps=steps)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        print(json.dumps(asyncio.run(sample(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
    elif sys.argv[1:2] == ["--steps"]:
        print(json.dumps(asyncio.run(waterfall(sys.argv[2], int(sys.argv[3])))))
    else:
        sys.exit(main())
