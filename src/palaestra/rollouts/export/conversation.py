"""A rollout's messages as a person reads them: turns, reasoning, and each tool call with its result.

Not a check of the messages: whatever shape a model, a tool or a data set left is shown as well as it can be. It keeps:
every text that goes on a page is printable and bounded, and what was cut says so. No HTML here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.core.types import JSON, Message
from palaestra.rollouts.export.printable import Span, printable, spans
from palaestra.rollouts.trajectory import InnerCallRecord, Trajectory

BLOCK_CHARS = 100_000
"""How much of one text a page shows: more than anyone scrolls through, little enough for a browser."""

PAGE_CHARS = 40_000_000
"""How much text a page holds before everything after it is cut short; browsers get slow somewhat above."""

_SHORT_CHARS = 1_000
_LONG_LINES = 24
_LONG_CHARS = 3_000
_INLINE_CHARS = 100
_BLOCK_NAMES = frozenset({"command", "content", "patch", "output", "code", "old_string", "new_string"})
_DIFF_NAMES = frozenset({"patch", "diff", "model_patch", "agent_patch"})
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
_REASONING_KEYS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Block:
    """A text of its own. `long` ones are folded until asked for; `lines` is how many there were before any cut."""

    spans: tuple[Span, ...]
    lines: int
    long: bool


@dataclass(frozen=True, slots=True)
class Fields:
    """An object's entries: short ones as text beside their names, the others as blocks."""

    inline: tuple[tuple[str, str], ...] = ()
    blocks: tuple[tuple[str, Block], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool answered. `exit_code` and `error` are taken out of the reply where it has them."""

    fields: Fields
    exit_code: int | None = None
    error: Block | None = None


@dataclass(slots=True)
class Call:
    """One tool call; `malformed` when its arguments are not a JSON object."""

    name: str
    arguments: Fields
    malformed: bool = False
    result: Result | None = None


@dataclass(slots=True)
class Entry:
    """One message with the results of its calls. `turn` counts the model's own turns from 0; None elsewhere."""

    role: str
    content: Block | None = None
    reasoning: list[Block] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    result: Result | None = None
    turn: int | None = None


class Page:
    """How much text still fits. Texts are cut in the middle; once the page is full only a taste of each is shown."""

    def __init__(self, block_chars: int = BLOCK_CHARS, page_chars: int = PAGE_CHARS) -> None:
        self._block_chars = block_chars
        self._left = page_chars

    @property
    def full(self) -> bool:
        """Whether texts were, or would be, cut because of the page's size."""
        return self._left <= 0

    def block(self, text: str, *, diff: bool = False) -> Block:
        """The text, bounded, coloured by its escape sequences, or as a diff."""
        lines = text.count("\n") + 1
        shown = self._bounded(text.strip("\n"))
        long = lines > _LONG_LINES or len(shown) > _LONG_CHARS
        return Block(tuple(diff_spans(shown) if diff else spans(shown)), lines, long)

    def fields(self, entries: Mapping[str, JSON]) -> Fields:
        """The entries of an object, each where it reads best."""
        inline: list[tuple[str, str]] = []
        blocks: list[tuple[str, Block]] = []
        for key, value in entries.items():
            name = printable(str(key)[:_INLINE_CHARS])
            text = value if isinstance(value, str) else as_json(value)
            if isinstance(value, str) and (name in _BLOCK_NAMES or "\n" in value or len(value) > _INLINE_CHARS):
                blocks.append((name, self.block(value, diff=name in _DIFF_NAMES)))
            elif len(text) > _INLINE_CHARS:
                blocks.append((name, self.block(as_json(value, indent=2))))
            else:
                inline.append((name, printable(text) if text else "(empty)"))
        return Fields(tuple(inline), tuple(blocks))

    def _bounded(self, text: str) -> str:
        limit = min(self._block_chars, _SHORT_CHARS) if self.full else self._block_chars
        if len(text) > limit:
            head, tail = text[: limit * 3 // 4], text[-(limit // 4) :]
            text = f"{head}\n… {len(text) - limit:,} characters are not shown here …\n{tail}"
        self._left -= len(text)
        return text


def conversation(messages: Sequence[Message], page: Page, turns: int) -> list[Entry]:
    """The messages in order; a tool's answer goes to the call it belongs to, or stands alone when there is none.

    The last `turns` assistant messages are the model's own; earlier ones were part of the prompt.
    """
    entries: list[Entry] = []
    waiting: dict[str, Call] = {}
    own = turns - sum(message.get("role") == "assistant" for message in messages)
    for message in messages:
        role = str(message.get("role") or "?")
        if role == "tool":
            result = _result(message.get("content"), page)
            call = waiting.pop(str(message.get("tool_call_id")), None)
            if call is None:
                entries.append(Entry("tool", result=result))
            else:
                call.result = result
            continue
        entry = _entry(printable(role[:_INLINE_CHARS]), message, page)
        if role == "assistant":
            calls = list(_calls(message.get("tool_calls"), page))
            waiting = dict(calls)
            entry.calls = [call for _, call in calls]
            entry.turn = own if 0 <= own < turns else None
            own += 1
        entries.append(entry)
    return entries


def inside(trajectory: Trajectory, page: Page) -> list[Entry]:
    """What happened inside the tool calls of a rollout: the calls of its programs, its sub-agents' conversations."""
    entries = [_program(trajectory.inner_calls, page)] if trajectory.inner_calls else []
    for each in trajectory.every_subagent():
        head = f"{each.goal}\n({each.outcome.value}{': ' if each.error else ''}{each.error})"
        entries.append(Entry(f"sub-agent {each.number}, started in turn {each.turn}", content=page.block(head)))
        entries += conversation(each.messages, page, 0)
        if each.inner_calls:
            entries.append(_program(each.inner_calls, page))
    return entries


def _program(calls: Sequence[InnerCallRecord], page: Page) -> Entry:
    shown = [
        Call(
            printable(f"{call.tool[:_INLINE_CHARS]} (turn {call.turn})"),
            page.fields(_parsed(call.arguments) or {"": call.arguments}),
            result=_result(call.reply, page),
        )
        for call in calls
    ]
    return Entry("calls of programs", calls=shown)


def diff_spans(text: str) -> Iterator[Span]:
    """A patch, unified or in the `*** Begin Patch` form, line by line."""
    for line in text.splitlines(keepends=True):
        css = {"+": "t-add", "-": "t-del", "@": "t-hunk", "*": "t-hunk"}.get(line[:1], "")
        yield Span(printable(line), "t-hunk" if line.startswith(("+++", "---", "diff ")) else css)


def _entry(role: str, message: Message, page: Page) -> Entry:
    text = _text(message.get("content"))
    thoughts = [thought for key in _REASONING_KEYS if isinstance(thought := message.get(key), str) and thought]
    if role == "assistant":
        thoughts += _THINK.findall(text)
        text = _THINK.sub("", text)
    return Entry(
        role,
        content=page.block(text) if text.strip() else None,
        reasoning=[page.block(thought) for thought in dict.fromkeys(thoughts) if thought.strip()],
    )


def _calls(requested: JSON, page: Page) -> Iterator[tuple[str, Call]]:
    for request in requested if isinstance(requested, list) else []:
        request = request if isinstance(request, dict) else {}
        function = request.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments")
        parsed = arguments if isinstance(arguments, dict) else _parsed(arguments or "{}")
        shown = page.fields(parsed) if parsed is not None else Fields(blocks=(("", page.block(_text(arguments))),))
        name = printable(str(function.get("name"))[:_INLINE_CHARS])
        yield str(request.get("id")), Call(name, shown, malformed=parsed is None)


def _result(content: JSON, page: Page) -> Result:
    reply = _parsed(content) if isinstance(content, str) else None
    if reply is None:
        return Result(Fields(blocks=(("", page.block(_text(content) or "(no output)")),)))
    exit_code, error = reply.get("exit_code"), reply.get("error")
    coded = isinstance(exit_code, int) and not isinstance(exit_code, bool)
    taken = {name for name, known in (("exit_code", coded), ("error", not error or isinstance(error, str))) if known}
    return Result(
        page.fields({key: value for key, value in reply.items() if key not in taken}),
        exit_code=exit_code if coded else None,
        error=page.block(error) if error and isinstance(error, str) else None,
    )


def _text(content: JSON) -> str:
    """The text of a message's content, which may be a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else as_json(content, indent=2)
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        parts.append(text if isinstance(text, str) else f"[{as_json(part)[:200]}]")
    return "\n".join(parts)


def _parsed(text: JSON) -> dict[str, JSON] | None:
    """The JSON object that the text holds, or None."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_json(value: JSON, indent: int | None = None) -> str:
    """The value as JSON text for a reader; what JSON has no word for is shown as Python does."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except RecursionError:
        return "(nested too deeply to show)"
