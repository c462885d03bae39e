"""A `transformers` model in this process, on CPU or GPU: token ids in, ids with the model's own log-probabilities out.

It is meant for development, small models and training on one machine; a server is faster for a large model. The event
loop never blocks: the model lives in the thread of `batcher`. Log-probabilities are the model's own (T4), at
temperature 1 and before `top_k` and `top_p`, so one forward pass over a ledger's row reproduces them. Set
`logprobs_mode: processed_logprobs` in `extra_body` to get the log-probabilities of the sampled distribution.

Needs the extra `train` (torch, transformers). `model_name` is a folder or the name of a model on the hub, which is
fetched.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ContextExceeded, EngineRefused
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.batcher import Batcher
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from palaestra_tokens.engines.torch_decoder import TorchDecoder

MOST_ROWS = 64
"""The maximum number of requests in one batch, even if the config allows more in flight. With more rows, steps would
only take longer."""

DEFAULT_WINDOW_TOKENS = 4096
"""The context window, in tokens, of a model whose config does not specify one."""


class TransformersEngine(TokenChat):
    """The engine of one model. `make` builds the model inside the engine's thread; if it is None, the engine loads the
    config's `model_name`. `seed` makes the random choices of requests without a `seed` reproducible."""

    def __init__(
        self,
        config: APIServerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        make: Callable[[], PreTrainedModel] | None = None,
        device: str | None = None,
        dtype: str = "auto",
        seed: int | None = None,
    ) -> None:
        super().__init__(config, tokenizer=tokenizer)
        self._make = make
        self._device = device
        self._dtype = dtype
        self._seeds = random.Random(seed)
        self._model: PreTrainedModel | None = None
        self.batcher = Batcher(
            self._decoder, name="transformers-engine", most_rows=min(MOST_ROWS, config.num_max_requests_at_once)
        )

    async def start(self) -> None:
        """Load the tokenizer, and load the model in the engine's thread. Raises `ConfigError` if either fails."""
        await super().start()
        await asyncio.wrap_future(self.batcher.start())
        config = self.model.config.get_text_config()
        self.window_tokens = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_WINDOW_TOKENS)

    async def aclose(self) -> None:
        """End the thread; requests in progress fail. Idempotent."""
        await asyncio.shield(asyncio.to_thread(self.batcher.close))

    @property
    def model(self) -> PreTrainedModel:
        """The model. The engine's thread may be using it, so only read it, and change weights with `load_weights`."""
        assert self._model is not None, "the engine was not started"
        return self._model

    @property
    def policy_version(self) -> str:
        """The version of the weights, which is recorded with the tokens. If you change the weights of your own model
        (`make`) in place, do so while no request is in progress, and then set this property."""
        return self.batcher.version

    @policy_version.setter
    def policy_version(self, version: str) -> None:
        self.batcher.version = version

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`. The token that ended the reply is among the ids. Raises `EngineRefused` for an
        unsupported setting or an invalid prompt, and `ContextExceeded` if the prompt fills the window. Cancelling
        removes the request from the batch."""
        wanted = Sampling.read(sampling, self._stop_ids())
        if wanted.seed is None:
            wanted = wanted.seeded(self._seeds.getrandbits(64))
        config, window = self.model.config.get_text_config(), self.window_tokens
        assert window is not None, "the engine was not started"
        room = window - len(input_ids)
        if room < 1:
            error = ContextExceeded(
                f"Model '{self.name}' has a window of {window} tokens; the prompt has {len(input_ids)}."
            )
            error.window_tokens = window
            raise error
        known = all(isinstance(number, int) and 0 <= number < config.vocab_size for number in input_ids)
        if not input_ids or not known:  # one invalid row would fail the whole batch
            raise EngineRefused(
                f"The ids of model '{self.name}' are 0 to {config.vocab_size - 1}; the prompt is empty or has others. "
                "Is --openai.tokenizer_name the tokenizer of this model?"
            )
        # A copy, because the thread reads the prompt later and looks for equal ones.
        answer = self.batcher.submit(tuple(input_ids), wanted, min(room, wanted.max_tokens or room))
        return await asyncio.wrap_future(answer)

    async def load_weights(self, folder: str, version: str) -> None:
        """Load the weights in `folder` as policy `version`. Requests in the batch end with `abort` and their tokens so
        far; token-exact chat then resumes them with the new weights."""
        await asyncio.wrap_future(self.batcher.load(folder, version))

    async def copy_weights(self, source: PreTrainedModel, version: str) -> None:
        """Copy the weights of a model of the same kind as policy `version`, as `load_weights` does."""
        import torch

        def load(_: TorchDecoder) -> None:
            with torch.no_grad():
                for own, new in zip(self.model.parameters(), source.parameters(), strict=True):
                    own.copy_(new)

        await asyncio.wrap_future(self.batcher.change(load, version))

    def _decoder(self) -> TorchDecoder:
        from palaestra_tokens.engines.torch_decoder import TorchDecoder, load_model

        make = self._make or (lambda: load_model(self.config.model_name, self._device, self._dtype))
        self._model = make()
        return TorchDecoder(self._model)

    def _stop_ids(self) -> tuple[int, ...]:
        found = self.model.generation_config.eos_token_id if self.model.generation_config else None
        return (found,) if isinstance(found, int) else tuple(found or ())
