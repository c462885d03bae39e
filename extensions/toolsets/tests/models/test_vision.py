"""`vision_analyze` against a real HTTP server that decodes what it is sent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable

import pytest

from golden_messages import check_message
from palaestra.tools.arguments import InvalidArguments
from palaestra.tools.registry.build import build_tool_registry, unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.errors import IsolationUnavailable, ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec

from .image_server import SeeingServer, png

RED = png(40, 30, (255, 0, 0))
Ask = Callable[..., Awaitable[JSON]]


async def _no_slot() -> Slot:
    raise AssertionError("an address needs no slot")


def asking(
    scenario: Callable[[SeeingServer, Ask], Awaitable[None]],
    slot: Callable[[], Awaitable[Slot]] = _no_slot,
    **told: JSON,
) -> None:
    """Run a scenario with a server and the tool that asks it."""

    async def main() -> None:
        async with SeeingServer() as server:
            settings = ToolSettings(
                **{"vision_base_url": server.url, "vision_model": "eyes", "web_allow": ["127.0.0.1"], **told}
            )
            tools = ToolRuntime(build_tool_registry(["vision"], settings=settings), slot, "t")

            async def ask(where: str, question: str = "what is it?") -> JSON:
                return json.loads(await tools.handle("vision_analyze", {"image_url": where, "question": question}))

            await scenario(server, ask)

    asyncio.run(main())


def test_an_image_at_an_address_arrives_whole() -> None:
    async def scenario(server: SeeingServer, ask: Ask) -> None:
        server.files["red"] = (RED, "text/plain")  # what a server says of it does not count
        reply = await ask(f"{server.url}/files/red")
        assert reply["analysis"] == "what is it? 40x30 ff0000"
        assert reply["success"] is True
        assert reply["usage"] == {"prompt_tokens": 85, "completion_tokens": 3, "total_tokens": 88}
        request, body = server.asked[0]
        assert request.headers["Authorization"] == "Bearer secret"
        assert (body["model"], body["max_tokens"]) == ("eyes", 7)

    asking(scenario, vision_api_key="secret", vision_max_tokens=7)


def test_a_data_url_is_taken_as_it_is_written() -> None:
    async def scenario(server: SeeingServer, ask: Ask) -> None:
        url = f"data:image/jpeg;base64,{base64.b64encode(png(2, 1, (0, 0, 255))).decode()}"
        assert (await ask(url, "size?"))["analysis"] == "size? 2x1 0000ff"
        assert "not base64" in (await ask("data:image/png;base64,@@"))["error"]
        assert "no comma" in (await ask("data:image/png"))["error"]

    asking(scenario)


@pytest.mark.slots
async def test_a_file_of_the_slot_is_read_through_its_file_channel() -> None:
    try:
        async with LocalBackend() as backend, SeeingServer() as server:
            slot = await backend.create(SlotSpec(), "vision-test")
            await slot.write_bytes("shots/green.png", png(3, 4, (0, 255, 0)))
            await slot.write_bytes("shots/notes.txt", b"not an image")

            async def source() -> Slot:
                return slot

            settings = ToolSettings(vision_base_url=f"{server.url}/v1/", vision_max_image_bytes=500)
            tools = ToolRuntime(build_tool_registry(["vision"], settings=settings), source, "t")

            async def ask(path: str) -> JSON:
                return json.loads(await tools.handle("vision_analyze", {"image_url": path, "question": "?"}))

            assert (await ask("shots/green.png"))["analysis"] == "? 3x4 00ff00"
            assert "not an image" in (await ask("shots/notes.txt"))["error"]
            assert (await ask("shots/gren.png"))["similar_files"] == ["shots/green.png"]
            await slot.write_bytes("big.png", png(300, 300, (1, 2, 3)) + bytes(500))
            assert "at most 500" in (await ask("big.png"))["error"]
            assert "is a directory" in (await ask("shots"))["error"]
    except IsolationUnavailable as error:
        pytest.skip(str(error))


def test_what_is_no_image_is_not_sent() -> None:
    async def scenario(server: SeeingServer, ask: Ask) -> None:
        server.files["page"] = (b"<html>", "image/png")
        server.files["big"] = (RED + bytes(1000), "image/png")
        check_message((await ask(f"{server.url}/files/page"))["error"])
        check_message((await ask(f"{server.url}/files/big"))["error"], "600")
        assert not server.asked

    asking(scenario, vision_max_image_bytes=600)


def test_private_addresses_are_not_fetched() -> None:
    async def scenario(server: SeeingServer, ask: Ask) -> None:
        server.files["red"] = (RED, "image/png")
        assert "private" in (await ask(f"{server.url}/files/red"))["error"]
        assert not server.asked

    asking(scenario, web_allow=[])


def test_a_model_that_cannot_be_asked_is_nobodys_mistake() -> None:
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"

    async def refused(server: SeeingServer, ask: Ask) -> None:
        server.status = 404
        with pytest.raises(ToolUnavailable, match="no such model"):
            await ask(url)

    async def forbidden(server: SeeingServer, ask: Ask) -> None:
        server.status = 401
        with pytest.raises(ToolUnavailable, match="vision_api_key"):
            await ask(url)

    async def too_much(server: SeeingServer, ask: Ask) -> None:
        server.status = 400
        assert "no such model" in (await ask(url))["error"]

    async def cut(server: SeeingServer, ask: Ask) -> None:
        server.reason = "length"
        assert "token limit" in (await ask(url))["cut"]

    for scenario in (refused, forbidden, too_much, cut):
        asking(scenario)


async def test_without_a_model_the_tool_is_missing_and_says_what_to_set() -> None:
    assert "--env.vision_base_url" in build_tool_registry(["vision"]).missing["vision_analyze"]
    tools = ToolRuntime(unrestricted(), _no_slot, "t")
    reply = await tools.handle("vision_analyze", {"image_url": "data:,", "question": "?"})
    assert "vision_base_url" in json.loads(reply)["error"]


def test_the_question_may_have_its_older_name() -> None:
    schema = build_tool_registry(["vision"], settings=ToolSettings(vision_base_url="http://x/v1")).argument_schema(
        "vision_analyze"
    )
    parsed = schema.parse({"image_url": "a.png", "user_prompt": "what?"})
    assert parsed == {"image_url": "a.png", "question": "what?"}
    with pytest.raises(InvalidArguments, match="user_prompt"):
        schema.parse({"image_url": "a.png", "question": "what?", "user_prompt": "and?"})
