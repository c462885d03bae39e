"""Globs over file names: `*` and `?` within a name, `**` across directories, `{a,b}` for alternatives.

Not a shell: nothing is expanded against a file system. One definition here makes every search engine agree.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import lru_cache

from palaestra.tools.schema import ToolMistake

_MAX_ALTERNATIVES = 64
_PLAIN = re.compile(r"[\w.*?-]+")
_BRACES = re.compile(r"\{([^{}]*)\}")


def name_filter(glob: str | None, root: str, is_dir: bool, *, loose: bool = False) -> Callable[[str], bool]:
    """Whether a path below `root` matches. Without a slash the glob is for the base name, else for the path from root.

    `loose`: a glob without wildcards matches every name that contains it. None matches everything.
    """
    if not glob:
        return lambda path: True
    glob = glob.removeprefix("./")
    if loose and not any(mark in glob for mark in "*?[{"):
        glob = f"**/*{glob}*" if "/" in glob else f"*{glob}*"
    pattern = _compiled(glob)
    if "/" not in glob:
        return lambda path: pattern.fullmatch(posixpath.basename(path)) is not None
    base = root if is_dir else posixpath.dirname(root)
    return lambda path: pattern.fullmatch(posixpath.relpath(path, base or ".")) is not None


def simple_names(glob: str | None) -> list[str]:
    """The alternatives of a glob, if all are so plain that every engine reads them alike; else none.

    Engines may use them to skip files early; the result is filtered by `name_filter` in any case.
    """
    alternatives = _expanded(glob) if glob else []
    return alternatives if all(_PLAIN.fullmatch(one) for one in alternatives) else []


def _expanded(glob: str) -> list[str]:
    braces = _BRACES.search(glob)
    if braces is None:
        return [glob]
    options = [glob[: braces.start()] + option + glob[braces.end() :] for option in braces[1].split(",")]
    if len(options) > _MAX_ALTERNATIVES:
        raise ToolMistake("the glob has too many alternatives")
    expanded = [one for option in options for one in _expanded(option)]
    if len(expanded) > _MAX_ALTERNATIVES:
        raise ToolMistake("the glob has too many alternatives")
    return expanded


@lru_cache(maxsize=256)
def _compiled(glob: str) -> re.Pattern[str]:
    try:
        return re.compile("|".join(f"(?:{_translated(one)})" for one in _expanded(glob)), re.DOTALL)
    except re.error as error:
        raise ToolMistake(f"The glob {glob} cannot be used: {error}") from None


def _translated(glob: str) -> str:
    return _PART.sub(_translated_part, glob)


def _translated_part(part: re.Match[str]) -> str:
    if part["members"] is not None:
        members = re.sub(r"([\\\[\]^&|~])", r"\\\1", part["members"])
        return f"[{'^/' if part['negated'] else ''}{members}]"
    return _WILDCARDS.get(part[0]) or re.escape(part[0])


_PART = re.compile(r"\*\*/|\*\*|\[(?P<negated>[!^])?(?P<members>\]?[^\]]+)\]|.", re.DOTALL)
_WILDCARDS = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
