"""`BudgetConfig`: the sizes of tool results, as Hermes names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
