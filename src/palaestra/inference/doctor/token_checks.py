"""What an engine does with tokens: ids in and out, log-probabilities, and whether a turn's last token is among them.

Asks the engine for a handful of tokens. Says nothing about their quality.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

from palaestra.core.errors import EngineError, EngineReplyError
from palaestra.inference.doctor.checks import Check, failed, not_applicable, passed
from palaestra.inference.engine import TokenEngine
from palaestra.inference.token_exact.sampler import HIGHEST_LOGPROB

TOKENS, LOGPROBS, STOP = "tokens in and out", "log-probabilities", "stop token inside the mask"
SAMPLING = (TOKENS, LOGPROBS, STOP)

_UPGRADE = "vLLM: 0.10.2 or newer, without --disable-log-probs. SGLang: 0.4 or newer. Check --openai.server_type."
_ASKED = 4


async def token_checks(engine: TokenEngine, prompt: Sequence[int]) -> AsyncIterator[Check]:
    """The three answers. Whatever the engine raises is an answer, too."""
    try:
        sampled = await engine.generate(prompt, {"max_tokens": _ASKED, "temperature": 1.0})
    except EngineError as error:
        about = LOGPROBS if isinstance(error, EngineReplyError) and "log-prob" in str(error) else TOKENS
        for name in SAMPLING:
            yield failed(name, str(error), _UPGRADE) if name == about else not_applicable(name, "see the failed check")
        return
    if not sampled.ids or len(sampled.ids) > _ASKED:
        yield failed(TOKENS, f"{len(sampled.ids)} tokens came where {_ASKED} were asked for", _UPGRADE)
    else:
        yield passed(TOKENS, f"{len(prompt)} ids in, {len(sampled.ids)} out, finish reason '{sampled.finish_reason}'")
    sane = len(sampled.logprobs) == len(sampled.ids) and all(
        math.isfinite(value) and value <= HIGHEST_LOGPROB for value in sampled.logprobs
    )
    if sane:
        yield passed(LOGPROBS, "one per token: " + ", ".join(f"{value:.3f}" for value in sampled.logprobs))
    else:
        yield failed(LOGPROBS, f"{list(sampled.logprobs)} for {len(sampled.ids)} tokens", _UPGRADE)
    yield await _stop_token(engine, prompt)


async def _stop_token(engine: TokenEngine, prompt: Sequence[int]) -> Check:
    """Ask for the likeliest token, then declare it the one that ends the turn, and see whether it comes back."""
    likeliest = {"temperature": 0.0, "max_tokens": 1}
    try:
        first = (await engine.generate(prompt, likeliest)).ids
        if not first:
            return not_applicable(STOP, "the engine ended before the first token")
        again = await engine.generate(prompt, {**likeliest, "max_tokens": _ASKED, "stop_token_ids": [first[0]]})
    except EngineError as error:
        return failed(STOP, str(error), "The engine must accept stop_token_ids.")
    if again.finish_reason != "stop":
        return failed(STOP, f"stop_token_ids had no effect (finish reason '{again.finish_reason}')", _UPGRADE)
    if first[0] not in again.ids:
        return failed(
            STOP,
            "the engine leaves out the token that ended the reply",
            "The template then writes it, and it is not trained: the model does not learn to end its turns. "
            "SGLang: do not set no_stop_trim false in extra_body. vLLM: use its own server, not a proxy.",
        )
    return passed(STOP, "the token that ends a reply is sampled, recorded and trained")
