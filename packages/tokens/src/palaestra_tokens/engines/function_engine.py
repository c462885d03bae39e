"""`FunctionEngine` samples tokens with a function, such as the sampler of a trainer whose loop calls this package."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from palaestra_slots.core.errors import EngineRefused
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.engines.token_engine import TokenChat

SampleFunction: TypeAlias = Callable[[list[int], int | None, Collection[int]], Awaitable[Sampled]]
"""`await sample(prompt[T], most_tokens, stop_ids)` continues a prompt; the sampled ids include the stop token that
ended the reply. Raises `EngineError`."""


class FunctionEngine(TokenChat):
    """Samples with a function. `model` names the model and its tokenizer (a folder, or OWNER/NAME on the hub).
    `settings` are `APIServerConfig` settings, which may name a different model or tokenizer; `history` is `append`
    unless they set it. The function sets the temperature and similar settings itself."""

    def __init__(self, sample: SampleFunction, *, model: str, **settings: JSON) -> None:
        super().__init__(APIServerConfig(**{"model_name": model, "history": "append", **settings}))
        self._sample = sample

    async def load_weights(self, folder: str, version: str) -> None:
        """Raise `EngineRefused`: the function owns its weights."""
        raise EngineRefused(f"Model '{self.name}' is sampled by a function, which cannot load weights from {folder}.")

    async def aclose(self) -> None:
        """Do nothing: the function's owner closes its resources."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        wanted = Sampling.read(sampling, getattr(self.tokenizer, "stop_ids", ()))
        return await self._sample(list(input_ids), wanted.max_tokens, sorted(wanted.stop_ids))
