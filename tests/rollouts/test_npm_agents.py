"""Real agents from npm, in slots without a network, each solve a bug-fixing task; every sampled token is proved."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bug_fixing import Fixer, fix_calc

import palaestra
from palaestra.agent.programs import PROGRAMS, NpmProgram

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.network, pytest.mark.timeout(600)]


def installable(program: NpmProgram) -> str:
    """Why the program cannot be installed here; empty if it can, or is already."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "Node.js and npm are not installed"
    if program.binary.exists():
        return ""
    ping = subprocess.run(["npm", "ping"], capture_output=True, text=True, timeout=60, check=False)
    return f"npm's registry cannot be reached: {ping.stderr}" if ping.returncode else ""


@pytest.mark.parametrize("name", ["opencode", "codex", "pi", "claude-code"])
def test_an_agent_from_npm_fixes_a_bug(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    assert isinstance(program, NpmProgram)
    if why := installable(program):
        pytest.skip(why)
    engine = Fixer()
    run = asyncio.run(
        palaestra.run(fix_calc, server=engine, agent=name, folder=tmp_path, group_size=1, max_agent_turns=12)
    )
    (trajectory,) = run.groups[0].trajectories
    log = next((run.path / "agents").glob("*.log")).read_text()
    assert trajectory.reward == 1.0, f"{trajectory.error}\n{log[-3000:]}"
    assert trajectory.ledger is not None
    assert len(trajectory.ledger.segments) == 1
    trained = sum(mask != -100 for row in trajectory.rows for mask in row.masks)
    titles = engine.sampled - trained
    assert (titles > 0) == (name == "opencode")  # it asks for a title, which is not trained
    verified = subprocess.run(
        [sys.executable, "-m", "palaestra", "verify", str(run.path)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
