"""Decodes lists of models and replies in the chat completions format into records, and tolerates servers' quirks.

A reply of the expected shape is decoded straight into records, any other reply piece by piece; malformed arguments pass
through as text. Sources: the OpenAI chat completions reference; the quirks of vLLM, SGLang, llama.cpp, Ollama and
proxies in front of them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal, TypeAlias

import msgspec

from palaestra_slots.core.errors import EngineReplyError, ReplyWithheld
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import ChatCompletion, TextCompletion, extra_of_call, extra_of_message, keep_extra
from palaestra_tokens.finish_reasons import read_finish_reason
from palaestra_tokens.http.transport import NOT_JSON, raise_refused_within

_DECODER = msgspec.json.Decoder(ChatCompletion)
_TEXT_DECODER = msgspec.json.Decoder(TextCompletion)
_SHOWN_BYTES = 200
_HALF = re.compile("[\ud800-\udfff]")


class _RawChoice(msgspec.Struct):
    message: JSON = None


class _RawUsage(msgspec.Struct):
    completion_tokens_details: JSON = None


class _Raw(msgspec.Struct):
    """What the records do not have: the provider's own fields, and the kinds of tokens."""

    choices: list[_RawChoice] = []
    usage: _RawUsage | None = None


_RAW_DECODER = msgspec.json.Decoder(_Raw)


def decode_completion(raw: bytes, turn: int, source: str) -> ChatCompletion:
    """Return the reply as records, with OpenAI's finish reasons. `turn` (from 1) is part of the ids made for calls
    without an id; `source` names the server.

    Raises `EngineReplyError` for a reply that is broken or that the provider failed to finish, and `ReplyWithheld`.
    """
    try:
        completion = _DECODER.decode(raw)
    # A ValidationError is a DecodeError too, so it comes first: JSON of
    # another shape can be converted, other bytes not.
    except (msgspec.ValidationError, RecursionError):
        completion = _converted(raw, source)
    except NOT_JSON as error:
        try:
            whole = msgspec.json.encode(whole_characters(decode_json(raw)))
        except NOT_JSON:
            whole = raw
        if whole == raw or b"\\u" not in raw:
            raise _not_a_reply(source, f"it is not JSON ({error})", raw) from None
        return decode_completion(whole, turn, source)
    if not completion.choices:
        raise _not_a_reply(source, "it has no choices", raw)
    _add_raw(completion, raw)
    for choice in completion.choices:
        try:
            choice.finish_reason = read_finish_reason(choice.finish_reason, source)
        except ReplyWithheld as error:
            if (usage := completion.usage) is not None:
                error.tokens = usage.prompt_tokens, usage.completion_tokens
            raise
        for index, call in enumerate(choice.message.tool_calls or ()):
            call.id = call.id or f"call_{turn}_{index}"
    return completion


def _add_raw(completion: ChatCompletion, raw: bytes) -> None:
    """Add the provider's own fields, and count the reasoning that a provider leaves out of `completion_tokens`."""
    try:
        beyond = _RAW_DECODER.decode(raw)
    except (msgspec.ValidationError, RecursionError):  # a shape of its own
        return
    for choice, other in zip(completion.choices, beyond.choices, strict=True):
        if isinstance(other.message, dict):
            calls = listed_calls(other.message.get("tool_calls"))
            keep_extra(choice.message, {**other.message, "tool_calls": calls})
    details = beyond.usage.completion_tokens_details if beyond.usage else None
    if (usage := completion.usage) is not None:
        reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
        # xAI and Gemini count reasoning only in the total.
        missing = usage.total_tokens - usage.prompt_tokens - usage.completion_tokens if usage.prompt_tokens else 0
        if isinstance(reasoning, int) and reasoning > usage.completion_tokens:
            missing = max(missing, reasoning)
        usage.completion_tokens += max(0, missing)
        usage.total_tokens = max(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)


def decode_json(raw: bytes) -> JSON:
    """Decode JSON, also if it has halves of surrogate pairs, which JavaScript writes where it splits a text. Raises the
    errors of `NOT_JSON`."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        with contextlib.suppress(ValueError):
            if b"\\u" in raw:
                return json.loads(raw)
        raise


def whole_characters(value: JSON) -> JSON:
    """Return the value with halves of surrogate pairs joined in all texts. A half alone becomes U+FFFD."""
    if isinstance(value, str):
        if value.isascii() or not _HALF.search(value):
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [whole_characters(each) for each in value]
    if isinstance(value, dict):
        return {whole_characters(name): whole_characters(each) for name, each in value.items()}
    return value


def decode_text(raw: bytes, source: str) -> TextCompletion:
    try:
        completion = _TEXT_DECODER.decode(raw)
    except NOT_JSON as error:
        raise _not_a_reply(source, str(error), raw, "completion") from None
    if not completion.choices:
        raise _not_a_reply(source, "it has no choices", raw, "completion")
    for choice in completion.choices:
        choice.finish_reason = read_finish_reason(choice.finish_reason, source)
    return completion


def _converted(raw: bytes, source: str) -> ChatCompletion:
    """Convert a JSON reply of an unexpected shape piece by piece."""
    try:
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict):
            raise _not_a_reply(source, "it is not an object", raw)
        choices = value.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise _not_a_reply(source, "it has no choices", raw)
        converted = {
            "id": _text_or_none(value.get("id")) or "",
            "model": _text_or_none(value.get("model")) or "",
            "choices": [_choice(choice, index) for index, choice in enumerate(choices)],
            "usage": _usage(value.get("usage")),
        }
        return msgspec.convert(converted, ChatCompletion)
    except NOT_JSON as error:
        raise _not_a_reply(source, str(error), raw) from None


def _not_a_reply(source: str, why: str, raw: bytes, promised: str = "chat completion") -> EngineReplyError:
    raise_refused_within(raw)
    start = raw[:_SHOWN_BYTES].decode(errors="replace")
    return EngineReplyError(f"{source} sent an invalid {promised}: {why}. It begins: {start!r}")


def _choice(choice: Mapping[str, JSON], index: int) -> dict[str, JSON]:
    message = choice.get("message")
    if not isinstance(message, Mapping):
        message = {"content": choice.get("text")}
    details = message.get("reasoning_details")
    content, thinking = content_texts(message.get("content"))
    return {
        "index": index,
        "finish_reason": _text_or_none(choice.get("finish_reason")),
        "logprobs": choice.get("logprobs"),
        "message": {
            "content": content,
            "tool_calls": _tool_calls(message.get("tool_calls")),
            "reasoning_content": _text_or_none(message.get("reasoning_content")) or thinking or None,
            "reasoning": _text_or_none(message.get("reasoning")),
            "reasoning_details": [d for d in details if isinstance(d, dict)] if isinstance(details, list) else None,
            "refusal": _text_or_none(message.get("refusal")),
        },
    }


def content_texts(content: JSON) -> tuple[str | None, str]:
    """Return the text and the thinking of a message's content. Mistral sends both as parts of a list."""
    if not isinstance(content, list):
        return content if content is None or isinstance(content, str) else _dumped(content), ""
    texts, thoughts = [], []
    for part in content:
        # The thinking may itself be a list of parts.
        if isinstance(part, dict) and part.get("thinking"):
            thoughts.append(content_texts(part["thinking"])[0] or "")
        else:
            texts.append(part.get("text") if isinstance(part, dict) else part)
    return "".join(text for text in texts if isinstance(text, str)), "".join(thoughts)


def listed_calls(calls: JSON) -> list[JSON] | None:
    """Return the calls of a message as a list. TGI streams one call without a list."""
    return [calls] if isinstance(calls, dict) else calls if isinstance(calls, list) else None


def _tool_calls(calls: JSON) -> list[JSON] | None:
    """Return calls with name and arguments as text. An entry that is not a call becomes a call without a name, which is
    malformed."""
    listed = listed_calls(calls)
    return None if listed is None else [_tool_call(call) for call in listed]


def _tool_call(call: JSON) -> dict[str, JSON]:
    if not isinstance(call, dict):
        return {"function": {"name": "", "arguments": _dumped(call)}}
    function = call.get("function")
    if not isinstance(function, dict):
        function = call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else _dumped(arguments)
    return {
        "id": _text_or_none(call.get("id")) or "",
        "function": {"name": _text_or_none(function.get("name")) or "", "arguments": arguments},
    }


def _usage(usage: JSON) -> dict[str, int] | None:
    if not isinstance(usage, dict):
        return None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: int(usage[name]) for name in names if isinstance(usage.get(name), int | float)}


def _text_or_none(value: JSON) -> str | None:
    return value if isinstance(value, str) else None


def _dumped(value: JSON) -> str:
    return msgspec.json.encode(value).decode()


_REQUIRED: Mapping[str, Callable[[Message], Message]] = {
    # Kimi takes an empty text for a missing one, and DeepSeek accepts both.
    "reasoning_content": lambda message: {**message, "reasoning_content": message.get("reasoning_content") or " "},
    "thought_signature": lambda message: _with_signatures(message),
}
"""What a server may require in assistant messages, by the name in its error."""

_NO_SIGNATURE = "skip_thought_signature_validator"
"""The signature that Gemini accepts for calls of another model. Source: "Thought signatures" in Gemini's docs."""

_IS_MISSING = re.compile(r"\bmissing\b|must be (passed|sent|provided|present|included)|\brequires?\b|is required", re.I)


def plainer_history(messages: Sequence[Message], server_said: str) -> list[Message] | None:
    """Return the history with the parts changed that a strict server may have refused, or None if there is nothing to
    change.

    Some chat templates parse every call's arguments, so one malformed call would end its rollout as a server failure.
    Malformed arguments are therefore wrapped in a JSON object. A provider's own field is removed if the server's error
    names it, and added if the error says that it is missing. If the error names none, all such fields are removed.
    """
    required = next((name for name in _REQUIRED if name in server_said and _IS_MISSING.search(server_said)), None)
    drop: set[str] = set()
    if required is None:
        own = {name for message in messages for name in _own_fields(message)}
        drop = {name for name in own if name in server_said} or own - {"reasoning_content"}
    plain = [_plainer(message, drop, required) for message in messages]
    changed = any(new is not old and new != old for new, old in zip(plain, messages, strict=True))
    return plain if changed else None


def _own_fields(message: Message) -> set[str]:
    """Return the names of the fields of an assistant message that are not OpenAI's."""
    if message.get("role") != "assistant":
        return set()
    found = set(extra_of_message(message)) | {"reasoning_content", "reasoning_details"} & message.keys()
    for call in message.get("tool_calls") or ():
        extra = extra_of_call(call)
        found |= extra.pop("function", {}).keys() | extra.keys()
    return found


def _plainer(message: Message, drop: Set[str], required: str | None) -> Message:
    if message.get("role") != "assistant":
        return message
    calls = message.get("tool_calls")
    if drop & _own_fields(message):
        message = {key: value for key, value in message.items() if key not in drop}
        if calls:
            message["tool_calls"] = calls = [_without(call, drop) for call in calls]
    if required is not None:
        message = _REQUIRED[required](message)
        calls = message.get("tool_calls")
    if not calls or all(_is_object(_call_arguments(call)) for call in calls):
        return message
    return {**message, "tool_calls": [_wrapped(call) for call in calls]}


def _without(call: JSON, drop: Set[str]) -> JSON:
    if not isinstance(call, Mapping):
        return call
    kept = {key: value for key, value in call.items() if key not in drop}
    if isinstance(function := kept.get("function"), Mapping):
        kept["function"] = {key: value for key, value in function.items() if key not in drop}
    return kept


def _with_signatures(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_signed(call) for call in message["tool_calls"]]}


def _signed(call: JSON) -> JSON:
    if not isinstance(call, Mapping) or call.get("extra_content"):
        return call
    return {**call, "extra_content": {"google": {"thought_signature": _NO_SIGNATURE}}}


def _wrapped(call: Mapping[str, JSON]) -> Mapping[str, JSON]:
    arguments = _call_arguments(call)
    if _is_object(arguments):
        return call
    return {**call, "function": {**call["function"], "arguments": _dumped({"malformed": arguments})}}


def _call_arguments(call: Mapping[str, JSON]) -> JSON:
    """Return a call's arguments. Anything that is not a call counts as one with an empty object, so that it is sent
    unchanged and the server may refuse it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return function.get("arguments", "") if isinstance(function, Mapping) else {}


def _is_object(arguments: JSON) -> bool:
    try:
        return isinstance(arguments, dict) or isinstance(json.loads(arguments), dict)
    except (ValueError, TypeError, RecursionError):
        return False


ServerKind: TypeAlias = Literal["vllm", "sglang", "llama.cpp", "other"]


class ListedModel(msgspec.Struct):
    """One model. `owned_by` is the software that serves it. vLLM and SGLang call the window in tokens `max_model_len`,
    llama.cpp `n_ctx` in `meta` (its `n_ctx_train` is not in force), other servers use one of the other names."""

    id: str
    owned_by: str | None = None
    max_model_len: JSON = None
    context_length: JSON = None
    context_window: JSON = None
    max_context_length: JSON = None
    meta: JSON = None

    @property
    def window_tokens(self) -> int | None:
        """The window in tokens, if the server lists it."""
        of_llama = self.meta.get("n_ctx") if isinstance(self.meta, dict) else None
        listed = (self.max_model_len, self.context_length, self.context_window, self.max_context_length, of_llama)
        return next((each for each in listed if type(each) is int and each > 0), None)


class _ModelList(msgspec.Struct):
    data: list[ListedModel]


def listed_models(body: bytes) -> list[ListedModel]:
    """Return the models in the body of `GET /v1/models`, or an empty list if the body is not such a list. The format is
    OpenAI's list of models, to which vLLM and SGLang add their names and the window."""
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except NOT_JSON:
        return []


def window_of(models: Sequence[ListedModel], name: str) -> int | None:
    """Return the listed window of the model `name`, or of the only model, or None."""
    found = [model for model in models if model.id == name] or (models if len(models) == 1 else ())
    return found[0].window_tokens if found else None


def server_kind(models: Sequence[ListedModel]) -> ServerKind:
    """Return the kind of server, which decides the protocol for exact tokens, from the owner of its models. Palaestra's
    own model server counts as `vllm`."""
    return next((_KINDS[model.owned_by] for model in models if model.owned_by in _KINDS), "other")


_KINDS: Mapping[str | None, ServerKind] = {
    "vllm": "vllm",
    "palaestra": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
}
