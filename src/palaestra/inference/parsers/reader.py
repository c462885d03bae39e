"""The pieces of one output as they are found, and what to tell a listener of them.

For the driver and the grammars, which write here in the order of the text. Invariant: text is what no other piece
covers; white space alone is never text, so it is held back until something follows it.

One format as a grammar, and the driver that makes a parser of it: text, thinking, calls, in one pass.

For: everything that all formats share. A grammar only says how a call begins and reads on from there. Not for any one
format.

Thinking begins with its tag at the beginning of the output and after thinking or calls, white space aside; there it may
be left open, and then goes on to the end. A tag amid text is a mention of it, and text, unless it begins a line and is
closed; where calls stand before its end tag and more text after it on the same line, both are mentions. A call between
a mentioned tag and its end tag is broken, since nobody can say whether it was meant. An end tag that nothing opened
ends thinking that began in the prompt, unless it is known that none did.

Invariants: a stream and a whole text go through the same code, so they give the same pieces; thinking is taken
out before calls are looked for; a grammar consumes what it has read, so no text is read more than a fixed number of
times.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple, TypeVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.argument_types import ArgumentTypes
from palaestra.inference.parsers.parser import (
    BrokenCall,
    Call,
    Event,
    Malformed,
    Parsed,
    Piece,
    Reason,
    Reasoning,
    ReasoningDelta,
    TakenBack,
    Text,
    TextDelta,
    Tools,
    Unwritable,
)
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source, marks

Found = TypeVar("Found", Piece, Event)

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHORT = re.compile(f"[{_ALPHABET}]{{9}}")


class Hold(NamedTuple):
    """How many pieces and events are settled."""

    pieces: int
    events: int


class Page:
    """`written` is the position up to which everything is accounted for. `short_ids`: every id has nine letters and
    digits, also those that the model gave."""

    def __init__(self, source: Source, short_ids: bool = False, turn: int = 0) -> None:
        self.pieces: list[Piece] = []
        self.written = 0
        self._source = source
        self._short_ids = short_ids
        self._turn = turn
        self._ids: set[str] = set()
        self._events: list[Event] = []
        self._open: list[str] = []
        self._held = ""
        self._hold: Hold | None = None
        self._number = 0

    def text_to(self, end: int) -> None:
        """Everything up to `end` that is not written yet is text."""
        more = self._take(end)
        if not self._open and (not more or more.isspace()):
            self._held += more
        elif more:
            self._tell(TextDelta(self._held + more))
            self._open.append(self._held + more)
            self._held = ""

    def reasoning_to(self, end: int) -> None:
        """Everything up to `end` that is not written yet is thinking."""
        more = self._take(end)
        if more:
            self._tell(ReasoningDelta(more))
            self._open.append(more)

    def end_text(self) -> None:
        """What is written next is no text."""
        if self._open:
            text = "".join(self._open)
            self.pieces.append(Text(text, self.written - len(text), self.written))
        self._open, self._held = [], ""

    def end_reasoning(self, start: int, end: int) -> None:
        """The thinking so far, with its tags, goes from `start` to `end`."""
        self.pieces.append(Reasoning("".join(self._open), start, end))
        self._open = []
        self.written = end

    def skip_to(self, end: int) -> None:
        """What lies before `end` belongs to the format: neither text nor call."""
        self.end_text()
        self.written = end

    def call(
        self, name: str, arguments: Mapping[str, JSON], arguments_text: str, start: int, end: int, call_id: str = ""
    ) -> None:
        """A call that may run. `call_id` is the one that the model gave it, where the format has ids."""
        known_as = self._id(call_id, name, arguments_text)
        self._add(Call(known_as, name, arguments, arguments_text, start, end))

    def broken(self, problem: Malformed, name: str, start: int, end: int, call_id: str = "") -> None:
        """A call that must not run."""
        text = self._source.read(start, end)
        known_as = self._id(call_id, name, text)
        self._add(BrokenCall(known_as, name, problem.reason, problem.detail, text, start, end))

    def take_back(self, start: int, end: int) -> None:
        """All that came before the end of thinking from `start` to `end` was thinking."""
        self.end_text()
        self.pieces = [Reasoning(self._source.read(0, start), 0, end)]
        self.written = end
        self._tell(TakenBack(end))

    @property
    def speaking(self) -> bool:
        """Whether text, not white space alone, was found after the last piece."""
        return bool(self._open)

    def hold(self) -> None:
        """What is found from here on, amid text, may turn out to be something else: it is not told yet."""
        self._hold = Hold(len(self.pieces), len(self._events))

    @property
    def holds_calls(self) -> bool:
        """Whether a call is among what is held."""
        return self._hold is not None and any(isinstance(piece, Call) for piece in self.pieces[self._hold.pieces :])

    def release(self) -> None:
        """What was held is what it seemed."""
        self._hold = None

    def refuse_held(self, problem: Malformed) -> None:
        """The calls that were held must not run."""
        if self._hold is None:
            return
        pieces, events = self._hold
        self.pieces[pieces:] = [self._refused(piece, problem) for piece in self.pieces[pieces:]]
        self._events[events:] = [self._refused(event, problem) for event in self._events[events:]]
        self._hold = None

    def _refused(self, found: Found, problem: Malformed) -> Found | BrokenCall:
        if not isinstance(found, Call):
            return found
        text = self._source.read(found.start, found.end)
        return BrokenCall(found.id, found.name, problem.reason, problem.detail, text, found.start, found.end)

    def turn_to_thinking(self, begin: Mark, end: Mark) -> None:
        """What was held stands in thinking between these tags."""
        self.end_text()
        if self._hold is None:
            return
        pieces, events = self._hold
        text = self.pieces[pieces]
        self.pieces[pieces:] = [Text(self._source.read(text.start, begin.start), text.start, begin.start)]
        del self._events[events:]
        self._hold = None
        self.written = begin.end
        self.reasoning_to(end.start)
        self.end_reasoning(begin.start, end.end)

    def news(self) -> list[Event]:
        """What was found since this was last asked, and is settled."""
        settled = len(self._events) if self._hold is None else self._hold.events
        told, self._events = self._events[:settled], self._events[settled:]
        if self._hold is not None:
            self._hold = self._hold._replace(events=0)
        events: list[Event] = []
        for kind, run in groupby(told, type):
            if kind is TextDelta or kind is ReasoningDelta:
                events.append(kind("".join(event.text for event in run if isinstance(event, kind))))
            else:
                events.extend(run)
        return events

    def _add(self, piece: Call | BrokenCall) -> None:
        self.text_to(piece.start)
        self.skip_to(piece.end)
        self.pieces.append(piece)
        self._tell(piece)
        self._number += 1

    def _take(self, end: int) -> str:
        start, self.written = self.written, max(self.written, end)
        return self._source.read(start, end)

    def _tell(self, event: Event) -> None:
        self._events.append(event)

    def _id(self, given: str, name: str, content: str) -> str:
        """The model's own, where it can be one, or one of the content and the place in the conversation, so that equal
        outputs have equal ids."""
        if given and given not in self._ids and (not self._short_ids or _SHORT.fullmatch(given)):
            self._ids.add(given)
            return given
        place = f"{self._turn}\0{self._number}" if self._turn else str(self._number)
        digest = hashlib.sha256(f"{place}\0{name}\0{content}".encode(errors="surrogatepass")).digest()
        if self._short_ids:
            return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9])
        return f"call_{self._turn}_{self._number}" if self._turn else f"call_{digest[:4].hex()}"


_BLANKS = re.compile(r"[ \t]*")


class Output:
    """What a grammar works with: the text, the page to write to, and the types of arguments.

    `in_section`: tags that hold several calls have been opened and not closed.
    """

    def __init__(self, tools: Tools | None, short_ids: bool, turn: int = 0) -> None:
        self.source = Source()
        self.page = Page(self.source, short_ids, turn)
        self.types = ArgumentTypes(tools or ())
        self.in_section = False

    def leave_section(self, mark: Mark) -> int | None:
        """Where text goes on after the end tag of a section; None where none is open."""
        was_open, self.in_section = self.in_section, False
        return mark.end if was_open else None


class Grammar(ABC):
    """How calls look in one format."""

    openers: ClassVar[Markers]
    thinking: ClassVar[Sequence[tuple[str, str]]] = (("<think>", "</think>"),)
    short_ids: ClassVar[bool] = False

    def begin(self, output: Output) -> Reading[int]:
        """Read what only the beginning of an output can hold, and return where to go on: where the format has that."""
        yield from ()
        return 0

    @abstractmethod
    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """Read the call or calls that begin at `mark` and write them to the page.

        Returns where text goes on, or None when the mark is only mentioned, not used.
        """

    @abstractmethod
    def render(self, calls: Sequence[Call], text: str) -> str:
        """`text` and then `calls` as the family's own chat template writes them."""


class GrammarParser:
    """The parser of one grammar."""

    def __init__(self, name: str, grammar: Grammar) -> None:
        self.name = name
        self._grammar = grammar

    def parse(
        self, text: str, *, tools: Tools | None = None, cut: bool = False, thinking: bool | None = None, turn: int = 0
    ) -> Parsed:
        """What `text` holds; see `Parser.parse`."""
        stream = self.stream(tools=tools, thinking=thinking, turn=turn)
        stream.take(text)
        return stream.end(cut)

    def stream(self, *, tools: Tools | None = None, thinking: bool | None = None, turn: int = 0) -> GrammarStream:
        """The same, piece by piece."""
        return GrammarStream(self._grammar, tools, thinking, turn)

    def render(self, calls: Sequence[Call], text: str = "", *, tools: Tools | None = None) -> str:
        """`text` and `calls` in this format. Raises `Unwritable` when they would not be read back as they are."""
        rendered = self._grammar.render(calls, text)
        parsed = self.parse(rendered, tools=tools)
        wanted = [(call.name, call.arguments) for call in calls]
        found = [(call.name, call.arguments) for call in parsed.calls]
        if found != wanted or parsed.errors or (parsed.content or "").strip() != text.strip():
            raise Unwritable(f"{self.name} cannot express these calls: they are read back as {found!r:.500}")
        return rendered


class Mention(NamedTuple):
    """A tag of thinking amid text, and whether a section of calls was open there."""

    mark: Mark
    begins_line: bool
    in_section: bool


class GrammarStream:
    """Reads one output."""

    def __init__(self, grammar: Grammar, tools: Tools | None, thinking: bool | None, turn: int) -> None:
        self._grammar = grammar
        self._output = Output(tools, grammar.short_ids, turn)
        self._opens = {begin: marks(end) for begin, end in grammar.thinking}
        self._ends = frozenset(end for _, end in grammar.thinking)
        self._marks = marks(*grammar.openers.literals, *self._opens, *sorted(self._ends))
        self._thinking = thinking if self._opens else False
        self._mention: Mention | None = None
        self._reading = self._read()

    def take(self, chunk: str) -> None:
        """More text, to be looked at later."""
        self._output.source.feed(chunk)

    def feed(self, chunk: str) -> list[Event]:
        """More text; what it settles."""
        self.take(chunk)
        next(self._reading)
        return self._output.page.news()

    def end(self, cut: bool = False) -> Parsed:
        """No more text."""
        self._output.source.close(cut)
        for _ in self._reading:
            raise AssertionError("a reading waits although the output has ended")
        return Parsed(tuple(self._output.page.pieces))

    def news(self) -> list[Event]:
        """What `end` settled."""
        return self._output.page.news()

    def _read(self) -> Reading[None]:
        source, page = self._output.source, self._output.page
        if self._thinking:
            position = yield from self._think(Mark("", 0, 0), marks(*sorted(self._ends)))
        else:
            position = yield from self._grammar.begin(self._output)
        while True:
            mark = yield from source.find(self._marks, position, passed=page.text_to)
            if mark is None:
                page.text_to(source.end)
                page.end_text()
                self._settle()
                return
            page.text_to(mark.start)
            if mark.text in self._opens and page.speaking:
                position = self._mentioned(mark)
            elif mark.text in self._opens:
                self._settle()
                position = yield from self._think(mark, self._opens[mark.text])
            elif mark.text in self._ends:
                position = yield from self._stray_end(mark)
            else:
                went_on = yield from self._grammar.read(self._output, mark)
                position = mark.end if went_on is None else went_on
                assert position > mark.start, f"{type(self._grammar).__name__} reads {mark.text!r} for ever"
                if went_on is not None and position > page.written:
                    page.skip_to(position)

    def _think(self, mark: Mark, ends: Markers) -> Reading[int]:
        """A block of thinking; one that is not closed goes on to the end."""
        page = self._output.page
        page.skip_to(mark.end)
        end = yield from self._output.source.find(ends, mark.end, passed=page.reasoning_to)
        if end is None:
            end = Mark("", self._output.source.end, self._output.source.end)
        page.reasoning_to(end.start)
        page.end_reasoning(mark.start, end.end)
        return end.end

    def _mentioned(self, mark: Mark) -> int:
        """A tag amid text. What follows waits: where an end tag comes, it may have been thinking."""
        output = self._output
        begins_line = output.source.read(mark.start - 1, mark.start) == "\n"
        self._settle()
        self._mention = Mention(mark, begins_line, output.in_section)
        output.page.hold()
        return mark.end

    def _settle(self) -> None:
        """No end tag came, so a tag amid text was only mentioned."""
        self._mention = None
        self._output.page.release()

    def _stray_end(self, mark: Mark) -> Reading[int]:
        """The end of a tag amid text, or of thinking that began in the prompt. After other thinking it is text."""
        page, mention = self._output.page, self._mention
        self._mention = None
        if mention is not None and mark.text in self._opens[mention.mark.text].literals:
            if mention.begins_line and not (page.holds_calls and (yield from self._goes_on(mark.end))):
                page.turn_to_thinking(mention.mark, mark)
                self._output.in_section = mention.in_section
            else:
                page.refuse_held(Malformed(Reason.MALFORMED_MARKUP, "it stands between thinking tags amid text"))
            return mark.end
        page.release()
        if self._thinking is None and not any(isinstance(piece, Reasoning) for piece in page.pieces):
            page.take_back(mark.start, mark.end)
        return mark.end

    def _goes_on(self, position: int) -> Reading[bool]:
        """Whether text follows on the same line, neither a call nor a tag of thinking."""
        source = self._output.source
        after = yield from source.skip(position, _BLANKS)
        if (yield from source.ends(after)) or source.read(after, after + 1) in "\r\n":
            return False
        found = yield from source.find(self._marks, after, stop=after + 1)
        return found is None


def mentioned(output: Output, mark: Mark, close: str) -> Reading[int | None]:
    """What an opening tag is that no call follows: a mention in prose (None), or a broken call up to its end tag.

    At the very end of the output it is a call that was begun.
    """
    source = output.source
    after = yield from source.skip(mark.end)
    if (yield from source.ends(after)):
        output.page.broken(
            Malformed(Reason.UNCLOSED, "the output ends where a call begins"), "", mark.start, source.end
        )
        return source.end
    found = yield from source.find(marks(mark.text, close), mark.end)
    if found is None or found.text != close:
        return None
    problem = Malformed(Reason.MALFORMED_MARKUP, "what stands between the tags is no call")
    output.page.broken(problem, "", mark.start, found.end)
    return found.end
