"""Slack, with slack-sdk in Socket Mode, so no address of this machine needs to be public.

Settings: `token` is the bot's token (`xoxb-…`), `api_key` the app's (`xapp-…`, with `connections:write`). The app needs
the events `message.im` and `app_mention`. In channels, the bot answers messages that mention it. Its answers go to a
thread, and each thread is a session; a direct chat is one session.

An event is acknowledged once the message is on the disk; otherwise Slack sends the event again.

Format: https://docs.slack.dev/apis/events-api/using-socket-mode
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import aiohttp
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse
from slack_sdk.web.async_client import AsyncWebClient
from yarl import URL

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    ChatType,
    Deliver,
    Incoming,
    PlatformLimits,
)
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.retry import RETRIED_STATUSES

logger = logging.getLogger(__name__)

_MOST_BYTES = 20 << 20
_MARKUP = re.compile(r"<([^<>]+)>")
_WITHDRAWN = frozenset({"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"})
_FOR_LATER = frozenset({"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable"})


class Slack:
    """One app in one workspace."""

    extra_settings = ("api_url",)
    limits = PlatformLimits(max_text=3500, max_file_bytes=_MOST_BYTES, edits=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self._token, self._app_token = config.secret(name), config.api_key
        if not self._token or not self._app_token:
            raise ConfigError(f"platforms.{name} needs token (xoxb-…) and api_key (xapp-…)")
        url = config.extra.get("api_url")
        self._url = f"{str(url).rstrip('/')}/" if url else AsyncWebClient.BASE_URL
        self._web = AsyncWebClient(self._token, base_url=self._url, timeout=60)
        self._socket: SocketModeClient | None = None
        self._bot_user = ""
        self._connected = False

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        async with self._failures():
            self._bot_user = str((await self._web.auth_test())["user_id"])
        web = AsyncWebClient(base_url=self._url, timeout=60)
        self._socket = socket = SocketModeClient(self._app_token or "", web_client=web)

        async def take(client: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
            try:
                if request.type == "events_api":
                    message = await self._incoming(request.payload.get("event") or {})
                    if message is not None:
                        await deliver(message)
                await client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
            except Exception:  # not acknowledged, so Slack sends it again
                logger.exception("%s: a message could not be accepted", self.name)

        socket.socket_mode_request_listeners.append(take)
        try:
            async with self._failures():
                await socket.connect()  # type: ignore[no-untyped-call]
            self._connected = True
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        socket, self._socket, self._connected = self._socket, None, False
        if socket is not None:
            await socket.close()  # type: ignore[no-untyped-call]
            await asyncio.sleep(0)

    async def _incoming(self, event: dict[str, Any]) -> Incoming | None:
        """Return the message of an event. Returns None for an event that is not a message from a person to the bot."""
        direct = event.get("channel_type") in ("im", "mpim")
        wanted = event.get("type") == "app_mention" or (event.get("type") == "message" and direct)
        own = event.get("bot_id") or event.get("user") == self._bot_user
        if not wanted or own or event.get("subtype") not in (None, "file_share", "thread_broadcast"):
            return None
        ts, user = str(event["ts"]), str(event.get("user", ""))
        thread = str(event.get("thread_ts") or ("" if direct else ts))
        kind: ChatType = "dm" if event.get("channel_type") == "im" else "group"
        address = ChatAddress(self.name, str(event["channel"]), kind, thread)
        forwarded = [each for each in event.get("attachments") or () if each.get("is_share")]
        others = (self._readable(each.get("text") or each.get("fallback")) for each in forwarded)
        text = self._readable(event.get("text"))
        text = "\n\n".join(filter(None, [text, *(f"Forwarded message:\n{other}" for other in others if other)]))
        files, problem = [], ""
        for shared in (file for each in (event, *forwarded) for file in each.get("files") or ()):
            try:
                files.append(await self._download_file(shared))
            except PlatformRefused as error:  # Slack would send the event again and again, with the same result
                problem = str(error)
        return Incoming(address, ts, user, text, tuple(files), user, problem)

    def _readable(self, text: str | None) -> str:
        """Return a text as a person sees it in Slack, without mentions of the bot. The markup is that of
        https://docs.slack.dev/messaging/formatting-message-text#retrieving-messages."""

        def link_text(found: re.Match[str]) -> str:
            target, _, label = found[1].partition("|")
            if target == f"@{self._bot_user}":
                return ""
            if target.startswith(("@", "#")):  # a user, a channel
                return target[0] + (label or target[1:])
            if target.startswith("!"):  # such as !here, or a date
                return label or f"@{target[1:]}"
            address = target.removeprefix("mailto:")
            # Slack makes a link of whatever looks like one, such as main.py
            return label or address if label in ("", address, address.partition("://")[2]) else f"{label} ({address})"

        return unescape(_MARKUP.sub(link_text, text or "")).strip()

    async def _download_file(self, file: dict[str, Any]) -> Attachment:
        """Return a file of a message. Raises `PlatformRefused` with the problem if it cannot be read."""
        if file.get("file_access") == "check_file_info":  # shared by another organisation with Slack Connect
            async with self._failures():
                file = (await self._web.files_info(file=str(file["id"])))["file"]
        name, url = str(file.get("name") or "A file"), file.get("url_private_download") or file.get("url_private")
        if int(file.get("size") or 0) > _MOST_BYTES:
            raise PlatformRefused(f"{name} is too large; at most {_MOST_BYTES >> 20} MB are accepted.")
        if not url:
            raise PlatformRefused(f"{name} is not available any more ({file.get('mode')}).")
        if not self._is_slack(str(url)):
            raise PlatformRefused(f"{name} is not stored in Slack, so it cannot be read.")
        return await self._download(file, str(url))

    def _is_slack(self, url: str) -> bool:
        """Return whether the bot's token may be sent to `url`, that is, whether the server belongs to Slack. A file
        that is stored elsewhere has an address that a user chose."""
        asked, api = URL(url), URL(self._url)
        host = asked.host or ""
        own = asked.origin() == api.origin() if asked.absolute else False
        return own or (asked.scheme == "https" and (host == "slack.com" or host.endswith(".slack.com")))

    async def _download(self, file: dict[str, Any], url: str) -> Attachment:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with self._failures(), aiohttp.ClientSession(headers=headers) as client, client.get(url) as reply:
            if reply.status != 200:
                kind = PlatformUnavailable if reply.status in RETRIED_STATUSES else PlatformRefused
                raise kind(f"{file.get('name')} could not be read (HTTP {reply.status}).")
            page = reply.content_type == "text/html" and file.get("mimetype") != "text/html"
            if page:  # the page to log in, for a token that may not read files
                raise PlatformRefused(f"{file.get('name')} could not be read: the app needs the scope files:read.")
            data = await reply.content.read(_MOST_BYTES + 1)
            while len(data) <= _MOST_BYTES and (more := await reply.content.read(_MOST_BYTES + 1)):
                data += more
        return Attachment(
            str(file.get("name") or "file"), str(file.get("mimetype") or "application/octet-stream"), data
        )

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        async with self._failures():
            sent = await self._web.chat_postMessage(
                channel=address.chat_id, text=_escaped(text), thread_ts=address.thread_id or None, unfurl_links=False
            )
        return str(sent["ts"])

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        async with self._failures():
            await self._web.chat_update(channel=address.chat_id, ts=message_id, text=_escaped(text))

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        async with self._failures():
            sent = await self._web.files_upload_v2(
                channel=address.chat_id, thread_ts=address.thread_id or None, filename=file.name, title=file.name,
                content=file.data,
            )  # fmt: skip
        return str(sent["files"][0]["id"])

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("Slack has no typing notices for bots")

    @contextlib.asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Turn errors of Slack's client into platform errors."""
        try:
            yield
        except SlackApiError as error:
            code = str(error.response.get("error", "")) if isinstance(error.response.data, dict) else ""
            status, problem = error.response.status_code, f"{self.name}: Slack answers {code or error}"
            withdrawn = code in _WITHDRAWN and self._connected
            if status == 429 or status >= 500 or code in _FOR_LATER or withdrawn:
                wait = error.response.headers.get("Retry-After")
                raise PlatformUnavailable(problem, float(wait) if wait else None) from None
            raise PlatformRefused(problem) from None
        except (SlackClientError, aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, PlatformError):
                raise
            raise PlatformUnavailable(f"{self.name}: Slack cannot be reached: {error!r:.200}") from error


def _escaped(text: str) -> str:
    """Return the text escaped as https://docs.slack.dev/messaging/formatting-message-text#escaping requires."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
