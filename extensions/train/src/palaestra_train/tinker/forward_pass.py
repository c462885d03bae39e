"""Forward passes of a model over several rows.

A beginning that rows share, such as the prompt of a group, is computed once: its keys and values are repeated for the
rows, and the gradient flows back through them. The output layer, whose numbers are the largest, is applied in pieces,
and its gradient is computed only where a position has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra_tokens.engines.torch_decoder import LEAST_SHARED, cache_argument, common_length
from palaestra_train.pass_memory import recomputed

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

PIECE = 256
"""The positions to which the output layer is applied at a time."""

FORCE_GROUPS = "TRANSFORMERS_SDPA_FORCE_GQA"
"""The variable by which transformers is told not to repeat keys and values (integrations/sdpa_attention.py, 5.23)."""


def forward(module: PreTrainedModel, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `logits[B, T, V]` in float32 of `ids[B][T]`, padded on the right."""
    return module(input_ids=_padded(module, ids), use_cache=False).logits.float()


def clusters(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of rows `ids[B][T]` with a common beginning, and its length; 0 for a row that is alone. A row
    joins a cluster if this saves tokens: the row's own beginning is saved, but what the other rows have in common
    beyond it must be computed for each of them. The last token of a row never belongs to the beginning."""
    order = sorted(range(len(rows)), key=lambda index: list(rows[index]))
    start = 0
    while start < len(order):
        stop, shared = start + 1, max(0, len(rows[order[start]]) - 1)
        while stop < len(order):
            common = min(common_length(rows[order[start]], rows[order[stop]]), shared, len(rows[order[stop]]) - 1)
            if common < LEAST_SHARED or (stop - start) * (shared - common) > common:
                break
            stop, shared = stop + 1, common
        yield order[start:stop], shared if stop > start + 1 else 0
        start = stop


@dataclass(frozen=True, slots=True)
class Targets:
    """Of one row, the ids `ids[N]` or `ids[N, K]` whose log-probabilities are wanted at its first N positions, and
    `live[N]`: where they may have a gradient."""

    ids: torch.Tensor
    live: torch.Tensor


class OutputLayer:
    """The output layer of a model, apart from its body. `whole` models change the output layer's numbers once more, for
    example with a soft cap: their body is the whole model, whose logits are the output."""

    def __init__(self, module: PreTrainedModel) -> None:
        import torch

        self.whole = True
        with torch.no_grad():
            ids = torch.tensor([[0, 1, 2]], device=module.device)
            logits = module(input_ids=ids, use_cache=False).logits
            body = module.base_model
            if body is not module and (layer := module.get_output_embeddings()) is not None:
                apart = layer(body(input_ids=ids, use_cache=False).last_hidden_state)
                self.whole = not torch.allclose(apart, logits, atol=1e-4, rtol=1e-4)

    def body(self, module: PreTrainedModel, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return `[B, T, H]`, the input of `logits`. If there is a cache of keys and values, theirs are added."""
        part = module if self.whole else module.base_model
        given = {} if cache is None else {cache_argument(part): cache}
        out = part(input_ids=ids, use_cache=cache is not None, **given)
        return out.logits if self.whole else out.last_hidden_state

    def logits(self, module: PreTrainedModel, hidden_nh: torch.Tensor) -> torch.Tensor:
        """Return `[N, V]` in float32."""
        return (hidden_nh if self.whole else module.get_output_embeddings()(hidden_nh)).float()

    def logprobs(
        self,
        module: PreTrainedModel,
        ids: Sequence[Sequence[int]],
        targets: Sequence[Targets],
        shared: int,
        *,
        recompute: bool,
    ) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's targets, in the shape of its ids. The rows `ids[B][T]` have the
        first `shared` tokens in common. If `recompute` is true, layers are computed again in the backward pass instead
        of being kept; this is for rows without a common beginning."""
        import torch
        from transformers import DynamicCache

        with torch.set_grad_enabled(torch.is_grad_enabled() and any(bool(each.live.any()) for each in targets)):
            first: list[torch.Tensor] = []
            cache = None
            if shared:
                cache = DynamicCache(config=module.config.get_text_config())
                beginning = self.body(module, _padded(module, [ids[0][:shared]]), cache)
                first = self._picked(module, beginning[0], [_part(each, 0, shared) for each in targets])
                _repeat(cache, len(ids))
            rest = _padded(module, [row[shared:] for row in ids])
            with recomputed(module, on=recompute and torch.is_grad_enabled()), _grouped_heads(module, on=bool(shared)):
                hidden = self.body(module, rest, cache)
            found = []
            for place, (each, hidden_th) in enumerate(zip(targets, hidden.unbind(0), strict=True)):
                (last,) = self._picked(module, hidden_th, [_part(each, shared, len(ids[place]))])
                found.append(torch.cat([first[place], last]) if shared else last)
        return [logprobs.reshape(each.ids.shape) for logprobs, each in zip(found, targets, strict=True)]

    def _picked(
        self, module: PreTrainedModel, hidden_th: torch.Tensor, targets: Sequence[Targets]
    ) -> list[torch.Tensor]:
        """Return the log-probabilities `[N, K]` of the targets of each row at the positions that the rows share."""
        import torch

        longest = max(len(each.live) for each in targets)
        live = torch.zeros(longest, dtype=torch.bool, device=hidden_th.device)
        for each in targets:
            live[: len(each.live)] |= each.live
        pieces: list[list[torch.Tensor]] = [[each.ids.new_zeros((0, each.ids.shape[1])).float()] for each in targets]
        places: list[list[torch.Tensor]] = [[live.new_zeros(0, dtype=torch.long)] for _ in targets]
        for positions, grad in ((live, True), (~live, False)):
            for chosen in positions.nonzero().flatten().split(PIECE):
                with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                    logits = self.logits(module, hidden_th[chosen])
                    scale = logits.logsumexp(dim=-1, keepdim=True)
                    for row, each in enumerate(targets):
                        own = chosen[chosen < len(each.live)]
                        picked = logits[: len(own)].gather(1, each.ids[own]) - scale[: len(own)]
                        pieces[row].append(picked)
                        places[row].append(own)
        return [torch.cat(part)[torch.cat(order).argsort()] for part, order in zip(pieces, places, strict=True)]


@contextmanager
def _grouped_heads(module: PreTrainedModel, *, on: bool) -> Iterator[None]:
    """If `on` is true, let attention on a CPU use keys and values as they are within the block, where several heads
    share them. With a mask, transformers repeats them for each head, and the copies of all layers are kept for the
    backward pass: 0.5 GiB for four rows after 1,000 tokens of a model with 135 million parameters. Versions that do not
    know the variable repeat them."""
    if not on or module.device.type != "cpu" or FORCE_GROUPS in os.environ:
        yield
        return
    os.environ[FORCE_GROUPS] = "1"
    try:
        yield
    finally:
        del os.environ[FORCE_GROUPS]


def _repeat(cache: Cache, rows: int) -> None:
    """Repeat the keys and values of one row for `rows` rows, where possible without a copy: each layer makes one
    anyway when it appends the rows' own tokens."""
    from transformers.cache_utils import DynamicLayer

    for layer in cache.layers:
        if type(layer) is DynamicLayer and layer.is_initialized:
            layer.keys, layer.values = (each.expand(rows, -1, -1, -1) for each in (layer.keys, layer.values))
        else:
            layer.batch_repeat_interleave(rows)


def _part(targets: Targets, start: int, stop: int) -> Targets:
    """Return the targets of some positions, `ids[N, K]`."""
    ids = targets.ids[start:stop]
    return Targets(ids[:, None] if ids.ndim == 1 else ids, targets.live[start:stop])


def _padded(module: PreTrainedModel, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `ids[B][T]` padded on the right. The padding needs no mask: no position attends to a later one."""
    import torch

    longest = max(len(row) for row in ids)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], device=module.device)
