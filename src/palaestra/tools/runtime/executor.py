"""Run tool calls for many trajectories at once: `ToolExecutor`, the contract's front door to tools in slots.

For code that names trajectories by id and lets the executor lease, keep and return their slots. The agent loop uses one
`ToolRuntime` per rollout instead.

Invariant: calls of one trajectory run one at a time in the order they were made; calls of different trajectories never
wait for each other. A trajectory keeps one slot from its first call to its release. What a call may do (network,
isolation) comes from the configuration, never from the model's arguments. External tools run at the tool server, where
the configuration names one, and never take a slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from palaestra.core.cancel_scope import Ending
from palaestra.core.errors import ConfigError, IsolationUnavailable, StaleLease
from palaestra.core.types import JSON, AllowList, Network
from palaestra.processes.registry import ProcessRegistry
from palaestra.processes.session import ProcessSession
from palaestra.sandbox.slot import Rung, Slot, SlotSource, SlotSpec
from palaestra.tools.builtin.delegate_task import Assignment, Delegation, SubagentReport, Work
from palaestra.tools.builtin.terminal import clamp_timeout
from palaestra.tools.call_text import ToolCall, ToolResult, result_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolMiddleware, ToolRecordings, ToolRuntime
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.serving import artifacts
from palaestra.tools.serving.payloads import (
    ArtifactArchiveRequestPayload,
    ArtifactArchiveResponsePayload,
    ArtifactListRequestPayload,
    ArtifactListResponsePayload,
    ArtifactReadRequestPayload,
    ArtifactReadResponsePayload,
)
from palaestra.tools.serving.tool_server_client import ToolServerLink
from palaestra.tools.tool import ToolOutcome

logger = logging.getLogger(__name__)

POLICY_ARGUMENTS = frozenset({"allow_network", "require_sandbox", "require_stateful_sandbox"})
"""Argument names that are dropped from every call: they are the configuration's to decide."""
_KEPT_LATENCIES = 1024


class ToolExecutorConfig(BaseModel):
    """What every call of an executor may do. Field names and defaults are the contract's."""

    model_config = ConfigDict(extra="forbid")

    batch_window_ms: int = 20
    """Accepted for old configurations; calls are sent one by one, at once."""
    max_batch_size: int = 200
    """Accepted for old configurations, like `batch_window_ms`."""
    allow_network: bool = True
    """Whether slots have a network. The contract's default is yes."""
    require_sandbox: bool = False
    """Refuse slots that are isolated less well than rung userns."""
    require_stateful_sandbox: bool = False
    """The same as `require_sandbox`: stateful shells live in the same slots."""
    tool_server_url: str | None = None
    """Where external tools run: an address of `palaestra serve tools`, `inprocess` for a server without a socket, or
    None for where the executor is."""
    tool_server_token: str | None = None
    """The bearer token of that server."""


class DelegationSource(Protocol):
    """Does the work of `delegate_task` for the trajectories of a `ToolExecutor`, whose agents are elsewhere."""

    def work(self, tools: ToolRuntime) -> Work:
        """What does it for the trajectory that has these tools."""
        ...

    async def aclose(self) -> None:
        """Close what the work has opened. Later work opens it again. Idempotent."""
        ...


@dataclass(slots=True)
class ExecutorStats:
    """Counts since the start, and the latest latencies in seconds."""

    total_requests: int
    total_errors: int
    latencies_s: deque[float]


class ToolExecutor:
    """Binds tool calls to trajectories' slots. An async context manager; `close` gives every slot back.

    `backend` (or `pool`, the same) hands out the slots. `spec` is what they are made from; the configuration
    decides its network. `shared` are objects that the tools of all trajectories have together, such as `Approvals`.
    `delegates` do the work of `delegate_task`; they are closed with the executor.
    `world` answers for the tools that touch the world, at a tool server too: it records their replies, or has them
    recorded (`open_world`); it is its owner's to close. A trajectory that was released and comes back is another one
    there, `NAME#2`.
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
            raise ConfigError("ToolExecutor needs backend= or pool=: what hands out its slots")
        self._source = source
        self._tools = tools if tools is not None else ToolRegistry()
        if world is not None and world.replayed and not self._tools.replayed:
            self._tools = self._tools.with_tools(replayed=True)
        self._config = config or ToolExecutorConfig()
        self._link: ToolServerLink | None = None
        if self._config.tool_server_url is not None:
            self._link = ToolServerLink(self._config.tool_server_url, self._config.tool_server_token)
            self._tools = self._tools.with_tools(self._link.served(self._tools.tools()))
        self._spec = _with_network(spec or SlotSpec(), self._config.allow_network)
        self._lent = tuple(shared)
        self._delegates = delegates
        self._worlds = world
        self._lives: Counter[str] = Counter()
        self._own = States()
        self._shared = self._tools.shared if self._tools.shared is not None else self._own
        self._bindings: dict[str, _Binding] = {}
        self._in_flight = 0
        self._closed = False
        self.stats = ExecutorStats(0, 0, deque(maxlen=_KEPT_LATENCIES))

    @property
    def registry(self) -> ToolRegistry:
        """The tools that calls find. One that is registered while the executor is at work is found from then on."""
        return self._tools

    async def start(self) -> None:
        """Nothing to do: calls are dispatched by the tasks that make them. Kept for the contract."""

    async def __aenter__(self) -> ToolExecutor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def queue_size(self) -> int:
        """Calls that are running or waiting for a slot or for their turn."""
        return self._in_flight

    async def execute(self, trajectory_id: str, call: ToolCall, timeout_s: float | None = None) -> ToolResult:
        """Run one call in the trajectory's slot. Cancelling it kills the command.

        The time limit is `timeout_s`, else the call's own `timeout`, within 1 to 600 seconds: commands and external
        tools end with it, other tools of one's own are told it (`run.timeout_s`). Mistakes of the model and failures of
        a tool are results; the world's failure raises `InfraError`.
        """
        started = time.monotonic()
        self.stats.total_requests += 1
        self._in_flight += 1
        succeeded = False
        try:
            result = await self._execute(trajectory_id, call, timeout_s)
            succeeded = result.success
            return result
        finally:
            self._in_flight -= 1
            self.stats.total_errors += not succeeded
            self.stats.latencies_s.append(time.monotonic() - started)

    async def _execute(self, trajectory_id: str, call: ToolCall, timeout_s: float | None) -> ToolResult:
        if call.error:
            return ToolResult(False, error=call.error, uniq_id=call.uniq_id)
        name = self._tools.known_as(call.name)
        if self._tools.get(name) is None:
            why = self._tools.missing.get(name)
            error = f"Unknown tool: {call.name}" if why is None else f"{name} cannot be used here: {why}"
            return ToolResult(False, error=error, uniq_id=call.uniq_id)
        arguments: Mapping[str, JSON] | str = call.arguments
        if timeout_s is not None:
            timeout_s = clamp_timeout(timeout_s)
        if isinstance(arguments, Mapping):  # others are refused as a model's are, or are its JSON text
            decided = POLICY_ARGUMENTS if timeout_s is None else POLICY_ARGUMENTS | {"timeout"}
            arguments = {key: value for key, value in arguments.items() if key not in decided}
        outcome = await self.call(trajectory_id, name, arguments, timeout_s)
        return result_of(outcome.reply, call.uniq_id)

    async def call(
        self,
        trajectory_id: str,
        name: str,
        arguments: Mapping[str, JSON] | str,
        timeout_s: float | None = None,
    ) -> ToolOutcome:
        """Run one call as `execute` does, without its statistics."""
        return await self._binding(trajectory_id).run(name, arguments, timeout_s)

    async def read_artifact(self, request: ArtifactReadRequestPayload) -> ArtifactReadResponsePayload:
        """A file of the trajectory's workspace. What cannot be read is a response with `error`."""
        work = artifacts.read(self.slot_of(request.trajectory_id), request)
        return await artifacts.told(work, ArtifactReadResponsePayload)

    async def list_artifacts(self, request: ArtifactListRequestPayload) -> ArtifactListResponsePayload:
        """What lies in a directory of the trajectory's workspace."""
        work = artifacts.entries(self.slot_of(request.trajectory_id), request)
        return await artifacts.told(work, ArtifactListResponsePayload)

    async def archive_artifacts(self, request: ArtifactArchiveRequestPayload) -> ArtifactArchiveResponsePayload:
        """A file or directory of the trajectory's workspace as a compressed tar file."""
        work = artifacts.archive(self.slot_of(request.trajectory_id), request)
        return await artifacts.told(work, ArtifactArchiveResponsePayload)

    def slot_of(self, trajectory_id: str) -> Slot | None:
        """The slot that the trajectory has now; None before its first call that needs one."""
        binding = self._bindings.get(trajectory_id)
        return None if binding is None else binding.slot

    def take_up(self, slot: Slot) -> None:
        """Make a slot that was there before, as in a service, the one of its trajectory."""
        self._binding(slot.trajectory_id).slot = slot

    def tools_of(self, trajectory_id: str) -> ToolRuntime:
        """The trajectory's tools as the executor binds them: for an agent of its own that calls them beside it.

        Calls through these do not wait for the trajectory's others, and have no part in the statistics.
        """
        return self._binding(trajectory_id).tools

    def delegation(self, tools: ToolRuntime) -> Delegation:
        """Who does work for a trajectory that has these tools."""
        if self._delegates is None:
            return Delegation(missing="no model server was given for sub-agents (delegates=)")
        return Delegation(self._delegates.work(tools))

    async def spawn(self, trajectory_id: str, command: str, **options: JSON) -> ProcessSession:
        """Start a background process in the trajectory's slot; `options` and errors are `ProcessRegistry.spawn`'s."""
        return await self._binding(trajectory_id).spawn(command, options)

    def _binding(self, trajectory_id: str) -> _Binding:
        if self._closed:
            raise StaleLease(f"The executor is closed; trajectory {trajectory_id} cannot make further calls")
        if trajectory_id not in self._bindings:
            self._bindings[trajectory_id] = _Binding(
                self,
                self._tools,
                trajectory_id,
                shared=self._shared,
                lent=self._lent,
                middleware=self._recorded(trajectory_id),
            )
        return self._bindings[trajectory_id]

    def _recorded(self, trajectory_id: str) -> Sequence[ToolMiddleware]:
        if self._worlds is None:
            return ()
        self._lives[trajectory_id] += 1
        life = self._lives[trajectory_id]
        return (self._worlds.rollout(trajectory_id if life == 1 else f"{trajectory_id}#{life}"),)

    async def release_trajectory(self, trajectory_id: str, reset_workspace: bool = False) -> None:
        """Give the trajectory's slot back. Its unfinished calls raise `StaleLease`; a later call gets a new slot.

        `reset_workspace` is the contract's: a slot that was given back is never handed out again as it was.
        """
        binding = self._bindings.pop(trajectory_id, None)
        if binding is not None:
            await binding.release()

    async def is_busy(self, trajectory_id: str) -> bool:
        """Whether a background process of the trajectory runs."""
        binding = self._bindings.get(trajectory_id)
        return binding is not None and await binding.is_busy()

    async def close(self) -> None:
        """Give all slots back. Unfinished calls raise `StaleLease`. Idempotent."""
        self._closed = True
        while self._bindings:
            await self.release_trajectory(next(iter(self._bindings)))
        if self._link is not None:
            await self._link.aclose()
        if self._delegates is not None:
            await self._delegates.aclose()
        await self._own.aclose()

    async def lease(self, trajectory_id: str) -> Slot:
        """A fresh slot that meets the configuration."""
        slot = await self._source.acquire(trajectory_id, spec=self._spec)
        wanted = self._config.require_sandbox or self._config.require_stateful_sandbox
        if wanted and slot.rung < Rung.USERNS:
            await self._source.release(slot)
            raise IsolationUnavailable(
                f"require_sandbox asks for rung userns or better, but this slot has rung {slot.rung.label}"
            )
        return slot

    async def give_back(self, slot: Slot) -> None:
        """End a lease."""
        await self._source.release(slot)


class _Binding:
    """One trajectory: its tools, its slot once it has one, and the turn order of its calls."""

    def __init__(
        self,
        executor: ToolExecutor,
        tools: ToolRegistry,
        trajectory_id: str,
        *,
        shared: States,
        lent: Iterable[object] = (),
        middleware: Sequence[ToolMiddleware] = (),
    ) -> None:
        self._executor = executor
        self._trajectory_id = trajectory_id
        self._delegated = Ending()
        self.tools = ToolRuntime(tools, self._lease, trajectory_id, shared=shared, middleware=middleware)
        for thing in (*lent, self._delegation(executor.delegation(self.tools))):
            self.tools.share(thing)
        self._turn = asyncio.Lock()  # asyncio locks are first come, first served
        self.slot: Slot | None = None
        self._released = False

    async def run(self, name: str, arguments: Mapping[str, JSON] | str, timeout_s: float | None) -> ToolOutcome:
        async with self._turn:
            self._check()
            tool = self.tools.registry.get(name)
            limit_s = timeout_s if tool is not None and tool.schema.external else None  # others end their own commands
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await self.tools.call(name, arguments, timeout_s=timeout_s)
            except TimeoutError:
                if not limit.expired():
                    raise
                return ToolOutcome.refused(f"The tool did not answer within {limit_s:g} s.")

    async def spawn(self, command: str, options: Mapping[str, JSON]) -> ProcessSession:
        async with self._turn:
            self._check()
            registry, slot = self.tools.state(ProcessRegistry), await self.tools.slot()
            return await registry.spawn(slot, command, task_id=self._trajectory_id, **options)

    async def is_busy(self) -> bool:
        return await self.tools.state(ProcessRegistry).has_active_processes(self._trajectory_id)

    def _delegation(self, given: Delegation) -> Delegation:
        """The same, whose work ends with the trajectory: it may wait long for a model, where nothing else ends it."""
        done = given.work
        if done is None:
            return given

        async def work(assignments: Sequence[Assignment]) -> list[SubagentReport]:
            released = StaleLease(f"Trajectory {self._trajectory_id} was released while sub-agents worked for it")
            async with self._delegated.block(released):
                return await done(assignments)

        return Delegation(work)

    async def release(self) -> None:
        self._released = True
        await self._delegated.end()
        slot, self.slot = self.slot, None
        try:
            await self.tools.aclose()
        finally:
            if slot is not None:
                await self._executor.give_back(slot)

    async def _lease(self) -> Slot:
        if self.slot is not None:  # taken up
            return self.slot
        slot = await self._executor.lease(self._trajectory_id)
        if self._released:  # while this call waited for a slot
            await self._executor.give_back(slot)
            self._check()
        self.slot = slot
        return slot

    def _check(self) -> None:
        if self._released:
            raise StaleLease(f"Trajectory {self._trajectory_id} was released while this call was waiting")


def _with_network(spec: SlotSpec, allow: bool) -> SlotSpec:
    if allow and isinstance(spec.network, AllowList):
        return spec  # what a call may do is never more than what the slot was made for
    return replace(spec, network=Network.ON if allow else Network.OFF)
