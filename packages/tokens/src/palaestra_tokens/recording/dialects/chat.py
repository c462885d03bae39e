"""OpenAI's chat completions: `POST /v1/chat/completions`.

Source: the OpenAI API reference (`CreateChatCompletionRequest`, `ChatCompletion`, `ChatCompletionChunk`), with the
field `reasoning_content` of vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import AssistantMessage, ChatCompletion
from palaestra_tokens.recording.request import (
    AGENTS_OWN,
    ModelRequest,
    Refusal,
    choice_count,
    choose_tools,
    content_parts,
    event,
    flag,
    function_tool,
    ignored_fields,
    invalid,
    items_of,
    refuse_fields,
    required,
    sampling,
    text_field,
    unsupported,
    wants_usage,
)

_REFUSED = ("functions", "function_call", "audio", "prediction", "web_search_options", "logit_bias", "top_logprobs")
_USED = AGENTS_OWN | {
    *("model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "response_format"),
    *("max_completion_tokens", "modalities", "logprobs"),
}
_TEXT = {"type": "text"}


class ChatDialect:
    """Translates chat completions, whose form is also the internal one."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        model = required(body, "model", str)
        refuse_fields(body, _REFUSED)
        if flag(body, "logprobs"):
            raise unsupported("logprobs")
        if body.get("modalities") not in (None, ["text"]):
            raise unsupported("modalities")
        messages = [
            _chat_message(message, number, features)
            for number, message in enumerate(items_of(required(body, "messages", list), "messages"))
        ]
        if not messages:
            raise invalid("messages", "messages is empty")
        n = choice_count(body)
        # The newer name in OpenAI's API, which wins over `max_tokens`.
        limit = body.get("max_completion_tokens")
        request = ModelRequest(
            model=model,
            messages=messages,
            tools=[_tool(tool, number) for number, tool in enumerate(items_of(body.get("tools") or [], "tools"))],
            settings=sampling(body if limit is None else {**body, "max_tokens": limit}),
            n=n,
            stream=flag(body, "stream"),
            stream_usage=wants_usage(body),
            ignored=ignored_fields(body, _USED),
        )
        choose_tools(request, body.get("tool_choice"), features)
        take_response_format(request, body.get("response_format"), features)
        return request

    def reply(self, request: ModelRequest, completion: ChatCompletion, reply_id: str, created: int) -> JSON:
        choices = [
            {
                "index": choice.index,
                "message": _assistant(choice.message),
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for choice in completion.choices
        ]
        return {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion",
            "created": created,
            "model": request.model,
            "choices": choices,
            "usage": usage(completion),
        }

    def stream(self, request: ModelRequest, reply_id: str, created: int) -> ChatStream:
        return ChatStream(request, reply_id, created)

    def error(self, refusal: Refusal) -> JSON:
        return openai_error(refusal)


class ChunkStream:
    """Chunks of choices, as OpenAI streams chat completions and legacy completions. Every chunk has the fields of
    `shared`."""

    def __init__(self, request: ModelRequest, shared: Mapping[str, JSON]) -> None:
        self._usage, self._shared = request.stream_usage, shared

    def ping(self) -> bytes:
        return b": waiting\n\n"

    def failure(self, refusal: Refusal) -> bytes:
        return event(openai_error(refusal))

    def _choice(self, index: int, finish_reason: str | None, **piece: JSON) -> bytes:
        choice = {"index": index, **piece, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._shared, "choices": [choice]})

    def _last(self, completion: ChatCompletion) -> bytes:
        counts = event({**self._shared, "choices": [], "usage": usage(completion)}) if self._usage else b""
        return counts + b"data: [DONE]\n\n"


class ChatStream(ChunkStream):
    """The chunks of one reply."""

    def __init__(self, request: ModelRequest, reply_id: str, created: int) -> None:
        shared = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk"}
        super().__init__(request, {**shared, "created": created, "model": request.model})
        self._sent = {"content": 0, "reasoning_content": 0}

    def begin(self) -> bytes:
        return self._chunk(0, {"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        self._sent["content"] += len(text)
        return self._chunk(0, {"content": text})

    def reasoning(self, text: str) -> bytes:
        self._sent["reasoning_content"] += len(text)
        return self._chunk(0, {"reasoning_content": text})

    def end(self, completion: ChatCompletion) -> bytes:
        written = bytearray()
        for choice in completion.choices:
            message = choice.message
            delta: dict[str, JSON] = {} if choice.index == 0 else {"role": "assistant"}
            for name, text in (("reasoning_content", reasoning_text(message)), ("content", message.content or "")):
                # Only the first choice has been sent in pieces.
                rest = text[self._sent[name] :] if choice.index == 0 else text
                if rest:
                    delta[name] = rest
            if message.tool_calls:
                delta["tool_calls"] = [
                    {"index": index, **call.model_dump()} for index, call in enumerate(message.tool_calls)
                ]
            if delta:
                written += self._chunk(choice.index, delta)
            written += self._chunk(choice.index, {}, choice.finish_reason)
        return bytes(written + self._last(completion))

    def _chunk(self, index: int, delta: JSON, finish_reason: str | None = None) -> bytes:
        return self._choice(index, finish_reason, delta=delta)


def openai_error(refusal: Refusal) -> JSON:
    """Return an error as OpenAI's APIs send it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def usage(completion: ChatCompletion) -> JSON:
    """Return the token counts of a reply."""
    used = completion.usage
    prompt, sampled = (used.prompt_tokens, used.completion_tokens) if used else (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def reasoning_text(message: AssistantMessage) -> str:
    """Return the thinking of a reply."""
    return message.reasoning_content or message.reasoning or ""


def take_response_format(request: ModelRequest, wanted: JSON, features: Collection[str]) -> None:
    """Pass a response format other than text on to the engine. Raises `Refusal` if the engine does not support
    formats."""
    if wanted in (None, _TEXT):
        return
    if not isinstance(wanted, dict):
        raise invalid("response_format", "response_format must be an object")
    if "response_format" not in features:
        raise unsupported("response_format", "The model behind this endpoint does not support an output format.")
    request.settings["response_format"] = wanted


def image_part(part: Mapping[str, JSON], param: str) -> JSON:
    """Return a part that is an image. Raises `Refusal` for any other part."""
    kind = part.get("type")
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        return {"type": "image_url", "image_url": part["image_url"]}
    raise unsupported(param, f"Content of type {kind!r} is not supported by this endpoint.")


def _chat_message(message: Mapping[str, JSON], number: int, features: Collection[str]) -> Message:
    role, content, param = message.get("role"), message.get("content"), f"messages[{number}]"
    if not isinstance(content, str):
        content = content_parts(content, f"{param}.content", features, image_part)
    if role == "tool":
        return {"role": "tool", "tool_call_id": text_field(message, "tool_call_id", param), "content": content}
    # OpenAI's newer name for the role. Chat templates know only `system`.
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role == "user":
        return {"role": "user", "content": content}
    if role != "assistant":
        raise invalid(f"{param}.role", f"{param}.role {role!r} is not a role of this API")
    said: Message = {"role": "assistant", "content": content or message.get("refusal") or ""}
    # vLLM renamed the field, and clients send back what they got.
    for thought in (message.get("reasoning_content"), message.get("reasoning")):
        if thought and isinstance(thought, str):
            said["reasoning_content"] = thought
            break
    if calls := message.get("tool_calls"):
        place = f"{param}.tool_calls"
        said["tool_calls"] = [_checked_call(call, f"{place}[{at}]") for at, call in enumerate(items_of(calls, place))]
    return said


def _checked_call(call: Mapping[str, JSON], param: str) -> dict[str, JSON]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(param, f"{param} has no function")
    place = f"{param}.function"
    named = {"name": text_field(function, "name", place), "arguments": text_field(function, "arguments", place)}
    return {"id": text_field(call, "id", param), "type": "function", "function": named}


def _tool(tool: Mapping[str, JSON], number: int) -> dict[str, JSON]:
    param = f"tools[{number}]"
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise unsupported(param, f"{param} is not a function, the only kind of tool that this endpoint supports")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"), param)


def _assistant(message: AssistantMessage) -> JSON:
    said: dict[str, JSON] = {"role": "assistant", "content": message.content, "refusal": message.refusal}
    if reasoning := reasoning_text(message):
        said["reasoning_content"] = reasoning
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return said
