"""The backend of docs/backends.md: installed as a package, it passes the conformance suite and serves a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
MODULE, PROJECT, SUITE = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

ENVIRONMENT = f"""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def there():
    yield Task(id="a", prompt="Write the priority", solution="nice > level.txt")

@there.score
async def nice(sandbox):
    return (await sandbox.read_text("level.txt", missing="")).strip() == "{min(os.nice(0) + 5, 19)}"
"""

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package of the page is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "nice_places.py").write_text(MODULE)
    (source / "pyproject.toml").write_text(PROJECT + '\n[tool.hatch.build.targets.wheel]\ninclude = ["*.py"]\n')
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    (site / "test_nice_places.py").write_text(SUITE)
    return site


def run(site: Path, *call: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-m", *call], cwd=site, env=env, capture_output=True, text=True, check=False)


def test_the_page_needs_forty_lines() -> None:
    assert len((MODULE + SUITE).strip().splitlines()) <= 40


def test_the_installed_backend_passes_the_suite(site: Path) -> None:
    found = run(site, "pytest", "-q", "-p", "no:cacheprovider", "test_nice_places.py")
    assert found.returncode == 0, found.stdout[-4000:]
    assert re.search(r"\b2\d passed", found.stdout), found.stdout[-400:]


def test_a_run_has_its_slots_there(site: Path) -> None:
    (site / "there_env.py").write_text(ENVIRONMENT)
    words = ["--backend", "nice", "--env.backend_options.level", "5", "--policy", "oracle", "--group", "2"]
    found = run(site, "palaestra", "run", "there_env.py", *words)
    assert found.returncode == 0, found.stderr[-4000:]
    (groups,) = (site / "runs").rglob("groups.jsonl")
    assert json.loads(groups.read_text())["scores"] == [1.0, 1.0]


def test_its_settings_reach_it_or_are_refused(site: Path) -> None:
    found = run(site, "palaestra", "doctor", "--backend", "nice", "--set", "backend_options.level=5", "--json")
    (backend,) = json.loads(found.stdout)["backends"]
    assert (backend["problem"], backend["images"]) == ("", [])
    wrong = run(site, "palaestra", "doctor", "--backend", "nice", "--set", "backend_options.lvel=5")
    assert wrong.returncode == 1
    assert "lvel" in wrong.stdout
    assert "backend_options" in wrong.stdout


def test_an_unknown_backend_is_refused_with_the_installed_names(site: Path) -> None:
    (site / "there_env.py").write_text(ENVIRONMENT)
    found = run(site, "palaestra", "run", "there_env.py", "--backend", "nise")
    assert found.returncode != 0
    assert "'nise'" in found.stderr
    assert "nice" in found.stderr
