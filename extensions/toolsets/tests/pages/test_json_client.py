"""Asking a provider's server: what is tried again, what is given up, and whose fault it is then."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from golden_messages import raises
from manual_clock import ManualClock
from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON, Blame
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer
from palaestra_toolsets.json_client import JsonServer, objects_at, text

OK = FakeAnswer({"ok": True})


def ask(server: LoopbackServer, clock: ManualClock | None = None, **more: JSON) -> JSON:
    async def main() -> JSON:
        async with server:
            provider = JsonServer(
                "engine",
                server.url,
                "web_api_keys.engine",
                {"X-Key": "secret"},
                asyncio.Semaphore(2),
                clock=clock or ManualClock(),
                rng=random.Random(1),
                **more,
            )
            return await provider.post("/search", {"q": "é"})

    return asyncio.run(main())


def test_a_post_carries_json_and_the_key() -> None:
    server = LoopbackServer(OK)
    assert ask(server) == {"ok": True}
    assert server.seen[0].path == "/search"
    assert server.seen[0].body == {"q": "é"}
    assert server.seen[0].headers["X-Key"] == "secret"


@pytest.mark.parametrize("first", [FakeAnswer({}, 429), FakeAnswer({}, 503), FakeAnswer(cut=True)])
def test_what_can_pass_by_itself_is_tried_again(first: FakeAnswer) -> None:
    clock = ManualClock()
    assert ask(LoopbackServer(first, first, OK), clock) == {"ok": True}
    assert len(clock.slept) == 2


def test_a_rate_limit_says_how_long_to_wait() -> None:
    clock = ManualClock()
    ask(LoopbackServer(FakeAnswer({}, 429, {"Retry-After": "7"}), OK), clock)
    assert 7.0 <= clock.slept[0] <= 7.5


def test_a_rate_limit_that_does_not_pass_is_not_the_models_fault() -> None:
    server = LoopbackServer(FakeAnswer({"message": "slow down"}, 429))
    with raises(ToolUnavailable, "HTTP 429", 3, "slow down") as caught:
        ask(server, retry=RetryPolicy(attempts=3))
    assert caught.value.blame is Blame.TOOL
    assert len(server.seen) == 3


def test_a_server_that_is_silent_or_gone_is_unavailable() -> None:
    once = RetryPolicy(attempts=1)
    with pytest.raises(ToolUnavailable, match="cannot be reached"):
        ask(LoopbackServer(FakeAnswer(hang=True)), retry=once, try_timeout_s=0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = JsonServer(
            "engine", f"http://127.0.0.1:{free.getsockname()[1]}", "k", {}, asyncio.Semaphore(1), retry=once
        )
        with pytest.raises(ToolUnavailable, match="cannot be reached"):
            asyncio.run(gone.get("/search", {"q": "x"}))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (FakeAnswer({}, 401), "web_api_keys.engine"),
        (FakeAnswer({}, 404), "check its address"),
        (FakeAnswer({}, 302, {"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
        (FakeAnswer(b"<html>"), "answer with JSON"),
        (FakeAnswer(b"[" * 100_000), "answer with JSON"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(answer: FakeAnswer, says: str) -> None:
    server = LoopbackServer(answer)
    with pytest.raises(ToolUnavailable, match=says):
        ask(server)
    assert len(server.seen) == 1


def test_a_reply_that_repeats_the_key_does_not_reveal_it() -> None:
    with pytest.raises(ToolUnavailable) as caught:
        ask(LoopbackServer(FakeAnswer({"error": "the key secret is unknown"}, 401)))
    assert "is unknown" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_reply_without_end_is_cut_off() -> None:
    with pytest.raises(ToolUnavailable, match="more than 16 MB"):
        ask(LoopbackServer(FakeAnswer(b"x" * ((16 << 20) + 1))))


def test_a_request_that_is_refused_is_the_models_to_mend() -> None:
    with pytest.raises(ToolMistake, match=r"HTTP 422.*no such language"):
        ask(LoopbackServer(FakeAnswer({"detail": "no such language"}, 422)))


def test_rows_are_found_where_they_are_promised() -> None:
    server = JsonServer("engine", "http://engine.example", "k", {}, asyncio.Semaphore(1))
    assert objects_at(server, {"web": {"results": [{"a": 1}]}}, "web", "results") == [{"a": 1}]
    assert objects_at(server, {"web": None}, "web", "results") == []
    for told in ([], {"web": {"results": {}}}, {"web": {"results": [1]}}):
        with pytest.raises(ToolUnavailable, match="unexpected format"):
            objects_at(server, told, "web", "results")
    assert text({"a": None, "b": "", "c": "x"}, "a", "b", "c") == "x"
    assert text({"a": 1}, "a") == ""
