"""Notices of the gateway itself to chats: answers without a turn, reports outside of turns, and errors."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping

from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.long_replies import split_reply
from palaestra_gateway.mailbox import Mailbox, Outgoing
from palaestra_gateway.platform import Answers, ChatAddress, Incoming, Platform
from palaestra_slots.core.clock import Clock

logger = logging.getLogger(__name__)


class Notices:
    """Stores notices as messages to send; `wake` is called for each chat that has a new one."""

    def __init__(
        self,
        config: GatewayConfig,
        platforms: Mapping[str, Platform],
        mailbox: Mailbox,
        clock: Clock,
        wake: Callable[[ChatAddress], None],
    ) -> None:
        self._config, self._platforms, self._mailbox, self._clock = config, platforms, mailbox, clock
        self._wake = wake

    async def post(self, text: str, address: ChatAddress | None = None, *, answers: str | None = None) -> None:
        """Send a notice to a chat; if `address` is None, to the home channel. If there is no home channel, or the
        platform is not enabled, write the notice to the log. `answers` is the id of the message that the text answers,
        if any."""
        to = address or self._config.home_channel()
        platform = None if to is None else self._platforms.get(to.platform)
        if to is None or platform is None:
            logger.warning("notice that was not sent, because its chat is not set or not enabled: %s", text)
            return
        stem = uuid.uuid4().hex[:24]
        texts = split_reply(text, platform.limits)
        pieces = [
            Outgoing(f"{stem}-{n}", to, each, answers=Answers(answers, last=n == len(texts) - 1) if answers else None)
            for n, each in enumerate(texts)
        ]
        await self._mailbox.post(pieces, self._clock.wall())
        self._wake(to)

    async def answer(self, message: Incoming, text: str) -> None:
        """Send `text` as the answer to a message."""
        await self.post(text, message.address, answers=message.message_id)

    async def on_refused(self, message: Outgoing, reason: str) -> None:
        """Report to the home channel that a platform refused a message to another chat."""
        home = self._config.home_channel()
        if home is not None and home != message.address:
            place = f"{message.address.platform} chat {message.address.chat_id}"
            await self.post(f"A message to {place} was refused: {reason}")
