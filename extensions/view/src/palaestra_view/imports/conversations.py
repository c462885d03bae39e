"""Reads lines with conversations: messages in the OpenAI form, turns in the ShareGPT form, groups in the Atropos form,
and token rows, as other programs and our exporters write them.

In the OpenAI and ShareGPT forms a line is a conversation, with or without `tools`, `id`, `task_id`, `reward` (or
`score`), `outcome`, `official` and `labels`, the fields that our exporters write. Turns in the ShareGPT form are turned
back into messages: `<think>`, `<tool_call>` and `<tool_response>` become reasoning, calls and results. A line in the
Atropos form is a group with the tokens of each of its rollouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from palaestra.rollouts.export.chat_messages import parsed_object
from palaestra.rollouts.export.token_rows import ROW_SCHEMA
from palaestra.rollouts.records import Trajectory, TurnRecord
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_tokens.ledger import UNTRAINED, TokenRow
from palaestra_view.imports.atif import blame_of, labels_of, outcome_of
from palaestra_view.imports.judged import annotations_of
from palaestra_view.imports.source import (
    NEXT,
    Imported,
    LogFacts,
    count_of,
    finite,
    index_of,
    mapping_of,
    name_of,
    numbers_of,
    objects_of,
    text_of,
)

NAME = "conversations"
OPENAI, SHAREGPT, ATROPOS, ROWS = "openai", "sharegpt", "atropos", "rows"

_SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
             "tool": "tool", "function": "tool", "observation": "tool"}  # fmt: skip
_THINK = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n?", re.DOTALL)
_CALL = re.compile(r"\n?<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_IN_LINE = ("id", "task_id", "reward", "score", "outcome", "official", "labels", "env", "model", "tools", "messages",
            "conversations", "metadata", "error", "blame", "metrics", "group_id", "prompt_index",
            "annotations")  # fmt: skip


def form_of(value: Mapping[str, JSON]) -> str:
    """Return the form of a line; empty if it has none that is known."""
    if value.get("schema") == ROW_SCHEMA:
        return ROWS
    if isinstance(value.get("scores"), list) and isinstance(value.get("tokens"), list):
        return ATROPOS
    if isinstance(value.get("messages"), list):
        return OPENAI
    return SHAREGPT if isinstance(value.get("conversations"), list) else ""


def facts(value: Mapping[str, JSON]) -> LogFacts:
    """Return the facts about a file from its first line."""
    size = len(objects_of(value.get("rollouts"))) if form_of(value) == ATROPOS else 0
    model = name_of(value.get("model")) or name_of(mapping_of(value.get("metadata")).get("model"))
    return LogFacts(format=form_of(value), env=name_of(value.get("env")), model=model, group_size=size)


def read(value: Mapping[str, JSON]) -> Iterator[Imported]:
    """Yield the rollouts of a line. Raises `ConfigError` with the reason, without the file's name."""
    match form_of(value):
        case "openai":
            yield _imported(value, _given(value["messages"]))
        case "sharegpt":
            yield _imported(value, messages_of(objects_of(value["conversations"])))
        case "atropos":
            yield from _group(value)
        case "rows":
            yield _imported_row(value)
        case _:
            raise ConfigError("it has neither messages nor conversations")


def messages_of(turns: Sequence[Mapping[str, JSON]]) -> list[Message]:
    """Return turns in the ShareGPT form as messages. Calls get ids of their own; a result that is no JSON in tags stays
    as it is."""
    messages: list[Message] = []
    waiting: list[str] = []
    count = 0
    for turn in turns:
        speaker = text_of(turn.get("from")) or text_of(turn.get("role"))
        role, text = _SPEAKERS.get(speaker, speaker), text_of(turn.get("value", turn.get("content")))
        if role == "assistant":
            message = _assistant_message(text, count)
            waiting = [call["id"] for call in message.get("tool_calls", ())]
            count += len(waiting)
            messages.append(message)
        elif role == "tool":
            messages += _results(text, waiting)
            waiting = []
        else:
            messages.append({"role": role, "content": text})
    return messages


def _assistant_message(text: str, count: int) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if (thought := _THINK.match(text)) is not None:
        message["reasoning_content"] = thought[1]
        text = text[thought.end() :]
    last = text.rfind("</tool_call>") + len("</tool_call>")  # no call that is not closed is looked for
    calls = [parsed_object(found.strip()) for found in _CALL.findall(text, 0, last)]
    if calls and all(call is not None and isinstance(call.get("name"), str) for call in calls):
        text = _CALL.sub("", text[:last]) + text[last:]
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": _arguments_json(call.get("arguments"))},
            }
            for number, call in enumerate(calls, count)
            if call is not None
        ]
    return message | {"content": text}


def _results(text: str, waiting: Sequence[str]) -> Iterator[Message]:
    last = text.rfind("</tool_response>") + len("</tool_response>")
    found = [each.strip() for each in _RESPONSE.findall(text, 0, last)] or [text]
    for place, each in enumerate(found):
        response = parsed_object(each)
        called = {"tool_call_id": waiting[place]} if place < len(waiting) else {}
        content = each if response is None or "content" not in response else response["content"]
        named = {"name": name} if (name := name_of((response or {}).get("name"))) else {}
        text_content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield {"role": "tool", **called, **named, "content": text_content}


def _arguments_json(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value if value is not None else {}, ensure_ascii=False)


def _given(messages: JSON) -> list[Message]:
    found = objects_of(messages)
    if not found:
        raise ConfigError("it has no messages")
    return found


def _imported(line: Mapping[str, JSON], messages: list[Message]) -> Imported:
    rollout_id = name_of(line.get("id"))
    group_id, _, index = rollout_id.rpartition("/")
    # Python refuses to read numbers of very many digits, and no group has as many rollouts.
    ours = bool(group_id) and index.isdecimal() and len(index) < 9 and "task_id" in line
    outcome = outcome_of(line.get("outcome"))
    if line.get("completed") is False:  # a row of a batch
        outcome = Outcome.MAX_TURNS
    given = name_of(line.get("task_id")) or name_of(line.get("prompt_index")) or rollout_id
    turns = _turn_records(messages)
    given_reward = line.get("reward", line.get("score"))
    reward, error = finite(given_reward), text_of(line.get("error"))
    if reward is None and given_reward is not None and not error:
        error = f"its reward is not a number: {json.dumps(given_reward)[:80]}"
    more = {name: value for name, value in line.items() if name not in _IN_LINE}
    return Imported(
        trajectory=Trajectory(
            rollout_id="",
            group_id=group_id if ours else name_of(line.get("group_id")),
            task_id=given,
            index=int(index) if ours else NEXT,
            messages=messages,
            outcome=outcome,
            reward=reward,
            official=finite(line.get("official")),
            labels=labels_of(line.get("labels")),
            blame=blame_of(line.get("blame")),
            error=error,
            metrics=numbers_of(line.get("metrics")),
            detail=more | ({"metadata": line["metadata"]} if line.get("metadata") else {}),
            turns=turns,
            tool_calls_attempted=sum(len(turn.tools) for turn in turns),
        ),
        tools=_tool_schemas(line.get("tools")),
        said=annotations_of(line.get("annotations")),
    )


def _tool_schemas(value: JSON) -> list[dict[str, JSON]]:
    """Return the schemas of tools, which some data sets hold as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return objects_of(value)


def _turn_records(messages: Sequence[Message]) -> list[TurnRecord]:
    replies = [message for message in messages if message.get("role") == "assistant"]
    return [
        TurnRecord(
            number=number,
            tools=tuple(
                name_of(mapping_of(call.get("function")).get("name")) for call in objects_of(reply.get("tool_calls"))
            ),
        )
        for number, reply in enumerate(replies, 1)
    ]


def _group(line: Mapping[str, JSON]) -> Iterator[Imported]:
    """Yield the rollouts of a group. Of a rollout with several rows, the last row has the conversation to its end."""
    rows, told = list(_token_rows(line)), objects_of(line.get("rollouts"))
    scores = line["scores"]
    all_messages: list[JSON] = _list_or_empty(line.get("messages"))
    task, group_id = name_of(line.get("task_id")), name_of(line.get("group_id"))
    place = 0
    for number, one in enumerate(told or [{"rows": 1} for _ in rows]):
        count = min(count_of(one.get("rows", 1)), len(rows) - place)
        last = place + count - 1
        place += count
        messages = objects_of(all_messages[last]) if count and last < len(all_messages) else []
        reward = one["reward"] if "reward" in one else scores[last] if 0 <= last < len(scores) else None
        yield Imported(
            trajectory=Trajectory(
                rollout_id="",
                group_id=group_id,
                task_id=task or group_id,
                index=index_of(one.get("index"), number if told else NEXT),
                messages=messages,
                outcome=outcome_of(one.get("outcome")),
                reward=finite(reward),
                official=finite(one.get("official")),
                labels=labels_of(one.get("labels")),
                blame=blame_of(one.get("blame")),
                error=text_of(one.get("error")),
                metrics=numbers_of(one.get("metrics")),
                detail=dict(mapping_of(one.get("detail"))),
                prompt_tokens=count_of(one.get("prompt_tokens")),
                completion_tokens=count_of(one.get("completion_tokens")),
                turns=_turn_records(messages),
                tool_calls_attempted=sum(len(turn.tools) for turn in _turn_records(messages)),
                row=rows[last] if count else None,
            )
        )


def _token_rows(line: Mapping[str, JSON]) -> Iterator[TokenRow]:
    logprobs = line.get("inference_logprobs")
    source = name_of(line.get("token_source")) or "environment"
    masks: list[JSON] = _list_or_empty(line.get("masks"))
    for place, ids in enumerate(line["tokens"]):
        mask = masks[place] if place < len(masks) else None
        probs = logprobs[place] if isinstance(logprobs, list) and place < len(logprobs) else None
        yield _checked_row(ids, mask, probs, source)


def _imported_row(line: Mapping[str, JSON]) -> Imported:
    """Return the rollout of one token row, which has no messages."""
    prompt, completion, mask = line.get("prompt_ids"), line.get("completion_ids"), line.get("mask")
    if not (isinstance(prompt, list) and isinstance(completion, list) and isinstance(mask, list)):
        raise ConfigError("it lacks prompt_ids, completion_ids or mask")
    if len(mask) != len(completion):
        raise ConfigError("its mask and its completion differ in length")
    given = line.get("logprobs")
    logprobs = None
    if isinstance(given, list) and len(given) == len(mask):
        # In rows, 1.0 stands for a token that was not sampled, because no log-probability is clearly above 0.
        logprobs = [1.0] * len(prompt) + [value if trained else 1.0 for value, trained in zip(given, mask, strict=True)]
    masks = [UNTRAINED] * len(prompt) + [
        token if trained else UNTRAINED for token, trained in zip(completion, mask, strict=True)
    ]
    segment = count_of(line.get("segment"))
    rollout_id = name_of(line.get("rollout_id"))
    return Imported(
        trajectory=Trajectory(
            rollout_id="",
            group_id=name_of(line.get("group_id")),
            task_id=name_of(line.get("task_id")),
            index=index_of(line.get("index")) if segment == 0 else NEXT,
            messages=[],
            outcome=outcome_of(line.get("outcome")),
            reward=finite(line.get("reward")),
            official=finite(line.get("official")),
            labels=labels_of(line.get("labels")),
            detail={"row": f"segment {segment} of {rollout_id} ({name_of(line.get('reason'))})"},
            row=_checked_row([*prompt, *completion], masks, logprobs, name_of(line.get("source")) or "engine"),
        )
    )


def _checked_row(ids: JSON, masks: JSON, logprobs: JSON, source: str) -> TokenRow:
    """Return the row, without log-probabilities if they do not fit. Raises `ConfigError` if the ids do not."""
    if not (_are(ids, int) and all(-(1 << 31) <= each < 1 << 31 for each in ids)):
        raise ConfigError("its token ids are not numbers of 32 bits")
    if not (_are(masks, int) and len(masks) == len(ids)):
        masks = [UNTRAINED] * len(ids)
    fits = _are(logprobs, int | float) and len(logprobs) == len(ids)
    return TokenRow(
        tokens=ids, masks=masks, logprobs=[float(each) for each in logprobs] if fits else None, source=source
    )


def _list_or_empty(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _are(values: JSON, kind: type | object) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in values)  # type: ignore[arg-type]
