"""SMS, with Twilio: a webhook that gets the messages, and Twilio's REST API that sends the answers.

Settings: `token` is the account's auth token. In `extra`: `account_sid`, `number` (such as +15550002), `url` (the
webhook's public address exactly as it is entered at Twilio, which the signature covers), `host`, `port` (8645) and
`api_url`. A proxy with a certificate must pass the requests for `url` to the gateway's `/sms`.

Each request is checked with its signature (`X-Twilio-Signature`). Twilio does not repeat a request that fails. So the
list of the number's messages is read at the start, after an error, and every `CATCH_UP_S`; the mailbox recognises known
messages. Its position is in the mailbox. Files can only be received.

Format: https://www.twilio.com/docs/messaging/api/message-resource, /messaging/guides/webhook-request and
/usage/webhooks/webhooks-security
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from palaestra.core.cancel_scope import end_tasks
from palaestra.core.errors import ConfigError, PlatformError, PlatformRefused
from palaestra.core.io.http_server import listening
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
from palaestra.doors.gateway.platforms.webhook import listen_address

logger = logging.getLogger(__name__)

API_URL = "https://api.twilio.com"
CATCH_UP_S = 300.0
_MOST_BYTES = 20 << 20
_POSITION = "position"
"""The name of the note with the time of the last accepted message, in seconds since the epoch."""
_OVERLAP_S = 60.0
_MOST_TAKEN = 1000
"""How many delivered messages are remembered, so that those in the overlap are not delivered again."""
_ANSWER = '<?xml version="1.0" encoding="UTF-8"?><Response/>'
"""The reply to a webhook request that makes Twilio send nothing."""


class Sms:
    """One number. `url` is the address of the webhook while it runs."""

    extra_settings = ("account_sid", "number", "url", "host", "port", "api_url")
    limits = PlatformLimits(max_text=1600, max_file_bytes=0)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.url = ""
        self.notes: PlatformNotes | None = None
        self._token = config.secret(name) or ""
        account, number, public = (config.extra.get(each) for each in ("account_sid", "number", "url"))
        if not (self._token and isinstance(account, str) and isinstance(number, str) and isinstance(public, str)):
            raise ConfigError(
                f"platforms.{name} needs token (the auth token), extra.account_sid, extra.number and extra.url, the "
                "public address of the webhook"
            )
        self._number, self._public = number, public
        self._host, self._port = listen_address(name, config, 8645)
        url = f"{str(config.extra.get('api_url') or API_URL).rstrip('/')}/2010-04-01/Accounts/{account}"
        login = base64.b64encode(f"{account}:{self._token}".encode()).decode()
        self._api = HttpApi(name, url, {"Authorization": f"Basic {login}"})
        self._position = 0.0
        self._taken: dict[str, None] = {}
        self._behind = asyncio.Event()
        self._catching_up: asyncio.Task[None] | None = None
        self._open = AsyncExitStack()

    async def start(self, deliver: Deliver) -> None:
        """Start the server. Raises `ConfigError` if the port is in use."""
        await self.stop()
        self._api.open()
        try:
            await self._api.json("GET", ".json")
            self._api.accepted = True
            kept = {} if self.notes is None else await self.notes.read()
            self._position = float(kept.get(_POSITION, 0.0))
            if not self._position:
                await self._accepted(time.time())
            self._behind.set()
            app = web.Application(client_max_size=1 << 20)
            app.router.add_post("/sms", self._receive)
            self.url = await self._open.enter_async_context(
                listening(app, self._host, self._port, token=self._token)  # the signature takes the token's place
            )
        except BaseException:
            await self.stop()
            raise
        self._catching_up = asyncio.create_task(self._catch_up(deliver), name=f"catch up {self.name}")

    async def stop(self) -> None:
        task, self._catching_up = self._catching_up, None
        await end_tasks(task)
        await self._open.aclose()
        await self._api.aclose()

    # Incoming messages

    async def _receive(self, request: web.Request) -> web.Response:
        """Check a request, and read the number's messages: the one that it reports, and those that are missing."""
        form = dict(parse_qsl((await request.read()).decode("utf-8", "replace"), keep_blank_values=True))
        signature = request.headers.get("X-Twilio-Signature", "")
        if not hmac.compare_digest(signature.encode(), signature_of(self._token, self._public, form).encode()):
            raise web.HTTPForbidden(text="wrong signature")
        self._behind.set()
        return web.Response(text=_ANSWER, content_type="text/xml")

    async def _catch_up(self, deliver: Deliver) -> None:
        """Deliver the messages that are not accepted yet, whenever the webhook is called, and every `CATCH_UP_S`."""
        wait_s = 1.0
        while True:
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await self._behind.wait()
            except TimeoutError:
                pass
            self._behind.clear()
            try:
                for sent in await self._missing():
                    await deliver(await self._incoming(sent))
                    self._taken = dict([*self._taken.items(), (sent["sid"], None)][-_MOST_TAKEN:])
                    await self._accepted(_time_of(sent))
                wait_s = 1.0
                continue
            except PlatformError as error:
                logger.warning("%s; trying again in %.0f s", error, wait_s)
            except Exception:  # an error of the gateway, such as a full disk
                logger.exception("%s: a message could not be accepted; it will be read again", self.name)
            self._behind.set()
            await asyncio.sleep(wait_s)
            wait_s = min(60.0, wait_s * 2)

    async def _accepted(self, at: float) -> None:
        if at > self._position:
            self._position = at
            if self.notes is not None:
                await self.notes.write(_POSITION, repr(at))

    async def _missing(self) -> list[dict[str, Any]]:
        """Return the messages that the number got since the position, the oldest first."""
        since = self._position - _OVERLAP_S
        day = time.strftime("%Y-%m-%d", time.gmtime(since))
        found: list[dict[str, Any]] = []
        page = await self._api.json(
            "GET", "/Messages.json", params={"To": self._number, "DateSent>": day, "PageSize": 200}
        )
        while True:
            found += [each for each in page["messages"] if each["direction"] == "inbound" and _time_of(each) >= since]
            old = bool(page["messages"]) and _time_of(page["messages"][-1]) < since
            if old or not page.get("next_page_uri"):
                return [each for each in found[::-1] if each["sid"] not in self._taken]
            root = self._api.url.partition("/2010-04-01/")[0]
            page = await self._api.json("GET", f"{root}{page['next_page_uri']}")

    async def _incoming(self, sent: dict[str, Any]) -> Incoming:
        files, problem = [], ""
        if int(sent.get("num_media") or 0):
            try:
                listed = await self._api.json("GET", f"/Messages/{sent['sid']}/Media.json")
                for number, about in enumerate(listed["media_list"]):
                    path = f"/Messages/{sent['sid']}/Media/{about['sid']}"
                    data = await self._api.call("GET", path, most_bytes=_MOST_BYTES, allow_redirects=True)
                    kind = str(about["content_type"])
                    files.append(Attachment(f"file{number + 1}.{kind.rpartition('/')[2]}", kind, data))
            except PlatformRefused as error:
                problem = f"A file could not be read: {error}"
        address = ChatAddress(self.name, str(sent["from"]))
        return Incoming(address, str(sent["sid"]), str(sent["from"]), str(sent["body"]), tuple(files), problem=problem)

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        form = {"To": address.chat_id, "From": self._number, "Body": text}
        return str((await self._api.json("POST", "/Messages.json", data=form))["sid"])

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        raise PlatformRefused(f"{self.name}: files cannot be sent by SMS")

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        raise NotImplementedError("an SMS cannot be edited")

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("SMS has no typing notices")


def signature_of(token: str, url: str, form: Mapping[str, str]) -> str:
    """Return the signature of a request to `url` with these form fields, as Twilio computes it."""
    text = url + "".join(f"{name}{form[name]}" for name in sorted(form))
    return base64.b64encode(hmac.new(token.encode(), text.encode(), hashlib.sha1).digest()).decode()


def _time_of(sent: dict[str, Any]) -> float:
    """Return when a message was made, in seconds since the epoch."""
    return email.utils.parsedate_to_datetime(str(sent["date_created"])).timestamp()
