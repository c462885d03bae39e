"""The README's environment runs as it is printed there, with the rewards that are promised there."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import palaestra
from envs.scripts import groups_file
from palaestra.cli.main import COMMANDS, main
from palaestra_audit.cheats.proof import BANK

README = Path(__file__).parents[2] / "README.md"


def written_example(folder: Path) -> Path:
    block = re.search(r"```python\n# my_env\.py\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    path = folder / "my_env.py"
    path.write_text(block.group(1))
    return path


@pytest.mark.slots
@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_the_example_gives_the_promised_rewards(
    policy: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["run", str(written_example(tmp_path)), "--policy", policy, "--env.n", "3"]
    assert main(argv) == 0
    lines = groups_file(tmp_path).read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[reward]] * 3


def test_the_command_is_on_the_path_before_it_is_used() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    shell = "\n".join(text for language, text in blocks if not language)
    first = re.search(r"^palaestra ", shell, re.MULTILINE)
    assert first is not None
    assert "source .venv/bin/activate" in shell[: first.start()]


def test_every_page_is_linked() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)\)", README.read_text()))
    pages = {f"docs/{path.name}" for path in (README.parent / "docs").glob("*.md")} - {"docs/index.md"}
    assert pages <= linked


def test_the_package_and_its_metadata_promise_the_same() -> None:
    project = tomllib.loads((README.parent / "packages/palaestra/pyproject.toml").read_text())["project"]
    topic = project["description"].partition(":")[0]
    assert topic.lower() in " ".join((palaestra.__doc__ or "").lower().split())
    names = ("chat", "batch", "view", "gateway", "report")
    promised = {word for word in names if re.search(rf"\b{word}\b", project["description"])}
    assert promised <= set(COMMANDS)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/environments/checking.md"])
def test_the_number_of_cheats_is_the_number_of_cheats(page: str) -> None:
    text = (README.parent / page).read_text()
    what = "(?:published )?(?:exploits|ways of reward hacking|cheats)"
    said = re.findall(rf"(?:about|more than) (a hundred|\w+) {what}", text)
    assert said
    assert set(said) == {"a hundred"}
    assert 85 <= len(BANK) <= 135


def test_the_first_page_of_the_site_shows_the_same_environment(tmp_path: Path) -> None:
    page = (README.parent / "docs" / "index.md").read_text()
    assert written_example(tmp_path).read_text() in page
