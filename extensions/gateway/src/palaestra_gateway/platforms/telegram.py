"""Connects to Telegram through aiogram. It uses the Bot API with long polling, so this machine needs no public address.

Settings: `token` is the bot's token from @BotFather. `extra.api_url` names a Bot API server of your own. In groups, a
bot receives only commands and replies to its own messages, unless you turn its privacy mode off. Each topic of a group
is a session. The files of an album are one message.

Once a message is on the disk, the gateway acknowledges its update by requesting the next update.

Format: https://core.telegram.org/bots/api
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import aiohttp
from aiogram import Bot
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.exceptions import (
    TelegramAPIError,
    TelegramConflictError,
    TelegramMigrateToChat,
    TelegramNetworkError,
    TelegramRetryAfter,
    TelegramServerError,
    TelegramUnauthorizedError,
)
from aiogram.methods import TelegramMethod
from aiogram.types import BufferedInputFile, Message, Update
from aiogram.utils.token import TokenValidationError

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    ChatType,
    Deliver,
    Incoming,
    PlatformLimits,
    with_quote,
)
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable

logger = logging.getLogger(__name__)

_LONG_POLL_S = 30
_ALBUM_S = 1.0
"""How long to wait for the other files of an album, which Telegram sends as messages of their own."""
_MOST_BYTES = 20 << 20
"""The maximum size, in bytes, of a file that a bot may download."""
_UNREADABLE = frozenset(
    {"sticker", "story", "contact", "dice", "game", "poll", "venue", "location", "paid_media", "checklist", "unknown"}
)
"""Contents of a person's message that the gateway cannot read. Other contents are service messages."""
_PLAIN = ("message_id", "message_thread_id", "is_topic_message", "date", "chat", "from", "text", "caption")
"""The fields of a message that is read without the others."""
_ADDRESSED = re.compile(r"/\w+@(\w+)")
_CHATS: dict[str, ChatType] = {"private": "dm", "group": "group", "supergroup": "group", "channel": "channel"}


class _RawUpdates(TelegramMethod[list[dict[str, Any]]]):
    """`getUpdates`, whose reply is not parsed. The library has this method only with a reply that is parsed whole."""

    __returning__ = list[dict[str, Any]]
    __api_method__ = "getUpdates"

    offset: int
    timeout: int
    allowed_updates: list[str]


class Telegram:
    """One bot."""

    extra_settings = ("api_url",)
    limits = PlatformLimits(max_text=4096, unit="utf16", max_file_bytes=50 << 20, edits=True, typing=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self._token = config.secret(name) or ""
        url = config.extra.get("api_url")
        self._api = TelegramAPIServer.from_base(str(url)) if url else None
        self._bot: Bot | None = None
        self._username = ""
        self._polling: asyncio.Task[None] | None = None

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        session = AiohttpSession(api=self._api) if self._api is not None else AiohttpSession()
        try:
            self._bot = bot = Bot(self._token, session=session)
        except TokenValidationError:
            await session.close()
            problem = f"platforms.{self.name}.token is not a Bot API token; one looks like 123456:ABC"
            raise ConfigError(problem) from None
        try:
            async with self._failures():
                self._username = (await bot.get_me(request_timeout=20)).username or ""
        except BaseException:
            await self.stop()
            raise
        self._polling = asyncio.create_task(self._poll(bot, deliver), name=f"poll {self.name}")

    async def stop(self) -> None:
        polling, self._polling = self._polling, None
        await end_tasks(polling)
        bot, self._bot = self._bot, None
        if bot is not None:
            await bot.session.close()

    async def _poll(self, bot: Bot, deliver: Deliver) -> None:
        """Deliver messages as they arrive; a message that could not be delivered is requested again."""
        offset, wait_s = 0, 1.0
        while True:
            try:
                updates = await self._updates(bot, offset, _LONG_POLL_S)
                if updates and _album(updates[-1]):  # its other files may arrive later
                    await asyncio.sleep(_ALBUM_S)  # the same updates come again, because the offset is not past them
                    updates = await self._updates(bot, offset, 0)
                for last, together in _albums(updates):
                    parts = [part for each in together if (part := await self._read_message(bot, each)) is not None]
                    if parts:
                        await deliver(_album_message(parts))
                    offset = last + 1
                wait_s = 1.0
            except PlatformError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(60.0, wait_s * 2)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be requested again", self.name)
                await asyncio.sleep(wait_s)
                wait_s = min(60.0, wait_s * 2)

    async def _updates(self, bot: Bot, offset: int, wait_s: int) -> list[Update]:
        """Return the updates from this one on. Each is parsed alone: one of a form that the library does not know must
        not block the others."""
        asked = _RawUpdates(offset=offset, timeout=wait_s, allowed_updates=["message"])
        async with self._failures():
            sent = await bot(asked, request_timeout=wait_s + 20)
        return [self._parse_update(bot, each) for each in sent]

    def _parse_update(self, bot: Bot, sent: dict[str, Any]) -> Update:
        """Return an update. If the library cannot parse its message, only the text and the sender are taken."""
        context = {"bot": bot}
        try:
            return Update.model_validate(sent, context=context)
        except ValueError as error:
            logger.warning("%s: update %s has an unknown form: %.500s", self.name, sent["update_id"], error)
        message = {name: value for name, value in (sent.get("message") or {}).items() if name in _PLAIN}
        try:
            return Update.model_validate({"update_id": sent["update_id"], "message": message}, context=context)
        except ValueError:
            return Update(update_id=sent["update_id"])

    async def _read_message(self, bot: Bot, message: Message) -> Incoming | None:
        """Do what `_incoming` does. A message that cannot be read is left out, so that it does not block the others."""
        try:
            return await self._incoming(bot, message)
        except PlatformError:
            raise
        except Exception:
            logger.exception("%s: message %s of chat %s is left out", self.name, message.message_id, message.chat.id)
            return None

    async def _incoming(self, bot: Bot, message: Message) -> Incoming | None:
        """Return the message; None if no person wrote it, or if it is a command for another bot."""
        if message.from_user is None or message.from_user.is_bot or self._is_for_another(_text_with_links(message)):
            return None
        thread = str(message.message_thread_id) if message.is_topic_message else ""
        address = ChatAddress(self.name, str(message.chat.id), _CHATS[message.chat.type], thread)
        text = _text_with_links(message)
        files, problem = [], ""
        sent: Any = message.document or message.audio or message.voice or message.video or message.video_note
        if message.photo:
            sent = message.photo[-1]
        if sent is not None:
            suffix = ".jpg" if message.photo else ".ogg" if message.voice else ""
            name = getattr(sent, "file_name", None) or (f"{sent.file_unique_id}{suffix}" if suffix else "file")
            if (sent.file_size or 0) > _MOST_BYTES:
                problem = f"{name} has {sent.file_size >> 20} MB; Telegram gives bots at most {_MOST_BYTES >> 20} MB."
            else:
                media_type = getattr(sent, "mime_type", None) or ("image/jpeg" if message.photo else "")
                try:
                    async with self._failures():
                        data = await bot.download(sent.file_id, timeout=120)
                except (
                    PlatformRefused,
                    aiohttp.ClientResponseError,
                ) as error:  # a later try would keep the messages after this one waiting
                    problem = f"{name} could not be read: {error}"
                else:
                    content = b"" if data is None else data.read()
                    files.append(Attachment(name, media_type or "application/octet-stream", content))
        elif not text and message.content_type in _UNREADABLE:
            problem = "Messages of this kind are not supported. Send text, an image or a file."
        elif not text:  # such as a message that somebody joined the group
            return None
        answered = message.quote or message.reply_to_message or message.external_reply
        text = with_quote(text, _text_with_links(answered))
        user = message.from_user
        return Incoming(address, str(message.message_id), str(user.id), text, tuple(files), user.full_name, problem)

    def _is_for_another(self, text: str) -> bool:
        """Return whether a text is a command with the name of another bot: `/stop@other_bot`."""
        named = _ADDRESSED.match(text)
        return named is not None and named[1].lower() != self._username.lower()

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        bot, thread = self._connected_bot(), _thread(address)

        def send(chat: str | int) -> Awaitable[Message]:
            return bot.send_message(chat, text, message_thread_id=thread, request_timeout=60)

        return await self._send_to_chat(address, send)

    async def _send_to_chat(self, address: ChatAddress, send: Callable[[str | int], Awaitable[Message]]) -> str:
        """Call `send` with the chat; if the group has become a supergroup, with its new id."""
        async with self._failures():
            try:
                sent = await send(address.chat_id)
            except TelegramMigrateToChat as error:
                sent = await send(error.migrate_to_chat_id)
        return str(sent.message_id)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        async with self._failures():
            await self._connected_bot().edit_message_text(text, chat_id=address.chat_id, message_id=int(message_id))

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        bot, thread = self._connected_bot(), _thread(address)

        async def send(chat: str | int) -> Message:
            content = BufferedInputFile(file.data, file.name)
            if file.is_image and len(file.data) <= 10 << 20:  # the limit for photos
                return await bot.send_photo(chat, content, message_thread_id=thread)
            return await bot.send_document(chat, content, message_thread_id=thread)

        return await self._send_to_chat(address, send)

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        if typing and self._bot is not None:
            with contextlib.suppress(PlatformError):
                async with self._failures():
                    await self._bot.send_chat_action(address.chat_id, "typing", message_thread_id=_thread(address))

    def _connected_bot(self) -> Bot:
        if self._bot is None:
            raise PlatformUnavailable(f"{self.name} is not connected")
        return self._bot

    @contextlib.asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Turn errors of the Bot API into platform errors."""
        try:
            yield
        except TelegramRetryAfter as error:
            raise PlatformUnavailable(f"{self.name}: {error.message}", float(error.retry_after)) from None
        except TelegramConflictError:
            problem = f"{self.name}: another program receives messages with this token; stop that program"
            raise PlatformUnavailable(problem) from None
        except (TelegramNetworkError, TelegramServerError) as error:
            raise PlatformUnavailable(f"{self.name}: {error.message}") from None
        except TelegramUnauthorizedError as error:
            withdrawn = self._polling is not None  # the token was right at the start
            kind = PlatformUnavailable if withdrawn else PlatformRefused
            raise kind(f"{self.name}: Telegram rejected the token: {error.message}") from None
        except TelegramAPIError as error:
            raise PlatformRefused(f"{self.name}: {error.message}") from None


def _album(update: Update) -> str:
    """Return the id of the album that an update's message belongs to, or the empty string."""
    return (update.message.media_group_id or "") if update.message is not None else ""


def _albums(updates: Iterable[Update]) -> Iterator[tuple[int, list[Message]]]:
    """Yield the messages of updates, those of an album together, each with the id of the last update."""
    for album, group in groupby(updates, key=_album):
        found = list(group)
        for together in [found] if album else [[each] for each in found]:
            yield together[-1].update_id, [each.message for each in together if each.message is not None]


def _album_message(parts: Sequence[Incoming]) -> Incoming:
    """Return one message for the messages of an album."""
    return replace(
        parts[0],
        text="\n\n".join(part.text for part in parts if part.text),
        attachments=tuple(file for part in parts for file in part.attachments),
        problem="\n".join(part.problem for part in parts if part.problem),
    )


def _text_with_links(content: object) -> str:
    """Return the text or caption of a message or quote, with the address behind each of its links."""
    text: str = getattr(content, "text", None) or getattr(content, "caption", None) or ""
    entities = getattr(content, "entities", None) or getattr(content, "caption_entities", None) or ()
    units = text.encode("utf-16-le", "surrogatepass")  # what offsets count
    for entity in sorted(entities, key=lambda each: each.offset, reverse=True):
        start, end, url = 2 * entity.offset, 2 * (entity.offset + entity.length), entity.url or ""
        if entity.type == "text_link" and units[start:end] != url.encode("utf-16-le"):
            units = units[:end] + f" ({url})".encode("utf-16-le") + units[end:]
    return units.decode("utf-16-le", "surrogatepass")


def _thread(address: ChatAddress) -> int | None:
    return int(address.thread_id) if address.thread_id else None
