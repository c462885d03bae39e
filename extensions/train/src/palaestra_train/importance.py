"""Corrects rows for the difference between the weights that sampled them and the weights that are trained.

q is the sampler's probability of a token and p the trainer's, before the step. Each sampled token gets the truncated
importance weight min(p/q, `cap`) (TIS: Espeholt et al. 2018, arXiv 1802.01561, equation 1; Yao et al. 2025,
fengyao.notion.site/off-policy-rl). A token with p/q above `limit` or below 1/`limit` is masked and not trained
(MIS: IcePop, ringtech.notion.site/icepop). A row is never refused for single tokens, because a sampler in bfloat16
is far off on single tokens of most long rows. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaestra_train.trainer import TrainedRow


@dataclass(frozen=True, slots=True)
class SamplerMismatch:
    """The difference between sampler and trainer over the sampled tokens of one step, in nats per token.

    `mean` is the mean of |log p - log q|, and `largest` the largest such mean of a row. `k1` and `k3` estimate
    KL(q || p) from the sampled tokens: the means of log q - log p, and of p/q - 1 - log(p/q), which has less variance
    and is never negative (Schulman 2020, joschu.net/blog/kl-approx.html). k3 counts only tokens that are not masked,
    because it grows with p/q without bound. `truncated` and `masked` count tokens. `rows` counts the rows of which no
    token is left. A log-probability that is not finite makes `mean` and `largest` infinite.
    """

    tokens: int = 0
    mean: float = 0.0
    largest: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    truncated: int = 0
    masked: int = 0
    rows: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the metrics of a step."""
        return {
            "logprob_difference": self.largest,
            "logprob_difference_mean": self.mean,
            "kl": self.k3,
            "kl_k1": self.k1,
            "truncated_tokens": self.truncated,
            "masked_tokens": self.masked,
        }


def corrected(
    rows: Sequence[TrainedRow], own: Sequence[Sequence[float]], *, cap: float, limit: float
) -> tuple[list[TrainedRow], SamplerMismatch]:
    """Return the rows with the importance weights of their tokens and the trainer's log-probabilities `own`, and the
    mismatch. A masked token has the weight 0. Rows of which no token is left are dropped."""
    kept: list[TrainedRow] = []
    far = math.log(limit)
    absolute, k1, k3, largest = 0.0, 0.0, 0.0, 0.0
    tokens = truncated = masked = 0
    for row, theirs in zip(rows, own, strict=True):
        weights, apart = [0.0] * len(row.row.mask), 0.0
        for place, (on, sampled, now) in enumerate(zip(row.row.mask, row.logprobs, theirs, strict=True)):
            if not on:
                continue
            log_ratio = now - sampled
            if not math.isfinite(log_ratio):
                apart, masked = math.inf, masked + 1
                continue
            apart += abs(log_ratio)
            k1 -= log_ratio
            if abs(log_ratio) > far:
                masked += 1
                continue
            ratio = math.exp(log_ratio)
            k3 += ratio - 1 - log_ratio
            truncated += ratio > cap
            weights[place] = min(ratio, cap)
        tokens += row.sampled
        absolute += apart
        largest = max(largest, apart / max(1, row.sampled))
        if any(weights):
            kept.append(replace(row, own=list(theirs), weights=weights))
    count = max(1, tokens)
    return kept, SamplerMismatch(
        tokens=tokens,
        mean=absolute / count,
        largest=largest,
        k1=k1 / count,
        k3=k3 / max(1, tokens - masked),
        truncated=truncated,
        masked=masked,
        rows=len(rows) - len(kept),
    )
