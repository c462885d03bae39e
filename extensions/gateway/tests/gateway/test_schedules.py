"""Schedules of jobs against times that crontab(5) gives."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_gateway.schedules import parse

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 3, 1, 10, 7, 30, tzinfo=UTC).timestamp()  # a Sunday


def times(text, count, since=NOW, zone=UTC):
    schedule, at, found = parse(text, since, zone), since, []
    while len(found) < count and (at := schedule.after(at)) is not None:
        found.append(datetime.fromtimestamp(at, zone).strftime("%m-%d %H:%M:%S"))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", ["03-01 10:37:30"]),
        ("2 hours", ["03-01 12:07:30"]),
        ("1d", ["03-02 10:07:30"]),
        ("2026-03-01T18:00", ["03-01 18:00:00"]),
        ("2026-03-01T18:00+02:00", ["03-01 16:00:00"]),
        ("every 90m", ["03-01 11:37:30", "03-01 13:07:30", "03-01 14:37:30"]),
        ("Every 1 day", ["03-02 10:07:30", "03-03 10:07:30", "03-04 10:07:30"]),
        ("*/20 * * * *", ["03-01 10:20:00", "03-01 10:40:00", "03-01 11:00:00"]),
        ("0 9 * * 1-5", ["03-02 09:00:00", "03-03 09:00:00", "03-04 09:00:00"]),
        ("0 9 * * mon,7", ["03-02 09:00:00", "03-08 09:00:00", "03-09 09:00:00"]),
        ("0 0 13 * fri", ["03-06 00:00:00", "03-13 00:00:00", "03-20 00:00:00"]),  # either day
        ("0 0 */10 * fri", ["05-01 00:00:00", "07-31 00:00:00", "08-21 00:00:00"]),  # both days
        ("5 4 29 feb *", ["02-29 04:05:00"]),
        ("20,40 9 * * *", ["03-02 09:20:00", "03-02 09:40:00", "03-03 09:20:00"]),
        ("@weekly", ["03-08 00:00:00", "03-15 00:00:00", "03-22 00:00:00"]),
    ],
)
def test_the_times_of_a_schedule(text, expected):
    assert times(text, 3)[: len(expected)] == expected


def test_a_time_that_a_change_of_the_clocks_skips_or_repeats_comes_once():
    spring = datetime(2026, 3, 28, 12, tzinfo=BERLIN).timestamp()
    assert times("30 2 * * *", 2, spring, BERLIN) == ["03-29 03:30:00", "03-30 02:30:00"]
    autumn = datetime(2026, 10, 24, 12, tzinfo=BERLIN).timestamp()
    assert times("30 2 * * *", 2, autumn, BERLIN) == ["10-25 02:30:00", "10-26 02:30:00"]


@pytest.mark.parametrize(
    "text",
    ["", "soon", "every", "every 10s", "every day", "60 * * * *", "* * * *", "0 9 * * 8", "0 0 30 2 *", "5-1 * * * *",
     "*/0 * * * *", "a * * * *", "2020-01-01T00:00", "2026-13-01T00:00", "1.5h", "-5m", "999999w", "every 99999w"],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text, NOW, UTC)


@given(st.text(alphabet="0123456789*/,-@ abcdehmnorstuvwy:T.+", max_size=25))
def test_any_text_is_a_schedule_or_a_value_error(text):
    try:
        schedule = parse(text, NOW, UTC)
    except ValueError:
        return
    at = schedule.after(NOW)
    assert at is None or at > NOW
