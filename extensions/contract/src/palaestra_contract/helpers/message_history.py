"""Shortening the history that an agent reads again: thinking, and old turns of a trajectory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from palaestra_contract.helpers.training_tokens import tokenize_for_trainer
from palaestra_contract.scored_data import ScoredDataGroup
from palaestra_slots.core.types import JSON, Message

logger = logging.getLogger(__name__)

OPEN, CLOSE = "<think>", "</think>"
_AGENTS = frozenset({"agent", "assistant"})


def strip_thinking(response_text: str) -> str:
    """Return the text without its first thinking block and the tags."""
    start, end = response_text.find(OPEN), response_text.find(CLOSE)
    if start == -1 or end == -1:
        return response_text
    return response_text[:start] + response_text[end + len(CLOSE) :]


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Return the text with at most `max_think_tokens` of thinking in its first block: the last paragraph if it fits,
    otherwise the last tokens, after `...`."""
    start, end = response_text.find(OPEN), response_text.find(CLOSE)
    if not -1 < start < end:
        return response_text
    before, after = response_text[: start + len(OPEN)].rstrip(), response_text[end:].lstrip()
    thinking = response_text[start + len(OPEN) : end].strip()
    if not thinking:
        return before + after
    ids = tokenizer.encode(thinking, add_special_tokens=False)
    cut = len(ids) > max_think_tokens
    if cut:
        last = [paragraph.strip() for paragraph in thinking.split("\n\n") if paragraph.strip()][-1]
        paragraph = tokenizer.encode(last, add_special_tokens=False) if len(last) < len(thinking) else ids
        fits = len(paragraph) <= max_think_tokens
        ids = paragraph if fits else ids[max(0, len(ids) - max_think_tokens) :]
    kept = tokenizer.decode(ids, skip_special_tokens=True).strip()
    if not kept:
        return before + after
    return f"{before}\n{'... ' if cut else ''}{kept}\n{after}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[ScoredDataGroup], tokenizer: Any, max_trajectory_tokens: int
) -> list[ScoredDataGroup]:
    """Return the steps whose alternatives have at most `max_trajectory_tokens` tokens each.

    A longer step loses its oldest messages, the same number in each alternative, until it fits; the first message, and
    the last observation with the agent's reply, stay. A step that still does not fit is left out, as is one without
    messages, tokens, masks, `seed` or `parsed_actions`; each such step is logged.
    """
    kept: list[ScoredDataGroup] = []
    for number, step in enumerate(trajectory):
        fitted = _fitted(step, tokenizer, max_trajectory_tokens)
        if fitted is None:
            logger.warning("step %d of a trajectory is left out: it is incomplete or too long", number)
        else:
            kept.append(fitted)
    return kept


def _fitted(step: Any, tokenizer: Any, limit: int) -> Any:
    """Return the step if it fits, a shortened copy of it, or None."""
    required = all(step.get(key) for key in ("messages", "tokens", "masks"))
    if not required or step.get("seed") is None or step.get("parsed_actions") is None:
        return None
    if max(map(len, step["tokens"])) <= limit:
        return step
    alternatives = [list(messages) for messages in step["messages"]]
    rows: list[dict[str, JSON]] = []
    while not rows or max(len(row["tokens"]) for row in rows) > limit:
        counts = [count for count in map(_removable, alternatives) if count > 0]
        if not counts or any(len(messages) <= min(counts) for messages in alternatives):
            return None
        for messages in alternatives:
            del messages[1 : 1 + min(counts)]
        try:
            rows = [tokenize_for_trainer(tokenizer, messages) for messages in alternatives]
        except Exception:
            logger.exception("a shortened trajectory cannot be encoded")
            return None
    shortened = {key: [row[key] for row in rows] for key in ("tokens", "masks")}
    same = {key: step.get(key) for key in ("seed", "scores", "parsed_actions")}
    return {"messages": alternatives, **shortened, **same}


def _removable(messages: Sequence[Message]) -> int:
    """Return how many messages after the first can be removed at a time: 2 for an observation with a reply."""
    ends = 0
    if len(messages) > 1 and messages[-1]["role"] in _AGENTS:
        ends = 2 if len(messages) > 2 and messages[-2]["role"] == "environment" else 1
    free = len(messages) - 1 - ends
    pair = free >= 2 and messages[1]["role"] == "environment" and messages[2]["role"] in _AGENTS
    return 2 if pair else min(1, max(0, free))
