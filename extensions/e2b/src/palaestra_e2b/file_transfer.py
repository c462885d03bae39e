"""The file endpoints of a sandbox, `GET /files` and `POST /files`, and the signatures of their addresses.

A caller sends the sandbox's token, or a signature that was made with it for one path, operation and user, perhaps with
an end. Contents of up to `IN_MEMORY_BYTES` pass through memory; larger ones through a temporary file, at most
`_OF_KEY` of a key and `_AT_ONCE` in total at a time, so that no caller can fill this machine's disk or make the others
wait. A transfer without progress ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import functools
import hashlib
import hmac
import posixpath
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO

from aiohttp import BodyPartReader, web

from palaestra_e2b.call_limits import Lanes
from palaestra_e2b.connect_protocol import dumps
from palaestra_e2b.filesystem_service import path_of
from palaestra_e2b.sandbox_users import SandboxUser
from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.core.types import JSON

IN_MEMORY_BYTES = 8 << 20
MOST_UPLOAD_BYTES = 1 << 30
_MOST_FILES = 1000
_OF_KEY, _AT_ONCE, _PROGRESS_S = 4, 32, 60.0
_PIECE = 256 << 10
_FILENAME = re.compile(r';\s*filename="([^"]*)"')


def signature(path: str, operation: str, user: str, token: str, expiration: str = "") -> str:
    """Return the signature of an address, as the SDKs make it. `operation` is "read" or "write"."""
    text = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration else "")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode(errors="surrogatepass")).digest()).rstrip(b"=").decode()


def is_signed(request: web.Request, token: str) -> bool:
    """Return whether a request carries a signature that was made with this token. Raises `ApiError` if the signature is
    right and has expired."""
    query = request.query
    operation = "read" if request.method == "GET" else "write"
    expiration = query.get("signature_expiration", "")
    own = signature(query.get("path", ""), operation, query.get("username", ""), token, expiration)
    if not hmac.compare_digest(own.encode(), query.get("signature", "").encode("utf-8", "surrogateescape")):
        return False
    if expiration and (not expiration.isdigit() or int(expiration[:15]) < time.time()):
        raise ApiError(401, "signature is already expired")
    return True


class FileTransfer:
    """The file endpoints of all sandboxes."""

    def __init__(self, *, most_upload_bytes: int = MOST_UPLOAD_BYTES) -> None:
        self._most = most_upload_bytes
        self._lanes = Lanes(_OF_KEY, _AT_ONCE)

    async def read(self, request: web.Request, user: SandboxUser) -> web.StreamResponse:
        """Answer with a file. Raises `ApiError` or OSError."""
        path = path_of({"path": request.query.get("path", "")}, user)
        info = await user.slot.stat(path)
        if info is None:
            raise ApiError(404, f"path '{path}' does not exist")
        if info.kind == "dir":
            raise ApiError(400, f"path '{path}' is a directory")
        name = posixpath.basename(path).encode("ascii", "replace").decode().replace('"', "_").replace("\\", "_")
        headers = {"Content-Type": "application/octet-stream", "Content-Disposition": f'inline; filename="{name}"'}
        try:
            if path.startswith("/proc/"):
                return web.Response(body=await _read_proc(user, path), headers=headers)
            data = await user.slot.read_bytes(path, max_bytes=IN_MEMORY_BYTES)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return await self._send_large(request, user, path, headers)
        return web.Response(body=data, headers=headers)

    async def _send_large(
        self, request: web.Request, user: SandboxUser, path: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        async with self._lanes.one(user.key):
            with tempfile.TemporaryDirectory(prefix="palaestra-e2b-") as folder:
                local = Path(folder, "content")
                size = await user.slot.download(path, local)
                response = web.StreamResponse(headers={**headers, "Content-Length": str(size)})
                await response.prepare(request)
                with await asyncio.to_thread(local.open, "rb") as file:
                    while data := await asyncio.to_thread(file.read, _PIECE):
                        async with asyncio.timeout(_PROGRESS_S):
                            await response.write(data)
                await response.write_eof()
        return response

    async def write(self, request: web.Request, user: SandboxUser) -> web.Response:
        """Write the file or files of a request. Raises `ApiError` or OSError."""
        if any(name.lower().startswith("x-metadata-") for name in request.headers):
            raise ApiError(400, "metadata of files is not supported by this server; leave it out")
        written: list[JSON] = []
        if request.content_type == "multipart/form-data":
            named = request.query.get("path", "")
            with _readable():
                reader = await request.multipart()
                async for part in reader:
                    if not isinstance(part, BodyPartReader) or part.name != "file":
                        continue
                    if len(written) == _MOST_FILES:
                        raise ApiError(400, f"at most {_MOST_FILES} files can be written in one request")
                    given = named or _filename(part)
                    written.append(await self._put(user, given, functools.partial(part.read_chunk, _PIECE)))
                    if named:
                        break
        elif request.content_type == "application/octet-stream":
            with _readable():
                written.append(await self._put(user, request.query.get("path", ""), request.content.readany))
        else:
            raise ApiError(400, "a file is sent as multipart/form-data or application/octet-stream")
        if not written:
            raise ApiError(400, "the request holds no file; its part must be named 'file'")
        return web.json_response(written, dumps=dumps)

    async def _put(self, user: SandboxUser, given: str, more: Callable[[], Awaitable[bytes]]) -> dict[str, JSON]:
        if not given:
            raise ApiError(400, "the request names no path")
        path = path_of({"path": given}, user)
        found = await user.slot.stat(path)
        if found is not None and found.kind == "dir":
            raise ApiError(400, f"path is a directory: {path}")
        start = bytearray()
        pieces = self._pieces(more)
        async for data in pieces:
            start += data
            if len(start) > IN_MEMORY_BYTES:
                await self._put_large(user, path, bytes(start), pieces, found.mode if found is not None else 0o644)
                break
        else:
            await user.slot.write_bytes(path, bytes(start))
        return {"path": path, "name": posixpath.basename(path), "type": "file"}

    async def _put_large(
        self, user: SandboxUser, path: str, start: bytes, rest: AsyncIterator[bytes], mode: int
    ) -> None:
        async with self._lanes.one(user.key):
            with tempfile.NamedTemporaryFile(prefix="palaestra-e2b-") as file:
                await asyncio.to_thread(file.write, start)
                async for data in rest:
                    await asyncio.to_thread(file.write, data)
                await asyncio.to_thread(_flush_with_mode, file, mode)
                await user.slot.upload(Path(file.name), path)

    async def _pieces(self, more: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
        total = 0
        while True:
            async with asyncio.timeout(_PROGRESS_S):
                data = await more()
            if not data:
                return
            total += len(data)
            if total > self._most:
                raise ApiError(413, f"a file may have at most {self._most} bytes")
            yield data


async def _read_proc(user: SandboxUser, path: str) -> bytes:
    """Return a file of /proc, which only a process of the sandbox can read. Raises `ApiError`."""
    argv = user.command(["/bin/sh", "-c", 'cat -- "$1" >&3', "cat", path])
    done = await user.sandbox_slot.execute(argv, cwd="/", timeout_s=10.0, verdict=True)
    if not done.success:
        raise ApiError(403, f"{path} cannot be read: {done.output.strip()[-200:]}")
    return done.verdict


def _filename(part: BodyPartReader) -> str:
    """Return the path in a part's header. aiohttp's own `filename` is without a leading slash. Source: the encoding of
    multipart/form-data in the HTML standard, which both SDKs follow."""
    found = _FILENAME.search(part.headers.get("Content-Disposition", ""))
    text = found[1] if found is not None else ""
    return text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


def _flush_with_mode(file: IO[bytes], mode: int) -> None:
    file.flush()
    Path(file.name).chmod(mode)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn a broken body into the caller's error."""
    try:
        yield
    except (web.RequestPayloadError, ValueError, AssertionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None
