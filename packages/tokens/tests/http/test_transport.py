"""The HTTP client against a real server on the loopback: retries, bounds, broken connections, typed errors."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest
from yarl import URL

from manual_clock import ManualClock
from palaestra_slots.core.errors import ContextExceeded, EngineRefused, EngineUnavailable
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON
from palaestra_tokens.http.transport import Transport
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer

OK = FakeAnswer({"ok": True})


def transport(clock: ManualClock, **options: JSON) -> Transport:
    return Transport(model="m7", clock=clock, rng=random.Random(1), **options)


async def post(server: LoopbackServer, client: Transport) -> bytes:
    try:
        return await client.post_json(URL(server.url) / "v1" / "chat", {"q": "é"})
    finally:
        await client.aclose()


def outcome(server: LoopbackServer, client: Transport) -> bytes:
    async def go() -> bytes:
        async with server:
            return await post(server, client)

    return asyncio.run(go())


async def test_a_post_carries_json_and_headers_and_keeps_the_connection() -> None:
    clock = ManualClock()
    async with LoopbackServer(OK) as server:
        client = transport(clock, headers={"Authorization": "Bearer k"})
        url = URL(server.url) / "v1"
        assert await client.post_json(url, {"q": "é"}) == b'{"ok": true}'
        await client.post_json(url, {})
        assert client.requests == 2
        await client.aclose()
        await client.aclose()
    assert server.seen[0].body == {"q": "é"}
    assert server.seen[0].headers["Authorization"] == "Bearer k"
    assert server.seen[0].headers["Content-Type"] == "application/json"
    assert clock.slept == []


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_what_can_pass_by_itself_is_tried_again(status: int) -> None:
    clock = ManualClock()
    client = transport(clock)
    assert (
        outcome(LoopbackServer(FakeAnswer({"error": "busy"}, status), FakeAnswer({}, status), OK), client)
        == b'{"ok": true}'
    )
    assert (client.retries, client.failures) == (2, 0)
    assert 0.25 <= clock.slept[0] <= 0.5 <= clock.slept[1] <= 1.0


def test_retry_after_is_honoured() -> None:
    clock = ManualClock()
    outcome(LoopbackServer(FakeAnswer({}, 429, {"Retry-After": "7"}), OK), transport(clock))
    assert 7.0 <= clock.slept[0] <= 7.5


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: [error]])
def test_the_wait_in_geminis_reply_is_honoured(wrap: Callable[[JSON], JSON]) -> None:
    clock = ManualClock()
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "45.837906927s"}
    error = {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "quota", "details": [info]}}
    outcome(LoopbackServer(FakeAnswer(wrap(error), 429), OK), transport(clock))
    assert 45.8 <= clock.slept[0] <= 49.0


def test_a_cut_connection_is_tried_again() -> None:
    clock = ManualClock()
    assert outcome(LoopbackServer(FakeAnswer(cut=True), OK), transport(clock)) == b'{"ok": true}'
    assert len(clock.slept) == 1


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "bad"),
        (401, "Set the variable OPENAI_API_KEY"),
        (403, "check OPENAI_API_KEY"),
        (404, "--openai.model_name"),
        (422, "bad"),
    ],
)
def test_a_refusal_is_final_and_names_the_way_out(status: int, says: str) -> None:
    server = LoopbackServer(FakeAnswer({"error": {"message": "bad thing"}}, status))
    with pytest.raises(EngineRefused) as caught:
        outcome(server, transport(ManualClock()))
    text = str(caught.value)
    assert len(server.seen) == 1
    assert says in text
    assert f"HTTP {status}" in text
    assert "'m7'" in text
    assert server.url in text
    assert "bad thing" in text


def test_a_redirect_is_not_followed_since_it_would_turn_the_post_into_a_get() -> None:
    server = LoopbackServer(FakeAnswer({}, 301, {"Location": "/elsewhere"}))
    with pytest.raises(EngineRefused, match="redirects"):
        outcome(server, transport(ManualClock()))
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("message", "window"),
    [
        ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens", 8192),
        ("the request exceeds the available context size (4096 tokens)", 4096),
        ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", 4096),
        ("prompt is too long: 210000 tokens > 200000 maximum", 200000),
        ({"message": "no room", "code": "context_length_exceeded"}, None),
        ("Input length (70001 tokens) exceeds the maximum allowed length (53682 tokens). Use a shorter input", 53682),
        (
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
            4096,
        ),
        ("Input validation error: `inputs` must have less than 1024 tokens. Given: 2000", 1024),
        ("The input token count (1196265) exceeds the maximum number of tokens allowed (1048575)", 1048575),
        ("This model's maximum prompt length is 131072 but the request contains 537812 tokens.", 131072),
        ("Invalid request: Your request exceeded model token limit: 262144 (requested: 262300)", 262144),
        ("The number of tokens to keep from the initial prompt is greater than the context length.", None),
        ("the model is loaded with context length of only 4096 tokens, which is not enough", 4096),
        ("Please reduce the length of the messages or completion.", None),
        ("Prompt exceeds max length", None),
        ("Range of input length should be [1, 30720]", 30720),
    ],
)
def test_a_conversation_that_does_not_fit_is_told_apart(message: JSON, window: int | None) -> None:
    with pytest.raises(ContextExceeded) as caught:
        outcome(LoopbackServer(FakeAnswer({"error": message}, 400)), transport(ManualClock()))
    assert caught.value.window_tokens == window


@pytest.mark.parametrize(
    "detail",
    ["tools: too many tools", "max_tokens exceeds the limit of 8192", "maximum allowed length of a name is 64 letters"],
)
def test_other_bad_requests_are_not_taken_for_a_full_context(detail: str) -> None:
    with pytest.raises(EngineRefused) as caught:
        outcome(LoopbackServer(FakeAnswer({"detail": detail}, 400)), transport(ManualClock()))
    assert not isinstance(caught.value, ContextExceeded)


def test_a_server_that_stays_overloaded_is_unavailable_after_the_tries() -> None:
    server = LoopbackServer(FakeAnswer({"message": "queue full"}, 503))
    with pytest.raises(EngineUnavailable, match=r"HTTP 503.*tried 3 times.*queue full"):
        outcome(server, transport(ManualClock(), retry=RetryPolicy(attempts=3)))
    assert len(server.seen) == 3


def test_no_retry_starts_after_the_time_is_over() -> None:
    clock = ManualClock()
    with pytest.raises(EngineUnavailable):
        outcome(LoopbackServer(FakeAnswer({}, 503, {"Retry-After": "9"})), transport(clock, timeout_s=20.0))
    assert len(clock.slept) == 2


async def test_waiting_for_a_turn_costs_no_tries() -> None:
    """Behind a long queue a server's hiccup is worth another try as anywhere."""
    clock = ManualClock()

    async def go() -> list[bytes]:
        async with LoopbackServer(OK, FakeAnswer({}, 503), OK) as server:
            server.gate = asyncio.Event()
            client = transport(clock, lanes={"train": 1}, timeout_s=20.0)
            asked = [asyncio.create_task(client.post_json(URL(server.url) / "v1", {})) for _ in range(2)]
            await server.under_way(1)
            clock.now += 100.0
            server.gate.set()
            try:
                return list(await asyncio.gather(*asked))
            finally:
                await client.aclose()

    assert await go() == [b'{"ok": true}'] * 2


async def test_an_unreachable_port_names_the_address_and_what_to_check() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        async def go() -> None:
            client = transport(ManualClock(), retry=RetryPolicy(attempts=2))
            try:
                await client.post_json(URL(f"http://user:secret@127.0.0.1:{port}/v1?key=secret"), {})
            finally:
                await client.aclose()

        with pytest.raises(EngineUnavailable) as caught:
            await go()
    assert f"http://127.0.0.1:{port}/v1" in str(caught.value)
    assert "--openai.base_url" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_reply_that_never_comes_is_unavailable() -> None:
    client = Transport(model="m7", timeout_s=0.05)
    with pytest.raises(EngineUnavailable, match=r"within 0\.05 s"):
        outcome(LoopbackServer(FakeAnswer(hang=True)), client)
    assert client.in_flight == 0


async def test_a_lane_bounds_what_is_under_way_and_another_lane_is_not_behind_it() -> None:
    async with LoopbackServer(OK) as server:
        server.gate = asyncio.Event()
        client = Transport(lanes={"train": 3, "eval": 1})
        url = URL(server.url)
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(client.post_json(url, {}))
            group.create_task(client.post_json(url, {}, lane="eval"))
            await server.under_way(4)
            server.gate.set()
        assert client.requests == 11
        await client.aclose()
        result = server.most_at_once
    assert result == 4


async def test_cancelling_a_request_frees_its_place() -> None:
    async with LoopbackServer(FakeAnswer(hang=True), OK) as server:
        client = Transport(lanes={"train": 1})
        first = asyncio.create_task(client.post_json(URL(server.url), {}))
        await server.under_way(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await client.post_json(URL(server.url), {}) == b'{"ok": true}'
        assert client.in_flight == 0
        await client.aclose()
