"""The server and its parts: one address for the control API and for the calls into sandboxes.

Which sandbox a call goes into is named by the header `E2b-Sandbox-Id` (with `E2B_SANDBOX_URL`) or by the host name
`PORT-ID.DOMAIN` (with `E2B_DOMAIN`). Everything else is the control API, whose callers send their key in `X-API-Key`.
Invariant: a caller is checked before the body of its request is read.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from aiohttp import web

from palaestra_e2b.api_keys import ApiKey, ApiKeys
from palaestra_e2b.call_limits import MOST_CALLS, OpenCalls
from palaestra_e2b.control_api import MOST_BODY_BYTES, ControlApi
from palaestra_e2b.endings import Endings
from palaestra_e2b.envd import ENVD_PORT, Envd, error_body
from palaestra_e2b.file_transfer import MOST_UPLOAD_BYTES, FileTransfer
from palaestra_e2b.port_proxy import MOST_BYTES, pass_on
from palaestra_e2b.requests import read_all
from palaestra_e2b.sandboxes import Sandboxes, resumed
from palaestra_e2b.template_api import UPLOADS, TemplateApi
from palaestra_e2b.template_builds import TemplateBuilds
from palaestra_e2b.templates import Templates
from palaestra_e2b.wire_errors import ApiError, api_error
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import Limits, Network
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig

logger = logging.getLogger(__name__)

_HOST = re.compile(r"(\d{1,5})-([a-z0-9]{1,60})\..+")


class E2BServer:
    """Answers every request of a server."""

    def __init__(
        self, keys: ApiKeys, control: ControlApi, envd: Envd, templates: TemplateApi, sandboxes: Sandboxes
    ) -> None:
        self._keys, self._control, self._envd = keys, control, envd
        self._templates, self._sandboxes, self._open = templates, sandboxes, OpenCalls(MOST_CALLS)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            return await self._dispatch(request)
        except ApiError as error:
            answer = error_body(error)
            if error.status in (401, 403, 408, 413):
                answer.force_close()
            return answer
        except web.HTTPException:
            raise
        except (PalaestraError, TimeoutError) as error:
            return error_body(api_error(error, ""))
        except ConnectionError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            return error_body(ApiError(500, "the server failed to answer; its log has the reason"))

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        inside = _sandbox_and_port(request)
        if inside is not None:
            sandbox_id, port = inside
            return await (self._envd.handle(request, sandbox_id) if port == ENVD_PORT
                          else self._port(request, sandbox_id, port))  # fmt: skip
        if request.path == "/health":
            return web.Response(text="ok")
        if request.path == "/files" and "signature" in request.query:
            return await self._envd.signed(request)
        if request.path.startswith(UPLOADS):
            return await self._templates.upload(request)
        key = self._key(request)
        with self._open.one(key.name):
            return await self._control.handle(key, request, await read_all(request, MOST_BODY_BYTES))

    def _key(self, request: web.Request) -> ApiKey:
        given = request.headers.get("X-API-Key", "")
        if not given:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
        key = self._keys.find(given) if given else None
        if key is None:
            raise ApiError(401, "the API key is not one of this server" if given else "no API key was sent")
        return key

    async def _port(self, request: web.Request, sandbox_id: str, port: int) -> web.StreamResponse:
        sandbox = self._sandboxes.inside(sandbox_id)
        if sandbox.traffic_token is not None:
            sent = request.headers.get("e2b-traffic-access-token", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(sent, sandbox.traffic_token.encode()):
                raise ApiError(403, "the ports of this sandbox need its traffic access token")
        try:
            with self._open.one(f"port of {sandbox_id}"):
                body = await read_all(request, MOST_BYTES)
                async with resumed(self._sandboxes, sandbox) as slot:
                    return await pass_on(request, body, slot, port)
        except (PalaestraError, OSError, ValueError) as error:
            raise api_error(error, sandbox_id) from None


def _sandbox_and_port(request: web.Request) -> tuple[str, int] | None:
    """Return the sandbox and the port that a request goes to; None for the control API. Raises `ApiError`."""
    named = request.headers.get("E2b-Sandbox-Id")
    if named is not None:
        port = request.headers.get("E2b-Sandbox-Port", str(ENVD_PORT))
    else:
        found = _HOST.fullmatch(request.host.lower())
        if found is None:
            return None
        port, named = found.groups()
    if not port.isdigit() or not 0 < int(port[:6]) < 1 << 16:
        raise ApiError(400, f"{port[:20]!r} is not a port")
    return named, int(port)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens: on `port` for HTTP and, with `tls`, on `tls_port` for HTTPS with names below `domain`.
    Port 0 stands for a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    domain: str | None = None
    tls: ssl.SSLContext | None = None
    tls_port: int = 0

    def with_tls_port(self) -> ServerAddress:
        """Return the address with a port for HTTPS that is free now, unless it has one."""
        if self.tls_port:
            return self
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.bind((self.host, 0))
            return replace(self, tls_port=int(trial.getsockname()[1]))


@asynccontextmanager
async def serving_sandboxes(
    server: E2BServer, keys: ApiKeys, address: ServerAddress
) -> AsyncIterator[tuple[str, str | None]]:
    """Serve during the block, and yield the URLs: of HTTP and, with `tls`, of HTTPS. Raises `ConfigError`."""
    token = keys.first.secret  # every caller needs a key, so any address may be listened on
    async with AsyncExitStack() as stack:
        listen = partial(listening, server.handle, address.host, token=token, limits_bodies=True)
        plain = await stack.enter_async_context(listen(address.port))
        secure = None
        if address.tls is not None:
            secure = await stack.enter_async_context(listen(address.tls_port, tls=address.tls))
        yield plain, secure


BASE_IMAGES: Mapping[str, tuple[str | None, ImageConfig]] = {"base": (None, ImageConfig())}


@dataclass(frozen=True, slots=True)
class RunningE2B:
    """A server that answers. `notes` are lines for whoever started it."""

    url: str
    pool: SlotPool
    sandboxes: Sandboxes
    notes: tuple[str, ...]


@asynccontextmanager
async def running_server(
    keys: ApiKeys,
    images: Mapping[str, tuple[str | None, ImageConfig]] = BASE_IMAGES,
    *,
    address: ServerAddress = ServerAddress(),
    isolation: str = "best",
    most_sandboxes: int | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    network: Network = Network.ON,
    folder: Path | None = None,
    most_upload_bytes: int = MOST_UPLOAD_BYTES,
) -> AsyncIterator[RunningE2B]:
    """Run a server during the block, at whose end every sandbox ends.

    `images` maps the names of templates to root file systems with their configurations; `base` must be among them.
    `folder` keeps templates and the record of ended sandboxes. Raises `ConfigError`, also if another server uses the
    folder, and `IsolationUnavailable`.
    """
    with _only_server(folder), Endings(None if folder is None else folder / "sandboxes.jsonl") as endings:
        backend = LocalBackend.from_isolation(isolation)
        async with SlotPool(SlotPoolConfig(max_slots=most_sandboxes, acquire_timeout=10.0), backend) as pool:
            templates = Templates(pool, images)
            builds = TemplateBuilds(pool, templates, None if folder is None else folder / "templates", network)
            notes = builds.read_saved()
            template_api = TemplateApi(templates, builds, limits)
            try:
                async with Sandboxes(pool, templates, endings, limits=limits, network=network) as sandboxes:
                    address = address.with_tls_port()  # sandboxes are told the port before it is opened
                    secure_domain = None if address.domain is None else f"{address.domain}:{address.tls_port}"
                    control = ControlApi(sandboxes, template_api, domain=secure_domain)
                    envd = Envd(sandboxes, FileTransfer(most_upload_bytes=most_upload_bytes))
                    server = E2BServer(keys, control, envd, template_api, sandboxes)
                    async with serving_sandboxes(server, keys, address) as (url, secure):
                        notes += [f"sandboxes: {pool.limit}; isolation {pool.rung.label}"]
                        if secure is not None:
                            notes.append(f"HTTPS at {secure} for api.{secure_domain} and PORT-ID.{secure_domain}")
                        if endings.recovered:
                            notes.append(f"{endings.recovered} sandboxes had ended with a server that was killed")
                        yield RunningE2B(url, pool, sandboxes, tuple(notes))
            finally:
                await builds.aclose()


@contextmanager
def _only_server(folder: Path | None) -> Iterator[None]:
    """Keep other servers out of the folder. Raises `ConfigError` if one uses it."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another server uses the folder {folder}: end it, or choose one with --state") from None
        yield
