"""Makes training rows from a conversation that no model sampled, such as a reference solution, for supervised training.

The conversation is held again through token-exact chat, which gets the template's own text of each reply in place of a
sample, so prompts, segments and masks are those of rollouts with the same template, parser and tools. Invariant: every
reply in a row is read back from its tokens as it was recorded; otherwise there is no row.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import ChatCompletion, Sampled
from palaestra_tokens.ledger import ENCODED, TokenRow, record_rows
from palaestra_tokens.parsers import ToolCallParser
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.templates.jinja import assistant_message, reasoning_of
from palaestra_tokens.token_exact.managed_chat import HistoryMode, ManagedChat


def demonstration_rows(
    chat_format: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, JSON]] = (),
    *,
    parser: ToolCallParser | str | None = "hermes",
    history: HistoryMode = "template",
    variables: Mapping[str, JSON] | None = None,
    examples: int = 0,
    rollout_id: str = "",
) -> list[TokenRow]:
    """Return the rows of a conversation: one for each segment, with the replies trained and no log-probabilities.
    `variables` go to the template. The first `examples` replies belong to the prompt; messages after the last reply are
    not in the rows. Raises `ConfigError` if the template refuses the conversation, or the parser reads a reply
    differently from what was recorded."""
    engine = _Given()
    chat = ManagedChat(engine, chat_format, parser, history=history, name=rollout_id)
    renderer = chat_format.renderer(tools, variables)
    said: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message.get("role") == "tool":
            message = {**message, "tool_call_id": ids.get(message.get("tool_call_id", ""), message.get("tool_call_id"))}
        if message.get("role") != "assistant" or examples > 0:
            examples -= message.get("role") == "assistant"
            said.append(message)
            continue
        message = _checked_reply(message)
        engine.ids = renderer.written(said, message)
        extra = {"chat_template_kwargs": dict(variables)} if variables else None
        completion = _finished(chat.chat_completion(messages=said, tools=list(tools), extra_body=extra))
        reply: Message = msgspec.to_builtins(completion.choices[0].message)
        if _meaning(reply) != _meaning(message):
            shown = chat_format.tokenizer.decode(list(engine.ids), skip_special_tokens=False)
            raise ConfigError(
                f"The tool parser does not read a reply as it was recorded ({shown!r:.200}). Choose the parser of the "
                "chat template with --tool-parser."
            )
        # The ids of calls are those that a rollout would give, because some templates show them.
        calls = zip(message.get("tool_calls") or (), reply.get("tool_calls") or (), strict=True)
        ids.update({str(theirs.get("id")): ours["id"] for theirs, ours in calls})
        said.append(reply)
    rows = record_rows(chat.ledger.record(), rollout_id)
    return [msgspec.structs.replace(row, logprobs=None, versions=[], source=ENCODED) for row in rows]


class _Given:
    """The engine that answers with the tokens that it was given."""

    name = ENCODED

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        return Sampled(self.ids, [0.0] * len(self.ids), "stop")


def _finished(chat: Coroutine[JSON, None, ChatCompletion]) -> ChatCompletion:
    """Return the result of a request that never waits, because its engine does not."""
    try:
        chat.send(None)
    except StopIteration as ended:
        done: ChatCompletion = ended.value
        return done
    raise AssertionError("a request with given tokens waited")


def _checked_reply(reply: Message) -> Message:
    """Return a reply with its text parts as one text. Raises `ConfigError` if it has not the form of a reply."""
    content, calls = reply.get("content"), reply.get("tool_calls") or ()
    try:
        for call in calls:
            _check_arguments(call["function"]["arguments"])
            if not isinstance(call["function"]["name"], str):
                raise TypeError("the name of a call is no text")
        if isinstance(content, list):
            reply = {**reply, "content": "".join(part["text"] for part in content)}
        elif not isinstance(content, str | None):
            raise TypeError("the content is no text")
    except (KeyError, TypeError) as error:
        raise ConfigError(f"A reply is not in the format of chat completions ({error}): {reply!r:.200}.") from None
    return reply


def _check_arguments(arguments: JSON) -> None:
    """Raise `ConfigError` for arguments that the template would show in another form than the model wrote."""
    try:
        known = not isinstance(arguments, str) or isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        known = False
    if not known:
        raise ConfigError(f"A call has malformed arguments, which no model should learn: {arguments!r:.200}.")


def _meaning(message: Message) -> tuple[str, str, list[tuple[str, JSON]]]:
    """Return the content, the thinking and the calls of a reply, without white space around texts."""
    ready = assistant_message(message, "reasoning_content")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in ready.get("tool_calls") or ()]
    return ready["content"].strip(), reasoning_of(message).strip(), calls
