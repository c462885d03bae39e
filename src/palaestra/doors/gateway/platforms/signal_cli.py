"""Signal, through a daemon of signal-cli on this machine (`signal-cli -a NUMBER daemon --http 127.0.0.1:8080`).

Settings: `extra.url` is the daemon's address (http://127.0.0.1:8080) and `extra.account` the account's number, which is
needed only if the daemon serves several accounts. The daemon has no token, so only this machine must reach it.

The daemon numbers its events, and keeps the last 1,000. The mailbox stores the number of the last accepted event, so
that messages from while the gateway is down are read later. Before the first one is accepted, an unknown number is
stored, after which the daemon sends all events that it keeps; those from before the first start are skipped. A message
is identified by its sender and its timestamp.

Format: `man/signal-cli-jsonrpc.5.adoc` and `man/signal-cli.1.adoc` of https://github.com/AsamK/signal-cli
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from palaestra.core.cancel_scope import end_tasks
from palaestra.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra.core.types import JSON
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
)
from palaestra.doors.gateway.platforms.http_api import HttpApi

logger = logging.getLogger(__name__)

_MOST_BYTES = 20 << 20
_EVENT = "event"
"""The name of the note with the number of the last accepted event."""
_FIRST = "since "
"""In place of the number, with the time of the first start in milliseconds, until an event is accepted."""
_FOR_LATER = frozenset({-3, -5, -32603})
"""Error codes of input and output, of a rate limit, and of an internal error."""
_LONGEST_WAIT_S = 60.0
_UNSAFE = re.compile(r"[^\w. -]+")


class SignalCli:
    """One account."""

    extra_settings = ("url", "account")
    limits = PlatformLimits(max_text=2000, unit="utf8", max_file_bytes=_MOST_BYTES, edits=True, typing=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.notes: PlatformNotes | None = None
        url, account = config.extra.get("url", "http://127.0.0.1:8080"), config.extra.get("account")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"platforms.{name}.extra.url must be the address of a signal-cli daemon")
        self._account: dict[str, JSON] = {} if account is None else {"account": account}
        self._api = HttpApi(name, url, {})
        self._numbers = itertools.count(1)
        self._last = ""
        self._following: asyncio.Task[None] | None = None

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        self._api.open()
        kept = {} if self.notes is None else await self.notes.read()
        self._last = kept.get(_EVENT, "") or self._last
        if not self._last:
            await self._accepted(f"{_FIRST}{time.time_ns() // 1_000_000}")
        connected = asyncio.get_running_loop().create_future()
        try:
            await self._api.call("GET", "/api/v1/check")
            self._following = asyncio.create_task(self._follow(deliver, connected), name=f"follow {self.name}")
            await connected
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        following, self._following = self._following, None
        await end_tasks(following)
        await self._api.aclose()

    # Incoming messages

    async def _follow(self, deliver: Deliver, connected: asyncio.Future[None]) -> None:
        """Deliver messages as they arrive. After an error, read on after the last accepted event."""
        wait_s = 1.0
        while True:
            try:
                async for number, data in self._events(connected):
                    message = await self._incoming(data)
                    if message is not None:
                        await deliver(message)
                        await self._accepted(number)
                    wait_s = 1.0
            except PlatformError as error:
                if not connected.done():
                    connected.set_exception(error)
                    return
                logger.warning("%s; trying again in %.0f s", error, wait_s)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be read again", self.name)
            await asyncio.sleep(wait_s)
            wait_s = min(_LONGEST_WAIT_S, wait_s * 2)

    async def _accepted(self, number: str) -> None:
        if number:
            self._last = number
            if self.notes is not None:
                await self.notes.write(_EVENT, number)

    async def _events(self, connected: asyncio.Future[None]) -> AsyncIterator[tuple[str, str]]:
        """Yield the number and the data of each event after the last accepted one, until the connection ends.
        `connected` is settled when the daemon begins to answer."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": self._last}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        url = f"{self._api.url}/api/v1/events"
        async with (
            self._api.failures(),
            self._api.client.get(url, headers=headers, timeout=timeout, read_bufsize=4 << 20) as reply,
        ):
            if reply.status != 200:
                raise self._api.failure(reply.status, reply.headers, await reply.content.read(1000))
            if not connected.done():
                connected.set_result(None)
            number, data = "", list[str]()
            while line := await reply.content.readline():
                name, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
                value = value.removeprefix(" ")
                if name == "id":
                    number = value
                elif name == "data":
                    data.append(value)
                elif not name and not value and data:
                    yield number, "\n".join(data)
                    number, data = "", []

    async def _incoming(self, data: str) -> Incoming | None:
        """Return the message of an event. Returns None if it is not a message from a person."""
        envelope = json.loads(data).get("envelope") or {}
        content = envelope.get("dataMessage") or {}
        text, sent = str(content.get("message") or ""), content.get("attachments") or ()
        source = str(envelope.get("sourceUuid") or envelope.get("source") or "")
        received = int(envelope.get("serverReceivedTimestamp") or envelope.get("timestamp") or 0)
        old = self._last.startswith(_FIRST) and received < int(self._last.removeprefix(_FIRST))
        if old or not source or not (text or sent) or content.get("reaction"):
            return None
        group = str((content.get("groupInfo") or {}).get("groupId") or "")
        address = ChatAddress(self.name, group or source, "group" if group else "dm")
        user = str(envelope.get("sourceNumber") or source)
        files, problem = [], ""
        for about in sent:
            name = str(about.get("filename") or about.get("id") or "file")
            if int(about.get("size") or 0) > _MOST_BYTES:
                problem = f"{name} is too large; at most {_MOST_BYTES >> 20} MB are accepted."
                continue
            try:
                found = await self._call("getAttachment", {"id": about["id"], **_receiver(address)})
                media_type = str(about.get("contentType") or "application/octet-stream")
                files.append(Attachment(name, media_type, base64.b64decode(found["data"])))
            except (PlatformRefused, KeyError, binascii.Error) as error:  # it must not hold up later messages
                problem = f"{name} could not be read: {error}"
        number = f"{source}:{content.get('timestamp') or envelope.get('timestamp')}"
        return Incoming(address, number, user, text, tuple(files), str(envelope.get("sourceName") or ""), problem)

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return await self._send(address, {"message": text})

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        await self._send(address, {"message": text, "editTimestamp": int(message_id)})

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        name, data = _UNSAFE.sub("_", file.name), base64.b64encode(file.data).decode()
        content: dict[str, JSON] = {"attachments": [f"data:{file.media_type};filename={name};base64,{data}"]}
        return await self._send(address, {**content, "voiceNote": True} if file.voice else content)

    async def _send(self, address: ChatAddress, content: dict[str, JSON]) -> str:
        return str((await self._call("send", {**_receiver(address), **content}))["timestamp"])

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        with contextlib.suppress(PlatformError):
            await self._call("sendTyping", {**_receiver(address), "stop": not typing})

    async def _call(self, method: str, params: dict[str, JSON]) -> Any:
        """Call a method of the daemon and return its result. Raises `PlatformError`."""
        number = str(next(self._numbers))
        body = {"jsonrpc": "2.0", "method": method, "params": {**self._account, **params}, "id": number}
        answer = await self._api.json("POST", "/api/v1/rpc", json=body, most_bytes=64 << 20)
        error = answer.get("error")
        if error is None:
            return answer["result"]
        problem = f"{self.name}: signal-cli answers {error.get('code')}: {error.get('message')}"
        if error.get("code") in _FOR_LATER:
            results = ((error.get("data") or {}).get("response") or {}).get("results") or ()
            waits = [each["retryAfterSeconds"] for each in results if each.get("retryAfterSeconds")]
            raise PlatformUnavailable(problem, float(max(waits)) if waits else None)
        raise PlatformRefused(problem)


def _receiver(address: ChatAddress) -> dict[str, JSON]:
    return {"groupId": address.chat_id} if address.chat_type == "group" else {"recipient": [address.chat_id]}
