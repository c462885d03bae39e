"""What a function environment declares: its function, hooks and tools. `function_form.py` collects it, and
`function_env.py` runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from palaestra.envs.config.fields import HeldOutConfig
from palaestra.tools.tool import Tool
from palaestra_slots.core.config import setting
from palaestra_slots.core.types import Task

HookFunction: TypeAlias = Callable[..., object]
Source: TypeAlias = Callable[[], Awaitable[object]]
"""Creates one argument of a hook; called only if the hook has that parameter."""

TaskSource = Callable[..., Iterable[Task] | AsyncIterator[Task]]


_OF_CLASSES = frozenset({"dataset_name", "dataset_split", "grading", "live", "prompt_field", "share_setup"})
"""Settings that only environment classes read: a function reads its own data, and its checks are sealed."""


class FunctionEnvConfig(HeldOutConfig):
    """Settings of a function environment. They are the settings of every agent environment, but by default each task is
    rolled out once, without a network."""

    unread: ClassVar[tuple[frozenset[str], str]] = (
        _OF_CLASSES,
        "in a function environment: declare it in the environment, or leave it out",
    )

    default_sources: ClassVar[Mapping[str, str]] = {}
    """The source of each setting whose default the environment itself declares."""

    group_size: int = setting(1, "Rollouts per task.", ge=1)
    total_steps: int = setting(-1, "Maximum number of groups to process; -1 means every task once.", ge=-1)
    include_messages: bool = setting(True, "Keep each rollout's messages in the JSONL file.")
    allow_network: bool = setting(False, "Whether the agent's commands can reach the network.")


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function and the names of its parameters."""

    function: HookFunction
    wants: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class ScoreHook:
    """One score and its weight in the reward."""

    hook: Hook
    weight: float


@dataclass(eq=False)
class Declaration:
    """A function environment. `source` yields its tasks; the tools are those of its own, beside `toolsets`."""

    source: TaskSource
    name: str
    toolsets: tuple[str, ...]
    label_names: tuple[str, ...]
    packages: tuple[str, ...] = ()
    scores: list[ScoreHook] = field(default_factory=list)
    preparation: Hook | None = None
    made_state: Hook | None = None
    next_message: Hook | None = None
    tools: list[Tool] = field(default_factory=list)
