"""A rollout as a list of steps for the terminal: its messages with calls and results, what the check found, commands.

It is made from the record that the page gets (`rollout_record`), and has no widget in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.core.types import JSON
from palaestra.viewer.check_evidence import CUT, breaks, listed_tests
from palaestra.viewer.reasons import beginning

_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|$)\s*", re.DOTALL)
_MAIN = ("command", "code", "path", "query", "url")


@dataclass(frozen=True)
class StepText:
    """A text of a step. `kind` is `text`, `reasoning`, `call`, `result`, `failed`, `good` or `bad`. If the record has
    only the beginning and the end of the text, `path` finds the whole."""

    text: str
    kind: str = "text"
    path: str = ""


@dataclass(frozen=True)
class Step:
    """One step: who speaks (`role`), a title, notes next to it, and its texts."""

    role: str
    title: str
    notes: str = ""
    parts: list[StepText] = field(default_factory=list)


def steps(record: dict[str, JSON]) -> list[Step]:
    """Return the steps of a rollout in order."""
    messages, turns = record.get("messages") or [], record.get("turns") or []
    seconds = (record.get("beside") or {}).get("turn_s") or []
    return [
        *_conversation(messages, turns, seconds),
        *_inside(record),
        *_graded(record),
        *_commands(record),
    ]


def _conversation(
    messages: Sequence[JSON], turns: Sequence[JSON], seconds: Sequence[Sequence[float]] = ()
) -> Iterator[Step]:
    own = len(turns) - sum(_role(message) == "assistant" for message in messages)  # earlier ones were compacted away
    for message in messages:
        role = _role(message)
        if role in ("tool", "function"):
            yield Step(role, "result", parts=list(_result(message.get("content"))))
            continue
        title, notes = role, ""
        if role == "assistant":
            if 0 <= own < len(turns):
                title = f"turn {turns[own].get('number')}"
                notes = _turn_notes(turns[own], seconds[own] if own < len(seconds) else ())
            own += 1
        yield Step(role, title, notes, list(_parts(message)))


def _role(message: JSON) -> str:
    return str(message.get("role")) if isinstance(message, Mapping) else "?"


def _turn_notes(turn: Mapping[str, JSON], seconds: Sequence[float]) -> str:
    notes = [str(turn.get("finish_reason") or "")]
    if turn.get("prompt_tokens"):
        notes.append(f"{turn['prompt_tokens']} → {turn.get('completion_tokens') or 0} tokens")
    notes += [f"{name} {each:.1f} s" for name, each in zip(("model", "tools"), seconds, strict=False) if each >= 0.05]
    return " · ".join(filter(None, notes))


def _parts(message: Mapping[str, JSON]) -> Iterator[StepText]:
    content = message.get("content")
    thoughts = dict.fromkeys(beginning(message[key]) for key in ("reasoning_content", "reasoning") if message.get(key))
    if message.get("role") == "assistant" and isinstance(content, str) and "<think>" in content:
        thoughts |= dict.fromkeys(filter(str.strip, _THOUGHT.findall(content)))
        content = _THOUGHT.sub("", content)
    yield from (StepText(thought, "reasoning") for thought in thoughts)
    yield from _texts(content)
    requests = message.get("tool_calls")
    for request in requests if isinstance(requests, list) else []:
        function = request.get("function") if isinstance(request, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        yield StepText(f"{function.get('name')} {arguments(function.get('arguments'))}", "call")


def _texts(content: JSON, kind: str = "text") -> Iterator[StepText]:
    if content is None or content == "":
        return
    if isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "text":
                yield from _texts(part.get("text"), kind)
            elif isinstance(part, Mapping) and "image_url" in part:
                yield StepText("(an image)", "reasoning")
            else:
                yield StepText(_json(part), kind)
        return
    yield whole(content, kind)


def whole(value: JSON, kind: str = "text") -> StepText:
    """Return a text of the record, which may be cut, or JSON data as a part."""
    if isinstance(value, Mapping) and CUT in value:
        missing = value["chars"] - len(value["head"]) - len(value["tail"])
        return StepText(f"{value['head']}\n… {missing:,} characters …\n{value['tail']}", kind, str(value[CUT]))
    return StepText(value if isinstance(value, str) else _json(value), kind)


def arguments(value: JSON) -> str:
    """Return the arguments of a call: the text itself if it is the only one, and otherwise JSON."""
    found = _decoded(value)
    if not isinstance(found, dict):
        return beginning(value) if value is not None else ""
    main = next((name for name in _MAIN if isinstance(found.get(name), str)), None)
    pairs = [f"{name}={_plain(value)}" for name, value in found.items() if name != main]
    long = [each for each in pairs if "\n" in each]
    words = [*([str(found[main])] if main is not None else []), *(each for each in pairs if "\n" not in each)]
    return "\n".join([" ".join(words), *long]).strip()


def _plain(value: JSON) -> str:
    """Return a value of an argument: a text as it is, on lines of its own if it has several, and otherwise JSON."""
    if isinstance(value, str):
        return f"\n{value}" if "\n" in value else value
    return json.dumps(value, ensure_ascii=False)


def _result(content: JSON) -> Iterator[StepText]:
    found = _decoded(content)
    if not isinstance(found, dict) or CUT in found:
        texts = list(_texts(content, "result"))
        yield from texts or [StepText("(no output)", "reasoning")]
        return
    code, error = found.pop("exit_code", None), found.pop("error", None)
    if isinstance(code, int) and code != 0:
        yield StepText(f"exit code {code}", "failed")
    if error:
        yield whole(error, "failed")
    output = found.pop("output", None)
    if output not in (None, ""):
        yield whole(output, "result")
    if found:
        yield StepText(_json(found), "result")
    elif output == "" and not error and not code:
        yield StepText("(no output)", "reasoning")


def _decoded(value: JSON) -> JSON:
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _json(value: JSON, indent: str = "") -> str:
    """Return JSON data, with texts of several lines as they are, on lines of their own."""
    if not isinstance(value, Mapping) or CUT in value:
        return json.dumps(value, indent=1, ensure_ascii=False)
    lines = []
    for name, each in value.items():
        text = each if isinstance(each, str) else _json(each, "  ")
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "\n".join(f"{indent}{line}" for line in "\n".join(lines).split("\n"))


def _inside(record: dict[str, JSON]) -> Iterator[Step]:
    for call in record.get("inner_calls") or []:
        parts = [StepText(f"{call['tool']} {arguments(call['arguments'])}", "call"), whole(call["reply"], "result")]
        yield Step("tool", f"call of a program in turn {call['turn']}", parts=parts)
    waiting = list(record.get("subagents") or [])
    while waiting:
        each = waiting.pop(0)
        title = f"sub-agent {each['number']}, started in turn {each['turn']}: {each['outcome']}"
        yield Step("user", title, parts=[whole(each["goal"])])
        yield from _conversation(each["messages"], [])
        waiting[:0] = each.get("subagents") or []


def _graded(record: dict[str, JSON]) -> Iterator[Step]:
    detail = {name: value for name, value in (record.get("detail") or {}).items() if value not in (None, "", [], {})}
    detail.pop("difference", None)
    tests = {each.name: each for each in listed_tests(detail)}.values()
    parts = [StepText(f"the check fails over this work: {broken}", "bad")] if (broken := breaks(detail)) else []
    for each in tests:
        if each.status != "passed":
            parts.append(StepText(f"✕ {each.name}" + (f" ({each.status})" if each.status != "failed" else ""), "bad"))
            parts += [StepText(each.output, "result")] if each.output else []
    parts += [StepText(f"✓ {each.name}", "good") for each in tests if each.status == "passed"]
    for name, value in detail.items():
        if not any(True for _ in listed_tests({name: value})):
            shown = whole(value, "result")
            parts.append(
                StepText(f"{name}:{chr(10) if chr(10) in shown.text else ' '}{shown.text}", "result", shown.path)
            )
    if parts:
        yield Step("end", "grading", parts=parts)


def _commands(record: dict[str, JSON]) -> Iterator[Step]:
    found: dict[str, str] = record.get("commands") or {}
    if found:
        yield Step("end", "commands", parts=[StepText(f"{what}:\n  {command}") for what, command in found.items()])
