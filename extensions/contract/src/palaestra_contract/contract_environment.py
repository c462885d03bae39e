"""`ContractEnvironment`: runs one instance of a `HermesAgentBaseEnv`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Self

from palaestra.agent.result import AgentResult
from palaestra.envs import cache_key
from palaestra.envs.api.hook_commands import HookCommands
from palaestra.envs.config.build import agent_settings, network_policy, warn_of_every_tool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.grader import LIVE, Grading
from palaestra.rollouts.grading.reward import decide
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import AgentSettings
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.registry.registry import Kit
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract.base_env import (
    ATTEMPT,
    COLLECTING,
    COLLECTING_GROUPS,
    Attempt,
    Item,
    RolloutFailed,
    assigned,
    own_names,
)
from palaestra_contract.class_environment import CollectedEnvironment, in_rollout, slots_needed
from palaestra_contract.exec_tool import ExecTool
from palaestra_contract.hermes_env import DRAW, GRADING, GROUP_TOOLS, HermesAgentBaseEnv
from palaestra_contract.rollout_parts import offered_kit, tools_of
from palaestra_contract.scored_data import Row, ScoredDataItem, checked_row, row_and_backlog
from palaestra_contract.tool_context import ToolContext
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_slots.core.io.plugins import is_own
from palaestra_slots.core.sync_bridge import bridged, called_with_sync
from palaestra_slots.core.types import JSON, Message, Score, Task, numeric_values
from palaestra_slots.core.user_code import call_hook, called, run_hook, score_of, settled
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.server_group import ServerGroup

logger = logging.getLogger(__name__)


class ContractEnvironment(CollectedEnvironment):
    """Runs one instance of a `HermesAgentBaseEnv`. Item and metadata are kept in the rollout, never on the instance."""

    inner: HermesAgentBaseEnv
    _offers_collecting = True
    """Whether `_attempt` plays the rollouts. False for a subclass that overrides `act`."""

    def __init_subclass__(cls) -> None:
        cls._offers_collecting = cls._offers_collecting and "act" not in vars(cls)

    def __init__(self, inner: HermesAgentBaseEnv) -> None:
        super().__init__(inner)
        self.shared = inner.shared
        self._settings = agent_settings(inner.config)
        # Existing reward hooks expect the agent's own slot: all its files, its processes and its network.
        self._grading = inner.config.grading or LIVE
        policy = network_policy(inner.config.allow_network)
        self._policy = replace(policy, grade=policy.agent)
        self._verifies = overrides(inner, "verify_and_score_trajectory")
        self._own_loop = overrides(inner, "_run_agent_loop")
        self._loop_takes_rollout = self._own_loop and takes_rollout(inner._run_agent_loop)
        self._warned = False
        self._open = contextlib.ExitStack()

    async def set_up(self) -> None:
        if self._awaits_setup:
            doing = f"{self.name} cannot begin: _start_tool_backend"
            await run_hook(ConfigError, called(self.inner._start_tool_backend), doing)
        await super().set_up()

    async def aclose(self) -> None:
        try:
            await run_hook(ConfigError, called(self.inner._stop_tool_backend), f"{self.name}._stop_tool_backend")
        finally:
            try:
                await self.inner._close_backend()
            finally:
                await asyncio.to_thread(self._open.close)
                await super().aclose()

    async def open(self) -> None:
        if self._collects and not self._offers_collecting:
            named = ", ".join(sorted(own_names(type(self.inner)) & (COLLECTING | COLLECTING_GROUPS)))
            raise ConfigError(
                f"{type(self.inner).__name__} overrides {named}, which {type(self.inner).__mro__[1].__name__} never "
                "calls; remove the override, or subclass HermesAgentBaseEnv instead"
            )
        if plays_none(type(self.inner)):
            self._refuse_settings_of_rollouts()
        self._open.enter_context(self._own_tasks())
        if not isinstance(self.inner._server, ServerGroup) or not self.inner._server.token_exact:
            await asyncio.to_thread(getattr, self.inner, "_row_tokenizer")  # loading it may take long
        await super().open()
        kit = self.inner.tool_kit(random.Random(0))  # reports an unknown toolset before the run has a folder
        if not overrides(self.inner, "tool_kit"):
            warn_of_every_tool(self.inner.config, kit)

    @property
    def agent(self) -> AgentSettings:
        return self._settings

    def task(self, item: Item, number: int) -> Task:
        return Task(
            id=self.inner.item_id(item, number),
            prompt="" if self._collects else self.inner.format_prompt(item),
            network=self._policy,
            grading=self._grading,
            paths=self.inner.config.graded_paths,
            programs=self.inner.config.graded_programs,
            data=item,
            solution=self.inner.reference_solution(item),
        )

    def kit(self, task: Task, rng: random.Random) -> Kit:
        kit = self.inner.tool_kit(rng)
        if not overrides(self.inner, "_resolve_tools_for_group"):
            return kit
        with assigned(DRAW, copy(rng)):
            answer: JSON = self.inner._resolve_tools_for_group()
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TaskError(f"_resolve_tools_for_group must return (definitions, names), but returned {answer!r:.100}")
        kit = offered_kit(kit, *answer)
        unknown = [name for name in kit.names if kit.registry.get(name) is None]
        if unknown and not self._own_loop:
            raise TaskError(f"_resolve_tools_for_group names {', '.join(unknown)}, which are not among its tools")
        return kit

    @contextmanager
    def group_tools(self, kit: Kit) -> Iterator[None]:
        with assigned(GROUP_TOOLS, tools_of(kit)):
            yield

    def over(self, items: Sequence[Item], first: int, *, plain: bool = False) -> Self:
        other = super().over(items, first, plain=plain)
        if plain:
            other._collects = other._whole = False
        return other

    def prepares(self, task: Task) -> bool:
        return self.inner.config.share_setup or overrides(self.inner, "prepare_group")

    def recipe(self, task: Task) -> JSON:
        """Return what the cache key of the item's prepared workspace depends on: the result of `group_recipe`, the
        class's code and settings, and the item. Returns None if `group_recipe` does."""
        inner = self.inner
        declared = inner.group_recipe(task.data)
        if declared is None:
            return None
        return [
            declared,
            cache_key.of_code([cls for cls in type(inner).__mro__ if cls.__module__ != "builtins"], task.id),
            cache_key.of_settings(inner.config, HermesAgentEnvConfig),
            [inner.config.seed, inner.config.share_setup],
            cache_key.of_data(task.data, task.id),
        ]

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        async def slot() -> Slot:
            return sandbox

        @functools.cache  # one runtime for all calls of the hook, because its shell persists between them
        def tools() -> ToolRuntime:
            registry = unrestricted(self.inner.tool_kit(random.Random(0)).registry)
            middleware = [] if self.world is None else [self.world.rollout(f"{task.id}:prepare")]
            return ToolRuntime(registry, slot, task.id, timeout_s=self._settings.tool_timeout_s, middleware=middleware)

        exec_tool = ExecTool(slot, tools)
        try:
            await settled(self.inner.prepare_group(task.data, exec_tool))
            if self.inner.config.share_setup:
                await self._set_up(task, task.id, exec_tool)
        finally:
            if tools.cache_info().currsize:
                await tools().aclose()

    async def begin(self, rollout: Rollout) -> None:
        if not self._collects:
            await self._begin(rollout)

    async def _begin(self, rollout: Rollout) -> None:
        if self._sets_up(rollout):

            async def slot() -> Slot:
                self._take_image(rollout)
                return await rollout.sandbox()

            exec_tool = ExecTool(slot, lambda: rollout.tools)
            rollout.meta["workspace_meta"] = await self._set_up(rollout.task, rollout.rollout_id, exec_tool)
            self._take_image(rollout)

    def _take_image(self, rollout: Rollout) -> None:
        """Use the image that the set-up has registered for a rollout, if there is one."""
        pool = vars(self.inner).get("_backend")
        image = pool.images.get(rollout.rollout_id) if isinstance(pool, SlotPool) else None
        if image is not None:
            rollout.workspace.use_image(image, rollout.seat)

    def _sets_up(self, rollout: Rollout) -> bool:
        """Return whether the rollout needs a set-up of its own, because the prepared workspace does not include it."""
        own = not self.inner.config.share_setup and overrides(self.inner, "setup_trajectory_workspace")
        return own and self._hooks(rollout)

    def _hooks(self, rollout: Rollout) -> bool:
        """Return whether the rollout's workspace hooks are called."""
        hooks = rollout.meta.get("hooks")
        return bool(self.inner._use_sandbox_backend() if hooks is None else hooks)

    async def _set_up(self, task: Task, name: str, exec_tool: ExecTool) -> Mapping[str, JSON]:
        hook = self.inner.setup_trajectory_workspace
        return await settled(hook(task.data, trajectory_id=name, exec_tool=exec_tool))

    async def act(self, rollout: Rollout) -> AgentResult:
        if not self._collects:
            return await self._attempt(rollout)
        if self._whole and rollout.group_id not in self._groups:
            return await self._attempt(rollout, ATTEMPT.get())
        return await super().act(rollout)

    async def play(self, rollout: Rollout, attempt: Attempt) -> ScoredDataItem:
        result = await self._attempt(rollout, attempt)
        if not isinstance(result, AgentResult):
            raise TaskError(f"{self.name}._run_agent_loop returned {result!r:.100}, not an AgentResult")
        rollout.ended(result)
        if not result.outcome.scored:
            raise RolloutFailed(result.error)
        with rollout.stages.stage("grade"):
            rollout.meta["score"] = await self._scored_with_row(rollout)
        row: ScoredDataItem = rollout.meta["row"]
        return row

    async def _attempt(self, rollout: Rollout, attempt: Attempt | None = None) -> AgentResult:
        """Run the agent on a rollout. `attempt` is given only for collected rollouts, whose set-up also happens
        here."""
        opening = None
        if attempt is not None:
            inner, item = self.inner, attempt.item
            prompt, solution = await settled(inner.format_prompt(item)), inner.reference_solution(item)
            rollout.use_task(replace(rollout.task, data=item, prompt=prompt, solution=solution))
            rollout.meta["hooks"], opening = attempt.hooks, attempt.messages
            if attempt.tools is not None:
                rollout.seat.offer(offered_kit(rollout.seat.kit, *attempt.tools))
            with rollout.stages.stage("setup"):
                await run_hook(PrepareError, self._begin(rollout), f"setting up {rollout.rollout_id}")
        self._choose_server(rollout)
        return await self._converse(rollout, rollout.opening() if opening is None else opening)

    async def _converse(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        """Run the agent loop, or the class's own loop."""
        hook: Callable[..., object] = self.inner._run_agent_loop
        if not self._own_loop:
            return await rollout.run_agent(messages)
        if self._loop_takes_rollout:
            loop = called(hook, rollout, messages)
        else:
            handled = partial(hook, tool_handler=rollout.tools.handle) if accepts(hook, "tool_handler") else hook
            loop = called(handled, rollout.rollout_id, *tools_of(rollout.seat.kit), messages)
        with slots_needed(), in_rollout(rollout):
            result: AgentResult = await run_hook(
                TaskError, bridged(loop), f"{self.name}._run_agent_loop on {rollout.rollout_id}"
            )
        return result

    def _choose_server(self, rollout: Rollout) -> None:
        """Use the server that the class assigned, if it assigned one. Otherwise, use plain chat if the class does not
        want exact tokens."""
        if self.inner._own_server is not None:
            rollout.seat.use_server(self.inner._own_server)
            return
        exact, wanted = rollout.server.ledger is not None, self.inner._use_managed_server()
        if exact and not wanted:
            rollout.seat.use_server(self.inner.server)
        elif wanted and not exact and not self._warned:
            self._warned = True
            logger.warning("%s wants a managed server, but these servers return no tokens, so none are kept", self.name)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        assert rollout.result is not None
        await grading.carry_scratch()
        commands = HookCommands(grading, in_class=True)
        tools = grading.tools(self._settings.tool_timeout_s, commands.slot)
        exec_tool = ExecTool(commands.slot, lambda: tools)
        meta = rollout.meta.get("workspace_meta")
        context = ToolContext(rollout.rollout_id, slot=commands.slot, tools=tools)
        with commands.explained():
            if self._verifies and self._hooks(rollout):
                with assigned(GRADING, context):
                    answer = await self.verify(rollout, rollout.result, exec_tool, meta)
                said = f"{self.name}.verify_and_score_trajectory"
            else:
                answer = await called_with_sync(self.inner.compute_reward, rollout.task.data, rollout.result, context)
                said = f"{self.name}.compute_reward"
        score = score_of(answer, said)
        detail = score.detail if isinstance(answer, Score) else score.metrics  # the detail may hold more than numbers
        if grading.processes_at_end and not grading.live:
            detail = {**detail, "processes_at_end": grading.processes_at_end}
        return commands.noted(replace(score, metrics=numeric_values(score.metrics), detail=detail))

    async def verify(self, rollout: Rollout, result: AgentResult, exec_tool: ExecTool, meta: JSON) -> JSON:
        """Call the verification hook with the arguments that this kind of class expects."""
        return await called_with_sync(
            self.inner.verify_and_score_trajectory,
            rollout.task.data,
            result,
            trajectory_id=rollout.rollout_id,
            exec_tool=exec_tool,
            workspace_meta=meta,
        )

    async def grade(self, rollout: Rollout) -> Score:
        collected = self._collects and not (self._whole and rollout.group_id not in self._groups)
        return await (super().grade(rollout) if collected else self._scored_with_row(rollout))

    async def _scored_with_row(self, rollout: Rollout) -> Score:
        """Score a rollout with the class's hooks; the reward comes from the row that the class builds. The row gets the
        reward that follows from the setting `reward`, because the class may pass it on."""
        settings = self._settings
        score = decide(await Environment.grade(self, rollout), settings.reward, settings.strict_labels)
        doing = f"{self.name}._build_scored_item on {rollout.rollout_id}"
        row = rollout.meta["row"] = call_hook(TaskError, lambda: self._row(rollout, score), doing)
        return replace(score, reward=row["scores"])

    def _refuse_settings_of_rollouts(self) -> None:
        """Raise `ConfigError` for a setting that only rollouts of this package read, because the class plays none."""
        config = self.inner.config
        for name in OF_ROLLOUTS & config.model_fields_set:
            if getattr(config, name) != type(config).model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(
                    f"{name} has no effect in {type(self.inner).__name__}, which collects its rollouts without "
                    "super().collect_trajectory: leave it out, or call super()"
                )

    def _own_tasks(self) -> AbstractContextManager[None]:
        """Return a context in which the tasks that the class names itself, outside rollouts, have the settings of the
        run: its backend, limits, permissions, tools and recordings."""
        from palaestra_contract.tools.function_calls import configured_session, lent_session

        return lent_session(lambda: configured_session(self.inner.config, self.inner.own_tools(), self.world))

    def _row(self, rollout: Rollout, score: Score) -> Row:
        assert rollout.result is not None
        answer: JSON = self.inner._build_scored_item(rollout.task.data, rollout.result, score.reward)
        row, backlog = row_and_backlog(answer) if isinstance(answer, tuple) else (answer, [])
        self.take_backlog(backlog, f"{self.name}._build_scored_item")
        return checked_row(row, rollout.task.id)


OF_ROLLOUTS = frozenset({
    "agent", "freeze_slots", "graded_paths", "graded_programs", "grading", "live", "save_workspaces", "share_setup",
})  # fmt: skip
"""The settings that a class without rollouts of this package cannot pass on."""


def plays_none(cls: type[HermesAgentBaseEnv]) -> bool:
    """Return whether a class collects its rollouts without ever calling the collect_ methods of its base class."""
    callers = {"collect_trajectories", "collect_trajectory", "evaluate"}
    if "collect_trajectory" in own_names(cls):
        callers.discard("collect_trajectory")  # others may call this one, which plays no rollout itself
    elif "collect_trajectories" in own_names(cls):
        callers.discard("collect_trajectories")
    else:
        return False
    return not mentions(cls, COLLECTING | COLLECTING_GROUPS, callers)


def mentions(cls: type, names: Collection[str], without: Collection[str]) -> bool:
    """Return whether the methods of a user's class and its bases, except those in `without`, use one of these names as
    an attribute."""
    found: set[str] = set()

    def collect_names(code: CodeType) -> None:
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                collect_names(constant)

    for each in cls.__mro__:
        if not is_own(each.__module__):
            for name, value in vars(each).items():
                code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
                if code is not None and name not in without:
                    collect_names(code)
    return not found.isdisjoint(names)


def takes_rollout(hook: Callable[..., object]) -> bool:
    """Return whether a `_run_agent_loop` has the form `(rollout, messages)`."""
    parameters = [
        each
        for each in inspect.signature(hook).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(parameters) == 2 or bool(parameters and parameters[0].name == "rollout")


def accepts(hook: Callable[..., object], name: str) -> bool:
    """Return whether a hook has a parameter of this name, or accepts any keyword."""
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def overrides(inner: HermesAgentBaseEnv, method: str) -> bool:
    return getattr(type(inner), method) is not getattr(HermesAgentBaseEnv, method)
