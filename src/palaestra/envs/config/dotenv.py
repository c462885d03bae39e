"""Reads a `.env` file: variables of a working directory, as shells write them.

`NAME=value`, perhaps after `export`; a value may stand in single quotes (as it is) or double quotes (with `\\n`, `\\"`,
`\\\\`); outside of quotes a ` #` begins a comment. Nothing is expanded and nothing is run, and the process's own
environment is neither read nor changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from palaestra.core.errors import ConfigError

NAME = ".env"

_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>[^'"\s#](?:[^#]|(?<!\s)\#)*|))\s*(?:\#.*)?""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def read_dotenv(folder: Path) -> dict[str, str]:
    """The variables of the folder's `.env`; none where there is no such file. Raises `ConfigError` naming the line."""
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{path}, line {number} is not NAME=value, with the value in quotes where it holds any")
        found[match["name"]] = _value(match)
    return found


def _value(match: re.Match[str]) -> str:
    if match["single"] is not None:
        return match["single"]
    if match["double"] is not None:
        return re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), match["double"])
    return (match["plain"] or "").strip()
