"""Globs over file names: `*` and `?` within a name, `**` across directories, `{a,b}` for alternatives.

Globs are matched against names, never expanded on a file system, so all search backends agree. The time is bounded for
any glob and any name, because the model controls both. Libraries do not bound it: `wcmatch` takes minutes for
`**/a/**/a/…` on a deep path.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable
from functools import lru_cache, partial

from palaestra.tools.tool import ToolMistake
from palaestra_slots.sandbox.slot import WORKSPACE

_MAX_ALTERNATIVES = 64
_MAX_CHARS = 4096
_PLAIN = re.compile(r"[\w.*?-]+")
_BRACES = re.compile(r"\{([^{}]*)\}")
_CLASS = re.compile(r"\[([!^]?)(\]?[^\]]+)\]")
_STARS = re.compile(r"\*{3,}")
_STARS_IN_NAME = re.compile(r"(?<=[^/*])\*\*|\*\*(?=[^/*])")
_NOTHING = re.compile(r"(?!)")


def name_filter(glob: str | None, root: str, is_dir: bool, *, loose: bool = False) -> Callable[[str], bool]:
    """Return a test for paths below `root`. A glob without a slash matches base names. A glob with a slash matches
    paths relative to `root`, or to its directory if `root` is a file.

    An absolute glob matches absolute paths. A glob that is itself a name, such as `[id].tsx`, also matches this name.
    With `loose`, a glob without wildcards matches every name that contains it. If `glob` is None or empty, every path
    matches. Raises `ToolMistake` for a glob that cannot be used.
    """
    if not glob:
        return lambda path: True
    glob = literal = glob.removeprefix("./")
    # Models often give a part of a name where a glob is asked for.
    if loose and not any(mark in glob for mark in "*?[{"):
        folder, slash, name = glob.rpartition("/")
        part = f"*{name}*" if glob.startswith("/") else f"*{glob}*"
        glob = f"{folder}/{part}" if glob.startswith("/") else f"**/{part}" if slash else part
    alternatives = _compiled(glob)
    named: Callable[[str], str] = posixpath.basename
    if glob.startswith("/"):
        named = partial(posixpath.join, WORKSPACE)
    elif "/" in glob:
        named = partial(posixpath.relpath, start=(root if is_dir else posixpath.dirname(root)) or ".")

    def matches(path: str) -> bool:
        name = named(path)
        return name == literal or any(_matches(parts, name.split("/")) for parts in alternatives)

    return matches


def simple_names(glob: str | None) -> list[str]:
    """Return the alternatives of a glob if every search backend interprets all of them in the same way, otherwise an
    empty list.

    Backends may use these alternatives to skip files early. `name_filter` filters the result in any case.
    """
    alternatives = _expanded(glob) if glob else []
    return alternatives if all(_PLAIN.fullmatch(one) for one in alternatives) else []


@lru_cache(maxsize=256)
def _compiled(glob: str) -> list[list[re.Pattern[str] | None]]:
    """Return, for each alternative, one pattern per path component; None stands for any number of directories."""
    if len(glob) > _MAX_CHARS:
        raise ToolMistake(f"The glob has {len(glob)} characters; the maximum is {_MAX_CHARS}")
    try:
        return [_glob_patterns(one) for one in _spread([_STARS.sub("**", one) for one in _expanded(glob)])]
    except re.error as error:
        raise ToolMistake(f"The glob {glob} cannot be used: {error}") from None


def _expanded(glob: str) -> list[str]:
    """Return the alternatives of a glob, without braces."""
    if glob.count("{") > _MAX_ALTERNATIVES:
        raise ToolMistake("the glob has too many alternatives")
    braces = _BRACES.search(glob)
    if braces is None:
        return [glob]
    before, after = glob[: braces.start()], glob[braces.end() :]
    options = _bounded(braces[1].split(","))
    return _bounded([one for option in options for one in _expanded(before + option + after)])


def _spread(globs: list[str]) -> list[str]:
    """Replace `**` inside a name, as in `a**b`, with its two meanings: `a*b` and `a*/**/*b`."""
    spread: list[str] = []
    while globs:
        glob = globs.pop(0)
        stars = _STARS_IN_NAME.search(glob)
        if stars is None:
            spread.append(glob)
        else:
            before, after = glob[: stars.start()], glob[stars.end() :]
            globs[:0] = [f"{before}*{after}", f"{before}*/**/*{after}"]
        _bounded([*globs, *spread])
    return spread


def _bounded(globs: list[str]) -> list[str]:
    if len(globs) > _MAX_ALTERNATIVES:
        raise ToolMistake("the glob has too many alternatives")
    return globs


def _glob_patterns(glob: str) -> list[re.Pattern[str] | None]:
    names = glob.split("/")
    if names[-1] == "**":
        names.append("*")  # matches the content of a directory, not the directory
    return [None if name == "**" else re.compile(fnmatch.translate(_CLASS.sub(_fnmatch_class, name))) for name in names]


def _fnmatch_class(found: re.Match[str]) -> str:
    """Return a character class in the form of `fnmatch`. Raises `re.error` for an empty range, which `fnmatch`
    accepts."""
    negated, members = found.groups()
    if any(first > last for first, last in re.findall("(.)-(.)", members, re.DOTALL)):
        raise re.error(f"bad character range in {found[0]}")
    return f"[{'!' if negated else ''}{members}]"


def _matches(parts: list[re.Pattern[str] | None], names: list[str]) -> bool:
    """Return whether the names match the patterns in `parts`. Backtracks only to the last `**`."""
    at = here = 0
    again: tuple[int, int] | None = None
    while here < len(names):
        part = parts[at] if at < len(parts) else _NOTHING
        if part is None:
            again, at = (at, here), at + 1
        elif part.fullmatch(names[here]) is not None:
            at, here = at + 1, here + 1
        # Only the last `**` is tried again: it can take any directories that an earlier one could leave to it.
        elif again is not None:
            again = (again[0], again[1] + 1)
            at, here = again[0] + 1, again[1]
        else:
            return False
    return all(part is None for part in parts[at:])
