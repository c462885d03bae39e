"""Sessions of the gateway that fill the model's context window, with a server that enforces one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.conftest import Scene, a_gateway
from gateway.echo_model import EchoModel
from golden_messages import check_message
from palaestra_chat.service import ChatSettings
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.testing.echo_chat_server import EchoChatServer, reply_to

WINDOW = 3000


class WindowedModel(EchoModel):
    """A model with a window."""

    def __init__(self, **options: JSON) -> None:
        super().__init__()
        self.server = EchoChatServer(window=WINDOW, reply=summarizing, **options)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[EchoModel]:
        async with self.server:
            self.url = self.server.url
            yield self


def summarizing(messages: Sequence[Message]) -> dict[str, JSON]:
    asked = "Summarize this conversation" in str(messages[-1].get("content"))
    return {"content": "SUMMARY"} if asked else reply_to(messages)


def play(folder: Path, scene: Callable[[Scene], Coroutine[None, None, None]], **options: JSON) -> None:
    async def main() -> None:
        settings = ChatSettings(toolsets=(), system_prompt="Be brief.", **options)
        async with asyncio.timeout(60), a_gateway(folder, settings=settings, model=WindowedModel()) as running:
            await scene(running)

    asyncio.run(main())


def test_a_session_goes_on_past_the_window_and_says_what_was_summarized(tmp_path: Path) -> None:
    async def scene(running: Scene) -> None:
        replies = []
        for number in range(15):
            await running.platform.say(f"say answer {number}\n{'x' * 1000}")
            while f"answer {number}" not in (reply := (await running.platform.receive()).text):
                replies.append(reply)
        assert replies
        assert all("replaced with a summary" in reply for reply in replies)

    play(tmp_path, scene)


def test_every_way_out_of_a_full_session_works(tmp_path: Path) -> None:
    huge = f"say never {'z' * 60_000}"

    async def scene(running: Scene) -> None:
        assert await running.ask("say first") == "first"
        for way_out, answer in (
            ("/undo", "The last message was undone."),
            ("/compact", "The history was replaced with this summary:\n\nSUMMARY"),
            ("/new", "A new session begins with your next message."),
        ):
            refused = await running.ask(huge)
            check_message(refused, "message")
            assert "/retry" not in refused
            assert all(command in refused for command in ("/undo", "/compact", "/new"))
            assert await running.ask(way_out) == answer
            assert await running.ask("say on") == "on"

    play(tmp_path, scene)


def test_help_lists_compact_and_a_short_session_is_not_compacted(tmp_path: Path) -> None:
    async def scene(running: Scene) -> None:
        assert "/compact" in await running.ask("/help")
        check_message(await running.ask("/compact"), "compact")

    play(tmp_path, scene)
