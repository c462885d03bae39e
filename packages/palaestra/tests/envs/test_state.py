"""The state that an environment's tools and scores share: what may be a state, and where it comes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import palaestra
from golden_messages import raises
from palaestra import Task, ToolError, ToolStep, environment, tool
from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutResumed, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra.tools.tool import RolloutState
from palaestra_slots.core.errors import ConfigError, TaskError


class Shop(msgspec.Struct):
    orders: dict[str, str]
    seen: set[int] = set()


@dataclasses.dataclass
class Till:
    orders: dict[str, str]
    amounts: tuple[int, ...] = (1, 2)


class Stock(pydantic.BaseModel):
    orders: dict[str, str]
    at: dict[int, float] = {1: 0.5}


@dataclasses.dataclass
class Both:
    stock: Stock
    till: Till


STATES = [
    {"orders": {"a": "pending"}},
    Shop({"a": "pending"}, {3}),
    Till({"a": "pending"}),
    Stock(orders={"a": "pending"}),
    Both(Stock(orders={}), Till({})),
]


@pytest.mark.parametrize("made", STATES, ids=lambda made: type(made).__name__)
def test_a_state_comes_back_from_the_journal_as_it_was(made: Any) -> None:
    state = RolloutState(made)
    first = state.record()
    assert first == json.loads(json.dumps(first))
    assert state.record() is None  # nothing has changed
    again = RolloutState(made)
    again.follow(first)
    assert again.value == made
    assert type(again.value) is type(made)
    assert again.copy() == made
    assert again.copy() is not made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (7, "is not a state"),
        (None, "is not a state"),
        (Till, "is not a state"),
        ([1], "is not a state"),
        ({"a": object()}, "cannot be written as JSON"),
        ({1: "a"}, "use text for keys"),
        ({"a": (1, 2)}, "use text for keys"),
        ({"a": {1, 2}}, "use text for keys"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_json_does_not_restore_is_no_state(made: object, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        RolloutState(made)


def test_a_value_that_a_tool_adds_is_checked_too() -> None:
    state = RolloutState({"seen": []})
    assert isinstance(state.value, dict)
    state.value["seen"] = {1}
    with pytest.raises(TaskError, match="lists for sequences"):
        state.record()


def test_repeated_turns_leave_the_recorded_state_and_not_their_own() -> None:
    state = RolloutState({"drawn": 4})
    state.follow({"drawn": 1})
    assert state.value == {"drawn": 1}
    assert isinstance(state.value, dict)
    state.value["drawn"] = 9  # a call that is repeated draws another number
    state.follow(None)
    assert state.value == {"drawn": 1}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where runs are written


def shop() -> Any:
    @environment(toolsets=[])
    def shop() -> Iterator[Task]:
        yield Task(id="one", prompt="Cancel both.", solution=[ToolStep("cancel", {"order": each}) for each in "ab"])

    return shop


def test_tools_and_scores_share_the_state_of_their_rollout() -> None:
    made = shop()

    @made.state
    def orders(task: Task, rng: Any) -> dict[str, Any]:
        return {"a": "pending", "b": "pending", "number": rng.random()}

    @made.tool
    def cancel(order: str, state: dict) -> str:  # type: ignore[type-arg]
        """Cancel an order."""
        if state.get(order) != "pending":
            raise ToolError("not pending")
        state[order] = "cancelled"
        return "cancelled"

    @made.score
    def both(task: Task, state: dict[str, Any]) -> float:
        right = state["a"] == state["b"] == "cancelled"
        state.clear()  # a score has a copy
        return float(right)

    run = palaestra.run_sync(made, policy="oracle", group_size=2)
    group = run.groups[0]
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]
    assert [each.state["a"] for each in group.trajectories] == ["cancelled"] * 2
    assert len({each.state["number"] for each in group.trajectories}) == 1  # the same for all rollouts of a task
    assert "state" not in json.dumps(group.tools)
    noop = palaestra.run_sync(made, policy="noop")
    assert noop.groups[0].trajectories[0].reward == 0.0


def test_a_state_that_is_not_declared_is_named() -> None:
    made = shop()

    @made.tool
    def cancel(order: str, state) -> str:  # type: ignore[no-untyped-def]
        """Cancel an order."""
        return order

    @made.score
    def fine() -> float:
        return 1.0

    with raises(ConfigError, "cancel", "shop", "shop.state"):
        made.build(made.config_type()())


def test_a_misspelt_state_names_it() -> None:
    made = shop()
    with raises(ConfigError, "sandbox", "rng", "state"):

        @made.score
        def both(task: Task, sate: object) -> float:
            return 1.0

    made.state(lambda: {"n": 1})
    with pytest.raises(ConfigError, match="two state hooks"):

        @made.state
        def two() -> object: ...

    with raises(ConfigError):

        @tool
        def loose(order: str, state) -> str:  # type: ignore[no-untyped-def]
            """Do something."""
            return order


@pytest.mark.parametrize("first", ["tool", "state"])
@pytest.mark.parametrize("kind", [Till, Stock])
def test_a_tool_names_the_state_by_its_type(first: str, kind: type) -> None:
    """An argument of the model may be called `state`, such as that of an address."""

    @environment(toolsets=[])
    def shop() -> Iterator[Task]:
        yield Task(id="one", prompt="?", solution=[ToolStep("move", {"state": "NY", "also": {"orders": {"b": "?"}}})])

    def declare_state() -> None:
        def opened():  # type: ignore[no-untyped-def]
            return kind(orders={})

        opened.__annotations__["return"] = kind
        shop.state(opened)

    def declare_tool() -> None:
        def move(state: str, also: dict, *, shop):  # type: ignore[no-untyped-def, type-arg]
            """Move."""
            shop.orders[state] = also["orders"]["b"]

        move.__annotations__["shop"] = kind
        assert shop.tool(move).schema.name == "move"

    for declare in (declare_tool, declare_state) if first == "tool" else (declare_state, declare_tool):
        declare()
    (made,) = shop.tools
    assert set(made.schema.parameters) == {"state", "also"}

    @shop.score
    def moved(state: Any) -> bool:
        return bool(state.orders == {"NY": "?"})

    assert palaestra.run_sync(shop, policy="oracle").mean_reward == 1.0


def test_a_text_argument_named_state_is_the_models() -> None:
    made = shop()

    @made.tool
    def where(state: str) -> str:
        """Look up a state.

        Args:
            state: Its name.
        """
        return state

    assert "state" in where.schema.parameters


DRAWING = '''
import random
from palaestra import Task, ToolStep, environment

@environment(toolsets=[])
def drawing():
    yield Task(id="one", prompt="Draw.", solution=[ToolStep("draw", {})] * 4)

@drawing.state
def drawn():
    return {"numbers": [random.random()]}

@drawing.tool
def draw(state) -> str:
    """Draw a number."""
    state["numbers"].append(random.random())
    return "drawn"

@drawing.score
def four(state):
    return len(state["numbers"]) / 5
'''


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_resumed_rollout_has_the_recorded_state(tmp_path: Path, turn: int) -> None:
    Path("my_env.py").write_text(DRAWING)
    run = ["run", "my_env.py", "--policy", "oracle"]
    assert main(run) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    events = list(read_journal(journal))
    place = next(n for n, event in enumerate(events, 1) if isinstance(event, TurnTaken) and event.turn == turn)
    recorded = next(event for event in reversed(events[:place]) if isinstance(event, TurnTaken)).state
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:place]))
    assert main([*run, "--resume", str(journal.parent)]) == 0
    assert [event.anew for event in read_journal(journal) if isinstance(event, RolloutResumed)] in ([""], [])
    (trajectory,) = palaestra.open_run(journal.parent).groups[0].trajectories
    assert trajectory.state["numbers"][: turn + 1] == recorded["numbers"]
    assert len(trajectory.state["numbers"]) == 5
    assert trajectory.reward == 1.0


def test_a_fork_has_the_state_of_its_turn(tmp_path: Path) -> None:
    Path("my_env.py").write_text(DRAWING)
    assert main(["run", "my_env.py", "--policy", "oracle"]) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    before = palaestra.open_run(journal.parent).groups[0].trajectories[0]
    assert main(["fork", str(journal.parent), before.rollout_id, "--turn", "2", "--policy", "oracle"]) == 0
    (other,) = [path for path in tmp_path.glob("runs/*/*/journal.jsonl") if path != journal]
    after = palaestra.open_run(other.parent).groups[0].trajectories[0]
    assert after.state["numbers"][:3] == before.state["numbers"][:3]
    assert after.state["numbers"][3:] != before.state["numbers"][3:]


@pytest.mark.slots
def test_a_kept_workspace_is_graded_again_with_its_state(tmp_path: Path) -> None:
    seen = "async def four(state, sandbox):\n    await sandbox.stat('.')"
    script = DRAWING.replace("toolsets=[]", 'toolsets=["terminal"]').replace("] * 4", ', "true"] * 4')
    script = script.replace("def four(state):", seen)
    Path("my_env.py").write_text(script)
    assert main(["run", "my_env.py", "--policy", "oracle", "--keep-workspaces"]) == 0
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    Path("my_env.py").write_text(script.replace("/ 5", "/ 10"))
    assert main(["grade", str(journal.parent)]) == 0
    (grade,) = (json.loads(line) for line in (journal.parent / "grades.jsonl").read_text().splitlines())
    assert (grade["before"], grade["reward"]) == (1.0, 0.5)
