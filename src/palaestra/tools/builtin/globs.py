"""Globs over file names: `*` and `?` within a name, `**` across directories, `{a,b}` for alternatives.

Not a shell: nothing is expanded against a file system. One definition here makes every search engine agree.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import lru_cache

from palaestra.tools.tool import ToolMistake

_MAX_ALTERNATIVES = 64
_MAX_CHARS = 4096
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
    whole = _compiled(glob)
    if "/" not in glob:
        return lambda path: any(_matches(parts, [posixpath.basename(path)]) for parts in whole)
    base = root if is_dir else posixpath.dirname(root)

    def matches(path: str) -> bool:
        names = posixpath.relpath(path, base or ".").split("/")
        return any(_matches(parts, names) for parts in whole)

    return matches


def simple_names(glob: str | None) -> list[str]:
    """The alternatives of a glob, if all are so plain that every engine reads them alike; else none.

    Engines may use them to skip files early; the result is filtered by `name_filter` in any case.
    """
    alternatives = _expanded(glob) if glob else []
    return alternatives if all(_PLAIN.fullmatch(one) for one in alternatives) else []


def _expanded(glob: str) -> list[str]:
    """Its alternatives, without braces."""
    if glob.count("{") > _MAX_ALTERNATIVES:
        raise ToolMistake("the glob has too many alternatives")
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
def _compiled(glob: str) -> list[list[re.Pattern[str] | None]]:
    """For each alternative what each name of a path must be; None stands for any number of directories."""
    if len(glob) > _MAX_CHARS:
        raise ToolMistake(f"The glob has {len(glob)} characters; {_MAX_CHARS} are the most")
    try:
        return [_parts(one) for one in _spread([_STARS.sub("**", one) for one in _expanded(glob)])]
    except re.error as error:
        raise ToolMistake(f"The glob {glob} cannot be used: {error}") from None


def _spread(globs: list[str]) -> list[str]:
    """`**` beside other letters is a `*`, or one where a directory ends, directories, and one where a name begins."""
    spread: list[str] = []
    while globs:
        glob = globs.pop(0)
        beside = _BESIDE.search(glob)
        if beside is None:
            spread.append(glob)
        else:
            before, after = glob[: beside.start()], glob[beside.end() :]
            globs[:0] = [f"{before}*{after}", f"{before}*/**/*{after}"]
        if len(globs) + len(spread) > _MAX_ALTERNATIVES:
            raise ToolMistake("the glob has too many alternatives")
    return spread


def _parts(glob: str) -> list[re.Pattern[str] | None]:
    names = glob.split("/")
    if names[-1] == "**":
        names.append("*")  # what is in a directory is not the directory
    return [None if name == "**" else re.compile(_translated(name), re.DOTALL) for name in names]


def _translated(name: str) -> str:
    """The expression for one name. What stands between two stars has its first place there, so none is tried twice."""
    pieces, last = [""], ""
    for part in _PART.finditer(name):
        if part[0] == "*":
            pieces.append("")
        else:
            pieces[-1] += _translated_part(part)
    first, *inner = pieces
    if inner:
        last = ".*" + inner.pop()
    return first + "".join(f"(?>.*?{piece})" for piece in inner) + last


def _translated_part(part: re.Match[str]) -> str:
    if part["members"] is not None:
        members = re.sub(r"([\\\[\]^&|~])", r"\\\1", part["members"])
        return f"[{'^' if part['negated'] else ''}{members}]"
    return "." if part[0] == "?" else re.escape(part[0])


def _matches(parts: list[re.Pattern[str] | None], names: list[str]) -> bool:
    """Whether the names are as the parts say. Only the last directories that were left out are ever tried again."""
    at = here = 0
    again: tuple[int, int] | None = None
    while here < len(names):
        part = parts[at] if at < len(parts) else _NOTHING
        if part is None:
            again, at = (at, here), at + 1
        elif part.fullmatch(names[here]) is not None:
            at, here = at + 1, here + 1
        elif again is not None:
            again = (again[0], again[1] + 1)
            at, here = again[0] + 1, again[1]
        else:
            return False
    return all(part is None for part in parts[at:])


_PART = re.compile(r"\[(?P<negated>[!^])?(?P<members>\]?[^\]]+)\]|.", re.DOTALL)
_STARS = re.compile(r"\*{3,}")
_BESIDE = re.compile(r"(?<=[^/*])\*\*|\*\*(?=[^/*])")
_NOTHING = re.compile(r"(?!)")
