"""The pieces of one output as they are found, and what to tell a listener of them.

For the driver and the grammars, which write here in the order of the text. Invariant: text is what no other piece
covers; white space alone is never text, so it is held back until something follows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple, TypeVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.base import (
    BrokenCall,
    Call,
    Event,
    Malformed,
    Piece,
    Reasoning,
    ReasoningDelta,
    TakenBack,
    Text,
    TextDelta,
)
from palaestra.inference.parsers.source import Mark, Source

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
