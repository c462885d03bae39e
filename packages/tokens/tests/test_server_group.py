"""From configs to engines, and several servers as one."""

from __future__ import annotations

import asyncio

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, EngineRefused, EngineUnavailable
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.engines.scripted import ScriptedEngine
from palaestra_tokens.server_group import ServerGroup, _FirstAvailable, create_engine
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

HI: list[Message] = [{"role": "user", "content": "hi"}]


def config(server: LoopbackServer, **more: JSON) -> APIServerConfig:
    return APIServerConfig(base_url=server.url, model_name="m", **more)


def test_the_contracts_defaults() -> None:
    plain = APIServerConfig()
    assert (plain.timeout, plain.num_max_requests_at_once, plain.num_requests_for_eval) == (1200, 512, 64)
    assert (plain.model_name, plain.server_type) == ("default", "openai")
    assert (plain.tokenizer_name, plain.n_kwarg_is_ignored, plain.health_check) == ("none", False, True)
    assert plain.api_key is None
    assert plain.base_url is None
    assert all(field.description for field in APIServerConfig.model_fields.values())


def test_engines_by_server_type() -> None:
    assert isinstance(create_engine(APIServerConfig(base_url="http://h")), OpenAIEngine)
    scripted = create_engine(APIServerConfig(server_type="scripted", model_name="noop"))
    assert isinstance(scripted, ScriptedEngine)
    with raises(ConfigError, "trl"):
        create_engine(APIServerConfig(server_type="trl", base_url="http://h"))


def test_one_config_or_a_list_but_not_none() -> None:
    scripted = APIServerConfig(server_type="scripted", model_name="noop")
    assert len(ServerGroup(scripted).servers) == 1
    assert ServerGroup([scripted, scripted]).name == "noop"
    assert ServerGroup(ServerBaseline(server_type="scripted", model_name="noop")).name == "noop"
    with pytest.raises(ConfigError):
        ServerGroup([])
    with pytest.raises(ConfigError, match=r"--openai\.base_url"):
        ServerGroup(ServerBaseline())


def test_calls_that_fail_together_find_the_next_server() -> None:
    class Server:
        def __init__(self, name: str, broken: bool) -> None:
            self.name, self.broken = name, broken

        async def generate(self, input_ids: list[int], sampling: JSON) -> str:
            await asyncio.sleep(0)
            if self.broken:
                raise EngineUnavailable("it is down")
            return self.name

    async def go(broken: str, calls: int) -> list[str | BaseException]:
        group = _FirstAvailable([Server(name, name in broken) for name in "abc"])
        asked = [group.generate([1], {}) for _ in range(calls)]
        first = await asyncio.gather(*asked, return_exceptions=True)
        return [*first, *await asyncio.gather(group.generate([1], {}), return_exceptions=True)]

    for calls in (1, 2, 3, 4):
        assert asyncio.run(go("a", calls)) == ["b"] * (calls + 1)
        assert asyncio.run(go("ab", calls)) == ["c"] * (calls + 1)
        assert all(isinstance(each, EngineUnavailable) for each in asyncio.run(go("abc", calls)))


async def test_sessions_go_round_and_stay() -> None:
    async with LoopbackServer(FakeAnswer(completion())) as one, LoopbackServer(FakeAnswer(completion())) as two:
        group = ServerGroup([config(one), config(two)])
        await group.start()
        for _ in range(3):
            session = group.session(SessionContext())
            for _ in range(2):
                await session.chat_completion(messages=HI)
        await group.aclose()
        await group.aclose()
        result = [sum(seen.method == "POST" for seen in server.seen) for server in (one, two)]
    assert result == [4, 2]


async def test_calls_without_a_session_go_to_the_least_busy() -> None:
    async with LoopbackServer(FakeAnswer(completion())) as one, LoopbackServer(FakeAnswer(completion())) as two:
        one.gate, two.gate = asyncio.Event(), asyncio.Event()
        group = ServerGroup([config(one), config(two)])
        async with asyncio.TaskGroup() as calls:
            for _ in range(6):
                calls.create_task(group.chat_completion(messages=HI, split="eval"))
            await one.under_way(3)
            await two.under_way(3)
            one.gate.set()
            two.gate.set()
        await group.aclose()
        result = [len(one.seen), len(two.seen)]
    assert result == [3, 3]


async def test_the_in_flight_limit_is_each_servers_own() -> None:
    async with LoopbackServer(FakeAnswer(completion())) as server:
        server.gate = asyncio.Event()
        group = ServerGroup(config(server, num_max_requests_at_once=2))
        async with asyncio.TaskGroup() as calls:
            for _ in range(8):
                calls.create_task(group.session(SessionContext()).chat_completion(messages=HI))
            await server.under_way(2)
            server.gate.set()
        await group.aclose()
        result = server.most_at_once
    assert result == 2


async def test_when_a_server_is_unavailable_the_next_one_answers() -> None:
    async with LoopbackServer(FakeAnswer(cut=True)) as dead, LoopbackServer(FakeAnswer(completion())) as alive:
        group = ServerGroup([config(dead, timeout=1), config(alive)])
        session = group.session(SessionContext())
        await session.chat_completion(messages=HI)
        tried = len(dead.seen)
        await session.chat_completion(messages=HI)
        await group.aclose()
        assert len(dead.seen) == tried  # it stays with the one that answered
        answered = len(alive.seen)
    assert tried >= 1
    assert answered == 2


async def test_a_refusal_is_not_taken_to_the_next_server() -> None:
    async with LoopbackServer(FakeAnswer({}, 401)) as one, LoopbackServer(FakeAnswer(completion())) as two:
        group = ServerGroup([config(one), config(two)])
        with pytest.raises(EngineRefused):
            await group.session(SessionContext()).chat_completion(messages=HI)
        await group.aclose()
        result = len(two.seen)
    assert result == 0


async def test_a_failing_start_closes_all_and_raises_the_error_itself() -> None:
    async with LoopbackServer(FakeAnswer(completion())) as fine:
        refusing = FakeAnswer({}, 401)
        async with LoopbackServer(FakeAnswer(completion()), models=refusing) as bad:
            group = ServerGroup([config(fine), config(bad)])
            with pytest.raises(EngineRefused):
                await group.start()


async def test_scripted_sessions_and_the_missing_token_mode() -> None:
    group = ServerGroup(APIServerConfig(server_type="scripted", model_name="noop"))
    reply = await group.chat_completion(messages=HI, n=1, temperature=1.0)
    assert reply.choices[0].finish_reason == "stop"
    with raises(NotImplementedError):
        group.managed_server(tokenizer=None)


async def test_a_dedicated_server_is_the_least_busy_one() -> None:
    group = ServerGroup([APIServerConfig(server_type="scripted", model_name="noop") for _ in range(2)])
    async with group.dedicated_server() as one, group.dedicated_server() as other:
        assert [one, other] == group.servers
    async with group.dedicated_server() as again:
        assert again is group.servers[0]
