"""OpenAI's responses: `POST /v1/responses`.

Source: the OpenAI API reference (`CreateResponse`, `Response`, `ResponseStreamEvent`). Functions are offered to the
model as they are, free-form tools as functions with one text parameter, `input`, and the functions of a namespace as
`NAMESPACE__NAME`. Tools that OpenAI's servers run are reported as ignored, because this endpoint cannot run them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import AssistantMessage, ChatCompletion, ToolCallMessage
from palaestra_tokens.recording.dialects.chat import openai_error, reasoning_text, take_response_format
from palaestra_tokens.recording.request import (
    ModelRequest,
    Refusal,
    choose_tools,
    client_form,
    content_parts,
    event,
    flag,
    freeform_text,
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

_REFUSED = ("background", "conversation", "prompt", "max_tool_calls", "top_logprobs")
_USED = frozenset(
    {
        *("model", "input", "instructions", "tools", "tool_choice", "stream", "text", "max_output_tokens"),
        *("previous_response_id", "metadata", "stop"),
    }
)
_ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p", "max_output_tokens", "tools")


class ResponsesDialect:
    """Translates input items to messages, and a reply to output items."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        model = required(body, "model", str)
        refuse_fields(body, _REFUSED)
        given = required(body, "input", (str, list))
        messages: list[Message] = []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else items_of(given, "input")
        reader = _InputReader(messages, features)
        for number, item in enumerate(items):
            reader.take(item, f"input[{number}]")
        reader.finish()
        settings = sampling({**body, "max_tokens": body.get("max_output_tokens")})
        request = ModelRequest(
            model=model,
            messages=messages,
            instructions=_text_or_none(body, "instructions"),
            continues=_text_or_none(body, "previous_response_id"),
            settings=settings,
            stream=flag(body, "stream"),
            ignored=ignored_fields(body, _USED) + reader.ignored,
            echo={name: body.get(name) for name in _ECHOED},
        )
        self._take_tools(request, body)
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "function":
            # In this API, the name is next to the type; chat completions have it one level below.
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        choose_tools(request, choice, features)
        text = body.get("text")
        if isinstance(text, dict):
            request.ignored += [f"text.{name}" for name in sorted(text) if name != "format" and text[name] is not None]
            take_response_format(request, _chat_format(text.get("format")), features)
        return request

    def _take_tools(self, request: ModelRequest, body: Mapping[str, JSON]) -> None:
        freeform: set[str] = set()
        for number, tool in enumerate(items_of(body.get("tools") or [], "tools")):
            param, space = f"tools[{number}]", tool.get("name")
            if tool.get("type") != "namespace":
                self._take_tool(request, tool, param, freeform)
                continue
            if not isinstance(space, str) or not space:
                raise invalid(param, f"{param} has no name")
            for place, member in enumerate(items_of(tool.get("tools") or [], f"{param}.tools")):
                name = member.get("name")
                if isinstance(name, str) and name:
                    # Chat completions have no namespaces, so the name carries it, and the reply is taken apart again.
                    request.namespaces[_flat(space, name)] = space, name
                    member = {**member, "name": _flat(space, name)}
                self._take_tool(request, member, f"{param}.tools[{place}]", freeform)
        request.freeform = frozenset(freeform)

    def _take_tool(self, request: ModelRequest, tool: Mapping[str, JSON], param: str, freeform: set[str]) -> None:
        kind = tool.get("type")
        if kind == "function":
            offered = function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), param)
        elif kind == "custom":
            schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            offered = function_tool(tool.get("name"), tool.get("description"), schema, param)
            freeform.add(tool["name"])
        else:
            request.ignored.append(f"{param}.{kind}")
            return
        request.tools.append(offered)

    def reply(self, request: ModelRequest, completion: ChatCompletion, reply_id: str, created: int) -> JSON:
        items = list(_items(request, client_form(completion.choices[0].message), reply_id))
        return _response(request, reply_id, created, items, completion)

    def stream(self, request: ModelRequest, reply_id: str, created: int) -> ResponsesStream:
        return ResponsesStream(request, reply_id, created)

    def error(self, refusal: Refusal) -> JSON:
        return openai_error(refusal)


class _InputReader:
    """Appends items of input to messages. Consecutive assistant items form one message, because one reply may have
    several items."""

    def __init__(self, messages: list[Message], features: Collection[str]) -> None:
        self._messages, self._features = messages, features
        self._texts: dict[int, list[str]] = {}  # texts of assistant messages, by position
        self.ignored: list[str] = []

    def take(self, item: Mapping[str, JSON], param: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, param)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(item, kind, param)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = content_parts(item.get("output"), f"{param}.output", self._features, _content_part)
            call_id = text_field(item, "call_id", param)
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            self._reasoning(item, param)
        else:
            raise unsupported(param, f"Input items of type {kind!r} are not supported by this endpoint.")

    def finish(self) -> None:
        """Write the assistant's texts into its messages. Each text is joined only once, because an agent may send a
        million pieces."""
        for place, texts in self._texts.items():
            self._messages[place]["content"] = "".join(texts)

    def _add_message(self, item: Mapping[str, JSON], param: str) -> None:
        role = item.get("role")
        content = content_parts(item.get("content"), f"{param}.content", self._features, _content_part)
        if role == "assistant":
            self._assistant()
            self._texts.setdefault(len(self._messages) - 1, []).append(str(content))
        elif role in ("user", "system", "developer"):
            self._messages.append({"role": "user" if role == "user" else "system", "content": content})
        else:
            raise invalid(f"{param}.role", f"{param}.role {role!r} is not a role of this API")

    def _add_call(self, item: Mapping[str, JSON], kind: JSON, param: str) -> None:
        name, call_id = text_field(item, "name", param), text_field(item, "call_id", param)
        if item.get("namespace") is not None:
            name = _flat(text_field(item, "namespace", param), name)
        if kind == "function_call":
            arguments: JSON = text_field(item, "arguments", param)
        else:  # `restore` finds the reply's own arguments by the call's id
            arguments = {"input": text_field(item, "input", param)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _reasoning(self, item: Mapping[str, JSON], param: str) -> None:
        texts = [
            text_field(part, "text", param)
            for name in ("content", "summary")
            for part in items_of(item.get(name) or [], f"{param}.{name}")
        ]
        if texts:
            said = self._assistant()
            before = [said["reasoning_content"]] if said.get("reasoning_content") else []
            said["reasoning_content"] = "\n".join(before + texts)
        elif item.get("encrypted_content"):
            self.ignored.append(f"{param}.encrypted_content")

    def _assistant(self) -> Message:
        """Return the last message if it is the assistant's, else a new one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def _content_part(part: Mapping[str, JSON], param: str) -> JSON:
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise unsupported(param, f"Content of type {part.get('type')!r} is not supported by this endpoint.")


def _chat_format(wanted: JSON) -> JSON:
    """Return `text.format` in the shape of chat completions."""
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _items(request: ModelRequest, message: AssistantMessage, reply_id: str) -> Iterator[dict[str, JSON]]:
    """Yield the items of a reply in this order: thinking, text and calls."""
    if reasoning := reasoning_text(message):
        yield _reasoning_item(reply_id, reasoning)
    if message.content or not message.tool_calls:
        yield _message_item(reply_id, message.content or "")
    for index, call in enumerate(message.tool_calls or ()):
        yield _call_item(request, call, f"{reply_id}_{index}")


def _reasoning_item(reply_id: str, text: str) -> dict[str, JSON]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{reply_id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message_item(reply_id: str, text: str) -> dict[str, JSON]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _call_item(request: ModelRequest, call: ToolCallMessage, item_id: str) -> dict[str, JSON]:
    name = call.function.name
    if name in request.freeform:
        own: dict[str, JSON] = {"id": f"ctc_{item_id}", "type": "custom_tool_call", "input": freeform_text(call)}
    else:
        own = {"id": f"fc_{item_id}", "type": "function_call", "arguments": call.function.arguments}
    if name in request.namespaces:
        own["namespace"], name = request.namespaces[name]
    return {**own, "call_id": call.id, "name": name, "status": "completed"}


def _flat(namespace: str, name: str) -> str:
    """Return the name under which a tool of a namespace is offered."""
    return f"{namespace}__{name}"


def _response(
    request: ModelRequest,
    reply_id: str,
    created: int,
    items: list[dict[str, JSON]],
    completion: ChatCompletion | None = None,
    error: Refusal | None = None,
) -> dict[str, JSON]:
    status = "failed" if error is not None else "in_progress"
    incomplete = usage = None
    if completion is not None:
        cut = completion.choices[0].finish_reason == "length"
        status, incomplete = ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
        used = completion.usage
        prompt, sampled = (used.prompt_tokens, used.completion_tokens) if used else (0, 0)
        usage = {
            "input_tokens": prompt,
            # OpenAI's client refuses a usage without both details.
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "model": request.model,
        "output": items,
        "error": None if error is None else {"code": "server_error", "message": str(error)},
        "incomplete_details": incomplete,
        "usage": usage,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        **request.echo,
        "tools": request.echo.get("tools") or [],
        "metadata": request.echo.get("metadata") or {},
    }


class ResponsesStream:
    """The events of one reply. Text and thinking may be sent in pieces; each call is sent whole."""

    def __init__(self, request: ModelRequest, reply_id: str, created: int) -> None:
        self._request, self._id, self._created = request, reply_id, created
        self._number = -1
        self._items: list[dict[str, JSON]] = []
        self._open = ""
        self._texts = {"reasoning": "", "message": ""}

    def begin(self) -> bytes:
        started = _response(self._request, self._id, self._created, [])
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def text(self, text: str) -> bytes:
        begun = self._begin_item("message")
        self._texts["message"] += text
        return begun + self._event(
            "response.output_text.delta", **self._place("msg"), content_index=0, delta=text, logprobs=[]
        )

    def reasoning(self, text: str) -> bytes:
        begun = self._begin_item("reasoning")
        self._texts["reasoning"] += text
        return begun + self._event("response.reasoning_text.delta", **self._place("rs"), content_index=0, delta=text)

    def end(self, completion: ChatCompletion) -> bytes:
        message, written = client_form(completion.choices[0].message), bytearray()
        if rest := reasoning_text(message)[len(self._texts["reasoning"]) :]:
            written += self.reasoning(rest)
        if rest := (message.content or "")[len(self._texts["message"]) :]:
            written += self.text(rest)
        # An output without any item would look like a reply that was lost.
        elif not self._texts["message"] and not message.tool_calls:
            written += self.text("")
        written += self._end_item()
        for index, call in enumerate(message.tool_calls or ()):
            written += self._call_events(_call_item(self._request, call, f"{self._id}_{index}"))
        response = _response(self._request, self._id, self._created, self._items, completion)
        return bytes(written + self._event(f"response.{response['status']}", response=response))

    def ping(self) -> bytes:
        return b": waiting\n\n"

    def failure(self, refusal: Refusal) -> bytes:
        failed = _response(self._request, self._id, self._created, self._items, error=refusal)
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: JSON) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _place(self, prefix: str) -> dict[str, JSON]:
        return {"item_id": f"{prefix}_{self._id}", "output_index": len(self._items)}

    def _begin_item(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        closed, self._open = self._end_item(), kind
        if kind == "reasoning":
            item = _reasoning_item(self._id, "")
            part: dict[str, JSON] = {"type": "reasoning_text", "text": ""}
        else:
            item = _message_item(self._id, "")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        index = len(self._items)
        added = {**item, "status": "in_progress", "content": []}
        return (
            closed
            + self._event("response.output_item.added", output_index=index, item=added)
            + self._event(
                "response.content_part.added", item_id=item["id"], output_index=index, content_index=0, part=part
            )
        )

    def _end_item(self) -> bytes:
        """End the open item of text or thinking."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        text = self._texts[kind]
        item = _message_item(self._id, text) if kind == "message" else _reasoning_item(self._id, text)
        place: dict[str, JSON] = {"item_id": item["id"], "output_index": len(self._items), "content_index": 0}
        more: dict[str, JSON] = {"logprobs": []} if kind == "message" else {}
        name = "output_text" if kind == "message" else "reasoning_text"
        closed = (
            self._event(f"response.{name}.done", **place, text=text, **more)
            + self._event("response.content_part.done", **place, part=item["content"][0])
            + self._event("response.output_item.done", output_index=len(self._items), item=item)
        )
        self._items.append(item)
        return closed

    def _call_events(self, item: dict[str, JSON]) -> bytes:
        field, name = ("arguments", "function_call_arguments")
        if item["type"] == "custom_tool_call":
            field, name = ("input", "custom_tool_call_input")
        place: dict[str, JSON] = {"item_id": item["id"], "output_index": len(self._items)}
        added = {**item, field: "", "status": "in_progress"}
        done: dict[str, JSON] = {field: item[field]}
        if field == "arguments":
            done["name"] = item["name"]
        written = (
            self._event("response.output_item.added", output_index=len(self._items), item=added)
            + self._event(f"response.{name}.delta", **place, delta=item[field])
            + self._event(f"response.{name}.done", **place, **done)
            + self._event("response.output_item.done", output_index=len(self._items), item=item)
        )
        self._items.append(item)
        return written


def _text_or_none(body: Mapping[str, JSON], name: str) -> str | None:
    return None if body.get(name) is None else text_field(body, name, "body")
