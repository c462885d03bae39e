"""Finds out how a registry wants to be asked: its challenges, and the user's credentials for it.

Credentials come only from `auths` in the user's own configuration of docker (or podman, whose `auth.json` has the same
form). Credential helpers (`credsStore`, `credHelpers`) are programs; they are named in an error, but never run.

Formats: RFC 9110, 11.6.1 (challenges); the "Token Authentication Specification" of the distribution project; docker's
`config.json`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, read_regular
from palaestra_slots.core.redaction import remember_secret
from palaestra_slots.core.types import JSON

_MAX_CONFIG_BYTES = 1 << 20
_MAX_CHALLENGE_CHARS = 16 << 10
_SCHEME = re.compile(r"(?:^|,)\s*(Bearer|Basic)\s", re.IGNORECASE | re.ASCII)
_PARAMETER = re.compile(r'([A-Za-z_]{1,40})\s*=\s*(?:"((?:[^"\\]|\\.){0,4096})"|([^\s",]{1,4096}))', re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Challenge:
    """What a registry asks for: `scheme` is `bearer`, where `realm` is the address of the server that issues tokens and
    `service` the registry's name there, or `basic`."""

    scheme: str
    realm: str = ""
    service: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The user's credentials by registry, as values of the header `Authorization`. `helpers` are the registries whose
    credentials a credential helper keeps; the key `` stands for all registries."""

    basic: Mapping[str, str] = field(default_factory=dict)
    helpers: Mapping[str, str] = field(default_factory=dict)

    def of(self, host: str) -> str | None:
        """Return the header for a registry, or None."""
        return self.basic.get(host)

    def hint(self, host: str) -> str:
        """Return what to do when a registry refuses access."""
        helper = self.helpers.get(host) or self.helpers.get("")
        if self.basic.get(host):
            return "those in the docker configuration do not allow it"
        if helper:
            return (
                f"they may be in the credential helper {helper!r:.60}, which Palaestra does not run: put them into a "
                "file with `auths`, and name the file with --auth FILE"
            )
        return "run docker login, or name a file with `auths` with --auth FILE"


def parse_challenge(headers: list[str]) -> Challenge | None:
    """Return the challenge that can be answered, a bearer token rather than a password; None if there is none. The
    `scope` of a challenge is not used: a token is requested for pulling this one repository."""
    found: dict[str, Challenge] = {}
    for header in headers:
        text = header[:_MAX_CHALLENGE_CHARS]
        starts = list(_SCHEME.finditer(text))
        for number, match in enumerate(starts):
            end = starts[number + 1].start() if number + 1 < len(starts) else len(text)
            values = {
                name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(text[match.end() : end])
            }
            scheme = match[1].lower()
            found.setdefault(scheme, Challenge(scheme, values.get("realm", ""), values.get("service", "")))
    return found.get("bearer") or found.get("basic")


def read_credentials(path: Path) -> Credentials:
    """Return the credentials in a configuration file of docker, none if there is no file. Raises `ConfigError`."""
    try:
        # `read_regular` refuses links, but the user's own configuration may be one.
        found = msgspec.json.decode(read_regular(path.resolve(), _MAX_CONFIG_BYTES), type=dict[str, JSON])
        listed, helpers = found.get("auths") or {}, found.get("credHelpers") or {}
        basic = {_host(key): header for key, entry in listed.items() if _is_host(key) and (header := _header(entry))}
        named = {_host(key): str(helper) for key, helper in helpers.items()}
        if found.get("credsStore"):
            named[""] = str(found["credsStore"])
        return Credentials(basic, named)
    except FileNotFoundError:
        return Credentials()
    except (*UNREADABLE, OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a configuration of docker with credentials: {type(error).__name__}") from None


def token_of(reply: bytes) -> str:
    """Return the token in the reply of a token server. Raises ValueError."""
    try:
        found = msgspec.json.decode(reply, type=dict[str, JSON])
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise ValueError(f"its reply is not JSON: {error}") from None
    token = found.get("token") or found.get("access_token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError("its reply has no token")
    remember_secret(token)
    return token


def _is_host(key: str) -> bool:
    """Return whether a key means a whole registry: podman also has keys for a part of one, `quay.io/owner`, without a
    scheme."""
    return "://" in key or "/" not in key


def _host(key: str) -> str:
    """Return the registry that a key of `auths` means: `https://index.docker.io/v1/` is docker.io."""
    host = re.sub(r"^https?://", "", key).partition("/")[0].lower()
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host


def _header(entry: dict[str, JSON]) -> str | None:
    """Return the header for an entry of `auths`: the field `auth`, or `username` and `password`."""
    if entry.get("auth"):
        # Docker, too, drops NULs at the end of what it decodes.
        pair = base64.b64decode(str(entry["auth"]), validate=False).rstrip(b"\0")
    elif entry.get("username"):
        pair = f"{entry['username']}:{entry.get('password') or ''}".encode()
    else:
        return None
    if b":" not in pair:
        raise binascii.Error("a field auth is not USER:PASSWORD in base64")
    remember_secret(pair.partition(b":")[2].decode("utf-8", "replace"))
    return f"Basic {base64.b64encode(pair).decode()}"
