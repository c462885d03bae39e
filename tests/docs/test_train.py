"""docs/train.md: its command and its program run as they are printed, with the environment of the examples."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.slots,
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch"),
]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "train.md").read_text()


def test_the_example_of_the_page(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", practice=200)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(program.replace("/tmp/tiny", str(tmp_path / "tiny")))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = re.search(r"^palaestra (train examples/note_env.py .*)$", PAGE, re.MULTILINE)
    assert printed is not None
    words = shlex.split(printed[1].replace("/tmp/tiny", str(tmp_path / "tiny")).replace("--steps 20", "--steps 2"))
    for command in (["-m", "palaestra", *words], ["train.py"]):
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, check=True, timeout=400)
    runs = sorted((tmp_path / "runs").glob("*/*"))
    assert len(runs) == 2
    for run in runs:
        assert [line["step"] for line in read_steps(run) if line["kind"] == "step"] == [1, 2]
