"""Tools of other packages: found by entry point, known by toolset, and never able to break a run that has no need."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra import tool
from palaestra.tools.registry.build import GROUP, Installed, build_tool_registry, load
from palaestra_slots.core.errors import ConfigError

MODULE = '''
from palaestra import tool

@tool
def forecast(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"

@tool
def tides(port: str) -> str:
    """The tides of a port."""
    return f"low in {port}"

BOTH = [forecast, tides]
NOTHING = 3

def later():
    return BOTH
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with tools."""
    (tmp_path / "weather_package.py").write_text(MODULE)
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('no licence')")
    info = tmp_path / "weather_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nweather = weather_package:BOTH\nbroken = broken_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("weather_package", "broken_package"):
        sys.modules.pop(name, None)


def offer(value: str, name: str = "weather") -> Installed:
    return load(EntryPoint(name, value, GROUP))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("weather_package:BOTH", ["forecast", "tides"]),
        ("weather_package:later", ["forecast", "tides"]),
        ("weather_package:tides", ["tides"]),
    ],
)
def test_an_entry_point_offers_a_tool_a_list_or_a_function(value: str, names: list[str]) -> None:
    offered = offer(value)
    assert offered.problem is None
    assert [tool.name for tool in offered.tools] == names


@pytest.mark.usefixtures("package")
def test_its_name_is_the_toolset() -> None:
    others = [offer("weather_package:BOTH")]
    assert build_tool_registry(["weather"], installed=others).list_tools() == ["forecast", "tides"]
    assert build_tool_registry(["todo"], installed=others).list_tools() == ["todo"]
    assert "tides" in build_tool_registry(installed=others).list_tools()
    assert "tides" not in build_tool_registry(None, ["weather"], installed=others).list_tools()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("broken_package:TOOLS", "RuntimeError: no licence"),
        ("weather_package:nothing", "AttributeError"),
        ("weather_package:NOTHING", "TypeError: 3 is not a tool"),
        ("nowhere_at_all:TOOLS", "ModuleNotFoundError"),
    ],
)
def test_a_package_that_cannot_be_loaded_breaks_only_itself(value: str, why: str) -> None:
    others = [offer(value)]
    assert others[0].problem is not None
    assert why in others[0].problem
    assert "todo" in build_tool_registry(installed=others).list_tools()
    asked = build_tool_registry(["todo", "weather"], installed=others)
    assert asked.list_tools() == ["todo"]
    assert why in asked.missing["weather"]
    with raises(ConfigError):
        build_tool_registry(["todo", "weather"], installed=others, strict=True)


def test_a_tool_with_a_name_of_ours_takes_nothing_over() -> None:
    ours = build_tool_registry(["todo"]).get("todo")

    def todo() -> str:
        """Another list."""
        return "mine"

    impostor = tool(todo)
    registry = build_tool_registry(["todo", "mine"], installed=[Installed("mine", "mine 1.0", (impostor,))])
    assert registry.get("todo") is ours
    assert registry.missing == {"mine": "mine 1.0 provides the tool 'todo', which already exists"}
    web = build_tool_registry(["web"], installed=[Installed("web", "mine 1.0", (tool(name="surf")(todo),))])
    check_message(web.missing["web"], "mine", "1.0", "web")
    assert "surf" not in web.list_tools()


def test_installed_packages_are_found_by_the_command_line(package: Path) -> None:
    script = "from palaestra.tools.registry.build import installed_tools as i\n"
    script += "print([(e.toolset, len(e.tools)) for e in i()])"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=package, env={"PYTHONPATH": "."}
    )
    assert done.stdout.strip() == "[('broken', 0), ('weather', 2)]"
