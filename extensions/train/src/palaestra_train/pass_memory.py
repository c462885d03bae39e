"""Limits the memory of one forward and backward pass: the rows of a step are trained in as many passes as needed.

A pass keeps, for each token of its padded rows, numbers for every layer and numbers for the vocabulary. Both trainers
estimate its memory by the same formula: rows x length x (LOGITS x vocabulary + ACTIVATIONS x hidden size x layers)
float32 numbers. Weights, gradients and the optimizer's state are not part of a pass. The layers of a row that is too
long for a pass are computed again in the backward pass (gradient checkpointing): then only their inputs are kept.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.admission import available_memory

if TYPE_CHECKING:
    import torch

LOGITS, ACTIVATIONS = 4, 18
"""Numbers that a pass keeps per token and entry of the vocabulary, and per token, unit of the hidden size and layer."""

GIB = 1 << 30
MOST_BYTES_ON_CPU = GIB // 8
"""More rows in a pass are not faster on a CPU, whose caches are small. Measured, forward and backward, in CPU seconds:
64 rows of 400 tokens with a vocabulary of 480 take 6.4 s in 1 pass, 5.3 s in 4, 5.2 s in 13 and 6.8 s in 64; 4 rows
with a vocabulary of 32,000 take 1.5 s in 1 pass and 1.2 s in 4."""

SHARING_BYTES_ON_CPU = 2 * GIB
"""Rows with a common beginning are faster together, because it is computed once."""

LEAST_CACHE_BYTES = GIB
"""The keys and values of a batch that is sampled may take this much on every machine."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The memory of one token in a pass, and the most bytes of a pass. `free_bytes` is what the device has left for
    passes when the model is loaded. `sharing_bytes` are the most bytes of a pass whose rows share their beginning, and
    `least_token_bytes` are those of a token if layers are computed again."""

    token_bytes: float
    most_bytes: float
    free_bytes: float
    sharing_bytes: float = 0.0
    least_token_bytes: float = 0.0
    shared_token_bytes: float = 0.0
    """The memory of a token of a common beginning, which has no logits."""
    repeated_token_bytes: float = 0.0
    """What each row adds for such a token: its keys and values, and their gradient."""
    most_sharing_bytes: float = 0.0
    """The most bytes of a pass if a beginning is so long that two rows would not fit into `sharing_bytes`."""

    @classmethod
    def of(cls, module: Any, most_gib: float | None = None) -> PassMemory:
        """Return the limit for a model that is loaded: `most_gib`, by default 1/8 GiB on a CPU (2 GiB for rows that
        share their beginning, half of the free memory if it is long) and half of the free memory of a GPU."""
        config = module.config.get_text_config()
        layers, hidden, logits = config.num_hidden_layers, config.hidden_size, LOGITS * config.vocab_size
        # Gradients and the two moments of AdamW come with the first step.
        free = _free(module.device) - 12 * sum(each.numel() for each in module.parameters() if each.requires_grad)
        most, sharing = (MOST_BYTES_ON_CPU, SHARING_BYTES_ON_CPU) if module.device.type == "cpu" else (free / 2,) * 2
        if most_gib is not None:
            most = sharing = most_gib * GIB
        kept, least = ACTIVATIONS * hidden * layers, (ACTIVATIONS + layers) * hidden
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        repeated = 4 * hidden * layers * heads / config.num_attention_heads
        return cls(
            token_bytes=4.0 * (logits + kept),
            most_bytes=most,
            free_bytes=free,
            sharing_bytes=sharing,
            least_token_bytes=4.0 * (logits + least),
            shared_token_bytes=4.0 * kept,
            repeated_token_bytes=4.0 * repeated,
            most_sharing_bytes=sharing if most_gib is not None else max(sharing, free / 2),
        )

    def rows_beside(self, shared: int, length: int) -> int:
        """Return how many rows fit into one pass, each of `length` tokens after a common beginning of `shared`."""
        beginning = self.shared_token_bytes * shared
        row = self.token_bytes * max(1, length) + self.repeated_token_bytes * shared
        rows = int((self.sharing_bytes - beginning) / row)
        # A long beginning that is computed for each row takes many times as long.
        return rows if rows > 1 else max(0, int((self.most_sharing_bytes - beginning) / row))

    def must_recompute(self, length: int) -> bool:
        """Return whether the layers of a row are computed again, because its pass is larger than any pass should be."""
        return self.token_bytes * length > max(self.most_bytes, self.sharing_bytes)

    def rows(self, length: int) -> int:
        """Return how many rows of this length fit into one pass, at least one."""
        return max(1, int(self.most_bytes / (self.token_bytes * max(1, length))))

    def passes(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of the rows of each pass. Longer rows come first, to limit padding. Raises `ConfigError` if
        the device cannot train the longest row, before it is out of memory."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        least = self.least_token_bytes or self.token_bytes
        if order and (needed := least * lengths[order[0]]) > self.free_bytes:
            raise ConfigError(
                f"a row of {lengths[order[0]]} tokens needs about {needed / GIB:.1f} GiB to be trained, but "
                f"{max(0.0, self.free_bytes / GIB):.1f} GiB are left beside the weights, their gradients and the "
                "optimizer: train an adapter (--trainer tinker), lower max_token_length, or use a smaller model"
            )
        start = 0
        while start < len(order):
            count = self.rows(lengths[order[start]])
            yield order[start : start + count]
            start += count


@contextmanager
def recomputed(module: Any, *, on: bool) -> Iterator[None]:
    """Compute the layers of a model again in backward passes within the block, if `on` is true."""
    if not on:
        yield
        return
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    before = [each.training for each in layers]
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = layer.training = True  # of the layer alone, so that nothing is dropped out
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training


def release(device: torch.device) -> None:
    """Return freed memory to the operating system. The C library keeps what threads have freed, for each of them, and
    a server that samples and trains in turns would need the memory of both."""
    if device.type == "cpu":
        with suppress(AttributeError, OSError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def most_cache_bytes(device: torch.device) -> float:
    """Return the limit for the keys and values of a batch that is sampled: a tenth of the memory that is free now, or
    half of that of a GPU."""
    return max(LEAST_CACHE_BYTES, _free(device) / (2 if device.type == "cuda" else 10))


def peak_gib(device: torch.device) -> float:
    """Return the most memory that this process has used so far, in GiB: of the GPU, or of the machine."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(device)[0])
    return float(available_memory())
