"""The README's environment runs as it is printed there, with the rewards that are promised there."""

import json
import re
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main

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


def test_every_folder_in_the_readmes_tree_is_there() -> None:
    tree = re.search(r"```\nsrc/palaestra/\n(.*?)```", README.read_text(), re.DOTALL)
    assert tree is not None
    root, package = README.parent, README.parent / "src" / "palaestra"
    outer = ""
    for line in tree.group(1).splitlines():
        names = re.match(r" *(\S+/(?:  \S+/)*)(?= |$)", line)
        if names is None:
            continue
        indent = len(line) - len(line.lstrip())
        for name in names[1].split():
            outer = name if indent == 2 else outer
            path = {0: root / name, 2: package / name}.get(indent, package / outer / name)
            assert path.is_dir(), line
