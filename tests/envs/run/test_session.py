"""`Session`: a run that stays open, whose tasks the caller chooses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra import AgentResult, ConfigError, Session, Slot, Task, environment
from palaestra.rollouts.limits import RunStopped
from palaestra_contract import HermesAgentBaseEnv, ToolContext
from palaestra_slots import EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots


def in_loop(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """The test as a function that pytest runs."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return run


@environment(toolsets=["terminal"])
def squares(n: int) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"square-{i}", prompt=f"Square {i}", solution=f"echo $(({i}*{i})) > answer.txt")


@squares.score
async def right(task: Task, sandbox: Slot) -> bool:
    number = int(task.id.partition("-")[2])
    return (await sandbox.read_text("answer.txt", missing="")).strip() == str(number**2)


@environment(toolsets=["terminal"])
def endless() -> Iterator[Task]:
    n = 0
    while True:
        yield Task(id=f"task-{n}", prompt="?")
        n += 1


@endless.score
async def nothing(task: Task) -> float:
    return 0.0


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@in_loop
async def test_tasks_are_rolled_out_in_the_order_of_the_calls_and_recorded_as_one_run() -> None:
    async with Session(squares(n=5), policy="oracle", group_size=2) as session:
        first = await session.roll_out("square-3", "square-1")
        (second,) = await session.roll_out("square-3", group_size=1)
        assert session.path.is_dir()
        assert session.path.is_absolute()
    assert [group.task_id for group in (*first, second)] == ["square-3", "square-1", "square-3"]
    assert [group.group_id for group in (*first, second)] == ["000000-square-3", "000001-square-1", "000002-square-3"]
    assert [[each.reward for each in group.trajectories] for group in (*first, second)] == [[1.0] * 2, [1.0] * 2, [1.0]]
    run = palaestra.open_run(session.path)
    assert [group.group_id for group in run.groups] == [group.group_id for group in (*first, second)]
    assert (run.status.state, run.metrics["rollouts"]) == ("done", 5)
    assert len((session.path / "groups.jsonl").read_text().splitlines()) == 3


@in_loop
async def test_tasks_are_drawn_only_as_far_as_they_are_needed() -> None:
    async with Session(endless(), policy="noop") as session:
        (group,) = await session.roll_out("task-7")
        assert group.task_id == "task-7"
        assert [task.id for task in await session.tasks(3)] == ["task-0", "task-1", "task-2"]
        assert len(await session.tasks(12)) == 12


@in_loop
async def test_an_unknown_task_is_named_and_the_session_goes_on() -> None:
    async with Session(squares(n=3), policy="oracle") as session:
        with pytest.raises(ConfigError, match="square-9"):
            await session.roll_out("square-9")
        assert len(await session.tasks()) == 3
        assert (await session.roll_out("square-2"))[0].scored


class Again(HermesAgentBaseEnv):
    """Three items in a circle, as classes of existing scripts give them."""

    name = "again"
    n = 0

    async def setup(self) -> None:
        """There is nothing to load."""

    async def get_next_item(self) -> JSON:
        self.n += 1
        return {"id": f"task-{self.n % 3}"}

    def format_prompt(self, item: JSON) -> str:
        return "?"

    async def compute_reward(self, item: JSON, result: AgentResult, ctx: ToolContext) -> float:
        return 0.0

    async def evaluate(self) -> JSON:
        return {}


@in_loop
async def test_tasks_that_come_again_without_end_are_known_tasks() -> None:
    async with Session(Again, policy="noop", enabled_toolsets=["terminal"]) as session:
        with pytest.raises(ConfigError, match="typo"):
            await session.roll_out("typo")
        assert sorted(task.id for task in await session.tasks(12)) == ["task-0", "task-1", "task-2"]


@in_loop
async def test_a_session_without_a_rollout_leaves_no_folder(tmp_path: Path) -> None:
    async with Session(squares(n=2), policy="noop") as session:
        assert len(await session.tasks()) == 2
    assert not list(tmp_path.glob("runs/*/*"))


@in_loop
async def test_a_session_that_cannot_begin_raises_when_it_is_entered() -> None:
    with pytest.raises(ConfigError, match="oracel"):
        async with Session(squares(n=1), policy="oracel"):
            raise AssertionError("it was entered")


@in_loop
async def test_an_error_in_the_block_ends_the_run_and_is_raised() -> None:
    session = Session(squares(n=2), policy="oracle")

    async def fail() -> None:
        async with session:
            await session.roll_out("square-1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    run = palaestra.open_run(session.path)
    assert (len(run.groups), run.status.state) == (1, "interrupted")


@in_loop
async def test_leaving_the_block_waits_for_groups_in_flight() -> None:
    async with Session(squares(n=2), policy="oracle") as session:
        going = asyncio.create_task(session.roll_out("square-1"))
        await asyncio.sleep(0)  # it draws the task
        await session.tasks()
        await asyncio.sleep(0)
    (group,) = await going
    assert [each.reward for each in group.trajectories] == [1.0]


async def roll_out_for_ever(session: Session) -> None:
    async with session:
        while True:
            await session.roll_out("square-1")


@in_loop
async def test_a_model_server_that_is_gone_ends_the_session() -> None:
    refusal = FakeAnswer({"error": {"message": "no such key"}}, status=401)
    async with LoopbackServer(FakeAnswer(completion("Hm.")), refusal) as server:
        session = Session(squares(n=9), model="m", base_url=server.url, group_size=1)
        with pytest.raises(EngineUnavailable):
            await roll_out_for_ever(session)
    run = palaestra.open_run(session.path)
    assert (run.metrics["rollouts"], run.metrics["scored"]) == (4, 1)


@in_loop
async def test_a_limit_of_the_run_stops_the_session() -> None:
    async with LoopbackServer(FakeAnswer(completion("Hm."))) as server:
        costs = {"prompt_price": 1e6, "completion_price": 1e6, "max_cost": 1.0}
        session = Session(squares(n=9), model="m", base_url=server.url, group_size=1, **costs)
        with pytest.raises(RunStopped):
            await roll_out_for_ever(session)
    assert palaestra.open_run(session.path).status.state == "paused"


def test_a_session_that_blocks() -> None:
    with Session(squares(n=2), policy="oracle") as session:
        assert [task.id for task in session.tasks()] == ["square-0", "square-1"]
        (group,) = session.roll_out("square-1", group_size=3)
    assert [each.reward for each in group.trajectories] == [1.0] * 3
    with pytest.raises(ConfigError), Session(squares(n=1), policy="oracel"):
        raise AssertionError("it was entered")


@in_loop
async def test_an_engine_is_used_as_it_is_started_and_closed() -> None:
    from palaestra_tokens.engines.openai import OpenAIEngine

    async with LoopbackServer(FakeAnswer(completion("Hm."))) as server:
        engine = OpenAIEngine(palaestra.APIServerConfig(base_url=server.url, model_name="mine"))
        run = await palaestra.run(squares(n=1), server=engine)
        assert (run.trajectories[0].reward, run.trajectories[0].messages[-1]["content"]) == (0.0, "Hm.")
        assert run.recording.meta.model == "mine"
        with pytest.raises(ConfigError, match="one kind"):
            await palaestra.run(squares(n=1), server=[engine, engine.config])


@in_loop
async def test_a_program_plays_a_rollout_itself() -> None:
    async with Session(squares(n=3), policy="caller") as session:
        assert {each["function"]["name"] for each in await session.tools("square-2")} == {"process", "terminal"}
        play = await session.play("square-2")
        assert [message["content"] for message in play.messages] == ["Square 2"]
        assert "unknown tool" in (await play.call("shell", {})).lower()
        assert "error" in await play.call("terminal", "{")
        assert '"exit_code": 0' in await play.call("terminal", {"command": "echo 4 > answer.txt"})
        trajectory = await play.finish("There it is.")
        assert trajectory is await play.finish()
        with pytest.raises(palaestra.InfraError):
            await play.call("terminal", {"command": "true"})
    assert (trajectory.reward, trajectory.messages[-1]["content"]) == (1.0, "There it is.")
    assert palaestra.open_run(session.path).metrics["reward/mean"] == 1.0


@in_loop
async def test_a_played_rollout_may_end_before_it_is_finished() -> None:
    async with Session(squares(n=3), policy="caller", max_agent_turns=1) as session:
        play = await session.play("square-2")
        assert '"exit_code": 0' in await play.call("terminal", {"command": "echo 4 > answer.txt"})
        assert (await play.finish()).outcome is palaestra.Outcome.MAX_TURNS


def asking(answers: int) -> Any:
    @environment(toolsets=[])
    def talk() -> Iterator[Task]:
        yield Task("one", "Hello.")

    @talk.user
    def person(messages: Sequence[Any]) -> str | None:
        said = [each["content"] for each in messages if each["role"] == "assistant" and each["content"]]
        return f"and after {said[-1]}?" if len(said) <= answers else None

    @talk.tool
    def look(what: str) -> str:
        """Look."""
        return f"saw {what}"

    @talk.score
    def spoken(rollout: Any) -> float:
        return float(sum(each["role"] == "assistant" and bool(each["content"]) for each in rollout.messages))

    return talk


@in_loop
async def test_a_program_talks_to_the_environments_user() -> None:
    async with Session(asking(2), policy="caller") as session:
        play = await session.play("one")
        assert await play.say("a") == "and after a?"
        assert await play.call("look", {"what": "b"}) == "saw b"
        assert await play.say("c") == "and after c?"
        assert await play.say("d") is None  # the user has nothing to add
        trajectory = await play.finish("unsaid")
    assert (trajectory.reward, trajectory.messages[-1]["content"]) == (3.0, "d")
    assert trajectory.outcome is palaestra.Outcome.NATURAL


@in_loop
async def test_the_last_word_is_said_once_whatever_the_user_would_answer() -> None:
    async with Session(asking(99), policy="caller", max_agent_turns=5) as session:
        silent, play = await session.play("one"), await session.play("one")
        assert (await silent.finish("done")).messages[1:] == [{"role": "assistant", "content": "done"}]
        assert await play.say("a") == "and after a?"
        trajectory = await play.finish("done")
    assert [each["content"] for each in trajectory.messages[1:]] == ["a", "and after a?", "done"]
    assert (trajectory.reward, trajectory.outcome) == (2.0, palaestra.Outcome.NATURAL)


def test_a_conversation_without_a_user_ends_with_the_first_word() -> None:
    with Session(squares(n=2), policy="caller") as session:
        play = session.play("square-1")
        assert play.say("hello") is None
        assert play.finish().messages[-1]["content"] == "hello"


@in_loop
async def test_the_end_of_the_session_cancels_what_is_not_finished() -> None:
    async with Session(squares(n=3), policy="caller") as session:
        done, _ = await session.play("square-1"), await session.play("square-2")
        await done.call("terminal", {"command": "echo 1 > answer.txt"})
        await done.finish()
    rewards = {group.task_id: [each.reward for each in group.trajectories] for group in palaestra.open_run().groups}
    assert rewards["square-1"] == [1.0]
    assert rewards.get("square-2", [None]) == [None]


@in_loop
async def test_only_a_session_of_the_caller_is_played() -> None:
    async with Session(squares(n=3), policy="oracle") as session:
        with pytest.raises(ConfigError, match="caller"):
            await session.play("square-2")
    with pytest.raises(ConfigError, match="caller"):
        Session(squares(n=3), policy="caller", model="m")
    async with Session(squares(n=3), policy="caller") as session:
        with pytest.raises(ConfigError, match="play"):
            await session.roll_out("square-2")


def test_a_rollout_is_played_in_calls_that_block() -> None:
    with Session(squares(n=2), policy="caller") as session:
        play = session.play("square-1")
        assert session.tools("square-1")
        assert play.messages
        play.call("terminal", {"command": "echo 1 > answer.txt"})
        assert play.finish().reward == 1.0


@in_loop
async def test_an_unknown_finish_reason_is_a_label_that_costs_nothing() -> None:
    for word, labels in (("weary", ["unknown_finish_reason"]), ("stop", [])):
        async with LoopbackServer(FakeAnswer(completion("done", word))) as server:
            run = await palaestra.run(squares(n=1), base_url=server.url, model="m")
        (only,) = run.trajectories
        assert [label.name for label in only.labels] == labels
        assert (only.outcome, only.reward) == (palaestra.Outcome.NATURAL, 0.0)
