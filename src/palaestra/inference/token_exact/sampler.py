"""Samples one reply, over as many requests as it takes: an aborted one goes on from the tokens that it had.

Not for retries (the engine's client does those). Invariants: what one request sampled is the start of the next one's
prompt, so nothing is sampled twice or lost; every answer is checked before it is believed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import replace

from palaestra.core.clock import Clock
from palaestra.core.errors import EngineReplyError, EngineUnavailable
from palaestra.core.types import JSON
from palaestra.inference.engine import Sampled, TokenEngine
from palaestra.inference.ledger import Piece, Prompt

MOST_RESUMES = 200
"""Aborted answers to one request after which the engine counts as unavailable."""

HIGHEST_LOGPROB = 1e-3
"""A log-probability may be above 0 by what rounding can do."""

LOWEST_LOGPROB = -3.4e38
"""Below it, the ledger's 32 bits hold minus infinity."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


async def sample(
    engine: TokenEngine, prompt: Prompt, settings: Mapping[str, JSON], vocabulary: int | None, clock: Clock
) -> list[Piece]:
    """The reply to `prompt[T]`, which grows by it: one piece, or several where requests were aborted under way.

    `vocabulary` is how many ids the tokenizer knows, None where it does not say. Raises `EngineReplyError` for an
    answer that cannot be right and `EngineUnavailable` when the engine aborts for ever.
    """
    pieces: list[Piece] = []
    left, empty = settings.get("max_tokens"), 0
    for _ in range(MOST_RESUMES):
        sent = prompt.checksum
        sampled = await engine.generate(prompt, settings if left is None else {**settings, "max_tokens": left})
        _check(sampled, engine.name, len(prompt), left, vocabulary)
        piece = Piece(sampled, sent)
        if sampled.finish_reason != "abort":
            return [*pieces, piece]
        if not sampled.ids:
            empty += 1
            await clock.sleep(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**empty))
            continue
        ids, empty = array("i", sampled.ids), 0
        prompt.grow(ids)
        pieces.append(piece)
        if left is not None and (left := left - len(ids)) <= 0:
            return [*pieces[:-1], replace(piece, sampled=replace(sampled, finish_reason="length"))]
    raise EngineUnavailable(
        f"Engine '{engine.name}' aborted one request {MOST_RESUMES} times, at {len(prompt)} tokens. Look at its log."
    )


def _check(sampled: Sampled, engine: str, prompt_tokens: int, most: int | None, vocabulary: int | None) -> None:
    """Raises `EngineReplyError` unless the answer can be what was sampled."""
    ids, logprobs = sampled.ids, sampled.logprobs
    problem = ""
    if len(ids) != len(logprobs):
        problem = f"{len(ids)} token ids with {len(logprobs)} log-probabilities"
    elif sampled.finish_reason not in ("stop", "length", "abort"):
        problem = f"finish reason '{sampled.finish_reason}'"
    elif most is not None and len(ids) > most:
        problem = f"{len(ids)} tokens where at most {most} were asked for"
    elif ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        problem = (
            f"token id {min(ids) if min(ids) < 0 else max(ids)}, which the tokenizer ({vocabulary} ids) does not have"
        )
    elif ids and not (
        math.isfinite(sum(logprobs)) and min(logprobs) >= LOWEST_LOGPROB and max(logprobs) <= HIGHEST_LOGPROB
    ):
        problem = "a log-probability that is none"
    if problem:
        raise EngineReplyError(f"Engine '{engine}' answered a prompt of {prompt_tokens} tokens with {problem}.")
