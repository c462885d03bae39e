"""Names that a benchmark imports from our packages exist, also of benchmarks that no test runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
TESTS = [ROOT / "tests", *ROOT.glob("packages/*/tests"), *ROOT.glob("extensions/*/tests")]


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


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports_from_tests(path: Path) -> None:
    text = path.read_text()
    folders = [ROOT / name for name in re.findall(r'sys\.path\.insert\(0, .*parents\[1\] / "(.*)"\)', text)]
    for node in ast.walk(ast.parse(text)):
        parts = (getattr(node, "module", None) or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
        if parts[0] and any((tests / parts[0]).is_dir() for tests in TESTS):
            found = [folder / "/".join(parts) for folder in folders]
            assert any(each.is_dir() or each.with_suffix(".py").is_file() for each in found), ".".join(parts)
