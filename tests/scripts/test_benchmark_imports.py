"""Names that a benchmark imports from our packages exist, also of benchmarks that no test runs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("palaestra"):
            continue
        try:
            module = importlib.import_module(str(node.module))
        except ModuleNotFoundError as error:
            if str(error.name).startswith("palaestra"):
                raise
            continue  # an extra that is not installed
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
