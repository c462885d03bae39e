"""Blanks: words that stand for texts while a template is rendered, and that write down what is done with them.

Not for rendering (`tracing`). A template that only passes a text on, or asks the same of it and hears the same, writes
the same around it: an `Outline` holds what it wrote, what it asked, and what it heard. Invariant: every operation on a
blank is answered for the text that it stands for, and written down, or ends the rendering with `Opaque`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from palaestra.core.types import JSON
from palaestra.inference.templates.probe import NONCE

_MARK = re.compile(rf"(B{NONCE}\d+z)")

Part: TypeAlias = str | int
"""A text, or the number of a value."""


class Opaque(Exception):
    """The template does something with a text that an outline cannot tell again."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Value `number` is `parts` written together or, where there is a function, that of value `of` and `arguments`."""

    number: int
    parts: tuple[Part, ...] = ()
    function: Callable[..., JSON] | None = None
    of: int = -1
    arguments: tuple[JSON, ...] = ()

    @property
    def sources(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)] if self.function is None else [self.of]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked of value `of`, and heard."""

    function: Callable[..., JSON]
    of: int
    arguments: tuple[JSON, ...]
    heard: JSON


@dataclass(frozen=True, slots=True)
class Outline:
    """`parts` written together, for all texts of which what was `asked` is still answered so."""

    made: tuple[_Made, ...]
    asked: tuple[_Asked, ...]
    parts: tuple[Part, ...]

    def filled(self, texts: Sequence[str]) -> str | None:
        """The rendering for these texts; None where the template may have more to say about them."""
        values = dict(enumerate(texts))
        for made in self.made:
            if made.function is None:
                values[made.number] = _together(made.parts, values)
            else:
                values[made.number] = made.function(values[made.of], *made.arguments)
        for asked in self.asked:
            if asked.function(values[asked.of], *asked.arguments) != asked.heard:
                return None
        return _together(self.parts, values)


def _together(parts: Iterable[Part], values: dict[int, str]) -> str:
    return "".join([values[part] if type(part) is int else part for part in parts])  # type: ignore[misc]


class Recording:
    """One rendering with blanks. `texts` are the values: first those that blanks were made for, then what became of
    them.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._made: list[_Made] = []
        self._written: dict[int, tuple[Part, ...]] = {}
        self._asked: list[_Asked] = []

    def blank(self, text: str) -> Blank:
        """A blank that stands for `text`."""
        self.texts.append(text)
        return Blank(self, len(self.texts) - 1)

    def joined(self, parts: Sequence[str]) -> Blank:
        """All of them written together."""
        text = "".join([self.texts[part.number] if isinstance(part, Blank) else part for part in parts])
        blank = self.blank(text)
        written = tuple(part.number if isinstance(part, Blank) else part for part in parts)
        self._made.append(_Made(blank.number, parts=written))
        self._written[blank.number] = written
        return blank

    def applied(self, function: Callable[..., JSON], blank: Blank, arguments: tuple[JSON, ...]) -> JSON:
        """What `function` answers for the text: a text becomes a blank, anything else has been asked."""
        if not all(map(_plain, arguments)):
            raise Opaque("a text meets another")
        try:
            answer = function(self.texts[blank.number], *arguments)
        except (LookupError, ValueError) as error:
            raise Opaque(str(error)) from None
        if isinstance(answer, str):
            changed = self.blank(answer)
            self._made.append(_Made(changed.number, function=function, of=blank.number, arguments=arguments))
            return changed
        if not isinstance(answer, bool | int) and answer is not NotImplemented:
            raise Opaque("a text is taken apart")
        self._asked.append(_Asked(function, blank.number, arguments, answer))
        return answer

    def spelled(self, rendered: str) -> str:
        """A rendering as plain text, with a mark for every value that is no constant."""
        return self._spelled(rendered.number) if isinstance(rendered, Blank) else rendered

    def _spelled(self, number: int) -> str:
        parts = self._written.get(number)
        if parts is None:
            return _mark(number)
        return "".join([part if isinstance(part, str) else self._spelled(part) for part in parts])

    def outline(self, spelled: str) -> Outline:
        """The outline of a part of what `spelled` gave."""
        parts = tuple(_number(piece) if _MARK.fullmatch(piece) else piece for piece in _MARK.split(spelled) if piece)
        asked = tuple(dict.fromkeys(self._asked))
        needed = {part for part in parts if isinstance(part, int)} | {question.of for question in asked}
        for made in reversed(self._made):
            if made.number in needed:
                needed.update(made.sources)
        return Outline(tuple(made for made in self._made if made.number in needed), asked, parts)


class Blank(str):
    """A text as a template holds it. Its own letters are a mark that means nothing."""

    __slots__ = ("number", "recording")
    recording: Recording
    number: int

    def __new__(cls, recording: Recording, number: int) -> Blank:
        """The blank of one of the recording's values."""
        blank = super().__new__(cls, _mark(number))
        blank.recording, blank.number = recording, number
        return blank

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return bool(self.recording.applied(bool, self, ()))

    def __add__(self, other: str) -> str:
        return self.recording.joined([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return self.recording.joined([other, self]) if isinstance(other, str) else NotImplemented


def _recorded(name: str) -> Callable[..., JSON]:
    function = getattr(str, name)

    def method(self: Blank, *arguments: JSON, **named: JSON) -> JSON:
        if named:
            raise Opaque(f"{name} with named arguments")
        return self.recording.applied(function, self, arguments)

    return method


def _compared(name: str) -> Callable[..., JSON]:
    """A comparison: with what is no text the answer is always the same."""
    recorded = _recorded(name)
    return lambda self, other: recorded(self, other) if isinstance(other, str) else NotImplemented


def _refused(name: str) -> Callable[..., JSON]:
    def method(self: Blank, *_: JSON, **__: JSON) -> NoReturn:
        raise Opaque(name)

    return method


_ITS_OWN = {"__new__", "__str__", "__add__", "__getattribute__", "__getnewargs__", "__init__", "__class__"}
_OPAQUE = {"__iter__", "__hash__", "__repr__", "__format__", "__sizeof__", "format", "format_map", "join", "translate"}

for _name in {name for name in vars(str) if callable(getattr(str, name))} - _ITS_OWN - {"__doc__", "maketrans"}:
    _kind = _refused if _name in _OPAQUE else _compared if _name in ("__eq__", "__ne__") else _recorded
    setattr(Blank, _name, _kind(_name))


def _plain(value: JSON) -> bool:
    """Whether a value can be asked with again."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, bool)


def _mark(number: int) -> str:
    return f"B{NONCE}{number}z"


def _number(mark: str) -> int:
    return int(mark[len(NONCE) + 1 : -1])
