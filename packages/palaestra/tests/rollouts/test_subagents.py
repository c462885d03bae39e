"""Rollouts that give work to sub-agents: exact tokens, records, replay and limits, with the real loop throughout."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from toy import ADD, Sums, changed, services

from golden_messages import check_message
from manual_clock import ManualClock
from palaestra.agent.budget import Budget
from palaestra.agent.result import AgentResult
from palaestra.agent.subagents import SYSTEM_PROMPT
from palaestra.rollouts.events import Handlers, ReplyReceived, RolloutEnded, TokensSpent, TurnTaken
from palaestra.rollouts.export.atif import AtifExporter, atif_document
from palaestra.rollouts.export.atropos import GroupsFile
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.export.openai import OpenAIExporter
from palaestra.rollouts.export.sharegpt import ShareGPTExporter
from palaestra.rollouts.export.token_rows import exported_rows
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import RunVerdict, verify_run
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.records import Beside, Trajectory, TurnRecord
from palaestra.rollouts.resume.recorded_turns import RecordedTurns
from palaestra.rollouts.resume.replay import Comparison, Playback
from palaestra.rollouts.resume.state import read_finished
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import AgentSettings, Middleware
from palaestra.tools.builtin.delegate_task import DELEGATE_TASK
from palaestra.tools.builtin.todo import TODO
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import EngineUnavailable
from palaestra_slots.core.types import JSON, Blame, Message, Outcome, Prices, Task
from palaestra_tokens.chat_server import ChatServer, Engine, SessionContext
from palaestra_tokens.engine import (
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    Sampled,
)
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import toy_logprob, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat
from palaestra_tokens.token_exact.replies import ReplyReader
from rollouts.resume.test_recorded_turns import cut, middle, part, taken_up

Speaks = Callable[[str, int], str | None]
"""What is said in a conversation that began with the user's text, after so many replies; None is no answer ever."""


class Delegating(Sums):
    """Sums whose agents may give work away."""

    def __init__(self, settings: AgentSettings | None = None) -> None:
        super().__init__(tasks=1)
        self._settings = settings or AgentSettings()

    @property
    def agent(self) -> AgentSettings:
        return self._settings

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(ToolRegistry([ADD, TODO, DELEGATE_TASK]), ("arithmetic", "todo", "delegation"))


def called(name: str, **arguments: JSON) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def two_parts(first: str, turn: int) -> str:
    """The agent gives two sums away and then adds what came back; each sub-agent calls the tool and reports."""
    if (part := re.match(r"part (\d)", first)) is not None:
        number = int(part[1])
        return called("add", a=number, b=10) if turn == 0 else f"it is {number + 10}"
    parts = [{"goal": "part 1"}, {"goal": "part 2", "context": "with care"}]
    return [called("delegate_task", tasks=parts), called("add", a=11, b=12), "done"][turn]


TEXTS = ['part 1 with care it is 11 done <tool_call> {"name": "add", "arguments": {"a": 1}} delegate_task tasks goal']
TOKENIZER = toy_tokenizer(TEXTS * 5)
FORMAT = ChatFormat(TOKENIZER)
_USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


class Exact:
    """An engine that knows the conversation from its tokens alone. Those that a `slow` text begins take longer."""

    name = "exact"

    def __init__(self, speaks: Speaks = two_parts, slow: str = "") -> None:
        self._speaks = speaks
        self._slow = slow

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ChatServer:
        return ManagedChat(self, FORMAT, "hermes", clock=ManualClock())

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        text = TOKENIZER.decode(list(input_ids), skip_special_tokens=False)
        turn = text.count("<|im_start|>assistant") - 1
        user = _USER.findall(text)[0]
        for _ in range(50 if self._slow and user.startswith(self._slow) else 1):
            await asyncio.sleep(0)  # others take their turn
        said = self._speaks(user, turn)
        if said is None:
            await asyncio.Event().wait()
        ids = [*TOKENIZER.encode(said or ""), TOKENIZER.stop_ids[0]]
        return Sampled(ids, [toy_logprob(number, len(input_ids) + at) for at, number in enumerate(ids)], "stop")


class Chatting:
    """An engine that only chats, and has one server for all."""

    name = "chatting"

    def __init__(self, speaks: Speaks = two_parts) -> None:
        self._speaks = speaks

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ChatServer:
        return self

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        turn = sum(message["role"] == "assistant" for message in messages)
        user = next(str(message["content"]) for message in messages if message["role"] == "user")
        await asyncio.sleep(0)
        message = ReplyReader("hermes").read(
            self._speaks(user, turn) or "", thinking=False, cut=False, tools=request["tools"], turn=turn + 1
        )
        read, written = len(str(messages)), len(str(message))
        usage = CompletionUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
        return ChatCompletion(choices=[ChatChoice(message=message, finish_reason="stop")], usage=usage)


class Forking(Chatting):
    """One that keeps conversations apart."""

    def child(self, *, number: int) -> ChatServer:
        return Chatting(self._speaks)


def roll_out(
    folder: Path, engine: Engine, env: Delegating | None = None, playback: Playback | None = None
) -> list[Trajectory]:
    async def scenario() -> None:
        middleware = Middleware(chat=(playback.chat,)) if playback is not None else Middleware()
        shared = changed(services(folder, group_size=1), engine=engine, middleware=middleware)
        with GroupsFile(folder / "groups.jsonl", env="sums", model="exact") as groups:
            await Runner(env or Delegating(), shared, on_group=groups.add).run()
        shared.events.journal.close()

    folder.mkdir(exist_ok=True)
    asyncio.run(scenario())
    return [one for group in Recording(folder / "journal.jsonl") for one in group.trajectories]


def verified(folder: Path) -> RunVerdict:
    return verify_run(folder / "journal.jsonl", folder / "groups.jsonl")


def replies(trajectory: Trajectory) -> list[JSON]:
    """What the tools said to the rollout's own agent."""
    return [json.loads(str(message["content"])) for message in trajectory.messages if message["role"] == "tool"]


def test_tokens_of_sub_agents_are_segments_of_the_same_ledger(tmp_path: Path) -> None:
    (trajectory,) = roll_out(tmp_path, Exact())
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.NATURAL, 3)
    assert replies(trajectory)[0] == {
        "results": [
            {"task_index": 0, "status": "completed", "summary": "it is 11", "api_calls": 2, "tool_calls": 1},
            {"task_index": 1, "status": "completed", "summary": "it is 12", "api_calls": 2, "tool_calls": 1},
        ]
    }
    first, second = trajectory.subagents
    assert (first.number, first.turn, first.goal, first.segments) == (1, 1, "part 1", [1])
    assert (second.number, second.turn, second.segments) == (2, 1, [2])
    assert second.messages[:2] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "part 2\n\nwith care"},
    ]
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.completion_tokens == sum(
        turn.completion_tokens for each in (trajectory, first, second) for turn in each.turns
    )

    verdict = verified(tmp_path)
    assert verdict.ok, verdict.violation
    assert (verdict.turns, verdict.segments, verdict.reasons) == (7, 3, {"subagent": 2})
    rows = exported_rows(trajectory)
    assert [row.reason for row in rows] == ["start", "subagent", "subagent"]
    said = [
        TOKENIZER.decode([token for token, on in zip(row.completion_ids, row.mask, strict=True) if on]) for row in rows
    ]
    assert [text.count("<|im_end|>") for text in said] == [3, 2, 2]
    assert ("it is 11" in said[1], "it is 12" in said[2], "it is" in said[0]) == (True, True, False)
    assert sum(sum(row.mask) for row in rows) == trajectory.completion_tokens, "each once (T3)"


def test_the_record_is_the_same_whichever_sub_agent_is_faster(tmp_path: Path) -> None:
    records = []
    for slow in ("part 1", "part 2"):
        (trajectory,) = roll_out(tmp_path / slow, Exact(slow=slow))
        records.append(msgspec.structs.replace(trajectory, beside=Beside()))
        verdict = verified(tmp_path / slow)
        assert verdict.ok, verdict.violation
    assert records[0].subagents[0].segments == [1]
    assert msgspec.json.encode(records[0]) == msgspec.json.encode(records[1])


def test_a_spoiled_record_of_a_sub_agent_is_found(tmp_path: Path) -> None:
    def spoil(change: Callable[[Trajectory], None]) -> str:
        roll_out(tmp_path, Exact())
        encoded = []
        for event in read_journal(tmp_path / "journal.jsonl"):
            if isinstance(event, RolloutEnded):
                change(event.trajectory)
            encoded.append(msgspec.json.encode(event))
        (tmp_path / "journal.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
        found = verified(tmp_path).violation
        (tmp_path / "journal.jsonl").unlink()
        (tmp_path / "groups.jsonl").unlink()
        return found

    def other_count(trajectory: Trajectory) -> None:
        trajectory.subagents[0].turns[0].completion_tokens += 1

    def others_segment(trajectory: Trajectory) -> None:
        trajectory.subagents[0].segments = [0]

    def twice(trajectory: Trajectory) -> None:
        trajectory.subagents[1].segments = [1]

    assert "turn 1 of sub-agent 1" in spoil(other_count)
    check_message(spoil(others_segment), "ledger")
    check_message(spoil(twice), "segment", "sub-agents")


def test_a_run_with_sub_agents_is_played_again(tmp_path: Path) -> None:
    (recorded,) = roll_out(tmp_path / "first", Exact())
    playback = Playback(Recording(tmp_path / "first/journal.jsonl"))
    (replayed,) = roll_out(tmp_path / "second", Chatting(), playback=playback)
    assert replayed.messages == recorded.messages
    assert [each.messages for each in replayed.subagents] == [each.messages for each in recorded.subagents]
    comparison = Comparison()
    comparison.add(*(next(iter(list(Recording(tmp_path / name / "journal.jsonl")))) for name in ("first", "second")))
    assert (comparison.ok, comparison.rate) == (True, 1.0)


def test_what_a_sub_agent_sees_is_compared_too(tmp_path: Path) -> None:
    (recorded,) = roll_out(tmp_path / "first", Exact())

    class Wrong(Delegating):
        def kit(self, task: Task, rng: random.Random) -> Kit:
            async def add(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
                return {"error": "no"} if arguments["b"] == 10 else await ADD.run(arguments, run)

            return Kit(ToolRegistry([FunctionTool(ADD.schema, add), DELEGATE_TASK]))

    playback = Playback(Recording(tmp_path / "first/journal.jsonl"))
    (replayed,) = roll_out(tmp_path / "second", Chatting(), Wrong(), playback)
    assert replayed.messages == recorded.messages, "a sub-agent says what it said"
    comparison = Comparison()
    comparison.add(*(next(iter(list(Recording(tmp_path / name / "journal.jsonl")))) for name in ("first", "second")))
    assert (comparison.ok, comparison.observations, comparison.equal) == (False, 4, 2)
    assert [(each.subagent, each.turn) for each in comparison.differences] == [(1, 1)]


def test_the_agents_own_turns_have_their_tokens_in_atif(tmp_path: Path) -> None:
    (trajectory,) = roll_out(tmp_path, Exact())
    document, remarks = atif_document(trajectory, [], ExportMeta())
    ids = [step.metrics.completion_token_ids or [] for step in document.steps if step.metrics]
    assert [len(each) for each in ids] == [turn.completion_tokens for turn in trajectory.turns]
    assert TOKENIZER.decode(ids[2]) == "done<|im_end|>"
    assert remarks == {"without the conversations of its sub-agents"}
    trajectory.turns.pop()
    check_message(atif_document(trajectory, [], ExportMeta())[1], "token ids")


def test_what_its_own_tools_hold_ends_with_a_sub_agent(tmp_path: Path) -> None:
    closed: list[str] = []

    class Page:
        def __init__(self) -> None:
            self.opened_for = ""

        async def aclose(self) -> None:
            closed.append(self.opened_for)

    async def look(arguments: Mapping[str, JSON], run: ToolRun) -> JSON:
        run.state(Page).opened_for += run.user_task[:4]
        return {"closed": list(closed)}

    class WithPages(Delegating):
        def kit(self, task: Task, rng: random.Random) -> Kit:
            return Kit(ToolRegistry([FunctionTool(ToolSchema("look", "Look."), look), DELEGATE_TASK]))

    def speaks(first: str, turn: int) -> str:
        if first == "mine":
            return [called("look"), "end"][turn]
        return [called("look"), called("delegate_task", goal="mine"), called("look"), "end"][turn]

    (trajectory,) = roll_out(tmp_path, Exact(speaks), WithPages())
    assert replies(trajectory)[2] == {"closed": ["mine"]}
    assert closed == ["mine", "WhatWhat"]


def test_tools_that_the_environment_has_bound_itself_have_them_too(tmp_path: Path) -> None:
    class Bound(Delegating):
        async def act(self, rollout: Rollout) -> AgentResult:
            tools = rollout.seat.bind_tools(rollout.sandbox, "")
            return await rollout.run_agent(tool_handler=tools)

    (trajectory,) = roll_out(tmp_path, Exact(), Bound())
    assert [each.outcome for each in trajectory.subagents] == [Outcome.NATURAL] * 2


def test_a_rollout_that_was_cut_off_goes_on_without_asking_its_sub_agents_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def speaks(first: str, turn: int) -> str:
        asked.append(first)
        return two_parts(first, turn)

    (whole,) = part(tmp_path / "whole", Delegating(), Exact(speaks), group_size=1)
    assert len(asked) == 7
    cut(tmp_path / "whole", tmp_path / "cut", middle(tmp_path / "whole", turns=1))
    asked.clear()
    (group,) = part(tmp_path / "cut", Delegating(), Exact(speaks), begun=True, group_size=1)
    assert [event.anew for event in taken_up(tmp_path / "cut")] == [""]
    assert len(asked) == 2, "the agent's own turns after the one with the sub-agents"
    (was,), (is_now,) = whole.trajectories, group.trajectories
    assert is_now.messages == was.messages
    assert [each.messages for each in is_now.subagents] == [each.messages for each in was.subagents]
    assert sorted(row.tokens for row in is_now.rows) == sorted(row.tokens for row in was.rows)
    assert verify_run(tmp_path / "cut/journal.jsonl").ok


def total(*turns: TurnRecord) -> tuple[int, int]:
    return sum(turn.prompt_tokens for turn in turns), sum(turn.completion_tokens for turn in turns)


@pytest.mark.parametrize("kind", [Exact, Chatting, Forking])
def test_cut_after_any_line_no_reply_of_an_agent_or_a_sub_agent_is_paid_twice(
    tmp_path: Path, kind: type[Exact | Chatting]
) -> None:
    """Also where the rest of the run is cut off once more."""
    asked: list[str] = []

    def speaks(first: str, turn: int) -> str:
        asked.append(first)
        return two_parts(first, turn)

    def counting() -> tuple[Delegating, Exact | Chatting]:
        asked.clear()
        return Delegating(AgentSettings(prices=Prices(1e6, 1e6))), kind(speaks)

    (whole,) = part(tmp_path / "0", *counting(), group_size=1)
    (was,) = whole.trajectories
    assert len(asked) == 7
    spent = total(*was.turns, *(turn for each in was.subagents for turn in each.turns))
    places = [tmp_path / "0"]
    for place in (2, 3, 5, 6, 7, 8, 9):
        once = tmp_path / f"{place}"
        cut(tmp_path / "0", once, place)
        known = known_replies(once)
        stopped = RunReader(once / "journal.jsonl").read()
        assert (stopped.prompt_tokens + stopped.completion_tokens, stopped.cost or 0) == (sum(known), float(sum(known)))
        part(once, *counting(), begun=True, group_size=1)
        assert len(asked) == 7 - len(known)
        assert [event.anew for event in taken_up(once)] == ([""] if known else [])
        places.append(once)
    lines = (tmp_path / "3/journal.jsonl").read_bytes().count(b"\n")
    for place in range(4, lines + 1):
        twice = tmp_path / f"twice-{place}"
        cut(tmp_path / "3", twice, place)
        known = known_replies(twice)
        told, reader = Counted(), RunReader(twice / "journal.jsonl")
        reader.read()
        part(twice, *counting(), told, begun=True, group_size=1)
        assert len(asked) == 7 - len(known)
        assert (reader.usage.settled.cost or 0) + told.tokens == sum(spent), "what --max-cost goes by"
        places.append(twice)
    for each in places:
        ((now,),) = (group.trajectories for group in Recording(each / "journal.jsonl"))
        assert now.messages == was.messages
        assert [one.messages for one in now.subagents] == [one.messages for one in was.subagents]
        assert sorted(row.tokens for row in now.rows) == sorted(row.tokens for row in was.rows)
        status = RunReader(each / "journal.jsonl").read()
        assert (status.prompt_tokens, status.completion_tokens, status.cost) == (*spent, float(sum(spent)))
        assert kind is not Exact or verify_run(each / "journal.jsonl").ok


def test_a_rollout_repeats_itself_until_every_known_reply_is_given_back(tmp_path: Path) -> None:
    """That is how long the world tells it what it told it then."""
    ((was,),) = (group.trajectories for group in part(tmp_path / "0", Delegating(), Chatting(), group_size=1))
    cut(tmp_path / "0", tmp_path / "cut", 5)
    recall = RecordedTurns(read_finished(tmp_path / "cut/journal.jsonl").cut_off[was.rollout_id])
    assert (recall.turns, recall.replies) == (0, 2)
    opening = was.messages[:2] if was.messages[0]["role"] == "system" else was.messages[:1]
    assert recall.match_turn(None, opening, [])
    for branch, messages in ((0, opening), (1, was.subagents[0].messages[:2])):
        assert recall.replaying
        assert recall.pending_reply(branch, messages) is not None
        assert recall.pending_reply(branch, messages) is None
    assert recall.replaying, "the turn that was cut off is not over"
    assert not recall.match_turn(None, opening, [])
    assert not recall.replaying


class Counted:
    """Counts the tokens that a part of a run spends."""

    def __init__(self) -> None:
        self.tokens = 0

    def handlers(self) -> Handlers:
        return {TokensSpent: self._on_tokens}

    def _on_tokens(self, event: TokensSpent) -> None:
        self.tokens += event.prompt_tokens + event.completion_tokens


def known_replies(folder: Path) -> list[int]:
    """The tokens of every reply that a journal holds."""
    known: dict[tuple[int, int], int] = {}
    turn = 1
    for event in read_journal(folder / "journal.jsonl"):
        if isinstance(event, ReplyReceived):
            known[event.branch, turn if event.branch == 0 else len(known)] = sum(event.tokens)
        elif isinstance(event, TurnTaken) and event.turn:
            known[0, event.turn] = sum(event.tokens)
            turn = event.turn + 1
        elif isinstance(event, RolloutEnded):
            return list(known.values())
    return list(known.values())


@pytest.mark.parametrize("kind", [Exact, Chatting, Forking])
@pytest.mark.parametrize("dies", [3, 5])
def test_a_model_server_that_fails_a_sub_agent_is_not_paid_again_for_what_it_said(
    tmp_path: Path, kind: type[Exact | Chatting], dies: int
) -> None:
    asked: list[str] = []
    left = dies

    def speaks(first: str, turn: int) -> str:
        if len(asked) + 1 >= left:
            raise EngineUnavailable("the server is gone")
        asked.append(first)
        return two_parts(first, turn)

    env = Delegating(AgentSettings(prices=Prices(1e6, 1e6)))
    ((was,),) = (group.trajectories for group in part(tmp_path, env, kind(speaks), group_size=1))
    assert (was.blame, len(asked)) == (Blame.ENGINE, dies - 1)
    before = RunReader(tmp_path / "journal.jsonl").read()
    assert before.cost == was.cost
    left = 100
    ((now,),) = (group.trajectories for group in part(tmp_path, env, kind(speaks), begun=True, group_size=1))
    assert now.scored
    assert len(asked) == 7
    used = total(*now.turns, *(turn for each in now.subagents for turn in each.turns))
    assert RunReader(tmp_path / "journal.jsonl").read().cost == sum(used)


def test_what_a_sub_agent_sees_otherwise_after_a_kill_is_asked_and_paid_for(tmp_path: Path) -> None:
    asked: list[str] = []
    answers = iter("abcdefgh")

    class Changing(Delegating):
        def kit(self, task: Task, rng: random.Random) -> Kit:
            async def add(arguments: Mapping[str, JSON], run: ToolRun) -> JSON:
                return {"result": next(answers)}

            return Kit(ToolRegistry([FunctionTool(ADD.schema, add), DELEGATE_TASK]))

    def speaks(first: str, turn: int) -> str:
        asked.append(first)
        if first == "part 1":
            return [called("add", a=1, b=1), "done"][turn]
        return [called("delegate_task", goal="part 1"), "done"][turn]

    env = Changing(AgentSettings(prices=Prices(1e6, 1e6)))
    part(tmp_path / "whole", env, Exact(speaks), group_size=1)
    place = [
        number
        for number, event in enumerate(read_journal(tmp_path / "whole/journal.jsonl"), 1)
        if isinstance(event, ReplyReceived)
    ][-1]
    cut(tmp_path / "whole", tmp_path / "cut", place)
    known = known_replies(tmp_path / "cut")
    asked.clear()
    ((now,),) = (group.trajectories for group in part(tmp_path / "cut", env, Exact(speaks), begun=True, group_size=1))
    assert len(known) == 3
    assert asked == ["part 1", "What is 0 + 1?"], "its last reply was to another observation"
    assert '"b"' in str(now.subagents[0].messages)
    assert verify_run(tmp_path / "cut/journal.jsonl").ok
    used = total(*now.turns, *now.subagents[0].turns)
    assert RunReader(tmp_path / "cut/journal.jsonl").read().cost == sum(used) + known[-1]


def test_exports_without_sub_agents_have_a_remark(tmp_path: Path) -> None:
    roll_out(tmp_path, Exact())
    group = next(iter(list(Recording(tmp_path / "journal.jsonl"))))
    for exporter in (OpenAIExporter(), ShareGPTExporter(), AtifExporter()):
        report = exporter.export([group], io.BytesIO(), ExportMeta(everything=True))
        assert report.remarks["without the conversations of its sub-agents"] == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "Give either goal or tasks"),
        ({"goal": "x", "tasks": [{"goal": "y"}]}, "Give either goal or tasks"),
        ({"goal": "x", "model": "another"}, "omit model"),
        ({"goal": "x", "toolsets": ["terminall"]}, "Unknown toolset 'terminall'. Did you mean 'terminal'"),
        ({"tasks": [{"goal": "x"}] * 4}, "Invalid arguments"),
        ({"tasks": [{"context": "x"}]}, "Invalid arguments"),
    ],
)
def test_what_cannot_be_given_away_is_told(tmp_path: Path, arguments: JSON, error: str) -> None:
    def speaks(first: str, turn: int) -> str:
        return [called("delegate_task", **arguments), "done"][turn]

    (trajectory,) = roll_out(tmp_path, Exact(speaks))
    assert error in replies(trajectory)[0]["error"]
    assert trajectory.subagents == []


def test_a_sub_agent_has_the_tools_it_was_given_and_none_to_give_away(tmp_path: Path) -> None:
    def speaks(first: str, turn: int) -> str:
        if first == "mine":
            return [called("todo"), called("add", a=1, b=1), called("delegate_task", goal="deeper"), "end"][turn]
        if first == "all":
            return [called("add", a=2, b=2), "end"][turn]
        parts = [{"goal": "mine", "toolsets": ["todo"]}, {"goal": "all", "toolsets": ["todo", "arithmetic"]}]
        return [called("delegate_task", tasks=parts), "done"][turn]

    (trajectory,) = roll_out(tmp_path, Exact(speaks))
    mine, everything = trajectory.subagents
    assert [error.error for error in mine.tool_errors] == [
        "Unknown tool 'add'. Available tools: ['todo']",
        "Unknown tool 'delegate_task'. Available tools: ['todo']",
    ]
    assert everything.tool_errors == []
    assert {"result": 4} in [json.loads(str(m["content"])) for m in everything.messages if m["role"] == "tool"]


def test_the_worlds_failure_in_a_sub_agent_is_the_rollouts(tmp_path: Path) -> None:
    def speaks(first: str, turn: int) -> str:
        if first == "breaks":
            raise EngineUnavailable("no answer")
        if first == "goes on":
            return called("todo")
        return called("delegate_task", tasks=[{"goal": "goes on"}, {"goal": "breaks"}])

    (trajectory,) = roll_out(tmp_path, Exact(speaks))
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.API_ERROR, None, Blame.ENGINE)
    assert [each.outcome for each in trajectory.subagents] == [Outcome.CANCELLED, Outcome.API_ERROR]
    assert "Not finished" in str(trajectory.messages[-1]["content"])


def test_limits_of_the_rollout_hold_for_all_together(tmp_path: Path) -> None:
    def speaks(first: str, turn: int) -> str:
        if first.startswith("on and on"):
            return called("todo")
        return called("delegate_task", tasks=[{"goal": "on and on"}, {"goal": "on and on 2"}])

    (trajectory,) = roll_out(tmp_path, Exact(speaks), Delegating(AgentSettings(budget=Budget(turns=10))))
    assert [len(each.turns) for each in trajectory.subagents] == [4, 4, 0, 0]
    assert {each.outcome for each in trajectory.subagents} == {Outcome.BUDGET}
    (reply, *_) = replies(trajectory)
    assert [each["status"] for each in reply["results"]] == ["stopped", "stopped"]
    assert (len(trajectory.turns), trajectory.outcome) == (2, Outcome.BUDGET)


def test_max_iterations_is_a_limit_below_the_agents_own(tmp_path: Path) -> None:
    def speaks(first: str, turn: int) -> str:
        if first == "long":
            return called("todo")
        return [called("delegate_task", goal="long", max_iterations=most) for most in (2, 50)][turn]

    (trajectory,) = roll_out(tmp_path, Exact(speaks), Delegating(AgentSettings(max_turns=2)))
    assert [len(each.turns) for each in trajectory.subagents] == [2, 2]
    assert replies(trajectory)[0]["results"][0]["outcome"] == "max_turns"


def test_numbers_go_on_where_a_conversation_does(tmp_path: Path) -> None:
    class Continued(Delegating):
        async def act(self, rollout: Rollout) -> AgentResult:
            await rollout.run_agent()
            return await rollout.continue_agent({"role": "user", "content": "more"})

    def speaks(first: str, turn: int) -> str:
        return "end" if first.startswith("part") or turn % 2 else called("delegate_task", goal=f"part {turn}")

    (trajectory,) = roll_out(tmp_path, Exact(speaks), Continued())
    assert [(each.number, each.turn) for each in trajectory.subagents] == [(1, 1), (2, 3)]
    assert verified(tmp_path).ok


def test_the_wall_clock_of_the_rollout_ends_its_sub_agents(tmp_path: Path) -> None:
    def speaks(first: str, turn: int) -> str | None:
        return None if first == "hangs" else called("delegate_task", goal="hangs")

    (trajectory,) = roll_out(tmp_path, Exact(speaks), Delegating(AgentSettings(budget=Budget(wall_s=0.2))))
    assert trajectory.outcome is Outcome.BUDGET
    assert [each.outcome for each in trajectory.subagents] == [Outcome.CANCELLED]
    assert verified(tmp_path).ok
