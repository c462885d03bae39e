"""Download source distributions from pip's package index, read their files, and make git repositories from them.

This module contains no address of an index. The address comes from the caller's flag, or else from pip's environment
variables or configuration, or else from the default that pip (or uv) prints in its help. Wire formats: the simple
repository API, HTML (PEP 503) and JSON (PEP 691), https://packaging.python.org/specifications/simple-repository-api/

Invariants: downloaded bytes have the sha256 that was requested or that the index states. No part of a package is
executed or unpacked to disk; the members of an archive are passed directly to git.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import importlib.util
import io
import json
import re
import shutil
import ssl
import sys
import tarfile
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urldefrag, urljoin

import aiohttp

from palaestra_slots.core.errors import ConfigError, PrepareError
from palaestra_slots.core.io.durable_files import replaced
from palaestra_slots.core.io.host_process import check_process, run_process
from palaestra_slots.core.redaction import redacted
from palaestra_slots.images.wheel_install import pip_settings
from palaestra_slots.sandbox.images.unpack import Archive

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_LINK = re.compile(r"""<a\s[^>]*?href=["']([^"']+)["'][^>]*>([^<]+)</a>""", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://[^\s)>\]]+/simple/?")
_SETTINGS_TIMEOUT_S = 30.0
MAX_SDIST_BYTES = 64 << 20
MAX_TREE_BYTES = 256 << 20
_IDENTITY = "Palaestra <palaestra@localhost> 946684800 +0000"
_GIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sdist:
    """One source distribution: its file name, address and sha256 (hex)."""

    filename: str
    url: str
    sha256: str


class PackageIndex:
    """Looks up source distributions and downloads them into a cache by hash; see `open_index`."""

    def __init__(self, cache: Path, session: aiohttp.ClientSession, url: str) -> None:
        self._cache = cache
        self._session = session
        self._url = url.rstrip("/")

    async def find(self, name: str, version: str) -> Sdist:
        """Return the source distribution of a release. Raises `ConfigError` if the index has none."""
        normal = re.sub(r"[-_.]+", "-", name).lower()
        page = f"{self._url}/{normal}/"
        body, kind = await self._get(page, accept=_ACCEPT)
        files = _json_files(body, page) if "json" in kind else _html_files(body, page)
        endings = (f"-{version}.tar.gz",)
        for file in files:
            stem = re.sub(r"[-_.]+", "-", file.filename.removesuffix(".tar.gz")).lower()
            if stem == f"{normal}-{re.sub(r'[-_.]+', '-', version)}" and file.filename.endswith(endings):
                return file
        raise ConfigError(f"the package index has no source distribution of {name}=={version}")

    async def download_sdist(self, sdist: Sdist) -> bytes:
        """Return the bytes of the archive, from the cache if possible. Raises `PrepareError` if the hash of a download
        differs."""
        if (data := cached_bytes(self._cache, sdist.sha256)) is not None:
            return data
        data, _ = await self._get(sdist.url, accept="*/*")
        if hashlib.sha256(data).hexdigest() != sdist.sha256:
            raise PrepareError(f"{sdist.filename}: the download's sha256 is not {sdist.sha256}")
        self._cache.mkdir(parents=True, exist_ok=True)
        with replaced(self._cache / f"{sdist.sha256}.tar.gz") as file:
            file.write(data)
        return data

    async def _get(self, url: str, *, accept: str) -> tuple[bytes, str]:
        try:
            async with self._session.get(url, headers={"Accept": accept}) as reply:
                if reply.status == 404:
                    raise ConfigError(f"the package index does not know {url.rstrip('/').rpartition('/')[2]!r}")
                reply.raise_for_status()
                data = await reply.content.read(MAX_SDIST_BYTES + 1)
                while not reply.content.at_eof() and len(data) <= MAX_SDIST_BYTES:
                    data += await reply.content.read(MAX_SDIST_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise PrepareError(
                f"the package index cannot be read: {redacted(f'{type(problem).__name__}: {problem}')}"
            ) from problem
        if len(data) > MAX_SDIST_BYTES:
            raise PrepareError(f"{redacted(url)} is larger than {MAX_SDIST_BYTES >> 20} MiB")
        return data, reply.content_type


def cached_bytes(cache: Path, sha256: str) -> bytes | None:
    """Return the source distribution with this hash from the cache, or None if it is missing or damaged."""
    path = cache / f"{sha256}.tar.gz"
    data = path.read_bytes() if path.is_file() else b""
    return data if hashlib.sha256(data).hexdigest() == sha256 else None


@asynccontextmanager
async def open_index(cache: Path, *, url: str | None = None) -> AsyncIterator[PackageIndex]:
    """Connect to the package index at `url`. If `url` is None, connect to the index that pip uses."""
    address = url or await configured_url()
    context = ssl.create_default_context(cafile=(await pip_settings()).get("cert"))
    timeout = aiohttp.ClientTimeout(total=120, connect=30)
    async with aiohttp.ClientSession(
        trust_env=True, timeout=timeout, connector=aiohttp.TCPConnector(ssl=context)
    ) as session:
        yield PackageIndex(cache, session, address)


async def configured_url() -> str:
    """Return the address that pip uses. Raises `ConfigError` if it cannot be determined."""
    if address := (await pip_settings()).get("index-url"):
        return address
    if importlib.util.find_spec("pip"):
        argv = [sys.executable, "-P", "-m", "pip", "download", "--help"]
    elif uv := shutil.which("uv"):
        argv = [uv, "pip", "install", "--help"]
    else:
        raise ConfigError(
            "the package index is unknown, because neither pip nor uv is installed; name it with --index-url"
        )
    found = _ADDRESS.search(re.sub(r"\s+", " ", (await run_process(argv, timeout_s=_SETTINGS_TIMEOUT_S)).text))
    if not found:
        raise ConfigError("the default package index is unknown; name one with --index-url")
    return found[0]


def _json_files(body: bytes, page: str) -> list[Sdist]:
    files = json.loads(body).get("files", [])
    return [
        Sdist(file["filename"], urljoin(page, file["url"]), file["hashes"]["sha256"])
        for file in files
        if file.get("hashes", {}).get("sha256")
    ]


def _html_files(body: bytes, page: str) -> list[Sdist]:
    found = []
    for href, name in _LINK.findall(body.decode("utf-8", "replace")):
        url, fragment = urldefrag(html.unescape(href))
        if fragment.startswith("sha256="):
            found.append(Sdist(html.unescape(name).strip(), urljoin(page, url), fragment.removeprefix("sha256=")))
    return found


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a tree."""

    data: bytes
    executable: bool = False


def read_sdist(archive: bytes, name: str) -> dict[str, SourceFile]:
    """Return the regular files of an archive, keyed by their path below the top directory. Links, special files and
    `.git` folders are left out.

    Raises `PrepareError` for an archive that is broken, unsafe (a member outside its directory) or too large.
    """
    files: dict[str, SourceFile] = {}
    try:
        with Archive.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar.entries():
                if tar.offset > MAX_TREE_BYTES:  # behind this entry, in the unpacked archive
                    raise PrepareError(f"{name}: more than {MAX_TREE_BYTES >> 20} MiB unpacked")
                names = PurePosixPath(member.name.lstrip("/")).parts
                if ".." in names:
                    raise tarfile.TarError(f"{member.name!r} is outside its directory")
                path = PurePosixPath(*names[1:])
                content = (
                    tar.extractfile(member) if member.isreg() and path.parts and ".git" not in path.parts else None
                )
                if content is not None:
                    files[str(path)] = SourceFile(content.read(), bool(member.mode & 0o100))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise PrepareError(f"{name} is not a safe source archive: {problem}") from problem
    return files


async def make_repository(files: Mapping[str, SourceFile], path: Path, message: str) -> str:
    """Write a bare repository at `path` whose only commit contains these files, and return the commit's name.

    The same files give the same commit.
    """
    settings = ["git", "-c", "init.defaultBranch=main", "-c", "core.hooksPath=/", "-c", "safe.directory=*"]
    await _git([*settings, "init", "--quiet", "--bare", "--template=", str(path)], b"")
    await _git(
        [*settings, f"--git-dir={path}", "fast-import", "--quiet", "--force"], _fast_import_input(files, message)
    )
    commit = await _git([*settings, f"--git-dir={path}", "rev-parse", "refs/heads/main"], b"")
    return commit.decode().strip()


async def _git(argv: list[str], stdin: bytes) -> bytes:
    done = await check_process(argv, "making a repository failed", stdin=stdin, timeout_s=_GIT_TIMEOUT_S, shown=500)
    return done.stdout


def _fast_import_input(files: Mapping[str, SourceFile], message: str) -> bytes:
    """Return the input of git-fast-import(1) for one commit on main."""
    parts = [b"commit refs/heads/main\n", f"committer {_IDENTITY}\n".encode(), _data(message.encode())]
    for path, file in sorted(files.items()):
        mode = b"100755" if file.executable else b"100644"
        quoted = path.replace("\\", "\\\\").replace('"', '\\"').encode()
        parts += [b"M " + mode + b' inline "' + quoted + b'"\n', _data(file.data)]
    return b"".join(parts)


def _data(content: bytes) -> bytes:
    return f"data {len(content)}\n".encode() + content + b"\n"
