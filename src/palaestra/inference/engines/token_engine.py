"""The base of all engines that continue token ids, and of those that do so over HTTP.

`TokenChat` has the tokenizer, the chat format and token-exact chat; `TokenServer` the connection and the checks at the
start. Invariants: an unusable tokenizer, template or parser is an error at the start, before anything is rolled out; so
is a tokenizer that differs from the server's, if the server can be asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from yarl import URL

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.config import local_path
from palaestra.core.errors import ConfigError, EngineReplyError, EngineUnavailable
from palaestra.core.retry import RetryPolicy
from palaestra.core.types import JSON, Message
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engine import (
    ChatCompletion,
    CompletionUsage,
    Sampled,
    SessionContext,
    TextChoice,
    TextCompletion,
    TokenEngine,
)
from palaestra.inference.engines.openai import parse_base_url
from palaestra.inference.http.transport import NOT_JSON, Response, Transport, encode_json, shown
from palaestra.inference.ledger import Ledger, ids_json
from palaestra.inference.parsers import ToolCallParser
from palaestra.inference.templates import ChatFormat
from palaestra.inference.token_exact.managed_chat import HistoryMode, ManagedChat
from palaestra.inference.token_exact.replies import sample
from palaestra.inference.tokenizers import Tokenizer, load_tokenizer


class TokenChat:
    """The chat side of one token engine; subclasses sample in `generate`.

    `tokenizer` None loads the configured one on first use.
    """

    def __init__(
        self, config: APIServerConfig, *, tokenizer: Tokenizer | None = None, clock: Clock | None = None
    ) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._tokenizer = tokenizer
        self._formats: list[ChatFormat] = []

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.model_name

    async def start(self) -> None:
        """Load the tokenizer, its template and the parser. Raises `ConfigError`."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self.tokenizer_name)
        self.managed_server()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`; see `TokenEngine`."""
        raise NotImplementedError

    def session(self, context: SessionContext) -> ManagedChat:
        """Token-exact chat for one rollout, with the configured parser and history mode."""
        return self.managed_server(name=context.rollout_id)

    def managed_server(
        self,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: ToolCallParser | str | None = None,
        tool_parser: ToolCallParser | str | None = None,
        *,
        history: HistoryMode | None = None,
        name: str = "",
        engine: TokenEngine | None = None,
    ) -> ManagedChat:
        """Token-exact chat for one rollout. Arguments override the config; `engine` samples instead of this one.

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

    async def completion(
        self, *, prompt: str, n: int = 1, extra_body: Mapping[str, JSON] | None = None, **sampling: JSON
    ) -> TextCompletion:
        """`n` continuations of a text; their tokens are not kept. Raises `EngineError`."""
        ids = self.tokenizer.encode(prompt)
        settings = {**sampling, **(extra_body or {})}

        async def one(index: int) -> tuple[TextChoice, int]:
            pieces = await sample(self, Ledger().prompt(None, ids), settings, None, self._clock)
            said = [number for piece in pieces for number in piece.sampled.ids]
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            return TextChoice(index=index, text=text, finish_reason=pieces[-1].sampled.finish_reason), len(said)

        done = await asyncio.gather(*map(one, range(n)))
        sampled = sum(count for _, count in done)
        return TextCompletion(
            model=self.name,
            choices=[choice for choice, _ in done],
            usage=CompletionUsage(prompt_tokens=len(ids), completion_tokens=sampled, total_tokens=len(ids) + sampled),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use. Raises `ConfigError`."""
        tokenizer = self._tokenizer = self._tokenizer or load_tokenizer(self.tokenizer_name)
        return tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The folder or name of the tokenizer: the model's own unless the config names another."""
        named = self.config.tokenizer_name
        return self.config.model_name if named in ("", "none") else named

    def _chat_format(self, tokenizer: Tokenizer | None) -> ChatFormat:
        """The format of a tokenizer, made once: callers pass the same one for every rollout."""
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        for known in self._formats:
            if known.tokenizer is tokenizer:
                return known
        self._formats.append(ChatFormat(tokenizer, template_text(self.config.chat_template)))
        return self._formats[-1]


def template_text(named: str | None) -> str | None:
    """The template in a file. Raises `ConfigError`."""
    if named is None:
        return None
    try:
        return local_path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template '{named}' cannot be read: {error}.") from None


T = TypeVar("T")

PROBE = 'Tokens: ½ naïve 東京 <|x|>\n\t{"a": 1}'
"""Text that two tokenizers hardly encode alike by accident."""


class TokenServer(TokenChat):
    """One model server that continues token ids. Subclasses implement its wire in `generate`."""

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
        """Load the tokenizer, check the server, and compare its tokenizer with ours.

        Raises `ConfigError` for a missing or differing tokenizer, `EngineUnavailable` within seconds if nothing
        answers, `EngineRefused` if the key is refused.
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
        """Compare the tokens of a text. Servers that cannot be asked are trusted."""
        theirs = await self.tokens_of(PROBE)
        ours = list(self.tokenizer.encode(PROBE, add_special_tokens=False))
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"The server at {shown(self.root_url)} writes text in other tokens than tokenizer "
                f"'{self.tokenizer_name}' ({theirs[:6]}…, not {ours[:6]}…). Set --openai.tokenizer_name to the "
                f"tokenizer of model '{self.name}'."
            )

    async def tokens_of(self, text: str) -> list[int] | None:
        """The text in the server's tokens; None if the server cannot be asked."""
        body = encode_json({"model": self.name, "prompt": text, "add_special_tokens": False})
        try:
            response = await self.transport.look("POST", self.root_url / "tokenize", lambda: body)
            return msgspec.json.decode(response.body, type=_Tokenized).tokens if response.status == 200 else None
        except (EngineUnavailable, *NOT_JSON):
            return None

    async def _continued(self, url: URL, name: str, ids: Sequence[int], rest: bytes, lane: str) -> Response:
        """The answer to the JSON object `rest` with the ids under `name`, which are most of its bytes."""
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
        """The error for a reply that violates the protocol; it names the engine and the request."""
        return EngineReplyError(
            f"The model server at {shown(url)} (model '{self.name}') answered a prompt of {prompt_tokens} tokens with "
            f"what is not a token-exact reply: {what}."
        )


class _Tokenized(msgspec.Struct):
    tokens: list[int]
