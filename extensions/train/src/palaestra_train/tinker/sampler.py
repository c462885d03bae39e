"""Samples from one set of weights, and scores given tokens.

Requests are sampled in one batch (`inference.engines.batcher`), and requests that only score share forward passes too.
Both take turns with the trainer. Log-probabilities are the model's own, at temperature 1 and before `top_k` and
`top_p`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.batcher import Batcher
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.tokenizers import Tokenizer
from palaestra_train.tinker.forward_pass import forward
from palaestra_train.tinker.model import BaseModel, SamplingDecoder, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MOST_ROWS = 64
"""The maximum number of sequences in one batch."""

_TAIL_TOKENS = 8
"""The number of tokens before a stop text that are decoded with it, because one character may take several tokens."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores to compute for `ids[T]`, whose first `prompt` ids are the prompt.

    `first` is the first position with log-probabilities, at least 1. `targets[prompt - 1, K]` are ids to score at each
    prompt position after the first, -1 for none. `alternatives` is the number of tokens to draw at each of these
    positions. `top_prompt` and `top_sampled` are the numbers of most likely tokens to return at each position of the
    prompt and of the reply.
    """

    ids: Sequence[int]
    prompt: int
    first: int = 1
    top_prompt: int = 0
    top_sampled: int = 0
    targets: torch.Tensor | None = None
    alternatives: int = 0
    temperature: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class ScoredTokens:
    """The scores: log-probabilities `[prompt]`, NaN before `first`; the top tokens as (ids, log-probabilities) of
    `[prompt, k]` and `[sampled, k]`; the log-probabilities of the targets `[prompt - 1, K]`; the alternatives as (ids,
    log-probabilities)."""

    logprobs: torch.Tensor
    top_prompt: tuple[torch.Tensor, torch.Tensor] | None = None
    top_sampled: tuple[torch.Tensor, torch.Tensor] | None = None
    targets: torch.Tensor | None = None
    alternatives: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request: `count` continuations of `prompt`. `stops` are texts that end a reply, in addition to the ids of
    `sampling`."""

    prompt: Sequence[int]
    count: int
    sampling: Sampling
    stops: Sequence[str] = ()


class Sampler:
    """Samples from one module. `aclose` ends its threads and is idempotent."""

    def __init__(self, base: BaseModel, module: PreTrainedModel) -> None:
        self.base = base
        self.module = module
        self.in_use = 0
        self._batcher: Batcher | None = None
        self._waiting: list[tuple[Scoring, asyncio.Future[ScoredTokens]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-scores")

    async def sample(self, request: SampleRequest, tokenizer: Callable[[], Tokenizer]) -> list[Sampled]:
        """Return the continuations. The ids of a reply include the tokens that ended the reply. Raises `UserError` if
        the prompt fills the window."""
        room = self.base.window - len(request.prompt)
        if room < 1:
            raise UserError(
                f"The prompt has {len(request.prompt)} tokens; model '{self.base.name}' has a window of "
                f"{self.base.window}, which must hold the reply too."
            )
        most = min(room, request.sampling.max_tokens or room)
        ended = _stop_texts(request.stops, tokenizer()) if request.stops else None
        if self._batcher is None:
            self._batcher = Batcher(
                lambda: SamplingDecoder(self.module, self.base), name="tinker-sampler", most_rows=MOST_ROWS
            )
            self._batcher.start()
        seeds = random.Random(request.sampling.seed)
        answers = [
            self._batcher.submit(request.prompt, request.sampling.seeded(seeds.getrandbits(63)), most, ended)
            for _ in range(request.count)
        ]
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(answer) for answer in answers)))
        finally:
            for answer in answers:
                answer.cancel()

    async def score(self, scoring: Scoring) -> ScoredTokens:
        """Score given tokens, in one batch with the tokens of other callers."""
        answer: asyncio.Future[ScoredTokens] = asyncio.get_running_loop().create_future()
        self._waiting.append((scoring, answer))
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.ensure_future(self._score_waiting())
        return await answer

    async def _score_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_ROWS], self._waiting[MOST_ROWS:]
            try:
                found = await loop.run_in_executor(self._thread, self._scores, [scoring for scoring, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), scored in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(scored)

    def _scores(self, batch: Sequence[Scoring]) -> list[ScoredTokens]:
        import torch

        found: list[ScoredTokens | None] = [None] * len(batch)
        with torch.inference_mode():
            for chosen, _, _ in self.base.passes([scoring.ids for scoring in batch], whole=True):
                with self.base.turns.turn():
                    logits = forward(self.module, [batch[index].ids for index in chosen])
                    for place, index in enumerate(chosen):
                        found[index] = _scored(logits[place], batch[index])
        return [scored for scored in found if scored is not None]

    async def aclose(self) -> None:
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            await asyncio.to_thread(batcher.close)
        self._thread.shutdown(wait=False)


def _scored(logits_tv: torch.Tensor, scoring: Scoring) -> ScoredTokens:
    """Score the tokens. Position t of a sequence is scored by the logits at t - 1."""
    import torch

    length = len(scoring.ids)
    ids = torch.tensor(scoring.ids, device=logits_tv.device)
    logprobs_tv = logits_tv[: length - 1].log_softmax(dim=-1)
    own = torch.full((scoring.prompt,), math.nan)
    last = min(scoring.prompt, length)
    if last > scoring.first:
        rows = slice(scoring.first - 1, last - 1)
        own[scoring.first : last] = logprobs_tv[rows].gather(1, ids[scoring.first : last, None]).squeeze(1).cpu()
    scored = ScoredTokens(own)
    before = logprobs_tv[: scoring.prompt - 1]
    if scoring.top_prompt:
        scored.top_prompt = _top(before, scoring.top_prompt, scoring.first)
    if scoring.top_sampled:
        scored.top_sampled = _top(logprobs_tv[scoring.prompt - 1 :], scoring.top_sampled, 0)
    if scoring.targets is not None:
        targets = scoring.targets.to(before.device)
        picked = before.gather(1, targets.clamp(min=0))
        scored.targets = picked.masked_fill(targets < 0, 0.0).cpu()
    if scoring.alternatives:
        scored.alternatives = _draws(before, scoring)
    return scored


EMPTY_LOGPROB = -99999.0
"""The log-probability that the SDK reads as a missing token in a list of top tokens."""


def _top(logprobs_tv: torch.Tensor, count: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities. For a prompt (`first` > 0) the row of position t is t, and rows before `first`
    are empty."""
    import torch

    values, ids = logprobs_tv.topk(min(count, logprobs_tv.shape[-1]), dim=-1)
    values, ids = values.cpu(), ids.int().cpu()
    if first:
        values = torch.cat([values.new_full((1, values.shape[1]), EMPTY_LOGPROB), values])
        ids = torch.cat([ids.new_zeros((1, ids.shape[1])), ids])
        values[:first], ids[:first] = EMPTY_LOGPROB, 0
    return ids, values


def _draws(logprobs_tv: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens drawn with replacement at the request's temperature, and the log-probabilities that the model gives
    them."""
    import torch

    logprobs = logprobs_tv.cpu()
    if scoring.temperature == 0:
        drawn = logprobs.argmax(dim=-1, keepdim=True).expand(-1, scoring.alternatives)
    else:
        generator = torch.Generator().manual_seed(scoring.seed)
        odds = (logprobs / scoring.temperature).softmax(dim=-1)
        drawn = torch.multinomial(odds, scoring.alternatives, replacement=True, generator=generator)
    return drawn, logprobs.gather(1, drawn)


def _stop_texts(stops: Sequence[str], tokenizer: Tokenizer) -> Callable[[Sequence[int]], bool]:
    """Return a function that reports whether the sampled ids now contain one of the texts. Each call decodes only the
    end of the ids."""
    tail = max(len(stop.encode()) for stop in stops) + _TAIL_TOKENS

    def ended(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(list(ids[-tail:]), skip_special_tokens=False)
        return any(stop in text for stop in stops)

    return ended
