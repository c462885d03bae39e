"""Fetches a page that a model names, within time and size limits and only from addresses that the policy allows.

A page that cannot be fetched raises `PageUnreadable`, whose message the model reads: missing, slow or forbidden pages
are not infrastructure failures. Invariant: requests go only to checked addresses; `cut` marks an incomplete body.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import aiohttp
from aiohttp.client_exceptions import ClientConnectorDNSError
from yarl import URL

from palaestra.tools.net.host_policy import AddressPolicy, PrivateAddress

MAX_BYTES = 3 << 20
MAX_REDIRECTS = 5
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; Palaestra)",
    "Accept": "text/html,application/xhtml+xml,text/markdown,text/plain,application/json;q=0.9,*/*;q=0.5",
    "Accept-Encoding": "gzip, deflate",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class PageUnreadable(ValueError):
    """Raised if a page could not be read. The message is the reason, for the model."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched document. `url` is its address after redirects; if `cut`, `body` is only its beginning."""

    url: str
    content_type: str
    charset: str | None
    body: bytes
    cut: bool = False


async def fetch(
    url: str, policy: AddressPolicy, *, max_bytes: int = MAX_BYTES, timeout_s: float = TIMEOUT_S
) -> Fetched:
    """Fetch the document at the address, after redirects. Raises `PageUnreadable`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _follow_redirects(_checked_url(url), policy, max_bytes)
    except TimeoutError:
        raise PageUnreadable(f"no answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, PrivateAddress):
            raise PageUnreadable(str(error.os_error)) from None
        what = "no such host" if isinstance(error, ClientConnectorDNSError) else "cannot connect"
        raise PageUnreadable(f"{what}: {error.host}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, PageUnreadable):
            raise
        raise PageUnreadable(f"the connection failed: {str(error) or type(error).__name__}") from None


async def screen(url: str, policy: AddressPolicy) -> None:
    """Resolve the host of `url` without sending a request. Raises `PageUnreadable` if the host cannot be resolved or
    the policy refuses any of its addresses."""
    parsed = _checked_url(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
        for info in found:
            policy.check(str(info[4][0]))
    except PrivateAddress as private:
        raise PageUnreadable(str(private)) from None
    except OSError:
        raise PageUnreadable(f"no such host: {parsed.host}") from None


async def _follow_redirects(url: URL, policy: AddressPolicy, max_bytes: int) -> Fetched:
    connector = aiohttp.TCPConnector(socket_factory=policy.socket, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    ) as session:
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as reply:
                where = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or where is None:
                    return await _taken(reply, max_bytes)
                url = _checked_url(str(url.join(URL(where))))
    raise PageUnreadable(f"it redirects more than {MAX_REDIRECTS} times")


async def _taken(reply: aiohttp.ClientResponse, max_bytes: int) -> Fetched:
    if reply.status >= 400:
        raise PageUnreadable(f"the server answered with HTTP {reply.status} {reply.reason or ''}".rstrip())
    body, cut = bytearray(), False
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            del body[max_bytes:]
            cut = True
            break
    if cut:
        reply.close()  # closes without waiting for the rest
    return Fetched(str(reply.url), reply.content_type, reply.charset, bytes(body), cut)


def _checked_url(url: str) -> URL:
    """Return the parsed address. Raises `PageUnreadable` unless it is an http or https address with a host and without
    a user or password."""
    try:
        parsed = URL(url.strip())
    except ValueError:
        raise PageUnreadable("it is not the address of a page") from None
    if parsed.scheme not in ("http", "https"):
        raise PageUnreadable(f"only http and https addresses are read, not {parsed.scheme or 'those without a scheme'}")
    if not parsed.host:
        raise PageUnreadable("it has no host")
    if parsed.user is not None or parsed.password is not None:
        raise PageUnreadable("addresses with a user or a password are not read")
    return parsed
