"""Finds the entry points of installed packages, and reads their one-line summaries without importing them.

    [project.entry-points."palaestra.environments"]
    my_words = "my_package.words:MyWordsEnv"

A package that cannot be loaded does not affect the others.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OWN_PACKAGES = (
    "palaestra", "palaestra_audit", "palaestra_chat", "palaestra_cloud", "palaestra_contract", "palaestra_e2b",
    "palaestra_gateway", "palaestra_integrations", "palaestra_slots", "palaestra_suites", "palaestra_tokens",
    "palaestra_toolsets", "palaestra_train", "palaestra_view",
)  # fmt: skip
"""The packages of this project. Each of them can be missing, except `palaestra_slots`."""

_OWN = frozenset(name.replace("_", "-") for name in OWN_PACKAGES)
"""Their names as distributions."""


def is_own(module: str) -> bool:
    """Return whether a module belongs to a package of this project."""
    return module.partition(".")[0] in OWN_PACKAGES


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. If two packages offer the same name, Palaestra's own entry
    point wins, otherwise that of the package whose name sorts first."""
    from importlib.metadata import entry_points  # a slow import that most command lines do not need

    points = sorted(
        entry_points(group=group), key=lambda point: (point.name, _package(point) not in _OWN, _package(point))
    )
    found: dict[str, EntryPoint] = {}
    for point in points:
        found.setdefault(point.name, point)
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def origin(point: EntryPoint) -> str:
    return f"{_package(point) or 'an unnamed package'} ({point.value})"


def load(point: EntryPoint) -> object:
    """Import and return the object of an entry point. If the import fails, raises `ConfigError`, whatever the error
    was."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise _broken(point, f"{type(error).__name__}: {error}") from error


def load_named(group: str, name: str, what: str) -> object:
    """Return `load` of the entry point `name`. If no installed package has it, raises `ConfigError`; `what` describes
    it."""
    if name not in installed(group):
        raise ConfigError(
            f"the package with {what} is not installed. In a checkout, pip install ./extensions/* installs it"
        )
    return load(installed(group)[name])


def load_from_extra(point: EntryPoint, what: str) -> object:
    """Return `load(point)`. If a package is missing that an extra of Palaestra with the entry point's name installs,
    the error names the extra. `what` is the plural noun for objects of this kind."""
    from palaestra_slots.core.extras import install_command  # a slow import, too

    try:
        return load(point)
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and _package(point) in _OWN:
            needed = f"{what} of {point.name} need the extra {point.name!r}: {install_command(point.name)}"
            raise ConfigError(needed) from error.__cause__
        raise


def source_file(point: EntryPoint) -> Path:
    """Return the file of an entry point's module. The module is not imported, but its parent packages are. Raises
    `ConfigError` if they cannot be imported or there is no such Python module."""
    try:
        spec = importlib.util.find_spec(point.module)
    except (Exception, SystemExit) as error:
        raise _broken(point, f"{type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise _broken(point, f"there is no Python module {point.module}")
    return Path(spec.origin)


def entry_point_summary(point: EntryPoint) -> str:
    """Return the first line of the docstring of the entry point's object, or of its module, without importing the
    module. Raises `ConfigError`."""
    path = source_file(point)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise _broken(point, f"{path}: {error}") from error
    if point.attr and point.attr.partition(".")[0] not in _bound_names(tree):
        raise _broken(point, f"{point.module} has no {point.attr}")
    text = next(filter(None, map(ast.get_docstring, _definitions(tree, point.attr))), None) or ast.get_docstring(tree)
    return text.splitlines()[0] if text else ""


def _definitions(tree: ast.Module, name: str) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in tree.body if isinstance(node, kinds) and node.name == name]


def _bound_names(tree: ast.Module) -> set[str]:
    names = set()
    # An assignment or an import can make the object as well, also inside an `if` or `try`.
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _broken(point: EntryPoint, reason: str) -> ConfigError:
    return ConfigError(f"{point.name} of {origin(point)} cannot be loaded: {reason}")
