"""The client of any server that supports OpenAI chat completions with native tool calls: vLLM, SGLang, llama.cpp,
OpenRouter, OpenAI.

This client is not token-exact: the server renders the template and parses the calls, and returns only text, which is
never repaired.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from yarl import URL

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineRefused, EngineUnavailable, ReplyWithheld
from palaestra_slots.core.retry import AT_START, RetryPolicy
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion, TextCompletion, plain_messages
from palaestra_tokens.engines.sampling import NEUTRAL
from palaestra_tokens.http.chat_completions import (
    decode_completion,
    decode_text,
    listed_models,
    plainer_history,
    server_kind,
    window_of,
)
from palaestra_tokens.http.reply_limits import largest_limit, wants_newer_name
from palaestra_tokens.http.sse import Delta, DeltaHook, EventStreamReader
from palaestra_tokens.http.transport import Transport, encode_json, public_url, server_says

logger = logging.getLogger(__name__)

PROBE: Message = {"role": "user", "content": "Reply with the word: ready"}
"""The message of the request that is sent before a run."""

PROBE_TIMEOUT_S = 60.0

_LIMITS = ("max_completion_tokens", "max_tokens")
_MOST_CHANGES = 3
"""The number of times that the limit or the history of one request is changed because the server refuses it."""

T = TypeVar("T")
R = TypeVar("R", ChatCompletion, TextCompletion)


class OpenAIEngine(ServerEngine):
    """One chat completions server. All rollouts share it, because a conversation's whole state is its messages."""

    features = frozenset({"images", "response_format", "tool_choice", "on_delta"})

    def __init__(
        self,
        config: APIServerConfig,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.config = config
        self.base_url = parse_base_url(config.base_url)
        self._url = self.base_url / "chat" / "completions"
        self._source = f"The model server at {public_url(self._url)} (model '{self.name}')"
        self._strict_history: list[str] = []
        self._is_listed = True
        self._limit_name = ""
        self._largest_limit: int | None = None
        self._neutral: Mapping[str, JSON] = {}
        self.transport = Transport.to(config, clock=clock, retry=retry)

    async def start(self) -> None:
        """Check the server without sampling a token, unless `health_check` is false. A server without a list of models
        is accepted.

        Raises `EngineUnavailable` within seconds if nothing answers, and `EngineRefused` if the key is refused.
        """
        if not self.config.health_check:
            return
        url = self.base_url / "models"
        response = await self.transport.list_models(url)
        models = listed_models(response.body) if response.status == 200 else []
        names = [model.id for model in models]
        if len(names) == 1 and "model_name" not in self.config.model_fields_set:
            self._use_model(names[0])
        self.window_tokens = window_of(models, self.name)
        if names and self.name not in names:
            self._is_listed = False
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            listed = ", ".join(names[:10]) + more
            logger.warning("%s does not list model '%s'; it lists %s", public_url(url), self.name, listed)
        if (kind := server_kind(models)) != "other":
            # Only for these servers: OpenAI's own API refuses requests with names that it does not know, such as top_k.
            self._neutral = NEUTRAL
        if kind in ("vllm", "sglang"):
            logger.warning(
                "%s speaks the protocol of %s, but chat completions give only placeholder tokens. For exact tokens, "
                "which training needs, set --openai.server_type %s; palaestra doctor %s checks the server",
                *(public_url(self.base_url), "vLLM" if kind == "vllm" else "SGLang", kind, public_url(self.base_url)),
            )

    def _use_model(self, name: str) -> None:
        """Use the only model that the server lists, because the settings do not name one."""
        self.config = self.config.model_copy(update={"model_name": name})
        self.transport.model = name
        self._source = f"The model server at {public_url(self._url)} (model '{name}')"

    async def probe(self, tools: Sequence[Mapping[str, JSON]]) -> None:
        """Send one request with `tools`, so that a server that refuses them, or a model that it does not list, is
        detected before any slot is created. If `health_check` is false, or if there are no tools and the server lists
        the model, send nothing.

        Only a refusal of the key, the model, the address or the tools counts: other errors may concern this request
        alone, and a slow or overloaded server is retried during the run. Raises `EngineRefused`.
        """
        if not self.config.health_check or (self._is_listed and not tools):
            return
        body: dict[str, JSON] = {"model": self.name, "messages": [PROBE], "max_tokens": 16}
        body |= {"tools": list(tools)} if tools else {}
        try:
            response = await self.transport.request(
                "POST", self._url, lambda: encode_json(body), retry=AT_START, timeout_s=PROBE_TIMEOUT_S
            )
        except EngineUnavailable as error:
            logger.warning("the first request failed; the run begins anyway: %s", error)
            return
        named = ("tool",) if self._is_listed else ("tool", "model")
        said = server_says(response.body).lower()
        about_these = 400 <= response.status < 500 and any(each in said for each in named)
        if about_these or response.status in (401, 403, 404, 405):
            raise self.transport.refusal(self._url, response.status, response.body)

    async def aclose(self) -> None:
        await self.transport.aclose()

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        split: str = "train",
        on_delta: DeltaHook | None = None,
        **sampling: JSON,
    ) -> ChatCompletion:
        """Sample one reply with `n` choices. `split` (train or eval) selects the in-flight limit.

        The reply is streamed if `on_delta` is set, if `stream=True` is passed or if the setting `stream` is true; the
        result is the same. `on_delta` is called with each chunk. `sampling` and then `extra_body` are merged into the
        request, and both may override its fields. If `temperature` is set, vLLM and SGLang also get every other
        sampling setting, at its neutral value. Raises `EngineUnavailable`, `EngineRefused`, `ContextExceeded`,
        `ReplyWithheld` or `EngineReplyError`.
        """
        body: dict[str, JSON] = {"model": self.name, "messages": messages}
        if tools:
            body["tools"] = tools
        if temperature is not None:
            # vLLM and SGLang take settings that a request lacks from the model's generation_config.json, which would
            # change the distribution.
            body.update(self._neutral)
            body["temperature"] = temperature
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if n > 1 and not self.config.n_kwarg_is_ignored:
            body["n"] = n
        if on_delta is not None or self.config.stream:
            body["stream"] = True
        body.update(sampling)
        body.update(extra_body or {})
        if body.get("stream"):
            # Without it, OpenAI's protocol leaves the usage out of a stream.
            body.setdefault("stream_options", {"include_usage": True})
        if n > 1 and self.config.n_kwarg_is_ignored:
            # Some servers accept `n` and return one choice.
            return await self._repeated(body, split, n, on_delta)
        return await self._complete(body, split, on_delta)

    async def completion(
        self,
        *,
        prompt: str,
        n: int = 1,
        split: str = "train",
        extra_body: Mapping[str, JSON] | None = None,
        **sampling: JSON,
    ) -> TextCompletion:
        """Sample `n` continuations of a text. Raises the same errors as `chat_completion`."""
        body = {"model": self.name, "prompt": prompt, **({"n": n} if n > 1 else {}), **sampling, **(extra_body or {})}
        if body.get("temperature") is not None:
            body = {**self._neutral, **body}
        if n > 1 and self.config.n_kwarg_is_ignored:
            del body["n"]
            return _together(await _all([self._continue(body, split) for _ in range(n)]))
        return await self._continue(body, split)

    async def _continue(self, body: Mapping[str, JSON], lane: str) -> TextCompletion:
        url = self.base_url / "completions"
        decode = partial(decode_text, source=f"The model server at {public_url(url)} (model '{self.name}')")
        return await self._limited(body, lambda sent: self.transport.ask(url, sent, decode, lane=lane))

    async def _complete(self, body: dict[str, JSON], lane: str, on_delta: DeltaHook | None = None) -> ChatCompletion:
        messages = body["messages"] = plain_messages(body["messages"])
        turn = 1 + [message.get("role") for message in messages].count("assistant")
        decode = partial(decode_completion, turn=turn, source=self._source)
        read = EventStreamReader(self._source, on_delta).read

        def ask(sent: JSON) -> Coroutine[None, None, ChatCompletion]:
            return self.transport.ask(self._url, sent, decode, lane=lane, read=read)

        learned: list[str] = []
        for said in self._strict_history:
            body["messages"] = plainer_history(body["messages"], said) or body["messages"]
        while True:
            try:
                completion = await self._limited(body, ask)
            # Both are refusals too, but another form of the history would change neither.
            except (ContextExceeded, ReplyWithheld):
                raise
            except EngineRefused as error:
                # Each rewriting has another reason. If it changes nothing, the refusal has another cause.
                plain = plainer_history(body["messages"], str(error)) if len(learned) < _MOST_CHANGES else None
                if plain is None:
                    raise
                body["messages"] = plain
                learned.append(str(error))
                continue
            # Kept only now that the server has accepted the rewritten history, which proves the cause.
            for said in learned:
                self._strict_history.append(said)
                logger.warning(
                    "The server refuses parts of the history; they are rewritten for it from now on: %s", said
                )
            return completion

    async def _limited(self, body: Mapping[str, JSON], ask: Callable[[JSON], Coroutine[None, None, R]]) -> R:
        """Send the request with its limit under the name and with the value that the server accepts. What the server
        requires of all requests is kept for the next ones. A limit of null is left out: vLLM reads it as 16 tokens."""
        rest = {name: value for name, value in body.items() if name not in _LIMITS}
        name, limit = next(((each, body[each]) for each in _LIMITS if body.get(each) is not None), ("", None))
        if not isinstance(limit, int):
            return await ask(rest if limit is None else {**rest, name: limit})
        for _ in range(_MOST_CHANGES):
            # Read in every round, because requests share both: another one may have learned them in the meantime.
            name = self._limit_name or name
            limit = min(limit, self._largest_limit or limit)
            try:
                return await ask({**rest, name: limit})
            except EngineRefused as error:
                allowed = largest_limit(str(error))
                if name == "max_tokens" and wants_newer_name(str(error)):
                    self._limit_name = "max_completion_tokens"
                elif allowed is None or allowed.tokens >= limit:
                    # A limit that is not smaller would be refused again.
                    raise
                elif allowed.always:
                    self._largest_limit = allowed.tokens
                else:
                    limit = allowed.tokens
        return await ask({**rest, self._limit_name or name: limit})

    async def _repeated(self, body: dict[str, JSON], lane: str, n: int, on_delta: DeltaHook | None) -> ChatCompletion:
        # Each request gets a copy of the body, because `_complete` rewrites its messages.
        hooks = [on_delta and partial(_call_as, on_delta, index) for index in range(n)]
        return _together(await _all([self._complete(dict(body), lane, hook) for hook in hooks]))


async def _all(asked: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Await all replies; the first failure cancels the other requests and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _together(replies: Sequence[R]) -> R:
    """Merge all choices into the first reply; the prompt's tokens count once."""
    first, *others = replies
    for other in others:
        for choice in other.choices:
            choice.index = len(first.choices)
            first.choices.append(choice)  # type: ignore[arg-type]
        if first.usage and other.usage:
            first.usage.completion_tokens += other.usage.completion_tokens
            first.usage.total_tokens += other.usage.completion_tokens
    return first


def _call_as(hook: DeltaHook, index: int, delta: Delta) -> None:
    hook(replace(delta, index=index))


def parse_base_url(base_url: str | None) -> URL:
    """Return the base URL of the API: a bare host gets `/v1`, any other path is kept, and a final `/chat/completions`
    is removed. Raises `ConfigError`."""
    if not base_url:
        raise ConfigError(
            "No model server is configured. Set --openai.base_url, for example http://127.0.0.1:8000/v1. Without a "
            "model, --policy oracle plays the environment's reference solutions, and --policy noop does nothing."
        )
    try:
        url = URL(base_url.rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"--openai.base_url '{base_url}' is not a valid address: {error}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--openai.base_url '{base_url}' must begin with http:// or https:// and name a host.")
    if url.path.endswith("/chat/completions"):
        return url.parent.parent
    return url / "v1" if url.path in ("", "/") else url
