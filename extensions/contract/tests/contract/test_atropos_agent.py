"""The text agent against a server that answers from a list: what it is shown, what is run, how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manual_clock import ManualClock
from palaestra import AgentResult
from palaestra.agent.loop import LoopSettings
from palaestra.agent.replies import RequestedCall
from palaestra.agent.result import Turn
from palaestra.tools.call_text import ToolCall, ToolResult
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolReply, ToolRun, ToolSchema
from palaestra_contract import AgentConfig, AtroposAgent, HermesAgentLoop
from palaestra_contract.hermes_text import message_text, observation, with_tools
from palaestra_contract.rollout_parts import RolloutServer
from palaestra_slots.core.errors import ConfigError, EngineError, EngineUnavailable, SlotLost
from palaestra_slots.core.types import JSON, Blame, Message, Outcome
from palaestra_tokens import APIServerConfig
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.parsers import get_parser
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat


async def _never(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    raise AssertionError("the agent runs calls through execute_tool")


ADD = ToolSchema("add", "Add {a} and {b}.", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ("a",))
SHELL = ToolSchema("shell", "Run.", {"command": {"type": "string"}, "workdir": {"type": "string"}}, ("command",))
TOOLS = ToolRegistry([FunctionTool(ADD, _never, "test", parallel_safe=True), FunctionTool(SHELL, _never, "test")])


def call(name: str, **arguments: JSON) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply(content: str, finish: str = "stop") -> JSON:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return {
        "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": usage,
    }


class ListServer:
    """Answers from a list of texts or replies; an exception in it is raised, None is never answered.

    Remembers what it was asked.
    """

    def __init__(self, *replies: JSON) -> None:
        self.replies = [reply(each) if isinstance(each, str) else each for each in replies]
        self.requests: list[dict[str, JSON]] = []
        self.stuck = asyncio.Event()

    async def chat_completion(self, **request: JSON) -> JSON:
        self.requests.append({**request, "messages": [dict(message) for message in request["messages"]]})
        answer = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            self.stuck.set()
            await asyncio.Event().wait()
        return answer


async def adding(asked: ToolCall) -> ToolResult:
    if asked.name == "shell":
        return ToolResult(True, json.dumps(asked.arguments), metadata={"exit_code": 0})
    return ToolResult(True, str(asked.arguments["a"] + asked.arguments.get("b", 0)))


def make(
    *replies: JSON, execute: Callable[[ToolCall], Awaitable[ToolResult]] = adding, **options: JSON
) -> tuple[AtroposAgent, ListServer]:
    server = ListServer(*replies)
    fields = {name: options.pop(name) for name in list(options) if name in AgentConfig.__slots__}
    return AtroposAgent(server, TOOLS, AgentConfig(**fields), execute_tool=execute, **options), server


def run(agent: AtroposAgent, task: str = "Add.") -> AgentResult:
    return asyncio.run(agent.run(task))


def test_calls_in_text_are_run_and_answered_in_one_user_turn() -> None:
    odd = f'  Two at once.\n\n{call("add", a=1, b=2)} and <tool_call>{{"name":"add","arguments":{{"a":5}}}}</tool_call>'
    agent, server = make(odd, "3 and 5.")
    result = run(agent)
    system, task, said, seen = server.requests[1]["messages"]
    assert (task, said) == ({"role": "user", "content": "Add."}, {"role": "assistant", "content": odd})
    assert system["content"] == agent._build_system_prompt()
    assert seen == {
        "role": "user",
        "content": '<tool_response>{"success": true, "output": "3"}</tool_response>\n'
        '<tool_response>{"success": true, "output": "5"}</tool_response>',
    }
    assert "tools" not in server.requests[0]
    assert result.messages == [system, task, said, seen, {"role": "assistant", "content": "3 and 5."}]
    assert result.to_messages() == result.messages
    assert (result.success, result.final_response, result.num_steps, result.total_tool_calls) == (
        True,
        "3 and 5.",
        2,
        2,
    )
    assert result.total_tokens == 30
    first, last = result.steps
    assert [each.arguments for each in first.tool_calls] == [{"a": 1, "b": 2}, {"a": 5}]
    assert [each.output for each in first.tool_results] == ["3", "5"]
    assert (first.step_number, first.assistant_message, last.tool_calls) == (1, odd, [])
    assert (result.trajectory_data, result.to_scored_data(1.0)) == (None, None)


def test_a_malformed_call_is_an_error_for_the_model_and_its_sibling_runs() -> None:
    ran: list[ToolCall] = []

    async def noting(asked: ToolCall) -> ToolResult:
        ran.append(asked)
        return await adding(asked)

    broken = '<tool_call>{"name": "add", "arguments": {"a": </tool_call>'
    agent, server = make(
        f"{broken}\n{call('add', a=2)}", '<tool_call>{"nam', call("subtract", a=1), "ok", execute=noting
    )
    result = run(agent)
    assert [each.arguments for each in ran] == [{"a": 2}]
    first, second, third = (request["messages"][-1]["content"] for request in server.requests[1:])
    assert [json.loads(line[15:-16])["success"] for line in first.split("\n")] == [False, True]
    assert "Malformed tool call" in second
    assert "Unknown tool 'subtract'" in third
    assert server.requests[1]["messages"][2]["content"].startswith(broken)
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, len(result.tool_errors)) == (4, 1, 3)
    assert [bool(each.error) for each in result.steps[0].tool_calls] == [True, False]


def test_a_call_cut_off_at_the_length_limit_is_not_run() -> None:
    agent, _ = make(reply('<tool_call>{"name": "add", "arguments": {"a": 1}}', "length"))
    result = run(agent)
    assert (result.outcome, result.success, result.tool_calls_schema_valid) == (Outcome.LENGTH, False, 0)
    assert result.messages[2]["content"].endswith('{"a": 1}}')


def test_a_call_whose_end_tag_went_with_the_stop_string_runs() -> None:
    agent, server = make('<tool_call>{"name": "add", "arguments": {"a": 1}}', "1")
    assert run(agent).tool_calls_schema_valid == 1
    assert not server.requests[1]["messages"][2]["content"].endswith("</tool_call>")


def test_calls_in_thinking_are_thoughts_which_go_back_as_they_were() -> None:
    thought = f"<think>Perhaps {call('add', a=1)}?</think>{call('add', a=2)}"
    agent, server = make(thought, "<think>So two.</think>\nTwo.")
    result = run(agent)
    assert server.requests[1]["messages"][2] == {"role": "assistant", "content": thought}
    assert (result.tool_calls_attempted, result.final_response) == (1, "Two.")
    assert result.messages[-1]["content"] == "<think>So two.</think>\nTwo."
    assert result.reasoning_per_turn[1] == "So two."


def test_the_step_limit_keeps_everything() -> None:
    agent, server = make(call("add", a=1), max_steps=3)
    result = run(agent)
    assert (result.outcome, result.num_steps, len(server.requests)) == (Outcome.MAX_TURNS, 3, 3)
    assert [message["role"] for message in result.messages] == ["system", "user", *["assistant", "user"] * 3]


def test_a_full_context_ends_the_rollout_with_its_record() -> None:
    agent, _ = make(call("add", a=1), limits=LoopSettings(max_context_tokens=15))
    result = run(agent)
    assert (result.outcome, result.num_steps) == (Outcome.LENGTH, 1)
    assert result.steps[0].tool_results[0].output == "1"


@pytest.mark.parametrize(
    ("failure", "outcome", "blame"),
    [
        (EngineUnavailable("gone"), Outcome.API_ERROR, Blame.ENGINE),
        (SlotLost("gone"), Outcome.INFRA_ERROR, Blame.SANDBOX),
    ],
)
def test_a_failure_of_the_world_keeps_the_record(failure: Exception, outcome: Outcome, blame: Blame) -> None:
    async def executing(asked: ToolCall) -> ToolResult:
        if isinstance(failure, SlotLost):
            raise failure
        return await adding(asked)

    agent, _ = make(call("add", a=1), failure, execute=executing)
    result = run(agent)
    assert (result.success, result.outcome, result.blame) == (False, outcome, blame)
    assert "gone" in result.error
    assert result.steps[0].assistant_message == call("add", a=1)
    assert result.messages[-1]["role"] == "user"


async def test_cancellation_leaves_a_complete_record() -> None:
    agent, server = make(call("add", a=1), None)
    running = asyncio.create_task(agent.run("Add."))
    await server.stuck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert agent.result.outcome is Outcome.CANCELLED
    assert [message["role"] for message in agent.result.messages] == ["system", "user", "assistant", "user"]
    assert len(agent.result.steps) == 1


def test_the_delay_lies_between_calls_and_not_before_the_first() -> None:
    clock = ManualClock()
    agent, _ = make(call("add", a=1) + call("add", a=2), call("add", a=3), "6", clock=clock, tool_delay_s=1.5)
    run(agent)
    assert clock.slept == [1.5, 1.5]


def test_the_working_directory_is_where_commands_run_that_do_not_say_where() -> None:
    both = call("shell", command="ls") + call("shell", command="ls", workdir="b") + call("add", a=1)
    agent, _ = make(both, "done", working_dir="a")
    results = run(agent).steps[0].tool_results
    assert [json.loads(each.output)["workdir"] for each in results[:2]] == ["a", "b"]
    assert results[2].success


def test_what_is_asked_for_and_told_on_the_way() -> None:
    told: list[tuple[int, list[str]]] = []

    def on_turn(turn: Turn, added: list[Message]) -> None:
        told.append((turn.number, [message["content"] for message in added]))

    agent, server = make(
        call("add", a=1), "1", on_turn=on_turn, temperature=0.2, max_tokens=7, limits=LoopSettings(extra_body={"x": 1})
    )
    result = run(agent)
    asked = server.requests[0]
    assert (asked["temperature"], asked["max_tokens"], asked["extra_body"], asked["n"]) == (0.2, 7, {"x": 1}, 1)
    contents = [message["content"] for message in result.messages]
    assert told == [(1, contents[2:4]), (2, contents[4:])]


def test_the_prompt_of_the_user_is_never_a_template() -> None:
    agent, _ = make("ok", system_prompt='Answer as {"json": true}.')
    prompt = agent._build_system_prompt()
    assert prompt.startswith('Answer as {"json": true}.\n\n')
    assert "Add {a} and {b}." in prompt
    own = "Mine.\n<tools>\nnone of yours\n</tools>"
    assert with_tools(own, TOOLS.definitions()) == own
    assert with_tools("", []) == ""


async def test_earlier_messages_may_hold_structured_calls_and_a_system_prompt() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    example: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    agent, server = make(call("add", a=2), "2")
    result = await agent.run("Go on.", example)
    shown = server.requests[0]["messages"]
    assert shown[0]["content"].startswith("Be brief.\n\n")
    assert shown[1] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert shown[2]["content"].startswith("<tool_response>")
    assert [len(step.tool_calls) for step in result.steps] == [1, 0]


def test_a_single_turn_with_and_without_its_tools() -> None:
    agent, server = make(f"Let me see. {call('add', a=1)}")
    asked: list[Message] = [{"role": "user", "content": "Add."}]
    step = asyncio.run(agent.run_single_turn(asked))
    assert (step.tool_calls[0].name, step.tool_results[0].output) == ("add", "1")
    step = asyncio.run(agent.run_single_turn(asked, execute_tools=False))
    assert (step.tool_calls[0].arguments, step.tool_results) == ({"a": 1}, [])
    assert step.assistant_message.startswith("Let me see.")
    assert [request["messages"] for request in server.requests] == [asked, asked]
    assert len(asked) == 1
    agent, _ = make(EngineUnavailable("gone"))
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(agent.run_single_turn(asked))


async def test_tool_messages_from_elsewhere_are_shown_as_they_are() -> None:
    agent, server = make("ok")
    earlier: list[Message] = [
        {"role": "tool", "content": text} for text in ('{"success": true, "path": "a"}', "no JSON", "[1]")
    ]
    await agent.run("Go on.", earlier)
    shown = [json.loads(line[15:-16]) for line in server.requests[0]["messages"][1]["content"].split("\n")]
    assert [each["output"] for each in shown] == [message["content"] for message in earlier]


def test_tools_without_anything_to_run_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="execute_tool"):
        AtroposAgent(ListServer("hi"), TOOLS)
    assert run(AtroposAgent(ListServer("hi"))).final_response == "hi"


def test_an_output_that_is_no_text_reaches_the_model_encodable() -> None:
    async def odd(asked: ToolCall) -> ToolResult:
        return ToolResult(True, "a\udcffb")

    agent, _ = make(call("add", a=1), "ok", execute=odd)
    run(agent).messages[3]["content"].encode()


class Failing(ToyEngine):
    """Fails once it has said everything."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        try:
            return await super().generate(input_ids, sampling)
        except RuntimeError as error:
            raise EngineUnavailable("gone") from error


@pytest.mark.parametrize("ends", [True, False])
def test_exact_tokens_are_kept_as_sampled_also_when_the_server_fails(ends: bool) -> None:
    said = [
        f"<think>\nHm: {call('add', a=9)}\n</think>\n\n  {call('add', a=1)}   ",
        f" {call('add')}",
        *["Two."] * ends,
    ]
    tokenizer = toy_tokenizer(said)
    engine = Failing(tokenizer, iter(said), rate=0.3)
    chat = ManagedChat(engine, ChatFormat(tokenizer), "hermes")
    result = run(AtroposAgent(chat, TOOLS, execute_tool=adding))
    assert result.outcome is (Outcome.NATURAL if ends else Outcome.API_ERROR)
    row = result.to_scored_data(0.5)
    assert row is not None
    trained = [mask for mask in row["masks"] if mask != -100]
    assert tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in said)
    assert len(row["tokens"]) == len(row["masks"]) == len(row["inference_logprobs"])
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid) == (2, 1)
    assert result.managed_state is not None
    assert len(result.managed_state["nodes"]) == 1
    assert result.steps[-1].sequence_data is result.trajectory_data
    assert result.final_response == ("Two." if ends else "")


class Exact(TokenChat):
    """A server that continues token ids, and says given texts."""

    def __init__(self, said: Sequence[str]) -> None:
        tokenizer = toy_tokenizer(said)
        super().__init__(APIServerConfig(server_type="vllm", model_name="toy"), tokenizer=tokenizer)
        self.toy = ToyEngine(tokenizer, iter(said), rate=0.3)

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        return await self.toy.generate(input_ids, sampling)


async def one_run(server: ChatServer) -> AgentResult:
    return await AtroposAgent(server=server, tokenizer=object(), tools=TOOLS, execute_tool=adding).run("Add")


async def single_turns(server: ChatServer) -> AgentResult:
    agent = AtroposAgent(server=server, tools=TOOLS, execute_tool=adding)
    messages: list[Message] = agent.opening([{"role": "user", "content": "Add"}])
    for _ in range(2):
        await agent.run_single_turn(messages)
        messages = agent.result.messages
    return agent.result


async def a_loop(server: ChatServer) -> AgentResult:
    async def handle(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        return json.dumps({"output": "2"})

    loop = HermesAgentLoop(server, TOOLS.definitions(), tool_handler=handle)
    return await loop.run([{"role": "user", "content": "Add"}])


KINDS = ("a server", "a group", "a group of two", "a managed server", "the server of a rollout")


@pytest.mark.parametrize("play", [one_run, single_turns, a_loop])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_of_a_class_keeps_the_tokens_of_a_server_that_continues_ids(
    play: Callable[[ChatServer], Coroutine[object, object, AgentResult]], kind: str
) -> None:
    said = [call("add", a=1), "Two."]
    servers = [Exact(said) for _ in range(2 if kind == "a group of two" else 1)]
    group = ServerGroup(servers)
    server: dict[str, ChatServer] = {
        "a server": servers[0],
        "a managed server": group.managed_server(),
        "the server of a rollout": RolloutServer(group, servers[0]),
    }
    result = await play(server.get(kind, group))
    row = result.to_scored_data(0.5)
    assert row is not None
    trained = [mask for mask in row["masks"] if mask != -100]
    assert servers[0].tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in said)
    assert len(row["tokens"]) == len(row["masks"]) == len(row["inference_logprobs"])


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_structured_call_is_read_back_from_its_text(value: JSON) -> None:
    text = message_text(
        "", [RequestedCall("x", "add", json.dumps({"a": value, "tags": "</tool_call><think><tool_call>"}))]
    )
    (read,) = get_parser("hermes").parse(text, tools=TOOLS.definitions(), cut=False).calls
    assert read.arguments == {"a": value, "tags": "</tool_call><think><tool_call>"}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"success": true, "output": 2, "error": "", "metadata": 4}',
        '{"success": true, "output": "", "error": "", "metadata": []}',
    ],
    ids=["deep", "numbers", "list"],
)
def test_an_output_that_looks_like_a_result_is_shown_as_it_is(text: str) -> None:
    element = observation(text)
    assert json.loads(element.removeprefix("<tool_response>").removesuffix("</tool_response>"))["output"] == text


OF_HOOKS: dict[str, JSON] = {
    "exit_code": 0,
    "returncode": 0,
    "sandboxed": True,
    "stdout": "2",
    "stderr": "",
    "cpu_s": 1,
}


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        (OF_HOOKS, {"exit_code": 0}),
        ({**OF_HOOKS, "session_id": "p1"}, {"exit_code": 0, "session_id": "p1"}),
        ({"stdout": "2"}, {"stdout": "2"}),  # of a program's own tool
        ({"exit_code": 3, "timeout": True}, {"exit_code": 3, "timeout": True}),
    ],
)
async def test_a_model_reads_no_metadata_that_hooks_get(metadata: dict[str, JSON], shown: dict[str, JSON]) -> None:
    async def execute(call: ToolCall) -> ToolResult:
        return ToolResult(True, "2", metadata=metadata)

    agent = AtroposAgent(server=Exact([call("add", a=1), "Two."]), tools=TOOLS, execute_tool=execute)
    await agent.run("Add")
    (seen,) = [each["content"] for each in agent.result.messages if "<tool_response>" in str(each["content"])[:20]]
    assert json.loads(seen.removeprefix("<tool_response>").removesuffix("</tool_response>"))["metadata"] == shown
