"""Source distributions from the package index that pip itself is set up for.

No address is written here: the caller's flag comes first, then what pip's configuration (or its environment variables)
says, then the default that pip prints in its own help. Wire formats: the simple repository API, HTML (PEP 503) and
JSON (PEP 691), https://packaging.python.org/specifications/simple-repository-api/

Invariant: bytes leave this module only when their sha256 is the one that was asked for, or the one the index states.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import json
import re
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import aiohttp

from palaestra.core.errors import ConfigError, PrepareError
from palaestra.suites.swe.host_process import run_process

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_LINK = re.compile(r"""<a\s[^>]*?href=["']([^"']+)["'][^>]*>([^<]+)</a>""", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://[^\s)>\]]+/simple/?")
_SETTINGS_TIMEOUT_S = 30.0
MAX_SDIST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sdist:
    """One source distribution: its file name, where it lies and its sha256 (hex)."""

    filename: str
    url: str
    sha256: str


class PackageIndex:
    """Looks up and downloads source distributions, into a cache by hash. Use as an async context manager."""

    def __init__(self, cache: Path, session: aiohttp.ClientSession, url: str) -> None:
        self._cache = cache
        self._session = session
        self._url = url.rstrip("/")

    async def find(self, name: str, version: str) -> Sdist:
        """The source distribution of a release. Raises `ConfigError` when there is none."""
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

    async def download(self, sdist: Sdist) -> bytes:
        """The archive's bytes, from the cache if they are there. Raises `PrepareError` when the hash differs."""
        cached = self._cache / f"{sdist.sha256}.tar.gz"
        if (data := cached_bytes(self._cache, sdist.sha256)) is not None:
            return data
        data, _ = await self._get(sdist.url, accept="*/*")
        if hashlib.sha256(data).hexdigest() != sdist.sha256:
            raise PrepareError(f"{sdist.filename}: the download's sha256 is not {sdist.sha256}")
        _store(cached, data)
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
            raise PrepareError(f"the package index cannot be read: {type(problem).__name__}: {problem}") from problem
        if len(data) > MAX_SDIST_BYTES:
            raise PrepareError(f"{url} is larger than {MAX_SDIST_BYTES >> 20} MiB")
        return data, reply.content_type


def cached_bytes(cache: Path, sha256: str) -> bytes | None:
    """A source distribution that was downloaded before, checked again."""
    path = cache / f"{sha256}.tar.gz"
    data = path.read_bytes() if path.is_file() else b""
    return data if hashlib.sha256(data).hexdigest() == sha256 else None


@asynccontextmanager
async def open_index(cache: Path, *, url: str | None = None) -> AsyncIterator[PackageIndex]:
    """Connect to the package index: `url` if given, else pip's."""
    address = url or await configured_url()
    context = ssl.create_default_context(cafile=await _setting("cert") or None)
    timeout = aiohttp.ClientTimeout(total=120, connect=30)
    async with aiohttp.ClientSession(
        trust_env=True, timeout=timeout, connector=aiohttp.TCPConnector(ssl=context)
    ) as session:
        yield PackageIndex(cache, session, address)


async def configured_url() -> str:
    """The address that pip would use here. Raises `ConfigError` when there is neither pip nor uv to ask."""
    if address := await _setting("index-url"):
        return address
    if importlib.util.find_spec("pip"):
        argv = [sys.executable, "-m", "pip", "download", "--help"]
    elif uv := shutil.which("uv"):
        argv = [uv, "pip", "install", "--help"]
    else:
        raise ConfigError("neither pip nor uv is here to ask for the package index; name one with --index-url")
    found = _ADDRESS.search(re.sub(r"\s+", " ", (await run_process(argv, timeout_s=_SETTINGS_TIMEOUT_S)).text))
    if not found:
        raise ConfigError("the default package index cannot be found out; name one with --index-url")
    return found[0]


async def _setting(name: str) -> str:
    """One of pip's settings: from its environment variables or, after those, its files. Empty when it is not set."""
    if not importlib.util.find_spec("pip"):
        return ""
    result = await run_process([sys.executable, "-m", "pip", "config", "list"], timeout_s=_SETTINGS_TIMEOUT_S)
    found = dict(re.findall(rf"^(:env:|global|install|download)\.{re.escape(name)}='(.*)'$", result.text, re.MULTILINE))
    return found.get(":env:") or found.get("download") or found.get("global") or ""


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


def _store(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{hashlib.sha256(data).hexdigest()[:8]}.new")
    temporary.write_bytes(data)
    temporary.rename(path)
