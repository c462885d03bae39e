"""Whose fault a failed call is: the engine's, which ends the rollout, or the request's, which the agent chose."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from palaestra_slots.core.retry import RetryPolicy
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import PROBE, OpenAIEngine
from palaestra_tokens.recording import Conversations, RecordingEndpoint
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer

ERROR = {"error": {"message": "CUDA error"}}
FAILS, READY = FakeAnswer(ERROR, status=500), None


def blamed(answer: FakeAnswer, probe: FakeAnswer | None) -> tuple[int, Conversations]:
    """The status of a call that a server answers so, and the rollout's conversations."""

    async def main() -> tuple[int, Conversations]:
        async with LoopbackServer(answer, probe=probe) as server:
            config = APIServerConfig(base_url=f"{server.url}/v1", model_name="m", timeout=1)
            engine = OpenAIEngine(config, retry=RetryPolicy(attempts=2, first_s=0.01))

            async def check() -> None:
                await engine.chat_completion(messages=[PROBE])

            conversations = Conversations(engine, check_engine=check)
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            async with RecordingEndpoint() as endpoint, aiohttp.ClientSession() as session:
                with endpoint.open(conversations) as address:
                    url, headers = f"{address.openai_url}/chat/completions", {"Authorization": f"Bearer {address.key}"}
                    async with session.post(url, json=body, headers=headers) as response:
                        await response.read()
            await engine.aclose()
            return response.status, conversations

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (FAILS, 500),
        (FakeAnswer(hang=True), 500),
        (FakeAnswer({"choices": []}), 500),
        (FakeAnswer(ERROR, status=400), 400),
    ],
)
def test_a_failure_on_one_request_alone_is_the_agents(answer: FakeAnswer, status: int) -> None:
    answered, conversations = blamed(answer, READY)
    assert (answered, conversations.failure, conversations.refused) == (status, None, 1)


@pytest.mark.parametrize(
    ("answer", "probe"),
    [
        (FakeAnswer(ERROR, status=429), READY),
        (FakeAnswer(ERROR, status=503), READY),
        (FakeAnswer(cut=True), READY),
        (FAILS, FAILS),
        (FakeAnswer(hang=True), FakeAnswer(hang=True)),
        (FakeAnswer(ERROR, status=400), FakeAnswer(ERROR, status=401)),
    ],
)
def test_a_failure_of_the_engine_ends_the_rollout(answer: FakeAnswer, probe: FakeAnswer | None) -> None:
    answered, conversations = blamed(answer, probe)
    assert (answered, conversations.refused) == (503, 1)
    assert conversations.failure is not None
    assert conversations.failed.is_set()
