"""The scripted policies, alone and through the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra import AgentResult
from palaestra_contract import HermesAgentLoop
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON, Message, Outcome, Solution, Task, ToolStep
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import ScriptedEngine

TOOLS = {
    "terminal": {"command": {"type": "string"}},
    "write_file": {"path": {"type": "string"}, "content": {"type": "string"}},
}


def roll_out(
    model_name: str,
    task: Task,
    index: int = 0,
    *,
    max_turns: int = 30,
    tools: JSON = TOOLS,
    exit_code: int = 0,
    **config: JSON,
) -> tuple[AgentResult, list[tuple[str, JSON]]]:
    """One rollout of the policy through the real loop; the calls that ran are returned too."""
    ran: list[tuple[str, JSON]] = []

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        ran.append((name, arguments))
        return json.dumps({"output": f"ran {name}", "exit_code": exit_code, "error": None})

    async def go() -> AgentResult:
        engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name=model_name, **config))
        await engine.start()
        server = engine.session(SessionContext(rollout_id=f"{task.id}/{index}", task=task, index=index))
        schemas = [{"type": "function", "function": {"name": n, "parameters": _object(p)}} for n, p in tools.items()]
        loop = HermesAgentLoop(server, schemas, set(tools), tool_handler=handler, max_turns=max_turns)
        try:
            return await loop.run(task.messages())
        finally:
            await engine.aclose()

    return asyncio.run(go()), ran


def _object(properties: JSON) -> JSON:
    return {"type": "object", "properties": properties, "required": list(properties)}


def task(solution: Solution | None = None, prompt: str | Sequence[Message] = "fix it") -> Task:
    return Task(id="t", prompt=prompt, solution=solution)


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("make it\nwork", [("terminal", {"command": "make it\nwork"})]),
        (["a", "b"], [("terminal", {"command": "a"}), ("terminal", {"command": "b"})]),
        (
            [ToolStep("write_file", {"path": "x", "content": "é"}), "cat x"],
            [("write_file", {"path": "x", "content": "é"}), ("terminal", {"command": "cat x"})],
        ),
        ([], []),
    ],
)
def test_the_oracle_plays_the_solution_a_step_a_turn(solution: Solution, expected: list[tuple[str, JSON]]) -> None:
    result, ran = roll_out("oracle", task(solution))
    assert ran == expected
    assert result.outcome is Outcome.NATURAL
    assert result.turns_used == len(expected) + 1
    assert result.final_response
    assert result.tool_errors == []
    assert result.usage.completion_tokens > 0


def test_the_oracles_calls_are_validated_like_a_models() -> None:
    result, ran = roll_out("oracle", task([ToolStep("write_file", {"path": "x"}), ToolStep("rm", {})]))
    assert ran == []
    assert len(result.tool_errors) == 2


def test_examples_in_the_prompt_are_not_turns() -> None:
    prompt = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "example"},
        {"role": "user", "content": "go"},
    ]
    assert [command["command"] for _, command in roll_out("oracle", task(["a", "b"], prompt))[1]] == ["a", "b"]


def test_a_task_without_a_solution_is_named_with_the_way_out() -> None:
    with raises(TaskError):
        roll_out("oracle", task())


@pytest.mark.parametrize("solution", [{"cmd": "ls"}, [{"cmd": "ls"}], 7], ids=repr)
def test_a_solution_of_another_shape_is_the_tasks_fault(solution: JSON) -> None:
    with raises(TaskError):
        roll_out("oracle", task(solution))


def test_commands_for_an_agent_without_a_terminal_are_the_tasks_fault() -> None:
    files = {"write_file": TOOLS["write_file"]}
    with raises(TaskError, "terminal", "write_file"):
        roll_out("oracle", task("make"), tools=files)
    _, ran = roll_out("oracle", task([ToolStep("write_file", {"path": "x", "content": "y"})]), tools=files)
    assert [name for name, _ in ran] == ["write_file"]


async def test_the_oracle_without_a_task_says_so() -> None:
    engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="oracle"))
    with raises(TaskError):
        await engine.chat_completion(messages=[])


def test_noop_does_nothing() -> None:
    result, ran = roll_out("noop", task("rm -rf build"))
    assert (ran, result.turns_used, result.outcome) == ([], 1, Outcome.NATURAL)


def test_patch_writes_the_diff_and_applies_it(tmp_path: Path) -> None:
    diff = tmp_path / "fix.diff"
    diff.write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-ü\n+u\n", encoding="utf-8")
    result, ran = roll_out(f"patch:{diff}", task())
    assert ran[0] == ("write_file", {"path": "/tmp/palaestra.patch", "content": diff.read_text(encoding="utf-8")})
    assert ran[1][0] == "terminal"
    assert ran[1][1]["command"].startswith("git apply")
    assert "patch -p1" in ran[1][1]["command"]
    assert result.turns_used == 3


def test_a_patch_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    diff = tmp_path / "fix.diff"
    diff.write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-b\n+u\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"fix\.diff.*'t'.*ran terminal"):
        roll_out(f"patch:{diff}", task(), exit_code=1)


def line(result: AgentResult, task_id: str = "t", index: int = 0) -> dict[str, JSON]:
    turns = [
        {
            "number": turn.number,
            "finish_reason": turn.finish_reason,
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
        }
        for turn in result.turns
    ]
    return {"task_id": task_id, "index": index, "messages": result.messages, "turns": turns}


@pytest.mark.parametrize("form", ["trajectories", "journal", "apart"])
def test_a_replay_repeats_a_recorded_rollout_byte_for_byte(tmp_path: Path, form: str) -> None:
    prompt = [{"role": "assistant", "content": "example"}, {"role": "user", "content": "go\u2028on"}]
    recorded = task(["a", ToolStep("rm", {"n": 1}), "b\x85c"], prompt)
    first, _ = roll_out("oracle", recorded)
    file = tmp_path / "run.jsonl"
    lines: list[JSON] = [line(roll_out("noop", recorded)[0], index=1), line(first)]
    if form == "journal":
        lines = [{"event": "run", "run_id": "r"}, *({"event": "rollout", "trajectory": each} for each in lines)]
    file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines) + '{"torn": ')
    again, ran = (
        roll_out("replay", recorded, replay_file=str(file)) if form == "apart" else roll_out(f"replay:{file}", recorded)
    )
    assert json.dumps(line(again)) == json.dumps(line(first))
    assert [name for name, _ in ran] == ["terminal", "terminal"]


def test_a_replay_keeps_how_each_turn_ended(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "so I thi"}]
    turns = [{"finish_reason": "length", "prompt_tokens": 90, "completion_tokens": 10}]
    file.write_text(json.dumps({"task_id": "t", "index": 0, "messages": messages, "turns": turns}))
    result, _ = roll_out(f"replay:{file}", task())
    assert result.outcome is Outcome.LENGTH
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (90, 10)


def test_where_the_recording_ends_the_server_is_gone(tmp_path: Path) -> None:
    cut_short, _ = roll_out("oracle", task(["a", "b"]), max_turns=1)
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(line(cut_short)))
    result, _ = roll_out(f"replay:{file}", task())
    assert result.outcome is Outcome.API_ERROR
    assert "ends after 1 turns" in result.error


def test_a_task_that_was_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(line(roll_out("noop", task())[0])))
    with pytest.raises(TaskError, match="task 't' with index 1"):
        roll_out(f"replay:{file}", task(), index=1)


@pytest.mark.parametrize("text", ["", "{}\n", '{"task_id": "t"}\n', "nonsense\n{}\n", '{"task_id": 1}'])
def test_files_that_are_no_recording(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.jsonl"):
        roll_out(f"replay:{file}", task())


@pytest.mark.parametrize("name", ["", "gpt", "oracle:x", "patch", "patch:", "replay", "patch:/does/not/exist"])
def test_policies_that_do_not_exist(name: str) -> None:
    with pytest.raises(ConfigError):
        roll_out(name, task())
