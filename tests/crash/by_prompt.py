"""A model server whose answers follow from the prompt alone, so that a run that is taken up again can be compared.

It says a fixed list of replies, the one whose turn it is by the prompt, in tokens that often are not the canonical
ones; some requests are aborted somewhere, and go on with another policy version. It takes a while, so that requests
that are made together end in any order. Every call adds a byte to a file, the requests that go on with an aborted one
do not. Tokens and chat are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import Sampled
from palaestra_tokens.serving.model_server import ModelServer
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import Misspeller, toy_logprob
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat
from palaestra_tokens.tokenizers import FastTokenizer, load_tokenizer

TURN = "<|im_start|>assistant"

Replies = Mapping[str, Sequence[str]]
"""What is said in a conversation by what its prompt holds: the first that is found counts."""


class ByPrompt:
    """The engine. Replies are said in turn; `abort_rate` is how often a request is broken off."""

    name = "by-prompt"

    def __init__(self, tokenizer: FastTokenizer, replies: Replies, calls: Path, abort_rate: float = 0.2) -> None:
        self.tokenizer = tokenizer
        self._replies = replies
        self._calls = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._abort_rate = abort_rate
        self._rest: dict[bytes, list[int]] = {}

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """The reply whose turn it is, or the rest of one that was broken off at exactly these ids."""
        prompt = array("i", input_ids)
        checksum = zlib.crc32(prompt.tobytes())
        rng = random.Random(checksum)
        rest = self._rest.get(prompt.tobytes())
        if rest is None:
            os.write(self._calls, b".")
            await asyncio.sleep(random.random() / 100)
            text = self.tokenizer.decode(prompt)
            replies = next(said for held, said in self._replies.items() if held in text)
            said = Misspeller(self.tokenizer, 0.3, rng).encode(replies[text.count(TURN) - 1])
            rest = [*said, self.tokenizer.stop_ids[0]]
        given, finish = rest, "stop"
        if len(rest) > 1 and rng.random() < self._abort_rate:
            given, finish = rest[: rng.randrange(1, len(rest))], "abort"
            self._rest[(prompt + array("i", given)).tobytes()] = rest[len(given) :]
        logprobs = [toy_logprob(number, len(prompt) + at) for at, number in enumerate(given)]
        return Sampled(ids=given, logprobs=logprobs, finish_reason=finish, policy_version=f"step-{checksum % 3}")

    def managed_server(self) -> ManagedChat:
        """What answers a chat request."""
        return ManagedChat(self, ChatFormat(self.tokenizer), "hermes")


@contextlib.contextmanager
def served(folder: Path, replies: Replies, calls: Path) -> Iterator[str]:
    """The server in a process of its own, with its tokenizer in `folder`; its address."""
    folder.mkdir()
    save_tokenizer(train_tokenizer(), folder)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_serve(folder, replies, calls, tell))
        finally:
            os._exit(1)
    os.close(tell)
    try:
        with os.fdopen(told) as told_file:
            url = told_file.readline().strip()
        assert url, "the token server did not start"
        yield url
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def _serve(folder: Path, replies: Replies, calls: Path, tell: int) -> None:
    async with ModelServer(ByPrompt(load_tokenizer(str(folder)), replies, calls), kind="sglang") as server:
        os.write(tell, f"{server.url}\n".encode())
        os.close(tell)
        await asyncio.Event().wait()
