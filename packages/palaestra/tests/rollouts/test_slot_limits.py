"""An agent that hits a limit of its slot, or attacks the slot's first process, is scored.

One run per isolation level plays a rollout for each limit; each test looks at one of them. Every rollout first writes
the right answer and then hits its limit, so that the score shows whether its work could still be graded.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import palaestra
from envs.scripts import acting
from palaestra import Run, Say, Task, environment
from palaestra.envs.api.function_env import FunctionEnvironment
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import Limits, Outcome, ToolStep
from palaestra_slots.sandbox.slot import Slot
from sandbox.processes import share_memory_with_inits
from sandbox.somebody import run_suite

pytestmark = [pytest.mark.slots, pytest.mark.timeout(180)]

LIMITS = Limits(memory_bytes=64 << 20, pids=48, disk_bytes=40 << 20, open_files=64)
LEVELS = [
    pytest.param(level, marks=pytest.mark.xdist_group(f"limits at {level}")) for level in ("full", "userns", "confined")
]
"""The tests of one level look at one run, so that one worker of pytest-xdist gets them all."""

_PROCESSES = """python3 - <<'END'
import subprocess
try:
    for _ in range(200): subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=-3, stderr=-3)
except OSError as error: print(error)
END"""
_FILES = "python3 -c 'kept = [open(\"/dev/null\") for _ in range(200)]'"
_DEEP = 'python3 -c \'import os\nfor _ in range(2000): os.mkdir("d" * 200); os.chdir("d" * 200)\''
_INODES = 'python3 -c \'for i in range(40000): open(f"n{i}", "w").close()\''
_LIMIT = "python3 -c 'import os, resource; resource.prlimit(%s, resource.RLIMIT_NOFILE, (1, 1))'"
_SOCKETS = """python3 - <<'END'
import socket
kept = []
try:
    while True:
        kept.append(socket.socketpair()); kept[-1][0].setblocking(False)
        try:
            while True: kept[-1][0].send(bytes(60000))
        except BlockingIOError: pass
except OSError as error: print(error)
END"""
# For three seconds, acts on the process that starts next, such as the child of the init that is about to run a command.
_NEXT = """cat > next.py <<'END'
import ctypes, os, resource, signal, time
end, libc = time.monotonic() + 3, ctypes.CDLL(None)
while time.monotonic() < end:
    last = int(open("/proc/loadavg").read().split()[-1])
    for _ in range(300):
        for pid in range(last + 1, last + 4):
            try: %s; last = pid
            except OSError: pass
END
setsid python3 next.py < /dev/null > /dev/null 2>&1 & sleep 0.3"""
_ON_NEXT = {
    "stop": "os.kill(pid, signal.SIGSTOP)",
    "kill": "os.kill(pid, signal.SIGKILL)",
    "trace": "libc.ptrace(0x4206, pid, 0, 0)",
    "no memory for": "resource.prlimit(pid, resource.RLIMIT_AS, (0, 0))",
    "no stack for": "resource.prlimit(pid, resource.RLIMIT_STACK, (0, 0))",
    "no files for": "resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))",
    "no time for": "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
}
# Each of the two file systems fits into the memory, both together do not.
_FILL = "mkdir {0}; for d in /workspace /tmp /dev/shm; do cat /dev/zero > $d/fill{0}; : > $d/{0}/x; done"
_NO_SPACE, _TOO_MUCH, _OUT = "No space left", "File size limit", "more memory than the sandbox allows"


class Case(NamedTuple):
    """The commands that hit one limit, and texts of which one is in the tools' replies, if the limit shows there."""

    commands: tuple[str, ...]
    shown: tuple[str, ...] = ()
    timeout_s: int = 5
    limits: Limits = LIMITS


CASES = {
    "memory of processes": Case(("python3 -c 'kept = bytearray(1 << 30)'",), (_OUT, "MemoryError")),
    "memory of many processes": Case(("for i in 1 2 3 4 5; do python3 -c 'kept = bytearray(30 << 20)' & done; wait",)),
    "memory of files": Case(tuple(_FILL.format(number) for number in range(60))),
    "memory of a file": Case(
        tuple(f"cat /dev/zero > fill{number}" for number in range(6)),
        (_NO_SPACE, _TOO_MUCH),
        limits=replace(LIMITS, disk_bytes=256 << 20),
    ),
    "memory of sockets": Case((_SOCKETS,), ("Too many open files", _OUT, "Resource temporarily", "not supported")),
    "disk_bytes": Case(("cat /dev/zero > fill",), (_NO_SPACE, _TOO_MUCH)),
    "inodes": Case((_INODES,)),
    "/tmp": Case(('cat /dev/zero > "${TMPDIR:-/tmp}/fill"',), (_NO_SPACE, _TOO_MUCH)),
    "/dev/shm": Case(("cat /dev/zero > /dev/shm/fill",), (_NO_SPACE, _TOO_MUCH, "Permission denied")),
    "pids": Case((_PROCESSES,), ("Resource temporarily unavailable",)),
    "fork bomb": Case(("f() { f | f & }; f; sleep 0.5",)),
    "open_files": Case((_FILES,), ("Too many open files",)),
    "output": Case(("head -c 3000000 /dev/zero | tr '\\0' x",), ("output_total_bytes",)),
    "time": Case(("sleep 1000 & sleep 1000",), ("timed out after 1s",), timeout_s=1),
    "deep directories": Case((_DEEP,)),
    "kill every process": Case(("kill -9 -1",)),
    "kill pid 1": Case(("kill -9 1; kill -TERM 1; kill -STOP 1; kill -SEGV 1",)),
    "kill the parent": Case(("kill -9 $PPID",)),
    "limits of pid 1": Case((_LIMIT % 1, "echo on"), ("Operation not permitted",)),
    "limits of the parent": Case(("exec " + _LIMIT % "os.getppid()", "echo on"), ("Operation not permitted",)),
}

if os.geteuid() != 0:  # then the level `confined` does not limit the number of processes
    del CASES["pids"], CASES["fork bomb"]


def commands_of(name: str) -> list[ToolStep]:
    commands = ("echo kept > answer.txt", *CASES[name].commands)
    return [ToolStep("terminal", {"command": command, "timeout": CASES[name].timeout_s}) for command in commands]


@environment(toolsets=["terminal"])
def limits():
    for name in CASES:
        task = Task(id=name, prompt="Write kept.", limits=CASES[name].limits)
        yield replace(task, solution=[*commands_of(name), Say("Done.")])
    # an agent that ends its slot without an answer: its 0 stays a 0
    nothing = [ToolStep("terminal", {"command": "kill -9 -1; kill -9 $PPID", "timeout": 1}), Say("Done.")]
    yield Task(id="nothing", prompt="Write kept.", limits=LIMITS, solution=nothing)


@environment(toolsets=["terminal"])
def graded_live():
    yield Task(id="live", prompt="Write kept.", limits=LIMITS, solution="echo kept > answer.txt", grading="live")


@limits.score
async def correct(task: Task, sandbox: Slot) -> bool:
    return (await sandbox.read_text("answer.txt", missing="")).strip() == "kept"


graded_live.score(correct)


@functools.cache
def played(level: str, folder: str) -> dict[str, Trajectory] | str:
    """The rollouts of one run by task, or why this machine has no such level."""
    try:
        run = rolled_out(limits, level, folder)
    except IsolationUnavailable as error:
        return str(error)
    return {group.task_id: group.trajectories[0] for group in run.groups}


def rolled_out(
    environment: FunctionEnvironment, level: str, folder: str, turns: int = 70, policy: str = "oracle"
) -> Run:
    """Play the solutions of an environment, or another policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)  # a user without a home directory has no other place
        return palaestra.run_sync(
            environment, policy=policy, isolation=level, group_size=1, folder=folder, max_agent_turns=turns
        )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("limits"))


def rollout_of(level: str, folder: str, name: str) -> Trajectory:
    rollouts = played(level, folder)
    if isinstance(rollouts, str):
        pytest.skip(rollouts)
    return rollouts[name]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_a_rollout_that_hits_a_limit_is_scored_on_its_work(name: str, level: str, folder: str) -> None:
    rollout = rollout_of(level, folder, name)
    assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.NATURAL, 1.0, "")
    replies = "\n".join(str(message["content"]) for message in rollout.messages if message["role"] == "tool")
    assert not CASES[name].shown or any(text in replies for text in CASES[name].shown), json.dumps(replies[:2000])


@pytest.mark.xdist_group("limits at full")
def test_files_can_use_up_the_memory_at_full(folder: str) -> None:
    rollout = rollout_of("full", folder, "memory of files")
    assert sum(_OUT in str(message["content"]) for message in rollout.messages) > 10


ATTACKS = {f"{what} each next process": (_NEXT % code, ":", ":", ":") for what, code in _ON_NEXT.items()}
ATTACKS |= {
    "stop every process": ("setsid sh -c 'for i in $(seq 300); do kill -STOP -1; done' & sleep 0.2", ":", ":"),
    "kill every process": ("setsid sh -c 'for i in $(seq 300); do kill -9 -1; done' & sleep 0.2", ":", ":"),
    "no shell": ("rm -f /bin/sh /bin/bash /usr/bin/sh /usr/bin/bash /usr/bin/dash", ":"),
    "no libraries": ("rm -rf /lib64/* /usr/lib/*", ":"),
    "no rights": ("chmod 0 . / /tmp", ":"),
    "control groups": ("for f in /sys/fs/cgroup/*/* /sys/fs/cgroup/*; do echo 0 > $f; done", ":"),
}
"""Commands of agents that keep further commands of their own slots from starting."""


@environment(toolsets=["terminal"])
def attacks():
    for name, commands in ATTACKS.items():
        for answer in ("kept", "wrong"):
            calls = [
                ToolStep("terminal", {"command": each, "timeout": 2})
                for each in (f"echo {answer} > answer.txt", *commands)
            ]
            yield Task(id=f"{name}, {answer}", prompt="Write kept.", limits=LIMITS, solution=[*calls, Say("Done.")])


attacks.score(correct)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
def test_an_agent_that_keeps_commands_from_starting_is_scored_on_its_work(level: str, folder: str) -> None:
    try:
        run = rolled_out(attacks, level, folder)
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    rollouts = {group.task_id: group.trajectories[0] for group in run.groups}
    assert {name: (each.reward, each.error) for name, each in rollouts.items()} == {
        f"{name}, {answer}": (reward, "") for name in ATTACKS for answer, reward in (("kept", 1.0), ("wrong", 0.0))
    }


@environment(toolsets=["terminal"])
def greedy():
    share_memory_with_inits()
    steps = [ToolStep("terminal", {"command": _FILL.format(number), "timeout": 5}) for number in range(150)]
    for kept in (True, False):
        first = ToolStep("terminal", {"command": f"echo {'kept' if kept else 'nothing'} > answer.txt"})
        yield Task(id=str(kept), prompt="Write kept.", limits=LIMITS, solution=[first, *steps, Say("Done.")])


greedy.score(correct)


def test_an_agent_whose_memory_is_its_inits_is_scored_on_its_work(folder: str) -> None:
    try:
        run = rolled_out(greedy, "full", folder, 200)
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    rollouts = {group.task_id: group.trajectories[0] for group in run.groups}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {"True": 1.0, "False": 0.0}
    for rollout in rollouts.values():
        assert (rollout.outcome, rollout.error) == (Outcome.NATURAL, "")
        assert "slot_ended" in rollout.detail
        assert "The sandbox has ended" in str(rollout.messages[-2]["content"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_agent_that_ends_its_slot_keeps_its_zero(level: str, folder: str) -> None:
    rollout = rollout_of(level, folder, "nothing")
    assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.NATURAL, 0.0, "")


@pytest.mark.parametrize("level", LEVELS)
def test_an_agent_that_ends_the_slot_in_which_it_is_graded_scores_zero(level: str, folder: str) -> None:
    policy = acting(
        Path(folder, f"live-{level}.jsonl"), {"live": ["echo kept > answer.txt", *CASES["kill the parent"].commands]}
    )
    try:
        run = rolled_out(graded_live, level, folder, policy=policy)
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    (rollout,) = run.groups[0].trajectories
    assert (rollout.outcome, rollout.error) == (Outcome.NATURAL, "")
    if level == "confined" and os.geteuid() != 0:  # commands and the init have the same user
        assert rollout.reward == 0.0
        assert {"slot_ended", "work_breaks_check"} <= set(rollout.detail)
    else:
        assert rollout.reward == 1.0


@pytest.mark.slow
def test_without_root() -> None:
    run_suite(Path(__file__), "not without_root and not keeps_commands_from_starting")
