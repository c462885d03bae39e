"""The loop against a server that answers from a list: every ending, every kind of bad call, order, budgets, records."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from manual_clock import ManualClock
from palaestra import AgentResult, Budget
from palaestra.agent.result import Turn
from palaestra_contract import HermesAgentLoop
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineUnavailable,
    SlotLost,
    TaskError,
)
from palaestra_slots.core.types import JSON, Blame, Message, Outcome, Prices

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


def calls(*pairs: tuple[str, str], finish: str = "tool_calls", content: str | None = None) -> JSON:
    """A reply with tool calls, as plain dicts."""
    wanted = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(pairs)
    ]
    return reply(content, finish, tool_calls=wanted)


def reply(content: str | None, finish: str = "stop", **more: JSON) -> JSON:
    message = {"role": "assistant", "content": content, **more}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


class ListServer:
    """Answers from a list; an exception in it is raised. Remembers what it was asked."""

    def __init__(self, *replies: JSON) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, JSON]] = []

    async def chat_completion(self, **request: JSON) -> JSON:
        self.requests.append({**request, "messages": [dict(message) for message in request["messages"]]})
        answer = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def adding(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
    return json.dumps({"sum": arguments["a"] + arguments.get("b", 0)})


def make(
    *replies: JSON, handler: Callable[..., Awaitable[str]] = adding, **options: JSON
) -> tuple[HermesAgentLoop, ListServer]:
    server = ListServer(*replies)
    loop = HermesAgentLoop(server, [ADD, LOOK], {"add", "look"}, tool_handler=handler, task_id="t1", **options)
    return loop, server


def run(loop: HermesAgentLoop) -> AgentResult:
    return asyncio.run(loop.run([{"role": "user", "content": "go"}]))


def tool_texts(result: AgentResult) -> list[JSON]:
    return [json.loads(message["content"]) for message in result.messages if message["role"] == "tool"]


async def test_a_rollout_with_one_call_and_an_answer() -> None:
    loop, server = make(calls(("add", '{"a": 1, "b": 2}')), reply("3"), extra_body={"top_k": 4}, max_tokens=77)
    messages: list[Message] = [{"role": "user", "content": "go"}]
    result = await loop.run(messages)
    assert result.messages is messages
    assert result is loop.result
    assert (result.outcome, result.finished_naturally, result.turns_used) == (Outcome.NATURAL, True, 2)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert messages[2] == {"role": "tool", "tool_call_id": "id0", "content": '{"sum": 3}'}
    assert result.final_response == "3"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.calls) == (20, 10, 2)
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid) == (1, 1)
    first = server.requests[0]
    assert (first["extra_body"], first["max_tokens"], first["temperature"], first["n"]) == ({"top_k": 4}, 77, 1.0, 1)
    assert first["tools"] == [ADD, LOOK]


def test_history_only_grows() -> None:
    loop, server = make(*[calls(("add", '{"a": 1}'))] * 3, reply("done"))
    run(loop)
    histories = [request["messages"] for request in server.requests]
    for earlier, later in itertools.pairwise(histories):
        assert later[: len(earlier)] == earlier


@pytest.mark.parametrize("bad", ['{"a": 1', "[1]", "7", '"x"', "null", '{"a": "one"}', "{}", "", '{"a": 1, "z": 2}'])
def test_a_malformed_call_is_one_error_and_its_siblings_run(bad: str) -> None:
    ran: list[JSON] = []

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        ran.append(arguments)
        return "{}"

    loop, _ = make(calls(("add", '{"a": 1}'), ("add", bad), ("add", '{"a": 3}')), reply("ok"), handler=handler)
    result = run(loop)
    assert ran == [{"a": 1}, {"a": 3}]
    texts = tool_texts(result)
    assert [bool(text.get("error")) for text in texts] == [False, True, False]
    assert [(error.turn, error.tool_name, error.arguments) for error in result.tool_errors] == [(1, "add", bad)]
    assert json.loads(result.tool_errors[0].tool_result) == texts[1]
    assert result.messages[1]["tool_calls"][1]["function"]["arguments"] == bad
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid) == (3, 2)


def test_the_empty_string_means_no_arguments_where_none_are_required() -> None:
    seen: list[JSON] = []

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        seen.append((name, arguments, task_id))
        return "{}"

    run(make(calls(("look", "")), reply("ok"), handler=handler)[0])
    assert seen == [("look", {}, "t1")]


def test_an_unknown_tool_is_kept_and_answered_in_the_contracts_words() -> None:
    result = run(make(calls(("rm", "{}")), reply("ok"))[0])
    assert tool_texts(result) == [{"error": "Unknown tool 'rm'. Available tools: ['add', 'look']"}]
    assert result.messages[1]["tool_calls"][0]["function"]["name"] == "rm"
    assert [error.tool_name for error in result.tool_errors] == ["rm"]


def test_a_tool_that_raises_is_answered_in_the_contracts_words() -> None:
    async def broken(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        raise KeyError("nope")

    result = run(make(calls(("add", '{"a": 1}')), reply("ok"), handler=broken)[0])
    assert tool_texts(result) == [{"error": "Tool execution failed: KeyError: 'nope'"}]
    assert result.outcome is Outcome.NATURAL
    assert len(result.tool_errors) == 1


def test_a_lost_sandbox_ends_the_rollout_and_is_never_shown() -> None:
    async def lost(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        raise SlotLost("slot 7 died")

    loop, server = make(calls(("add", '{"a": 1}'), ("add", '{"a": 2}')), reply("ok"), handler=lost)
    result = run(loop)
    assert result.outcome is Outcome.INFRA_ERROR
    assert not result.outcome.scored
    assert "slot 7 died" in result.error
    assert result.blame is Blame.SANDBOX
    assert len(server.requests) == 1
    assert "slot 7" not in json.dumps(result.messages)
    answered = [message["tool_call_id"] for message in result.messages if message["role"] == "tool"]
    assert answered == ["id0", "id1"]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ('{"output": "x", "exit_code": 1, "error": "Exit code: 1"}', 0),
        ('{"output": "", "exit_code": -1, "error": "no shell"}', 1),
        ('{"error": "No such file: a"}', 1),
        ('{"error": null, "output": ""}', 0),
        ('{"error": broken', 0),
        ("plain text about an error", 0),
    ],
)
def test_which_replies_count_as_tool_errors(text: str, counts: int) -> None:
    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        return text

    assert len(run(make(calls(("add", '{"a": 1}')), reply("ok"), handler=handler)[0]).tool_errors) == counts


async def test_parallel_safe_calls_run_together_and_keep_their_order() -> None:
    log: list[str] = []
    both = asyncio.Barrier(2)

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        log.append(name)
        if name == "look":  # passes only when two are inside at once
            await both.wait()
        return json.dumps({"from": name, "n": arguments.get("n", 0)})

    wanted = calls(("look", '{"n": 1}'), ("rm", "{}"), ("look", '{"n": 2}'), ("add", '{"a": 1}'))
    server = ListServer(wanted, reply("ok"))
    anything = {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    loop = HermesAgentLoop(
        server,
        [ADD, {"type": "function", "function": anything}],
        {"add", "look"},
        tool_handler=handler,
        parallel_safe={"look"},
    )
    result = await loop.run([{"role": "user", "content": "go"}])
    assert log == ["look", "look", "add"]
    assert [text.get("n") for text in tool_texts(result)] == [1, None, 2, 0]
    assert [m["tool_call_id"] for m in result.messages if m["role"] == "tool"] == ["id0", "id1", "id2", "id3"]


def test_calls_that_are_not_parallel_safe_never_overlap() -> None:
    inside = 0

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        return "{}"

    result = run(make(calls(*[("add", '{"a": 1}')] * 4), reply("ok"), handler=handler)[0])
    assert result.tool_errors == []


def test_infra_failure_among_parallel_calls_ends_the_rollout() -> None:
    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        if arguments["a"] == 2:
            raise SlotLost("gone")
        await asyncio.Event().wait()
        return "{}"

    loop, _ = make(calls(("add", '{"a": 1}'), ("add", '{"a": 2}')), handler=handler, parallel_safe={"add"})
    assert run(loop).outcome is Outcome.INFRA_ERROR


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_content": "think"},
        {"reasoning": "think"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "think"}, {"type": "encrypted", "data": "x"}]},
    ],
)
def test_reasoning_is_kept_from_all_three_fields(field: dict[str, JSON]) -> None:
    result = run(make(reply("hi", **field))[0])
    assert result.reasoning_per_turn == ["think"]
    said = {"role": "assistant", "content": "hi", "reasoning_content": "think"}
    # Blocks of a provider may contain more than their text, so they go back to it.
    more = {name: value for name, value in field.items() if name == "reasoning_details"}
    assert result.messages[-1] == said | more


def test_calls_as_objects_and_without_ids() -> None:
    function = SimpleNamespace(name="add", arguments={"a": 4})
    message = SimpleNamespace(
        content=None, tool_calls=[SimpleNamespace(id=None, type="function", function=function)] * 2
    )
    completion = SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="tool_calls")], usage=None)
    result = run(make(completion, reply("ok"))[0])
    assert [call["id"] for call in result.messages[1]["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert tool_texts(result) == [{"sum": 4}, {"sum": 4}]


def test_a_call_cut_off_by_length_is_malformed_and_ends_the_rollout() -> None:
    result = run(make(calls(("add", '{"a": 1, "b'), finish="length"))[0])
    assert result.outcome is Outcome.LENGTH
    assert not result.finished_naturally
    assert "cut off" in tool_texts(result)[0]["error"]
    assert len(result.tool_errors) == 1


@pytest.mark.parametrize("full", [None, 12], ids=["", "context full"])
@pytest.mark.parametrize(
    ("limit", "cause"), [(None, "window"), (100, "window"), (5, "its limit of 5 tokens"), (4, "its limit of 4 tokens")]
)
def test_text_cut_off_by_length_names_its_cause(limit: int | None, cause: str, full: int | None) -> None:
    loop, _ = make(reply("so I thi", "length"), max_tokens=limit, max_context_tokens=full)
    result = run(loop)
    assert result.outcome is Outcome.LENGTH
    assert result.error.startswith("the reply was cut off")
    assert cause in result.error
    assert ("window" in result.error) == (cause == "window")


def test_whole_calls_in_a_cut_reply_still_run() -> None:
    result = run(make(calls(("add", '{"a": 1}'), ("add", '{"a"'), finish="length"), reply("ok"))[0])
    assert result.outcome is Outcome.NATURAL
    assert result.turns[0].finish_reason == "length"
    assert tool_texts(result)[0] == {"sum": 1}


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_reply_is_natural(content: str | None) -> None:
    result = run(make(reply(content))[0])
    assert result.outcome is Outcome.NATURAL
    assert result.messages[-1] == {"role": "assistant", "content": ""}


def test_a_conversation_goes_on_after_its_end() -> None:
    first = run(make(calls(("add", '{"a": 1}')), reply("done"), max_turns=2)[0])
    first.messages.append({"role": "user", "content": "and again"})
    again, server = make(calls(("add", '{"a": 2}')), max_turns=2)
    result = asyncio.run(again.run(first.messages, after=first))
    assert (result.outcome, result.turns_used, result.usage.calls) == (Outcome.MAX_TURNS, 4, 4)
    assert [turn.number for turn in result.turns] == [1, 2, 3, 4]
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid) == (3, 3)
    assert server.requests[0]["messages"] == first.messages[:5]
    assert not result.finished_naturally
    assert first.outcome is Outcome.NATURAL


def test_max_turns() -> None:
    result = run(make(calls(("add", '{"a": 1}')), max_turns=3)[0])
    assert (result.outcome, result.turns_used, result.finished_naturally) == (Outcome.MAX_TURNS, 3, False)
    assert result.messages[-1]["role"] == "tool"


@pytest.mark.parametrize(
    "failure", [EngineUnavailable("no server at x"), RuntimeError("no server at x"), {"choices": []}]
)
def test_a_failing_server_is_an_outcome_with_its_text(failure: JSON) -> None:
    result = run(make(calls(("add", '{"a": 1}')), failure)[0])
    assert result.outcome is Outcome.API_ERROR
    assert "no server at x" in result.error or "no choices" in result.error
    assert result.turns_used == 1
    assert result.blame is Blame.ENGINE
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool"]


def test_a_conversation_that_outgrows_the_window_is_length_but_a_prompt_that_never_fitted_is_not() -> None:
    assert run(make(calls(("add", '{"a": 1}')), ContextExceeded("8192"))[0]).outcome is Outcome.LENGTH
    assert run(make(ContextExceeded("8192"))[0]).outcome is Outcome.API_ERROR


@pytest.mark.parametrize("error", [TaskError("t1 has no solution"), NotImplementedError("dummy")])
def test_configuration_errors_are_raised_with_the_result_complete(error: Exception) -> None:
    loop, _ = make(error)
    with pytest.raises(type(error)):
        run(loop)
    assert loop.result.outcome is Outcome.INFRA_ERROR
    assert str(error) in loop.result.error


def test_a_schema_that_is_none_is_refused_at_once() -> None:
    HermesAgentLoop(ListServer(), [], set()).resize_tool_pool(8)
    broken = {"type": "function", "function": {"name": "add", "parameters": {"type": "nonsense"}}}
    with pytest.raises(ConfigError, match="schema"):
        HermesAgentLoop(ListServer(), [broken], {"add"}, tool_handler=adding)


async def test_cancellation_leaves_a_complete_result() -> None:
    cancelled: list[str] = []
    started = asyncio.Event()

    async def handler(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        if arguments["a"] == 1:
            return '{"sum": 1}'
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("command killed")
        return ""

    loop, _ = make(calls(("add", '{"a": 1}'), ("add", '{"a": 2}'), ("add", '{"a": 3}')), handler=handler)
    task = asyncio.create_task(loop.run([{"role": "user", "content": "go"}]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result = loop.result
    assert cancelled == ["command killed"]
    assert (result.outcome, result.error, result.finished_naturally) == (Outcome.CANCELLED, "cancelled", False)
    assert [m["tool_call_id"] for m in result.messages if m["role"] == "tool"] == ["id0", "id1", "id2"]
    assert tool_texts(result)[0] == {"sum": 1}
    assert all("Not finished" in text["error"] for text in tool_texts(result)[1:])


def test_budgets() -> None:
    again = calls(("add", '{"a": 1}'))
    by_turns = run(make(again, budget=Budget(turns=2))[0])
    assert (by_turns.outcome, by_turns.turns_used) == (Outcome.BUDGET, 2)
    loop, server = make(again, budget=Budget(completion_tokens=12), max_tokens=8)
    by_tokens = run(loop)
    assert (by_tokens.outcome, by_tokens.turns_used) == (Outcome.BUDGET, 3)
    assert [request["max_tokens"] for request in server.requests] == [8, 7, 2]
    assert "12 completion tokens" in by_tokens.error


@pytest.mark.parametrize(
    ("budget", "turns", "says"),
    [
        (Budget(tokens=31), 3, "31 tokens used up (45)"),
        (Budget(cost=40, prices=Prices(1e6, 2e6)), 2, "cost budget of 40 used up (40)"),
        (Budget(output_bytes=25), 3, "25 bytes of tool output used up (30)"),
    ],
)
def test_budgets_of_tokens_cost_and_output(budget: Budget, turns: int, says: str) -> None:
    """A call reads 10 tokens and writes 5; each result has 10 bytes."""
    result = run(make(calls(("add", '{"a": 1}')), budget=budget)[0])
    assert (result.outcome, result.turns_used) == (Outcome.BUDGET, turns)
    assert says in result.error


def test_the_wall_clock_budget_is_looked_at_between_turns() -> None:
    clock = ManualClock()

    async def slow(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        await clock.sleep(40)
        return "{}"

    result = run(make(calls(("add", '{"a": 1}')), handler=slow, clock=clock, budget=Budget(wall_s=100))[0])
    assert (result.outcome, result.turns_used) == (Outcome.BUDGET, 3)
    assert [turn.tool_s for turn in result.turns] == [40.0, 40.0, 40.0]


def test_the_wall_clock_budget_cuts_off_a_call_that_hangs_and_reports_its_turn() -> None:
    reported: list[tuple[Turn, list[Message]]] = []

    async def hangs(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        await asyncio.Event().wait()
        return ""

    loop, _ = make(
        calls(("add", '{"a": 1}')),
        handler=hangs,
        budget=Budget(wall_s=0.01),
        on_turn=lambda turn, new: reported.append((turn, new)),
    )
    result = run(loop)
    assert result.outcome is Outcome.BUDGET
    assert [message["role"] for message in reported[0][1]] == ["assistant", "tool"]


def test_a_timeout_of_a_tools_own_is_the_tools_answer() -> None:
    async def times_out(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        raise TimeoutError("too slow")

    result = run(make(calls(("add", '{"a": 1}')), reply("ok"), handler=times_out, budget=Budget(wall_s=60))[0])
    assert result.outcome is Outcome.NATURAL
    assert tool_texts(result) == [{"error": "Tool execution failed: TimeoutError: too slow"}]


def test_the_context_limit_counts_what_the_engine_counted_and_what_came_after() -> None:
    async def big(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        return "x" * 400

    assert run(make(calls(("add", '{"a": 1}')), reply("ok"), handler=big, max_context_tokens=200)[0]).turns_used == 2
    result = run(make(calls(("add", '{"a": 1}')), reply("ok"), handler=big, max_context_tokens=110)[0])
    assert (result.outcome, result.turns_used) == (Outcome.LENGTH, 1)


def test_every_turn_is_reported_with_the_messages_it_added() -> None:
    seen: list[Message] = []
    turns: list[Turn] = []

    async def on_turn(turn: Turn, new: list[Message]) -> None:
        await asyncio.sleep(0)
        turns.append(turn)
        seen.extend(new)

    result = run(make(calls(("add", '{"a": 1}'), ("rm", "")), reply("ok"), on_turn=on_turn)[0])
    assert seen == result.messages[1:]
    assert turns == result.turns
    assert [turn.tool_names for turn in turns] == [("add", "rm"), ()]


def test_a_failing_record_is_raised() -> None:
    def full(turn: Turn, new: list[Message]) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(make(reply("ok"), on_turn=full)[0])


def test_managed_state_is_attached() -> None:
    class Managed(ListServer):
        def get_state(self) -> dict[str, JSON]:
            return {"nodes": [len(self.requests)]}

    loop = HermesAgentLoop(Managed(reply("ok")), [], set())
    assert run(loop).managed_state == {"nodes": [1]}


def test_memory_is_not_available_in_rollouts() -> None:
    server = ListServer(calls(("memory", "{}")), reply("ok"))
    result = run(HermesAgentLoop(server, [], {"memory"}, tool_handler=adding))
    assert tool_texts(result) == [{"error": "Memory is not available in RL environments."}]


async def test_what_a_handler_answers_can_always_be_sent_on() -> None:
    async def handler(name: str, arguments: JSON, task_id: str | None) -> str:
        return json.dumps({"files": ["caf\udce9"]}, ensure_ascii=False)

    server = ListServer(calls(("add", '{"a": 1}'), ("z" * 10_000, "{}")), reply("done"))
    loop = HermesAgentLoop(server, [ADD], {"add"}, tool_handler=handler)
    result = await loop.run([{"role": "user", "content": "hi"}])
    answers = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert answers[0].encode() == b'{"files": ["caf?"]}'
    assert len(answers[1]) < 1000
