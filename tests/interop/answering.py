"""A model that both runtimes can ask and that always says the same: token ids over vLLM's wire, and chat with a tool.

It reads the question, so answers follow from what is asked and not from its order; every second rollout of a question
is answered wrongly, so that the scores of a group differ. Log-probabilities are `toy_logprob`'s.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from aiohttp import web

from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import Sampled
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import toy_logprob
from palaestra_tokens.tokenizers import Tokenizer

ITEM = re.compile(r"This is item (\d+)\.")
QUESTION = re.compile(r"What is (\d+) \+ (\d+)\?")


class Gauge:
    """How many questions are under way at once; the first `crowd` wait until so many are, or `patience_s` is over."""

    def __init__(self, crowd: int, patience_s: float) -> None:
        self.most = self.now = 0
        self._crowd = crowd
        self._patience_s = patience_s
        self._met = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now >= self._crowd:
            self._met.set()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._met.wait()
        except TimeoutError:
            self._met.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.now -= 1


class Answering:
    """A token engine. `ends` says whether the end-of-turn token is among the ids, as it is with vLLM and SGLang."""

    name = "answering"

    def __init__(self, tokenizer: Tokenizer, *, ends: bool = True, gauge: Gauge | None = None, more: str = "") -> None:
        self.asked = 0
        self._last = math.inf
        self._moved = asyncio.Condition()
        self._tokenizer = tokenizer
        self._ends = ends
        self._gauge = gauge or Gauge(0, 0.0)
        self._more = more
        self._times: Counter[str] = Counter()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """The answer, or a wrong one; on a second turn the same again."""
        self.asked += 1
        text = self._tokenizer.decode(list(input_ids))
        item = int(found[1]) if (found := ITEM.search(text)) else 0
        async with self._gauge, self._moved:
            await self._moved.wait_for(lambda: item <= self._last)
        ids = list(self._tokenizer.encode(self.answer(text) + self._more, add_special_tokens=False))
        if self._ends:
            ids.append(self._tokenizer.encode("<|im_end|>", add_special_tokens=False)[0])
        logprobs = [toy_logprob(number, len(input_ids) + place) for place, number in enumerate(ids)]
        return Sampled(ids=ids, logprobs=logprobs, finish_reason="stop", policy_version="0")

    async def up_to(self, item: float) -> None:
        """Answer questions up to this item; the others wait."""
        async with self._moved:
            self._last = item
            self._moved.notify_all()

    def answer(self, text: str) -> str:
        """What is said to a conversation that is written out."""
        if said := re.findall(r"It is (\d+)", text):
            return f"Yes, {said[-1]}."
        found = QUESTION.search(text)
        if found is None:
            return "Hello."
        self._times[found[0]] += 1
        right = int(found[1]) + int(found[2])
        return f"It is {right if self._times[found[0]] % 2 else right + 1}."

    def reply(self, messages: Sequence[JSON]) -> JSON:
        """The next message of a chat in which a tool adds."""
        found = QUESTION.search(str(messages[0]["content"]))
        if found is None:
            return {"role": "assistant", "content": "Hello."}
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": self.answer(found[0])}
        arguments = f'{{"a": {found[1]}, "b": {found[2]}}}'
        call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


@asynccontextmanager
async def answering(tokenizer: Tokenizer, *, chat: bool = False, **how: JSON) -> AsyncIterator[tuple[Answering, str]]:
    """The model and the base URL where it is served: over chat completions, else over vLLM's wire."""
    engine = Answering(tokenizer, **how)
    if not chat:
        async with TokenLoopback(engine, tokenizer) as server:
            yield engine, f"{server.url}/v1"
        return

    async def complete(request: web.Request) -> web.Response:
        message = engine.reply((await request.json())["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return web.json_response(
            {
                "id": "c1",
                "object": "chat.completion",
                "created": 0,
                "model": engine.name,
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
            }
        )

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": engine.name, "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield engine, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
