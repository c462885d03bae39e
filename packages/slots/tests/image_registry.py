"""The registry of the Debian package docker-registry on the loopback, and a server in front of it that counts, cuts
and lies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.client
import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from palaestra_slots.sandbox.images.unpack import architecture

PROGRAM = shutil.which("docker-registry")
OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"


def layer(files: dict[str, bytes]) -> bytes:
    """A layer that is compressed with gzip."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(data: bytes, kind: str, **more: object) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest(data), "size": len(data), **more}


def manifest(config: bytes, layers: list[bytes], *, docker: bool = False, compression: str = "gzip") -> bytes:
    kinds = (f"{OCI}.manifest.v1+json", f"{OCI}.config.v1+json", f"{OCI}.layer.v1.tar+")
    if docker:
        kinds = (
            f"{DOCKER}.distribution.manifest.v2+json",
            f"{DOCKER}.container.image.v1+json",
            f"{DOCKER}.image.rootfs.diff.tar.",
        )
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kinds[0],
            "config": descriptor(config, kinds[1]),
            "layers": [descriptor(each, kinds[2] + compression) for each in layers],
        }
    ).encode()


def index(entries: dict[str, bytes]) -> bytes:
    """An index of manifests by architecture."""
    listed = [
        descriptor(data, json.loads(data)["mediaType"], platform={"os": "linux", "architecture": architecture})
        for architecture, data in entries.items()
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": listed}).encode()


@dataclass(frozen=True)
class Registry:
    """A running registry, to which images are pushed through its API."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def put(self, repository: str, data: bytes) -> None:
        """Push a blob."""
        at = urlsplit(self._ask("POST", f"/v2/{repository}/blobs/uploads/", b"", 202))
        self._ask("PUT", f"{at.path}?{at.query}&digest={digest(data)}", data, 201)

    def tag(self, repository: str, tag: str, data: bytes) -> None:
        """Push a manifest or an index."""
        kind = {"Content-Type": json.loads(data)["mediaType"]}
        self._ask("PUT", f"/v2/{repository}/manifests/{tag}", data, 201, kind)

    def push(self, repository: str, tag: str, layers: list[bytes], **options: object) -> bytes:
        """Push an image for this machine, and return its manifest."""
        config = json.dumps({"os": "linux", "architecture": architecture(), "config": {"WorkingDir": "/srv"}}).encode()
        for data in (config, *layers):
            self.put(repository, data)
        made = manifest(config, layers, **options)  # type: ignore[arg-type]
        self.tag(repository, tag, made)
        return made

    def _ask(self, method: str, path: str, data: bytes, wanted: int, more: dict[str, str] | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/octet-stream"} | self.headers | (more or {})
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            assert reply.status == wanted, (method, path, reply.status, reply.read())
            return reply.headers.get("Location", "")


@contextlib.contextmanager
def running_registry(folder: Path, users: str = "") -> Iterator[Registry]:
    """Run a registry; `users` are the lines of an htpasswd file."""
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    folder.mkdir()
    if users:
        (folder / "htpasswd").write_text(users)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.02)
        yield Registry(port)
    finally:
        process.kill()
        process.wait()


@dataclass
class Front:
    """A server that forwards requests to a registry. `cuts` are numbers of bytes after which a download of a large
    blob is cut, each once; `answers` are replies by path. If `token` is set, requests need it, and `realm` issues it.
    """

    port: int = 0
    blobs: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    sent: int = 0
    cuts: list[int] = field(default_factory=list)
    answers: dict[str, web.Response] = field(default_factory=dict)
    token: str = ""
    realm: str = ""
    pause_s: float = 0.0
    authorizations: list[str | None] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def front(registry: Registry | None) -> AsyncIterator[Front]:
    """Run a server in front of a registry."""
    at = Front()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            at.authorizations.append(request.headers.get("Authorization"))
            if at.token and at.authorizations[-1] != f"Bearer {at.token}":
                challenge = f'Bearer realm="{at.realm}",service="the registry",scope="repository:other:push"'
                return web.Response(status=401, headers={"WWW-Authenticate": challenge})
            if (ready := at.answers.get(request.path)) is not None:
                return web.Response(status=ready.status, headers=ready.headers, body=ready.body)
            assert registry is not None, request.path
            headers = {name: request.headers[name] for name in ("Accept", "Range") if name in request.headers}
            async with session.get(f"http://127.0.0.1:{registry.port}{request.path_qs}", headers=headers) as reply:
                return await _forward(at, request, reply)

        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        at.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            yield at
        finally:
            await runner.cleanup()


async def _forward(at: Front, request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    kept = ("Content-Type", "Content-Length", "Content-Range", "Docker-Content-Digest")
    headers = {name: reply.headers[name] for name in kept if name in reply.headers}
    answer = web.StreamResponse(status=reply.status, headers=headers)
    await answer.prepare(request)
    blob = "/blobs/" in request.path
    if blob:
        at.blobs[request.path.rpartition("/")[2]] += 1
        at.ranges.append(request.headers.get("Range", ""))
    large = blob and int(reply.headers.get("Content-Length", 0)) > 1 << 16
    left = at.cuts.pop(0) if large and at.cuts else None
    async for piece in reply.content.iter_chunked(1 << 16):
        if left is not None:
            piece = piece[:left]
            left -= len(piece)
        at.sent += len(piece) if blob else 0
        await answer.write(piece)
        if blob and at.pause_s:
            await asyncio.sleep(at.pause_s)
        if left == 0:
            assert request.transport is not None
            request.transport.close()
            return answer
    return answer
