from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.session_reset import SessionResetPolicy
from palaestra_slots.core.errors import ConfigError

NOON = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
HOUR = 3600.0


def test_from_dict_and_the_constructor_have_the_same_defaults():
    assert SessionResetPolicy.from_dict({}) == SessionResetPolicy() == SessionResetPolicy.from_dict(None)
    assert SessionResetPolicy.from_dict({"mode": None, "at_hour": None, "idle_minutes": None}) == SessionResetPolicy()
    assert GatewayConfig.from_dict({}) == GatewayConfig() == GatewayConfig.from_dict(None)
    policy = SessionResetPolicy()
    assert (policy.mode, policy.at_hour, policy.idle_minutes, policy.bg_process_max_age_hours) == ("both", 4, 1440, 24)
    assert SessionResetPolicy.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    "values", [{"mode": "weekly"}, {"at_hour": 24}, {"idle_minutes": 0}, {"at_hour": True}, {"idle_minute": 3}]
)
def test_an_unusable_policy_is_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SessionResetPolicy.from_dict(values)


@pytest.mark.parametrize(
    ("mode", "idle_s", "now", "reason"),
    [
        ("idle", 24 * HOUR - 1, NOON, None),
        ("idle", 24 * HOUR, NOON, "idle"),
        ("daily", 8 * HOUR, NOON, None),  # at 4 exactly
        ("daily", 8 * HOUR + 1, NOON, "daily"),
        ("daily", 23 * HOUR, NOON.replace(hour=3), None),
        ("daily", 1 * HOUR, NOON.replace(hour=4), "daily"),
        ("both", 9 * HOUR, NOON, "daily"),
        ("both", 24 * HOUR, NOON, "idle"),
        ("none", 9999 * HOUR, NOON, None),
        ("both", -5 * HOUR, NOON, None),  # the clock was set back
    ],
)
def test_when_a_session_is_reset(mode, idle_s, now, reason):
    assert SessionResetPolicy(mode=mode).reason(idle_s, now) == reason


def test_a_daily_reset_comes_once_on_a_day_of_23_hours():
    berlin = ZoneInfo("Europe/Berlin")
    policy = SessionResetPolicy(mode="daily", at_hour=4)
    before, after = datetime(2026, 3, 29, 3, 59, tzinfo=berlin), datetime(2026, 3, 29, 4, 1, tzinfo=berlin)
    assert policy.reason(HOUR / 60, before) is None
    assert policy.reason((after - before).total_seconds(), after) == "daily"
    assert policy.reason(60, after + timedelta(minutes=1, seconds=30)) is None


def test_a_platforms_policy_comes_before_its_types_and_the_default():
    config = GatewayConfig.from_dict(
        {
            "default_reset_policy": {"idle_minutes": 1},
            "reset_by_type": {"group": {"idle_minutes": 2}},
            "reset_by_platform": {"matrix": {"idle_minutes": 3}},
        }
    )
    assert config.reset_policy("matrix", "group").idle_minutes == 3
    assert config.reset_policy("slack", "group").idle_minutes == 2
    assert config.reset_policy("slack", "dm").idle_minutes == 1
