"""What a template writes after a reply, kept by the form of the messages, so that like messages need no rendering.

Not for what it writes before one (`turns`). Rendering a template costs more than everything else in a turn, and most
turns differ from the last in their texts alone. Invariant: an outline is only kept when it gave what rendering gives
for texts chosen to upset it, too; a form that a template does not let be outlined is rendered every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from palaestra.core.errors import ConfigError
from palaestra.core.types import Message
from palaestra.inference.templates.blanks import Opaque, Outline, Recording

Measured: TypeAlias = tuple[str | None, str]
"""The text after the reply (None where it cannot be found), and how history is rewritten."""

Look: TypeAlias = Callable[[str], Measured]
"""Finds that in a whole rendering."""

_MOST_OUTLINES = 4
"""Of one form: texts of which a template asks different things."""

_MOST_FORMS = 256
_MOST_TEXTS = 32

_UPSETTING = (
    "",
    "  \n two \n\n lines\t\n ",
    "<think>\nthought\n</think>\n\nsaid",
    "<tool_response>\nheard\n</tool_response>",
    '{"object": ["with \\"quotes\\"", 1.0, null]}',
    "naïve <b>&amp;</b> 東京 \\n {{ braces }} {% block %}",
    "/no_think",
)


class Render(Protocol):
    """Renders messages that are as the template wants them. Raises `ConfigError`."""

    def __call__(self, messages: Sequence[Message], /) -> str: ...


class Outlines:
    """The outlines of one renderer. `traced` renders as `render` does, with blanks in mind."""

    def __init__(self, render: Render, traced: Render) -> None:
        self._render = render
        self._traced = traced
        self._known: dict[Hashable, list[Outline]] = {}
        self._opaque: set[Hashable] = set()

    def measured(self, case: Hashable, head: Sequence[Message], ready: Sequence[Message], look: Look) -> Measured:
        """What `look` finds in the rendering of `head` and `ready`: a reply and what came after it.

        `head` and the reply's marks must be the same whenever `case` is. Raises `ConfigError`.
        """
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
            kept = list(self._known.items())[-_MOST_FORMS:]
            self._known = {**dict(kept), (case, form): [new, *known]}
        return measured

    def _outline(self, head: Sequence[Message], ready: Sequence[Message], look: Look) -> Outline | None:
        recording = Recording()
        blanks = [recording.blank(text) for text in _texts(ready)]
        try:
            tail, rewrites = look(recording.spelled(self._traced([*head, *_written(ready, blanks)])))
        except (Opaque, ConfigError):
            return None
        return None if tail is None or rewrites else recording.outline(tail)

    def _holds(self, outline: Outline, head: Sequence[Message], ready: Sequence[Message], look: Look) -> bool:
        """Whether it gives what rendering gives, or nothing, also for texts that might upset it."""
        for content in (None, *_UPSETTING):
            other = [ready[0], *({**m, "content": m["content"] if content is None else content} for m in ready[1:])]
            filled = outline.filled(list(_texts(other)))
            try:
                if filled is not None and look(self._render([*head, *other])) != (filled, ""):
                    return False
            except ConfigError:
                return False
        return True


def _form(ready: Sequence[Message]) -> Hashable | None:
    """What is alike in messages that differ in their texts alone; None where there is more than texts to them."""
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
    """Ids and names of the reply's calls, and the texts after it."""
    reply, *after = ready
    for call in reply.get("tool_calls", ()):
        yield call["id"]
        yield call["function"]["name"]
    for message in after:
        for name, text in message.items():
            if name != "role":
                yield text


def _written(ready: Sequence[Message], texts: Iterable[str]) -> list[Message]:
    """The messages with other texts, in the order of `_texts`."""
    reply, *after = ready
    left = iter(texts)
    if "tool_calls" in reply:
        calls = [
            {**call, "id": next(left), "function": {**call["function"], "name": next(left)}}
            for call in reply["tool_calls"]
        ]
        reply = {**reply, "tool_calls": calls}
    return [reply, *({n: t if n == "role" else next(left) for n, t in message.items()} for message in after)]
