"""Caches the text that a template writes after a reply, by the form of the messages, so that similar turns need no
rendering.

Rendering costs more than everything else in a turn, and most turns differ only in their texts. A template is rendered
once with a `Blank` in place of each text, and each blank records every operation on it. The `Outline` holds the written
text, the operations and their answers; it fits all texts with the same answers. Invariants: every operation on a blank
is answered for its text and recorded, or ends the rendering with `Opaque`; an outline is only kept if it also
reproduces the rendering of adversarial texts; other forms are rendered every time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, Macro

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.templates.jinja import ChatTemplate, TemplateSandbox, tojson
from palaestra_tokens.templates.probe import NONCE

Measured: TypeAlias = tuple[str | None, str]
"""The text after the reply (None if it cannot be found), and how the template rewrites history (empty if it does
not)."""

Look: TypeAlias = Callable[[str], Measured]
"""Finds a `Measured` in a whole rendering."""

_MOST_OUTLINES = 4
"""The maximum number of outlines for one form. A form needs several if a template asks different questions about
different texts."""

_MOST_FORMS = 256
_MOST_TEXTS = 32

_ADVERSARIAL = (
    "",
    "  \n two \n\n lines\t\n ",
    "<think>\nthought\n</think>\n\nsaid",
    "<tool_response>\nheard\n</tool_response>",
    '{"object": ["with \\"quotes\\"", 1.0, null]}',
    "naïve <b>&amp;</b> 東京 \\n {{ braces }} {% block %}",
    "/no_think",
)


RenderMessages: TypeAlias = Callable[[Sequence[Message]], str]
"""Renders messages that were prepared for the template. Raises `ConfigError`."""


class Outlines:
    """The outlines of one renderer. `trace` returns a function that renders like `render`, but supports blanks; it is
    called when a text must be outlined."""

    def __init__(self, render: RenderMessages, trace: Callable[[], RenderMessages]) -> None:
        self._render = render
        self._traced = functools.cache(trace)
        self._known: dict[Hashable, list[Outline]] = {}
        self._opaque: set[Hashable] = set()

    def measured(self, case: Hashable, head: Sequence[Message], ready: Sequence[Message], look: Look) -> Measured:
        """Return the result of `look` for the rendering of `head` and `ready` (a reply and the messages after it). For
        the same `case`, `head` and the reply's marks must be the same. Raises `ConfigError`."""
        form = _form(ready)
        if form is None or (case, form) in self._opaque:
            return look(self._render([*head, *ready]))
        known, texts = self._known.get((case, form), ()), list(_texts(ready))
        for outline in known:
            if (tail := outline.filled(texts)) is not None:
                return tail, ""
        measured = look(self._render([*head, *ready]))
        new = self._outline(head, ready, look) if len(known) < _MOST_OUTLINES else None
        if new is None or not self._holds(new, head, ready, look):
            self._opaque = {*list(self._opaque)[-_MOST_FORMS:], (case, form)}
        else:
            # A new dict and not a changed one: long requests are rendered in
            # another thread, which may be reading this one.
            kept = list(self._known.items())[-_MOST_FORMS:]
            self._known = {**dict(kept), (case, form): [new, *known]}
        return measured

    def _outline(self, head: Sequence[Message], ready: Sequence[Message], look: Look) -> Outline | None:
        recording = BlankRecording()
        blanks = [Blank(recording, text) for text in _texts(ready)]
        try:
            tail, rewrites = look(recording.spelled(self._traced()([*head, *_written(ready, blanks)])))
        except (Opaque, ConfigError):
            return None
        return None if tail is None or rewrites else recording.outline(tail)

    def _holds(self, outline: Outline, head: Sequence[Message], ready: Sequence[Message], look: Look) -> bool:
        """Return whether, for adversarial texts, the outline either reproduces the rendering or does not fit."""
        # None stands for the messages' own texts.
        for content in (None, *_ADVERSARIAL):
            other = [ready[0], *({**m, "content": m["content"] if content is None else content} for m in ready[1:])]
            filled = outline.filled(list(_texts(other)))
            try:
                if filled is not None and look(self._render([*head, *other])) != (filled, ""):
                    return False
            except ConfigError:
                return False
        return True


def _form(ready: Sequence[Message]) -> Hashable | None:
    """Return a key that is equal for messages that differ only in their texts. Returns None if a value is not a string,
    if a message has no content, or if there are too many texts."""
    reply, *after = ready
    calls = len(reply.get("tool_calls", ()))
    if 2 * calls + sum(map(len, after)) > _MOST_TEXTS:
        return None
    for message in after:
        for value in message.values():
            if type(value) is not str:
                return None
        if "content" not in message:
            return None
    return calls, *[(message["role"], *message) for message in after]


def _texts(ready: Sequence[Message]) -> Iterator[str]:
    """Yield the ids and names of the reply's calls, and the texts after the reply."""
    reply, *after = ready
    for call in reply.get("tool_calls", ()):
        yield call["id"]
        yield call["function"]["name"]
    for message in after:
        for name, text in message.items():
            if name != "role":
                yield text


def _written(ready: Sequence[Message], texts: Iterable[str]) -> list[Message]:
    """Return the messages with their texts replaced by `texts`, in the order of `_texts`."""
    reply, *after = ready
    left = iter(texts)
    if "tool_calls" in reply:
        calls = [
            {**call, "id": next(left), "function": {**call["function"], "name": next(left)}}
            for call in reply["tool_calls"]
        ]
        reply = {**reply, "tool_calls": calls}
    return [reply, *({n: t if n == "role" else next(left) for n, t in message.items()} for message in after)]


_MARK_OF = f"B{NONCE}%dz"
_MARK = re.compile(rf"(B{NONCE}\d+z)")

Part: TypeAlias = str | int
"""A text, or the number of a value."""


class Opaque(Exception):
    """Raised if the template does something with a text that an outline cannot repeat."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Value `number` is `parts` joined or, if there is a function, the function's result for value `of` and
    `arguments`."""

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
    """A question about value `of`, and its answer."""

    function: Callable[..., JSON]
    of: int
    arguments: tuple[JSON, ...]
    heard: JSON


@dataclass(frozen=True, slots=True)
class Outline:
    """A rendering in which the texts are left open. The result is `parts` joined, and `made` are the values derived
    from the texts. The outline fits all texts that give the recorded answers to the questions in `asked`."""

    made: tuple[_Made, ...]
    asked: tuple[_Asked, ...]
    parts: tuple[Part, ...]

    def filled(self, texts: Sequence[str]) -> str | None:
        """Return the rendering for these texts, or None if the template might render them differently."""
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


class BlankRecording:
    """One rendering with blanks. `texts` are the values: first those of the blanks, then those derived from them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._made: list[_Made] = []
        self._written: dict[int, tuple[Part, ...]] = {}
        self._asked: list[_Asked] = []

    def joined(self, parts: Sequence[str]) -> Blank:
        text = "".join([self.texts[part.number] if isinstance(part, Blank) else part for part in parts])
        blank = Blank(self, text)
        written = tuple(part.number if isinstance(part, Blank) else part for part in parts)
        self._made.append(_Made(blank.number, parts=written))
        self._written[blank.number] = written
        return blank

    def applied(self, function: Callable[..., JSON], blank: Blank, arguments: tuple[JSON, ...]) -> JSON:
        """Return the answer of `function` for the blank's text. Text becomes a new blank; any other answer is recorded
        with its question."""
        if not all(map(_is_constant, arguments)):
            raise Opaque("two texts are combined")
        try:
            answer = function(self.texts[blank.number], *arguments)
        except (LookupError, ValueError) as error:
            raise Opaque(str(error)) from None
        if isinstance(answer, str):
            changed = Blank(self, answer)
            self._made.append(_Made(changed.number, function=function, of=blank.number, arguments=arguments))
            return changed
        if not isinstance(answer, bool | int) and answer is not NotImplemented:
            raise Opaque("a text is split")
        self._asked.append(_Asked(function, blank.number, arguments, answer))
        return answer

    def spelled(self, rendered: str) -> str:
        """Return a rendering as plain text, with a mark for every value that is not constant."""
        if not isinstance(rendered, Blank):
            return rendered
        texts, pending = list[str](), list[str | int]([rendered.number])
        while pending:
            part = pending.pop()
            if isinstance(part, str):
                texts.append(part)
            elif (parts := self._written.get(part)) is None:
                texts.append(_MARK_OF % part)
            else:
                pending += reversed(parts)
        return "".join(texts)

    def outline(self, spelled: str) -> Outline:
        """Return the outline of a part of the text that the method `spelled` returned."""
        parts = tuple(
            _mark_number(piece) if _MARK.fullmatch(piece) else piece for piece in _MARK.split(spelled) if piece
        )
        asked = tuple(dict.fromkeys(self._asked))
        needed = {part for part in parts if isinstance(part, int)} | {question.of for question in asked}
        for made in reversed(self._made):
            if made.number in needed:
                needed.update(made.sources)
        return Outline(tuple(made for made in self._made if made.number in needed), asked, parts)


class Blank(str):
    """A stand-in for a text in a template, which becomes the next value of the recording. Its actual characters are a
    meaningless mark."""

    __slots__ = ("number", "recording")
    recording: BlankRecording
    number: int

    def __new__(cls, recording: BlankRecording, text: str) -> Blank:
        number = len(recording.texts)
        recording.texts.append(text)
        blank = super().__new__(cls, _MARK_OF % number)
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
    """Return a comparison. Only comparisons with text are recorded; all others have a constant answer."""
    recorded = _recorded(name)
    return lambda self, other: recorded(self, other) if isinstance(other, str) else NotImplemented


def _opaque_method(name: str) -> Callable[..., JSON]:
    def method(self: Blank, *_: JSON, **__: JSON) -> NoReturn:
        raise Opaque(name)

    return method


_ITS_OWN = {"__new__", "__str__", "__add__", "__getattribute__", "__getnewargs__", "__init__", "__class__"}
_OPAQUE = {"__iter__", "__hash__", "__repr__", "__format__", "__sizeof__", "format", "format_map", "join", "translate"}

# All methods, also those of later versions of Python: one that is missing here
# would answer for the mark and not for the text.
for _name in {name for name in vars(str) if callable(getattr(str, name))} - _ITS_OWN - {"__doc__", "maketrans"}:
    _kind = _opaque_method if _name in _OPAQUE else _compared if _name in ("__eq__", "__ne__") else _recorded
    setattr(Blank, _name, _kind(_name))


def _is_constant(value: JSON) -> bool:
    """Return whether a value is an immutable constant: None, plain text, an integer, a boolean, or a tuple of such
    values."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or type(value) in (str, int, bool)


def _mark_number(mark: str) -> int:
    return int(mark[len(NONCE) + 1 : -1])


_PASSING = frozenset({"trim", "string", "length", "count", "default", "d", "upper", "lower"})
"""Filters that only call a text's methods, or pass the text on unchanged."""


class _Generator(CodeGenerator):
    """Compiles `~` and `in` to calls of the environment's own methods."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja's name
        # Jinja's own code for `~` calls `str.join`, which reads a blank's characters without asking the blank.
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - jinja's name
        # Python's `in` reads the characters of a blank that is looked for in a plain text.
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.holds(")
        self.visit(node.ops[0].expr, frame)
        self.write(", ")
        self.visit(node.expr, frame)
        self.write("))")


class _Tracing(TemplateSandbox):
    """The sandbox of chat templates, for values with blanks in them.

    Jinja can process texts without calling their methods: by joining, `in`, filters and calls. Each of these either
    handles blanks, or raises `Opaque` for one.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"%", "*"})

    def __init__(self) -> None:
        super().__init__()
        self.filters = {name: _watched(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _blank_tojson
        # A blank refuses to be iterated over, but every text passes these two tests.
        self.tests = {**self.tests, "iterable": _or_text(self.tests["iterable"])}
        self.tests["sequence"] = _or_text(self.tests["sequence"])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join texts. Jinja also calls this for the result of a template, a macro or a block."""
        found = list(parts)
        blank = next((part for part in found if isinstance(part, Blank)), None)
        return "".join(found) if blank is None else blank.recording.joined(found)

    def holds(self, container: JSON, member: JSON) -> bool:
        if isinstance(member, Blank) and isinstance(container, str):
            raise Opaque("in")
        return member in container

    def call(self, context: Context, function: Callable[..., JSON], *given: JSON, **named: JSON) -> JSON:
        """Run a call in the template. Only the template's own macros and `namespace` can handle a blank."""
        taken = isinstance(function, Macro) or function is self.globals["namespace"]
        if not taken and any(isinstance(value, Blank) for value in (*given, *named.values())):
            raise Opaque("a call with a text")
        return super().call(context, function, *given, **named)

    def call_binop(self, context: Context, operator: str, left: JSON, right: JSON) -> JSON:
        if isinstance(left, str) or isinstance(right, Blank):
            raise Opaque(operator)
        return super().call_binop(context, operator, left, right)


def traced(template: ChatTemplate) -> ChatTemplate:
    return template.compiled_in(_Tracing())


def _watched(name: str, function: Callable[..., JSON]) -> Callable[..., JSON]:
    """Wrap a filter so that it raises `Opaque` if an argument is a blank or if its result contains one. The filters in
    `_PASSING` are returned unchanged."""
    if name in _PASSING:
        return function

    @functools.wraps(function)  # jinja stores its notes as attributes of functions
    def watched(*given: JSON, **named: JSON) -> JSON:
        if any(isinstance(value, Blank) for value in (*given, *named.values())):
            raise Opaque(name)
        answer = function(*given, **named)
        # A filter in C may read a blank's characters without calling its methods; the mark in the answer shows it.
        if isinstance(answer, str) and not isinstance(answer, Blank) and f"B{NONCE}" in answer:
            raise Opaque(name)
        return answer

    return watched


def _blank_tojson(value: JSON, **options: JSON) -> JSON:
    if isinstance(value, Blank) and not options:
        return value.recording.applied(tojson, value, ())
    text = tojson(value, **options)
    if f"B{NONCE}" in text:
        raise Opaque("tojson")
    return text


def _or_text(test: JSON) -> Callable[[JSON], JSON]:
    return lambda value: True if isinstance(value, Blank) else test(value)
