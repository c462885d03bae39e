"""The public names of the package, and what importing it costs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import palaestra
import palaestra_slots

ROOT = Path(__file__).parents[1]


def test_every_public_name_resolves() -> None:
    assert [name for name in palaestra.__all__ if getattr(palaestra, name, None) is None] == []


def test_the_names_are_sorted_and_listed() -> None:
    assert palaestra.__all__ == sorted(palaestra.__all__, key=lambda name: (not name.isupper(), name))
    assert set(palaestra.__all__) <= set(dir(palaestra))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Taks'"):
        palaestra.Taks  # noqa: B018


def test_importing_the_package_loads_nothing_else() -> None:
    script = "import sys, palaestra; print([m for m in sys.modules if m.startswith(('palaestra.', 'palaestra_slots'))])"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_all_packages_have_one_version() -> None:
    projects = [
        tomllib.loads(path.read_text())["project"]
        for path in (ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"))
    ]
    assert {project["version"] for project in projects} == {palaestra.__version__} == {palaestra_slots.__version__}
    assert f"palaestra-slots=={palaestra.__version__}" in projects[0]["dependencies"]
