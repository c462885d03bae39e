"""The demo and the shipped environments use the package as a user does: through its public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", [ROOT / "scripts/demo.py", *sorted((ROOT / "environments").glob("*.py"))], ids=str)
def test_only_public_names_are_imported(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in modules if name and name.startswith("palaestra.")} == set()
