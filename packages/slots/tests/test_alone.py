"""Slots alone: their public names, and what importing them loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra_slots

IMPORTED = """
import json, sys
import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

before = set(sys.modules)
from palaestra_slots import Sandbox

loaded = set(sys.modules) - before
own = [name for name in loaded if name.partition(".")[0] == "palaestra_slots"]
known = {name.partition(".")[0] for name in before} | {"palaestra_slots"} | sys.stdlib_module_names
others = [name for name in loaded if name.partition(".")[0] not in known and not name.startswith("_")]
print(json.dumps({"own": own, "others": others}))
"""


README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slots
def test_the_example_of_the_readme_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "0", "one", "two"]), done.stderr


def test_every_public_name_resolves() -> None:
    assert [name for name in palaestra_slots.__all__ if getattr(palaestra_slots, name, None) is None] == []
    assert set(palaestra_slots.__all__) <= set(dir(palaestra_slots))


def test_a_sandbox_needs_few_modules_and_no_package_but_msgspec_and_pydantic() -> None:
    printed = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True).stdout
    loaded = json.loads(printed)
    assert loaded["others"] == []
    assert len(loaded["own"]) <= 60


def test_nothing_here_imports_another_package_of_ours() -> None:
    files = [path for name in ("src", "tests") for path in (README.parent / name).rglob("*.py")]
    assert len(files) > 200
    assert [path for path in files if re.search(r"^ *(from|import) palaestra\b", path.read_text(), re.MULTILINE)] == []
