"""Computes when a scheduled job runs: after a delay, at intervals, at the times of a cron line, or at one point in
time.

    30m, 2h, 1d                   once, after that time
    every 30m, every 2h           repeatedly, counted from the job's creation
    0 9 * * 1-5, @daily           a cron line: minute, hour, day of month, month, day of week (0 and 7 are Sunday)
    2026-12-24T18:00              once, in the gateway's time zone unless the text names a time zone

Cron lines follow crontab(5): lists, ranges, steps and names of months and days. If the day of month and the day of week
are both restricted, a day that matches either counts. A time that a clock change skips is moved forward by the change.
A time that occurs twice because of a clock change counts once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo

MOST_S = 100 * 366 * 86_400.0  # the dates of Python end with the year 9999
LEAST_INTERVAL_S = 60.0
_LONGEST_DAYS = 366 * 8 + 2  # the longest time from one 29 February to the next

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_SPAN = re.compile(r"(\d{1,6})\s*(s|m|h|d|w)(?:ec(?:ond)?s?|in(?:ute)?s?|(?:ou)?rs?|ays?|eeks?)?")
_NAMED = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
_MONTHS = {
    "jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6, "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11,
    "dec": 12,
}  # fmt: skip
_DAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}


@dataclass(frozen=True, slots=True)
class CronLine:
    """A cron line: the values of each field. `either` means that a day may match by its date or by its weekday."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    def on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_date, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_date or by_weekday if self.either else by_date and by_weekday

    def after(self, moment: float, zone: tzinfo | None) -> float | None:
        """Return the first time after `moment`, in seconds since the epoch. Returns None if there is no such time, for
        example on 30 February."""
        today = datetime.fromtimestamp(moment, zone).date()
        for offset in range(_LONGEST_DAYS):
            day = today + timedelta(days=offset)
            if not self.on(day):
                continue
            for hour in sorted(self.hours):
                for minute in sorted(self.minutes):
                    at = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone).timestamp()
                    if at > moment:
                        return at
        return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which a job runs: the times of a cron line, times at an interval in seconds counted from `start`, or
    only the time `start`."""

    start: float
    interval_s: float = 0.0
    cron: CronLine | None = None
    zone: tzinfo | None = None

    def after(self, moment: float) -> float | None:
        """Return the first time after `moment`, in seconds since the epoch, or None."""
        if self.cron is not None:
            return self.cron.after(moment, self.zone)
        if self.interval_s:
            return self.start + self.interval_s * max(1, math.floor((moment - self.start) / self.interval_s) + 1)
        return self.start if self.start > moment else None


def parse(text: str, since: float, zone: tzinfo | None = None) -> Schedule:
    """Return the schedule of a job that was created at `since`. Raises `ValueError` with a message about the
    mistake."""
    words = " ".join(text.lower().split())
    if words.startswith("every "):
        interval_s = _span(words.removeprefix("every "))
        if interval_s is None:
            raise ValueError(f"{text!r} is not an interval; write for example every 30m, every 2h or every 1d")
        if interval_s < LEAST_INTERVAL_S:
            raise ValueError("a job may run at most once a minute")
        if interval_s > MOST_S:
            raise ValueError(f"{text!r} is too long: a job runs at least once in a hundred years")
        return Schedule(since, interval_s=interval_s)
    delay_s = _span(words)
    if delay_s is not None:
        if delay_s > MOST_S:
            raise ValueError(f"{text!r} is too far away: a job runs within a hundred years")
        return Schedule(since + delay_s)
    fields = _NAMED.get(words, words).split(" ")
    if len(fields) == 5:
        line = _cron(fields)
        if line.after(since, zone) is None:
            raise ValueError(f"the cron line {text!r} names a day that does not exist")
        return Schedule(since, cron=line, zone=zone)
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a schedule; write a delay (30m), an interval (every 2h), a cron line of five fields "
            "(0 9 * * 1-5) or a point in time (2026-12-24T18:00)"
        ) from None
    moment = (at.replace(tzinfo=zone) if at.tzinfo is None else at).timestamp()
    if moment <= since:
        raise ValueError(
            f"{text.strip()} is in the past; it is now {datetime.fromtimestamp(since, zone):%Y-%m-%dT%H:%M}"
        )
    return Schedule(moment)


def _span(text: str) -> float | None:
    found = _SPAN.fullmatch(text)
    return int(found[1]) * _UNITS[found[2]] if found else None


def _cron(fields: Sequence[str]) -> CronLine:
    minutes, hours, days, months, weekdays = fields
    return CronLine(
        _field_values("minute", minutes, 0, 59),
        _field_values("hour", hours, 0, 23),
        _field_values("day of month", days, 1, 31),
        _field_values("month", months, 1, 12, _MONTHS),
        frozenset(value % 7 for value in _field_values("day of week", weekdays, 0, 7, _DAYS)),
        either=not days.startswith("*") and not weekdays.startswith("*"),
    )


def _field_values(name: str, text: str, least: int, most: int, names: dict[str, int] | None = None) -> frozenset[int]:
    """Return the values that one field of a cron line lists. Raises `ValueError`."""
    values: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        try:
            width = int(step) if slash else 1
            if span == "*":
                low, high = least, most
            else:
                low = _number(first, names)
                high = _number(last, names) if dash else (most if slash else low)
        except ValueError:
            raise ValueError(f"{part!r} is not a valid {name} in a cron line") from None
        if width < 1 or not least <= low <= high <= most:
            raise ValueError(f"{part!r} is not a valid {name} in a cron line; the values are {least} to {most}")
        values.update(range(low, high + 1, width))
    return frozenset(values)


def _number(text: str, names: dict[str, int] | None) -> int:
    found = (names or {}).get(text)
    if found is None and not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text) if found is None else found
