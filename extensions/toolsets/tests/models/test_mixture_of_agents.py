"""`mixture_of_agents` against a real chat completions server with several models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot


async def no_slot() -> Slot:
    raise AssertionError("no slot is needed")


@asynccontextmanager
async def models(asked: list[JSON], broken: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """A server whose models answer with their name; `broken` ones refuse every request."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append({**body, "authorization": request.headers.get("Authorization")})
        if body["model"] in broken:
            return web.json_response({"error": "no such model"}, status=400)
        content = f"{body['model']} of {len(body['messages'])}"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask(asked: list[JSON], broken: tuple[str, ...] = (), **settings: JSON) -> JSON:
    async def main() -> JSON:
        async with models(asked, broken) as url:
            given = ToolSettings(moa_base_url=url, moa_models=["small", "large"], moa_api_key="k", **settings)
            tools = ToolRuntime(build_tool_registry(["moa"], settings=given), no_slot, "t")
            return json.loads(await tools.handle("mixture_of_agents", {"user_prompt": "Why?"}))

    return asyncio.run(main())


def test_the_aggregator_sees_the_question_and_every_answer() -> None:
    asked: list[JSON] = []
    reply = ask(asked, moa_aggregator="judge")
    assert reply == {"success": True, "response": "judge of 2", "answers": 2}
    assert [each["model"] for each in asked][-1] == "judge"
    assert {each["model"] for each in asked[:2]} == {"small", "large"}
    assert all(each["messages"] == [{"role": "user", "content": "Why?"}] for each in asked[:2])
    text = asked[-1]["messages"][1]["content"]
    assert all(part in text for part in ("Why?", "small of 1", "large of 1"))
    assert {each["authorization"] for each in asked} == {"Bearer k"}


def test_a_model_that_fails_is_left_out_and_named() -> None:
    reply = ask([], ("large",))
    assert (reply["response"], reply["answers"]) == ("small of 2", 1)
    assert "no such model" in reply["failed"]["large"]


def test_without_any_answer_the_tool_is_unavailable() -> None:
    with pytest.raises(ToolUnavailable, match="no such model"):
        ask([], ("small", "large"))


def test_without_models_the_tool_is_missing_with_the_settings() -> None:
    registry = build_tool_registry(["moa"])
    assert "moa_base_url" in registry.missing["mixture_of_agents"]
