"""Ports a script of the contract: rewrites its imports and lists those that cannot be rewritten. All other text stays,
to the byte. The file is read, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import palaestra
from palaestra.core.errors import ConfigError

ROOTS = frozenset(
    {"atroposlib", "atropos", "environments", "model_tools", "tools", "toolsets", "toolset_distributions"}
)
"""Top-level modules that contract scripts import from. A relative import counts too where it brings a known name."""

NOT_NEEDED: Mapping[str, str] = {
    "apply_patches": "there is nothing to patch: delete the call",
    "resize_tool_pool": "tools need no thread pool: delete the call",
    "OpenAIServer": "ask _use_managed_server() whether the servers give tokens",
}
"""Names without a counterpart, and what to do instead."""

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Left:
    """One import that could not be rewritten."""

    line: int
    what: str
    advice: str


@dataclass(slots=True)
class Ported:
    """The new text, the names imported from here, and the imports left to change by hand."""

    text: str
    names: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def port(source: str, path: str) -> Ported:
    """The script with its imports rewritten. Raises `ConfigError` for a file that is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    ported = Ported(source)
    lines = source.splitlines(keepends=True)
    for node in sorted(_imports(tree), key=lambda each: (each.lineno, each.col_offset), reverse=True):
        if isinstance(node, ast.Import):
            names = ", ".join(alias.name for alias in node.names)
            ported.left.append(Left(node.lineno, f"import {names}", "import the names that you use from palaestra"))
            continue
        known = [alias for alias in node.names if alias.name in palaestra.__all__]
        unknown = [alias for alias in node.names if alias not in known]
        module = "." * node.level + (node.module or "")
        for alias in unknown:
            advice = NOT_NEEDED.get(alias.name, "it has no counterpart of this name")
            ported.left.append(Left(node.lineno, f"from {module} import {alias.name}", advice))
        if known:
            ported.names += [alias.name for alias in known]
            _replace(lines, node, [("palaestra", known), *([(module, unknown)] if unknown else [])])
    ported.text = "".join(lines)
    ported.names = sorted(set(ported.names))
    ported.left.reverse()
    return ported


def _imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports from modules of the contract, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_root(alias.name) in ROOTS for alias in node.names):
            yield node
        if isinstance(node, ast.ImportFrom):
            known = any(alias.name in palaestra.__all__ for alias in node.names)
            if _root(node.module or "") in ROOTS if node.level == 0 else known:
                yield node


def _root(module: str) -> str:
    return module.partition(".")[0]


def _statement(module: str, names: Sequence[ast.alias], indent: str) -> str:
    written = [f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in names]
    short = f"{indent}from {module} import {', '.join(written)}"
    if len(short) <= _WIDTH:
        return short
    return f"{indent}from {module} import (\n" + "".join(f"{indent}    {each},\n" for each in written) + f"{indent})"


def _replace(lines: list[str], node: ast.ImportFrom, imports: Sequence[tuple[str, Sequence[ast.alias]]]) -> None:
    """Replace one import statement; the rest of its lines stays."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    alone = not before.strip()
    statements = [_statement(module, names, before if alone else "") for module, names in imports]
    text = "\n".join(statements) if alone else before + "; ".join(statements)
    lines[first : last + 1] = [text + after]
