"""Limits that environments and tasks declare, and the user of a run overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import palaestra
from golden_messages import check_message
from palaestra import ConfigError, Task, ToolStep, environment
from palaestra.cli.main import main
from palaestra_slots.core.types import Blame, Outcome

STEPS = [ToolStep("todo", {})] * 9


def limited(task: dict[str, Any] = {}, **limits: Any) -> Any:  # noqa: B006  nobody changes it
    @environment(toolsets=["todo"], **limits)
    def limited() -> Iterator[Task]:
        yield Task(id="one", prompt="Go.", solution=STEPS, **task)

    @limited.score
    def fine() -> float:
        return 1.0

    return limited


@pytest.mark.parametrize(
    ("environments", "tasks", "users", "turns", "source"),
    [
        (None, None, None, 10, None),
        (4, None, None, 4, None),
        (None, 3, None, 3, "task"),
        (4, 3, None, 3, "task"),
        (3, 4, None, 4, "task"),
        (4, None, 2, 2, None),
        (4, 3, 2, 2, "settings"),
        (2, 3, 5, 5, "settings"),
    ],
)
def test_a_limit_is_the_users_or_the_tasks_or_the_environments(
    tmp_path: Path,
    environments: int | None,
    tasks: int | None,
    users: int | None,
    turns: int,
    source: str | None,
) -> None:
    made = limited({"max_turns": tasks}, max_turns=environments)
    given = {} if users is None else {"max_agent_turns": users}
    run = palaestra.run_sync(made, policy="oracle", folder=str(tmp_path), **given)
    (rollout,) = run.trajectories
    assert len(rollout.turns) == turns
    assert rollout.outcome is (Outcome.NATURAL if turns == 10 else Outcome.MAX_TURNS)
    assert run.groups[0].limits == ({} if source is None else {"max_turns": {"value": turns, "from": source}})
    recorded = json.loads((run.path / "config.json").read_text())["sources"]["env.max_agent_turns"]
    assert recorded == ("argument" if users else "@environment" if environments else "default")


def test_every_limit_reaches_the_agent(tmp_path: Path) -> None:
    declared = {"time_limit": 7.5, "tokens": 5000, "system_prompt": "Be brief.", "temperature": 0.25}
    for made in (limited(**declared), limited(declared, system_prompt="Be long.", tokens=1)):
        built = made.build(made.config_type()())
        (task,) = made.source()
        settings = built.agent_of(task)
        assert (settings.budget.wall_s, settings.budget.tokens) == (7.5, 5000)
        assert (settings.system_prompt, settings.temperature) == ("Be brief.", 0.25)
    run = palaestra.run_sync(limited(system_prompt="Be brief."), policy="noop", folder=str(tmp_path))
    assert run.trajectories[0].messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"worker_timeout": 60}, r"no argument 'worker_timeout'.* Did you mean time_limit\?"),
        ({"max_turn": 3}, r"its arguments are name, toolsets, label_names, .*max_turns, .* Did you mean max_turns\?"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"tokens": "many"}, "tokens='many'"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_an_argument_that_cannot_be_meant_names_the_others(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        limited(**limits)


def test_a_number_written_as_text_is_a_number(tmp_path: Path) -> None:
    (group,) = palaestra.run_sync(limited(max_turns="5"), policy="oracle", folder=str(tmp_path)).groups
    assert len(group.trajectories[0].turns) == 5
    (group,) = palaestra.run_sync(limited({"max_turns": "5"}), policy="oracle", folder=str(tmp_path)).groups
    assert (len(group.trajectories[0].turns), group.limits["max_turns"]) == (5, {"value": 5, "from": "task"})


def test_a_tasks_limit_without_a_usable_value_is_the_tasks_failure(tmp_path: Path) -> None:
    run = palaestra.run_sync(limited({"max_turns": 0}), policy="oracle", folder=str(tmp_path))
    assert run.groups[0].blame is Blame.TASK
    check_message(run.groups[0].error, "task", "max_turns", "Input")


def test_a_resumed_and_a_replayed_run_keep_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(
        "from palaestra import Task, ToolStep, environment\n\n"
        "@environment(toolsets=['todo'], max_turns=5)\n"
        "def two():\n"
        "    steps = [ToolStep('todo', {})] * 9\n"
        "    yield Task(id='a', prompt='?', solution=steps)\n"
        "    yield Task(id='b', prompt='?', solution=steps, max_turns=3)\n\n"
        "@two.score\ndef fine():\n    return 1\n"
    )
    assert main(["run", "my_env.py", "--policy", "oracle", "--concurrency", "1"]) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    assert [len(each.turns) for each in palaestra.open_run(journal.parent).trajectories] == [5, 3]
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]))
    assert main(["resume", str(journal.parent)]) == 0
    assert [len(each.turns) for each in palaestra.open_run(journal.parent).trajectories] == [5, 3]
    assert main(["replay", str(journal.parent)]) == 0
    assert main(["run", "my_env.py", "--policy", "oracle", "--env.max_agent_turns", "4", "--show-config"]) == 0
