"""A gateway on the loopback platform, with a model that echoes and real conversations."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gateway.echo_model import EchoModel
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platform import Incoming, Platform
from palaestra_gateway.platforms.loopback import Loopback
from palaestra_gateway.service import Gateway
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

OPEN = {"platforms": {"loopback": {"allowed_users": ["*"]}}}
"""A configuration that takes messages of everybody."""


class MovedClock(SystemClock):
    """A clock that begins at nine in the morning and is moved by `moved_s`, so that no test passes the daily reset
    unless it means to."""

    def __init__(self) -> None:
        self.moved_s = 0.0
        now = datetime.now()
        self._morning_s = (now.replace(hour=9, minute=0, second=0) - now).total_seconds()

    def monotonic(self) -> float:
        return super().monotonic() + self.moved_s

    def wall(self) -> float:
        return super().wall() + self._morning_s + self.moved_s


@dataclass
class Scene:
    gateway: Gateway
    platform: Loopback
    model: EchoModel

    async def ask(self, text: str, chat_id: str = "me", **options: JSON) -> str:
        """Say something and return the next message of the gateway."""
        await self.platform.say(text, chat_id=chat_id, user_id=options.pop("user_id", chat_id), **options)
        return (await self.platform.receive(chat_id)).text


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what tasks of the same loop do. Fails after 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def started(platform: Platform) -> AsyncIterator[list[Incoming]]:
    """Run a platform without a gateway; what it delivers is appended to the list."""
    arrived: list[Incoming] = []

    async def deliver(message: Incoming) -> None:
        arrived.append(message)

    await platform.start(deliver)
    try:
        yield arrived
    finally:
        await platform.stop()


@asynccontextmanager
async def a_gateway(
    home: Path,
    config: JSON = OPEN,
    *,
    platform: Loopback | None = None,
    others: Sequence[Platform] = (),
    clock: Clock | None = None,
    settings: ChatSettings | None = None,
    model: EchoModel | None = None,
) -> AsyncIterator[Scene]:
    platform, model = platform or Loopback(), model or EchoModel()
    store = ConversationStore(home / "conversations.db")
    mailbox = Mailbox(home / "gateway.db")
    try:
        async with model.serving():
            server = APIServerConfig(base_url=model.url, model_name="m")
            async with ChatService(server, store, settings or ChatSettings(toolsets=["terminal"])) as chat:
                gateway = Gateway(GatewayConfig.from_dict(config), [platform, *others], mailbox, chat, clock=clock)
                async with gateway.running():
                    yield Scene(gateway, platform, model)
    finally:
        await mailbox.aclose()
        store.close()
