"""Anthropic's messages: `POST /v1/messages`, and `/v1/messages/count_tokens`.

Source: the Anthropic API reference (Messages, streaming messages, errors). Tools that Anthropic's servers run, or whose
schema Anthropic's models know, are reported as ignored. A call's arguments are an object in this dialect; malformed
arguments appear as `{"malformed_arguments": TEXT}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.recording.dialects.chat import reasoning_text, take_response_format
from palaestra_tokens.recording.request import (
    ModelRequest,
    Refusal,
    as_object,
    choose_tools,
    client_form,
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
)

_REFUSED = ("container", "mcp_servers")
_USED = frozenset(
    {
        *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences"),
        *("stream", "output_config", "output_format"),
    }
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class MessagesDialect:
    """Translates content blocks to messages, and a reply to blocks."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        model = required(body, "model", str)
        refuse_fields(body, _REFUSED)
        request = ModelRequest(model=model, stream=flag(body, "stream"), ignored=ignored_fields(body, _USED))
        reader = _MessageReader(request, features)
        if body.get("system"):
            system = content_parts(body["system"], "system", features, _no_image)
            request.messages.append({"role": "system", "content": system})
        for number, message in enumerate(items_of(required(body, "messages", list), "messages")):
            reader.take(message, f"messages[{number}]")
        if not any(message["role"] != "system" for message in request.messages):
            raise invalid("messages", "messages: at least one message is required")
        named = {name: body.get(name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        request.settings = sampling({**named, "stop": body.get("stop_sequences") or None})
        for number, tool in enumerate(items_of(body.get("tools") or [], "tools")):
            # Other types have no schema in the request: Anthropic's servers run them, or only its models know them.
            # Tools with other types run on Anthropic's servers, such as web_search; no other server has them.
            if tool.get("type") not in (None, "custom"):
                request.ignored.append(f"tools[{number}].{tool['type']}")
                continue
            request.tools.append(
                function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), f"tools[{number}]")
            )
        choose_tools(request, _choice(body.get("tool_choice")), features)
        config = body.get("output_config")
        # `output_format` is the older name, from the beta of structured outputs.
        wanted = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
        if isinstance(wanted, dict):
            if wanted.get("type") != "json_schema":
                raise invalid("output_config.format", "the output format must be of type json_schema")
            schema = {"name": "output", "schema": wanted.get("schema"), "strict": True}
            take_response_format(request, {"type": "json_schema", "json_schema": schema}, features)
        return request

    def reply(self, request: ModelRequest, completion: ChatCompletion, reply_id: str, created: int) -> JSON:
        message = client_form(completion.choices[0].message)
        blocks: list[JSON] = []
        if reasoning := reasoning_text(message):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls or ():
            used = as_object(call.function.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": used})
        return {
            **_envelope(request, reply_id),
            "content": blocks,
            "stop_reason": _stop_reason(completion),
            "usage": _usage(completion),
        }

    def stream(self, request: ModelRequest, reply_id: str, created: int) -> MessagesStream:
        return MessagesStream(request, reply_id)

    def error(self, refusal: Refusal) -> JSON:
        return _error(refusal)


class _MessageReader:
    """Converts messages with blocks and appends them to a request's messages."""

    def __init__(self, request: ModelRequest, features: Collection[str]) -> None:
        self._request, self._features = request, features

    def take(self, message: Mapping[str, JSON], param: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{param}.role", f"{param}.role {role!r} is not a role of this API")
        if isinstance(content, str):
            self._request.messages.append({"role": role, "content": content})
            return
        blocks = items_of(content, f"{param}.content")
        if role == "assistant":
            self._assistant(blocks, param)
        else:
            self._user(str(role), blocks, param)

    def _assistant(self, blocks: Collection[Mapping[str, JSON]], param: str) -> None:
        said: Message = {"role": "assistant", "content": ""}
        texts: list[str] = []
        thoughts: list[str] = []
        for number, block in enumerate(blocks):
            kind, place = block.get("type"), f"{param}.content[{number}]"
            if kind == "text":
                texts.append(text_field(block, "text", place))
            elif kind == "thinking":
                thoughts.append(text_field(block, "thinking", place))
            elif kind == "redacted_thinking":
                self._request.ignored.append(place)
            elif kind == "tool_use":
                name, call_id = text_field(block, "name", place), text_field(block, "id", place)
                function = {"name": name, "arguments": block.get("input")}  # becomes text in `restore`
                said.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            else:
                raise unsupported(place, f"Content of type {kind!r} is not supported by this endpoint.")
        said["content"] = "".join(texts)
        if thoughts:
            said["reasoning_content"] = "\n".join(thoughts)
        self._request.messages.append(said)

    def _user(self, role: str, blocks: Collection[Mapping[str, JSON]], param: str) -> None:
        """Append tool results as separate messages, before the other blocks."""
        rest = []
        for number, block in enumerate(blocks):
            place = f"{param}.content[{number}]"
            if block.get("type") != "tool_result":
                rest.append(block)
                continue
            # Anthropic's format has results and text in one message; templates expect each result right after its call.
            content = content_parts(block.get("content"), f"{place}.content", self._features, _image_part)
            call_id = text_field(block, "tool_use_id", place)
            self._request.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            if block.get("is_error"):
                self._request.ignored.append(f"{place}.is_error")
        if rest:
            content = content_parts(rest, f"{param}.content", self._features, _image_part)
            self._request.messages.append({"role": role, "content": content})


def _no_image(part: Mapping[str, JSON], param: str) -> JSON:
    raise unsupported(param, f"Content of type {part.get('type')!r} is not supported by this endpoint.")


def _image_part(part: Mapping[str, JSON], param: str) -> JSON:
    source = part.get("source")
    if part.get("type") != "image" or not isinstance(source, dict):
        return _no_image(part, param)
    if source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": text_field(source, "url", param)}}
    media, data = text_field(source, "media_type", param), text_field(source, "data", param)
    return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}


def _choice(choice: JSON) -> JSON:
    """Return `tool_choice` in the shape of chat completions."""
    if not isinstance(choice, dict):
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(str(kind), kind)


def _stop_reason(completion: ChatCompletion) -> str:
    reason = completion.choices[0].finish_reason or "stop"
    if reason == "tool_calls" and not client_form(completion.choices[0].message).tool_calls:
        reason = "stop"  # the calls were malformed, so the client gets text
    return _STOP_REASONS.get(reason, "end_turn")


def _usage(completion: ChatCompletion | None) -> dict[str, JSON]:
    used = completion.usage if completion is not None else None
    return {
        "input_tokens": used.prompt_tokens if used else 0,
        "output_tokens": used.completion_tokens if used else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _envelope(request: ModelRequest, reply_id: str) -> dict[str, JSON]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(None),
    }


def _error(refusal: Refusal) -> JSON:
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


class MessagesStream:
    """The events of one reply. Text and thinking may be sent in pieces; each call is sent whole."""

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        self._request, self._id = request, reply_id
        self._index, self._open = 0, ""
        self._sent = {"text": 0, "thinking": 0}

    def begin(self) -> bytes:
        return _typed_event({"type": "message_start", "message": _envelope(self._request, self._id)})

    def text(self, text: str) -> bytes:
        return self._piece("text", {"type": "text", "text": ""}, text)

    def reasoning(self, text: str) -> bytes:
        return self._piece("thinking", {"type": "thinking", "thinking": "", "signature": ""}, text)

    def end(self, completion: ChatCompletion) -> bytes:
        message, written = client_form(completion.choices[0].message), bytearray()
        if rest := reasoning_text(message)[self._sent["thinking"] :]:
            written += self.reasoning(rest)
        if rest := (message.content or "")[self._sent["text"] :]:
            written += self.text(rest)
        written += self._end_block()
        for call in message.tool_calls or ():
            # In a stream, a call begins with an empty input, and its arguments follow as text. Source: "Input JSON
            # delta" in Anthropic's documentation of streaming.
            used: dict[str, JSON] = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
            written += self._begin_block("tool_use", used)
            text = call.function.arguments
            value = as_object(text)
            if "malformed_arguments" in value:  # the client joins and parses the pieces
                text = msgspec.json.encode(value).decode()
            written += self._delta({"type": "input_json_delta", "partial_json": text})
            written += self._end_block()
        ended = {"stop_reason": _stop_reason(completion), "stop_sequence": None}
        written += _typed_event({"type": "message_delta", "delta": ended, "usage": _usage(completion)})
        return bytes(written + _typed_event({"type": "message_stop"}))

    def ping(self) -> bytes:
        return _typed_event({"type": "ping"})

    def failure(self, refusal: Refusal) -> bytes:
        return _typed_event(_error(refusal))

    def _piece(self, kind: str, block: dict[str, JSON], text: str) -> bytes:
        begun = b"" if self._open == kind else self._end_block() + self._begin_block(kind, block)
        self._sent[kind] += len(text)
        return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _begin_block(self, kind: str, block: dict[str, JSON]) -> bytes:
        self._open = kind
        return _typed_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: JSON) -> bytes:
        return _typed_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        self._open, index = "", self._index
        self._index += 1
        return _typed_event({"type": "content_block_stop", "index": index})


def _typed_event(data: dict[str, JSON]) -> bytes:
    return event(data, data["type"])
