"""Reads the logs of Inspect evaluations: `.eval` archives, which have a member for each sample, and `.json` logs.

A sample is a rollout, its epoch is the index in its group, and its scores are metrics. The reward is the score that the
log names as its headline, otherwise its first score, as Inspect's own conversion to numbers. Turns, times and tools
come from the events of the sample; the other events, such as states and spans, are not read.

Source: the models of `inspect_ai.log` (0.3.285); version 2 of the format, and 1, which differs only in the archive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from palaestra.rollouts.export.inspect_log import ANNOTATIONS, HEADER, OURS, REGRADED, SAMPLES, START
from palaestra.rollouts.records import Beside, ToolErrorRecord, Trajectory, TurnRecord
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_view.imports.atif import blame_of, labels_of, outcome_of
from palaestra_view.imports.documents import ZipDocuments, decoded
from palaestra_view.imports.judged import annotations_of, grade_of
from palaestra_view.imports.source import (
    NEXT,
    Imported,
    LogFacts,
    count_of,
    finite,
    mapping_of,
    name_of,
    numbers_of,
    objects_of,
    seconds_of,
    text_of,
)

NAME = "inspect"
_NEWEST = 2
_ATTACHED = re.compile(r"attachment://([0-9a-f]{32})")
_ATTACHED_CHARS = 64 << 20
"""The characters that attachments may add to one sample, so that many references to a long one do no harm."""

_LIMITS = {"message": Outcome.MAX_TURNS, "turn": Outcome.MAX_TURNS, "token": Outcome.LENGTH, "context": Outcome.LENGTH,
           "operator": Outcome.CANCELLED}  # fmt: skip
_STOPS = {"max_tokens": Outcome.LENGTH, "model_length": Outcome.LENGTH}
_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class _Event(msgspec.Struct):
    event: str = ""
    id: JSON = None
    output: JSON = None
    tools: JSON = None
    working_time: JSON = None


class _Sample(msgspec.Struct):
    id: JSON = ""
    epoch: JSON = 1
    input: JSON = None
    target: JSON = None
    messages: JSON = None
    output: JSON = None
    scores: JSON = None
    metadata: JSON = None
    events: list[_Event] | None = None
    model_usage: JSON = None
    started_at: JSON = None
    total_time: JSON = None
    error: JSON = None
    limit: JSON = None
    attachments: JSON = None


class _Head(msgspec.Struct):
    version: JSON = 0
    eval: JSON = None
    plan: JSON = None
    results: JSON = None
    status: JSON = ""
    samples: list[msgspec.Raw] | None = None


_heads: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Head)
_samples: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Sample)
_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class InspectArchive:
    """The source for a `.eval` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place, self.size = 0, path.stat().st_size
        self._archive = ZipDocuments(path)

    def facts(self) -> LogFacts:
        """Return the facts about the log."""
        return _facts(self._head(), self.path)

    def rollouts(self) -> Iterator[Imported | str]:
        """Yield each sample, in the order in which the archive has them."""
        headline = _headline(self._head())
        names = [name for name in self._archive if name.startswith(SAMPLES) and name.endswith(".json")]
        for number, name in enumerate(names, 1):
            self.place = self.size * number // len(names)
            try:
                yield _imported(self._archive.read(name), headline)
            except ConfigError as error:
                yield f"{name[:200]}: {error}"

    def _head(self) -> _Head:
        """Return the log's header, or what a run that has not ended wrote at its start."""
        for name in (HEADER, START):
            if name in self._archive:
                data = self._archive.read(name)
                try:
                    head: _Head = decoded(data, _heads)
                except ConfigError as error:
                    raise ConfigError(f"{self.path}: {name} cannot be read: {error}") from None
                return head
        raise ConfigError(f"{self.path} is not an Inspect log: it has neither {HEADER} nor {START}")


def facts(data: bytes, path: Path) -> LogFacts:
    """Return the facts about a log in one JSON object."""
    return _facts(_read_log(data)[0], path)


def _read_log(data: bytes) -> tuple[_Head, Sequence[bytes | msgspec.Raw]]:
    """Return the head and the samples of a log in one JSON object. Inspect writes NaN for a sample without a score."""
    try:
        head: _Head = msgspec.json.decode(data, type=_Head)
        return head, head.samples or []
    except (msgspec.MsgspecError, UnicodeError):  # NaN, or bytes that are not UTF-8
        loose = decoded(data, _anything)
    try:
        head = msgspec.convert({**loose, "samples": None}, _Head, strict=False)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(f"it is not what was expected: {error}") from None
    return head, [json.dumps(each).encode() for each in objects_of(loose.get("samples"))]


def read(data: bytes) -> Iterator[Imported | str]:
    """Yield each sample of a log in one JSON object."""
    head, samples = _read_log(data)
    headline = _headline(head)
    for number, sample in enumerate(samples, 1):
        try:
            yield _imported(bytes(sample), headline)
        except ConfigError as error:
            yield f"sample {number}: {error}"


def _facts(head: _Head, path: Path) -> LogFacts:
    version = count_of(head.version)
    if version > _NEWEST:
        raise ConfigError(f"{path} has version {version} of Inspect's log format; versions up to {_NEWEST} can be read")
    spec, results = mapping_of(head.eval), mapping_of(head.results)
    scores = {
        f"{name_of(score.get('name'))} {name}": finite(mapping_of(metric).get("value"))
        for score in objects_of(results.get("scores"))
        for name, metric in mapping_of(score.get("metrics")).items()
    }
    shown = ("task_version", "task_file", "created", "task_args_passed", "config", "packages", "revision", "metadata")
    solvers = [name_of(step.get("solver")) for step in objects_of(mapping_of(head.plan).get("steps"))]
    provenance = {name: spec[name] for name in shown if spec.get(name)}
    provenance |= {"status": name_of(head.status), "solvers": solvers, "scores": scores}
    return LogFacts(
        format=NAME,
        env=name_of(spec.get("task")),
        model=name_of(spec.get("model")),
        run_id=name_of(spec.get("eval_id")) or name_of(spec.get("run_id")),
        started_at=seconds_of(spec.get("created")),
        group_size=count_of(mapping_of(spec.get("config")).get("epochs")),
        provenance={name: value for name, value in provenance.items() if value},
    )


def _headline(head: _Head) -> str:
    """Return the name of the score that is the log's main result; empty if it has none."""
    results = mapping_of(head.results)
    named = name_of(mapping_of(results.get("headline")).get("score"))
    scores = objects_of(results.get("scores"))
    return named or (name_of(scores[0].get("name")) if scores else "")


def _imported(data: bytes, headline: str) -> Imported:
    sample: _Sample = decoded(data, _samples)
    scores = {str(name): mapping_of(score) for name, score in mapping_of(sample.scores).items()}
    ours = mapping_of(mapping_of(sample.metadata).get(OURS))
    messages = _Messages(mapping_of(sample.attachments)).read(sample)
    calls = [each for each in sample.events or () if each.event == "model"]
    turns, times = _turns_and_times(sample, calls)
    usage = [mapping_of(each) for each in mapping_of(sample.model_usage).values()]
    costs = [cost for each in usage if (cost := finite(each.get("total_cost"))) is not None]
    error = mapping_of(sample.error)
    first = headline if headline in scores else next(iter(scores), "")
    attempted = sum(len(turn.tools) for turn in turns)
    errors = _tool_errors(objects_of(sample.messages))
    epoch = count_of(sample.epoch)
    grade = grade_of(ours.get(REGRADED))
    if grade is not None and grade.reward is not None:  # our export has the new reward in place of the recorded one
        ours = {**ours, "reward": grade.before}
    return Imported(
        trajectory=Trajectory(
            rollout_id="",
            group_id=name_of(ours.get("group_id")),
            task_id=name_of(sample.id),
            index=count_of(ours.get("index")) if ours else epoch - 1 if epoch else NEXT,
            messages=messages,
            outcome=outcome_of(ours.get("outcome")) if ours else _outcome(sample),
            reward=finite(ours.get("reward")) if ours else _value(scores.get(first, {}).get("value")),
            official=finite(ours.get("official")),
            labels=labels_of(ours.get("labels")),
            blame=blame_of(ours.get("blame")),
            error=text_of(ours.get("error")) if ours else text_of(error.get("message")) or _limit_text(sample),
            metrics=numbers_of(ours.get("metrics")) if ours else _score_numbers(scores),
            detail=dict(mapping_of(ours.get("detail"))) if ours else _detail(sample, scores),
            prompt_tokens=sum(
                count_of(each.get(name))
                for each in usage
                for name in ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
            ),
            completion_tokens=sum(count_of(each.get("output_tokens")) for each in usage),
            cost=sum(costs) if costs else None,
            turns=turns,
            tool_calls_attempted=attempted,
            tool_calls_schema_valid=attempted - sum(each.error.startswith("parsing") for each in errors),
            tool_errors=errors,
            beside=Beside(
                started_at=seconds_of(sample.started_at), duration_s=finite(sample.total_time) or 0.0, turn_s=times
            ),
        ),
        tools=[{"type": "function", "function": tool} for tool in objects_of(calls[0].tools if calls else None)],
        said=annotations_of(ours.get(ANNOTATIONS)),
        grade=grade,
    )


def _outcome(sample: _Sample) -> Outcome:
    if sample.error:
        return Outcome.INFRA_ERROR
    if limit := mapping_of(sample.limit):
        # The other limits, such as those of time and cost, are parts of a budget here.
        return _LIMITS.get(text_of(limit.get("type")), Outcome.BUDGET)
    choices = objects_of(mapping_of(sample.output).get("choices"))
    return _STOPS.get(text_of(choices[0].get("stop_reason")) if choices else "", Outcome.NATURAL)


def _limit_text(sample: _Sample) -> str:
    """Return the text about the limit that ended a sample."""
    limit = mapping_of(sample.limit)
    if not limit:
        return ""
    reached = f"the {text_of(limit.get('type'))} limit of {finite(limit.get('limit')) or 0:g} was reached"
    return text_of(limit.get("reason")) or reached


def _value(value: JSON) -> float | None:
    """Return a score's value as a number, as `inspect_ai.scorer.value_to_float` does; None if it is not a number. The
    value of several parts is their mean."""
    if isinstance(value, str):
        known = _VALUES.get(value, _VALUES.get(value.lower()))
        try:
            return known if known is not None else finite(float(value))
        except ValueError:
            return None
    if isinstance(value, Mapping | list):
        parts = [_value(each) for each in (value.values() if isinstance(value, Mapping) else value)]
        found = [each for each in parts if each is not None]
        return sum(found) / len(found) if found else None
    return finite(value)


def _score_numbers(scores: Mapping[str, Mapping[str, JSON]]) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for name, score in scores.items():
        value = score.get("value")
        parts = mapping_of(value)
        found |= {f"{name}/{part}": _value(each) for part, each in parts.items()} or {name: _value(value)}
    return {name: value for name, value in found.items() if value is not None}


def _detail(sample: _Sample, scores: Mapping[str, Mapping[str, JSON]]) -> dict[str, JSON]:
    """Return the evidence of the scores: their values as recorded, answers and explanations, the target and the
    sample's metadata."""
    shown = ("value", "answer", "explanation", "reason", "metadata")
    parts = {name: {key: score[key] for key in shown if score.get(key) is not None} for name, score in scores.items()}
    found: dict[str, JSON] = {"scores": parts, "target": sample.target, "metadata": sample.metadata}
    if trace := text_of(mapping_of(sample.error).get("traceback")):
        found["traceback"] = trace
    category = mapping_of(sample.metadata).get("category")
    if isinstance(category, str):
        found["category"] = category
    return {name: value for name, value in found.items() if value}


def _turns_and_times(sample: _Sample, calls: Sequence[_Event]) -> tuple[list[TurnRecord], list[tuple[float, float]]]:
    """Return a record and the seconds of each of the model's own replies. A reply whose event is missing has only its
    tools."""
    by_id = {
        name_of(message.get("id")): (each, choice)
        for each in calls
        for choice in objects_of(mapping_of(each.output).get("choices"))[:1]
        if (message := mapping_of(choice.get("message")))
    }
    tools = {name_of(each.id): finite(each.working_time) or 0.0 for each in sample.events or () if each.event == "tool"}
    turns: list[TurnRecord] = []
    times: list[tuple[float, float]] = []
    for message in objects_of(sample.messages):
        if message.get("role") != "assistant" or message.get("source") != "generate":
            continue
        event, choice = by_id.get(name_of(message.get("id")), (_Event(), {}))
        usage = mapping_of(mapping_of(event.output).get("usage"))
        requests = objects_of(message.get("tool_calls"))
        turns.append(
            TurnRecord(
                number=len(turns) + 1,
                finish_reason=text_of(choice.get("stop_reason")) or None,
                prompt_tokens=count_of(usage.get("input_tokens")),
                completion_tokens=count_of(usage.get("output_tokens")),
                tools=tuple(name_of(call.get("function")) for call in requests),
            )
        )
        spent = sum(tools.get(name_of(call.get("id")), 0.0) for call in requests)
        times.append((finite(event.working_time) or 0.0, spent))
    return turns, times if any(map(any, times)) else []


def _tool_errors(messages: Sequence[Mapping[str, JSON]]) -> list[ToolErrorRecord]:
    found, turn = list[ToolErrorRecord](), 0
    asked: dict[str, JSON] = {}
    for message in messages:
        if message.get("role") == "assistant":
            turn += message.get("source") == "generate"
            asked |= {name_of(call.get("id")): call.get("arguments") for call in objects_of(message.get("tool_calls"))}
        elif message.get("role") == "tool" and (error := mapping_of(message.get("error"))):
            arguments = asked.get(name_of(message.get("tool_call_id")))
            found.append(
                ToolErrorRecord(
                    turn=turn,
                    tool=name_of(message.get("function")),
                    arguments=json.dumps(arguments),
                    error=f"{text_of(error.get('type'))}: {text_of(error.get('message'))}",
                )
            )
    return found


class _Messages:
    """Makes messages in the OpenAI shape. `attachments` has the texts and images that messages refer to."""

    def __init__(self, attachments: Mapping[str, JSON]) -> None:
        self._attachments = attachments
        self._left = _ATTACHED_CHARS

    def read(self, sample: _Sample) -> list[Message]:
        found = objects_of(sample.messages) or objects_of(sample.input)
        if not found and isinstance(sample.input, str):
            found = [{"role": "user", "content": sample.input}]
        return [self._message(each) for each in found]

    def _message(self, given: Mapping[str, JSON]) -> Message:
        thoughts: list[str] = []
        content = self._content(given.get("content"), thoughts)
        error = mapping_of(given.get("error"))
        if error and not content:
            content = text_of(error.get("message"))
        message: Message = {"role": name_of(given.get("role")), "content": content}
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        if calls := objects_of(given.get("tool_calls")):
            message["tool_calls"] = [self._call(each) for each in calls]
        if given.get("tool_call_id"):
            message["tool_call_id"] = name_of(given.get("tool_call_id"))
        return message

    def _content(self, content: JSON, thoughts: list[str]) -> JSON:
        if not isinstance(content, list):
            return self._whole(content) if isinstance(content, str) else ""
        parts: list[JSON] = []
        for part in objects_of(content):
            kind = part.get("type")
            if kind == "text":
                parts.append({"type": "text", "text": self._whole(text_of(part.get("text")))})
            elif kind == "reasoning":
                thoughts.append(self._whole(text_of(part.get("reasoning")) or text_of(part.get("summary"))))
            elif kind == "image":
                parts.append({"type": "image_url", "image_url": {"url": self._whole(text_of(part.get("image")))}})
            else:
                parts.append(part)
        only = [part["text"] for part in parts if part.get("type") == "text"]
        return only[0] if len(only) == len(parts) == 1 else parts if parts else ""

    def _call(self, call: Mapping[str, JSON]) -> JSON:
        arguments = call.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        function = {"name": name_of(call.get("function")), "arguments": self._whole(text)}
        return {"id": name_of(call.get("id")), "type": "function", "function": function}

    def _whole(self, text: str) -> str:
        return _ATTACHED.sub(self._attached, text) if "attachment://" in text else text

    def _attached(self, found: re.Match[str]) -> str:
        text = self._attachments.get(found[1])
        if not isinstance(text, str) or len(text) > self._left:
            return found[0]
        self._left -= len(text)
        return text
