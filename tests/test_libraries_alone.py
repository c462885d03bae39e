"""The libraries work without extensions: runs need none, and whoever asks for a part of one learns what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.tools.registry.build import NOT_INSTALLED, build_tool_registry, get_available_toolsets
from palaestra.tools.registry.toolsets import TOOLSETS
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.pool import SlotPoolConfig

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def greeting():
    yield Task(id="greet", prompt="Write hello to a.txt", solution="echo hello > a.txt")

@greeting.score
async def greeted(sandbox):
    return await sandbox.read_text("a.txt", missing="") == "hello\\n"
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the entry points of our packages behind packages of the same names that have none."""
    for name in plugins._OWN:
        metadata = tmp_path / "site" / f"{name.replace('-', '_')}-0.1.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


@pytest.mark.slots
def test_a_run_needs_no_extension() -> None:
    Path("greeting.py").write_text(ENVIRONMENT)
    assert main(["run", "greeting.py", "--policy", "oracle"]) == 0
    (folder,) = Path().glob("runs/*/*")
    files = {path.name for path in folder.iterdir()}
    assert files >= {"journal.jsonl", "groups.jsonl"}
    assert not [name for name in files if name.endswith(".html")]
    assert main(["status", "last"]) == 0
    assert main(["verify", "last"]) == 2  # the run has no tokens


@pytest.mark.parametrize("command", ["annotate", "chat", "gateway", "report", "train", "view"])
def test_a_command_of_an_extension_names_what_is_missing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert f"the package with the command {command} is not installed" in capsys.readouterr().err


def test_tools_of_extensions_are_missing_with_the_reason() -> None:
    registry = build_tool_registry(["file", "web", "memory"])
    assert set(registry.list_tools()) == set(TOOLSETS["file"].tools)
    assert registry.missing == dict.fromkeys(("web_search", "web_extract", "memory"), NOT_INSTALLED)
    with pytest.raises(ConfigError, match=NOT_INSTALLED):
        build_tool_registry(["web"], strict=True)
    toolsets = get_available_toolsets()
    assert (toolsets["web"]["available"], toolsets["file"]["available"]) == (False, True)
    assert "web_search" not in build_tool_registry().list_tools()


@pytest.mark.parametrize("name", ["kubernetes", "modal", "nomad"])
def test_backends_of_extensions_are_not_installed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the package with the backend {name} is not installed"):
        make_backend(name, HermesAgentEnvConfig())


def test_a_pool_for_nomad_needs_its_extension() -> None:
    with pytest.raises(ConfigError, match="the backend nomad is not installed"):
        SlotPoolConfig(nomad_address="http://127.0.0.1:4646").backend()


def test_a_run_that_feeds_a_trainer_needs_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    Path("greeting.py").write_text(ENVIRONMENT)
    assert main(["feed", "greeting.py", "--policy", "oracle"]) == 2
    assert "the package with the connection to a trainer is not installed" in capsys.readouterr().err
