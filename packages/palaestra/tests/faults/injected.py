"""An environment whose world breaks according to a plan: every fault is a real one, and it is known whose it is."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from palaestra.agent.result import AgentResult
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import Kit
from palaestra_slots.core.errors import GraderError
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON, Blame, Limits, Score, Task
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.engines.scripted import OraclePolicy, ScriptedEngine
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

ENGINE_FAULTS: Mapping[str, FakeAnswer] = {
    "429": FakeAnswer({"error": {"message": "slow down"}}, status=429),
    "503": FakeAnswer({"error": {"message": "overloaded"}}, status=503),
    "cut stream": FakeAnswer(cut=True),
    "half a reply": FakeAnswer(b'{"choices": [{"mess'),
    "no choice": FakeAnswer(completion() | {"choices": []}),
    "no answer in time": FakeAnswer(hang=True),
    "abort": FakeAnswer(completion("I was about to", finish="abort")),
}

OWN_LIMITS: Mapping[str, tuple[str, str]] = {
    "the agent's command is out of memory": (
        "python3 -c 'bytearray(400 << 20)'",
        "more memory than the sandbox allows",
    ),
    "the agent's disk is full": ("head -c 32000000 /dev/zero > big; rm big", "No space left on device"),
}
"""A command that meets the slot's own limits, and what its answer says. The slot holds: this is the agent's to mend."""

FAULTS: Mapping[str, Blame | None] = {
    **dict.fromkeys(ENGINE_FAULTS, Blame.ENGINE),
    "aborted for ever": Blame.ENGINE,
    **dict.fromkeys(OWN_LIMITS, None),
    "the agent's slot dies": Blame.SANDBOX,
    "the grading slot dies": Blame.SANDBOX,
    "a tool hangs": Blame.TOOL,
    "the grader raises": Blame.GRADER,
    "the grader gives no number": Blame.GRADER,
    "the grader ran no test": Blame.GRADER,
    "the grader hangs": Blame.GRADER,
    "the disk is full": Blame.GRADER,
    "the grader is out of memory": Blame.GRADER,
}
"""Every fault and whose it is; None where it is none of the world's, and the rollout has its reward."""

IDLE_LIMITS = {"tool": 10.0, "grade": 10.0}
MEGABYTE = 1 << 20


class BrokenWorld(Environment):
    """Tasks that the oracle solves. `plan` has the faults of each rollout's attempts, in order; afterwards none.

    `injected` records what each attempt met; the empty string is nothing.
    """

    def __init__(self, tasks: int, plan: Mapping[str, list[str]]) -> None:
        self._tasks = tasks
        self._plan = {rollout_id: list(faults) for rollout_id, faults in plan.items()}
        self.injected: defaultdict[str, list[str]] = defaultdict(list)
        self._servers: dict[str, LoopbackServer] = {}
        self._engines: dict[str, OpenAIEngine] = {}
        self._oracle = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="oracle"), OraclePolicy())

    @property
    def name(self) -> str:
        return "broken_world"

    async def open(self) -> None:
        for fault, answer in ENGINE_FAULTS.items():
            self._servers[fault] = await LoopbackServer(answer).__aenter__()
            url = f"{self._servers[fault].url}/v1"
            config = APIServerConfig(base_url=url, model_name="m", timeout=1 if answer.hang else 60)
            self._engines[fault] = OpenAIEngine(config, retry=RetryPolicy(attempts=2, first_s=0.01))

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()
        for server in self._servers.values():
            await server.__aexit__()

    async def tasks(self) -> AsyncIterator[Task]:
        limits = Limits(memory_bytes=96 * MEGABYTE, disk_bytes=8 * MEGABYTE)
        for number in range(self._tasks):
            yield Task(id=f"t{number}", prompt="?", solution=["touch done"], limits=limits)

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(build_tool_registry(enabled_toolsets=["terminal"]))

    async def begin(self, rollout: Rollout) -> None:
        if rollout.spec.replays:  # the world is as broken for the reference solution
            rollout.meta["fault"] = self.injected[rollout.rollout_id.replace(":reference", "")][-1]
            return
        left = self._plan.get(rollout.rollout_id)
        fault = left.pop(0) if left else ""
        self.injected[rollout.rollout_id].append(fault)
        rollout.meta["fault"] = fault
        if fault == "aborted for ever":
            rollout.seat.use_server(ManagedChat(Aborting(), ChatFormat(toy_tokenizer())))
        elif fault in OWN_LIMITS:
            trying = replace(rollout.task, solution=[OWN_LIMITS[fault][0], "touch done"])
            rollout.seat.use_server(self._oracle.session(SessionContext(rollout_id=rollout.rollout_id, task=trying)))
        elif fault in self._engines:
            rollout.seat.use_server(self._engines[fault].session(SessionContext(rollout_id=rollout.rollout_id)))
        elif fault in ("the agent's slot dies", "a tool hangs"):
            stuck = replace(rollout.task, solution=[sleeping(rollout)])
            rollout.seat.use_server(self._oracle.session(SessionContext(rollout_id=rollout.rollout_id, task=stuck)))

    async def act(self, rollout: Rollout) -> AgentResult:
        if rollout.meta["fault"] != "the agent's slot dies":
            return await rollout.run_agent()
        killing = asyncio.create_task(kill_slot(sleeping(rollout)))
        try:
            return await rollout.run_agent()
        finally:
            killing.cancel()

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        slot, fault = await grading.slot(), rollout.meta["fault"]
        if fault in OWN_LIMITS and not any(OWN_LIMITS[fault][1] in str(each["content"]) for each in rollout.messages):
            raise AssertionError(f"{fault}: the agent was not told")
        match fault:
            case "the grading slot dies":
                killing = asyncio.create_task(kill_slot(sleeping(rollout)))
                try:
                    await slot.execute(sleeping(rollout), timeout_s=60)
                finally:
                    killing.cancel()
            case "the grader raises":
                raise KeyError("a column that is not there")
            case "the grader gives no number":
                return Score(float("nan"))
            case "the grader ran no test":
                raise GraderError("none of the 3 tests was reported")
            case "the grader hangs":
                await asyncio.Event().wait()
            case "the disk is full":
                await must_run(slot, f"head -c {32 * MEGABYTE} /dev/zero > big", "No space left on device")
            case "the grader is out of memory":
                await must_run(slot, f"python3 -c 'bytearray({400 * MEGABYTE})'", "")
        return Score(float(await slot.stat("done") is not None))


class Aborting:
    """A token engine that is always in the middle of a weight update."""

    name = "aborting"

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        return Sampled([0], [-1.0], "abort")


def sleeping(rollout: Rollout) -> str:
    """A command that nobody else runs, on this machine or in another run of these tests."""
    number = sum(ord(letter) * 131**place for place, letter in enumerate(rollout.rollout_id)) % 10**6
    return f"sleep 3{os.getpid():07d}.{number:06d}"


async def must_run(slot: Slot, command: str, says: str) -> None:
    """A check whose command fails for the world's reasons; a world that does not fail here makes the test fail."""
    done = await slot.execute(command, timeout_s=60)
    if done.success:
        raise AssertionError(f"{command} worked")
    assert says in done.output, done.output
    raise OSError(errno.ENOSPC if says else errno.ENOMEM, f"the check ended with {done.error}")


async def kill_slot(command: str) -> None:
    """SIGKILL the init of the slot in which the command runs, as soon as it runs."""
    wanted = command.replace(" ", "\0").encode()
    while True:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cmdline").read_bytes().rstrip(b"\0") == wanted:
                    os.kill(init_of(int(entry.name)), signal.SIGKILL)
                    return
            except OSError:
                continue
        await asyncio.sleep(0.02)


def init_of(pid: int) -> int:
    """The outermost process of a slot that this one is in: the first whose parent is in another pid namespace."""
    here = Path(f"/proc/{pid}/ns/pid").readlink()
    while True:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/ns/pid").readlink() != here:
            return pid
        pid = parent
