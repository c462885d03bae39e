"""The program of docs/python.md runs in a Jupyter kernel, and names every public name."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import palaestra
from notebooks import notebook
from palaestra.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SERVER = "http://localhost:8000/v1"


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_the_program_runs_in_a_notebook(tmp_path: Path) -> None:
    asyncio.run(run_notebook(tmp_path))


async def run_notebook(folder: Path) -> None:
    """Execute each block as a cell of a Jupyter kernel."""
    async with LoopbackServer(FakeAnswer(completion("It will not."))) as server, notebook(folder) as execute:
        for block in BLOCKS:
            await execute(block.replace(SERVER, server.url))


def test_every_public_name_has_an_example() -> None:
    used: set[str] = set()
    for block in BLOCKS:
        for node in ast.walk(compile(block, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "palaestra":
                used.add(node.attr)
    assert set(palaestra.__all__) - used == set()
