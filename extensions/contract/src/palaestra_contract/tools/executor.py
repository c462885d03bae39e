"""Runs tool calls for many trajectories: `ToolExecutor`, the interface to tools in slots that the project's interface
contract defines.

It serves code that names trajectories by id and lets the executor lease, keep and return their slots. The agent loop
uses one `ToolRuntime` per rollout instead.

Invariant: calls of one trajectory run one at a time in the order they were made; calls of different trajectories run
concurrently. A trajectory keeps one slot from the first call that needs it to its release. The configuration, not the
model's arguments, decides on network and isolation.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict

from palaestra.tools.builtin.delegate_task import Assignment, Delegation, SubagentReport, Work
from palaestra.tools.builtin.terminal import ContractReplies, clamp_timeout
from palaestra.tools.call_text import ToolCall, ToolResult, result_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolMiddleware, ToolRecordings, ToolRuntime
from palaestra.tools.tool import States, ToolOutcome
from palaestra_contract.tools.tool_server_client import ToolServerLink
from palaestra_slots.core.cancel_scope import Ending
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, StaleLease
from palaestra_slots.core.types import JSON, AllowList, Network
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import ProcessSession
from palaestra_slots.sandbox import artifacts
from palaestra_slots.sandbox.artifacts import (
    ArtifactArchiveRequestPayload,
    ArtifactArchiveResponsePayload,
    ArtifactListRequestPayload,
    ArtifactListResponsePayload,
    ArtifactReadRequestPayload,
    ArtifactReadResponsePayload,
)
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSource, SlotSpec

POLICY_ARGUMENTS = frozenset({"allow_network", "require_sandbox", "require_stateful_sandbox"})
"""Arguments that `ToolExecutor.execute` drops, because the configuration decides them."""
_KEPT_LATENCIES = 1024
_CONTRACT_REPLIES = ContractReplies()


class ToolExecutorConfig(BaseModel):
    """The permissions and limits of an executor's calls. The project's interface contract fixes the field names and
    defaults, except `timeout_s`."""

    model_config = ConfigDict(extra="forbid")

    batch_window_ms: int = 20
    """Accepted for old configurations; each call is sent immediately."""
    max_batch_size: int = 200
    """Accepted for old configurations, like `batch_window_ms`."""
    allow_network: bool = True
    """Whether slots have a network."""
    require_sandbox: bool = False
    """Refuse slots below isolation level userns."""
    require_stateful_sandbox: bool = False
    """The same as `require_sandbox`, because stateful shells run in the same slots."""
    tool_server_url: str | None = None
    """The address of the `palaestra serve tools` server for external tools. If it is None or `inprocess`, this process
    runs external tools."""
    tool_server_token: str | None = None
    """The bearer token for the tool server."""
    timeout_s: float = 120.0
    """Time limit of a command in seconds, unless the call sets one."""


class DelegationSource(Protocol):
    """Does the work of `delegate_task` for the trajectories of a `ToolExecutor`. Their agents run elsewhere."""

    def work(self, tools: ToolRuntime) -> Work:
        """Return the work function of the trajectory with these tools."""
        ...

    async def aclose(self) -> None:
        """Close connections. Later work opens them again. Idempotent."""
        ...


@dataclass(slots=True)
class ExecutorStats:
    """Counts since the start, and the latest latencies in seconds."""

    total_requests: int
    total_errors: int
    latencies_s: deque[float]


class ToolExecutor:
    """Binds tool calls to trajectories' slots. An async context manager; `close` gives back every slot.

    `backend` (or `pool`, another name for it) hands out the slots, made from `spec` with the configured network.
    `shared` are objects that the tools of all trajectories share, such as `Approvals`. `delegates` do the work of
    `delegate_task` and are closed with the executor. `world` (made by `open_world`) records or replays the calls of
    tools that have `touches_world`; the caller closes it. If a released trajectory makes calls again, they are recorded
    as those of a second trajectory, `NAME#2`. Tools may be added to the attribute `registry` later.
    """

    def __init__(
        self,
        backend: SlotSource | None = None,
        tools: ToolRegistry | None = None,
        config: ToolExecutorConfig | None = None,
        *,
        pool: SlotSource | None = None,
        spec: SlotSpec | None = None,
        shared: Iterable[object] = (),
        delegates: DelegationSource | None = None,
        world: ToolRecordings | None = None,
    ) -> None:
        source = backend if backend is not None else pool
        if source is None:
            raise ConfigError("ToolExecutor needs backend= or pool=, which hands out its slots")
        self.config = config or ToolExecutorConfig()
        self.registry = tools if tools is not None else ToolRegistry()
        if world is not None and world.replayed and not self.registry.replayed:
            self.registry = self.registry.with_tools(replayed=True)
        self._link: ToolServerLink | None = None
        if self.config.tool_server_url is not None:
            self._link = ToolServerLink(self.config.tool_server_url, self.config.tool_server_token)
            self.registry = self.registry.with_tools(self._link.served(self.registry.tools()))
        self._own = States()
        self.shared = self.registry.shared if self.registry.shared is not None else self._own
        self.source = source
        self.spec = _with_network(spec or SlotSpec(), self.config.allow_network)
        self.lent = tuple(shared)
        self.delegates = delegates
        self.stats = ExecutorStats(0, 0, deque(maxlen=_KEPT_LATENCIES))
        self._world = world
        self._lives: Counter[str] = Counter()
        self.trajectories: dict[str, TrajectoryTools] = {}
        self._in_flight = 0
        self._closed = False

    async def start(self) -> None:
        """Do nothing, because calls run in the tasks of their callers. The method exists because the interface contract
        requires it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def queue_size(self) -> int:
        """Return the number of calls that run or wait for a slot or their turn."""
        return self._in_flight

    async def execute(self, trajectory_id: str, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Run one call with the trajectory's tools and slot. Cancelling it kills the command. Mistakes of the model and
        failures of a tool are results. Raises `PalaestraError`, for example an `InfraError`.

        `timeout_s`, if given, replaces the call's own `timeout`. It is clamped to between 1 and 600 seconds, and ends
        commands and external tools. Other tools may read it (`run.timeout_s`).
        """
        started = time.monotonic()
        self.stats.total_requests += 1
        self._in_flight += 1
        succeeded = False
        try:
            result = await self._execute_call(trajectory_id, call, timeout_s)
            succeeded = result.success
            return result
        finally:
            self._in_flight -= 1
            self.stats.total_errors += not succeeded
            self.stats.latencies_s.append(time.monotonic() - started)

    async def _execute_call(self, trajectory_id: str, call: ToolCall, timeout_s: float | None) -> ToolResult:
        name = self.registry.known_as(call.name)
        error = call.error
        if not error and self.registry.get(name) is None:
            why = self.registry.missing.get(name)
            error = f"Unknown tool: {call.name}" if why is None else f"{name} cannot be used here: {why}"
        if error:
            return ToolResult(False, error=error, uniq_id=call.uniq_id)
        arguments: Mapping[str, JSON] | str = call.arguments
        if isinstance(arguments, Mapping):  # anything else is refused, or is JSON text
            decided = POLICY_ARGUMENTS if timeout_s is None else POLICY_ARGUMENTS | {"timeout"}
            arguments = {key: value for key, value in arguments.items() if key not in decided}
        limit_s = None if timeout_s is None else clamp_timeout(timeout_s)
        trajectory = self.trajectory(trajectory_id)
        trajectory.tools.share(_CONTRACT_REPLIES)
        outcome = await trajectory.call(name, arguments, limit_s)
        return result_of(outcome.reply, call.uniq_id)

    async def read_artifact(self, request: ArtifactReadRequestPayload) -> ArtifactReadResponsePayload:
        """Read a file of the trajectory's workspace. If that fails, the response has an `error`. Raises
        `InfraError`."""
        work = artifacts.read(self.slot_of(request.trajectory_id), request)
        return await artifacts.or_error(work, ArtifactReadResponsePayload)

    async def list_artifacts(self, request: ArtifactListRequestPayload) -> ArtifactListResponsePayload:
        """List a directory of the trajectory's workspace."""
        work = artifacts.list_entries(self.slot_of(request.trajectory_id), request)
        return await artifacts.or_error(work, ArtifactListResponsePayload)

    async def archive_artifacts(self, request: ArtifactArchiveRequestPayload) -> ArtifactArchiveResponsePayload:
        """Pack a file or directory of the trajectory's workspace into a compressed tar file."""
        work = artifacts.archive(self.slot_of(request.trajectory_id), request)
        return await artifacts.or_error(work, ArtifactArchiveResponsePayload)

    def slot_of(self, trajectory_id: str) -> Slot | None:
        """Return the trajectory's current slot, or None before its first call that needs a slot."""
        known = self.trajectories.get(trajectory_id)
        return None if known is None else known.slot

    def trajectory(self, trajectory_id: str) -> TrajectoryTools:
        """Return the trajectory with this id, which is created on first use. Raises `StaleLease` if the executor is
        closed."""
        if self._closed:
            raise StaleLease(f"The executor is closed; trajectory {trajectory_id} cannot make further calls")
        known = self.trajectories.get(trajectory_id)
        if known is None:
            middleware = []
            if self._world is not None:
                self._lives[trajectory_id] += 1
                life = self._lives[trajectory_id]
                middleware.append(self._world.rollout(trajectory_id if life == 1 else f"{trajectory_id}#{life}"))
            known = self.trajectories[trajectory_id] = TrajectoryTools(self, trajectory_id, middleware)
        return known

    async def is_busy(self, trajectory_id: str) -> bool:
        """Return whether the trajectory has a running background process."""
        known = self.trajectories.get(trajectory_id)
        return known is not None and await known.is_busy()

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = False) -> None:
        """Give back the trajectory's slot. Calls that use the slot or wait for their turn raise `StaleLease`; a later
        call gets a new slot.

        `reset_workspace` is part of the interface contract and has no effect, because no returned slot is reused
        without a reset.
        """
        known = self.trajectories.pop(trajectory_id, None)
        if known is not None:
            await known.release()

    async def close(self) -> None:
        """Give back all slots, as `release_trajectory` does. Later calls raise `StaleLease`. Idempotent."""
        self._closed = True
        while self.trajectories:
            await self.release_trajectory(next(iter(self.trajectories)))
        if self._link is not None:
            await self._link.aclose()
        if self.delegates is not None:
            await self.delegates.aclose()
        await self._own.aclose()

    async def lease(self, trajectory_id: str) -> Slot:
        """Return a fresh slot that meets the configuration. Raises `IsolationUnavailable`."""
        slot = await self.source.acquire(trajectory_id, spec=self.spec)
        if (self.config.require_sandbox or self.config.require_stateful_sandbox) and slot.rung < Rung.USERNS:
            await self.source.release(slot)
            raise IsolationUnavailable(
                f"require_sandbox requires the level userns or better, but this slot has {slot.rung.label}"
            )
        return slot


class TrajectoryTools:
    """One trajectory: its `tools`, its `slot` once it has one, and the order of its calls.

    Direct calls of `tools` do not wait for the trajectory's other calls and are not counted in the statistics.
    """

    def __init__(self, executor: ToolExecutor, trajectory_id: str, middleware: Sequence[ToolMiddleware]) -> None:
        timeout_s = executor.config.timeout_s
        self.tools = tools = ToolRuntime(
            executor.registry,
            self.lease,
            trajectory_id,
            timeout_s=timeout_s,
            middleware=middleware,
            shared=executor.shared,
        )
        self.slot: Slot | None = None
        self._executor = executor
        self._trajectory_id = trajectory_id
        self._delegated = Ending()
        self._turn = asyncio.Lock()  # asyncio locks are first come, first served
        self._released = False
        for thing in executor.lent:
            tools.share(thing)
        if executor.delegates is None:
            tools.share(Delegation(missing="no model server was given for sub-agents (delegates=)"))
        else:
            tools.share(Delegation(self._ending(executor.delegates.work(tools))))

    async def call(self, name: str, arguments: Mapping[str, JSON] | str, timeout_s: float | None = None) -> ToolOutcome:
        """Run one call after all earlier calls of the trajectory. Raises `PalaestraError`, for example `StaleLease` if
        the trajectory has been released."""
        async with self._turn:
            self._check_lease()
            return await self.tools.call(name, arguments, timeout_s=timeout_s)

    async def spawn(self, command: str, **options: JSON) -> ProcessSession:
        """Start a background process in the slot; `options` and errors are those of `ProcessRegistry.spawn`."""
        async with self._turn:
            self._check_lease()
            slot = await self.tools.slot()
            return await self.tools.state(ProcessRegistry).spawn(slot, command, task_id=self._trajectory_id, **options)

    async def is_busy(self) -> bool:
        """Return whether the trajectory has a running background process."""
        return await self.tools.state(ProcessRegistry).has_active_processes(self._trajectory_id)

    async def lease(self) -> Slot:
        """Return the trajectory's slot, acquired if it has none yet."""
        if self.slot is None:
            slot = await self._executor.lease(self._trajectory_id)
            if self._released:  # the trajectory was released while this call waited for a slot
                await self._executor.source.release(slot)
                self._check_lease()
            self.slot = slot
        return self.slot

    def take_up(self, slot: Slot) -> None:
        """Use this slot, which the trajectory already had in an earlier process."""
        self.slot = slot

    async def release(self) -> None:
        """End the delegated work and the tools, then give back the slot."""
        # First, so that calls that wait for their turn fail and do not lease another slot.
        self._released = True
        await self._delegated.end()
        slot, self.slot = self.slot, None
        try:
            await self.tools.aclose()
        finally:
            if slot is not None:
                await self._executor.source.release(slot)

    def _ending(self, done: Work) -> Work:
        """Return a function that does the same work but ends with the trajectory, because the work may wait a long time
        for a model."""

        async def work(assignments: Sequence[Assignment]) -> list[SubagentReport]:
            released = StaleLease(f"Trajectory {self._trajectory_id} was released while sub-agents worked for it")
            async with self._delegated.block(released):
                return await done(assignments)

        return work

    def _check_lease(self) -> None:
        if self._released:
            raise StaleLease(f"Trajectory {self._trajectory_id} was released while this call was waiting")


def _with_network(spec: SlotSpec, allow: bool) -> SlotSpec:
    if allow and isinstance(spec.network, AllowList):
        return spec  # `allow_network` does not widen an allow list
    return replace(spec, network=Network.ON if allow else Network.OFF)
