"""Asks one repository of a registry for manifests and blobs, with tokens and redirects.

Invariants: requests go over https; over http only to this machine's loopback, or to the registry itself if the user
allowed it by name. Credentials and tokens go to the registry that the user named and, for a token, to the server that
this registry names in its challenge, never to the target of a redirect. Every reply is bounded before it is read.

Source: OCI distribution specification 1.1, "Pull"; "Token Authentication Specification" of the distribution project.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import PullError
from palaestra_slots.core.io.http_server import is_loopback
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.retry import RETRIED_STATUSES, TransientFailure, retry_after_s
from palaestra_slots.sandbox.images.reference import ImageName
from palaestra_slots.sandbox.images.registry import manifests
from palaestra_slots.sandbox.images.registry.credentials import Challenge, Credentials, parse_challenge, token_of

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
"""The seconds to connect, and the seconds without any data. A download as a whole may take any time."""

_MAX_REDIRECTS = 5
_MAX_REPLY_BYTES = 1 << 20
_ACCEPT = ", ".join((*manifests.INDEXES, *manifests.MANIFESTS))
_DOCKER_HUB = "registry-1.docker.io"
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """How the user reaches registries. `plain_http` allows http to the registries that are named; loopback addresses
    always use it. `proxy` returns the address of the proxy for a scheme and a host, or None."""

    credentials: Credentials = field(default_factory=Credentials)
    plain_http: bool = False
    proxy: Callable[[str, str], str | None] = lambda scheme, host: None


def new_session() -> aiohttp.ClientSession:
    """Return a session for `ImageRepository`, without cookies, and without decompression, which would hide a blob's own
    bytes."""
    return aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=TIMEOUT,
        trust_env=False,
        read_bufsize=1 << 20,
        headers={"User-Agent": "palaestra", "Accept-Encoding": "identity"},
    )


class ImageRepository:
    """One repository of a registry, such as `library/python` of docker.io."""

    def __init__(self, session: aiohttp.ClientSession, image: ImageName, access: RegistryAccess) -> None:
        self._session, self._image, self._access = session, image, access
        host = _DOCKER_HUB if image.host == "docker.io" else image.host
        try:
            address = URL(f"https://{host}")
            self._loopback = is_loopback(address.host or "")
            plain = self._loopback or access.plain_http
            self._base = URL(f"{'http' if plain else 'https'}://{host}")
        except ValueError:
            raise PullError(f"{image} does not name a registry") from None
        self._authorization: str | None = None

    async def manifest(self, reference: str, name: str) -> tuple[bytes, str]:
        """Return the bytes of a manifest or an index and its type. A digest as `reference` is verified. Raises
        `PullError`, and `TransientFailure` for a failure that may pass."""
        async with self._requesting(f"manifests/{reference}", {"Accept": _ACCEPT}) as reply:
            self._check_status(reply, 200)
            data = await _read_reply(reply, manifests.MAX_MANIFEST_BYTES, f"the manifest of {name}")
        digest = manifests.digest_of(data)
        header = reply.headers.get("Docker-Content-Digest", digest)
        asked = reference if reference.startswith("sha256:") else digest
        if digest != asked or (header.startswith("sha256:") and header != digest):
            raise PullError(
                f"{name}: the registry sent a manifest with the digest {digest} for {asked}, so it is not what was "
                "asked for; nothing was stored"
            )
        return data, reply.headers.get("Content-Type", "")

    @contextlib.asynccontextmanager
    async def blob(self, digest: str, start: int) -> AsyncIterator[tuple[aiohttp.StreamReader, int]]:
        """Yield a blob's bytes and the position of the first one: `start`, or 0 if the registry does not serve parts.
        The bytes are not verified. Raises as `manifest` does."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._requesting(f"blobs/{digest}", headers) as reply:
            # A registry may ignore the range and send the whole blob with status 200.
            if start and reply.status == 206:
                if not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                    raise PullError(f"{self._image}: the registry sent another part of {digest} than was asked for")
                yield reply.content, start
                return
            if not (start and reply.status == 416):  # a registry that has fewer bytes than came before
                self._check_status(reply, 200)
                yield reply.content, 0
                return
        async with self.blob(digest, 0) as whole:
            yield whole

    @contextlib.asynccontextmanager
    async def _requesting(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the reply to a request below this repository, after authorisation and redirects."""
        url = self._base / "v2" / self._image.repository / path
        reply = await self._send_request(url, headers, self._authorization)
        try:
            if reply.status == 401:
                challenge = parse_challenge(reply.headers.getall("WWW-Authenticate", []))
                reply.close()
                self._authorization = await self._authorize(challenge)
                reply = await self._send_request(url, headers, self._authorization)
            for _ in range(_MAX_REDIRECTS):
                if reply.status not in _REDIRECTS:
                    break
                url = self._target(url, reply.headers.get("Location", ""))
                reply.close()
                own = self._authorization if url.origin() == self._base.origin() else None
                reply = await self._send_request(url, headers, own)
            try:
                yield reply
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:  # no other OSError: the disk's
                raise self._broken(url, error) from error
        finally:
            reply.close()

    async def _send_request(
        self, url: URL, headers: Mapping[str, str], authorization: str | None
    ) -> aiohttp.ClientResponse:
        sent = {**headers, **({"Authorization": authorization} if authorization else {})}
        proxy = None if is_loopback(url.host or "") else self._access.proxy(url.scheme, url.host or "")
        try:
            # Redirects are followed by `_requesting`, which sends the credentials to no other server.
            return await self._session.get(url, headers=sent, allow_redirects=False, proxy=proxy)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientSSLError):  # trying again would not help
                raise PullError(f"{self._image}: {_url_origin(url)} has no valid TLS certificate: {error}") from error
            raise self._broken(url, error) from error
        except ValueError as error:
            raise PullError(f"{self._image}: {_url_origin(url)} cannot be asked: {one_line(str(error), 200)}") from None

    def _target(self, url: URL, location: str) -> URL:
        """Return the address to which the registry redirects. Raises `PullError` for http, except from this machine to
        this machine or within the registry, and for an address with credentials."""
        try:
            # The signature in an address holds for exactly its characters, so they are not encoded again.
            target = url.join(URL(location, encoded=True))
            allowed = self._is_allowed(target)
        except ValueError:
            raise PullError(f"{self._image}: the registry redirects to no address") from None
        if not location or not allowed:
            raise PullError(
                f"{self._image}: the registry redirects to {_url_origin(target)}, but only https addresses "
                "without credentials are followed"
            )
        return target

    def _is_allowed(self, url: URL) -> bool:
        if url.user is not None or url.password is not None or not url.host:
            return False
        if url.scheme == "https":
            return True
        near = self._loopback and is_loopback(url.host)
        return url.scheme == "http" and (near or url.origin() == self._base.origin())

    async def _authorize(self, challenge: Challenge | None) -> str:
        """Return the header that answers a challenge. Raises `PullError` if the user has no credentials for it."""
        basic = self._access.credentials.of(self._image.host)
        if challenge is None:
            raise self._access_error(401, "")
        if challenge.scheme == "basic":
            # The registry has just refused these credentials.
            if basic is None or self._authorization == basic:
                raise self._access_error(401, "")
            return basic
        try:
            realm = URL(challenge.realm)
            allowed = self._is_allowed(realm)
        except ValueError:
            allowed = False
        if not allowed:
            raise PullError(
                f"{self._image}: the registry's server for tokens is not an https address: "
                f"{one_line(challenge.realm, 200)}"
            )
        service = {"service": challenge.service} if challenge.service else {}
        query = realm.update_query(service | {"scope": f"repository:{self._image.repository}:pull"})
        reply = await self._send_request(query, {}, basic)
        try:
            if reply.status in (400, 401, 403, 404):
                raise self._access_error(reply.status, f" by {_url_origin(realm)}")
            self._check_status(reply, 200)
            token = token_of(await _read_reply(reply, _MAX_REPLY_BYTES, "the token"))
        except ValueError as error:
            if isinstance(error, PullError):
                raise
            raise PullError(f"{self._image}: {_url_origin(realm)} issued no token: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(realm, error) from error
        finally:
            reply.close()
        return f"Bearer {token}"

    def _check_status(self, reply: aiohttp.ClientResponse, wanted: int) -> None:
        """Raise `TransientFailure` or `PullError` if a reply has another status than the wanted one."""
        if reply.status == wanted:
            return
        if reply.status in (401, 403):
            raise self._access_error(reply.status, "")
        if reply.status == 404:
            raise PullError(f"{self._image} is not in the registry, or part of it is missing (HTTP 404)")
        hint = (
            ": it limits the pulls of an address; log in for a higher limit, or pull later"
            if reply.status == 429
            else ""
        )
        problem = PullError(f"{self._image}: {_url_origin(reply.url)} answered with HTTP {reply.status}{hint}")
        if reply.status in RETRIED_STATUSES:
            raise TransientFailure(problem, retry_after_s(reply.headers.get("Retry-After"), SystemClock().wall()))
        raise problem

    def _access_error(self, status: int, where: str) -> PullError:
        hint = self._access.credentials.hint(self._image.host)
        return PullError(
            f"{self._image}: access was refused{where} (HTTP {status}). Either there is no such image, or it needs "
            f"credentials: {hint}"
        )

    def _broken(self, url: URL, error: Exception) -> TransientFailure:
        text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)  # without the address
        why = one_line(text or type(error).__name__, 200)
        return TransientFailure(PullError(f"{self._image}: the connection to {_url_origin(url)} failed: {why}"))


def _url_origin(url: URL) -> str:
    """Return the part of an address that an error may show: a path or a query may contain a signature."""
    return one_line(f"{url.scheme}://{url.host}", 100)


async def _read_reply(reply: aiohttp.ClientResponse, most: int, what: str) -> bytes:
    data = bytearray()
    async for piece in reply.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > most:
            raise PullError(f"{what} is larger than {most >> 20} MiB")
    return bytes(data)
