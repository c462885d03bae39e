"""Whether a tool of an environment runs commands is found by calling it, whatever its argument is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_audit.cheats.proof import check_environment

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Say, Slot, Task, ToolError, environment

@environment(toolsets=[])
def own():
    yield Task("a", "Write a reward.", solution=[Say("None.")])

@own.tool
async def TOOL:
    '''DOES'''
    BODY

@own.score
async def paid(sandbox, rollout):
    wrote = (await sandbox.read_text("/logs/verifier/reward.txt", missing="")).strip() == "1"
    return wrote or rollout.final_response == "None."
"""
RUNS = "return (await sandbox.execute({})).output"


def state_of(tmp_path: Path, tool: str, body: str, does: str = "Work.") -> tuple[str, str]:
    path = tmp_path / "own_env.py"
    path.write_text(ENV.replace("TOOL", tool).replace("BODY", body).replace("DOES", does))
    line = check_environment(str(path), [], tasks=1, only=["stale-reward"], quiet=True).lines[-1]
    return str(line.state), line.reason


@pytest.mark.parametrize(
    ("tool", "body", "does"),
    [
        ("get_booking(code: str) -> str", "raise ToolError(f'no booking {code}')", "Show a booking by its code."),
        ("show(number: str) -> str", "raise ToolError(f'no booking {number}')", "Show a booking by its number."),
        ("find(command: str) -> str", "return command", "Find the page of a command."),
        ("translate(script: str) -> str", "return script.upper()", "Translate a script."),
        ("say(bash: str = 'hi') -> str", "return f'You said {bash!r}'", "Speak in Python."),
        ("add(a: str, b: str) -> str", "return a + b", "Join."),
    ],
    ids=["refuses", "number", "echoes", "changes", "optional", "two"],
)
def test_a_tool_that_runs_nothing_leaves_exploits_untested(tmp_path: Path, tool: str, body: str, does: str) -> None:
    state, reason = state_of(tmp_path, tool, body, does)
    assert state == "not tested"
    assert "ran the commands" in reason


@pytest.mark.parametrize(
    ("tool", "body"),
    [
        ("go(line: str, sandbox: Slot) -> str", RUNS.format("line")),
        ("quiet(line: str, sandbox: Slot) -> str", "await sandbox.execute(line); return 'done'"),
        ("work(text: str, sandbox: Slot) -> str", RUNS.format('["python3", "-c", text]')),
        ("work(number: int = 1, text: str | None = None, *, sandbox: Slot) -> str", RUNS.format("text or 'true'")),
    ],
    ids=["shell", "without-output", "python", "optional"],
)
def test_a_tool_that_runs_commands_is_found_whatever_its_names_are(tmp_path: Path, tool: str, body: str) -> None:
    assert state_of(tmp_path, tool, body) == ("open", "")
