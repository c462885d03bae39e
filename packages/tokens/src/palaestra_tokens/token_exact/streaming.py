"""Shows a reply while its tokens arrive: its text and thinking in pieces, without its tool calls.

This is only the display: the reply itself is read from all tokens at its end. The last piece shows the text that was
not shown before, unless the reply differs from what was already shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from palaestra_slots.core.errors import PalaestraError
from palaestra_tokens.engine import AssistantMessage
from palaestra_tokens.http.sse import Delta, DeltaHook
from palaestra_tokens.tokenizers import Tokenizer

_MARKER = re.compile(r"(?:<[^<>\n]{0,40}|\[[A-Z_]{0,20}|\s)$|\ufffd$")
_LONGEST_MARKER = 42
"""The end of a text that may become a marker of the format, or is an incomplete character."""


class ShownReply:
    """A reply that is shown as it arrives. `read` reads a text that may be incomplete; `stop_ids` end a turn and are
    not text."""

    def __init__(
        self, hook: DeltaHook, tokenizer: Tokenizer, read: Callable[[str], AssistantMessage], stop_ids: Collection[int]
    ) -> None:
        self._hook, self._tokenizer, self._read, self._stop_ids = hook, tokenizer, read, stop_ids
        self._ids: list[int] = []
        self._content = self._reasoning = ""

    def add(self, ids: Sequence[int] | None) -> None:
        """Show the text that new tokens add. None means that all tokens so far were void."""
        if ids is None:
            self._ids, self._content, self._reasoning = [], "", ""
            self._hook(Delta(restarted=True))
            return
        self._ids += [number for number in ids if number not in self._stop_ids]
        try:
            message = self._read(self._tokenizer.decode(self._ids, skip_special_tokens=False))
        except PalaestraError:  # the whole reply is read again at its end
            return
        self._show(_settled(message.content or ""), _settled(message.reasoning_content or ""))

    def finish(self, message: AssistantMessage) -> None:
        """Show the rest of the whole reply."""
        self._show(message.content or "", message.reasoning_content or "")

    def _show(self, content: str, reasoning: str) -> None:
        """Show the new part of a text. A text that does not continue what was shown is not shown."""
        new_content = content[len(self._content) :] if content.startswith(self._content) else ""
        new_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        self._content += new_content
        self._reasoning += new_reasoning
        if new_content or new_reasoning:
            self._hook(Delta(content=new_content, reasoning=new_reasoning))


def _settled(text: str) -> str:
    # From near the end, because a reply is looked at again with each token.
    match = _MARKER.search(text, max(0, len(text) - _LONGEST_MARKER))
    return text[: match.start()].rstrip("\ufffd" if match[0] == "\ufffd" else None) if match else text
