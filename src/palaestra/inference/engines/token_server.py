"""What the engines over HTTP that continue token ids have in common: the connection, the tokenizer, the chat on top.

Not for any one server's wire: `sglang` and `vllm` are. Invariant: a run does not start with a tokenizer that is not the
server's own, as far as the server can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from yarl import URL

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import ConfigError, EngineReplyError, EngineUnavailable
from palaestra.core.types import JSON, Message
from palaestra.inference.base import ChatCompletion, Sampled, SessionContext, TokenEngine
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engines.openai import parse_base_url
from palaestra.inference.managed import HistoryMode, ManagedChat
from palaestra.inference.refusals import refused, shown
from palaestra.inference.retry import AT_START, RetryPolicy
from palaestra.inference.said import Parser
from palaestra.inference.templates import ChatFormat
from palaestra.inference.tokens import Tokenizer, load_tokenizer
from palaestra.inference.transport import Transport
from palaestra.inference.wire import encode_json

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 10.0
PROBE = 'Tokens: ½ naïve 東京 <|x|>\n\t{"a": 1}'
"""Text on which two tokenizers would hardly agree by accident."""


class TokenServer:
    """One model server that continues token ids. Subclasses speak its wire in `generate`.

    `tokenizer` None loads the one that the config names, when it is first needed.
    """

    def __init__(
        self,
        config: APIServerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.base_url = parse_base_url(config.base_url)
        self.root_url = self.base_url.parent if self.base_url.name == "v1" else self.base_url
        self.transport = Transport(
            model=config.model_name,
            headers={"Authorization": f"Bearer {config.api_key}"} if config.api_key else None,
            lanes={"train": config.num_max_requests_at_once, "eval": config.num_requests_for_eval},
            timeout_s=config.timeout,
            retry=retry,
            clock=clock,
            rng=rng,
            remembered=config.rolling_buffer_length,
        )
        self._clock = clock or SystemClock()
        self._tokenizer = tokenizer
        self._formats: list[ChatFormat] = []

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.model_name

    async def start(self) -> None:
        """Load the tokenizer, look whether the server answers, and whether it writes text in the same tokens.

        Raises `ConfigError` for a tokenizer that cannot be had or is another one, `EngineUnavailable` within seconds
        when nothing answers, `EngineRefused` when the key is refused.
        """
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._tokenizer_name())
        self._chat_format(None)
        if not self.config.health_check:
            return
        url = self.base_url / "models"
        response = await self.transport.request("GET", url, retry=AT_START, timeout_s=LOOK_TIMEOUT_S)
        if response.status in (401, 403):
            raise refused(url, response.status, response.body, self.name)
        await self._compare_tokenizers()

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self.transport.aclose()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`; see `TokenEngine`."""
        raise NotImplementedError

    def session(self, context: SessionContext) -> ManagedChat:
        """Token-exact chat for one rollout, with the config's parser and history mode."""
        return self.managed_server(name=context.rollout_id)

    def managed_server(
        self,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: Parser | str | None = None,
        tool_parser: Parser | str | None = None,
        *,
        history: HistoryMode | None = None,
        name: str = "",
        engine: TokenEngine | None = None,
    ) -> ManagedChat:
        """Token-exact chat for one rollout. What is not given is the config's; `engine` samples, if not this one.

        Raises `ConfigError`.
        """
        return ManagedChat(
            engine or self,
            self._chat_format(tokenizer),
            tool_call_parser or tool_parser or self.config.tool_parser,
            history=history or self.config.history,
            name=name,
            clock=self._clock,
        )

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """One reply outside any rollout; its tokens are not kept."""
        return await self.managed_server().chat_completion(messages=messages, **request)

    def _tokenizer_name(self) -> str:
        named = self.config.tokenizer_name
        return self.config.model_name if named in ("", "none") else named

    def _chat_format(self, tokenizer: Tokenizer | None) -> ChatFormat:
        """The format of a tokenizer, made once: a caller gives the same one for every rollout."""
        if tokenizer is None:
            tokenizer = self._tokenizer = self._tokenizer or load_tokenizer(self._tokenizer_name())
        for known in self._formats:
            if known.tokenizer is tokenizer:
                return known
        self._formats.append(ChatFormat(tokenizer, _template_text(self.config.chat_template)))
        return self._formats[-1]

    async def _compare_tokenizers(self) -> None:
        """Ask the server for the tokens of a text. Servers that cannot be asked are believed."""
        assert self._tokenizer is not None
        body = encode_json({"model": self.name, "prompt": PROBE, "add_special_tokens": False})
        try:
            response = await self.transport.request(
                "POST", self.root_url / "tokenize", body, retry=AT_START, timeout_s=LOOK_TIMEOUT_S
            )
            theirs = msgspec.json.decode(response.body, type=_Tokenized).tokens if response.status == 200 else None
        except (EngineUnavailable, msgspec.DecodeError):
            theirs = None
        ours = list(self._tokenizer.encode(PROBE, add_special_tokens=False))
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"The server at {shown(self.root_url)} writes text in other tokens than tokenizer "
                f"'{self._tokenizer_name()}' ({theirs[:6]}…, not {ours[:6]}…). Set --openai.tokenizer_name to the "
                f"tokenizer of model '{self.name}'."
            )

    def _decoded(self, raw: bytes, shape: type[T], url: URL, prompt_tokens: int) -> T:
        """A reply of the given shape. Raises `EngineReplyError`."""
        try:
            return msgspec.json.decode(raw, type=shape)
        except (msgspec.DecodeError, RecursionError) as error:
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


def _template_text(named: str | None) -> str | None:
    """The template in a file. Raises `ConfigError`."""
    if named is None:
        return None
    try:
        return Path(named).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template '{named}' cannot be read: {error}.") from None
