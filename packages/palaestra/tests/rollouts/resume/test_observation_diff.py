"""Why two observations differ: what explains itself, what the agent had asked for, and what nothing explains."""

from __future__ import annotations

import json

import pytest

from palaestra.rollouts.resume.observation_diff import Kind, classify, first_difference


def reply(output: str, exit_code: int = 0) -> str:
    return json.dumps({"output": output, "exit_code": exit_code, "error": None})


@pytest.mark.parametrize(
    ("recorded", "replayed", "kind"),
    [
        ("Fri Nov 20 10:56:20 UTC 2026", "Sat Nov 21 01:02:03 UTC 2026", Kind.TIME),
        ("started 2026-11-20T10:56:20.123Z", "started 2026-11-21T10:56:21.9Z", Kind.TIME),
        ("5 passed in 0.03s", "5 passed in 1.20s", Kind.TIME),
        ("real\t0m0.012s\nuser\t0m0.001s", "real\t1m0.200s\nuser\t0m0.070s", Kind.TIME),
        ("1795172684.214686378", "1795172685.189139155", Kind.TIME),
        ("[1] 4711", "[1] 12", Kind.PID),
        ("sh: line 1:  4711 Killed  ./a", "sh: line 1:  12 Killed  ./a", Kind.PID),
        ("server pid=88 is up", "server pid=1023 is up", Kind.PID),
        ("<A object at 0x7f12aabbccdd>", "<A object at 0x7fffaabb1122>", Kind.RANDOMNESS),
        ("/tmp/tmp.a8Hc72Kq", "/tmp/tmp.P0xx12ab", Kind.RANDOMNESS),
        ("a\nb\nc", "c\na\nb", Kind.ORDER),
        ("{'x', 'y'}", "{'y', 'x'}", Kind.ORDER),
        ("at 10:00:01 pid 7", "at 11:00:01 pid 9", Kind.TIME),
        ("3 failed", "4 failed", Kind.OTHER),
        ("a\nb", "a", Kind.OTHER),
        ("", "x", Kind.OTHER),
    ],
)
def test_what_explains_itself(recorded: str, replayed: str, kind: Kind) -> None:
    assert classify(reply(recorded), reply(replayed), "") is kind
    assert classify(recorded, replayed, "") is kind


@pytest.mark.parametrize(
    ("recorded", "replayed", "asked", "kind"),
    [
        ("8123", "99", "echo $$", Kind.PID),
        ("22822412", "303423809", "echo $RANDOM", Kind.RANDOMNESS),
        ("heads", "tails", "import random", Kind.RANDOMNESS),
        ("0.001234", "0.00412", "time.perf_counter()", Kind.TIME),
        ("commit 0a1b2c3d4e", "commit 99aabbccdd", "git commit -m x", Kind.TIME),
        ("8123", "99", "wc -c a.txt", Kind.OTHER),
        ("1 line\n2 lines", "1 line", "echo $RANDOM", Kind.OTHER),
    ],
)
def test_what_the_agent_had_asked_for(recorded: str, replayed: str, asked: str, kind: Kind) -> None:
    assert classify(reply(recorded), reply(replayed), asked) is kind


@pytest.mark.parametrize("shape", [reply, lambda text, code=0: f"<tool_response>{reply(text, code)}</tool_response>"])
def test_an_exit_code_is_never_explained_away(shape) -> None:
    assert classify(shape("10:00", 0), shape("10:01", 0), "date; echo $RANDOM") is Kind.TIME
    assert classify(shape("10:00", 0), shape("10:01", 1), "date; echo $RANDOM") is Kind.OTHER
    assert classify(shape("same", 0), shape("same", 1), "date; echo $RANDOM") is Kind.OTHER


def test_the_place_of_the_difference_is_shown() -> None:
    assert first_difference(reply("same\nthis one"), reply("same\nthat one")) == ("this one", "that one")
    assert first_difference(reply("a"), reply("a\nb")) == ("", "b")
    was, now = first_difference(reply("x" * 5000 + "1"), reply("x" * 5000 + "2"))
    assert (was[-1], now[-1]) == ("1", "2")
    assert len(was) <= 200
    assert first_difference(reply("same", 0), reply("same", 1)) == (reply("same", 0), reply("same", 1))
