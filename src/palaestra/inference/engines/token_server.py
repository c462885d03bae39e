"""What the engines over HTTP that continue token ids have in common: the connection and the look at the start.

Not for any one server's wire: `sglang` and `vllm` are. Invariant: a run does not start with a tokenizer that is not the
server's own, as far as the server can be asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from yarl import URL

from palaestra.core.clock import Clock
from palaestra.core.errors import ConfigError, EngineReplyError, EngineUnavailable
from palaestra.core.retry import RetryPolicy
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engines.openai import parse_base_url
from palaestra.inference.engines.token_chat import TokenChat
from palaestra.inference.ledger.prompts import ids_json
from palaestra.inference.refusals import shown
from palaestra.inference.tokens import Tokenizer
from palaestra.inference.transport import Response, Transport
from palaestra.inference.wire import NOT_JSON, encode_json

T = TypeVar("T")

PROBE = 'Tokens: ½ naïve 東京 <|x|>\n\t{"a": 1}'
"""Text on which two tokenizers would hardly agree by accident."""


class TokenServer(TokenChat):
    """One model server that continues token ids. Subclasses speak its wire in `generate`."""

    def __init__(
        self,
        config: APIServerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(config, tokenizer=tokenizer, clock=clock)
        self.base_url = parse_base_url(config.base_url)
        self.root_url = self.base_url.parent if self.base_url.name == "v1" else self.base_url
        self.transport = Transport.to(config, clock=clock, retry=retry, rng=rng)

    async def start(self) -> None:
        """Load the tokenizer, look whether the server answers, and whether it writes text in the same tokens.

        Raises `ConfigError` for a tokenizer that cannot be had or is another one, `EngineUnavailable` within seconds
        when nothing answers, `EngineRefused` when the key is refused.
        """
        await super().start()
        if not self.config.health_check:
            return
        await self.transport.list_models(self.base_url / "models")
        await self._compare_tokenizers()

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self.transport.aclose()

    async def _compare_tokenizers(self) -> None:
        """Ask the server for the tokens of a text. Servers that cannot be asked are believed."""
        theirs = await self.tokens_of(PROBE)
        ours = list(self.tokenizer.encode(PROBE, add_special_tokens=False))
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"The server at {shown(self.root_url)} writes text in other tokens than tokenizer "
                f"'{self.tokenizer_name}' ({theirs[:6]}…, not {ours[:6]}…). Set --openai.tokenizer_name to the "
                f"tokenizer of model '{self.name}'."
            )

    async def tokens_of(self, text: str) -> list[int] | None:
        """The text in the server's own tokens; None where the server cannot be asked."""
        body = encode_json({"model": self.name, "prompt": text, "add_special_tokens": False})
        try:
            response = await self.transport.look("POST", self.root_url / "tokenize", lambda: body)
            return msgspec.json.decode(response.body, type=_Tokenized).tokens if response.status == 200 else None
        except (EngineUnavailable, *NOT_JSON):
            return None

    async def _continued(self, url: URL, name: str, ids: Sequence[int], rest: bytes, lane: str) -> Response:
        """The answer to the JSON object `rest` with the ids under `name`, which are by far the most of it."""
        return await self.transport.request(
            "POST", url, lambda: b"".join((b'{"', name.encode(), b'":', ids_json(ids), b",", rest[1:])), lane=lane
        )

    def _decoded(self, raw: bytes, shape: type[T], url: URL, prompt_tokens: int) -> T:
        """A reply of the given shape. Raises `EngineReplyError`."""
        try:
            return msgspec.json.decode(raw, type=shape)
        except NOT_JSON as error:
            raise self._wrong(
                url, prompt_tokens, f"{error}; it begins {raw[:200].decode(errors='replace')!r}"
            ) from None

    def _wrong(self, url: URL, prompt_tokens: int, what: str) -> EngineReplyError:
        """The error for a reply that is not what the protocol promises; it names the engine and the request."""
        return EngineReplyError(
            f"The model server at {shown(url)} (model '{self.name}') answered a prompt of {prompt_tokens} tokens with "
            f"what is not a token-exact reply: {what}."
        )


class _Tokenized(msgspec.Struct):
    tokens: list[int]
