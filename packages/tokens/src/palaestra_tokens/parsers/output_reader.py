"""Reads one output with a format's grammar: text, thinking and calls in one pass. Thinking takes precedence over calls.

Thinking begins with its tag at the start of the output or after thinking or calls; if it is not closed, it extends to
the end. A tag after text is a mention and stays text, unless it begins a line and is closed; if calls precede its end
tag and text follows the end tag on the same line, both tags are mentions. A call between two mentioned tags is broken,
because its meaning is unclear. An end tag without an opening tag ends thinking that began in the prompt, unless the
caller knows that no thinking began there.

Invariants: text is everything that no other piece covers, except white space alone; no text is read more than a fixed
number of times.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.parser import (
    BrokenCall,
    BrokenReason,
    Malformed,
    OutputPiece,
    ParsedCall,
    ParsedOutput,
    ReasoningPiece,
    TextPiece,
    Tools,
    Unwritable,
    bare,
)
from palaestra_tokens.parsers.scan import ArgumentTypes, Mark, find, skip

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHORT_ID = re.compile(f"[{_ALPHABET}]{{9}}")
_BLANKS = re.compile(r"[ \t]*")
_NOT_SPACE = re.compile(r"\S")


class Grammar(ABC):
    """One format. If `short_ids` is true, every id has nine letters and digits; an id that the model gave is kept only
    if it has this form."""

    openers: ClassVar[tuple[str, ...]]
    thinking: ClassVar[Sequence[tuple[str, str]]] = (("<think>", "</think>"),)
    short_ids: ClassVar[bool] = False

    def begin(self, output: OutputReader) -> int:
        """Read what can appear only at the start of an output; return where to continue."""
        return 0

    @abstractmethod
    def read(self, output: OutputReader, mark: Mark) -> int | None:
        """Read the calls that begin at `mark`, one of `openers`, and add them to `output`. Returns where text
        continues, or None if the mark is only a mention."""

    @abstractmethod
    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        """Return `text` and then `calls` as the family's own chat template writes them."""


class GrammarParser:
    """The parser of one format."""

    def __init__(self, name: str, grammar: Grammar) -> None:
        self.name = name
        self._grammar = grammar

    def parse(
        self, text: str, *, tools: Tools | None = None, cut: bool = False, thinking: bool | None = None, turn: int = 0
    ) -> ParsedOutput:
        """Return the pieces of `text`. Parsing never raises, and takes time linear in the length of the text.

        `cut` is true if the output reached its length limit; a call without its end is then broken. `thinking` is true
        if the output begins inside thinking, and None if that is unknown. `turn` (from 1) is the number of the reply in
        its conversation, for unique ids.
        """
        return OutputReader(text, self._grammar, tools=tools, cut=cut, thinking=thinking, turn=turn).read()

    def render(self, calls: Sequence[ParsedCall], text: str = "", *, tools: Tools | None = None) -> str:
        """Return `text` and `calls` in this format. Raises `Unwritable` if parsing the result would change them."""
        rendered = self._grammar.render(calls, text)
        parsed = self.parse(rendered, tools=tools)
        wanted = [(call.name, call.arguments) for call in calls]
        found = [(call.name, call.arguments) for call in parsed.calls]
        if found != wanted or parsed.errors or (parsed.content or "").strip() != text.strip():
            raise Unwritable(f"{self.name} cannot express these calls: they are read back as {found!r:.500}")
        return rendered


class FoundCall(NamedTuple):
    """A call in markup or Python, as far as it was read. `problem` is the reason why it must not run."""

    name: str
    arguments: dict[str, JSON]
    end: int
    problem: Malformed | None = None


class _Mention(NamedTuple):
    """A thinking tag after text, with the state at that position."""

    mark: Mark
    begins_line: bool
    in_section: bool
    pieces: int


class OutputReader:
    """One output and the pieces found in it, in order. `written` is the position up to which everything is accounted
    for. `in_section` is true inside a section, whose tags enclose several calls."""

    def __init__(
        self, text: str, grammar: Grammar, *, tools: Tools | None, cut: bool, thinking: bool | None, turn: int
    ) -> None:
        self.text, self.end, self.cut = text, len(text), cut
        self._tools = tools or ()
        self.pieces: list[OutputPiece] = []
        self.written = 0
        self.in_section = False
        self._grammar = grammar
        # A format without thinking tags, such as gpt-oss's, marks its thinking in another way.
        self._thinking = thinking if grammar.thinking else False
        self._ends = tuple(sorted({end for _, end in grammar.thinking}))
        self._end_of = dict(grammar.thinking)
        self._marks = (*grammar.openers, *self._end_of, *self._ends)
        self._mention: _Mention | None = None
        self._text_start = 0
        self._turn, self._calls, self._ids = turn, 0, set[str]()

    def read(self) -> ParsedOutput:
        position = self._think(Mark("", 0, 0), self._ends) if self._thinking else self._grammar.begin(self)
        while (mark := find(self.text, position, *self._marks)) is not None:
            self.text_to(mark.start)
            position = self._read_at(mark)
        self.text_to(self.end)
        self.skip_to(self.end)
        return ParsedOutput(tuple(self.pieces))

    def text_to(self, end: int) -> None:
        """Add, as text, everything up to `end` that is not yet accounted for."""
        self.written = max(self.written, end)

    def skip_to(self, end: int) -> None:
        """Skip everything up to `end` that is not yet accounted for, because it belongs to the format."""
        if self._speaking:
            start = self._text_start
            self.pieces.append(TextPiece(self.text[start : self.written], start, self.written))
        self.written = self._text_start = end

    def reasoning(self, start: int, text: slice, end: int) -> None:
        """Add the thinking `text`, which extends from `start` to `end` with its tags."""
        self.pieces.append(ReasoningPiece(self.text[text], start, end))
        self.written = self._text_start = end

    def call(
        self, name: str, arguments: Mapping[str, JSON], arguments_text: str, start: int, end: int, call_id: str = ""
    ) -> None:
        """Add a call that may run. `call_id` is the model's own id, in formats that have ids."""
        known_as = self._id(call_id, name, arguments_text)
        self._add_call(ParsedCall(known_as, name, arguments, arguments_text, start, end))

    def broken(self, problem: Malformed, name: str, start: int, end: int, call_id: str = "") -> None:
        text = self.text[start:end]
        known_as = self._id(call_id, name, text)
        self._add_call(BrokenCall(known_as, name, problem.reason, problem.detail, text, start, end))

    def add(self, found: FoundCall, start: int) -> int:
        """Add the call that begins at `start`, broken or not; return its end."""
        if found.problem is not None:
            self.broken(found.problem, found.name, start, found.end)
        else:
            self.call(found.name, found.arguments, bare(found.arguments), start, found.end)
        return found.end

    def leave_section(self, mark: Mark) -> int | None:
        """Leave the section at its end tag. Returns where text continues, or None if no section was open."""
        was_open, self.in_section = self.in_section, False
        return mark.end if was_open else None

    def mentioned(self, mark: Mark, close: str) -> int | None:
        """Read an opening tag that no call follows, and return where to continue. If the output ends after the tag, or
        if its end tag comes before another opening tag, the tag begins a broken call. Otherwise it is a mention in
        prose: returns None."""
        if skip(self.text, mark.end) >= self.end:
            problem = Malformed(BrokenReason.UNCLOSED, "the output ends where a call begins")
            self.broken(problem, "", mark.start, self.end)
            return self.end
        found = find(self.text, mark.end, mark.text, close)
        if found is None or found.text != close:
            return None
        problem = Malformed(BrokenReason.MALFORMED_MARKUP, "the tags do not contain a call")
        self.broken(problem, "", mark.start, found.end)
        return found.end

    def _add_call(self, piece: ParsedCall | BrokenCall) -> None:
        self.text_to(piece.start)
        self.skip_to(piece.end)
        self.pieces.append(piece)
        self._calls += 1

    def _id(self, given: str, name: str, content: str) -> str:
        """Return the model's own id if it is valid and not used yet, otherwise an id made from the call's position and
        content or from its position alone. Equal outputs have equal ids."""
        if given and given not in self._ids and (not self._grammar.short_ids or _SHORT_ID.fullmatch(given)):
            self._ids.add(given)
            return given
        place = f"{self._turn}\0{self._calls}" if self._turn else str(self._calls)
        digest = hashlib.sha256(f"{place}\0{name}\0{content}".encode(errors="surrogatepass")).digest()
        if self._grammar.short_ids:
            # Mistral's templates refuse ids that are not nine letters or digits.
            return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9])
        return f"call_{self._turn}_{self._calls}" if self._turn else f"call_{digest[:4].hex()}"

    @cached_property
    def types(self) -> ArgumentTypes:
        return ArgumentTypes(self._tools)

    @property
    def _speaking(self) -> bool:
        """Whether there is text, not only white space, after the last piece."""
        return _NOT_SPACE.search(self.text, self._text_start, self.written) is not None

    def _read_at(self, mark: Mark) -> int:
        """Read the part that begins at a mark; return where to continue."""
        if mark.text in self._end_of:
            if self._speaking:
                # There is text before the mark, so the index is not -1.
                begins_line = self.text[mark.start - 1] == "\n"
                self._mention = _Mention(mark, begins_line, self.in_section, len(self.pieces))
                return mark.end
            self._mention = None
            return self._think(mark, (self._end_of[mark.text],))
        if mark.text in self._ends:
            self._end_thinking(mark)
            return mark.end
        after = self._grammar.read(self, mark)
        if after is None:
            return mark.end
        assert after > mark.start, f"{type(self._grammar).__name__} makes no progress at {mark.text!r}"
        if after > self.written:
            self.skip_to(after)
        return after

    def _think(self, mark: Mark, ends: tuple[str, ...]) -> int:
        """Read a block of thinking; a block that is not closed extends to the end."""
        self.skip_to(mark.end)
        end = find(self.text, mark.end, *ends) or Mark("", self.end, self.end)
        self.reasoning(mark.start, slice(mark.end, end.start), end.end)
        return end.end

    def _end_thinking(self, mark: Mark) -> None:
        """Read an end tag of thinking, which closes a mentioned tag or thinking that began in the prompt. If there is
        neither, the end tag is text."""
        mention, self._mention = self._mention, None
        if mention is not None and mark.text == self._end_of[mention.mark.text]:
            since = self.pieces[mention.pieces :]
            calls = any(isinstance(piece, ParsedCall) for piece in since)
            # A tag in the middle of a sentence is a mention of the tag, not thinking. If a call follows it and the line
            # goes on after the end tag, the call is part of the sentence, too.
            if mention.begins_line and not (calls and self._line_continues(mark.end)):
                self._make_thinking(mention, mark)
            else:
                self.pieces[mention.pieces :] = [self._broken_piece(piece) for piece in since]
        elif self._thinking is None and not any(isinstance(piece, ReasoningPiece) for piece in self.pieces):
            # The thinking began in the prompt, so all text so far is thinking.
            self.pieces.clear()
            self.reasoning(0, slice(0, mark.start), mark.end)

    def _make_thinking(self, mention: _Mention, end: Mark) -> None:
        """Turn everything between a mentioned tag and its end into thinking."""
        begin = mention.mark
        start = self.pieces[mention.pieces].start if mention.pieces < len(self.pieces) else self._text_start
        del self.pieces[mention.pieces :]
        self.pieces.append(TextPiece(self.text[start : begin.start], start, begin.start))
        self.reasoning(begin.start, slice(begin.end, end.start), end.end)
        # Sections that were opened or closed in between are part of the thinking now.
        self.in_section = mention.in_section

    def _broken_piece(self, piece: OutputPiece) -> OutputPiece:
        if not isinstance(piece, ParsedCall):
            return piece
        detail, text = "the call is between thinking tags inside text", self.text[piece.start : piece.end]
        reason = BrokenReason.MALFORMED_MARKUP
        return BrokenCall(piece.id, piece.name, reason, detail, text, piece.start, piece.end)

    def _line_continues(self, position: int) -> bool:
        """Return whether text follows on the same line that is neither a call nor a thinking tag."""
        after = skip(self.text, position, _BLANKS)
        if after >= self.end or self.text[after] in "\r\n":
            return False
        return find(self.text, after, *self._marks, before=after + 1) is None
