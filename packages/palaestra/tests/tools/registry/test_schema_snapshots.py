"""What models are shown and users name is what the snapshots say; `make snapshots` writes them anew."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from palaestra.tools.registry.build import builtin_tools


def load_script() -> ModuleType:
    path = Path(__file__).parents[5] / "scripts" / "tool_snapshots.py"
    spec = importlib.util.spec_from_file_location("tool_snapshots", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
RENEW = "run `make snapshots` and look at the difference"


def test_every_schema_is_that_of_its_snapshot() -> None:
    schemas = SCRIPT.schemas()
    for name in [tool.name for tool in builtin_tools()]:
        path = SCRIPT.SCHEMAS / f"{name}.json"
        assert path.exists(), f"{name} has no snapshot: {RENEW}"
        assert SCRIPT.text(schemas[name]) == path.read_text(encoding="utf-8"), f"{name}: {RENEW}"


def test_no_snapshot_is_of_a_tool_that_is_gone() -> None:
    pytest.importorskip("palaestra_toolsets")
    assert {path.stem for path in SCRIPT.SCHEMAS.glob("*.json")} == set(SCRIPT.schemas()), RENEW


def test_toolsets_distributions_and_aliases_are_those_of_the_snapshot() -> None:
    assert SCRIPT.text(SCRIPT.groups()) == SCRIPT.GROUPS.read_text(encoding="utf-8"), RENEW
