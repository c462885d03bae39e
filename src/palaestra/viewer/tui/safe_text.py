"""Texts of a run for the terminal: colours of terminal output are kept, and everything else in them is inert.

A text from a run reaches a widget only as `Text` of this module. It has no markup to be parsed, no escape sequence, no
link, and no character that reorders its neighbours.
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from palaestra.core.printable import one_line, spans

_FLAGS = ("bold", "dim", "italic", "underline")


def coloured(text: str, style: str = "") -> Text:
    """Return a text with the colours of its terminal sequences, on top of `style`."""
    made = Text(style=style, no_wrap=False)
    for part in spans(text):
        made.append(part.text.expandtabs(4), _style(part.css) if part.css else None)
    return made


def line(text: str, style: str = "", most: int = 200) -> Text:
    """Return a text as one line of at most `most` characters."""
    return Text(one_line(text, most), style=style, no_wrap=True, overflow="ellipsis")


def _style(css: str) -> Style:
    names = [name.removeprefix("t-") for name in css.split()]
    colours = {name[:2]: f"color({name[2:]})" for name in names if name not in _FLAGS}
    bold, dim, italic, underline = (name in names or None for name in _FLAGS)
    return Style(
        color=colours.get("fg"), bgcolor=colours.get("bg"), bold=bold, dim=dim, italic=italic, underline=underline
    )
