"""Renders a chat template as `transformers` does (sandboxed jinja2, its filters, globals and whitespace rules), and
prepares messages in the OpenAI shape for it.

Templates expect text as a string, arguments as an object, names on tool results, and thinking in a field that differs
between families. Invariants: the same messages give the same text during the whole run, so a template that asks for the
date gets the date on which it was loaded; the given messages are not changed.

Source of the semantics: `transformers.utils.chat_template_utils`, version 5.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.tokenizers import Tokenizer

_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The errors that rendering can raise. There are many, because a template is a third-party program."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One template with its special tokens. `source` is the template's text. Raises `ConfigError` if it is not a
    template."""

    def __init__(
        self, source: str, special: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._special = dict(special or {})
        self._loaded_at = now()
        self._template = self._compiled(TemplateSandbox())

    def _compiled(self, environment: TemplateSandbox) -> jinja2.Template:
        environment.globals["strftime_now"] = self._loaded_at.strftime
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template cannot be read: {error}.") from None

    def compiled_in(self, environment: TemplateSandbox) -> ChatTemplate:
        """Return the same template, with the same loading date, compiled in a different environment."""
        other = copy.copy(self)
        other._template = self._compiled(environment)
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, JSON]] | None = None,
        add_generation_prompt: bool = True,
        **variables: JSON,
    ) -> str:
        """Return the conversation as text. Raises `ConfigError` with the template's own message if the template refuses
        the conversation."""
        values = {"documents": None, **self._special, **variables}
        try:
            return self._template.render(
                values, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except _REFUSALS as error:
            raise ConfigError(f"The chat template refuses this conversation: {error}.") from error


def template_of(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    """Return the template `source`, or the tokenizer's own. Raises `ConfigError` if there is neither."""
    source = source or getattr(tokenizer, "chat_template", None)
    if not isinstance(source, str):
        raise ConfigError("The tokenizer has no chat template: pass chat_template=, or save one next to the tokenizer.")
    special = getattr(tokenizer, "special", None)
    if not isinstance(special, Mapping):
        named = {name: getattr(tokenizer, name, None) for name in NAMED_TOKENS}
        special = {name: text for name, text in named.items() if isinstance(text, str)}
    return ChatTemplate(source, special)


MARK = "\ufdd0"
"""A character that no text contains: `control_text.py` splits control tokens with it."""


class WrittenOnce(dict[str, JSON]):
    """A mapping whose JSON is made once, because tool schemas are written in every rendering."""

    __slots__ = ("text",)

    def __init__(self, value: Mapping[str, JSON]) -> None:
        super().__init__(value)
        for key, item in value.items():
            if isinstance(item, dict):
                self[key] = WrittenOnce(item)
        self.text = json.dumps(value, ensure_ascii=False)


def tojson(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, unlike jinja's own filter, which escapes for HTML."""
    if isinstance(value, WrittenOnce) and not (ensure_ascii or indent or separators or sort_keys):
        return value.text
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # `ensure_ascii` escapes the mark too, but the text is split at the character.
    return text.replace("\\ufdd0", MARK) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """Renders `{% generation %}` blocks, which mark the text to train on, as their content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration of the field

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, which answers the most frequent lookups directly: attributes of strings, and
    entries of mappings, which no sandbox restricts."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = _raise_exception

    def getattr(self, obj: object, attribute: str) -> JSON:
        """Return the attribute or entry that jinja would find: names that are not attributes of a mapping are
        entries."""
        if type(obj) is dict and attribute in obj and not hasattr(obj, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return not attr.startswith("_") if type(obj) is str else super().is_safe_attribute(obj, attr, value)


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The fields in which templates look for thinking: the first in templates of Qwen, GLM and DeepSeek, the second in
those of gpt-oss, and the third in others."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def for_template(messages: Sequence[Message], reasoning_field: str | None, *, joined: bool = False) -> list[Message]:
    """Prepare all messages. If `reasoning_field` is None, thinking goes into the content, for families without a field.
    If `joined` is true, the content of a message with a call and thinking is appended to the thinking, because some
    templates reject messages with a call that have both. Raises `ConfigError` for a message that is not an object,
    contains more than text or has a malformed call."""
    names: dict[str, str] = {}
    ready = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"Message {number} is {message!r:.100}, not an object with a role and content.")
        if not isinstance(message.get("content", ""), str):
            message = {**message, "content": content_of(message)}
        if message.get("role") == "assistant":
            message = assistant_message(message, reasoning_field)
            if joined and reasoning_field in message and message["content"] and "tool_calls" in message:
                message |= {reasoning_field: f"{message[reasoning_field]}\n\n{message['content']}", "content": ""}
            # Some templates write the name of the function beside its result, which OpenAI's format does not repeat.
            names.update({call.get("id", ""): call["function"]["name"] for call in message.get("tool_calls", ())})
        elif message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            message = {**message, "name": name} if name else message
        ready.append(message)
    return ready


def assistant_message(message: Message, reasoning_field: str | None) -> Message:
    """Prepare one assistant message: the content is never None, thinking is in the template's field, and arguments are
    objects."""
    ready: Message = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := reasoning_of(message):
        if reasoning_field is None:
            ready["content"] = f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{ready['content']}"
        else:
            ready[reasoning_field] = reasoning
    if calls := message.get("tool_calls"):
        ready["tool_calls"] = [_template_call(call) for call in calls]
    return ready


def content_of(message: Mapping[str, JSON]) -> str:
    """Return the text of a message. None becomes an empty string, and the parts of a list are joined. Raises
    `ConfigError` for anything but text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, Sequence) else [None]
    joined = [text for text in texts if text is not None]
    if content is not None and len(joined) < len(texts):
        raise ConfigError(
            f"A message ({message.get('role')}) contains more than text: {content!r:.200}. Token-exact chat accepts "
            "text, or a list of parts {'type': 'text', 'text': …}; convert images and data first."
        )
    return "".join(joined)


def _text_of(part: JSON) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def reasoning_of(message: Mapping[str, JSON]) -> str:
    """Return the thinking of a message, under any of its names."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _template_call(call: Mapping[str, JSON]) -> dict[str, JSON]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"An assistant message has a tool call without a function name: {call!r:.200}.")
    written = {"name": function["name"], "arguments": _template_arguments(function.get("arguments"))}
    return {"id": call.get("id", ""), "type": "function", "function": written}


class CallArguments(dict[str, JSON]):
    """The arguments of a call. Most templates iterate over them or write them with `tojson`; those of DeepSeek
    concatenate them with text, as OpenAI's API has them."""

    def __add__(self, text: str) -> str:
        return tojson(self) + text

    def __radd__(self, text: str) -> str:
        return text + tojson(self)


def _template_arguments(arguments: JSON) -> CallArguments:
    """Return the object that the arguments encode. Other text is wrapped in an object, because templates iterate over
    the keys."""
    if not isinstance(arguments, str):
        return CallArguments(arguments or {})
    if not arguments.strip():
        return CallArguments()
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return CallArguments(value if isinstance(value, dict) else {"malformed": arguments})
