"""What an author's hook may do that no hook should: the rollout says so, and the run and its record go on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from toy import ADD, Sums, changed, services, sum_task

from golden_messages import check_message, raises
from palaestra.agent.result import AgentResult
from palaestra.rollouts.environment import GroupCollection
from palaestra.rollouts.events import TurnTaken
from palaestra.rollouts.export.atropos import encode_line, group_line
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra.rollouts.journal.journal import plain
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, TokenRow
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import Phase, Projection
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool
from palaestra_slots.core.errors import ConfigError, SlotLost
from palaestra_slots.core.types import JSON, Blame, Outcome, Score, Task
from palaestra_slots.core.user_code import leaves
from palaestra_slots.sandbox.slot import SlotSpec


def run(env: Sums, folder: Path, **limits: float) -> list[Group]:
    """Run to the end; the groups come back from the journal."""

    async def main() -> None:
        shared = changed(services(folder), idle_limits=limits or IDLE_LIMITS)
        try:
            await Runner(env, shared).run()
        finally:
            shared.events.journal.close()

    asyncio.run(main())
    return list(Recording(folder / "journal.jsonl"))


async def awaits_what_is_cancelled(rollout: Rollout) -> float:
    work = asyncio.create_task(asyncio.sleep(60))
    work.cancel()
    await work
    return 1.0


async def exits(rollout: Rollout) -> float:
    sys.exit(0)


async def says_half_a_letter(rollout: Rollout) -> float:
    raise ValueError("bad \ud800 text")


async def pays_too_much(rollout: Rollout) -> float:
    return -1e300


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (awaits_what_is_cancelled, "an awaited operation was cancelled"),
        (exits, "SystemExit: 0"),
        (says_half_a_letter, "ValueError: bad ? text"),
        (pays_too_much, "returned -1e+300, which is not a reward"),
    ],
)
def test_a_score_that_misbehaves_is_the_graders_failure(tmp_path: Path, hook: JSON, said: str) -> None:
    groups = run(Sums(2, score=hook), tmp_path)
    ended = [each for group in groups for each in group.trajectories]
    assert len(ended) == 4
    assert {(each.reward, each.outcome, each.blame) for each in ended} == {(None, Outcome.INFRA_ERROR, Blame.GRADER)}
    assert all(said in each.error for each in ended)


@pytest.mark.parametrize("hook", [awaits_what_is_cancelled, exits])
def test_a_preparation_that_misbehaves_ends_its_group_alone(tmp_path: Path, hook: JSON) -> None:
    class Prepared(Sums):
        async def resolve(self, task: Task) -> Task:
            if task.id == "sum-0":
                await hook(None)
            return task

    first, second, third = run(Prepared(3), tmp_path)
    assert (first.blame, first.trajectories) == (Blame.TASK, [])
    assert [len(group.scored) for group in (second, third)] == [2, 2]


class Telling(Sums):
    """Its score is 1, with these metrics and this detail."""

    def __init__(self, metrics: Mapping[str, float], detail: Mapping[str, JSON]) -> None:
        super().__init__(1)
        self.told = Score(1.0, metrics, detail)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return self.told


def test_a_metric_that_is_no_number_is_left_out_and_the_score_counts(tmp_path: Path) -> None:
    (group,) = run(Telling({"ratio": float("nan"), "rate": float("inf"), "tests": 3.0}, {}), tmp_path)
    assert [(each.reward, each.metrics) for each in group.trajectories] == [(1.0, {"tests": 3.0})] * 2
    assert group.trajectories[0].detail == {"metrics_left_out": {"ratio": "nan", "rate": "inf"}}


def deep(levels: int) -> JSON:
    value: JSON = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("detail", "kept"),
    [
        ({"x": object()}, {"x": "<object>"}),
        ({"x": ["\ud800", 1, None, True]}, {"x": ["?", 1, None, True]}),
        ({"\udcff": {(1, 2): b"\0"}}, {"?": {"(1, 2)": "AA=="}}),
        ({"x": {object}}, {"x": ["<type>"]}),
    ],
)
def test_what_json_cannot_hold_is_recorded_as_something_plain(
    tmp_path: Path, detail: Mapping[str, JSON], kept: JSON
) -> None:
    (group,) = run(Telling({"\ud800": 1.0}, detail), tmp_path)
    assert [(each.reward, each.detail, each.metrics) for each in group.trajectories] == [(1.0, kept, {"?": 1.0})] * 2
    line = group_line(group, env="sums", model="m")
    assert line is not None
    assert json.loads(encode_line(line))["scores"] == [1.0, 1.0]


def test_what_is_nested_without_end_ends(tmp_path: Path) -> None:
    (group,) = run(Telling({}, {"x": deep(5000)}), tmp_path)
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]
    event = TurnTaken(rollout_id="r", turn=0, messages=[{"role": "user", "content": deep(5000)}])
    assert "…" in str(plain(event).messages)


def test_who_does_not_end_when_told_is_ended_all_the_same(tmp_path: Path) -> None:
    async def stubborn(rollout: Rollout) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 1.0
        raise AssertionError("unreachable")

    (group,) = run(Sums(1, score=stubborn), tmp_path, grade=0.05)
    assert [(each.reward, each.blame) for each in group.trajectories] == [(None, Blame.GRADER)] * 2
    check_message(group.trajectories[0].error, "0.05", "grade")


async def test_a_rollout_that_is_itself_cancelled_is_not_the_graders(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def waits(rollout: Rollout) -> float:
        entered.set()
        await asyncio.sleep(60)
        return 1.0

    shared = services(tmp_path)
    running = asyncio.create_task(Runner(Sums(1, score=waits), shared).run())
    await entered.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    shared.events.journal.close()
    assert b'"blame":"run"' in (tmp_path / "journal.jsonl").read_bytes()


class Single:
    """A number as arrays and tensors hold it."""

    def __init__(self, value: JSON) -> None:
        self.value = value

    def item(self) -> JSON:
        return self.value


class Number(float):
    """A number of another package."""


@pytest.mark.parametrize(
    ("reward", "metrics", "kept"),
    [
        (True, {"passed": True}, {"passed": 1.0}),
        (Decimal(1), {"share": Fraction(1, 4)}, {"share": 0.25}),
        (Single(1.0), {"mean": Number(0.5), "all": Single(True)}, {"mean": 0.5, "all": 1.0}),
        (1, {7: 2}, {"7": 2.0}),
    ],
)
def test_numbers_of_every_kind_are_numbers_in_the_record(
    tmp_path: Path, reward: JSON, metrics: JSON, kept: Mapping[str, float]
) -> None:
    env = Telling(metrics, {"mean": Number(0.5)})
    env.told = replace(env.told, reward=reward)
    (group,) = run(env, tmp_path)
    assert [(each.reward, each.metrics) for each in group.trajectories] == [(1.0, kept)] * 2
    assert group.trajectories[0].detail == {"mean": 0.5}


def test_metrics_that_are_no_numbers_at_all_are_named(tmp_path: Path) -> None:
    (group,) = run(Telling({"log": "ok", "ratio": None, "tests": 3}, {}), tmp_path)  # type: ignore[dict-item]
    assert [(each.reward, each.metrics) for each in group.trajectories] == [(1.0, {"tests": 3.0})] * 2
    assert group.trajectories[0].detail == {"metrics_left_out": {"log": "ok", "ratio": "None"}}


@pytest.mark.parametrize("given", [None, 1.0, Score(None), Score("1"), Score(1.0, ["a"]), Score(1.0, {}, ["a"])])  # type: ignore[arg-type]
def test_what_is_no_score_is_the_graders_failure(tmp_path: Path, given: JSON) -> None:
    env = Telling({}, {})
    env.told = given
    (group,) = run(env, tmp_path)
    assert {(each.reward, each.blame) for each in group.trajectories} == {(None, Blame.GRADER)}
    assert all("not a" in each.error for each in group.trajectories)


class Making(Sums):
    """Makes rows of its own; those of its first task are `made`."""

    def __init__(self, made: JSON) -> None:
        super().__init__(2)
        self.made = made

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        if rollout.task.id == "sum-1":
            return Projection()
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Projection(TokenRow(tokens=[1, 2], masks=[1])), "tokens, masks and logprobs differ in length"),
        (Projection(TokenRow(tokens=["a"], masks=[1])), "Expected `int`, got `str` - at `$.trajectory.row.tokens[0]`"),
        (Projection(TokenRow(tokens=[1], masks=[1], logprobs=[float("nan")])), "Expected `float`, got `null`"),
        (Projection(None, {"group_overrides": [1]}), "group_overrides is list, not a mapping"),
        (KeyError("tokens"), "making the row of 000000-sum-0/0 failed with KeyError: 'tokens'"),
    ],
)
def test_a_row_that_cannot_be_recorded_costs_its_rollout_alone(tmp_path: Path, made: JSON, said: str) -> None:
    broken, fine = run(Making(made), tmp_path)
    assert [each.reward for each in fine.trajectories] == [1.0, 1.0]
    assert {(each.reward, each.blame) for each in broken.trajectories} == {(None, Blame.TASK)}
    assert said in broken.trajectories[0].error
    assert [message["role"] for message in broken.trajectories[0].messages][-1] == "assistant"


@pytest.mark.parametrize(
    ("messages", "said"), [(["hello"], "Expected `object`, got `str`"), ([{"content": "x"}], "a message has no role")]
)
def test_a_conversation_that_cannot_be_recorded_costs_its_rollout_alone(
    tmp_path: Path, messages: JSON, said: str
) -> None:
    class Talking(Sums):
        async def act(self, rollout: Rollout) -> AgentResult:
            return await rollout.run_agent() if rollout.task.id == "sum-1" else AgentResult(messages=messages)

        async def score(self, rollout: Rollout, grading: Grading) -> Score:
            return Score(1.0)

    broken, fine = run(Talking(2), tmp_path)
    assert [each.reward for each in fine.trajectories] == [1.0, 1.0]
    assert {(each.reward, each.blame, said in each.error) for each in broken.trajectories} == {(None, Blame.TASK, True)}


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": None},
        {"prompt": ["hi"]},
        {"prompt": []},
        {"prompt": [{"content": "hi"}]},
        {"network": "off"},
        {"limits": {"cpus": 1}},
        {"files": ["a.txt"]},
    ],
)
def test_a_task_of_the_wrong_shape_is_left_out_by_name(tmp_path: Path, values: dict[str, JSON]) -> None:
    class Odd(Sums):
        async def tasks(self) -> AsyncIterator[Task]:
            yield replace(sum_task(0), **values)
            yield sum_task(1)

    broken, fine = run(Odd(), tmp_path)
    assert [each.reward for each in fine.trajectories] == [1.0, 1.0]
    assert (broken.trajectories, broken.blame) == ([], Blame.TASK)
    assert f"task sum-0: {'its ' if 'prompt' in values else ''}{next(iter(values))} is " in broken.error


def test_an_id_that_is_a_number_is_written_as_one(tmp_path: Path) -> None:
    class Numbered(Sums):
        async def tasks(self) -> AsyncIterator[Task]:
            yield replace(sum_task(0), id=17)

    (group,) = run(Numbered(), tmp_path)
    assert (group.task_id, [each.task_id for each in group.scored]) == ("17", ["17", "17"])


def with_tool(function: JSON) -> Sums:
    """The sums, whose tool is this function."""

    class Tooled(Sums):
        def kit(self, task: Task, rng: Random) -> Kit:
            return Kit(ToolRegistry([FunctionTool(ADD.schema, function, toolset="arithmetic")]), ("arithmetic",))

    return Tooled(1)


@pytest.mark.parametrize(
    ("hook", "said"), [(awaits_what_is_cancelled, "an awaited operation was cancelled"), (exits, "SystemExit")]
)
def test_a_tool_that_misbehaves_answers_with_its_failure(tmp_path: Path, hook: JSON, said: str) -> None:
    async def broken(arguments: JSON, run: JSON) -> JSON:
        await hook(None)

    (group,) = run(with_tool(broken), tmp_path)
    assert [each.outcome for each in group.trajectories] == [Outcome.NATURAL] * 2
    assert all(said in each.tool_errors[0].error for each in group.trajectories)


async def loses_its_slot_among_others(*arguments: JSON) -> float:
    async def fails() -> None:
        raise SlotLost("the slot died")

    async with asyncio.TaskGroup() as together:
        together.create_task(fails())
        together.create_task(asyncio.sleep(60))
    raise AssertionError


@pytest.mark.parametrize("env", [with_tool(loses_its_slot_among_others), Sums(1, score=loses_its_slot_among_others)])
def test_the_worlds_failure_in_a_group_of_errors_is_the_worlds(tmp_path: Path, env: Sums) -> None:
    (group,) = run(env, tmp_path)
    ended = {(each.reward, each.blame, each.error) for each in group.trajectories}
    assert ended == {(None, Blame.SANDBOX, "SlotLost: the slot died")}


ERRORS: list[Callable[[], BaseException]] = [
    lambda: OSError(2, "no such directory", "/app"),
    lambda: RuntimeError("broken"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    lambda: RecursionError("too deep"),
    lambda: MemoryError(),
    lambda: ExceptionGroup("several", [OSError("one"), ValueError("two")]),
    lambda: BaseExceptionGroup("several", [SystemExit(1)]),
    lambda: SystemExit(0),
    lambda: GeneratorExit(),
    lambda: asyncio.CancelledError(),
]


class Raising(Sums):
    """Raises an error in one hook for its first task."""

    def __init__(self, hook: str, error: Callable[[], BaseException]) -> None:
        super().__init__(2)
        self._hook, self._error = hook, error

    def _reach(self, hook: str, task: Task) -> None:
        if hook == self._hook and task.id == "sum-0":
            raise self._error()

    def kit(self, task: Task, rng: Random) -> Kit:
        self._reach("kit", task)
        return super().kit(task, rng)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        self._reach("slot_spec", task)
        return super().slot_spec(task, phase)

    async def resolve(self, task: Task) -> Task:
        self._reach("resolve", task)
        return task

    async def collect(self, task: Task, group: GroupCollection) -> int:
        self._reach("collect", task)
        return group.wanted

    async def begin(self, rollout: Rollout) -> None:
        self._reach("begin", rollout.task)

        async def close() -> None:
            self._reach("close", rollout.task)

        rollout.workspace.closers.append(close)

    async def act(self, rollout: Rollout) -> AgentResult:
        self._reach("act", rollout.task)
        result = await rollout.run_agent()
        self._reach("end of act", rollout.task)
        return result

    async def grade(self, rollout: Rollout) -> Score:
        self._reach("grade", rollout.task)
        return await super().grade(rollout)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        self._reach("score", rollout.task)
        return await super().score(rollout, grading)

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        self._reach("project", rollout.task)
        return Projection()

    async def ended(self, task: Task, group: Group) -> None:
        self._reach("ended", task)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error()).__name__)
@pytest.mark.parametrize(
    "hook",
    ["kit", "slot_spec", "resolve", "collect", "begin", "act", "end of act", "grade", "score", "project"],
)
def test_no_error_of_a_hook_leaves_its_group(tmp_path: Path, hook: str, error: Callable[[], BaseException]) -> None:
    broken, fine = sorted(run(Raising(hook, error), tmp_path), key=lambda group: group.number)
    assert [each.reward for each in fine.trajectories] == [1.0, 1.0]
    assert [each.reward for each in broken.trajectories if each.scored] == []
    assert broken.error or len(broken.trajectories) == 2
    said = broken.error or broken.trajectories[0].error
    assert any(type(leaf).__name__ in said for leaf in leaves(error()))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error()).__name__)
@pytest.mark.parametrize("hook", ["close", "ended"])
def test_no_error_after_the_score_takes_the_score(
    tmp_path: Path, hook: str, error: Callable[[], BaseException]
) -> None:
    groups = run(Raising(hook, error), tmp_path)
    assert [[each.reward for each in group.trajectories] for group in groups] == [[1.0, 1.0]] * 2


def test_a_result_without_an_outcome_costs_its_rollout_alone(tmp_path: Path) -> None:
    class Odd(Sums):
        async def act(self, rollout: Rollout) -> AgentResult:
            result = await rollout.run_agent()
            return result if rollout.task.id == "sum-1" else replace(result, outcome="natural", turns=None)  # type: ignore[arg-type]

    broken, fine = run(Odd(2), tmp_path)
    assert [each.reward for each in fine.trajectories] == [1.0, 1.0]
    assert {(each.reward, each.blame) for each in broken.trajectories} == {(None, Blame.TASK)}


def test_a_source_of_tasks_that_fails_ends_the_run_with_one_error(tmp_path: Path) -> None:
    class Ending(Sums):
        async def tasks(self) -> AsyncIterator[Task]:
            yield sum_task(0)
            raise OSError(5, "input/output error", "tasks.jsonl")

    with raises(ConfigError, "sums", "OSError"):
        run(Ending(), tmp_path)
    (group,) = Recording(tmp_path / "journal.jsonl")
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]
