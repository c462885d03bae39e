"""Makes the messages of an answer, and sends those of the mailbox. They go out in order for each chat, and sending is
retried until the platform has them.

If a platform does not answer, the messages stay in the mailbox, and sending is retried for as long as the gateway runs.
The intervals are at most a minute, unless the platform asks for longer ones. A message that the platform refuses is
kept there with the reason and reported to the home channel.

If a gateway is killed after it sent a message and before it recorded the sending, it sends the message again after a
restart. On a platform that accepts keys (`PlatformLimits.idempotent`), people see the message once. On other platforms,
the second copy of a text begins with `SENT_AGAIN` if there is room for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from palaestra_chat.turn_events import NATURAL
from palaestra_gateway.access import megabytes
from palaestra_gateway.long_replies import platform_length, split_reply
from palaestra_gateway.mailbox import Mailbox, Outgoing, Unsent
from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Incoming, Platform
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
SENT_AGAIN = "(The gateway restarted and may have sent this before.)\n"

OnRefused: TypeAlias = Callable[[Outgoing, str], Awaitable[None]]
Start: TypeAlias = Callable[[Coroutine[None, None, None], str], None]


@dataclass(slots=True)
class AnswerParts:
    """The texts and files of an answer, what its turn used, and how the turn ended."""

    texts: list[str]
    files: list[Attachment] = field(default_factory=list)
    cost: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = NATURAL


def answered_chat(message: Incoming, platforms: Mapping[str, Platform]) -> ChatAddress:
    """Return the chat that gets the answer. If the platform of a job's target is no longer enabled, the answer goes to
    the chat of the message."""
    to = message.deliver
    return message.address if to is None or to.platform not in platforms else to


def outgoing_messages(message: Incoming, answer: AnswerParts, platforms: Mapping[str, Platform]) -> list[Outgoing]:
    """Return the messages of an answer: at least one, unless the answer of a job goes to no chat. Their keys are
    derived from the message that is answered. The answer of a job is not a reply to a person's message."""
    if message.job and message.deliver is None:
        return []
    address = answered_chat(message, platforms)
    limits = platforms[address.platform].limits
    origin = message.address
    identity = f"{origin.platform}\0{origin.chat_id}\0{origin.thread_id}\0{message.message_id}"
    stem = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:24]
    texts = [*answer.texts]
    small = [file for file in answer.files if len(file.data) <= limits.max_file_bytes]
    large = [file for file in answer.files if len(file.data) > limits.max_file_bytes]
    texts += [f"{file.name} has {megabytes(len(file.data))}, more than {address.platform} accepts." for file in large]
    pieces = split_reply("\n\n".join(text.rstrip() for text in texts), limits)
    if not pieces and not small:
        pieces = ["(The model gave no answer.)"]
    found = [Outgoing("", address, text) for text in pieces] + [Outgoing("", address, file=file) for file in small]
    turn = answer.prompt_tokens, answer.completion_tokens, answer.outcome
    return [
        replace(
            each,
            key=f"{stem}-{number}",
            answers=None if message.job else Answers(message.message_id, number == len(found) - 1, *turn),
        )
        for number, each in enumerate(found)
    ]


class Outbox:
    """Sends messages of `mailbox` in tasks that `start` starts. `on_refused` gets each message that a platform refuses,
    with the reason."""

    def __init__(
        self,
        mailbox: Mailbox,
        platforms: Mapping[str, Platform],
        on_refused: OnRefused,
        start: Start,
        clock: Clock,
    ) -> None:
        self._start = start
        self._mailbox, self._platforms, self._on_refused, self._clock = mailbox, platforms, on_refused, clock
        self._sending: dict[ChatAddress, asyncio.Event] = {}
        self._connected: set[str] = set()

    async def begin(self, platform: str) -> None:
        """Send the waiting messages of a platform that has just started, and from now on those that follow."""
        self._connected.add(platform)
        for address in await self._mailbox.chats_to_send_to():
            if address.platform == platform:
                self.wake(address)

    @property
    def connected(self) -> frozenset[str]:
        """The platforms that have started."""
        return frozenset(self._connected)

    def wake(self, address: ChatAddress) -> None:
        """Start to send the waiting messages of a chat. The messages of a platform that is not enabled, or has not
        started yet, wait in the mailbox."""
        if address.platform not in self._connected:
            return
        if address in self._sending:
            self._sending[address].set()
            return
        self._sending[address] = asyncio.Event()
        self._sending[address].set()
        self._start(self._send_all(address), f"send to {address.platform}")

    async def _send_all(self, address: ChatAddress) -> None:
        more, failures = self._sending[address], 0
        unsent: Unsent | None = None
        try:
            while unsent is not None or more.is_set():
                more.clear()
                try:
                    unsent = unsent or await self._mailbox.next_unsent(address)
                    if unsent is not None:
                        unsent = await self._send_or_refuse(unsent)
                    failures = 0
                except PlatformUnavailable as error:
                    failures += 1
                    assert unsent is not None  # only its sending raises this
                    await self._back_off(address, failures, error)
                except Exception as error:  # such as a full disk: the mailbox knows what was sent
                    failures += 1
                    logger.exception("%s: a message was not sent", address.platform)
                    unsent = None
                    more.set()
                    await self._back_off(address, failures, PlatformUnavailable(f"{address.platform}: {error}"))
        finally:
            del self._sending[address]

    async def _send_or_refuse(self, unsent: Unsent) -> Unsent | None:
        """Send a message, and record if the platform refuses it. Returns the next unsent message for the same chat, or
        None. Raises `PlatformUnavailable` and `DiskError`."""
        try:
            return await self._send_unsent(self._platforms[unsent.message.address.platform], unsent)
        except PlatformUnavailable:
            if not unsent.started:  # an earlier gateway may have sent it, and this does not change that
                await self._mailbox.undo_begin_send(unsent.id)
            raise
        except PlatformRefused as error:
            logger.warning("%s refuses a message: %s", unsent.message.address.platform, error)
            await self._on_refused(unsent.message, str(error))
            return await self._mailbox.end_send(unsent, "refused", str(error))

    async def _send_unsent(self, platform: Platform, unsent: Unsent) -> Unsent | None:
        """Send a message. Returns the next unsent message for the same chat, or None."""
        message, limits = unsent.message, platform.limits
        if not limits.idempotent and not unsent.started:
            await self._mailbox.begin_send(unsent.id)
        try:
            if message.file is not None:
                await platform.send_file(message.address, message.file, key=message.key, answers=message.answers)
            else:
                text = message.text
                if (
                    unsent.started
                    and not limits.idempotent
                    and platform_length(SENT_AGAIN + text, limits) <= limits.max_text
                ):
                    text = SENT_AGAIN + text
                await platform.send_text(message.address, text, key=message.key, answers=message.answers)
        except (PlatformUnavailable, PlatformRefused):
            raise
        except Exception as error:  # one message that the client library cannot send must not end the gateway
            logger.exception("%s: a message cannot be sent", message.address.platform)
            raise PlatformRefused(f"{message.address.platform}: {type(error).__name__}: {error}") from None
        return await self._mailbox.end_send(unsent, "sent")

    async def _back_off(self, address: ChatAddress, failures: int, error: PlatformUnavailable) -> None:
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 1, 10)) * random.uniform(0.8, 1.0)
        if error.retry_after_s is not None:
            wait_s = max(wait_s if failures > 1 else 0.0, error.retry_after_s)
        log = logger.warning if failures == 1 else logger.info
        log("%s: %s; trying again in %.1f s", address.platform, error, wait_s)
        await self._clock.sleep(wait_s)
