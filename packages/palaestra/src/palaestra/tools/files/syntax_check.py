"""Checks whether a file that was just written parses. Nothing from a slot is ever executed.

Python files are compiled by this interpreter, whose grammar may differ from the slot's; an error names the version.
Size and depth are bounded because the text comes from a model and is parsed outside the slot.
"""

from __future__ import annotations

import json
import posixpath
import sys
import threading
import warnings
from collections.abc import Callable, Mapping

import yaml

from palaestra_slots.core.config import read_toml

MAX_CHECKED_CHARS = 128 << 10
"""Longer files are not checked, because parsing blocks the event loop (at worst about 3 ms per kilobyte)."""
_MAX_DEPTH = 100
"""The maximum nesting of a YAML file that is checked, because the cost of a token grows with the depth."""


def check_syntax(path: str, text: str) -> str | None:
    """Return "ok", the first error with its position, or the reason why the text was not checked. Returns None if files
    of this kind are never checked."""
    kind = posixpath.splitext(path)[1].lower()
    check = _CHECKS.get(kind)
    if check is None:
        return None
    if len(text) > MAX_CHECKED_CHARS:
        return f"not checked: longer than {MAX_CHECKED_CHARS} characters"
    try:
        check(text)
    except (MemoryError, RecursionError):
        return "not checked: nested too deeply"
    except SyntaxError as error:
        return f"Python {_PYTHON}: line {error.lineno}: {error.msg}"
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
        return f"YAML: line {line}: {error.problem}"
    except (ValueError, yaml.YAMLError) as error:  # errors in JSON and TOML include their position
        return f"{kind[1:].upper()}: {error}"
    return "ok"


def _python(text: str) -> None:
    # `compile` builds no syntax tree of Python objects. CPython counts their depth in one place for all threads, so
    # `ast.parse` fails with a SystemError if another thread parses too (python/cpython#106905). The filters of warnings
    # are shared by all threads as well.
    with _ONE_THREAD, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings would be about the model's file, not this program
        compile(text, "<file>", "exec", dont_inherit=True)


def _yaml(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_YAML_LOADER):  # events only: no objects are built, aliases are not expanded
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise RecursionError


_ONE_THREAD = threading.Lock()
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CHECKS: Mapping[str, Callable[[str], object]] = {
    ".py": _python,
    ".pyi": _python,
    ".json": json.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": read_toml,
}
