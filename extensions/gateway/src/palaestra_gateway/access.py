"""Decides whose messages the gateway accepts, and which messages it can use."""

from __future__ import annotations

from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platform import Incoming
from palaestra_slots.core.clock import Clock


class Access:
    """The settings and the pairings that decide who may write, how much a turn may cost and how large a message may
    be."""

    def __init__(self, config: GatewayConfig, mailbox: Mailbox, clock: Clock) -> None:
        self._config, self._mailbox, self._clock = config, mailbox, clock

    async def is_allowed(self, message: Incoming) -> bool:
        """Return whether a message comes from a program of this machine, or from a person who may write."""
        return message.trusted or await self.is_listed(message.address.platform, message.user_id)

    async def is_listed(self, platform: str, user_id: str) -> bool:
        """Return whether the settings or a pairing allow the person."""
        settings = self._config.platforms.get(platform)
        allowed = settings.allowed_users if settings is not None else []
        return "*" in allowed or user_id in allowed or await self._mailbox.pairings.has(platform, user_id)

    async def over_cost(self, platform: str, user_id: str) -> str:
        """Return why a person may not start a turn now, or the empty string."""
        most = self._config.limits.cost_per_day
        spent = await self._mailbox.cost_since(platform, user_id, self._clock.wall() - 86_400) if most else 0.0
        if not most or spent < most:
            return ""
        return f"You have used ${spent:.2f} of ${most:.2f} in 24 hours; write again later."

    def unusable(self, message: Incoming) -> str:
        """Return why a message cannot be accepted, or the empty string."""
        size, most = len(message.text.encode("utf-8", "replace")), self._config.max_message_bytes
        if message.problem:
            return message.problem
        if size > most:
            has = f"The message has {megabytes(size)}; at most {megabytes(most)} are accepted."
            return f"{has} Send it as a file, or in parts."
        for file in message.attachments:
            if len(file.data) > self._config.max_attachment_bytes:
                most = self._config.max_attachment_bytes
                size = len(file.data)
                return f"{file.name} has {megabytes(size)}; at most {megabytes(most)} are accepted. Nothing was read."
        if not message.text.strip() and not message.attachments:
            return "The message is empty."
        return ""


def megabytes(size: int) -> str:
    """Return a number of bytes as text, such as `1.5 MB`."""
    return f"{size / (1 << 20):.1f} MB"
