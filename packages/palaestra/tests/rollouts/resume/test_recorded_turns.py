"""Rollouts that were cut off go on where they were, or begin anew and say why. No slots: the journal is cut instead."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import ADD, Sums, changed, services, sum_task

from crash.by_prompt import ByPrompt
from palaestra.agent.budget import Budget
from palaestra.agent.result import AgentResult
from palaestra.rollouts.events import (
    FIRST_SCHEMA,
    JOURNAL_SCHEMA,
    AnyJournalEvent,
    AttemptDiscarded,
    RolloutResumed,
    RunResumed,
    Subscriber,
    TurnTaken,
)
from palaestra.rollouts.journal.journal import Journal, read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.prometheus import exposition
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.records import Beside, Group
from palaestra.rollouts.resume.recorded_turns import Mismatch
from palaestra.rollouts.resume.state import read_finished
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import AgentSettings, RunContext
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolRun, ToolSchema
from palaestra_slots.core.errors import EngineUnavailable
from palaestra_slots.core.types import JSON, Blame, Message, Prices, Task, ToolStep
from palaestra_tokens.chat_server import ChatServer, SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.engines.scripted import OraclePolicy, ScriptedEngine
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat
from palaestra_tokens.tokenizers import FastTokenizer

STEPS = 4
ROLLOUTS, TURNS = 4, STEPS + 1


class Counting(ScriptedEngine):
    """The oracle, with its calls counted. The call with the number `dies` is the model server's last."""

    def __init__(self, dies: int | None = None) -> None:
        super().__init__(APIServerConfig(server_type="scripted", model_name="oracle"), OraclePolicy())
        self.calls = 0
        self._dies = dies

    def session(self, context: SessionContext) -> ChatServer:
        return _Counted(self, super().session(context))

    def called(self) -> None:
        self.calls += 1
        if self._dies is not None and self.calls >= self._dies:
            raise EngineUnavailable("the server is gone")


class _Counted(ChatServer):
    def __init__(self, engine: Counting, inner: ChatServer) -> None:
        self._engine, self._inner = engine, inner

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        self._engine.called()
        return await self._inner.chat_completion(messages=messages, **request)


class Exact:
    """A token-exact engine whose answers follow from the prompt; its calls are counted."""

    name = "exact"

    def __init__(self, folder: Path, tokenizer: FastTokenizer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "calls"
        self._format = ChatFormat(tokenizer)
        self._engine = ByPrompt(tokenizer, {"": [*map(_call, range(STEPS)), "Done."]}, self._file)

    @property
    def calls(self) -> int:
        return self._file.stat().st_size

    def session(self, context: SessionContext) -> ManagedChat:
        return ManagedChat(self._engine, self._format, "hermes", name=context.rollout_id)


def _call(step: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": {step}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    return toy_tokenizer(["Add two integers. What is 1 + 1?", _call(1)], plain=["<tool_call>", "</tool_call>"])


Say = Callable[[Mapping[str, JSON]], str]


class Steps(Sums):
    """Two tasks of four calls each. `say` is what the tool answers to them."""

    def __init__(self, say: Say = lambda arguments: f"{arguments['a'] + arguments['b']}") -> None:
        super().__init__(2, self._right)
        self._say = say
        self.settings = AgentSettings(prices=Prices(1e6, 0.0))

    @property
    def agent(self) -> AgentSettings:
        return self.settings

    async def tasks(self) -> AsyncIterator[Task]:
        for number in range(2):
            steps = [ToolStep("add", {"a": number, "b": step}) for step in range(STEPS)]
            yield replace(sum_task(number), solution=steps)

    def kit(self, task: Task, rng: random.Random) -> Kit:
        async def add(arguments: Mapping[str, JSON], run: ToolRun) -> Mapping[str, JSON]:
            return {"output": self._say(arguments)}

        return Kit(ToolRegistry([FunctionTool(ADD.schema, add, toolset="arithmetic")]), ("arithmetic",))

    async def _right(self, rollout: Rollout) -> float:
        return float(len([message for message in rollout.messages if message["role"] == "tool"]) == STEPS)


def part(
    path: Path, env: Sums, engine: Counting | Exact, *subscribers: Subscriber, begun: bool = False, **settings: JSON
) -> list[Group]:
    """One part of a run, in the journal of a folder; the groups that have ended by then."""
    finished = read_finished(path / "journal.jsonl") if begun else None
    shared: RunContext = changed(services(path), *subscribers, engine=engine, **settings)
    if finished is not None:
        shared.events.journal.append(RunResumed(schema=JOURNAL_SCHEMA))
        shared = changed(shared, rollouts=finished.rollouts, cut_off=finished.cut_off, ended=finished.ended)

    async def main() -> None:
        try:
            await Runner(env, shared, concurrency=2).run()
        finally:
            shared.events.journal.close()

    asyncio.run(main())
    return timeless(list(Recording(path / "journal.jsonl")))


def timeless(groups: list[Group]) -> list[Group]:
    for group in groups:
        group.prepare_s = 0.0
        for trajectory in group.trajectories:
            trajectory.beside = Beside()
    return groups


def cut(source: Path, target: Path, lines: int) -> None:
    target.mkdir(exist_ok=True)
    kept = (source / "journal.jsonl").read_bytes().splitlines(keepends=True)[:lines]
    (target / "journal.jsonl").write_bytes(b"".join(kept))


def taken_up(path: Path) -> list[RolloutResumed]:
    return [event for event in read_journal(path / "journal.jsonl") if isinstance(event, RolloutResumed)]


def middle(path: Path, turns: int = 2) -> int:
    """The number of lines after which some rollout has had so many turns, and none has ended."""
    for number, event in enumerate(read_journal(path / "journal.jsonl"), 1):
        if isinstance(event, TurnTaken) and event.turn == turns:
            return number
    raise AssertionError("no such turn")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    part(tmp_path / "whole", Steps(), Counting())
    return tmp_path / "whole"


def test_cut_after_any_line_it_comes_out_the_same_and_no_answer_is_paid_twice(whole: Path, tmp_path: Path) -> None:
    expected = timeless(list(Recording(whole / "journal.jsonl")))
    lines = (whole / "journal.jsonl").read_bytes().count(b"\n")
    for place in range(1, lines + 1, 2):
        folder = tmp_path / f"cut-{place}"
        cut(whole, folder, place)
        journalled = sum(isinstance(e, TurnTaken) and e.turn > 0 for e in read_journal(folder / "journal.jsonl"))
        engine = Counting()
        assert part(folder, Steps(), engine, begun=True) == expected
        assert engine.calls == ROLLOUTS * TURNS - journalled
        assert all(not event.anew for event in taken_up(folder))


def test_what_is_under_way_costs_before_it_ends(whole: Path, tmp_path: Path) -> None:
    cut(whole, tmp_path / "cut", middle(whole))
    turns = [e for e in read_journal(tmp_path / "cut/journal.jsonl") if isinstance(e, TurnTaken)]
    read, written = (sum(event.tokens[which] for event in turns) for which in (0, 1))
    reader = RunReader(tmp_path / "cut/journal.jsonl")
    status = reader.read()
    assert status.rollouts == 0
    assert read > 0
    assert (status.prompt_tokens, status.completion_tokens, status.cost) == (read, written, float(read))
    assert f'palaestra_tokens_total{{kind="prompt"}} {read}\n' in exposition(status, 0.0)
    assert f"palaestra_cost_total {read}\n" in exposition(status, 0.0)
    assert reader.usage.settled.cost is None
    groups = part(tmp_path / "cut", Steps(), Counting(), begun=True)
    paid = sum(each.cost or 0.0 for group in groups for each in group.trajectories)
    for each in (reader, RunReader(tmp_path / "cut/journal.jsonl")):
        assert each.read().cost == each.usage.settled.cost == paid


def test_cut_twice_it_comes_out_the_same(whole: Path, tmp_path: Path) -> None:
    expected = timeless(list(Recording(whole / "journal.jsonl")))
    once = tmp_path / "once"
    cut(whole, once, middle(whole))
    before = middle(whole)
    part(once, Steps(), Counting(), begun=True)
    lines = (once / "journal.jsonl").read_bytes().count(b"\n")
    for place in range(before, lines, 2):
        cut(once, tmp_path / f"twice-{place}", place)
        journalled = sum(
            isinstance(e, TurnTaken) and e.turn > 0 for e in read_journal(tmp_path / f"twice-{place}" / "journal.jsonl")
        )
        engine = Counting()
        assert part(tmp_path / f"twice-{place}", Steps(), engine, begun=True) == expected
        assert engine.calls == ROLLOUTS * TURNS - journalled


def test_times_of_day_stay_as_they_were_recorded(tmp_path: Path) -> None:
    clock = itertools.count(10)
    env = Steps(lambda arguments: f"{arguments['b']} at 12:00:{next(clock)}")
    expected = part(tmp_path / "whole", env, Counting())
    cut(tmp_path / "whole", tmp_path / "cut", middle(tmp_path / "whole", 3))
    engine = Counting()
    groups = part(tmp_path / "cut", env, engine, begun=True)
    assert engine.calls < ROLLOUTS * TURNS
    assert {event.anew for event in taken_up(tmp_path / "cut")} == {""}
    index = furthest(tmp_path / "cut")
    early, was = (each[0].trajectories[index] for each in (groups, expected))
    assert early.messages[:7] == was.messages[:7], "what the model was shown is what it is shown"
    assert early.messages[7:] != was.messages[7:]


def furthest(path: Path) -> int:
    """Which rollout of the first group had the most turns when the journal was cut."""
    took = [event for event in taken_up(path) if event.rollout_id.startswith("000000")]
    return int(max(took, key=lambda event: event.turns).rollout_id.rpartition("/")[2])


@pytest.mark.parametrize("says", ["another answer {}", "process 12{} started", "/tmp/tmp.abcdef{}", "deadbeef{} HEAD"])
def test_what_the_agent_may_rely_on_must_be_the_same(whole: Path, tmp_path: Path, says: str) -> None:
    count = itertools.count(100)
    env = Steps(lambda arguments: says.format(next(count)))
    part(tmp_path / "one", env, Counting())
    cut(tmp_path / "one", tmp_path / "cut", middle(tmp_path / "one"))
    begun = {e.rollout_id for e in read_journal(tmp_path / "cut/journal.jsonl") if isinstance(e, TurnTaken) and e.turn}
    engine = Counting()
    groups = part(tmp_path / "cut", env, engine, begun=True)
    assert [len(group.scored) for group in groups] == [2, 2]
    assert {event.rollout_id for event in taken_up(tmp_path / "cut") if event.anew == Mismatch.OBSERVATION} == begun
    assert engine.calls == ROLLOUTS * TURNS, "a rollout that begins anew has no answers"
    status = RunReader(tmp_path / "cut/journal.jsonl").read()
    assert status.begun_anew == {Mismatch.OBSERVATION: len(begun)}
    lost = [e.trajectory for e in read_journal(tmp_path / "cut/journal.jsonl") if isinstance(e, AttemptDiscarded)]
    assert {each.rollout_id for each in lost} >= begun
    ended = [trajectory for group in groups for trajectory in group.trajectories]
    assert status.cost == sum(each.cost or 0.0 for each in [*ended, *lost]), "what was paid is counted"


def test_other_tools_begin_anew(whole: Path, tmp_path: Path) -> None:
    class WithMore(Steps):
        def kit(self, task: Task, rng: random.Random) -> Kit:
            return Kit(ToolRegistry([ADD, FunctionTool(ToolSchema("more", "More.", {}), ADD.run)]))

    cut(whole, tmp_path / "cut", middle(whole))
    part(tmp_path / "cut", WithMore(), Counting(), begun=True)
    assert {event.anew for event in taken_up(tmp_path / "cut")} == {Mismatch.TOOLS}


def test_another_prompt_begins_anew(whole: Path, tmp_path: Path) -> None:
    env = Steps()
    env.settings = replace(env.settings, system_prompt="Be brief.")
    cut(whole, tmp_path / "cut", middle(whole))
    part(tmp_path / "cut", env, Counting(), begun=True)
    assert {event.anew for event in taken_up(tmp_path / "cut") if event.turns} == {Mismatch.PROMPT}


@pytest.mark.parametrize("forked", [False, True])
def test_a_question_beside_the_conversation_begins_anew(whole: Path, tmp_path: Path, forked: bool) -> None:
    """A tool that asks the model itself, or has a sub-agent ask: nothing is recorded of what it was told."""

    class Asking(Steps):
        async def act(self, rollout: Rollout) -> AgentResult:
            async def ask(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
                server: Any = rollout.server
                server = server.child(number=1) if forked else server
                await server.chat_completion(messages=[{"role": "user", "content": "What next?"}])
                return await rollout.tools.handle(name, arguments)

            return await rollout.run_agent(tool_handler=ask)

    cut(whole, tmp_path / "cut", middle(whole))
    engine = Counting()
    part(tmp_path / "cut", Asking(), engine, begun=True)
    assert {event.anew for event in taken_up(tmp_path / "cut") if event.turns} == {Mismatch.QUESTION}


def test_what_the_model_server_cut_off_goes_on(whole: Path, tmp_path: Path) -> None:
    expected = timeless(list(Recording(whole / "journal.jsonl")))
    failed = part(tmp_path / "a", Steps(), Counting(dies=9))
    assert {each.blame for group in failed for each in group.trajectories} >= {Blame.ENGINE}
    spent = RunReader(tmp_path / "a/journal.jsonl").read().cost
    engine = Counting()
    assert part(tmp_path / "a", Steps(), engine, begun=True) == expected
    assert engine.calls == ROLLOUTS * TURNS - 8
    assert spent
    after = RunReader(tmp_path / "a/journal.jsonl").read()
    assert after.cost == sum(each.cost or 0.0 for group in expected for each in group.trajectories)


def test_a_journal_of_the_first_form_begins_its_rollouts_anew(whole: Path, tmp_path: Path) -> None:
    expected = timeless(list(Recording(whole / "journal.jsonl")))
    cut(whole, tmp_path / "old", middle(whole))
    journal = tmp_path / "old/journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(JOURNAL_SCHEMA.encode(), FIRST_SCHEMA.encode()))
    engine = Counting()
    assert part(tmp_path / "old", Steps(), engine, begun=True) == expected
    assert engine.calls == ROLLOUTS * TURNS
    assert taken_up(tmp_path / "old") == []


def test_time_that_was_used_before_counts(whole: Path, tmp_path: Path) -> None:
    cut(whole, tmp_path / "cut", middle(whole))
    lines: list[AnyJournalEvent] = []
    for event in read_journal(tmp_path / "cut/journal.jsonl"):
        if isinstance(event, TurnTaken) and event.turn:
            event.seconds = (3000.0, 600.0)
        lines.append(event)
    begun = {event.rollout_id for event in lines if isinstance(event, TurnTaken) and event.turn}
    rewrite(tmp_path / "cut/journal.jsonl", lines)
    env = Steps()
    env.settings = replace(env.settings, budget=Budget(wall_s=3600.0))
    groups = part(tmp_path / "cut", env, Counting(), begun=True)
    ended = {each.rollout_id: each.outcome.value for group in groups for each in group.trajectories}
    assert {name for name, outcome in ended.items() if outcome == "budget"} == begun


def rewrite(path: Path, events: list[AnyJournalEvent]) -> None:
    path.unlink()
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


def test_tokens_come_out_the_same_and_are_not_sampled_again(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    expected = part(tmp_path / "whole", Steps(), Exact(tmp_path / "first", tokenizer))
    assert all(each.ledger is not None and each.scored for group in expected for each in group.trajectories)
    lines = (tmp_path / "whole/journal.jsonl").read_bytes().count(b"\n")
    for place in range(2, lines + 1, 5):
        folder = tmp_path / f"cut-{place}"
        cut(tmp_path / "whole", folder, place)
        journalled = sum(isinstance(e, TurnTaken) and e.turn > 0 for e in read_journal(folder / "journal.jsonl"))
        engine = Exact(folder, tokenizer)
        assert part(folder, Steps(), engine, begun=True) == expected
        assert engine.calls == ROLLOUTS * TURNS - journalled


def test_conversations_beside_find_their_tokens_too(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    class Asking(Steps):
        async def act(self, rollout: Rollout) -> AgentResult:
            async def ask(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
                assert isinstance(rollout.server, ManagedChat)
                said = await rollout.server.child().chat_completion(messages=[{"role": "user", "content": "And?"}])
                return f"{said.choices[0].message.content} {await rollout.tools.handle(name, arguments)}"

            return await rollout.run_agent(tool_handler=ask)

    expected = part(tmp_path / "whole", Asking(), Exact(tmp_path / "first", tokenizer))
    place = middle(tmp_path / "whole")
    cut(tmp_path / "whole", tmp_path / "cut", place)
    journalled = sum(len(e.sampled) for e in read_journal(tmp_path / "cut/journal.jsonl") if isinstance(e, TurnTaken))
    engine = Exact(tmp_path / "cut", tokenizer)
    assert part(tmp_path / "cut", Asking(), engine, begun=True) == expected
    assert engine.calls == ROLLOUTS * (TURNS + STEPS) - journalled
    assert {event.anew for event in taken_up(tmp_path / "cut")} == {""}


def test_a_template_that_renders_otherwise_now_begins_anew(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    part(tmp_path / "whole", Steps(), Exact(tmp_path / "first", tokenizer))
    cut(tmp_path / "whole", tmp_path / "cut", middle(tmp_path / "whole"))
    engine = Exact(tmp_path / "cut", tokenizer)
    engine._format = ChatFormat(tokenizer, f"{{# another #}}Today: {tokenizer.chat_template}")
    groups = part(tmp_path / "cut", Steps(), engine, begun=True)
    assert {event.anew for event in taken_up(tmp_path / "cut") if event.turns} == {Mismatch.QUESTION}
    assert [len(group.scored) for group in groups] == [2, 2]
    assert engine.calls == ROLLOUTS * TURNS
