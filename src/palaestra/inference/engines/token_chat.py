"""What all engines that continue token ids have in common: the tokenizer, the chat format, token-exact chat on top.

Not for sampling. Invariant: a tokenizer, template or parser that cannot work is found when the engine starts, before
anything is rolled out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.config import local_path
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.base import (
    ChatCompletion,
    CompletionUsage,
    Sampled,
    SessionContext,
    TextChoice,
    TextCompletion,
    TokenEngine,
)
from palaestra.inference.config import APIServerConfig
from palaestra.inference.ledger import Ledger
from palaestra.inference.managed import HistoryMode, ManagedChat
from palaestra.inference.resuming import sample
from palaestra.inference.said import Parser
from palaestra.inference.templates import ChatFormat
from palaestra.inference.tokens import Tokenizer, load_tokenizer


class TokenChat:
    """The chat side of one token engine; subclasses sample in `generate`.

    `tokenizer` None loads the one that the config names, when it is first needed.
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
        """Load the tokenizer and its template, look for the parser. Raises `ConfigError`."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self.tokenizer_name)
        self.managed_server()

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
        """The tokenizer, loaded when it is first asked for. Raises `ConfigError`."""
        tokenizer = self._tokenizer = self._tokenizer or load_tokenizer(self.tokenizer_name)
        return tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The folder or name that the tokenizer is loaded from: the model's own unless the config names another."""
        named = self.config.tokenizer_name
        return self.config.model_name if named in ("", "none") else named

    def _chat_format(self, tokenizer: Tokenizer | None) -> ChatFormat:
        """The format of a tokenizer, made once: a caller gives the same one for every rollout."""
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
