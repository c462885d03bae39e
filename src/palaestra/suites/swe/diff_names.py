"""File names in unified diffs: the header line, the `---` and `+++` lines, and git's C-style quoting of odd names."""

from __future__ import annotations

import re

_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "r": "\r"}


class DiffError(ValueError):
    """A text that is not a unified diff, or a diff that does not fit the file it is for."""


def header_paths(line: str) -> tuple[str, str]:
    """The two paths of a `diff --git` line. Unquoted names with spaces are read by the two halves being equal."""
    rest = line[len("diff --git ") :].rstrip("\r\n")
    if '"' in rest:
        match = re.fullmatch(r'("(?:[^"\\]|\\.)*"|.+?) ("(?:[^"\\]|\\.)*"|.+)', rest)
        if match:
            return _drop_side(unquote(match[1])), _drop_side(unquote(match[2]))
    half = len(rest) // 2
    if rest[half : half + 1] == " " and rest[2:half] == rest[half + 3 :]:
        return _drop_side(rest[:half]), _drop_side(rest[half + 1 :])
    old, separator, new = rest.rpartition(" b/")
    if not separator:
        raise DiffError(f"unreadable file header: {line[:80]!r}")
    return _drop_side(old), new


def path_field(field: str) -> str | None:
    """The path of a `---` or `+++` line; None for /dev/null. A tab and a time stamp may follow."""
    name = unquote(field.rstrip("\r\n").split("\t")[0])
    return None if name == "/dev/null" else _drop_side(name)


def _drop_side(name: str) -> str:
    return name[2:] if name[:2] in ("a/", "b/") else name


def unquote(name: str) -> str:
    """Undo git's C-style quoting of unusual names."""
    if not (len(name) > 1 and name[0] == name[-1] == '"'):
        return name
    raw = re.sub(r"\\([0-7]{3}|.)", lambda m: chr(int(m[1], 8)) if len(m[1]) == 3 else _ESCAPES.get(m[1], m[1]), name)
    try:
        return raw[1:-1].encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return raw[1:-1]


def quote(name: str) -> str:
    """Git's C-style quoting, used where a name holds a control character, a quote, a backslash or a non-ASCII byte."""
    data = name.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in data):
        return name
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in data) + '"'


def label(side: str, path: str | None) -> str:
    if path is None:
        return "/dev/null"
    quoted = quote(side + path)
    return quoted + "\t" if " " in quoted and not quoted.startswith('"') else quoted
