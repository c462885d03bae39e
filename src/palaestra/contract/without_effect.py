"""Names of existing scripts for things that need no counterpart here."""

from __future__ import annotations

from palaestra.envs.config.budget_config import (
    DEFAULT_PREVIEW_SIZE_CHARS,
    DEFAULT_RESULT_SIZE_CHARS,
    DEFAULT_TURN_BUDGET_CHARS,
    BudgetConfig,
)

__all__ = [
    "DEFAULT_BUDGET", "DEFAULT_PREVIEW_SIZE_CHARS", "DEFAULT_RESULT_SIZE_CHARS", "DEFAULT_TURN_BUDGET_CHARS",
    "BudgetConfig", "_tool_executor", "apply_patches", "resize_tool_pool",
]  # fmt: skip


def apply_patches() -> None:
    """Do nothing, because no library needs to be patched: tools run without event loops of their own."""


def resize_tool_pool(max_workers: int) -> None:
    """Do nothing, because tools run in the event loop and not in a pool of threads."""


class _NoThreads:
    """Stands for the pool of threads in which tools run elsewhere."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: a tool call ends with the rollout that made it."""


_tool_executor = _NoThreads()


DEFAULT_BUDGET = BudgetConfig()
