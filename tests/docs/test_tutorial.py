"""The tutorial's programs and commands run in its order, as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PAGES = Path(__file__).parents[2] / "docs/tutorial"


def play(page: str, folder: Path, first_with: str = "") -> list[int]:
    """Writes the page's programs to `folder`, in their order, and runs its `bash` blocks; the exit code of each line.

    A program that is no environment is run when its block comes. The first line gets the flags `first_with`.
    """
    codes = []
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    for kind, text in re.findall(r"^```(python|bash)\n(.*?)^```", (_PAGES / page).read_text(), re.M | re.S):
        if kind == "python":
            name = text.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(text)
            lines = [] if name.endswith("_env.py") else [f"python {name}"]
        else:
            lines = text.splitlines()
        for line in lines:
            line += f" {first_with}" if not codes else ""
            ran = subprocess.run(
                line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            codes.append(ran.returncode)
            if ran.returncode:
                print(line, ran.stdout[-2000:], ran.stderr[-2000:])
    return codes


@pytest.mark.slots
def test_the_first_environment_and_debugging_a_run(tmp_path: Path) -> None:
    first = play("1-first-environment.md", tmp_path)
    assert len(first) == 2
    assert set(first) == {0}
    later = play("4-debug-a-run.md", tmp_path)
    assert len(later) == 7
    assert set(later) == {0}


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(900)
def test_the_check_fails_before_the_fix_and_passes_after_it(tmp_path: Path) -> None:
    assert set(play("1-first-environment.md", tmp_path)) == {0}
    # the second check plays the whole bank; the first fails by the policies that its table names
    found = "--only empty-tests --only exit-at-import"
    assert play("3-trust-your-reward.md", tmp_path, first_with=found) == [1, 0]
