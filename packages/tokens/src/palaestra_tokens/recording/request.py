"""The internal form of a request to the recording endpoint in any dialect, and the refusals. No I/O.

Messages and tools are in the shape of OpenAI's chat completions, as everywhere in this package. A field that has a
value is used, refused (`Refusal`) or named in `ModelRequest.ignored`: none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import AssistantMessage, ChatCompletion, ToolCallMessage

MOST_CHOICES = 16
"""The maximum number of replies to one request (`n`)."""

MOST_ITEMS = 20_000
"""The maximum length of a list of messages, parts or tools, because reading a million of them takes seconds."""


class Refusal(Exception):
    """A request that is answered with an error. `status` is the HTTP status, `param` the field and `code` OpenAI's
    error code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(slots=True)
class ModelRequest:
    """One request. `settings` holds the `AGENTS_OWN` settings and those that force a reply's form, with OpenAI's names.
    `prompt` is the text of a legacy completion, which has no messages. `ignored` names the fields without an effect;
    `echo` holds the fields that the reply repeats."""

    model: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, JSON]] = field(default_factory=list)
    settings: dict[str, JSON] = field(default_factory=dict)
    n: int = 1
    size: int = 0
    """The total size in bytes of the request's body and the conversation that `continues` names."""
    stream: bool = False
    stream_usage: bool = True
    prompt: str | None = None
    ignored: list[str] = field(default_factory=list)
    echo: dict[str, JSON] = field(default_factory=dict)
    instructions: str | None = None
    """The system message of this request alone. A request that continues its reply does not inherit the message."""
    continues: str | None = None
    """The id of the reply that the messages continue, for a dialect whose server keeps conversations."""
    freeform: frozenset[str] = frozenset()
    """Tools whose only argument is free text. They are offered as functions with the parameter `input`."""
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the tools that have a namespace, by the name under which they are offered."""


class ReplyStream(Protocol):
    """Writes one reply as server-sent events. `end` gets the whole reply and writes the rest of it."""

    def begin(self) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def end(self, completion: ChatCompletion) -> bytes: ...

    def ping(self) -> bytes:
        """Return an event without meaning, which keeps the connection alive."""

    def failure(self, refusal: Refusal) -> bytes: ...


class Dialect(Protocol):
    """One API that agents speak. `features` are the engine's (`ChatServer.features`)."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        """Read a request. Raises `Refusal`."""

    def reply(self, request: ModelRequest, completion: ChatCompletion, reply_id: str, created: int) -> JSON: ...

    def stream(self, request: ModelRequest, reply_id: str, created: int) -> ReplyStream: ...

    def error(self, refusal: Refusal) -> JSON: ...


AGENTS_OWN = frozenset({"max_tokens", "stop"})
"""The sampling settings that an agent may choose, which only shorten a reply."""

_SAMPLING = AGENTS_OWN | {
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "chat_template_kwargs", "stop_token_ids", "min_tokens"),
}
"""The sampling settings that are checked. All but `AGENTS_OWN` come from the run, because training assumes that every
token was sampled with the run's settings. Such settings in a request have no effect and are reported as ignored."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
_COUNTS: Mapping[str, int] = {"max_tokens": 1, "min_tokens": 0, "top_k": -1}


def _is_number(value: JSON, *kinds: type) -> bool:
    # In Python, booleans are integers; in JSON, true is not a number.
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_text_or_texts(value: JSON) -> bool:
    texts = [value] if isinstance(value, str) else value
    # An empty stop string would end every reply before its first token.
    return isinstance(texts, list) and len(texts) <= 16 and all(isinstance(text, str) and text for text in texts)


def _are_ids(value: JSON) -> bool:
    return isinstance(value, list) and all(_is_number(each, int) for each in value)


_OTHER_FORMS: Mapping[str, tuple[Callable[[JSON], bool], str]] = {
    "seed": (lambda value: _is_number(value, int), "a whole number"),
    "stop": (_is_text_or_texts, "a string or a list of strings"),
    "stop_token_ids": (_are_ids, "a list of token ids"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
}


def sampling(body: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the sampling settings that an agent may choose. Raises `Refusal` for invalid values of these and of other
    sampling settings."""
    settings = {name: body[name] for name in _SAMPLING & body.keys() if body[name] is not None}
    for name, value in settings.items():
        if name in _RANGES:
            least, most = _RANGES[name]
            fits, form = (
                _is_number(value, int, float) and least <= value <= most,
                f"a number from {least:g} to {most:g}",
            )
        elif name in _COUNTS:
            fits = _is_number(value, int) and value >= _COUNTS[name]
            form = f"a whole number of at least {_COUNTS[name]}"
        else:
            has_form, form = _OTHER_FORMS[name]
            fits = has_form(value)
        if not fits:
            raise invalid(name, f"{name} must be {form}")
    # Checked first, also those that the run decides: an agent with a wrong request should learn it.
    return {name: value for name, value in settings.items() if name in AGENTS_OWN}


def invalid(param: str, message: str) -> Refusal:
    """Return the refusal of a field's value."""
    return Refusal(400, message, param=param, code="invalid_value")


def unsupported(param: str, what: str = "") -> Refusal:
    """Return the refusal of a field that this endpoint does not support."""
    reason = what or f"{param} is not supported by the model behind this endpoint"
    return Refusal(400, reason, param=param, code="unsupported_parameter")


def required(body: Mapping[str, JSON], name: str, kind: type | tuple[type, ...]) -> JSON:
    """Return the value of a field that a request must have. Raises `Refusal`."""
    value = body.get(name)
    if value is None:
        raise Refusal(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if not isinstance(value, kind):
        raise invalid(name, f"{name} has the wrong type")
    return value


def flag(body: Mapping[str, JSON], name: str) -> bool:
    """Return the value of a boolean field, or False if the field is missing. Raises `Refusal`."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false")
    return bool(value)


def refuse_fields(body: Mapping[str, JSON], names: Collection[str]) -> None:
    """Raise `Refusal` if one of these fields is set: it cannot be honoured, and must not be ignored."""
    for name in names:
        if body.get(name):
            raise unsupported(name)


def choice_count(body: Mapping[str, JSON]) -> int:
    """Return the number of choices that OpenAI's field `n` requests. Raises `Refusal`."""
    n = body.get("n") or 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
        raise invalid("n", f"n must be a whole number from 1 to {MOST_CHOICES}")
    return n


def wants_usage(body: Mapping[str, JSON]) -> bool:
    """Return whether OpenAI's field `stream_options` requests a last chunk with the usage."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def ignored_fields(body: Mapping[str, JSON], known: Collection[str]) -> list[str]:
    """Return the names of the fields that have a value and no effect."""
    return sorted(name for name, value in body.items() if name not in known and value is not None)


def items_of(value: JSON, param: str) -> Sequence[Mapping[str, JSON]]:
    """Return the value, a list of objects. Raises `Refusal` for anything else, or if the list is too long."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise invalid(param, f"{param} must be a list of objects")
    if len(value) > MOST_ITEMS:
        raise invalid(param, f"{param} has {len(value)} items; the maximum is {MOST_ITEMS}")
    return value


def text_field(item: Mapping[str, JSON], name: str, param: str) -> str:
    """Return a text field of an object. Raises `Refusal` if it is missing or not a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}", f"{param}.{name} must be a string")
    return value


def function_tool(name: JSON, description: JSON, parameters: JSON, param: str) -> dict[str, JSON]:
    """Return a tool in the shape of chat completions. Raises `Refusal`."""
    if not isinstance(name, str) or not name:
        raise invalid(param, f"{param} has no name")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(param, f"the parameters of tool {name} must be a JSON schema")
    function: dict[str, JSON] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def content_parts(
    content: JSON, param: str, features: Collection[str], part: Callable[[Mapping[str, JSON], str], JSON]
) -> JSON:
    """Return content in the shape of chat completions: text, or a list of parts if there are images. `part` translates
    a part that is not text to an image part; it raises `Refusal` for other kinds. Without the feature `images`, images
    are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[JSON] = []
    for number, each in enumerate(items_of(content, param)):
        if isinstance(each.get("text"), str):
            texts.append({"type": "text", "text": each["text"]})
            continue
        image = part(each, f"{param}[{number}]")
        if "images" not in features:
            raise unsupported(f"{param}[{number}]", "The model behind this endpoint does not accept images.")
        texts.append(image)
    # Most chat templates accept only text and refuse a list of parts.
    if all(each["type"] == "text" for each in texts):
        return "".join(each["text"] for each in texts) if len(texts) < 2 else "\n".join(each["text"] for each in texts)
    return texts


def one_system_message(messages: list[Message]) -> list[Message]:
    """Merge the system messages at the beginning into one: templates accept at most one."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    joined = "\n\n".join(str(message["content"]) for message in messages[:leading])
    return [{"role": "system", "content": joined}, *messages[leading:]]


def choose_tools(request: ModelRequest, choice: JSON, features: Collection[str]) -> None:
    """Apply `tool_choice` in OpenAI's shape: `none` withdraws the tools; a choice that forces a call is passed to
    engines that support it. Raises `Refusal`."""
    if choice in (None, "auto"):
        return
    if choice == "none":
        request.tools = []
        return
    if "tool_choice" not in features:
        raise unsupported("tool_choice", "The model behind this endpoint cannot be forced to call a tool; use auto.")
    request.settings["tool_choice"] = choice


def client_form(message: AssistantMessage) -> AssistantMessage:
    """Return a reply for dialects whose calls need a name and an object: a malformed call, which has no name, becomes
    text, as the model wrote it."""
    calls = message.tool_calls or []
    if all(call.function.name for call in calls):
        return message
    texts = [message.content or "", *(call.function.arguments for call in calls if not call.function.name)]
    named = [call for call in calls if call.function.name]
    return msgspec.structs.replace(message, content="".join(texts), tool_calls=named or None)


def as_object(arguments: str) -> dict[str, JSON]:
    """Return the arguments of a call as an object, for dialects that have no other form; malformed arguments stay
    readable."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": arguments}


def freeform_text(call: ToolCallMessage) -> str:
    """Return the text of a call to a free-form tool: its `input`, or the unchanged arguments if they have no
    `input`."""
    value = as_object(call.function.arguments).get("input")
    return value if isinstance(value, str) else call.function.arguments


def event(data: JSON, name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))
