"""Fits a conversation into the model's context window: which messages are shortened or summarized, and the summary.

The conversation decides when (`conversation.py`), and the store keeps the whole history (`StoredTurns.compact`).
Nothing here needs the whole history to fit: a summary is made in pieces if it must be.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from palaestra.agent.budget import BYTES_PER_TOKEN, estimated_tokens
from palaestra_chat.store import HistoryEntry, StoredTurn, shortened
from palaestra_slots.core.errors import ContextExceeded
from palaestra_slots.core.types import Message
from palaestra_toolsets.tools.session_search import message_text

FULL_SHARE = 0.8
"""The share of the window at which a conversation is compacted: the rest is for the next reply and tool results."""
TARGET_SHARE = 0.5
"""The share of the window that a compacted conversation may have."""

SUMMARIZE = (
    "Summarize this conversation for yourself, so that you can continue it without its messages: what the user wants "
    "and has decided, what was done and found, which files and commands matter, what is left to do. Only the summary."
)

_CUT_CHARS = (2000, 800, 300)
"""The lengths to which outputs of tools are shortened, one after the other."""
_SUMMARY_TOKENS = 2000
_PIECE_SHARE, _SUMMARY_SHARE = 0.4, 0.2
"""The shares of the window of a piece of the history, and of the summary so far, in a request for a summary."""
_PIECE_TOKENS = 4000
"""The size of a piece if the window is unknown."""
_SMALLEST_PIECE_CHARS = 200
_ENOUGH_TOKENS = 1000

AskText = Callable[[Sequence[Message]], Awaitable[str]]
"""Returns the model's answer to these messages."""


@dataclass(slots=True)
class TokenCount:
    """Counts tokens by their bytes. `scale` is the ratio of the server's latest count to the estimate."""

    scale: float = 1.0

    def of(self, messages: Sequence[Message]) -> int:
        """Return the estimated tokens of messages, or of tool definitions."""
        return int(self.scale * estimated_tokens(messages))

    def learn(self, messages: Sequence[Message], tokens: int) -> None:
        """Adjust the estimate to the server's count of these messages. A short conversation proves little, because most
        of its tokens are those of the template."""
        estimate = estimated_tokens(messages)
        if estimate >= _ENOUGH_TOKENS:
            self.scale = min(3.0, max(0.5, tokens / estimate))

    def enlarge(self, factor: float) -> None:
        """Multiply all estimates by this factor, after they have proved too small."""
        self.scale *= factor

    def chars(self, tokens: int, text: str) -> int:
        """Return the number of characters of `text` that are about this many tokens."""
        per_char = len(text.encode(errors="replace")) / max(1, len(text))
        return int(tokens * BYTES_PER_TOKEN / self.scale / max(1.0, per_char))


@dataclass(slots=True)
class Plan:
    """What a compaction does: `summarized` are replaced with a summary, and the other messages are `kept`. `cut` maps
    rows to the number of characters to which their messages are shortened. `whole` means that the summarized messages
    are whole turns."""

    kept: list[HistoryEntry]
    summarized: list[HistoryEntry] = field(default_factory=list)
    cut: dict[int, int] = field(default_factory=dict)
    whole: bool = True

    @property
    def newly_cut(self) -> int:
        """The number of kept messages that become shorter."""
        return sum(self.cut.get(entry.row) != entry.cut for entry in self.kept)

    @property
    def empty(self) -> bool:
        return not self.summarized and not self.newly_cut

    def messages(self, entries: Sequence[HistoryEntry]) -> list[Message]:
        """Return the messages of these entries, shortened."""
        return [shortened(entry.message, self.cut.get(entry.row)) for entry in entries]

    def kept_tokens(self, count: TokenCount) -> int:
        """Return the estimated tokens of the kept messages."""
        return count.of(self.messages(self.kept))


def plan(entries: Sequence[HistoryEntry], running: StoredTurn | None, room: int, count: TokenCount) -> Plan:
    """Return how to make the history fit `room` tokens, as far as that is possible: first shorten old outputs of tools,
    then summarize earlier turns, then shorten and summarize the running turn. Its message and its latest tool calls
    with their results stay."""
    made = Plan(list(entries), cut={entry.row: entry.cut for entry in entries if entry.cut is not None})
    old = [entry for entry in entries if running is None or entry.turn.row != running.row]
    own = [entry for entry in entries if running is not None and entry.turn.row == running.row]
    latest = _latest_calls(own)
    _cut_outputs(made, [entry for entry in entries if entry not in latest], _CUT_CHARS[:1], room, count)
    if old and made.kept_tokens(count) > room:
        made.summarized, made.kept = old, own
        room -= min(_SUMMARY_TOKENS, room // 4)
    _cut_outputs(made, own, _CUT_CHARS, room, count)
    between = [entry for entry in own if entry not in latest and entry.message.get("role") != "user"]
    if between and made.kept_tokens(count) > room:
        made.whole = False
        made.summarized = [*made.summarized, *between]
        made.kept = [entry for entry in own if entry not in between]
    return made


def _latest_calls(own: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Return the running turn's latest reply with the results of its tool calls."""
    replies = [n for n, entry in enumerate(own) if entry.message.get("role") == "assistant"]
    return list(own[replies[-1] :]) if replies else []


def _cut_outputs(
    made: Plan, entries: Sequence[HistoryEntry], lengths: Sequence[int], room: int, count: TokenCount
) -> None:
    """Shorten outputs of tools, oldest first, until the history fits."""
    tokens = made.kept_tokens(count)
    for length in lengths:
        for entry in entries:
            if tokens <= room:
                return
            chars = made.cut.get(entry.row, len(message_text(entry.message.get("content"))))
            if entry.message.get("role") == "tool" and chars > 2 * length:
                before = count.of(made.messages([entry]))
                made.cut[entry.row] = length
                tokens -= before - count.of(made.messages([entry]))


async def summary_in_pieces(
    messages: Sequence[Message], ask: AskText, window: Callable[[], int | None], count: TokenCount
) -> str:
    """Return a summary of messages that do not fit the window together. Each request has one piece of their text and
    the summary of the pieces before it. Raises `EngineError`."""
    text = "\n\n".join(_as_text(message, window(), count) for message in messages)
    summary, at = "", 0
    most = _piece_chars(text, window(), count)
    while at < len(text):
        known = window()
        most = min(most, _piece_chars(text, known, count))
        piece = text[at : at + most]
        before = f"The summary of the conversation so far:\n\n{summary}\n\n" if summary else ""
        request = f"{before}The next part of the conversation:\n\n{piece}\n\n{SUMMARIZE}"
        try:
            asked: list[Message] = [{"role": "user", "content": request}]
            answer = await ask(asked) or await ask(asked)  # a reply without text may be chance
        except ContextExceeded:
            most //= 2
            if most < _SMALLEST_PIECE_CHARS:
                raise
            continue
        at += len(piece)
        limit = count.chars(int((known or _PIECE_TOKENS) * _SUMMARY_SHARE), answer)
        summary = str(shortened({"content": answer or summary}, limit)["content"])
    return summary


def _piece_chars(text: str, window: int | None, count: TokenCount) -> int:
    tokens = _PIECE_TOKENS if window is None else int(window * _PIECE_SHARE)
    return max(_SMALLEST_PIECE_CHARS, count.chars(tokens, text))


def _as_text(message: Message, window: int | None, count: TokenCount) -> str:
    """Return a message as text of a transcript. A message that is longer than a piece is shortened, so that one huge
    message does not cost many requests."""
    lines = [f"{str(message.get('role')).capitalize()}: {message_text(message.get('content'))}"]
    for call in message.get("tool_calls") or ():
        lines.append(f"Calls {json.dumps(call.get('function'), ensure_ascii=False)}")
    text = "\n".join(lines)
    return str(shortened({"content": text}, _piece_chars(text, window, count))["content"])
