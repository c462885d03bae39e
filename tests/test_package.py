"""The public names of the package, and what importing it costs."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import palaestra
import palaestra_slots
import palaestra_tokens
from palaestra_slots.core.io import plugins

ROOT = Path(__file__).parents[1]


PACKAGES = ("palaestra", *palaestra.packages_with_names())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves_in_its_package_and_in_palaestra(package: str) -> None:
    module = import_module(package)
    missing = object()
    found = [getattr(each, name, missing) for name in module.__all__ for each in (module, palaestra)]
    assert missing not in found
    assert found[::2] == found[1::2]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_are_sorted_and_listed(package: str) -> None:
    module = import_module(package)
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name))
    assert set(module.__all__) <= set(dir(module))


def test_the_runtime_lists_only_its_own_names() -> None:
    """A person can learn them; what only one extension needs is listed there."""
    assert len(palaestra.__all__) <= 60
    listed = [name for package in PACKAGES[3:] for name in import_module(package).__all__]
    assert {*palaestra.__all__} & {*listed} == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Taks'"):
        palaestra.Taks  # noqa: B018


def test_importing_the_package_loads_nothing_else() -> None:
    script = "import sys, palaestra; print([m for m in sys.modules if m.startswith(('palaestra.', 'palaestra_'))])"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_own_modules_are_not_looked_for_elsewhere() -> None:
    found = {path.stem for path in (ROOT / "packages/palaestra/src/palaestra").iterdir() if path.suffix in ("", ".py")}
    assert found - {"__init__", "__pycache__"} == palaestra._OWN


@pytest.mark.parametrize("folder", ["palaestra", "slots"])
def test_annotations_are_not_read_from_the_namespace_of_a_class(folder: str) -> None:
    """From Python 3.14 on, they are not there; `inspect.get_annotations` finds them in every version."""
    found = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "packages" / folder / "src").rglob("*.py")
        if "__annotations__" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value == "__annotations__"
    ]
    assert found == []


def test_all_packages_have_one_version() -> None:
    projects = [
        tomllib.loads(path.read_text())["project"]
        for path in (
            *ROOT.glob("packages/*/pyproject.toml"),
            *ROOT.glob("extensions/*/pyproject.toml"),
        )
    ]
    assert {project["version"] for project in projects} == {
        each.__version__ for each in (palaestra, palaestra_slots, palaestra_tokens)
    }
    assert {project["name"] for project in projects} == plugins._OWN
    for package in ("slots", "tokens"):
        assert f"palaestra-{package}=={palaestra.__version__}" in projects[0]["dependencies"]


def test_printed_commands_install_what_the_packages_need() -> None:
    """A package index may lack our packages, so a command names the folder of each one that is needed."""
    projects = {
        path.parent: tomllib.loads(path.read_text())["project"]
        for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("extensions/*/pyproject.toml"))
    }
    folder_of = {project["name"]: folder for folder, project in projects.items()}
    wrong = []
    for page in (ROOT / "README.md", *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md")):
        for line in re.findall(r"pip install (.*\./extensions/[^\n`#]*)", page.read_text("utf-8")):
            words = re.findall(r"\./((?:extensions|packages)/[\w*]+)", line)
            folders = {folder for word in words for folder in ROOT.glob(word)}
            needed = {re.split("[=[]", each)[0] for folder in folders for each in projects[folder]["dependencies"]}
            wrong += [(page.name, line, name) for name in needed & {*folder_of} if folder_of[name] not in folders]
    assert wrong == []
