"""The program of docs/python.md runs in a Jupyter kernel, and the reference has every public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import palaestra
from notebooks import notebook
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SERVER = "http://localhost:8000/v1"


@pytest.mark.slots
@pytest.mark.timeout(300)
async def test_the_program_runs_in_a_notebook(tmp_path: Path) -> None:
    await run_notebook(tmp_path)


async def run_notebook(folder: Path) -> None:
    """Execute each block as a cell of a Jupyter kernel."""
    async with LoopbackServer(FakeAnswer(completion("It will not."))) as server, notebook(folder) as execute:
        for block in BLOCKS:
            await execute(block.replace(SERVER, server.url))


def test_the_reference_has_every_public_name() -> None:
    reference = PAGE.parent / "reference" / "python.md"
    packages = map(import_module, ("palaestra", *palaestra.packages_with_names()))
    names = {name for package in packages for name in package.__all__}
    assert names == set(re.findall(r"^### (\w+)", reference.read_text(), re.MULTILINE))
