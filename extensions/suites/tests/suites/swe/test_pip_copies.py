"""The agent of a row about a package that pip brings along does not find pip's copy of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from palaestra.rollouts.spec import Phase
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.swe_row import parse_row
from palaestra_suites.swe.swe_smith_oracle import (
    ResolvedRow,
    SweEnvironment,
    SweSmithOracleEnvConfig,
)
from palaestra_suites.toolchain.interpreters import this_interpreter
from palaestra_suites.toolchain.toolchain import Toolchain
from suites.swe.test_swe_row import BENCH

pytestmark = pytest.mark.slots

PLACES = f"{sys.base_prefix}/lib /usr/lib/python3* /usr/local/lib/python3* /usr/share/python-wheels"
FINDS = f"find {PLACES} -path '*/idna/core.py' -o -name 'pip-*.whl' 2>/dev/null; echo end"


def spec_of(path: str, phase: Phase, tmp_path: Path) -> SlotSpec:
    patch = unified_diff.between(path, "a = 1\n", "a = 2\n")
    python = this_interpreter()
    row = ResolvedRow(parse_row({**BENCH, "patch": patch}), Toolchain((python.path,), python.mounts))
    config = SweSmithOracleEnvConfig(cache_dir=str(tmp_path))
    environment = SweEnvironment(config)
    return environment.slot_spec(Task(id="a", prompt="?", data=row), phase)


@pytest.mark.parametrize("phase", [Phase.AGENT, Phase.GRADE])
@pytest.mark.parametrize("path", ["idna/core.py", "src/idna/core.py"])
async def test_a_row_about_a_package_of_pip_has_no_pip(path: str, phase: Phase, tmp_path: Path) -> None:
    async with LocalBackend() as backend:
        slot = await backend.create(spec_of(path, phase, tmp_path), "test")
        assert (await slot.execute(FINDS)).output == "end\n"


@pytest.mark.parametrize(("path", "phase"), [("idna/core.py", Phase.PREPARE), ("pkg/__init__.py", Phase.AGENT)])
def test_other_rows_and_preparations_keep_pip(path: str, phase: Phase, tmp_path: Path) -> None:
    assert not [each for each in spec_of(path, phase, tmp_path).mounts if each.source.endswith("nothing")]
