"""Discord, with discord.py: the gateway websocket, so no address of this machine needs to be public.

Settings: `token` is the bot's token. The bot needs no privileged intents. In servers, the bot accepts messages that
mention it or reply to it, and its answer is a reply. A thread is a separate chat.

Discord has no acknowledgements. So the mailbox stores the id of the last message up to which the gateway has accepted
every message (`_POSITION`), and the direct channels, which Discord does not list for a bot. After each connection that
does not resume the previous one, the history after that message is read; the mailbox recognises known messages by their
ids. The first direct message that a person ever writes to the bot is lost if the gateway is down at the time.

Format: https://docs.discord.com/developers/events/gateway and /resources/message
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import re
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
    with_quote,
)
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.retry import retry_after_s

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # about audioop, which discord.py imports for voice
    import discord

logger = logging.getLogger(__name__)
discord.VoiceClient.warn_nacl = discord.VoiceClient.warn_dave = False

_POSITION, _DIRECT = "position", "direct "
"""Names of notes: the note with the id of the last accepted message, and the prefix of the notes that list direct
channels."""
_OVERLAP = 10_000 << 22
"""Ten seconds, as a difference between message ids, whose upper bits are a timestamp. The history is read with this
overlap because messages of different channels may arrive out of order."""
_WRITE_EVERY_S = 60.0
"""The minimum time, in seconds, between two writes of the position while no message is for the bot."""
_MOST_WAITING = 1000
"""The maximum number of messages queued for delivery; further ones are read from the history later."""
_MOST_BYTES = 20 << 20
_START_S = 60.0
_LONGEST_RATE_LIMIT_S = 30.0
_LONGEST_WAIT_S = 60.0
_FOR_GOOD = frozenset({4004, 4010, 4011, 4012, 4013, 4014})
"""Close codes after which connecting again does not help: a wrong token, intents, version or shard."""


@dataclass(slots=True)
class _ReadState:
    """What of the incoming messages has been read since the start. While `behind` is true, the history may contain
    messages that were not accepted, and the position is not stored. The history is read once `readable` is true.
    `session` counts the sessions of the websocket."""

    waiting: deque[discord.Message] = field(default_factory=deque)
    taken: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_WAITING))
    came: asyncio.Event = field(default_factory=asyncio.Event)
    direct: set[int] = field(default_factory=set)
    behind: bool = True
    readable: bool = False
    session: int = 0
    last: int = 0
    written_at: float = 0.0


class Discord:
    """One bot. `connector` creates the aiohttp connector to use instead of the default."""

    extra_settings = ()
    limits = PlatformLimits(max_text=2000, unit="utf16", max_file_bytes=10 << 20, edits=True, typing=True)

    def __init__(
        self, name: str, config: PlatformConfig, *, connector: Callable[[], aiohttp.BaseConnector] | None = None
    ) -> None:
        self.name = name
        self.notes: PlatformNotes | None = None
        self._token = config.secret(name)
        if not self._token:
            raise ConfigError(
                f"platforms.{name} needs token, the bot's token from https://discord.com/developers/applications"
            )
        self._connector = connector
        self._client: discord.Client | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: dict[str, str] = {}
        self._reading = _ReadState()

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        self._reading = _ReadState()
        self._kept = {} if self.notes is None else await self.notes.read()
        connected = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._stay_connected(connected), name=f"connect {self.name}"),
            asyncio.create_task(self._follow(deliver), name=f"follow {self.name}"),
        ]
        try:
            async with asyncio.timeout(_START_S):
                await connected
        except TimeoutError:
            await self.stop()
            raise PlatformUnavailable(f"{self.name}: Discord did not answer within {_START_S:.0f} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        if self._closing is not None:
            await self._closing

    async def _stay_connected(self, connected: asyncio.Future[None]) -> None:
        """Reconnect until cancelled. The first attempt settles `connected`."""
        loop = asyncio.get_running_loop()
        wait_s = 1.0
        while True:
            began, problem = loop.time(), f"{self.name}: the connection ended"
            self._client = client = self._new_client(connected)
            try:
                async with self._failures():
                    await client.login(self._token or "")
                    # the library may still resume a session; this loop begins new connections
                    await client.connect(reconnect=False)
            except PlatformError as error:
                if not connected.done():
                    connected.set_exception(error)
                    return
                problem = str(error)
            except Exception as error:  # the library raises these after a reply that is not from Discord
                logger.exception("%s: the connection failed", self.name)
                problem = f"{self.name}: {type(error).__name__}: {error}"
                if not connected.done():
                    connected.set_exception(PlatformUnavailable(problem))
                    return
            finally:
                self._client = None
                self._closing = asyncio.create_task(client.close())
                await asyncio.shield(self._closing)
            wait_s = 1.0 if loop.time() - began > _LONGEST_WAIT_S else min(_LONGEST_WAIT_S, wait_s * 2)
            logger.warning("%s; connecting again in %.0f s", problem, wait_s)
            await asyncio.sleep(wait_s)

    def _new_client(self, connected: asyncio.Future[None]) -> discord.Client:
        client = _Client(
            intents=discord.Intents(guilds=True, guild_messages=True, dm_messages=True), max_messages=None,
            chunk_guilds_at_startup=False, member_cache_flags=discord.MemberCacheFlags.none(),
            max_ratelimit_timeout=_LONGEST_RATE_LIMIT_S, connector=self._connector() if self._connector else None,
            allowed_mentions=discord.AllowedMentions.none(),
        )  # fmt: skip
        self._reading.behind, self._reading.readable = True, False

        @client.event
        async def on_connect() -> None:
            self._reading.behind = True  # not called for a resumed session, for which Discord sends the missed messages
            self._reading.session += 1
            if not connected.done():
                connected.set_result(None)

        @client.event
        async def on_ready() -> None:
            self._reading.behind = self._reading.readable = True
            self._reading.came.set()

        @client.event
        async def on_guild_available(guild: discord.Guild) -> None:
            if client.is_ready():
                self._reading.behind = self._reading.readable = True
                self._reading.came.set()

        @client.event
        async def on_message(message: discord.Message) -> None:
            if _is_direct(message.channel):
                self._reading.direct.add(message.channel.id)
            if len(self._reading.waiting) < _MOST_WAITING:
                self._reading.waiting.append(message)
            else:
                self._reading.behind = self._reading.readable = True
            self._reading.came.set()

        return client

    # Incoming messages

    async def _follow(self, deliver: Deliver) -> None:
        """Deliver messages as they arrive; a failed delivery is retried."""
        wait_s = 1.0
        while True:
            await self._reading.came.wait()
            self._reading.came.clear()
            try:
                while self._reading.waiting:
                    await self._take_message(self._reading.waiting[0], deliver)
                    self._reading.waiting.popleft()
                if self._reading.readable and self._client is not None and self._client.is_ready():
                    await self._read_history(self._client, deliver)
                wait_s = 1.0
            except PlatformError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be read again", self.name)
            else:
                continue
            self._reading.came.set()
            await asyncio.sleep(wait_s)
            wait_s = min(_LONGEST_WAIT_S, wait_s * 2)

    async def _read_history(self, client: discord.Client, deliver: Deliver) -> None:
        """Deliver the messages that were written while there was no connection. At the very first start, no position is
        stored, so only the position from which to begin is recorded."""
        session, self._reading.readable = self._reading.session, False
        channels = [channel for guild in client.guilds for channel in (*guild.channels, *guild.threads)]
        last = {each.id: each.last_message_id or 0 for each in channels if isinstance(each, discord.abc.Messageable)}
        if position := int(self._kept.get(_POSITION, 0)):
            after = max(0, position - _OVERLAP)
            await self._keep_direct()
            direct = [int(name.removeprefix(_DIRECT)) for name in self._kept if name.startswith(_DIRECT)]
            try:
                for each in direct:
                    private = client.get_partial_messageable(each, type=discord.ChannelType.private)
                    await self._read_channel(private, after, deliver)
                for channel in channels:
                    if isinstance(channel, discord.abc.Messageable) and last[channel.id] > after:
                        await self._read_channel(channel, after, deliver)
            except BaseException:
                self._reading.readable = True
                raise
        else:
            self._reading.last = max(self._reading.last, *last.values(), 0)
        missing = any(guild.unavailable for guild in client.guilds)
        if session == self._reading.session and not self._reading.readable and not missing:
            self._reading.behind = False
            await self._advance(self._reading.last, now=True)

    async def _read_channel(self, channel: discord.abc.Messageable, after: int, deliver: Deliver) -> None:
        try:
            async with self._failures():
                async for message in channel.history(limit=None, after=discord.Object(after), oldest_first=True):
                    await self._take_message(message, deliver)
        except PlatformRefused as error:  # the bot may not read there, or the channel is gone
            logger.info("%s", error)

    async def _take_message(self, message: discord.Message, deliver: Deliver) -> None:
        if message.id in self._reading.taken:
            return
        await self._keep_direct()
        if _POSITION not in self._kept:
            await self._write_note(_POSITION, str(message.id - 1))
        try:
            incoming = await self._incoming(message)
        except PlatformUnavailable:
            raise
        except Exception:  # the library's error: one message must not block the others
            logger.exception("%s: message %s cannot be read and is skipped", self.name, message.id)
            incoming = None
        if incoming is not None:
            await deliver(incoming)
        self._reading.taken.append(message.id)
        await self._advance(message.id, now=incoming is not None)

    async def _keep_direct(self) -> None:
        """Store the direct channels before their messages are accepted, because a channel that is not stored could not
        be read again later."""
        for channel in list(self._reading.direct):
            if f"{_DIRECT}{channel}" not in self._kept:
                await self._write_note(f"{_DIRECT}{channel}", "")
            self._reading.direct.discard(channel)

    async def _advance(self, message_id: int, *, now: bool) -> None:
        """Update the position up to which all messages are accepted. With `now`, store it immediately, otherwise at
        most every `_WRITE_EVERY_S` seconds. While `behind` is true, nothing is stored."""
        self._reading.last = max(self._reading.last, message_id)
        time_s = asyncio.get_running_loop().time()
        if self._reading.behind or not (now or time_s - self._reading.written_at > _WRITE_EVERY_S):
            return
        if self._reading.last > int(self._kept.get(_POSITION, 0)):
            self._reading.written_at = time_s
            await self._write_note(_POSITION, str(self._reading.last))

    async def _write_note(self, name: str, value: str) -> None:
        if self.notes is not None:
            await self.notes.write(name, value)
        self._kept[name] = value

    async def _incoming(self, message: discord.Message) -> Incoming | None:
        """Return the message; None if it is not for the bot or not from a person."""
        me = self._connected_client().user
        person = not message.author.bot and message.webhook_id is None
        spoken = message.type in (discord.MessageType.default, discord.MessageType.reply)
        direct = _is_direct(message.channel)
        if me is None or not person or not spoken or not (direct or me in message.mentions):
            return None
        address = ChatAddress(self.name, str(message.channel.id), "dm" if direct else "group")
        text = re.sub(rf"<@!?{me.id}>", "", message.content).strip()
        # A forwarded message has no text of its own: what it forwards is in copies beside it.
        forwarded = message.message_snapshots
        text = "\n\n".join(
            filter(
                None, [text, *(f"Forwarded message:\n{said}" for each in forwarded if (said := _message_text(each)))]
            )
        )
        attachments = [*message.attachments, *(each for copy in forwarded for each in copy.attachments)]
        files, problem = [], ""
        for attachment in attachments:
            if attachment.size > _MOST_BYTES:
                problem = f"{attachment.filename} has {attachment.size >> 20} MB; the limit is {_MOST_BYTES >> 20} MB."
                continue
            try:
                async with self._failures():
                    data = await attachment.read()
            except PlatformRefused as error:  # a retry would block the messages after this one
                problem = f"{attachment.filename} could not be read: {error}"
            else:
                media_type = attachment.content_type or "application/octet-stream"
                files.append(Attachment(attachment.filename, media_type, data))
        if not text and not attachments:
            problem = "Messages of this kind are not supported. Send text, an image or a file."
        answered = message.reference.resolved if message.reference else None
        text = with_quote(text, _message_text(answered) if isinstance(answered, discord.Message) else None)
        author = message.author
        return Incoming(
            address, str(message.id), str(author.id), text, tuple(files), author.display_name, problem
        )  # fmt: skip

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        async with self._failures():
            chat, reference = self._channel(address), _reference(address, answers)
            if reference is None:
                sent = await chat.send(text, nonce=_nonce(key))
            else:
                sent = await chat.send(text, nonce=_nonce(key), reference=reference)
        return str(sent.id)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        async with self._failures():
            await self._channel(address).get_partial_message(int(message_id)).edit(content=text)

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        async with self._failures():
            content = discord.File(io.BytesIO(file.data), file.name)
            sent = await self._channel(address).send(file=content, nonce=_nonce(key))
        return str(sent.id)

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        if typing and self._client is not None:
            with contextlib.suppress(PlatformError):
                async with self._failures():
                    await self._channel(address).typing()

    def _channel(self, address: ChatAddress) -> discord.PartialMessageable:
        try:
            return self._connected_client().get_partial_messageable(int(address.chat_id))
        except ValueError:
            raise PlatformRefused(f"{self.name}: {address.chat_id!r} is not a Discord channel id") from None

    def _connected_client(self) -> discord.Client:
        if self._client is None:
            raise PlatformUnavailable(f"{self.name} is not connected")
        return self._client

    @contextlib.asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Turn errors of discord.py into platform errors."""
        client = self._client
        try:
            yield
        except discord.LoginFailure:
            raise PlatformRefused(f"{self.name}: Discord rejected the token") from None
        except discord.RateLimited as error:
            raise PlatformUnavailable(f"{self.name}: Discord's rate limit is reached", error.retry_after) from None
        except discord.HTTPException as error:
            problem = f"{self.name}: Discord answers {error}"
            if error.status in (401, 429) or error.status >= 500:
                wait_s = retry_after_s(error.response.headers.get("Retry-After"), SystemClock().wall())
                raise PlatformUnavailable(problem, wait_s) from None
            raise PlatformRefused(problem) from None
        except discord.ConnectionClosed as error:
            kind = PlatformRefused if error.code in _FOR_GOOD else PlatformUnavailable
            raise kind(f"{self.name}: Discord closed the connection with code {error.code}") from None
        except (discord.DiscordException, aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, PlatformError):
                raise
            raise PlatformUnavailable(f"{self.name}: Discord cannot be reached: {error!r:.200}") from error
        except RuntimeError as error:
            if client is None or not client.is_closed():
                raise
            raise PlatformUnavailable(f"{self.name} is not connected") from error


class _Client(discord.Client):
    def dispatch(self, event: str, /, *args: object, **kwargs: object) -> None:
        if not self.is_closed():  # discord.py may dispatch `ready` after the client is closed, which would raise
            super().dispatch(event, *args, **kwargs)


def _message_text(message: discord.Message | discord.MessageSnapshot) -> str:
    """Return the text of a message, with its embeds. A message of a program often has only these."""
    parts = [message.content]
    for embed in message.embeds:
        if embed.type == "rich":  # the others are previews of links
            parts += [embed.title or "", embed.url or "", embed.description or ""]
            parts += [f"{field.name}: {field.value}" for field in embed.fields]
    return "\n".join(filter(None, parts))


def _is_direct(channel: object) -> bool:
    if isinstance(channel, discord.PartialMessageable):
        return channel.type is discord.ChannelType.private
    return isinstance(channel, discord.DMChannel)


def _nonce(key: str) -> str:
    """Return the nonce for a message's key. For some minutes, Discord accepts each nonce only once."""
    return hashlib.sha256(key.encode()).hexdigest()[:25]


def _reference(address: ChatAddress, answers: Answers | None) -> discord.MessageReference | None:
    """Return a reference to the message to reply to. Returns None in direct chats, and if no message is answered."""
    if answers is None or address.chat_type == "dm" or not answers.message_id.isdecimal():
        return None
    message, channel = int(answers.message_id), int(address.chat_id)
    return discord.MessageReference(message_id=message, channel_id=channel, fail_if_not_exists=False)
