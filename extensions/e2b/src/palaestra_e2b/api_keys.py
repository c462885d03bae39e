"""The API keys of the server, and what each may hold.

A file of keys has one key on a line, `NAME KEY [sandboxes=N] [kept=N]`; `#` begins a comment. Keys are compared in
constant time, and are never printed or logged.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import ConfigError

DEFAULT_SANDBOXES, DEFAULT_KEPT = 256, 256
_LIMITS = ("sandboxes", "kept")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `sandboxes` limits the sandboxes that hold a slot, and `kept` those that were paused to disk, the
    snapshots and the templates."""

    name: str
    secret: str
    sandboxes: int = DEFAULT_SANDBOXES
    kept: int = DEFAULT_KEPT

    def __repr__(self) -> str:
        return f"<ApiKey {self.name}>"


class ApiKeys:
    """The keys of one server. Raises `ConfigError` for two keys with one name or one secret."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)
        for what in ("name", "secret"):
            values = [getattr(key, what) for key in self._keys]
            if len(set(values)) < len(values):
                raise ConfigError(f"two API keys have the same {what}; give each its own")

    def find(self, given: str) -> ApiKey | None:
        """Return the key with this secret."""
        sent, found = given.encode("utf-8", "surrogateescape"), None
        for key in self._keys:
            if hmac.compare_digest(sent, key.secret.encode()):
                found = key
        return found

    @property
    def first(self) -> ApiKey:
        """The key that `--env` prints."""
        return self._keys[0]


def read_keys(file: Path) -> ApiKeys:
    """Read a file of keys. Raises `ConfigError` if it cannot be read or holds no key."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys from {file}: {error}") from None
    keys = [_parsed_key(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if _line_words(line)]
    if not keys:
        raise ConfigError(f"{file} contains no API key; write a line `NAME KEY` to it")
    return ApiKeys(keys)


def own_key(file: Path) -> ApiKeys:
    """Return the one key of a server that was given none: the key in `file`, which is made if it does not exist and is
    readable by this user only."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_text(f"local e2b_{secrets.token_hex(20)}\n", encoding="utf-8")
    return read_keys(file)


def _line_words(line: str) -> list[str]:
    return line.partition("#")[0].split()


def _parsed_key(line: str, where: str) -> ApiKey:
    name, *rest = _line_words(line)
    if not rest or "=" in rest[0]:
        raise ConfigError(f"{where}: a key needs a name and a secret: NAME KEY")
    secret, *settings = rest
    limits: dict[str, int] = {}
    for setting in settings:
        what, _, value = setting.partition("=")
        if what not in _LIMITS or not (value.isascii() and value.isdigit()):
            raise ConfigError(f"{where}: {setting!r} is not a limit; use sandboxes=N or kept=N")
        limits[what] = int(value)
    if not secret.isascii() or len(secret) < 8:
        raise ConfigError(f"{where}: the key of {name} must have at least 8 characters of ASCII")
    return ApiKey(name, secret, **limits)
