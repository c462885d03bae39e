"""The official SDKs of OpenAI and Anthropic, as their documentation uses them, against the recording endpoint."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from pydantic import BaseModel

from palaestra_slots.core.errors import ContextExceeded, EngineRefused, EngineUnavailable
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    TextChoice,
    TextCompletion,
    ToolCallMessage,
)
from palaestra_tokens.http.sse import Delta
from palaestra_tokens.recording import CallLimits, Conversations, RecordingEndpoint, RolloutAddress

WEATHER = {
    "type": "object",
    "properties": {"location": {"type": "string"}},
    "required": ["location"],
    "additionalProperties": False,
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: JSON) -> None:
        asyncio.run(test(**fixtures))

    return run


class Scripted(ChatServer):
    """A chat server that gives its replies, or raises its errors, in turn. `asked` has the requests."""

    def __init__(self, *replies: AssistantMessage | Exception, finish: str = "", features: Sequence[str] = ()) -> None:
        self.replies, self.finish, self.features = list(replies), finish, frozenset(features)
        self.asked: list[dict[str, JSON]] = []
        self.begun, self.wait, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.wait.set()

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        on_delta: Callable[[Delta], None] | None = request.pop("on_delta", None)
        self.asked.append({"messages": list(messages), **request})
        self.begun.set()
        try:
            await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        if on_delta is not None:
            if reply.reasoning_content:
                on_delta(Delta(reasoning=reply.reasoning_content))
            for letter in reply.content or "":
                on_delta(Delta(content=letter))
                await asyncio.sleep(0)
        finish = self.finish or ("tool_calls" if reply.tool_calls else "stop")
        usage = CompletionUsage(prompt_tokens=12, completion_tokens=5, total_tokens=17)
        return ChatCompletion(choices=[ChatChoice(message=reply, finish_reason=finish)], usage=usage)

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        self.asked.append({"prompt": prompt, **request})
        usage = CompletionUsage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
        return TextCompletion(choices=[TextChoice(text=" world", finish_reason="length")], usage=usage)


def says(text: str, **more: JSON) -> AssistantMessage:
    return AssistantMessage(content=text, **more)


def calls(*arguments: str, name: str = "get_weather", text: str | None = None) -> AssistantMessage:
    made = [
        ToolCallMessage(id=f"call_1_{number}", function=FunctionCall(name=name, arguments=each))
        for number, each in enumerate(arguments)
    ]
    return AssistantMessage(content=text, tool_calls=made)


@asynccontextmanager
async def serving(server: ChatServer, **options: JSON) -> AsyncIterator[RolloutAddress]:
    async with RecordingEndpoint() as endpoint:
        with endpoint.open(Conversations(server, **options)) as address:
            yield address


@asynccontextmanager
async def openai_client(server: ChatServer, **options: JSON) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(server, **options) as address,
        openai.AsyncOpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(server: ChatServer, **options: JSON) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving(server, **options) as address,
        anthropic.AsyncAnthropic(base_url=address.url, api_key=address.key, max_retries=0) as client,
    ):
        yield client


class Event(BaseModel):
    name: str
    date: str


EVENT = '{"name": "Science Fair", "date": "Friday"}'
CHAT_TOOL: JSON = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}
FLAT_TOOL: JSON = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
CLAUDE_TOOL: JSON = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}


@in_loop
async def test_chat_completion_has_text_usage_and_model() -> None:
    server = Scripted(says("Hi!", reasoning_content="A greeting."))
    async with openai_client(server) as client:
        reply = await client.chat.completions.create(
            model="gpt-5",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            max_completion_tokens=50,
            temperature=0.5,
        )
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason, reply.model) == ("Hi!", "stop", "gpt-5")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (12, 5)
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.asked[0]["max_tokens"] == 50
    assert "temperature" not in server.asked[0]


@in_loop
async def test_chat_tools_go_round_with_the_sampled_arguments() -> None:
    server = Scripted(calls('{"location":  "Paris"}', '{"location": "Bogotá"}'), says("Sunny."))
    async with openai_client(server) as client:
        messages: list[JSON] = [{"role": "user", "content": "Weather in Paris and Bogotá?"}]
        first = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
        messages.append(first.choices[0].message)
        for call in first.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
        second = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "Sunny."
    assert server.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"location":  "Paris"}'


@pytest.mark.parametrize("features", [(), ("on_delta",)])
@in_loop
async def test_chat_streams_text_calls_and_usage(features: Sequence[str]) -> None:
    server = Scripted(calls('{"location": "Paris"}', text="Let me look."), features=features)
    async with openai_client(server) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Weather?"}],
                tools=[CHAT_TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        async with client.chat.completions.stream(
            model="m", messages=[{"role": "user", "content": "Weather?"}], tools=[CHAT_TOOL]
        ) as stream:
            final = await stream.get_final_completion()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Let me look."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 17
    called = final.choices[0].message.tool_calls
    assert called is not None
    assert called[0].function.parsed_arguments == {"location": "Paris"}


@in_loop
async def test_structured_output_needs_an_engine_that_can() -> None:
    async with openai_client(Scripted(says(EVENT), features=["response_format"])) as client:
        parsed = await client.chat.completions.parse(
            model="m", messages=[{"role": "user", "content": "Extract."}], response_format=Event
        )
        answered = await client.responses.parse(model="m", input="Extract.", text_format=Event)
    assert parsed.choices[0].message.parsed == Event(name="Science Fair", date="Friday")
    assert answered.output_parsed == Event(name="Science Fair", date="Friday")
    async with openai_client(Scripted(says(EVENT))) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.parse(model="m", input="Extract.", text_format=Event)
    assert refused.value.param == "response_format"


@in_loop
async def test_images_are_refused_by_name_without_vision() -> None:
    url = f"data:image/png;base64,{PIXEL}"
    parts: JSON = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    async with openai_client(Scripted(says("A pixel."))) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}])
        content: JSON = [{"type": "input_image", "image_url": url, "detail": "auto"}]
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input=[{"role": "user", "content": content}])
    assert refused.value.param == "messages[0].content[1]"
    source: JSON = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    asked: JSON = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    async with anthropic_client(Scripted(says("A pixel."))) as claude:
        with pytest.raises(anthropic.BadRequestError):
            await claude.messages.create(model="m", max_tokens=9, messages=asked)
    seeing = Scripted(says("A pixel."), features=["images"])
    async with anthropic_client(seeing) as claude:
        await claude.messages.create(model="m", max_tokens=9, messages=asked)
    assert seeing.asked[0]["messages"][0]["content"][0]["image_url"]["url"] == url


@in_loop
async def test_responses_tools_and_previous_response() -> None:
    server = Scripted(calls('{"location": "Paris"}', text="Let me look."), says("Sunny."), says("Paris."))
    async with openai_client(server) as client:
        items: list[JSON] = [{"role": "user", "content": "Weather?"}]
        first = await client.responses.create(model="m", instructions="Be kind.", input=items, tools=[FLAT_TOOL])
        items += first.output
        called = next(item for item in first.output if item.type == "function_call")
        items.append({"type": "function_call_output", "call_id": called.call_id, "output": "21"})
        second = await client.responses.create(model="m", instructions="Be kind.", input=items, tools=[FLAT_TOOL])
        third = await client.responses.create(model="m", input="Where?", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="Where?", previous_response_id="resp_other")
    assert (second.output_text, third.output_text) == ("Sunny.", "Paris.")
    assert second.usage is not None
    assert second.usage.output_tokens == 5
    assert [message["role"] for message in server.asked[1]["messages"]] == ["system", "user", "assistant", "tool"]
    roles = [message["role"] for message in server.asked[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("again", [None, "Be brief."])
@pytest.mark.parametrize("instructions", [None, "Be kind."])
@pytest.mark.parametrize("leading", [[], ["Use metres."], ["Use metres.", "Use euros."]])
@in_loop
async def test_a_continued_response_keeps_developer_messages_but_no_instructions(
    leading: list[str], instructions: str | None, again: str | None
) -> None:
    server = Scripted(says("Sunny."))
    items: list[JSON] = [{"role": "developer", "content": each} for each in leading]
    items.append({"role": "user", "content": "Weather?"})
    async with openai_client(server) as client:
        reply = await client.responses.create(model="m", instructions=instructions, input=items)
        for asked in ("Where?", "When?"):
            reply = await client.responses.create(
                model="m", instructions=again, input=asked, previous_response_id=reply.id
            )
    first, *_, last = [request["messages"] for request in server.asked]
    for messages, own in ((first, instructions), (last, again)):
        system = [message["content"] for message in messages if message["role"] == "system"]
        assert system == ["\n\n".join([*([own] if own else []), *leading])][: 1 if own or leading else 0]
    roles = [message["role"] for message in last if message["role"] != "system"]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("features", [(), ("on_delta",)])
@in_loop
async def test_responses_stream(features: Sequence[str]) -> None:
    server = Scripted(calls('{"location": "Paris"}', text="Look."), features=features)
    async with openai_client(server) as client:
        events = [
            event
            async for event in await client.responses.create(model="m", input="Hi", tools=[FLAT_TOOL], stream=True)
        ]
        async with client.responses.stream(model="m", input="Hi", tools=[FLAT_TOOL]) as stream:
            final = await stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Look."
    assert events[-1].type == "response.completed"
    assert [item.type for item in final.output] == ["message", "function_call"]


@in_loop
async def test_responses_custom_tool_and_hosted_tool() -> None:
    server = Scripted(calls('{"input": "*** Begin Patch"}', name="apply_patch"), says("Done."))
    tools: JSON = [{"type": "custom", "name": "apply_patch", "description": "Patch."}, {"type": "web_search"}]
    async with openai_client(server) as client:
        items: list[JSON] = [{"role": "user", "content": "Fix."}]
        raw = await client.responses.with_raw_response.create(model="m", input=items, tools=tools)
        first = raw.parse()
        assert first.output[0].type == "custom_tool_call"
        assert first.output[0].input == "*** Begin Patch"
        items += [*first.output, {"type": "custom_tool_call_output", "call_id": "call_1_0", "output": "ok"}]
        await client.responses.create(model="m", input=items, tools=tools)
    assert raw.headers["x-ignored-fields"] == "tools[1].web_search"
    assert len(server.asked[0]["tools"]) == 1
    function = server.asked[1]["messages"][1]["tool_calls"][0]["function"]
    assert function["arguments"] == '{"input": "*** Begin Patch"}'


@in_loop
async def test_responses_namespaces() -> None:
    server = Scripted(calls('{"location": "Paris"}', name="crm__get_weather"), says("Done."))
    tools: JSON = [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": [FLAT_TOOL]}]
    async with openai_client(server) as client:
        items: list[JSON] = [{"role": "user", "content": "Weather?"}]
        first = await client.responses.create(model="m", input=items, tools=tools)
        (called,) = (item for item in first.output if item.type == "function_call")
        items += [*first.output, {"type": "function_call_output", "call_id": called.call_id, "output": "21"}]
        await client.responses.create(model="m", input=items, tools=tools)
    assert (called.namespace, called.name) == ("crm", "get_weather")
    assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["crm__get_weather"]
    assert server.asked[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "crm__get_weather"


@in_loop
async def test_legacy_completions() -> None:
    async with openai_client(Scripted(says(""))) as client:
        whole = await client.completions.create(model="m", prompt="hello")
        streamed = await client.completions.create(model="m", prompt="hello", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in streamed])
    assert (whole.choices[0].text, whole.choices[0].finish_reason, text) == (" world", "length", " world")


@in_loop
async def test_anthropic_message_with_thinking_tools_and_results() -> None:
    first = calls('{"location":  "Paris"}', text="Let me look.")
    first.reasoning_content = "They want weather."
    server = Scripted(first, says("Sunny."))
    async with anthropic_client(server) as client:
        messages: list[JSON] = [{"role": "user", "content": "Weather?"}]
        reply = await client.messages.create(
            model="claude", max_tokens=500, system="Be kind.", messages=messages, tools=[CLAUDE_TOOL]
        )
        messages.append({"role": "assistant", "content": reply.content})
        used = next(block for block in reply.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "21"}]}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
        last = await client.messages.create(
            model="claude", max_tokens=500, system="Be kind.", messages=messages, tools=[CLAUDE_TOOL]
        )
        counted = await client.messages.count_tokens(model="claude", messages=messages, tools=[CLAUDE_TOOL])
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    assert (reply.stop_reason, last.stop_reason, reply.usage.output_tokens) == ("tool_use", "end_turn", 5)
    asked = server.asked[1]["messages"]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool", "user"]
    assert asked[2]["tool_calls"][0]["function"]["arguments"] == '{"location":  "Paris"}'
    assert counted.input_tokens > 10


@in_loop
async def test_what_only_the_provider_knows_returns_to_it_though_agents_do_not_get_it() -> None:
    signed = calls('{"location": "Paris"}')
    assert signed.tool_calls is not None
    signed.tool_calls[0].extra = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    signed.tool_calls[0].function.extra = {"seal": 1}
    signed.reasoning_details = [{"type": "reasoning.text", "text": "hm", "signature": "s"}]
    server = Scripted(signed, says("Sunny.", extra={"seal": 2}), says("Bye."))
    async with anthropic_client(server) as client:
        messages: list[JSON] = [{"role": "user", "content": "Weather?"}]
        for _ in range(3):
            reply = await client.messages.create(model="c", max_tokens=9, messages=messages, tools=[CLAUDE_TOOL])
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "21"}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or "And then?"})
    back = [each for each in server.asked[2]["messages"] if each["role"] == "assistant"]
    assert back[0]["reasoning_details"] == signed.reasoning_details
    assert back[0]["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "c2ln"}}
    assert back[0]["tool_calls"][0]["function"]["seal"] == 1
    assert back[1]["seal"] == 2


@in_loop
async def test_every_thought_of_a_message_is_kept() -> None:
    server = Scripted(says("Sunny."))
    thoughts: list[JSON] = [{"type": "thinking", "thinking": each, "signature": ""} for each in ("One.", "Two.")]
    async with anthropic_client(server) as client:
        blocks = [thoughts[0], {"type": "text", "text": "Hm."}, thoughts[1]]
        messages: list[JSON] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
        await client.messages.create(
            model="c", max_tokens=9, messages=[*messages, {"role": "user", "content": "b"}], tools=[CLAUDE_TOOL]
        )
    async with openai_client(server) as client:
        items: list[JSON] = [
            {"type": "reasoning", "id": each, "summary": [{"type": "summary_text", "text": each}]}
            for each in ("One.", "Two.")
        ]
        said = {"type": "message", "role": "assistant", "content": "Hm."}
        user = {"role": "user", "content": "b"}
        await client.responses.create(model="c", input=[items[0], said, items[1], user])
    for asked in server.asked:
        (said,) = [each for each in asked["messages"] if each["role"] == "assistant"]
        assert said["reasoning_content"] == "One.\nTwo."


@pytest.mark.parametrize("features", [(), ("on_delta",)])
@in_loop
async def test_anthropic_stream(features: Sequence[str]) -> None:
    server = Scripted(calls('{"location": "Paris"}', text="Look."), features=features)
    async with anthropic_client(server) as client:
        asked: JSON = [{"role": "user", "content": "Weather?"}]
        async with client.messages.stream(model="m", max_tokens=9, messages=asked, tools=[CLAUDE_TOOL]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert text == "Look."
    assert final.stop_reason == "tool_use"
    assert final.content[1].type == "tool_use"
    assert final.content[1].input == {"location": "Paris"}
    assert final.usage.input_tokens == 12


@in_loop
async def test_malformed_arguments_stay_readable_and_return_as_sampled() -> None:
    server = Scripted(calls('{"location": '), says("Sorry."))
    async with anthropic_client(server) as client:
        messages: list[JSON] = [{"role": "user", "content": "Weather?"}]
        async with client.messages.stream(model="m", max_tokens=9, messages=messages, tools=[CLAUDE_TOOL]) as stream:
            reply = await stream.get_final_message()
        assert reply.content[0].type == "tool_use"
        assert reply.content[0].input == {"malformed_arguments": '{"location": '}
        messages.append({"role": "assistant", "content": reply.content})
        result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "no", "is_error": True}
        messages.append({"role": "user", "content": [result]})
        await client.messages.create(model="m", max_tokens=9, messages=messages, tools=[CLAUDE_TOOL])
    assert server.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"location": '


@in_loop
async def test_a_call_without_a_name_reaches_the_client_as_text_and_returns_as_sampled() -> None:
    raw = "<tool_call>weather Paris"
    message = AssistantMessage(
        content="Look. ", tool_calls=[ToolCallMessage(id="c1", function=FunctionCall(name="", arguments=raw))]
    )
    server = Scripted(message, says("Sorry."), message, says("Sorry."))
    said = {"role": "user", "content": "Weather?"}
    async with anthropic_client(server) as client:
        asked: JSON = {"model": "m", "max_tokens": 9, "tools": [CLAUDE_TOOL]}
        async with client.messages.stream(messages=[said], **asked) as stream:
            reply = await stream.get_final_message()
        assert (reply.content[0].text, reply.stop_reason) == (f"Look. {raw}", "end_turn")
        history: JSON = [said, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "Again."}]
        await client.messages.create(messages=history, **asked)
    async with openai_client(server) as openai:
        answered = await openai.responses.create(model="m", input="Weather?")
        assert [(item.type, item.content[0].text) for item in answered.output] == [("message", f"Look. {raw}")]
        await openai.responses.create(model="m", input=[said, *answered.output, {"role": "user", "content": "Again."}])
    for request in (server.asked[1], server.asked[3]):
        sent = request["messages"][1]
        assert sent["content"] == "Look. "
        assert sent["tool_calls"][0]["function"] == {"name": "", "arguments": raw}


@in_loop
async def test_length_is_each_dialects_own_stop_reason() -> None:
    server = Scripted(says("Once upon"), finish="length")
    async with openai_client(server) as client:
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Tell."}])
        answered = await client.responses.create(model="m", input="Tell.")
    async with anthropic_client(server) as claude:
        message = await claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Tell."}])
    assert (chat.choices[0].finish_reason, message.stop_reason) == ("length", "max_tokens")
    assert answered.status == "incomplete"
    assert answered.incomplete_details is not None
    assert answered.incomplete_details.reason == "max_output_tokens"


@in_loop
async def test_errors_have_the_sdks_classes() -> None:
    asked: JSON = [{"role": "user", "content": "Hi"}]
    async with openai_client(Scripted(says("Hi"))) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=asked)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="hi")
        for bad in ({"temperature": 9}, {"n": 99}, {"logprobs": True}, {"messages": [{"role": "x", "content": ""}]}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**{"model": "m", "messages": asked, **bad})
    async with openai_client(Scripted(ContextExceeded("too long"))) as client:
        with pytest.raises(openai.BadRequestError) as exceeded:
            await client.chat.completions.create(model="m", messages=asked)
    assert exceeded.value.code == "context_length_exceeded"
    async with anthropic_client(Scripted(EngineRefused("no"))) as claude:
        with pytest.raises(anthropic.BadRequestError):
            await claude.messages.create(model="m", max_tokens=9, messages=asked)
        with pytest.raises(anthropic.AuthenticationError):
            await claude.with_options(api_key="wrong").messages.create(model="m", max_tokens=9, messages=asked)
        with pytest.raises(anthropic.BadRequestError):
            await claude.messages.create(model="m", max_tokens=0, messages=asked)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_engine_failure_is_the_same_streamed_and_whole(stream: bool) -> None:
    conversations = Conversations(Scripted(EngineUnavailable("gone")))
    async with RecordingEndpoint() as endpoint:
        with endpoint.open(conversations) as address:
            async with openai.AsyncOpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0) as client:
                with pytest.raises(openai.InternalServerError):
                    await client.responses.create(model="m", input="Hi", stream=stream)
    assert conversations.failed.is_set()


@in_loop
async def test_clients_retry_what_may_succeed_and_nothing_else() -> None:
    server = Scripted(says("Hi"))
    server.wait.clear()
    async with openai_client(server, limits=CallLimits(concurrent=1)) as client:
        blocking = asyncio.create_task(client.responses.create(model="m", input="Hi"))
        await server.begun.wait()
        retried = asyncio.create_task(client.with_options(max_retries=5).responses.create(model="m", input="Hi"))
        await asyncio.sleep(0.2)
        server.wait.set()
        assert (await blocking).output_text == "Hi"
        assert (await retried).output_text == "Hi"
    assert len(server.asked) == 2


@in_loop
async def test_a_client_that_gives_up_cancels_its_call() -> None:
    server = Scripted(says("Hi"))
    server.wait.clear()
    conversations = Conversations(server)
    async with RecordingEndpoint() as endpoint:
        with endpoint.open(conversations) as address:
            async with openai.AsyncOpenAI(
                base_url=address.openai_url, api_key=address.key, max_retries=0, timeout=0.2
            ) as client:
                with pytest.raises(openai.APITimeoutError):
                    await client.responses.create(model="m", input="Hi")
                await asyncio.wait_for(server.cancelled.wait(), 10)
                server.wait.set()
                assert (await client.responses.create(model="m", input="Hi")).output_text == "Hi"
    assert sum(len(each.calls) for each in conversations.recorded().every) == 1


@in_loop
async def test_anthropic_structured_output_needs_an_engine_that_can() -> None:
    asked: JSON = [{"role": "user", "content": "Extract."}]
    able = Scripted(says(EVENT), features=["response_format"])
    async with anthropic_client(able) as client:
        parsed = await client.messages.parse(model="m", max_tokens=99, messages=asked, output_format=Event)
    assert parsed.parsed_output == Event(name="Science Fair", date="Friday")
    assert able.asked[0]["response_format"]["type"] == "json_schema"
    async with anthropic_client(Scripted(says(EVENT))) as client:
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.parse(model="m", max_tokens=99, messages=asked, output_format=Event)


@in_loop
async def test_a_forced_call_needs_an_engine_that_can() -> None:
    asked: JSON = [{"role": "user", "content": "Weather?"}]
    choice: JSON = {"type": "tool", "name": "get_weather"}
    forced: JSON = {"type": "function", "function": {"name": "get_weather"}}
    able = Scripted(calls('{"location": "Paris"}'), features=["tool_choice"])
    async with anthropic_client(able) as claude:
        await claude.messages.create(model="m", max_tokens=9, messages=asked, tools=[CLAUDE_TOOL], tool_choice=choice)
    async with openai_client(able) as client:
        await client.chat.completions.create(model="m", messages=asked, tools=[CHAT_TOOL], tool_choice=forced)
        flat: JSON = {"type": "function", "name": "get_weather"}
        await client.responses.create(model="m", input="Weather?", tools=[FLAT_TOOL], tool_choice=flat)
    assert [each["tool_choice"] for each in able.asked] == [forced] * 3
    async with anthropic_client(Scripted(says("No."))) as claude:
        with pytest.raises(anthropic.BadRequestError):
            await claude.messages.create(
                model="m", max_tokens=9, messages=asked, tools=[CLAUDE_TOOL], tool_choice=choice
            )


@in_loop
async def test_anthropics_tool_runner() -> None:
    seen: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(location: str) -> str:
        """The weather.

        Args:
            location: The city.
        """
        seen.append(location)
        return "21 degrees"

    server = Scripted(calls('{"location": "Paris"}', text="Let me look."), says("Sunny."))
    async with anthropic_client(server) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=99, tools=[get_weather], messages=[{"role": "user", "content": "Weather?"}]
        )
        last = await runner.until_done()
    assert (seen, last.content[0].text) == (["Paris"], "Sunny.")
    assert server.asked[1]["messages"][-1]["content"] == "21 degrees"


@pytest.mark.parametrize("features", [(), ("on_delta",)])
@in_loop
async def test_anthropic_streams_thinking(features: Sequence[str]) -> None:
    server = Scripted(says("42", reasoning_content="Six times seven."), features=features)
    async with anthropic_client(server) as client:
        asked: JSON = [{"role": "user", "content": "6 * 7?"}]
        async with client.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
            thought = "".join([event.thinking async for event in stream if event.type == "thinking"])
            final = await stream.get_final_message()
    assert thought == "Six times seven."
    assert [block.type for block in final.content] == ["thinking", "text"]


@in_loop
async def test_structured_output_streams() -> None:
    server = Scripted(says(EVENT), features=["response_format", "on_delta"])
    async with openai_client(server) as client:
        asked: JSON = [{"role": "user", "content": "Extract."}]
        async with client.chat.completions.stream(model="m", messages=asked, response_format=Event) as stream:
            final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Event(name="Science Fair", date="Friday")


@in_loop
async def test_the_clients_without_async_and_the_list_of_models() -> None:
    asked: JSON = [{"role": "user", "content": "Hi"}]

    def used(address: RolloutAddress) -> list[str]:
        client = openai.OpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0)
        claude = anthropic.Anthropic(base_url=address.url, api_key=address.key, max_retries=0)
        with client, claude:
            assert [model.id for model in client.models.list()] == ["policy"]
            assert client.models.retrieve("policy").id == claude.models.retrieve("policy").id == "policy"
            chunks = client.chat.completions.create(model="m", messages=asked, stream=True)
            with claude.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
                streamed = stream.get_final_text()
            joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return [joined, streamed, client.responses.create(model="m", input="Hi").output_text]

    async with serving(Scripted(says("Hi"))) as address:
        assert await asyncio.to_thread(used, address) == ["Hi"] * 3


@in_loop
async def test_anthropics_client_retries_and_gives_up() -> None:
    server = Scripted(says("Hi"))
    server.wait.clear()
    asked: JSON = [{"role": "user", "content": "Hi"}]
    async with anthropic_client(server, limits=CallLimits(concurrent=1)) as client:
        blocking = asyncio.create_task(client.messages.create(model="m", max_tokens=9, messages=asked))
        await server.begun.wait()
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="m", max_tokens=9, messages=asked)
        retrying = client.with_options(max_retries=5)
        retried = asyncio.create_task(retrying.messages.create(model="m", max_tokens=9, messages=asked))
        await asyncio.sleep(0.2)
        server.wait.set()
        assert (await blocking).content == (await retried).content
        server.wait.clear()
        with pytest.raises(anthropic.APITimeoutError):
            await client.with_options(timeout=0.2).messages.create(model="m", max_tokens=9, messages=asked)
        await asyncio.wait_for(server.cancelled.wait(), 10)


@in_loop
async def test_a_failure_within_a_stream_is_an_error_of_the_sdks() -> None:
    class Breaking(Scripted):
        async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
            request["on_delta"](Delta(content="Once"))
            await asyncio.sleep(0.1)
            raise EngineUnavailable("gone")

    asked: JSON = [{"role": "user", "content": "Hi"}]
    async with openai_client(Breaking(features=["on_delta"])) as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="m", messages=asked, stream=True):
                pass
        kinds = [event.type async for event in await client.responses.create(model="m", input="Hi", stream=True)]
        assert kinds[-1] == "response.failed"
    async with anthropic_client(Breaking(features=["on_delta"])) as claude:
        with pytest.raises(anthropic.APIStatusError):
            async with claude.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
                await stream.get_final_message()
