"""WhatsApp, with Meta's Cloud API: a webhook that gets the messages, and the Graph API that sends the answers.

Settings: `token` is the access token of a system user, `api_key` the app's secret. In `extra`: `phone_number_id`,
`verify_token` (a word that you also enter at Meta), `host`, `port` (8644) and `api_url`. Meta calls
`https://YOUR.ADDRESS/webhook`, so a proxy with a certificate must pass these requests to the gateway.

Each request is checked with its signature (`X-Hub-Signature-256`). It is confirmed once its messages are on the disk;
otherwise Meta sends it again, for up to seven days. A text can be sent only within 24 hours after the person's last
message; afterwards, Meta refuses it.

Format: https://developers.facebook.com/documentation/business-messaging/whatsapp
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Deliver, Incoming, PlatformLimits
from palaestra_gateway.platforms.http_api import HttpApi
from palaestra_gateway.platforms.webhook import listen_address
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

API_URL = "https://graph.facebook.com/v23.0"
_MOST_BODY = 4 << 20
_MOST_BYTES = 20 << 20
_MOST_IMAGE_BYTES = 5 << 20
_FOR_LATER = frozenset({1, 2, 4, 80007, 130429, 131000, 131016, 131048, 131056, 131057, 133004})
"""Error codes of rate limits, and of services that are unavailable for some time."""
_WITHDRAWN = 190
_FILES = ("image", "document", "audio", "video", "sticker")
_BUSINESS_SCOPED = re.compile(r"[A-Z]{2}\.[A-Za-z0-9.]+\Z")
"""The id that a person has for one business, in place of a telephone number; it goes into the field `recipient`:
https://developers.facebook.com/documentation/business-messaging/whatsapp/business-scoped-user-ids"""


class _GraphApi(HttpApi):
    """The Graph API. Its errors have codes of their own, often with the status 400."""

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> PlatformError:
        found = super().failure(status, headers, body)
        try:
            code = json.loads(body)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return found
        if code in _FOR_LATER or (code == _WITHDRAWN and self.accepted):
            wait = found.retry_after_s if isinstance(found, PlatformUnavailable) else None
            return PlatformUnavailable(str(found), wait)
        return found


class WhatsApp:
    """One phone number. `url` is the address of the webhook while it runs."""

    extra_settings = ("phone_number_id", "verify_token", "host", "port", "api_url")
    limits = PlatformLimits(max_text=4096, unit="utf16", max_file_bytes=_MOST_BYTES)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.url = ""
        token, self._secret = config.secret(name), config.api_key or ""
        number, verify = config.extra.get("phone_number_id"), config.extra.get("verify_token")
        if not (token and self._secret and isinstance(number, str | int) and isinstance(verify, str) and verify):
            raise ConfigError(
                f"platforms.{name} needs token (the access token), api_key (the app's secret), "
                "extra.phone_number_id and extra.verify_token"
            )
        self._number, self._verify = str(number), verify
        self._host, self._port = listen_address(name, config, 8644)
        url = str(config.extra.get("api_url") or API_URL)
        self._api = _GraphApi(name, url, {"Authorization": f"Bearer {token}"})
        self._deliver: Deliver | None = None
        self._open = AsyncExitStack()

    async def start(self, deliver: Deliver) -> None:
        """Start the server. Raises `ConfigError` if the port is in use."""
        await self.stop()
        self._api.open()
        try:
            await self._api.json("GET", f"/{self._number}", params={"fields": "id"})
            self._api.accepted = True
            self._deliver = deliver
            app = web.Application(client_max_size=_MOST_BODY)
            app.router.add_get("/webhook", self._subscribe)
            app.router.add_post("/webhook", self._receive)
            self.url = await self._open.enter_async_context(
                listening(app, self._host, self._port, token=self._secret)  # the signature takes the token's place
            )
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._deliver = None
        await self._open.aclose()
        await self._api.aclose()

    # Incoming messages

    async def _subscribe(self, request: web.Request) -> web.Response:
        """Confirm to Meta that this webhook belongs to the app."""
        given = request.query.get("hub.verify_token", "")
        right = hmac.compare_digest(given.encode(), self._verify.encode())
        if request.query.get("hub.mode") != "subscribe" or not right:
            raise web.HTTPForbidden(text="wrong verify_token")
        return web.Response(text=request.query.get("hub.challenge", ""))

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        expected = f"sha256={hmac.new(self._secret.encode(), body, hashlib.sha256).hexdigest()}"
        if not hmac.compare_digest(request.headers.get("X-Hub-Signature-256", "").encode(), expected.encode()):
            raise web.HTTPForbidden(text="wrong signature")
        if self._deliver is None:
            raise web.HTTPServiceUnavailable(text="the gateway is stopping")
        for entry in json.loads(body).get("entry") or ():
            for change in entry.get("changes") or ():
                value = change.get("value") or {}
                if change.get("field") == "messages" and str(value["metadata"]["phone_number_id"]) == self._number:
                    names = dict(map(_id_and_name, value.get("contacts") or ()))
                    for message in value.get("messages") or ():
                        await self._take_message(self._deliver, message, names)
        return web.Response()

    async def _take_message(self, deliver: Deliver, sent: dict[str, Any], names: Mapping[str, str]) -> None:
        # A person with a user name may hide the number; then there is an id of the person for this business.
        kind, user = str(sent.get("type")), str(sent.get("from") or sent["from_user_id"])
        group = str(sent.get("group_id") or "")
        if kind in ("reaction", "system", "request_welcome"):
            return
        address = ChatAddress(self.name, group or user, "group" if group else "dm")
        text, files, problem = "", list[Attachment](), ""
        try:
            if kind == "text":
                text = str(sent["text"]["body"])
            elif kind == "button":  # of a template
                text = str(sent["button"]["text"])
            elif kind == "interactive" and (chosen := _chosen_title(sent["interactive"])):
                text = chosen
            elif kind in _FILES:
                text = str(sent[kind].get("caption") or "")
                files.append(await self._download(kind, sent[kind]))
            else:
                problem = "Messages of this kind are not supported. Send text, an image or a file."
        except PlatformRefused as error:
            problem = f"The file could not be read: {error}"
        except (KeyError, TypeError, AttributeError):  # an error would lose the other messages of the request, too
            problem = "The message could not be read. Send it as text, please."
        await deliver(Incoming(address, sent["id"], user, text, tuple(files), names.get(user, ""), problem))

    async def _download(self, kind: str, about: dict[str, Any]) -> Attachment:
        place = await self._api.json("GET", f"/{about['id']}")
        if int(place.get("file_size") or 0) > _MOST_BYTES:
            raise PlatformRefused(f"it is too large; at most {_MOST_BYTES >> 20} MB are accepted")
        data = await self._api.call("GET", place["url"], most_bytes=_MOST_BYTES)
        media_type = str(about.get("mime_type") or place["mime_type"]).partition(";")[0]
        name = str(about.get("filename") or f"{kind}.{media_type.rpartition('/')[2]}")
        return Attachment(name, media_type, data)

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        return await self._post_message(address, "text", {"body": text, "preview_url": False})

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        form = aiohttp.FormData()
        form.add_field("messaging_product", "whatsapp")
        form.add_field("type", file.media_type)
        form.add_field("file", file.data, filename=file.name, content_type=file.media_type)
        number = (await self._api.json("POST", f"/{self._number}/media", data=form))["id"]
        if file.media_type in ("image/png", "image/jpeg") and len(file.data) <= _MOST_IMAGE_BYTES:
            return await self._post_message(address, "image", {"id": number})
        return await self._post_message(address, "document", {"id": number, "filename": file.name})

    async def _post_message(self, address: ChatAddress, kind: str, content: dict[str, JSON]) -> str:
        to = "group" if address.chat_type == "group" else "individual"
        field = "recipient" if to == "individual" and _BUSINESS_SCOPED.match(address.chat_id) else "to"
        body = {
            "messaging_product": "whatsapp", "recipient_type": to, field: address.chat_id, "type": kind, kind: content,
        }  # fmt: skip
        sent = await self._api.json("POST", f"/{self._number}/messages", json=body)
        return str(sent["messages"][0]["id"])

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        raise NotImplementedError("WhatsApp's Cloud API cannot edit messages")

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("WhatsApp shows typing notices only for a message")


def _id_and_name(contact: Mapping[str, Any]) -> tuple[str, str]:
    """Return the id and the name of a contact; each may be missing."""
    return str(contact.get("wa_id") or contact.get("user_id") or ""), str(
        (contact.get("profile") or {}).get("name") or ""
    )


def _chosen_title(reply: Mapping[str, Any]) -> str:
    """Return the title of the button or of the entry of a list that a person chose, or the empty string."""
    return str((reply.get("button_reply") or reply.get("list_reply") or {}).get("title") or "")
