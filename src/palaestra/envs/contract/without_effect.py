"""Names of existing scripts for things that need no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_RESULT_SIZE_CHARS = 100_000
DEFAULT_TURN_BUDGET_CHARS = 200_000
DEFAULT_PREVIEW_SIZE_CHARS = 1_500


def apply_patches() -> None:
    """Do nothing, because no library needs to be patched: tools run without event loops of their own."""


def resize_tool_pool(max_workers: int) -> None:
    """Do nothing, because tools run in the event loop and not in a pool of threads."""


class _NoThreads:
    """Stands for the pool of threads in which tools run elsewhere."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: a tool call ends with the rollout that made it."""


_tool_executor = _NoThreads()


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """The maximum sizes of tool results, in characters. They have no effect: each tool limits its own results, and
    keeps longer output in a file of the sandbox."""

    default_result_size: int = DEFAULT_RESULT_SIZE_CHARS
    turn_budget: int = DEFAULT_TURN_BUDGET_CHARS
    preview_size: int = DEFAULT_PREVIEW_SIZE_CHARS
    tool_overrides: Mapping[str, int] = field(default_factory=dict)


DEFAULT_BUDGET = BudgetConfig()
