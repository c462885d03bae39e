"""Continues several token sequences concurrently with a `transformers` model, in one batch with a key-value cache and
left padding.

Except for rounding, a row's results do not depend on the other rows, because padding is never attended to and each row
has its own random generator. A beginning that new prompts share, with each other or with a row, is read only once. A
token is chosen by inverting the cumulative distribution at a number from Python's generator, so the same seed and
probabilities give the same token on every device.

Needs the extra `train` (torch, transformers).
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ConfigError, EngineUnavailable
from palaestra_slots.core.extras import install_command
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.tokenizers import model_source

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})

LEAST_SHARED = 16
"""The fewest tokens of a common beginning for which one more pass of the model pays."""


def load_model(folder: str, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Return a model from a folder or the hub, ready to sample. Blocks. If `device` is None, the model uses the first
    GPU, or the CPU if there is no GPU. Raises `ConfigError` if the extra or the model is missing, or if this engine
    cannot batch the model's layers."""
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from palaestra_tokens.engines.onednn import take_onednn
    except ImportError as error:
        raise ConfigError(
            f"The transformers engine needs the extra 'train' ({error}): {install_command('train', 'palaestra-tokens')}"
        ) from None
    try:
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(model_source(folder), dtype=dtype)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"No model could be loaded from '{folder}': {first}") from None
    # `keep` cuts padding off the keys and values. Linear attention, for example, has a state in their place.
    odd = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _PLAIN_LAYERS
    if odd:
        raise ConfigError(
            f"The transformers engine cannot batch layers of type {', '.join(sorted(odd))}; use a server."
        )
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(chosen).eval()
    take_onednn(model)
    return model


class TorchDecoder:
    """One model and its rows: the sequences that it continues, in the order of their arrival. `most_cache_bytes` limits
    the keys and values of the batch, which joining rows exceed for a moment."""

    def __init__(self, model: PreTrainedModel, most_cache_bytes: float = math.inf) -> None:
        self.model = model
        self._cache_argument = cache_argument(model)  # once, because a signature takes long to read
        # A sliding window counts places in the cache, so a row must have no gap there.
        self._shares = getattr(model.config.get_text_config(), "sliding_window", None) is None
        # The place of each row in the tensors and in the lists after it: a row that leaves is replaced by the last one.
        self._places: list[int] = []
        self._sampling: list[Sampling] = []
        self._rngs: list[random.Random] = []
        self._ids: list[list[int]] = []
        self._cache: Cache | None = None
        self._logits: torch.Tensor | None = None
        self._unread: torch.Tensor | None = None
        self._token_bytes = cache_token_bytes(model)
        self._most_bytes = most_cache_bytes

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return how many of these prompts, from the first on, can join the batch by the memory for their keys and
        values: all rows take as much as the longest. An empty batch has room for one."""
        from palaestra_tokens.engines.growing_cache import length_with_room

        longest = max(map(len, self._ids), default=0)
        for count, prompt in enumerate(prompts):
            longest = max(longest, len(prompt))
            rows = len(self._ids) + count + 1
            if rows > 1 and rows * length_with_room(longest) * self._token_bytes > self._most_bytes:
                return count
        return len(prompts)

    def admit(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> None:
        """Read the new prompts in one pass, each distinct prompt only once, and append their caches to the existing
        ones."""
        import torch

        from palaestra_tokens.engines.growing_cache import append_rows, close_gaps, take_rows

        # Rows whose last token is unread have no logits yet, and the new rows' logits are appended to theirs.
        self._advance()
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        fresh, read = self._beginning(list(places))
        rests = [prompt[read:] for prompt in places]
        attended = _attended(rests, self.model.device)
        attended = torch.cat([attended.new_ones((len(rests), read)), attended], dim=1)
        logits = self._forward(_padded(rests, self.model.device), fresh, attended)
        if read:
            close_gaps(fresh, attended)
        rows = [places[tuple(prompt)] for prompt in prompts]
        logits = logits[rows]
        if self._cache is None or self._logits is None:
            if len(places) < len(prompts):
                take_rows(fresh, rows)
            self._cache, self._logits = fresh, logits
        else:
            append_rows(self._cache, fresh, rows)
            self._logits = torch.cat([self._logits, logits])
        self._places += range(len(self._ids), len(self._ids) + len(prompts))
        self._ids += map(list, prompts)
        self._sampling += sampling
        self._rngs += [random.Random(each.seed) for each in sampling]

    def _beginning(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Cache, int]:
        """Return a cache with a row for each prompt, and the number of tokens that have been read into it: tokens at
        the beginning of all prompts. The last token of a prompt is never among them, because its logits are wanted."""
        from palaestra_tokens.engines.growing_cache import copied_row, new_cache, take_rows

        cache, read = new_cache(), 0
        if not self._shares:
            return cache, read
        # What the first and the last prompt in alphabetical order share, all share.
        least = min(prompts)
        common = least[: min(common_length(least, max(prompts)), min(map(len, prompts)) - 1)]
        most, place = max(((common_length(common, ids), place) for place, ids in enumerate(self._ids)), default=(0, 0))
        if self._cache is not None and most >= LEAST_SHARED:
            longest = max(map(len, self._ids))
            cache, read = copied_row(self._cache, place, longest - len(self._ids[place]), most), most
        if len(prompts) > 1 and len(common) - read >= LEAST_SHARED:
            rest = _padded([common[read:]], self.model.device)
            self._forward(rest, cache, rest.new_ones((1, len(common))))
            read = len(common)
        if read:
            take_rows(cache, [0] * len(prompts))
        return cache, read

    def step(self) -> list[tuple[int, float]]:
        """Sample one token for every row: (id, log-probability). Every row costs as much as the longest row."""
        import torch

        self._advance()
        assert self._logits is not None
        ids, logprobs = sample(self._logits, self._sampling, [rng.random() for rng in self._rngs])
        self._unread, self._logits = ids, None
        both = torch.stack([ids.double(), logprobs.double()]).tolist()  # one transfer from the device
        for row, token in zip(self._ids, both[0], strict=True):
            row.append(int(token))
        return [(int(both[0][place]), both[1][place]) for place in self._places]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows (ascending), and drop the padding that only the other rows needed."""
        places = [self._places[row] for row in rows]
        if not places or self._cache is None:
            self._places, self._sampling, self._rngs, self._ids = [], [], [], []
            self._cache, self._logits, self._unread = None, None, None
            return
        from palaestra_tokens.engines.growing_cache import drop_rows

        holes = sorted(set(range(len(places))) - set(places))
        moved = dict(zip([place for place in places if place >= len(places)], holes, strict=True))
        taken = {target: source for source, target in moved.items()}
        order = [taken.get(place, place) for place in range(len(places))]
        self._places = [moved.get(place, place) for place in places]
        before = max(map(len, self._ids))
        self._ids = [self._ids[place] for place in order]
        self._sampling = [self._sampling[place] for place in order]
        self._rngs = [self._rngs[place] for place in order]
        drop_rows(self._cache, moved, len(places), before - max(map(len, self._ids)))
        self._logits = None if self._logits is None else self._logits[order]
        self._unread = None if self._unread is None else self._unread[order]

    def load(self, folder: str) -> None:
        # On the CPU, so that the GPU never holds the model twice.
        fresh = load_model(folder, device="cpu", dtype=str(self.model.dtype).removeprefix("torch."))
        self.model.load_state_dict(fresh.state_dict())

    def _advance(self) -> None:
        """Feed the last sampled tokens to the model; this is postponed until more tokens are needed."""
        if self._unread is not None and self._cache is not None:
            ids, self._unread = self._unread, None
            self._logits = self._forward(ids[:, None], self._cache, _attended(self._ids, self.model.device))

    def _forward(self, ids_bt: torch.Tensor, cache: Cache, attended: torch.Tensor) -> torch.Tensor:
        """Return `logits[B, V]` after the last of `ids_bt[B, T]`, whose keys and values are added to the cache.
        `attended[B, N]` is 0 for padding, and includes these tokens."""
        import torch

        positions = attended.cumsum(dim=1) - 1
        try:
            with torch.inference_mode():
                out = self.model(
                    input_ids=ids_bt,
                    attention_mask=attended,
                    # Padding may have the position -1. It is masked, but a table of positions
                    # cannot look up a negative one.
                    position_ids=positions[:, -ids_bt.shape[1] :].clamp(min=0),
                    **{self._cache_argument: cache},
                    use_cache=True,
                    # The logits of all positions would be T times as large, and only the last ones are sampled from.
                    logits_to_keep=1,
                )
        except torch.OutOfMemoryError as error:
            full = EngineUnavailable(
                f"The transformers engine ran out of memory with {len(ids_bt)} requests of up to {attended.shape[1]} "
                "tokens: lower --openai.num_max_requests_at_once."
            )
            full.by_request = True
            raise full from error
        # In bfloat16, log-probabilities would have only two or three digits.
        return out.logits[:, -1].float()


def cache_token_bytes(model: PreTrainedModel) -> int:
    """Return the size of the keys and values of one token of one row."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head * model.dtype.itemsize)


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of the argument that takes a cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of ids that two sequences share at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the ids `[B, T]`, padded on the left."""
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)


def _attended(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return `[B, T]`, 1 for the ids of `_padded` and 0 for its padding."""
    import torch

    longest = max(map(len, rows))
    starts = torch.tensor([longest - len(row) for row in rows], device=device)
    return (torch.arange(longest, device=device) >= starts[:, None]).long()


def sample(
    logits: torch.Tensor, sampling: Sequence[Sampling], chances: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ids[B]` and `logprobs[B]` from `logits[B, V]` and the random numbers `chances[B]` in [0, 1).

    The log-probabilities are the model's own, at temperature 1 and before `top_k` and `top_p`; for requests with
    `processed_logprobs`, they are those of the distribution that was sampled.
    """
    import torch

    device = logits.device
    own = drawn_from = torch.log_softmax(logits, dim=-1)
    # A temperature of 0 would divide by zero; the rows that have it take the argmax below.
    temperatures = [each.temperature or 1.0 for each in sampling]
    if any(each != 1.0 for each in temperatures) or any(each.top_k or each.top_p < 1.0 for each in sampling):
        scaled = logits / torch.tensor(temperatures, device=device)[:, None]
        drawn_from = torch.log_softmax(_nucleus(scaled, sampling), dim=-1)
    # Double precision, because a sum over a large vocabulary in float32 visibly differs from 1. The random number is
    # scaled by the actual sum, so that it never lies beyond the last token.
    heaped = drawn_from.exp().cumsum(dim=-1, dtype=torch.float64)
    wanted = torch.tensor(chances, device=device, dtype=torch.float64) * heaped[:, -1]
    # `right=True` skips tokens of probability 0, which share their sum with the token
    # before: a chance of exactly 0 must not choose one.
    ids = torch.searchsorted(heaped, wanted[:, None], right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([each.temperature == 0 for each in sampling], device=device)
    ids = torch.where(greedy, logits.argmax(dim=-1), ids)
    processed = torch.tensor([each.processed_logprobs for each in sampling], device=device)
    both = [logprobs.gather(1, ids[:, None]).squeeze(1) for logprobs in (own, drawn_from)]
    # The greedy choice has probability 1 in the distribution that was sampled.
    return ids, torch.where(processed, both[1].masked_fill(greedy, 0.0), both[0])


def _nucleus(scaled: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Return `scaled[B, V]` with the tokens outside `top_k` and `top_p` at minus infinity."""
    import torch

    if all(each.top_k == 0 and each.top_p >= 1.0 for each in sampling):
        return scaled
    ordered, places = scaled.sort(dim=-1, descending=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
    most = torch.tensor([each.top_k or scaled.shape[1] for each in sampling], device=scaled.device)
    share = torch.tensor([each.top_p for each in sampling], device=scaled.device)
    probabilities = ordered.softmax(dim=-1)
    # The token with which the sum reaches `top_p` belongs to the nucleus, so the sum before each token counts.
    before = probabilities.cumsum(dim=-1) - probabilities
    out = (ranks >= most[:, None]) | ((before >= share[:, None]) & (ranks > 0))
    return torch.full_like(scaled, float("-inf")).scatter(1, places, ordered.masked_fill(out, float("-inf")))


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress the progress bars of `transformers`, which would write over Palaestra's output, and its warning of a
    name that `peft` still uses."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
