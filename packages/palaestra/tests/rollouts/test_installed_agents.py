"""Real agents from npm and PyPI, in slots without a network: each fixes a bug, and every sampled token is proved."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from bug_fixing import Fixer, Repairer, fix_calc, repaired_by_tool

import palaestra
from palaestra import Trajectory
from palaestra.agent.known_programs import PROGRAMS
from palaestra.agent.programs import NpmProgram, PipProgram

pytestmark = [pytest.mark.slow, pytest.mark.slots, pytest.mark.network, pytest.mark.timeout(600)]


FIRST = ("opencode", "codex", "pi", "claude-code")
"""The agents that every CI installs; `make agents` tries all."""
AGENTS = [
    pytest.param(name, marks=() if name in FIRST else (pytest.mark.interop, pytest.mark.timeout(1500)))
    for name in PROGRAMS
]
SEVERAL_SEGMENTS = ("gptme", "code-puppy", "open-interpreter")  # they change what they have sent before
SUBMIT = json.dumps({"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}})


def installable(program: NpmProgram | PipProgram) -> str:
    """Why the program cannot be installed here; empty if it can, or is already."""
    if isinstance(program, PipProgram):
        with tempfile.TemporaryDirectory() as folder:
            target = f"{program.package}=={program.version}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, target]
            done = None if program.binary.exists() else subprocess.run(pip, capture_output=True, text=True, check=False)
        return "" if done is None or not done.returncode else f"the package index has no {target}: {done.stderr}"
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "Node.js and npm are not installed"
    if program.binary.exists():
        return ""
    ping = subprocess.run(["npm", "ping"], capture_output=True, text=True, timeout=60, check=False)
    return f"npm's registry cannot be reached: {ping.stderr}" if ping.returncode else ""


def played(name: str, env: object, kind: type[Fixer], folder: Path) -> tuple[Trajectory, palaestra.Run, Fixer, str]:
    """The rollout of an installed agent, its run and model, and its output."""
    program = PROGRAMS[name]
    assert isinstance(program, NpmProgram | PipProgram)
    if why := installable(program):
        pytest.skip(why)
    # The last reply of most agents is text; this one runs a command.
    engine = kind(last=f"Done.\n<tool_call>\n{SUBMIT}\n</tool_call>") if name == "mini-swe-agent" else kind()
    run = asyncio.run(palaestra.run(env, server=engine, agent=name, folder=folder, group_size=1, max_agent_turns=12))
    (trajectory,) = run.groups[0].trajectories
    return trajectory, run, engine, next((run.path / "agents").glob("*.log")).read_text()


@pytest.mark.parametrize(("env", "kind"), [(fix_calc, Fixer), (repaired_by_tool, Repairer)], ids=["shell", "tool"])
@pytest.mark.parametrize(
    "command",
    ["opencode acp", *(pytest.param(each, marks=pytest.mark.interop) for each in ("kimi-code acp", "copilot --acp"))],
)
async def test_an_installed_agent_speaks_the_agent_client_protocol(
    command: str, env: object, kind: type[Fixer], tmp_path: Path
) -> None:
    program = PROGRAMS[command.split()[0]]
    assert isinstance(program, NpmProgram)
    if why := installable(program):
        pytest.skip(why)
    engine = kind()
    run = await palaestra.run(
        env, server=engine, agent=f"acp:{command}", folder=tmp_path, group_size=1, max_agent_turns=12
    )
    (trajectory,) = run.trajectories
    log = next((run.path / "agents").glob("*.log")).read_text()
    assert (trajectory.reward, trajectory.error) == (1.0, ""), f"{trajectory.error}\n{log[-3000:]}"
    assert [call.tool for call in trajectory.inner_calls] == (["repair"] if kind is Repairer else [])
    assert "[end of turn] end_turn" in log


@pytest.mark.parametrize("name", AGENTS)
def test_an_installed_agent_calls_the_environments_tool(name: str, tmp_path: Path) -> None:
    trajectory, _, engine, log = played(name, repaired_by_tool, Repairer, tmp_path)
    assert trajectory.reward == 1.0, f"{trajectory.error}\n{log[-3000:]}\n{engine.prompts[-1][-3000:]}"
    (call,) = trajectory.inner_calls
    assert (call.tool, json.loads(call.arguments), call.turn) == ("repair", {"file": "calc.py"}, 1)
    results = [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
    assert any("calc.py is repaired." in each for each in results)


@pytest.mark.parametrize("name", AGENTS)
def test_an_installed_agent_fixes_a_bug(name: str, tmp_path: Path) -> None:
    trajectory, run, engine, log = played(name, fix_calc, Fixer, tmp_path)
    assert trajectory.reward == 1.0, f"{trajectory.error}\n{log[-3000:]}"
    assert trajectory.ledger is not None
    assert (len(trajectory.ledger.segments) == 1) == (name not in SEVERAL_SEGMENTS)
    trained = sum(mask != -100 for row in trajectory.rows for mask in row.masks)
    others = engine.sampled - trained  # opencode asks for a title, which is not trained, and gptme for a summary
    assert (others > 0) == (name in ("opencode", "gptme"))
    verified = subprocess.run(
        [sys.executable, "-m", "palaestra", "verify", str(run.path)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
