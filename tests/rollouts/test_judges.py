"""Models that an environment asks: verdicts that are kept, the budget, and where a model may be asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutEnded, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.types import Blame
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

JUDGED = """
from palaestra import ChatModel, Prices, Say, Task, ToolStep, environment

@environment(toolsets=["todo"])
def judged(url: str = "", n: int = 2):
    for i in range(n):
        yield Task(id=f"t{i}", prompt="Hello.", data=url, solution=[ToolStep("todo", {}), Say(f"work {WORK}")])

def model(task):
    return ChatModel("m", base_url=task.data, prices=Prices(1.0, 2.0))

@judged.score
async def good(task, rollout):
    return float(await model(task).ask(f"QUESTION {rollout.final_response}"))
"""


def said(text: str, tokens: int = 100) -> FakeAnswer:
    usage = {"prompt_tokens": tokens, "completion_tokens": 10, "total_tokens": tokens + 10}
    return FakeAnswer({**completion(text), "usage": usage})


def questions(server: LoopbackServer) -> list[str]:
    return [str(each.body["messages"][-1]["content"]) for each in server.seen if each.method == "POST"]


def rollouts(folder: Path) -> dict[str, Any]:
    (journal,) = folder.glob("runs/*/*/journal.jsonl")
    return {each.rollout_id[-4:]: each for each in palaestra.open_run(journal.parent).trajectories}


def write(question: str = "How good?", work: str = "", more: str = "", change: Callable[[str], str] = str) -> None:
    text = JUDGED.replace("QUESTION", question).replace("{WORK}", work)
    Path("my_env.py").write_text(change(text) + more)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def ran(*argv: str) -> int:
    return await asyncio.to_thread(main, [*argv])


def run_command(server: LoopbackServer, *more: str) -> list[str]:
    return ["run", "my_env.py", "--policy", "oracle", "--env.url", server.url, "--concurrency", "1", *more]


def costs(trajectory: Any) -> tuple[float, float, float]:
    metrics = trajectory.metrics
    return metrics.get("model_calls", 0), metrics.get("model_calls_cached", 0), metrics.get("model_cost", 0)


COST = pytest.approx((100 + 20) / 1e6)


async def test_equal_questions_have_one_verdict_in_a_run_and_only_the_first_costs(tmp_path: Path) -> None:
    write(work="same")
    async with LoopbackServer(said("0.25"), said("0.75")) as server:
        assert await ran(*run_command(server, "--group", "2")) == 0
        assert questions(server) == ["How good? work same"]
        journal = next(tmp_path.glob("runs/*/*/journal.jsonl"))
        assert await ran("replay", str(journal.parent)) == 0
        assert len(questions(server)) == 1
    found = rollouts(tmp_path)
    assert {each.reward for each in found.values()} == {0.25}
    assert sorted(map(costs, found.values())) == [(0, 1, 0)] * 3 + [(1, 0, COST)]


async def test_several_verdicts_on_one_work_are_several_questions(tmp_path: Path) -> None:
    asking = "[float(await model(task).ask('QUESTION')) for _ in range(3)]"
    write(work="same", change=lambda text: text.replace("float(await", f"sum({asking.replace('QUESTION', '?')}) / 3 #"))
    async with LoopbackServer(said("0"), said("0.5"), said("1"), said("9")) as server:
        assert await ran(*run_command(server)) == 0
        assert len(questions(server)) == 3
    assert [each.reward for each in rollouts(tmp_path).values()] == [0.5, 0.5]


async def test_a_rollout_that_was_cut_off_while_it_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    write(work="{i}")
    async with LoopbackServer(said("0.25"), said("0.5")) as server:
        assert await ran(*run_command(server)) == 0
        journal = next(tmp_path.glob("runs/*/*/journal.jsonl"))
        events = list(read_journal(journal))
        first = next(n for n, each in enumerate(events) if isinstance(each, RolloutEnded))
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:first]))
        assert await ran(*run_command(server, "--resume", str(journal.parent))) == 0
        assert len(questions(server)) == 2
    found = rollouts(tmp_path)
    assert [found[name].reward for name in ("t0/0", "t1/0")] == [0.25, 0.5]
    assert costs(found["t0/0"]) == (1, 0, COST)


async def test_grade_asks_a_corrected_question_once_and_shows_what_it_cost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(work="{i}")
    async with LoopbackServer(said("0.25"), said("0.5"), said("0.75"), said("1")) as server:
        assert await ran(*run_command(server, "--keep-workspaces")) == 0
        (folder,) = tmp_path.glob("runs/*/*/")
        assert await ran("grade", str(folder)) == 0
        assert len(questions(server)) == 2
        assert "0 questions asked, 2 answered" in capfd.readouterr().err
        write("How correct?", work="{i}")
        for cost in ("2 questions asked, cost 0.0002, 0 answered", "0 questions asked, 2 answered"):
            assert await ran("grade", str(folder)) == 0
            assert cost in capfd.readouterr().err
        assert questions(server)[2:] == ["How correct? work 0", "How correct? work 1"]
        run = palaestra.open_run(folder)
        assert sorted(each.reward or 0 for each in run.trajectories) == [0.75, 1.0]
        recorded = Recording(run.path / "journal.jsonl", as_recorded=True)
        assert sorted(each.reward or 0 for group in recorded for each in group.trajectories) == [0.25, 0.5]


def test_a_tool_of_another_kind_is_still_not_called_by_grade(tmp_path: Path) -> None:
    called = "\n@judged.tool(touches_world=True)\ndef look(what: str) -> str:\n    'Look.'\n    return what\n"
    asks = "\n    assert (await rollout.tools.call('look', {'what': WHAT})).text\n    return 1.0 #"
    plain = lambda what: lambda text: text.replace("    return float(", asks.replace("WHAT", what) + "(")  # noqa: E731
    write(more=called, change=plain("'a'"))
    assert main(["run", "my_env.py", "--policy", "oracle", "--keep-workspaces"]) == 0
    (folder,) = tmp_path.glob("runs/*/*/")
    assert main(["grade", str(folder)]) == 0
    write(more=called, change=plain("'b'"))
    assert main(["grade", str(folder)]) == 1


async def test_what_judges_cost_ends_a_run_at_its_budget_and_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(work="{i}")
    budget = ("--env.n", "4", "--max-cost", "1.5", "--env.prompt_price", "0", "--env.completion_price", "0")
    async with LoopbackServer(*[said("0.5", 10**6) for _ in range(6)]) as server:
        assert await ran(*run_command(server, *budget)) != 0
        assert len(questions(server)) == 2
        (folder,) = tmp_path.glob("runs/*/*/")
        capfd.readouterr()
        assert await ran("runs", "--table", "--format", "csv") == 0
        assert "2.0000" in capfd.readouterr().out
        assert await ran("status", str(folder), "--json") == 0
        assert json.loads(capfd.readouterr().out)["cost"] == pytest.approx(2.0, abs=0.01)
        # the earlier part's cost counts for a larger budget
        again = [each if each != "1.5" else "2.5" for each in budget]
        assert await ran(*run_command(server, *again, "--resume", str(folder))) != 0
        assert len(questions(server)) == 3


async def test_what_judges_cost_counts_for_the_budget_of_an_evaluation_set(capfd: pytest.CaptureFixture[str]) -> None:
    write("How good? {task.id}", work="{i}")
    prices = ("--env.prompt_price", "0", "--env.completion_price", "0", "--concurrency", "1")
    async with LoopbackServer(*[said("0.5", 10**6) for _ in range(6)]) as server:
        words = ["eval", "my_env.py", "--policy", "oracle", "--policy", "noop", "--env.url", server.url, *prices]
        assert await ran(*words, "--max-cost", "2.5") == 3
        assert len(questions(server)) == 3
        folder = capfd.readouterr().out.strip()
        assert await ran("resume", folder, "--max-cost", "9") == 0
        assert len(questions(server)) == 4


async def test_what_a_users_model_cost_before_a_cut_counts_once(tmp_path: Path) -> None:
    person = "\n@judged.user\nasync def person(task, messages):\n    return await model(task).ask('And?')\n"
    plain = lambda text: text.replace("{i}", "").replace('Say(f"work ")', "Say('1'), Say('2'), Say('3')")  # noqa: E731
    write(change=lambda text: plain(text).replace("float(await", "1.0 #"), more=person)
    price = ("--env.n", "1", "--env.prompt_price", "0", "--env.completion_price", "0", "--max-cost", "50")
    async with LoopbackServer(*[said(f"word {n}", 10**6) for n in range(9)]) as server:
        assert await ran(*run_command(server, *price)) == 0
        asked = len(questions(server))
        (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
        whole = palaestra.open_run(journal.parent).trajectories[0].metrics["model_cost"]
        events = list(read_journal(journal))
        turns = [n for n, each in enumerate(events, 1) if isinstance(each, TurnTaken)]
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[: turns[2]]))
        assert await ran(*run_command(server, *price, "--resume", str(journal.parent))) == 0
        assert len(questions(server)) == asked  # the replies after the cut were recorded
        from palaestra.envs.run.run_table import spent

        assert spent(journal.parent) == pytest.approx(whole)


EVERYWHERE = """
@judged.state
async def story(task):
    return {"story": await model(task).ask("A story?")}

@judged.tool
async def consult(what: str, task, state) -> str:
    "Consult an expert."
    return state["story"] + await model(task).ask(f"What is {what}?")
"""


async def test_a_state_and_a_tool_may_ask_models_which_are_recorded(tmp_path: Path) -> None:
    steps = "ToolStep('consult', {'what': 'tea'}), ToolStep('todo', {})"
    write(more=EVERYWHERE, change=lambda text: text.replace('ToolStep("todo", {})', steps))
    async with LoopbackServer(said("Once, "), said("a leaf"), said("0.5"), said("9")) as server:
        run = run_command(server, "--env.n", "1")
        assert await ran(*run) == 0
        assert questions(server)[:2] == ["A story?", "What is tea?"]
        (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
        (whole,) = palaestra.open_run(journal.parent).trajectories
        assert next(each["content"] for each in whole.messages if each["role"] == "tool") == "Once, a leaf"
        assert costs(whole)[0] == 3
        assert await ran("replay", str(journal.parent)) == 0
        lines, events = journal.read_bytes().splitlines(keepends=True), list(read_journal(journal))
        for turn in (1, 2):
            place = next(n for n, each in enumerate(events, 1) if isinstance(each, TurnTaken) and each.turn == turn)
            journal.write_bytes(b"".join(lines[:place]))
            assert await ran(*run, "--resume", str(journal.parent)) == 0
            (again,) = palaestra.open_run(journal.parent).trajectories
            assert (again.messages, again.reward, costs(again)) == (whole.messages, 0.5, costs(whole))
        assert len(questions(server)) == 3


def test_a_plain_tool_that_asks_in_a_loop_of_its_own_is_one_clear_error(tmp_path: Path) -> None:
    tool = """
import asyncio

@judged.tool
def consult(task) -> str:
    "Ask."
    return asyncio.run(model(task).ask("?"))
"""
    write(more=tool, change=lambda text: text.replace('ToolStep("todo", {})', "ToolStep('consult', {})"))
    assert main(["run", "my_env.py", "--policy", "oracle", "--env.n", "1", "--env.url", "http://127.0.0.1:1"]) != 0
    (found,) = rollouts(tmp_path).values()
    assert (found.reward, found.blame) == (None, Blame.TASK)
    assert "async def" in found.error
