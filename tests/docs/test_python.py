"""The program of docs/python.md runs, in a plain process and in a notebook's loop, and names every public name."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest

import palaestra
from palaestra.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
SERVER = "http://localhost:8000/v1"


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_the_program_runs_as_cells_of_a_notebook(tmp_path: Path) -> None:
    """In a process of its own: the program registers parsers and sets the default session."""
    run = subprocess.run([sys.executable, __file__], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


async def kernel() -> None:
    """As a kernel does: each block on one running loop, with `await` at its top level."""
    names: dict[str, object] = {"__name__": "__main__"}
    async with LoopbackServer(FakeAnswer(completion("It will not."))) as server:
        for number, block in enumerate(BLOCKS):
            waiting = eval(compile_cell(block.replace(SERVER, server.url), number), names)
            if inspect.isawaitable(waiting):
                await waiting


def compile_cell(code: str, number: int) -> CodeType:
    cell: CodeType = compile(code, f"<block {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return cell


def test_every_public_name_has_an_example() -> None:
    used: set[str] = set()
    for block in BLOCKS:
        for node in ast.walk(compile(block, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "palaestra":
                used.add(node.attr)
    assert set(palaestra.__all__) - used == set()


if __name__ == "__main__":
    asyncio.run(kernel())
