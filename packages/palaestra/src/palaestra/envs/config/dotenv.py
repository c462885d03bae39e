"""Reads API keys from the `.env` file of the current folder, which may be somebody else's project.

Invariant: the file gives keys, and nothing else becomes a setting, a variable, a program or a path of this machine. An
address of a model server counts only together with its key: no other key is ever sent there. Every variable that is
ignored is named in a warning. `palaestra chat` and `palaestra acp`, which are at home in foreign folders, read no
`.env` at all.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from palaestra_slots.core.errors import ConfigError

DOTENV = ".env"

_MOST_BYTES, _MOST_NAMED = 1 << 20, 8

_KEY = re.compile(
    r"PALAESTRA_\w+_API_KEYS?"
    r"|(?!PALAESTRA_)(?:\w+_)?(?:API_?KEYS?|(?<!SSH_)(?<!CLIENT_)KEY|TOKEN|SECRET|(?:KEY|TOKEN)_ID)"
)
"""The names of keys. `TERMINAL_SSH_KEY` and `NOMAD_CLIENT_KEY` are paths of files with keys."""

_ADDRESSES = {f"{start}_BASE_URL": f"{start}_API_KEY" for start in ("OPENAI", "ATROPOS_SERVER", "PALAESTRA_OPENAI")}
"""The variables with addresses of the model server, and the variable with the key of each."""

_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*+
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>[^'"\s#](?:[^#]|(?<!\s)\#)*|))\s*(?:\#.*)?""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def read_keys(folder: Path) -> dict[str, str]:
    """Return the keys in the folder's `.env`, and the addresses of model servers that belong to them; nothing if there
    is no such file. Warns of all other variables. Raises `ConfigError` for a file or a line that cannot be read."""
    path = folder / DOTENV
    found = read_variables(path)
    keys = {name: value for name, value in found.items() if _KEY.fullmatch(name)}
    for address, key in _ADDRESSES.items():
        # A key of the process has precedence over that of the file, and must not be sent to the file's address.
        if found.get(address) and keys.get(key) and os.environ.get(key, keys[key]) == keys[key]:
            keys[address] = found[address]
    ignored = [name for name in found if name not in keys]
    if ignored:
        more = f" and {len(ignored) - _MOST_NAMED} more" if len(ignored) > _MOST_NAMED else ""
        text = (
            f"{path.resolve()}: ignored {', '.join(ignored[:_MOST_NAMED])}{more}. A .env file gives API keys, and the "
            "address of a model server only together with its key. Set the rest in the environment, with flags or in "
            "a --config file"
        )
        if text not in _warned:
            _warned.add(text)
            logger.warning("%s", text)
    return keys


def read_variables(path: Path) -> dict[str, str]:
    """Return all variables in a `.env` file; none if there is no such file. Raises `ConfigError` for a file or a line
    that cannot be read.

    A line is `NAME=value`, optionally after `export`. A value may be in single quotes (literal) or double quotes (with
    `\\n`, `\\"`, `\\\\`); outside quotes, ` #` begins a comment. Nothing is expanded.
    """
    try:
        # The file may be somebody else's, so it is looked at only after it is open: a link could change in between.
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is not a regular file")
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES >> 20} MiB; move what is not a variable elsewhere")
        text = data.decode()
    except (FileNotFoundError, IsADirectoryError):  # a virtual environment may have this name
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{path}, line {number} is not NAME=value; quote a value that contains quotes")
        found[match["name"]] = _unquoted(match)
    return found


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would never open


def _unquoted(match: re.Match[str]) -> str:
    if match["single"] is not None:
        return match["single"]
    if match["double"] is not None:
        return re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), match["double"])
    return (match["plain"] or "").strip()


_exports: Counter[str] = Counter()
"""Counts how many active blocks of `exported` hold each variable."""


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, set these variables in `os.environ`, where the code of scripts can read them. A variable
    that is already set keeps its value. If blocks overlap, variables stay until the last block ends."""
    # A value that another block has set counts as set by this one too, so that it stays until both have ended.
    added = {name: value for name, value in variables.items() if name not in os.environ or _exports[name]}
    for name, value in added.items():
        os.environ.setdefault(name, value)
        _exports[name] += 1
    try:
        yield
    finally:
        for name, value in added.items():
            _exports[name] -= 1
            # The block's code may have set another value, which is then its own.
            if not _exports[name] and os.environ.get(name) == value:
                del os.environ[name]


def shell_variables(dotenv: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process, without those whose value is the one in the `.env` file."""
    return {name: value for name, value in os.environ.items() if dotenv.get(name) != value}
