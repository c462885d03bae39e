"""What the commit guard refuses, and what it lets pass."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def load_guard() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "guard.py"
    spec = importlib.util.spec_from_file_location("guard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Put together here, so that the guard does not find them in this file.
BAD = {
    "https://pypi." + "org/project/x": "registry address",
    "url = 'https://mirror.corp/" + "simple/'": "registry address",
    "pip install --index" + "-url somewhere x": "index option",
    "cd /home" + "/alice/project": "machine path",
    "api_key: sk-" + "a" * 24: "key",
}


@pytest.mark.parametrize(("line", "what"), BAD.items())
def test_what_belongs_to_one_machine_is_found(line: str, what: str) -> None:
    found = load_guard().offences(Path("a.txt"), f"fine\n{line}\n")
    assert len(found) == 1
    assert found[0].startswith(f"a.txt:2: {what}: ")


@pytest.mark.parametrize(
    "line",
    [
        "https://packaging.python.org/specifications/simple-repository-api/",
        "http://127.0.0.1:8000/simple/",
        "http://index.test/simple/",
        "a simple thing",
        "/workspace/file.py",
        "--hash=sha256:0123456789abcdef",
    ],
)
def test_what_belongs_to_nobody_passes(line: str) -> None:
    assert load_guard().offences(Path("a.txt"), line) == []
