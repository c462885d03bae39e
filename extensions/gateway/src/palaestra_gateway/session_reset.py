"""Decides when a session of the gateway is reset: after some time without a message, or at a fixed hour of the day.

Invariant: a session is not reset while it has a running background process that is younger than
`bg_process_max_age_hours`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

from palaestra_slots.core.config import Settings, setting
from palaestra_slots.core.types import JSON


class SessionResetPolicy(Settings):
    """When a session is reset. The project's interface contract fixes the fields. `from_dict({})` and
    `SessionResetPolicy()` are equal."""

    mode: Literal["daily", "idle", "both", "none"] = setting(
        "both",
        "daily: at a fixed hour; idle: after minutes without a message; both: whichever comes first; none: never.",
    )
    at_hour: int = setting(4, "The hour of a daily reset, in this machine's time zone.", ge=0, le=23)
    idle_minutes: int = setting(1440, "Minutes without a message until an idle reset.", ge=1)
    notify: bool = setting(True, "Send a notice to the chat at a reset.")
    bg_process_max_age_hours: float = setting(
        24.0, "The maximum age, in hours, at which a running background process still prevents a reset.", ge=0
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, JSON] | None) -> SessionResetPolicy:
        """Read the policy from a mapping; a key that is missing or None gets its default. Raises `ConfigError`."""
        return cls(**{name: value for name, value in (values or {}).items() if value is not None})

    def to_dict(self) -> dict[str, JSON]:
        return self.recorded()

    def reason(self, idle_s: float, now: datetime) -> Literal["daily", "idle"] | None:
        """Return why a session that was last used `idle_s` seconds ago must be reset, or None.

        `now` has the time zone that `at_hour` refers to. If the process has run since the last use, `idle_s` must come
        from its monotonic clock, so that a change of the wall clock does not reset a session.
        """
        if self.mode in ("idle", "both") and idle_s >= self.idle_minutes * 60:
            return "idle"
        if self.mode in ("daily", "both"):
            last_reset = now.replace(hour=self.at_hour, minute=0, second=0, microsecond=0)
            if last_reset > now:
                last_reset -= timedelta(days=1)
            if now.astimezone(UTC) - timedelta(seconds=max(idle_s, 0.0)) < last_reset:
                return "daily"
        return None
