"""A strict stand-in for Telegram's Bot API, as https://core.telegram.org/bots/api describes it: updates with offsets,
refusals with their codes, the limits of texts. One private chat with Anna, whose user id is 7."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from palaestra_slots.core.io.http_server import listening

_PARAMETERS = {
    "getMe": set(),
    "getUpdates": {"offset", "limit", "timeout", "allowed_updates"},
    "getFile": {"file_id"},
    "sendMessage": {"chat_id", "message_thread_id", "text"},
    "editMessageText": {"chat_id", "message_id", "text"},
    "sendPhoto": {"chat_id", "message_thread_id", "photo"},
    "sendDocument": {"chat_id", "message_thread_id", "document"},
    "sendChatAction": {"chat_id", "message_thread_id", "action"},
}
"""The documented parameters (https://core.telegram.org/bots/api#available-methods) that the gateway may send."""
TOKEN, CHAT, SUPERGROUP = "123456:secret", 7, -1001234567890


class TelegramAPI:
    """`sent` are the messages of the bot: text, photo or document. `failing` is a status, and `refusing` a whole
    answer, for every send to Anna."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.failing = 0
        self.refusing: dict[str, Any] = {}
        self.token = TOKEN
        self.url = ""
        self._updates: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._polling = 0
        self._came = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/bot{token}/{method}", self._call)
        app.router.add_get("/file/bot{token}/{path}", self._file)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as self.url:
            yield

    def write(self, **message: Any) -> None:
        """A person writes to the bot."""
        self._updates.append(self._written(**message))
        self._came.set()

    def disordered(self, *texts: str) -> None:
        """A person writes several texts; the bot gets the last one first, and each in two updates."""
        messages = [self._written(text=text)["message"] for text in texts]
        for message in reversed([*messages, *messages]):
            self.update(message=message)

    def _written(self, **message: Any) -> dict[str, Any]:
        user = {"id": CHAT, "is_bot": False, "first_name": "Anna"}
        chat = {"id": CHAT, "type": "private", "first_name": "Anna"}
        number = next(self._numbers)
        whole = {"message_id": 1000 + number, "date": 1, "chat": chat, "from": user, **message}
        return {"update_id": number, "message": whole}

    def update(self, **update: Any) -> None:
        """The bot gets an update."""
        self._updates.append({"update_id": next(self._numbers), **update})
        self._came.set()

    def put_file(self, data: bytes) -> str:
        name = f"file{next(self._numbers)}"
        self.files[name] = data
        return name

    async def _file(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["path"]])

    async def _call(self, request: web.Request) -> web.Response:
        if request.match_info["token"] != self.token:
            return _refused(401, "Unauthorized")
        form = dict(await request.post())
        method = request.match_info["method"]
        parts = {str(value).removeprefix("attach://") for value in form.values() if str(value).startswith("attach://")}
        assert set(form) - parts <= _PARAMETERS[method], form
        if self.refusing and method.startswith("send") and form["chat_id"] == str(CHAT):
            return web.json_response(self.refusing, status=self.refusing["error_code"])
        if method.startswith(("send", "edit")) and self.failing:
            parameters = {"parameters": {"retry_after": 3}} if self.failing == 429 else {}
            return _refused(self.failing, "Too Many Requests: retry after 3", **parameters)
        handler = getattr(self, f"_{method}", None)
        if handler is None:
            return _refused(404, "Not Found: method not found")
        found: web.Response = await handler(form)
        return found

    async def _getMe(self, form: Any) -> web.Response:
        return _ok({"id": 123456, "is_bot": True, "first_name": "Bot", "username": "a_bot"})

    async def _getUpdates(self, form: Any) -> web.Response:
        if self._polling:
            return _refused(409, "Conflict: terminated by other getUpdates request")
        offset = int(form.get("offset", 0))
        if offset:
            self._updates = [each for each in self._updates if each["update_id"] >= offset]
        self._polling += 1
        try:
            if not self._updates:
                self._came.clear()
                try:
                    async with asyncio.timeout(min(int(form.get("timeout", 0)), 1)):
                        await self._came.wait()
                except TimeoutError:
                    pass
        finally:
            self._polling -= 1
        return _ok(self._updates[:100])

    async def _sendMessage(self, form: Any) -> web.Response:
        text = form["text"]
        if problem := _problem(form) or _text_problem(text):
            return _refused(400, problem)
        return self._add(form, text=text)

    async def _editMessageText(self, form: Any) -> web.Response:
        if problem := _problem(form) or _text_problem(form["text"]):
            return _refused(400, problem)
        for message in self.sent:
            if message["message_id"] == int(form["message_id"]):
                if message.get("text") == form["text"]:
                    return _refused(400, "Bad Request: message is not modified")
                message["text"] = form["text"]
                return _ok(_shown(message))
        return _refused(400, "Bad Request: message to edit not found")

    async def _sendPhoto(self, form: Any) -> web.Response:
        return await self._upload(form, "photo")

    async def _sendDocument(self, form: Any) -> web.Response:
        return await self._upload(form, "document")

    async def _upload(self, form: Any, kind: str) -> web.Response:
        if problem := _problem(form):
            return _refused(400, problem)
        field = form[form[kind].removeprefix("attach://")] if isinstance(form[kind], str) else form[kind]
        return self._add(form, **{kind: field.file.read()})

    async def _sendChatAction(self, form: Any) -> web.Response:
        return _ok(True)

    async def _getFile(self, form: Any) -> web.Response:
        name = form["file_id"]
        if name not in self.files:
            return _refused(400, "Bad Request: invalid file_id")
        return _ok({"file_id": name, "file_unique_id": name, "file_size": len(self.files[name]), "file_path": name})

    def _add(self, form: Any, **content: Any) -> web.Response:
        message = {"message_id": next(self._numbers), **content}
        self.sent.append(message)
        return _ok(_shown(message))


def _problem(form: Any) -> str:
    return "" if form.get("chat_id") in (str(CHAT), str(SUPERGROUP)) else "Bad Request: chat not found"


def _text_problem(text: str) -> str:
    if not text.strip():
        return "Bad Request: message text is empty"
    return "Bad Request: message is too long" if len(text.encode("utf-16-le")) // 2 > 4096 else ""


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    chat = {"id": CHAT, "type": "private"}
    return {"message_id": message["message_id"], "date": 1, "chat": chat, "text": message.get("text", "")}


def _ok(result: Any) -> web.Response:
    return web.json_response({"ok": True, "result": result})


def _refused(code: int, description: str, **more: Any) -> web.Response:
    body = {"ok": False, "error_code": code, "description": description, **more}
    return web.json_response(body, status=code)
