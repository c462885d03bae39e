"""A token engine without a model. It returns given texts as tokens.

A real sampler sometimes emits tokens that spell the right text but are not those that the tokenizer would choose.
`rate` is the probability that this engine replaces a token with such tokens. Invariant: the texts, the seed and the
requests determine the answers. The log-probability of a token depends only on its id and its position (`toy_logprob`),
so that a test can predict a ledger.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import Sampled
from palaestra_tokens.tokenizers import FastTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name }}'
    "{{ '\", \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A plain chat template with tools, thinking, calls and results. Continuing a conversation only appends text."""

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def train_bpe(texts: Iterable[str], size: int, special: Sequence[str], plain: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `size` ids. In addition, each of the `special` marks (never text)
    and of the `plain` marks (text) is a single token.

    Raises `ConfigError` if the extra `tokens` is missing.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(
            f"Training a tokenizer needs the extra 'tokenizers': {install_command('tokenizers', 'palaestra-tokens')}"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer


def toy_tokenizer(
    texts: Iterable[str] = (),
    special: Sequence[str] = CHATML_TOKENS,
    *,
    end: str = "<|im_end|>",
    size: int = 600,
    chat_template: str | None = CHATML,
    plain: Sequence[str] = (),
) -> FastTokenizer:
    """Return a small tokenizer, made by `train_bpe`, that can encode any text. `end` is the end-of-turn token."""
    tokenizer = train_bpe(texts, size, special, plain)
    return FastTokenizer(tokenizer, chat_template=chat_template, special={"eos_token": end}, source="toy")


class Misspeller:
    """Encodes text, but with probability `rate` replaces a token of several bytes with tokens that spell the same
    text."""

    def __init__(self, tokenizer: FastTokenizer, rate: float, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rate = rate
        self._rng = rng

    def encode(self, text: str) -> list[int]:
        """Return token ids that decode to `text`."""
        ids: list[int] = []
        for number in self._tokenizer.encode(text):
            ids += self._split(number) if self._rng.random() < self._rate else [number]
        return ids

    def _split(self, number: int) -> list[int]:
        token = self._tokenizer.id_to_token(number)
        if token is None or len(token) < 2 or number in self._tokenizer.added_ids:
            return [number]
        cut = self._rng.randrange(1, len(token))
        parts = [self._tokenizer.token_to_id(part) for part in (token[:cut], token[cut:])]
        if None in parts:
            parts = [self._tokenizer.token_to_id(letter) for letter in token]
        return [part for part in parts if part is not None]


class ToyEngine:
    """A token engine that returns `replies` in turn.

    `end` is the end-of-turn token after a reply; if `end` is None, the tokenizer's end-of-turn token is used. If `ends`
    is true, the ids of a reply that stopped include this token. With probability `abort_rate`, a request is aborted at
    a random token and the policy version increases; the request that continues the aborted one gets the rest of the
    reply. `requests` and `sampled` count requests and tokens.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        replies: Iterator[str],
        *,
        rate: float = 0.0,
        end: Callable[[str], int] | None = None,
        ends: bool = True,
        abort_rate: float = 0.0,
        seed: int = 0,
        name: str = "toy",
    ) -> None:
        self.name = name
        self.requests = self.sampled = 0
        self._replies = replies
        self._rng = random.Random(seed)
        self._misspeller = Misspeller(tokenizer, rate, self._rng)
        self._end = end or (lambda reply: tokenizer.stop_ids[0])
        self._ends = ends
        self._abort_rate = abort_rate
        self._version = 0
        self._broken_off: dict[bytes, list[int]] = {}

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Return the next reply, or the rest of the reply that was aborted at exactly these ids."""
        self.requests += 1
        prompt = array("i", input_ids)
        rest = self._broken_off.pop(prompt.tobytes(), None)
        if rest is None:
            reply = next(self._replies)
            rest = [*self._misspeller.encode(reply), self._end(reply)]
        version, most = str(self._version), sampling.get("max_tokens") or len(rest)
        if self._rng.random() < self._abort_rate:
            given, finish = rest[: min(most, self._rng.randrange(len(rest)))], "abort"
            self._version += 1
            self._broken_off[(prompt + array("i", given)).tobytes()] = rest[len(given) :]
        elif most < len(rest):
            given, finish = rest[:most], "length"
        else:
            given, finish = rest if self._ends else rest[:-1], "stop"
        self.sampled += len(given)
        logprobs = [toy_logprob(number, len(prompt) + at) for at, number in enumerate(given)]
        return Sampled(ids=given, logprobs=logprobs, finish_reason=finish, policy_version=version)


def toy_logprob(number: int, place: int) -> float:
    """Return the log-probability of token `number` at position `place` of the whole sequence: an invented value that 32
    bits represent exactly."""
    made_up = -((number * 7919 + place * 104729) % 1021) / 128.0
    exact: float = struct.unpack("<f", struct.pack("<f", made_up))[0]
    return exact
