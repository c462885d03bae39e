"""Numbers as code of others gives them: Python's, those of numpy and its like, decimals. No I/O."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real


def number(value: object) -> float | None:
    """A number or bool of any kind as a plain number, infinite where it is too large for one; None for what is none.

    Arrays and tensors count as what they hold, where that is one value.
    """
    item = getattr(value, "item", None)
    try:
        plain = item() if callable(item) else value
        return float(plain) if isinstance(plain, (Real, Decimal)) else None
    except OverflowError:
        return math.inf
    except (RuntimeError, TypeError, ValueError):
        return None
