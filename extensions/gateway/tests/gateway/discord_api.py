"""A strict stand-in for Discord: the REST routes that the gateway uses and the gateway websocket, as
https://docs.discord.com/developers describes them, for the real host names over TLS (`connector`).

The bot `BOT` has a direct chat `DM` with the user `ANNA`, and a server with the channels `GENERAL` and `QUIET`.
Messages stay in the history of their channel; a session that resumes gets what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import WSMsgType, abc, web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

TOKEN = "MTIz.secret.token"
BOT, ANNA, SERVER, GENERAL, QUIET, DM = "123", "77", "500", "501", "502", "900"
HOSTS = ("discord.com", "gateway.discord.gg", "cdn.discordapp.com")
EPOCH_MS = 1_420_070_400_000
IS_VOICE_MESSAGE = 1 << 13
DISPATCH, HEARTBEAT, IDENTIFY, RESUME, RECONNECT, INVALID_SESSION, HELLO, ACK = 0, 1, 2, 6, 7, 9, 10, 11
_MESSAGE_FIELDS = {
    "content", "nonce", "tts", "allowed_mentions", "message_reference", "components", "attachments", "flags",
    "enforce_nonce",
}  # fmt: skip
"""Documented fields of `POST /channels/{id}/messages` (developers/resources/message#create-message)."""
GUILDS, GUILD_MESSAGES, DIRECT_MESSAGES, MESSAGE_CONTENT = 1 << 0, 1 << 9, 1 << 12, 1 << 15


@dataclass
class Session:
    """A session of the websocket: what was sent to it, and the socket while it is connected."""

    id: str
    intents: int
    events: list[dict[str, Any]] = field(default_factory=list)
    socket: Socket | None = None


class Socket:
    """A connection with the compression that the client asks for: `zlib-stream`, or `zstd-stream` if it has zstd."""

    def __init__(self, response: web.WebSocketResponse, compression: str) -> None:
        self.response = response
        if compression == "zstd-stream":
            import zstandard

            self._stream: Any = zstandard.ZstdCompressor().compressobj()
            self._flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        else:
            self._stream, self._flush = zlib.compressobj(), zlib.Z_SYNC_FLUSH

    async def send(self, op: int, d: Any = None, **more: Any) -> None:
        data = json.dumps({"op": op, "d": d, "s": None, "t": None, **more}).encode()
        await self.response.send_bytes(self._stream.compress(data) + self._stream.flush(self._flush))


class DiscordAPI:
    """`sent` are the bot's messages, `files` what the CDN has by path. `failing` is a status for every send,
    `refusing` are the bodies of the next refusals, and `resumable` is whether sessions can be resumed."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.identified = 0
        self.resumed = 0
        self.failing = 0
        self.refusing: list[dict[str, Any]] = []
        self.resumable = True
        self.token = TOKEN
        self._history: dict[str, list[dict[str, Any]]] = {GENERAL: [], QUIET: [], DM: []}
        self._sessions: dict[str, Session] = {}
        self._nonces: dict[str, dict[str, Any]] = {}
        self._last_id = 0
        self._port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/", self._gateway)
        app.router.add_route("*", "/api/v10/{path:.*}", self._route)
        app.router.add_get("/attachments/{path:.*}", self._file)
        with tempfile.TemporaryDirectory() as folder:
            self._trusted, own = _certificates(Path(folder))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=own).start()
            self._port = runner.addresses[0][1]
            yield
            await self.disconnect()
        finally:
            await runner.cleanup()

    def connector(self) -> aiohttp.BaseConnector:
        """Connections to Discord's host names lead here."""
        return aiohttp.TCPConnector(resolver=_Resolver(self._port), ssl=self._trusted)

    def new_id(self) -> str:
        """A snowflake: the time in milliseconds, and a number that grows."""
        self._last_id = max(self._last_id + 1, (int(time.time() * 1000) - EPOCH_MS) << 22)
        return str(self._last_id)

    async def write(self, content: str = "", channel: str = DM, **message: Any) -> str:
        """A person writes; returns the message's id."""
        author = {"id": ANNA, "username": "anna", "discriminator": "0", "global_name": "Anna", "avatar": None}
        mentions = [_BOT_USER] if f"<@{BOT}>" in content else []
        return await self._add(channel, {"content": content, "author": author, "mentions": mentions, **message})

    async def disordered(self, *texts: str) -> None:
        """A person writes several texts in the direct chat; the bot gets the last one first, and each twice."""
        sessions, self._sessions = self._sessions, {}
        for text in texts:
            await self.write(text)
        self._sessions = sessions
        for message in reversed([*self._history[DM][-len(texts) :]] * 2):
            await self.dispatch("MESSAGE_CREATE", message)

    def put_file(self, name: str, data: bytes, media_type: str) -> dict[str, Any]:
        """An attachment of a message."""
        number = self.new_id()
        self.files[f"{number}/{name}"] = data
        url = f"https://cdn.discordapp.com/attachments/{number}/{name}"
        about = {"filename": name, "size": len(data), "content_type": media_type}
        return {"id": number, "url": url, "proxy_url": url, **about}

    async def dispatch(self, name: str, d: Any) -> None:
        """The bot gets an event."""
        for session in self._sessions.values():
            await self._dispatch(session, name, d)

    async def disconnect(self, code: int = 4000) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            if session.socket is not None:
                await session.socket.response.close(code=code)

    async def request_reconnect(self) -> None:
        for session in self._sessions.values():
            if session.socket is not None:
                await session.socket.send(RECONNECT)

    # The gateway websocket

    async def _gateway(self, request: web.Request) -> web.WebSocketResponse:
        compression = request.query["compress"]
        assert compression in ("zlib-stream", "zstd-stream")
        assert dict(request.query) == {"v": "10", "encoding": "json", "compress": compression}
        response = web.WebSocketResponse()
        await response.prepare(request)
        socket, session = Socket(response, compression), None
        await socket.send(HELLO, {"heartbeat_interval": 41_250})
        try:
            async for message in response:
                if message.type is not WSMsgType.TEXT:
                    continue
                given = json.loads(message.data)
                op, d = given["op"], given["d"]
                if op == HEARTBEAT:
                    await socket.send(ACK)
                elif op in (IDENTIFY, RESUME) and session is not None:
                    await response.close(code=4005)
                elif op in (IDENTIFY, RESUME) and d["token"] != self.token:
                    await response.close(code=4004)
                elif op == IDENTIFY:
                    session = await self._identify(socket, d)
                elif op == RESUME:
                    session = await self._resume(socket, d)
                elif session is None:
                    await response.close(code=4003)
        finally:
            if session is not None:
                session.socket = None
        return response

    async def _identify(self, socket: Socket, d: Any) -> Session:
        assert set(d["properties"]) == {"os", "browser", "device"}
        assert not d["intents"] & MESSAGE_CONTENT, "this bot was not granted a privileged intent"
        self.identified += 1
        session = Session(f"s{self.identified}", d["intents"], socket=socket)
        self._sessions = {session.id: session}
        application = {"id": BOT, "flags": 0}
        ready = {
            "v": 10, "user": _BOT_USER, "guilds": [{"id": SERVER, "unavailable": True}], "session_id": session.id,
            "resume_gateway_url": "wss://gateway.discord.gg", "application": application, "private_channels": [],
        }  # fmt: skip
        await self._dispatch(session, "READY", ready)
        if session.intents & GUILDS:
            await self._dispatch(session, "GUILD_CREATE", self._server())
        return session

    async def _resume(self, socket: Socket, d: Any) -> Session | None:
        session = self._sessions.get(d["session_id"])
        if session is None or not self.resumable:
            await socket.send(INVALID_SESSION, False)
            return None
        self.resumed += 1
        session.socket = socket
        for event in session.events[d["seq"] :]:
            await socket.send(DISPATCH, event["d"], s=event["s"], t=event["t"])
        await self._dispatch(session, "RESUMED", {})
        return session

    async def _dispatch(self, session: Session, name: str, d: Any) -> None:
        event = {"t": name, "s": len(session.events) + 1, "d": d}
        session.events.append(event)
        if session.socket is not None and not session.socket.response.closed:
            with contextlib.suppress(ConnectionError):  # the bot was killed; its session has the event
                await session.socket.send(DISPATCH, d, s=event["s"], t=name)

    def _server(self) -> dict[str, Any]:
        def channel(number: str, name: str) -> dict[str, Any]:
            last = self._history[number][-1]["id"] if self._history[number] else None
            more = {"position": 0, "permission_overwrites": [], "nsfw": False, "parent_id": None, "topic": None}
            return {"id": number, "type": 0, "name": name, "last_message_id": last, **more}

        everyone = {
            "id": SERVER, "name": "@everyone", "permissions": "0", "position": 0, "color": 0, "hoist": False,
            "managed": False, "mentionable": False, "flags": 0, "colors": {"primary_color": 0},
        }  # fmt: skip
        member = {"user": _BOT_USER, "roles": [], "joined_at": _now(), "deaf": False, "mute": False, "flags": 0}
        return {
            "id": SERVER, "name": "A server", "unavailable": False, "owner_id": ANNA, "member_count": 2, "icon": None,
            "roles": [everyone], "emojis": [], "stickers": [], "features": [], "members": [member], "threads": [],
            "channels": [channel(GENERAL, "general"), channel(QUIET, "quiet")], "presences": [], "voice_states": [],
            "verification_level": 0, "default_message_notifications": 0, "explicit_content_filter": 0, "mfa_level": 0,
            "nsfw_level": 0, "premium_tier": 0, "preferred_locale": "en-US", "system_channel_flags": 0,
            "stage_instances": [], "guild_scheduled_events": [], "soundboard_sounds": [], "afk_timeout": 300,
        }  # fmt: skip

    # The REST routes

    async def _route(self, request: web.Request) -> web.Response:
        path, method = request.match_info["path"], request.method
        if request.headers.get("Authorization") != f"Bot {self.token}":
            return _json({"message": "401: Unauthorized", "code": 0}, status=401)
        if method == "GET" and path == "users/@me":
            return _json(_BOT_USER)
        if method == "GET" and path == "oauth2/applications/@me":
            about = {"description": "", "icon": None, "bot_public": False, "bot_require_code_grant": False}
            return _json({"id": BOT, "name": "bot", "verify_key": "", "owner": _BOT_USER, **about})
        _, channel, *rest = path.split("/")
        if channel not in self._history:
            return _json({"message": "Unknown Channel", "code": 10003}, status=404)
        if rest == ["typing"] and method == "POST":
            return web.Response(status=204)
        if rest == ["messages"] and method == "GET":
            return _json(self._page(channel, request.query))
        if self.failing == 429:
            body = {"message": "You are being rate limited.", "retry_after": 65.0, "global": False}
            return _json(body, status=429, headers={"Via": "1.1 google", "X-RateLimit-Remaining": "0"})
        if self.failing:
            return _json({"message": "unavailable", "code": 0}, status=self.failing)
        form, files = await _form(request)
        assert set(form) <= _MESSAGE_FIELDS, form
        if self.refusing:
            return _json(self.refusing.pop(0), status=403)
        if len(form.get("content") or "") > 2000:
            return _invalid(50035, "Invalid Form Body")
        if method == "PATCH":
            return self._edit(rest[1], form)
        assert (method, rest) == ("POST", ["messages"])
        if not form.get("content") and not files:
            return _invalid(50006, "Cannot send an empty message")
        if form.get("enforce_nonce") and len(str(form["nonce"])) > 25:
            return _invalid(50035, "Invalid Form Body")
        if form.get("enforce_nonce") and form["nonce"] in self._nonces:
            return _json(self._nonces[form["nonce"]])
        reference = {"message_reference": form["message_reference"]} if "message_reference" in form else {}
        attachments = [self.put_file(name, data, "application/octet-stream") for name, data in files]
        message = {"content": form.get("content") or "", "author": _BOT_USER, "attachments": attachments, **reference}
        message["flags"] = form.get("flags", 0)
        await self._add(channel, message)
        self.sent.append({"files": [data for _, data in files], **self._history[channel][-1]})
        self._nonces[form["nonce"]] = self._history[channel][-1]
        return _json(self._history[channel][-1])

    def _page(self, channel: str, query: Any) -> list[dict[str, Any]]:
        """The oldest `limit` messages after an id, the newest of them first."""
        found = [each for each in self._history[channel] if int(each["id"]) > int(query["after"])]
        assert 1 <= int(query["limit"]) <= 100
        return [_readable_by_bots(each) for each in reversed(found[: int(query["limit"])])]

    def _edit(self, number: str, form: Any) -> web.Response:
        for message in self.sent:
            if message["id"] == number:
                message["content"] = form["content"]
                return _json({key: value for key, value in message.items() if key != "files"})
        return _json({"message": "Unknown Message", "code": 10008}, status=404)

    async def _file(self, request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers, "the CDN must not get the token"
        data = self.files.get(request.match_info["path"])
        return web.Response(status=404) if data is None else web.Response(body=data)

    async def _add(self, channel: str, content: dict[str, Any]) -> str:
        message = {
            "id": self.new_id(), "channel_id": channel, "type": 0, "timestamp": _now(), "edited_timestamp": None,
            "tts": False, "mention_everyone": False, "mentions": [], "mention_roles": [], "attachments": [],
            "embeds": [], "pinned": False, "flags": 0, "components": [], **content,
        }  # fmt: skip
        self._history[channel].append(message)
        shared = channel != DM
        for session in self._sessions.values():
            if session.intents & (GUILD_MESSAGES if shared else DIRECT_MESSAGES):
                where = {"guild_id": SERVER, "member": {"roles": [], "joined_at": _now(), "flags": 0}} if shared else {}
                await self._dispatch(session, "MESSAGE_CREATE", {**_readable_by_bots(message), **where})
        return str(message["id"])


_BOT_USER = {"id": BOT, "username": "bot", "discriminator": "0001", "global_name": None, "avatar": None, "bot": True}


def _readable_by_bots(message: dict[str, Any]) -> dict[str, Any]:
    """Without the privileged intent, a bot reads what is its own, direct or mentions it."""
    mentioned = any(each["id"] == BOT for each in message["mentions"])
    if message["channel_id"] == DM or mentioned or message["author"]["id"] == BOT:
        return message
    return {**message, "content": "", "attachments": []}


async def _form(request: web.Request) -> tuple[Any, list[tuple[str, bytes]]]:
    """The JSON of a request, and the name and data of each file."""
    if not request.content_type.startswith("multipart/"):
        return await request.json(), []
    posted = await request.post()
    files = [each for each in posted.values() if not isinstance(each, (str, bytes, bytearray))]
    payload = posted["payload_json"]
    assert isinstance(payload, str)
    return json.loads(payload), [(each.filename, each.file.read()) for each in files]


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """With the content type of Discord, which names no charset."""
    data = json.dumps(body).encode()
    return web.Response(body=data, status=status, headers={**(headers or {}), "Content-Type": "application/json"})


def _invalid(code: int, message: str) -> web.Response:
    return _json({"message": message, "code": code}, status=400)


def _now() -> str:
    return datetime.now(UTC).isoformat()


class _Resolver(abc.AbstractResolver):
    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[abc.ResolveResult]:
        assert host in HOSTS
        found = {"hostname": host, "host": "127.0.0.1", "port": self._port, "family": family, "proto": 0, "flags": 0}
        return [abc.ResolveResult(**found)]  # type: ignore[typeddict-item]

    async def close(self) -> None:
        await asyncio.sleep(0)


def _certificates(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of a client and of a server with Discord's host names."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOSTS[0])])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    public = certificate.public_bytes(pem)
    (folder / "both.pem").write_bytes(secret + public)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "both.pem")
    return ssl.create_default_context(cadata=public.decode()), server
