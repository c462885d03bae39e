"""The default limits on how long each stage of a rollout may go without a sign of life. This is a separate module so
that settings load fast."""

from __future__ import annotations

from collections.abc import Mapping

IDLE_LIMITS: Mapping[str, float] = {
    "acquire": 600.0,
    "prepare": 7200.0,
    "setup": 3600.0,
    "model": 3600.0,
    "tool": 7200.0,
    "user": 7200.0,
    "seal": 600.0,
    "grade": 7200.0,
}
"""The maximum seconds without a sign of life, by stage. Each maximum is far above the stage's own time limits, so that
only a hang reaches it."""
