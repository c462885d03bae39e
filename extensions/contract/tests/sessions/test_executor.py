"""Many trajectories at once: sticky slots, order within one trajectory, independence between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from golden_messages import raises
from palaestra.tools.call_text import result_of
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolCall, ToolReply, ToolResult, ToolRun, ToolSchema
from palaestra_contract.tools.executor import ToolExecutor, ToolExecutorConfig
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, IsolationUnavailable, SandboxError, StaleLease
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.sandbox.artifacts import (
    ArtifactArchiveRequestPayload,
    ArtifactListRequestPayload,
    ArtifactReadRequestPayload,
)
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec, Snapshot, View


class NamedSlot:
    """A slot that has a name and nothing else: the tools of these tests run no commands."""

    def __init__(self, slot_id: str, rung: Rung) -> None:
        self.slot_id = slot_id
        self.rung = rung


class Source:
    """Hands out named slots and writes down what happens to them."""

    def __init__(self, rung: Rung = Rung.FULL) -> None:
        self.rung = rung
        self.events: list[str] = []
        self.specs: list[SlotSpec | None] = []
        self.open = asyncio.Event()
        self.open.set()

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
    ) -> Slot:
        if trajectory_id == "unlucky":
            raise AcquireTimeout("no slot came free")
        self.specs.append(spec)
        await self.open.wait()
        self.events.append(f"acquire {trajectory_id}")
        return NamedSlot(f"slot of {trajectory_id}", self.rung)  # type: ignore[return-value]

    async def release(self, slot: Slot) -> None:
        self.events.append(f"release {slot.slot_id}")

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        raise NotImplementedError

    async def forget(self, snapshot: Snapshot) -> None:
        raise NotImplementedError


class Bench:
    """Tools whose calls begin and end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        schema = ToolSchema("hold", "", {"key": {"type": "string"}, "timeout": {"type": "integer"}}, ("key",))
        self.registry = ToolRegistry([FunctionTool(schema, self._hold, "bench")])

    async def _hold(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        slot = await run.slot()
        self.begun.append(arguments["key"])
        if arguments["key"] in self.gates:
            await self.gates[arguments["key"]].wait()
        return {
            "output": slot.slot_id,
            "exit_code": 0,
            "error": None,
            "timeout_s": run.timeout_s,
            "arguments": dict(arguments),
        }


def call(key: str, **more: JSON) -> ToolCall:
    return ToolCall("hold", {"key": key, **more})


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something has happened; a test that waits in vain fails by its time limit."""
    while not condition():  # noqa: ASYNC110 - passes the turn on, waits for no time
        await asyncio.sleep(0)


def run(scenario: Callable[[ToolExecutor, Source, Bench], Awaitable[None]], **config: JSON) -> Source:
    async def main() -> Source:
        source, bench = Source(), Bench()
        async with ToolExecutor(source, bench.registry, ToolExecutorConfig(**config)) as executor:
            await scenario(executor, source, bench)
        return source

    return asyncio.run(main())


def test_a_slot_is_leased_at_the_first_call_and_kept() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        results = [await executor.execute("t1", call(key)) for key in "ab"]
        assert [result.output for result in results] == ["slot of t1", "slot of t1"]
        assert results[0].uniq_id == call("a").uniq_id

    assert run(scenario).events == ["acquire t1", "release slot of t1"]


def test_a_slow_call_holds_up_its_own_trajectory_alone_and_order_is_kept() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        bench.gates["slow"] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(executor.execute("t1", call("slow")))
            await until(lambda: bench.begun == ["slow"])
            for key in ("second", "third"):
                group.create_task(executor.execute("t1", call(key)))
            assert (await executor.execute("t2", call("other"))).success
            await until(lambda: executor.queue_size() == 3)
            bench.gates["slow"].set()
        assert bench.begun == ["slow", "other", "second", "third"]

    run(scenario)


def test_a_failed_lease_fails_its_own_call_alone() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        with pytest.raises(AcquireTimeout):
            await executor.execute("unlucky", call("a"))
        assert (await executor.execute("t1", call("b"))).success
        assert (executor.stats.total_requests, executor.stats.total_errors) == (2, 1)

    run(scenario)


def test_policy_arguments_of_the_model_are_dropped_and_the_configuration_decides() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        result = await executor.execute("t1", call("a", allow_network=True, require_sandbox=False))
        assert result.metadata["arguments"] == {"key": "a"}
        assert source.specs == [SlotSpec(network=Network.OFF)]

    run(scenario, allow_network=False)


@pytest.mark.parametrize(("asked", "given"), [(0.0, 1.0), (7.5, 7.5), (9999.0, 600.0)])
def test_time_limits_are_clamped(asked: float, given: float) -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        result = await executor.execute("t1", call("a", timeout=3), timeout_s=asked)
        assert result.metadata["timeout_s"] == given
        assert "timeout" not in result.metadata["arguments"]

    run(scenario)


def test_an_external_tool_that_hangs_ends_at_the_limit_and_the_next_call_runs() -> None:
    async def hang(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        await asyncio.Event().wait()
        return {}

    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        executor.registry.register(FunctionTool(ToolSchema("ask", "", {}, external=True), hang, "bench"))
        result = await executor.execute("t1", ToolCall("ask", {}), timeout_s=1)
        assert "answer within 1 s." in result.error
        assert (await executor.execute("t1", call("a"))).success

    run(scenario)


def test_mistakes_are_results() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        malformed = ToolCall.parse_from_text("<tool_call>{</tool_call>")[0]
        assert "Malformed" in (await executor.execute("t1", malformed)).error
        assert (await executor.execute("t1", ToolCall("nothing", {}))).error == "Unknown tool: nothing"
        assert "missing required" in (await executor.execute("t1", ToolCall("hold", {}))).error
        for odd in ("[]", ["a"], None):
            refused = await executor.execute("t1", ToolCall("hold", odd))  # type: ignore[arg-type]
            assert refused.error.startswith("Invalid arguments")

    assert run(scenario).events == []


def test_a_released_trajectory_ends_waiting_calls_and_starts_afresh() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        bench.gates["slow"] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(executor.execute("t1", call("slow")))
            await until(lambda: bench.begun)
            waiting = group.create_task(refused(executor, "t1"))
            await until(lambda: executor.queue_size() == 2)
            await executor.release_trajectory("t1", reset_workspace=True)
            bench.gates["slow"].set()
            await waiting
        assert (await executor.execute("t1", call("fresh"))).success

    assert run(scenario).events == ["acquire t1", "release slot of t1"] * 2


def test_a_slot_that_arrives_after_the_release_is_given_back() -> None:
    async def scenario(executor: ToolExecutor, source: Source, bench: Bench) -> None:
        source.open.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(executor, "t1"))
            await until(lambda: source.specs)
            await executor.close()
            source.open.set()
        await refused(executor, "t2")

    assert run(scenario).events == ["acquire t1", "release slot of t1"]


async def refused(executor: ToolExecutor, trajectory_id: str) -> None:
    with pytest.raises(StaleLease):
        await executor.execute(trajectory_id, call("x"))


@pytest.mark.parametrize("switch", ["require_sandbox", "require_stateful_sandbox"])
async def test_require_sandbox_refuses_a_slot_that_is_isolated_less_well(switch: str) -> None:
    source = Source(Rung.CONFINED)
    config = ToolExecutorConfig(**{switch: True})
    async with ToolExecutor(pool=source, tools=Bench().registry, config=config) as executor:
        with pytest.raises(IsolationUnavailable, match="confined"):
            await executor.execute("t1", call("a"))
    assert source.events == ["acquire t1", "release slot of t1"]


def test_what_is_not_there_is_refused_at_once() -> None:
    with raises(ConfigError):
        ToolExecutor(Source(), ToolRegistry(), ToolExecutorConfig(tool_server_url="here"))
    with pytest.raises(ConfigError, match="hands out"):
        ToolExecutor(tools=ToolRegistry())


async def test_bash_is_another_name_of_terminal() -> None:
    async with ToolExecutor(Source(), build_tool_registry()) as executor:
        result = await executor.execute("t1", ToolCall("bash", {"command": "ls", "pty": True}))
    assert "pty needs background=true" in result.error


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ("text", ToolResult(True, "text")),
        ({"output": "x", "exit_code": 0, "error": None}, ToolResult(True, "x", metadata={"exit_code": 0})),
        ({"output": "x", "exit_code": 2, "error": None}, ToolResult(False, "x", "Exit code: 2", {"exit_code": 2})),
        (
            {"error": "gone", "similar_files": []},
            ToolResult(False, '{"similar_files": []}', "gone", {"similar_files": []}),
        ),
        ({"content": "1|a", "total_lines": 1}, ToolResult(True, "1|a", metadata={"total_lines": 1})),
        ({"error": "gone"}, ToolResult(False, "", "gone")),
    ],
)
def test_replies_become_results(reply: ToolReply, result: ToolResult) -> None:
    assert result_of(reply) == result


@pytest.mark.slots
async def test_in_real_slots_trajectories_are_apart_and_a_release_ends_what_runs() -> None:
    try:
        config = ToolExecutorConfig(allow_network=False)
        async with (
            SlotPool(SlotPoolConfig(max_slots=2), LocalBackend()) as pool,
            ToolExecutor(
                pool=pool, tools=build_tool_registry(["default", "terminal_stateful"]), config=config
            ) as executor,
        ):
            await executor.execute("t1", shell("echo one > mark"))
            assert (await executor.execute("t1", shell("cat mark"))).output == "one\n"
            failed = await executor.execute("t2", shell("echo out; cat mark"))
            assert (failed.metadata["exit_code"], failed.error) == (1, "Exit code: 1")
            assert failed.output == f"out\n\n[stderr]\n{failed.metadata['stderr']}"
            assert "mark" in failed.metadata["stderr"]
            assert failed.metadata["stdout"] == "out\n"
            assert (failed.metadata["network_isolated"], failed.metadata["stateful"]) == (True, False)
            kept = await executor.execute("t2", ToolCall("bash_stateful", {"command": "exit_code() { return 3; }"}))
            assert (kept.metadata["stateful"], kept.metadata["returncode"]) == (True, 0)
            read = await executor.read_artifact(ArtifactReadRequestPayload(trajectory_id="t1", path="mark"))
            assert (read.success, read.content) == (True, "one\n")
            absent = await executor.read_artifact(ArtifactReadRequestPayload(trajectory_id="t3", path="mark"))
            assert (absent.success, "no workspace" in absent.error) == (False, True)
            listed = await executor.list_artifacts(ArtifactListRequestPayload(trajectory_id="t1"))
            assert [each.path for each in listed.entries] == ["mark"]
            packed = await executor.archive_artifacts(ArtifactArchiveRequestPayload(trajectory_id="t1"))
            assert packed.entry_count == 1
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(lost(executor, "t1"))
                await until(lambda: executor.queue_size() == 1)
                assert (await executor.execute("t2", shell("echo two"))).output == "two\n"
                assert not ended.done()
                await executor.release_trajectory("t1")
            assert (await executor.execute("t1", shell("cat mark"))).success is False
    except IsolationUnavailable as error:
        pytest.skip(str(error))


def shell(command: str) -> ToolCall:
    return ToolCall("terminal", {"command": command})


async def lost(executor: ToolExecutor, trajectory_id: str) -> None:
    with pytest.raises(SandboxError):
        await executor.execute(trajectory_id, shell("sleep 600"))
