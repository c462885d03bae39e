"""`HermesAgentBaseEnv`: the class form of an environment, as existing scripts are written to it.

A subclass provides items and scores rollouts; five methods are required, the workspace hooks and the overridable steps
are optional. `ContractEnvironment` adapts it to the runner.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

from palaestra.agent.loop import HermesAgentLoop
from palaestra.agent.result import AgentResult
from palaestra.core.errors import ConfigError, PrepareError, TaskError
from palaestra.core.sync_bridge import bridged
from palaestra.core.types import JSON, Message, Score, Task, numbers
from palaestra.core.user_code import call_hook, called, run_hook, score_of, settled
from palaestra.envs import cache_key
from palaestra.envs.api.base_env import (
    ATTEMPT,
    COLLECTING,
    COLLECTING_GROUPS,
    Attempt,
    BaseEnv,
    ClassEnvironment,
    CollectedEnvironment,
    Item,
    RolloutFailed,
    Tools,
    assigned,
    in_rollout,
    own_names,
)
from palaestra.envs.api.scored_data import (
    PLACEHOLDER,
    Row,
    ScoredDataItem,
    ScoredRow,
    checked_row,
    placeholder_tokens,
    row_and_backlog,
)
from palaestra.envs.config.build import agent_settings, extra_body, kit, make_pool, network_policy, system_prompt
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.inference.config import APIServerConfig
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.exec_tool import ExecTool
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import CURRENT, Rollout, RolloutTool
from palaestra.rollouts.spec import AgentSettings, Kit
from palaestra.sandbox.pool import SlotPool
from palaestra.sandbox.slot import Slot
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import States, Tool

logger = logging.getLogger(__name__)

MOST_TOOL_ERRORS = 1000
"""How many failed tool calls are kept between two logs."""


class HermesAgentBaseEnv(BaseEnv):
    """Subclass this, implement the abstract methods, and call `cli()`.

    `self.server` answers `chat_completion(messages=…)`; `self.config` holds the settings. Rollouts and groups run
    concurrently, so hooks must not keep a rollout's state on `self`.
    """

    name: ClassVar[str | None] = "hermes-agent"
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig
    config: HermesAgentEnvConfig

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._tool_error_buffer: list[dict[str, JSON]] = []
        """Failed tool calls since the last `wandb_log`, with turn, tool, args, error and result."""

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        return cls.env_config_cls(), [APIServerConfig()]

    # What a subclass must say

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """The user's message for an item."""

    @abstractmethod
    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Score a rollout through `ctx`, which looks at the sealed workspace."""

    # What a subclass may say

    async def prepare_group(self, item: Item, exec_tool: ExecTool) -> None:
        """Prepare the workspace once per group; every rollout starts from a fork of it."""

    def group_recipe(self, item: Item) -> str | None:
        """A version text if the result of `prepare_group` (with `share_setup`, of `setup_trajectory_workspace` too)
        depends only on the item, the class's settings and file, and this text; else None. See `Task.recipe`."""
        return None

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: ExecTool
    ) -> dict[str, JSON]:
        """Prepare one rollout's workspace. The result is passed to the verification as `workspace_meta`."""
        return {}

    async def verify_and_score_trajectory(
        self,
        item: Item,
        result: AgentResult,
        *,
        trajectory_id: str,
        exec_tool: ExecTool,
        workspace_meta: dict[str, JSON] | None = None,
    ) -> tuple[float, dict[str, JSON]]:
        """Score a rollout in its sealed workspace: a reward and metadata to record. An override replaces
        `compute_reward`, which the default calls."""
        grading = _GRADING.get()
        if grading is None:
            raise ConfigError(
                f"{type(self).__name__}.verify_and_score_trajectory is only there while a rollout is scored"
            )
        answer = score_of(await called(self.compute_reward, item, result, grading), "compute_reward")
        return answer.reward, dict(answer.metrics)

    def as_environment(self) -> ClassEnvironment:
        return ContractEnvironment(self)

    def reference_solution(self, item: Item) -> JSON:
        """The solution of an item for the scripted `oracle` policy (see `Task.solution`), or None."""
        return item.get("solution") if isinstance(item, Mapping) else None

    def _resolve_tools_for_group(self) -> Tools:
        """The tools of one group: definitions and names. Called once per group; an override chooses others."""
        registry = self.tool_kit(_DRAW.get() or random.Random(self.config.seed)).registry
        return registry.definitions(), set(registry.list_tools())

    @property
    def _current_group_tools(self) -> Tools | None:
        """The tools of the group that is rolled out here, or those that the class assigned; None outside of a group."""
        chosen, rollout = _GROUP_TOOLS.get(), CURRENT.get()
        if chosen is None and rollout is not None:
            return tools_of(rollout.kit)
        return chosen

    @_current_group_tools.setter
    def _current_group_tools(self, tools: Tools | None) -> None:
        _GROUP_TOOLS.set(tools)

    def tool_kit(self, rng: random.Random) -> Kit:
        """The tools of one group. `rng` is the group's own."""
        return kit(self.config, None, rng, self.own_tools(), self.mcp, self.shared)

    @cached_property
    def shared(self) -> States:
        """State that the tools of all rollouts share, such as a browser. Closed when the run ends."""
        return States()

    @cached_property
    def _backend(self) -> SlotPool:
        """Slots for the class's own use, outside of rollouts. The first lease starts them; they end with the run."""
        return OwnSlots(make_pool(self.config))

    async def _close_backend(self) -> None:
        if (pool := self.__dict__.pop("_backend", None)) is not None:
            await pool.aclose()

    def own_tools(self) -> Sequence[Tool]:
        """The environment's own tools, such as functions with `@tool`. Its agents always have them."""
        return ()

    def _use_managed_server(self) -> bool:
        """Whether rollouts are token-exact; by default, if the servers give tokens (sglang, vllm, transformers).
        Override it to chat without tokens; rows are then placeholders, with `token_source: placeholder`."""
        return isinstance(self._server, ServerGroup) and self._server.token_exact

    def _use_sandbox_backend(self) -> bool:
        """Whether set-up and verification hooks are called. False: `compute_reward` scores, without a set-up. Either
        way the agent works in a slot."""
        return True

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Roll an item out and score it: its row, and items to draw next. For `super()` in a class that collects, and
        for `evaluate`.

        Raises `RolloutFailed` in a class that collects if the rollout has no score; from `evaluate` the row is None.
        """
        tools, names = self._current_group_tools or self._resolve_tools_for_group()
        messages: list[Message] = []
        if prompt := system_prompt(self.config):
            messages.append({"role": "system", "content": prompt})
        messages.append({"role": "user", "content": self.format_prompt(item)})
        rollout = CURRENT.get()
        task_id = str(uuid.uuid4()) if rollout is None else rollout.rollout_id
        path = self._collect_trajectory_sandbox if self._use_sandbox_backend() else self._collect_trajectory_local
        return await path(item, task_id, tools, names, messages)

    async def _collect_trajectory_local(
        self, item: Item, task_id: str, tools: list[dict[str, JSON]], valid_names: set[str], messages: list[Message]
    ) -> tuple[ScoredDataItem | None, list[Item]]:
        """The path of `collect_trajectory` without the workspace hooks."""
        return await self._play(Attempt(item, messages, (tools, valid_names), hooks=False)), []

    async def _collect_trajectory_sandbox(
        self, item: Item, task_id: str, tools: list[dict[str, JSON]], valid_names: set[str], messages: list[Message]
    ) -> tuple[ScoredDataItem | None, list[Item]]:
        """The path of `collect_trajectory` with the workspace hooks."""
        return await self._play(Attempt(item, messages, (tools, valid_names))), []

    async def _run_agent_loop(
        self,
        task_id: str | Rollout,
        tools: list[Any],
        valid_names: set[str] | None = None,
        messages: list[Message] | None = None,
        tool_handler: RolloutTool | None = None,
    ) -> AgentResult:
        """Run the agent. An override has either this form or `(self, rollout, messages)`, which the default takes too.

        `tool_handler(name, arguments, task_id)` runs the calls; by default they run in the rollout's slot.
        """
        if isinstance(task_id, Rollout):
            return await task_id.run_agent(tools if messages is None else messages)
        messages, names = messages if messages is not None else [], valid_names or set()
        rollout = CURRENT.get()
        if rollout is not None:
            rollout.kit = offered_kit(rollout.kit, tools, names)
            own = tool_handler is None or tool_handler == rollout.tools.handle
            return await rollout.run_agent(messages, tool_handler=None if own else tool_handler)
        loop = HermesAgentLoop(
            self.server,
            tools,
            names,
            max_turns=self.config.max_agent_turns,
            task_id=task_id,
            temperature=self.config.agent_temperature,
            max_tokens=self.config.max_token_length,
            extra_body=extra_body(self.config),
            tool_handler=tool_handler,
        )
        return await loop.run(messages)

    def _build_scored_item(self, item: Item, result: AgentResult, reward: float) -> ScoredDataItem:
        """The training row of one rollout: `tokens`, `masks`, `scores`, `messages`. It also unpacks into `(row, [])`,
        and an override may return either; its `scores` is the reward.

        With a token-exact server it is the last row of the ledger, with `inference_logprobs`; if an override leaves it
        unchanged, all rows of the ledger are trained. A chat server gives no token ids: the tokens are placeholders
        with masks of -100.
        """
        self._keep_tool_errors(result)
        row: JSON = ScoredRow(scores=reward, messages=result.messages)
        if nodes := (result.managed_state or {}).get("nodes"):
            row["tokens"], row["masks"] = nodes[-1].tokens, nodes[-1].masked_tokens
            row["inference_logprobs"], row["token_source"] = nodes[-1].logprobs, "engine"
        else:
            tokens = placeholder_tokens(result.messages)
            row["tokens"], row["masks"], row["token_source"] = tokens, [-100] * len(tokens), PLACEHOLDER
        scored: ScoredDataItem = row
        return scored

    def _keep_tool_errors(self, result: AgentResult) -> None:
        self._tool_error_buffer.extend(
            {
                "turn": error.turn,
                "tool": error.tool_name,
                "args": error.arguments[:150],
                "error": error.error[:300],
                "result": error.tool_result[:300],
            }
            for error in result.tool_errors
        )
        del self._tool_error_buffer[:-MOST_TOOL_ERRORS]

    async def wandb_log(self, wandb_metrics: dict[str, JSON] | None = None) -> None:
        """Add the errors of tools since the last call to the metrics, and log them."""
        errors, self._tool_error_buffer = self._tool_error_buffer, []
        found: dict[str, JSON] = {"train/tool_errors_count": len(errors)}
        if errors:
            found["train/tool_error_details"] = "\n".join(
                f"[turn {each['turn']}] {each['tool']}({each['args'][:80]}) -> {each['error'][:150]}" for each in errors
            )
        await super().wandb_log({**found, **(wandb_metrics or {})})


class OwnSlots(SlotPool):
    """A pool that starts with its first lease."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool.config, pool.backend)
        self._first = asyncio.Lock()

    async def acquire(self, trajectory_id: str, **options: Any) -> Slot:
        async with self._first:
            await self.start()
        return await super().acquire(trajectory_id, **options)


class ContractEnvironment(CollectedEnvironment):
    """Runs one instance of a class environment. Item and metadata travel in the rollout, never on the instance."""

    inner: HermesAgentBaseEnv
    _offers_collecting = True
    """Whether rollouts are played through `_attempt`. False for a subclass with an `act` of its own."""

    def __init_subclass__(cls) -> None:
        cls._offers_collecting = cls._offers_collecting and "act" not in vars(cls)

    def __init__(self, inner: HermesAgentBaseEnv) -> None:
        super().__init__(inner)
        self.shared = inner.shared
        self._settings = agent_settings(inner.config)
        self._policy = network_policy(inner.config.allow_network)
        self._verifies = overrides(inner, "verify_and_score_trajectory")
        self._own_loop = overrides(inner, "_run_agent_loop")
        self._loop_takes_rollout = self._own_loop and takes_rollout(inner._run_agent_loop)
        self._warned = False

    async def aclose(self) -> None:
        try:
            await self.inner._close_backend()
        finally:
            await super().aclose()

    async def open(self) -> None:
        if self._collects and not self._offers_collecting:
            named = ", ".join(sorted(own_names(type(self.inner)) & (COLLECTING | COLLECTING_GROUPS)))
            raise ConfigError(f"{type(self.inner).__name__} overrides {named}, which its base class never calls")
        await super().open()
        self.inner.tool_kit(random.Random(0))  # a toolset that there is not is said before the run has a folder

    @property
    def agent(self) -> AgentSettings:
        return self._settings

    def task(self, item: Item, number: int) -> Task:
        return Task(
            id=self.inner.item_id(item, number),
            prompt="" if self._collects else self.inner.format_prompt(item),
            network=self._policy,
            grading=self.inner.config.grading,
            paths=self.inner.config.graded_paths,
            programs=self.inner.config.graded_programs,
            data=item,
            solution=self.inner.reference_solution(item),
        )

    def kit(self, task: Task, rng: random.Random) -> Kit:
        kit = self.inner.tool_kit(rng)
        if not overrides(self.inner, "_resolve_tools_for_group"):
            return kit
        with assigned(_DRAW, copy(rng)):
            answer: JSON = self.inner._resolve_tools_for_group()
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TaskError(f"_resolve_tools_for_group must return (definitions, names), and returned {answer!r:.100}")
        kit = offered_kit(kit, *answer)
        unknown = [name for name in kit.names if kit.registry.get(name) is None]
        if unknown and not self._own_loop:
            raise TaskError(f"_resolve_tools_for_group names {', '.join(unknown)}, which no tool has as its name")
        return kit

    @contextmanager
    def group_tools(self, kit: Kit) -> Iterator[None]:
        with assigned(_GROUP_TOOLS, tools_of(kit)):
            yield

    def over(self, items: Sequence[Item], first: int, *, plain: bool = False) -> Self:
        other = super().over(items, first, plain=plain)
        if plain:
            other._collects = other._whole = False
        return other

    def prepares(self, task: Task) -> bool:
        return self.inner.config.share_setup or overrides(self.inner, "prepare_group")

    def recipe(self, task: Task) -> JSON:
        """The class's declaration for the item, with the item, the class's own settings and its code."""
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

        @functools.cache  # one for all calls of the hook, whose shell goes on between them
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
        if self.inner.config.share_setup or not overrides(self.inner, "setup_trajectory_workspace"):
            return
        if not self._hooks(rollout):
            return
        exec_tool = ExecTool(rollout.sandbox, lambda: rollout.tools)
        rollout.meta["workspace_meta"] = await self._set_up(rollout.task, rollout.rollout_id, exec_tool)

    def _hooks(self, rollout: Rollout) -> bool:
        """Whether the workspace hooks are called for the rollout."""
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
        rollout.result = result
        if not result.outcome.scored:
            raise RolloutFailed(result.error)
        with rollout.stage("grade"):
            rollout.meta["score"] = await self._scored_with_row(rollout)
        row: ScoredDataItem = rollout.meta["row"]
        return row

    async def _attempt(self, rollout: Rollout, attempt: Attempt | None = None) -> AgentResult:
        """Let the agent work. `attempt` is what a class that collects asked for: then the set-up is done here too."""
        opening = None
        if attempt is not None:
            inner, item = self.inner, attempt.item
            prompt, solution = inner.format_prompt(item), inner.reference_solution(item)
            rollout.task = replace(rollout.task, data=item, prompt=prompt, solution=solution)
            rollout.meta["hooks"], opening = attempt.hooks, attempt.messages
            if attempt.tools is not None:
                rollout.kit = offered_kit(rollout.kit, *attempt.tools)
            with rollout.stage("setup"):
                await run_hook(PrepareError, self._begin(rollout), f"setting up {rollout.rollout_id}")
        self._choose_server(rollout)
        return await self._converse(rollout, rollout.opening() if opening is None else opening)

    async def _converse(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        """Run the agent loop, or the class's own."""
        hook: Callable[..., object] = self.inner._run_agent_loop
        if not self._own_loop:
            return await rollout.run_agent(messages)
        if self._loop_takes_rollout:
            loop = called(hook, rollout, messages)
        else:
            handled = partial(hook, tool_handler=rollout.tools.handle) if accepts(hook, "tool_handler") else hook
            loop = called(handled, rollout.rollout_id, *tools_of(rollout.kit), messages)
        with in_rollout(rollout):
            result: AgentResult = await run_hook(
                TaskError, bridged(loop), f"{self.name}._run_agent_loop on {rollout.rollout_id}"
            )
        return result

    def _choose_server(self, rollout: Rollout) -> None:
        """Use plain chat if the environment does not want the token-exact session."""
        if self.inner._own_server is not None:
            rollout.server = self.inner._own_server
            return
        exact, wanted = rollout.server.ledger is not None, self.inner._use_managed_server()
        if exact and not wanted:
            rollout.server = self.inner.server
        elif wanted and not exact and not self._warned:
            self._warned = True
            logger.warning("%s wants a managed server, but these servers only chat: no tokens are kept", self.name)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        assert rollout.result is not None
        await grading.carry_scratch()
        tools = grading.tools(self._settings.tool_timeout_s)
        if self._verifies and self._hooks(rollout):
            context = ToolContext(rollout.rollout_id, slot=grading.slot, tools=tools)
            with assigned(_GRADING, context):
                verifying = self.verify(rollout, rollout.result, ExecTool(grading.slot, lambda: tools))
                answer = await bridged(verifying)
            said = f"{self.name}.verify_and_score_trajectory"
        else:
            context = ToolContext(rollout.rollout_id, slot=grading.slot, tools=tools)
            answer = await bridged(called(self.inner.compute_reward, rollout.task.data, rollout.result, context))
            said = f"{self.name}.compute_reward"
        score = score_of(answer, said)
        detail = score.detail if isinstance(answer, Score) else score.metrics  # which may name more than numbers
        if grading.processes_at_end:
            detail = {**detail, "processes_at_end": grading.processes_at_end}
        return Score(score.reward, numbers(score.metrics), detail)

    async def verify(self, rollout: Rollout, result: AgentResult, exec_tool: ExecTool) -> JSON:
        """Call the verification hook in the shape that this kind of class gives it."""
        return await settled(
            self.inner.verify_and_score_trajectory(
                rollout.task.data,
                result,
                trajectory_id=rollout.rollout_id,
                exec_tool=exec_tool,
                workspace_meta=rollout.meta.get("workspace_meta"),
            )
        )

    async def grade(self, rollout: Rollout) -> Score:
        collected = self._collects and not (self._whole and rollout.group_id not in self._groups)
        return await (super().grade(rollout) if collected else self._scored_with_row(rollout))

    async def _scored_with_row(self, rollout: Rollout) -> Score:
        """The score of the class's hooks, with the reward of the row that it builds from it."""
        score = await Environment.grade(self, rollout)
        doing = f"{self.name}._build_scored_item on {rollout.rollout_id}"
        row = rollout.meta["row"] = call_hook(TaskError, lambda: self._row(rollout, score), doing)
        return replace(score, reward=row["scores"])

    def _row(self, rollout: Rollout, score: Score) -> Row:
        assert rollout.result is not None
        answer: JSON = self.inner._build_scored_item(rollout.task.data, rollout.result, score.reward)
        row, backlog = row_and_backlog(answer) if isinstance(answer, tuple) else (answer, [])
        self.take_backlog(backlog, f"{self.name}._build_scored_item")
        return checked_row(row, rollout.task.id)


_DRAW: ContextVar[random.Random | None] = ContextVar("draw", default=None)
"""The generator of the group whose tools are chosen here."""

_GROUP_TOOLS: ContextVar[Tools | None] = ContextVar("group_tools", default=None)
_GRADING: ContextVar[ToolContext | None] = ContextVar("grading", default=None)
"""The view of the rollout that is scored here."""


def tools_of(kit: Kit) -> Tools:
    """A group's tools as the contract passes them, which the class may change."""
    return deepcopy(list(kit.definitions)), set(kit.names)


def offered_kit(kit: Kit, definitions: Sequence[dict[str, JSON]], names: Collection[str]) -> Kit:
    """The kit with these tools instead of its own: any tool of the package, and definitions of the class's own."""
    shown = [each for each in definitions if each.get("function", each).get("name") in names]
    if shown == kit.definitions and set(names) == set(kit.names):
        return kit
    known = unrestricted(kit.registry)
    tools = [tool for each in shown if (tool := known.get(each["function"]["name"])) is not None]
    return Kit(kit.registry.with_tools(tools), kit.toolsets, shown)


def takes_rollout(hook: Callable[..., object]) -> bool:
    """Whether a `_run_agent_loop` has the form `(rollout, messages)`."""
    parameters = [
        each
        for each in inspect.signature(hook).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(parameters) == 2 or bool(parameters and parameters[0].name == "rollout")


def accepts(hook: Callable[..., object], name: str) -> bool:
    """Whether a hook has a parameter of this name, or takes any."""
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def overrides(inner: HermesAgentBaseEnv, method: str) -> bool:
    return getattr(type(inner), method) is not getattr(HermesAgentBaseEnv, method)
