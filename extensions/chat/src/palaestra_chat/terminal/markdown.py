"""Shows Markdown as it arrives: each block (paragraph, list, table, code) is rendered by rich once it is complete."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_SHORT_BLOCK, _GROWTH = 2000, 1.1
"""The length, in characters, up to which a block is parsed for each line, and by how much a longer one must grow."""
CODE_THEME = "ansi_dark"
"""A theme of the terminal's own sixteen colours, readable on dark and on light backgrounds."""


class _Heading(Heading):
    """A heading at the left margin, without the box that rich draws around the first level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize("bold underline" if self.tag == "h1" else "bold")
        yield self.text


class _CodeBlock(CodeBlock):
    """A code block on the terminal's own background, so that copied lines have no padding."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, background_color="default"
        )


class _ChatMarkdown(Markdown):
    """Markdown of a model: line breaks stay, HTML is text, and the address of a link is visible."""

    elements: ClassVar = {
        **Markdown.elements, "heading_open": _Heading, "fence": _CodeBlock, "code_block": _CodeBlock,
    }  # fmt: skip

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = _parser().parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def rendered(text: str, columns: int) -> str:
    """Return Markdown as lines for a terminal of this width, wrapped between words. `text` must be printable."""
    lines = _printed([_ChatMarkdown(text)], columns).split("\n")
    blank = [not _STYLE.sub("", line).strip() for line in lines]
    first = next((place for place, empty in enumerate(blank) if not empty), len(lines))
    last = next((place for place, empty in enumerate(reversed(blank)) if not empty), 0)
    return "".join(f"{line}\n" for line in lines[first : len(lines) - last])


def wrapped(text: str, columns: int) -> str:
    """Return lines with escape sequences, wrapped between words."""
    return _printed([Text.from_ansi(line) for line in text.split("\n")], columns).rstrip("\n")


def _printed(parts: Iterable[RenderableType], columns: int) -> str:
    """Return what rich prints for a terminal of this width, without spaces at the ends of lines."""
    target = io.StringIO()
    console = Console(
        file=target, width=max(20, columns), force_terminal=True, color_system="standard", highlight=False, emoji=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in target.getvalue().split("\n"))


class MarkdownStream:
    """Markdown that arrives in pieces. Text that is already on the screen is never changed."""

    def __init__(self) -> None:
        self.pending = ""
        """The source of the last block, which is not complete."""
        self._begun = False
        self._next_chars = 0
        """How long the last block must be before it is parsed again."""

    def feed(self, text: str, columns: int) -> str:
        """Add a piece, and return the blocks that it completes."""
        self.pending += text
        if "\n" not in text or len(self.pending) < self._next_chars:
            return ""
        at = _last_block(self.pending)
        complete, self.pending = self.pending[:at], self.pending[at:]
        # A long list would otherwise be parsed as a whole for each of its lines, and the prompt would stand still.
        long = len(self.pending) > _SHORT_BLOCK
        self._next_chars = int(_GROWTH * len(self.pending)) if long else 0
        return self._rendered_block(complete, columns)

    def end(self, columns: int) -> str:
        """Return the rest. The next piece begins another text."""
        rest, self.pending, self._next_chars = self.pending, "", 0
        shown = self._rendered_block(rest, columns)
        self._begun = False
        return shown

    def _rendered_block(self, text: str, columns: int) -> str:
        if not text.strip():
            return ""
        between, self._begun = "\n" if self._begun else "", True
        return between + rendered(text, columns)


def _last_block(text: str) -> int:
    """Return the position at which the last block begins."""
    blocks = [token for token in _parser().parse(text) if _is_block(token)]
    if len(blocks) < 2 or blocks[-1].map is None:
        return 0
    first = blocks[-1].map[0]
    return sum(len(line) for line in text.splitlines(keepends=True)[:first])


def _is_block(token: Token) -> bool:
    return token.level == 0 and token.nesting >= 0 and token.map is not None
