"""Names of existing scripts for things that need no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "DEFAULT_BUDGET", "DEFAULT_PREVIEW_SIZE_CHARS", "DEFAULT_RESULT_SIZE_CHARS", "DEFAULT_TURN_BUDGET_CHARS",
    "BudgetConfig", "_tool_executor", "apply_patches", "resize_tool_pool",
]  # fmt: skip

DEFAULT_RESULT_SIZE_CHARS = 100_000
DEFAULT_TURN_BUDGET_CHARS = 200_000
DEFAULT_PREVIEW_SIZE_CHARS = 1_500


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """The maximum sizes of tool results, in characters. They have no effect: each tool limits its own results, and
    keeps longer output in a file of the sandbox."""

    default_result_size: int = DEFAULT_RESULT_SIZE_CHARS
    turn_budget: int = DEFAULT_TURN_BUDGET_CHARS
    preview_size: int = DEFAULT_PREVIEW_SIZE_CHARS
    tool_overrides: Mapping[str, int] = field(default_factory=dict)


DEFAULT_BUDGET = BudgetConfig()


def _budget(config: Any) -> BudgetConfig:
    """`HermesAgentEnvConfig.build_budget_config`, whose result scripts pass to `HermesAgentLoop`."""
    sizes = config.default_result_size_chars, config.turn_budget_chars, config.preview_size_chars
    return BudgetConfig(*sizes, tool_overrides=config.tool_result_overrides or {})


_LIMITS = "each tool limits its own results, and keeps longer output in a file of the sandbox"
_CALLS = "each tool call is sent immediately"

SETTINGS: Mapping[str, tuple[object, str]] = {
    "batch_size": (-1, "the trainer's server decides the size of its batches"),
    "default_result_size_chars": (DEFAULT_RESULT_SIZE_CHARS, _LIMITS),
    "turn_budget_chars": (DEFAULT_TURN_BUDGET_CHARS, _LIMITS),
    "preview_size_chars": (DEFAULT_PREVIEW_SIZE_CHARS, _LIMITS),
    "tool_result_overrides": (None, _LIMITS),
    "build_budget_config": (_budget, _LIMITS),
    "terminal_lifetime": (3600, "a slot lives as long as its rollout"),
    "terminal_cwd": ("", "every slot has its own workspace at /workspace"),
    "modal_workspace_base": ("/data", "every slot has its own workspace at /workspace"),
    "rolling_buffer_length": (1000, "no latency statistics are kept"),
    "tool_batch_window_ms": (20, _CALLS),
    "tool_max_batch_size": (200, _CALLS),
    "teacher_top_k": (0, "no teacher is asked"),
    "use_local_dir": (True, "task folders are always read in place"),
    "prebuild_images": (False, "each image is built once, when the group of its task starts"),
    "max_concurrent_builds": (4, "images are built concurrently for all running groups"),
    "docker_image_prefix": ("endless-terminals", "built images are exported and removed from the tool"),
    "eval_concurrency": (0, "max_num_workers is the number of tasks evaluated concurrently"),
    "batch_window_ms": (20, _CALLS),
    "max_batch_size": (200, _CALLS),
}
"""The settings of existing scripts that have no effect: the value that a script reads, and the reason. The last two are
those of the executor service (`TOOL_EXECUTOR_*`)."""


def apply_patches() -> None:
    """Do nothing, because no library needs to be patched: tools run without event loops of their own."""


def resize_tool_pool(max_workers: int) -> None:
    """Do nothing, because tools run in the event loop and not in a pool of threads."""


class _NoThreads:
    """Stands for the pool of threads in which tools run elsewhere."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: a tool call ends with the rollout that made it."""


_tool_executor = _NoThreads()
