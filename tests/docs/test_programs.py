"""Short programs of public names: each is ten lines at most, and runs as a script and in a Jupyter kernel.

The program that trains with TRL is that of `docs/trl.md` (`test_trl.py`).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import sys
from pathlib import Path

import pytest

import palaestra
from envs.scripts import COUNT_LINES
from notebooks import notebook

PROGRAMS = {
    "run": (
        """
import palaestra
from my_env import count_lines

run = await palaestra.run(count_lines(n=3), policy="oracle", group_size=4)
print([trajectory.reward for trajectory in run.trajectories])
""",
        f"{[1.0] * 12}\n",
    ),
    "sandbox": (
        """
import palaestra

async with palaestra.Sandbox(network="off", memory="512MB") as box:
    await box.write_text("a.txt", "hello")
    print((await box.execute("cat a.txt; id -u")).output)
""",
        "hello0\n\n",
    ),
    "tools": (
        """
from palaestra import ToolRegistry, tool

@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

registry = ToolRegistry([add])
print((await registry.call("add", {"a": 1, "b": 2})).output, "add" in registry, list(registry))
""",
        "{\"result\": 3} True ['add']\n",
    ),
    "grade": (
        """
import palaestra
from my_env import count_lines

run = await palaestra.run(count_lines(n=2), policy="oracle", save_workspaces=True)
kept = palaestra.open_run(run.path)
print((await palaestra.grade(count_lines, kept.trajectories[0])).reward)
""",
        "1.0\n",
    ),
}

pytestmark = pytest.mark.slots


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_ten_lines_of_public_names(name: str) -> None:
    program, _ = PROGRAMS[name]
    assert len(list(filter(None, program.splitlines()))) <= 10
    tree = compile(program, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module in ("palaestra", "my_env")
            used |= {alias.name for alias in node.names} - {"count_lines"}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "palaestra":
            used.add(node.attr)
    assert [name for name in used if not hasattr(palaestra, name)] == []


@pytest.mark.parametrize("name", PROGRAMS)
async def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, printed = PROGRAMS[name]
    (tmp_path / "my_env.py").write_text(COUNT_LINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    code = compile(program, str(tmp_path / name), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        awaited = eval(code, {})
        assert inspect.iscoroutine(awaited)
        await awaited
    assert out.getvalue() == printed


async def test_they_run_in_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(COUNT_LINES)
    async with notebook(tmp_path) as execute:
        result = [await execute(program) for program, _ in PROGRAMS.values()]
    assert result == [printed for _, printed in PROGRAMS.values()]
