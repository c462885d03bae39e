"""Engines that continue token ids: their base class `TokenChat`, and the clients of SGLang and vLLM servers.

An unusable tokenizer, template or parser raises an error when the engine starts. So does a tokenizer that differs from
the server's, if the server is checked and has `/tokenize`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import msgspec
from yarl import URL

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineRefused, EngineReplyError, EngineUnavailable
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ServerEngine, SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion, CompletionUsage, Sampled, TextChoice, TextCompletion, TokenEngine
from palaestra_tokens.engines.openai import parse_base_url
from palaestra_tokens.engines.sampling import NEUTRAL
from palaestra_tokens.http.chat_completions import listed_models, window_of
from palaestra_tokens.http.transport import NOT_JSON, Reader, Response, Transport, encode_json, public_url, server_says
from palaestra_tokens.ledger import Ledger, ids_json
from palaestra_tokens.parsers import ToolCallParser, list_parsers
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.token_exact.managed_chat import HistoryMode, ManagedChat
from palaestra_tokens.token_exact.replies import sample
from palaestra_tokens.tokenizers import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class TokenChat(ServerEngine):
    """The chat side of one token engine; subclasses sample in `generate`. If `tokenizer` is None, the configured
    tokenizer is loaded on first use."""

    token_exact = True

    def __init__(
        self, config: APIServerConfig, *, tokenizer: Tokenizer | None = None, clock: Clock | None = None
    ) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._tokenizer = tokenizer
        self._formats: list[ChatFormat] = []

    async def start(self) -> None:
        """Load the tokenizer, its template and the parser. Raises `ConfigError`."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self.tokenizer_name)
        # Made only to raise: a template or parser that cannot be used is an
        # error of the start, not of the first rollout.
        self.managed_server()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        raise NotImplementedError

    def session(self, context: SessionContext) -> ManagedChat:
        return self.managed_server(name=context.rollout_id)

    def managed_server(
        self,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: ToolCallParser | str | None = None,
        tool_parser: ToolCallParser | str | None = None,
        *,
        history: HistoryMode | None = None,
        preserve_think_blocks: bool = False,
        name: str = "",
        engine: TokenEngine | None = None,
    ) -> ManagedChat:
        """Return token-exact chat for one rollout. Arguments override the config. If `engine` is set, it samples
        instead of this engine. `preserve_think_blocks` means the history `append`. If an argument names an unknown
        parser, a warning is logged and `hermes` is used, as existing scripts expect. Raises `ConfigError`."""
        chosen = tool_call_parser or tool_parser
        if isinstance(chosen, str) and chosen not in ("none", *list_parsers()):
            logger.warning("no tool-call parser is named %r; hermes is used instead", chosen)
            chosen = "hermes"
        return ManagedChat(
            engine or self,
            self._chat_format(tokenizer),
            chosen or self.config.tool_parser,
            history=history or ("append" if preserve_think_blocks else self.config.history),
            name=name,
            clock=self._clock,
        )

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        return await self.managed_server().chat_completion(messages=messages, **request)

    async def completion(
        self, *, prompt: str, n: int = 1, extra_body: Mapping[str, JSON] | None = None, **sampling: JSON
    ) -> TextCompletion:
        """Sample `n` continuations of a text; their tokens are not recorded. Raises `EngineError`."""
        ids = self.tokenizer.encode(prompt)
        settings = {**sampling, **(extra_body or {})}

        async def complete_choice(index: int) -> tuple[TextChoice, int]:
            pieces = await sample(self, Ledger().prompt(None, ids), settings, None, self._clock)
            said = [number for piece in pieces for number in piece.sampled.ids]
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            return TextChoice(index=index, text=text, finish_reason=pieces[-1].sampled.finish_reason), len(said)

        done = await asyncio.gather(*map(complete_choice, range(n)))
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
        """Return the chat format of a tokenizer. The format is kept, because callers pass the same tokenizer for every
        rollout. Of a `ChatTokenizer`, the tokenizer inside is used."""
        tokenizer = self.tokenizer if tokenizer is None else getattr(tokenizer, "tokenizer", tokenizer)
        for known in self._formats:
            if known.tokenizer is tokenizer:
                return known
        self._formats.append(ChatFormat(tokenizer, template_text(self.config.chat_template)))
        return self._formats[-1]


def template_text(named: str | None) -> str | None:
    if named is None:
        return None
    try:
        return local_path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template '{named}' cannot be read: {error}.") from None


T = TypeVar("T")

PROBE = 'Tokens: ½ naïve 東京 <|x|>\n\t{"a": 1}'
"""Text that two different tokenizers are unlikely to encode in the same way."""


class TokenServer(TokenChat):
    """One model server that continues token ids. Subclasses implement the server's wire format in `generate`. If the
    argument `sampling` has `on_ids` (`OnIds`) and the wire format supports it, the reply is streamed; the result is the
    same. `neutral` are the settings of a request that does not set them."""

    features = frozenset({"on_delta", "on_ids"})
    spare_tokens = 0
    """The tokens of the window that the server keeps free."""
    events = ""
    """The class of `token_stream.py` that reads a streamed reply."""

    def __init__(
        self,
        config: APIServerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        neutral: Mapping[str, JSON] = NEUTRAL,
    ) -> None:
        super().__init__(config, tokenizer=tokenizer, clock=clock)
        self._neutral = neutral
        self.base_url = parse_base_url(config.base_url)
        self.root_url = self.base_url.parent if self.base_url.name == "v1" else self.base_url
        self.transport = Transport.to(config, clock=clock, retry=retry)
        self._samples = asyncio.Event()
        self._samples.set()

    async def start(self) -> None:
        """Load the tokenizer. Unless `health_check` is false, also check the server and compare its tokenizer with the
        configured one. Raises `ConfigError` for a missing or differing tokenizer, `EngineUnavailable` within seconds if
        no server answers, and `EngineRefused` for a refused key."""
        await super().start()
        if not self.config.health_check:
            return
        await self._look_up_window()
        await self._compare_tokenizers()

    async def _look_up_window(self) -> None:
        response = await self.transport.list_models(self.base_url / "models")
        self.window_tokens = window_of(listed_models(response.body) if response.status == 200 else [], self.name)

    async def _complete_settings(self, prompt_tokens: int, sampling: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the settings with a value for everything that a server would otherwise take from elsewhere. The limit
        of the reply is at most the rest of the window: servers read a missing limit and null as 16 or 128 tokens, and
        refuse a limit beyond the window.

        Raises `ContextExceeded` if the prompt leaves no room, and `EngineRefused` if there is neither a limit nor a
        known window.
        """
        # The neutral values come first: a server would otherwise sample by its `generation_config.json`.
        settings = {**self._neutral, **{name: value for name, value in sampling.items() if value is not None}}
        limits = [settings.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
        limit = next((each for each in limits if each is not None), None)
        # The window is looked up only now, because a server that does not report it can still serve requests with a
        # limit.
        if self.window_tokens is None and limit is None:
            await self._look_up_window()
        if self.window_tokens is not None:
            room = self.window_tokens - prompt_tokens - self.spare_tokens
            if room < 1:
                error = ContextExceeded(
                    f"The conversation of {prompt_tokens} tokens does not fit model '{self.name}' at "
                    f"{public_url(self.root_url)}, whose context window has {self.window_tokens} tokens."
                )
                error.window_tokens = self.window_tokens
                raise error
            limit = room if limit is None else min(limit, room)
        if limit is None:
            raise EngineRefused(
                f"The server at {public_url(self.root_url)} does not report the context window of model '{self.name}', "
                "and this request has no limit. Set max_token_length (a run, chat) or max_tokens (a request)."
            )
        return {**settings, "max_tokens": limit}

    async def aclose(self) -> None:
        await self.transport.aclose()

    @asynccontextmanager
    async def _updating_weights(self) -> AsyncIterator[None]:
        """Mark the time in which this engine has paused the server to load weights."""
        self._samples.clear()
        try:
            yield
        finally:
            self._samples.set()

    async def _when_sampling(self, generate: Callable[[], Awaitable[Sampled]]) -> Sampled:
        """Run a request. A paused server keeps it waiting or answers with status 503; if this engine has paused the
        server, a request that failed is sent again after the update, however long it takes."""
        while True:
            paused = not self._samples.is_set()
            try:
                return await generate()
            except EngineUnavailable:
                if not paused and self._samples.is_set():
                    raise
                await self._samples.wait()

    async def _load_folder(self, path: str, body: JSON, folder: str) -> dict[str, JSON]:
        """Send the request with which the server loads the weights in `folder`, and return its answer. An error of the
        server is not retried: it read the folder and could not use it, or it could not read it. Raises `EngineRefused`
        and `EngineUnavailable`."""
        url, raw = self.root_url / path, encode_json(body)
        response = await self.transport.request("POST", url, lambda: raw, retried=frozenset())
        if not 200 <= response.status < 300:
            raise EngineRefused(
                f"The model server at {public_url(url)} could not load the weights in {folder} (HTTP "
                f"{response.status}): {server_says(response.body)[:500]}. The server must be able to read this folder, "
                "under the same path"
            )
        try:
            found = msgspec.json.decode(response.body)
        except NOT_JSON:
            return {}
        return found if isinstance(found, dict) else {}

    async def _post(self, path: str, body: JSON, **query: str) -> dict[str, JSON]:
        """Send a POST to a route of the server's own API. Returns its answer, or an empty object if it is no object."""
        raw = await self.transport.post_json((self.root_url / path).with_query(query), body)
        try:
            found = msgspec.json.decode(raw)
        except NOT_JSON:
            return {}
        return found if isinstance(found, dict) else {}

    async def _compare_tokenizers(self) -> None:
        """Compare the server's tokens for a test text with those of the configured tokenizer. A server without
        `/tokenize` is trusted."""
        theirs = await self.tokens_of(PROBE)
        ours = list(self.tokenizer.encode(PROBE, add_special_tokens=False))
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"The server at {public_url(self.root_url)} encodes text differently from tokenizer "
                f"'{self.tokenizer_name}' ({theirs[:6]}…, not {ours[:6]}…). Set --openai.tokenizer_name to the "
                f"tokenizer of model '{self.name}'."
            )

    async def tokens_of(self, text: str) -> list[int] | None:
        """Return the server's tokens for the text, or None if the server does not answer `/tokenize` with tokens."""
        body = encode_json({"model": self.name, "prompt": text, "add_special_tokens": False})
        try:
            response = await self.transport.look("POST", self.root_url / "tokenize", lambda: body)
            return msgspec.json.decode(response.body, type=_Tokenized).tokens if response.status == 200 else None
        except (EngineUnavailable, *NOT_JSON):
            return None

    async def _post_ids(
        self, url: URL, name: str, ids: Sequence[int], rest: bytes, lane: str, shape: type[T], on_ids: JSON = None
    ) -> Response:
        """Send the JSON object `rest` in a POST, with the ids added under `name`, and return the response, whose
        `value` has the `shape`. Each attempt makes the body again, so that a long list of ids is not kept as JSON while
        the model works. A reply of another shape is retried."""
        return await self.transport.request(
            "POST",
            url,
            # The ids' JSON is kept with a long segment (`Prompt.json`), so it is
            # put before the rest and not encoded with it.
            lambda: b"".join((b'{"', name.encode(), b'":', ids_json(ids), b",", rest[1:])),
            lane=lane,
            read=self._reader(url, on_ids),
            decode=partial(self._decoded, shape=shape, url=url, prompt_tokens=len(ids)),
        )

    def _reader(self, url: URL, on_ids: JSON) -> Reader | None:
        """Return a reader for a stream, or None if `on_ids` is None."""
        if on_ids is None:
            return None
        from palaestra_tokens.http import token_stream  # imported here, because only chats stream

        source = f"The model server at {public_url(url)} (model '{self.name}')"
        return token_stream.TokenStreamReader(source, getattr(token_stream, self.events), on_ids).read

    def _decoded(self, raw: bytes, shape: type[T], url: URL, prompt_tokens: int) -> T:
        try:
            return msgspec.json.decode(raw, type=shape)
        except NOT_JSON as error:
            raise self._wrong(
                url, prompt_tokens, f"{error}; it begins {raw[:200].decode(errors='replace')!r}"
            ) from None

    def _versions_of(
        self, url: URL, prompt_tokens: int, spans: Sequence[_VersionSpan] | None, sampled: int, label: str = ""
    ) -> tuple[str, list[tuple[str, int]]]:
        """Return the version of the weights that sampled the last tokens, by default the `label`, and the earlier ones
        with their ends, as `Sampled` has them. Another program may change the weights while requests run: our own
        updates end them."""
        starts = [span.start for span in spans or ()]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise self._wrong(url, prompt_tokens, f"its weight versions begin at the tokens {starts}")
        visible = [span for span in spans or () if span.start < max(sampled, 1)]
        earlier = [(span.version, after.start) for span, after in pairwise(visible)]
        return visible[-1].version if visible else label, earlier

    def _wrong(self, url: URL, prompt_tokens: int, what: str) -> EngineReplyError:
        return EngineReplyError(
            f"The model server at {public_url(url)} (model '{self.name}') answered a prompt of {prompt_tokens} tokens "
            f"with an invalid token-exact reply: {what}."
        )


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_SGLANG_NAMES: Mapping[str, str] = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""Maps OpenAI's setting names to SGLang's, where they differ."""


class SGLangEngine(TokenServer):
    """One SGLang server, through its own `/generate`: token ids in, token ids with their log-probabilities out.

    Source of the format: `sglang.srt.managers.io_struct.GenerateReqInput` and the server's `meta_info`, version 0.5.
    The end-of-turn token is among the ids. A weight update ends requests with finish reason `abort`. SGLang refuses a
    request whose prompt and limit together fill the window (`TokenizerManager._validate_one_request`).
    """

    spare_tokens = 1
    events = "SGLangEvents"

    async def load_weights(self, folder: str, version: str) -> None:
        """Load the weights in `folder`, a path on the server's machine, as policy `version`. Requests in progress end
        with `abort` and their tokens so far, and token-exact chat continues them with the new weights. Raises
        `EngineRefused` and `EngineUnavailable`.

        Source: SGLang's `PauseGenerationReqInput`, `UpdateWeightFromDiskReqInput` and `ContinueGenerationReqInput`
        (`sglang.srt.managers.io_struct`), and their routes in `sglang.srt.entrypoints.http_server`.
        """
        async with self._updating_weights():
            # Requests that arrive from here on wait, so no reply begins before the load and ends after it.
            await self._post("pause_generation", {"mode": "abort"})
            try:
                # `flush_cache`: the cached keys and values were computed with the old weights.
                update = {"model_path": folder, "weight_version": version, "flush_cache": True}
                reply = await self._load_folder("update_weights_from_disk", update, folder)
                if reply.get("success") is not True:
                    raise EngineRefused(
                        f"The server of model '{self.name}' did not load {folder}: {reply.get('message')}"
                    )
            finally:
                # Also after a failed load: until then, the server keeps every request waiting.
                await self._post("continue_generation", {})

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        return await self._when_sampling(partial(self._sampled, input_ids, sampling))

    async def _sampled(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        url, lane, on_ids = self.root_url / "generate", sampling.get("split", "train"), sampling.get("on_ids")
        asked = _sglang_request(await self._complete_settings(len(input_ids), sampling))
        response = await self._post_ids(url, "input_ids", input_ids, asked, lane, _SGLangReply, on_ids)
        if not 200 <= response.status < 300:
            raise self.transport.refusal(url, response.status, response.body)
        reply: _SGLangReply = response.value
        info = reply.meta_info
        reason = info.finish_reason
        # An abort with a 4xx status is a refusal. Without this check, `sample` would resume the
        # request, as after a weight update, until it gives up.
        if reason.type == "abort" and reason.status_code is not None and 400 <= reason.status_code < 500:
            raise self.transport.refusal(url, reason.status_code, reason.message.encode())
        if contradiction := reply.contradiction(len(input_ids)):
            raise self._wrong(url, len(input_ids), contradiction)
        known, label = info.weight_versions, str(info.weight_version or "")
        version, earlier = self._versions_of(url, len(input_ids), known, len(info.ids), label)
        return Sampled(
            ids=info.ids,
            # The type checker needs the `or`: None was refused above.
            logprobs=[entry[0] or 0.0 for entry in info.output_token_logprobs],
            finish_reason=reason.type,
            policy_version=version,
            earlier=earlier,
        )


def _sglang_request(sampling: Mapping[str, JSON]) -> bytes:
    ours = ("split", "on_ids")
    settings = {_SGLANG_NAMES.get(name, name): value for name, value in sampling.items() if name not in ours}
    return encode_json(
        {
            "sampling_params": {**settings, "skip_special_tokens": False},
            "return_logprob": True,
            # -1 stands for the output alone; from 0, the server would compute
            # log-probabilities for the whole prompt too.
            "logprob_start_len": -1,
            **({"stream": True} if sampling.get("on_ids") is not None else {}),
        }
    )


class _VersionSpan(msgspec.Struct):
    """The weights with this label sampled the tokens from `start` on (`WeightVersionSpan` of SGLang 0.5.23 and vLLM
    0.33)."""

    version: str
    start: int


class _SGLangFinish(msgspec.Struct):
    type: str
    message: str = ""
    status_code: int | None = None


class _SGLangInfo(msgspec.Struct):
    """`output_token_logprobs` are (log-probability, id, text or null)."""

    finish_reason: _SGLangFinish
    output_token_logprobs: list[tuple[float | None, int, JSON]]
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None

    @property
    def ids(self) -> list[int]:
        return [entry[1] for entry in self.output_token_logprobs]


class _SGLangReply(msgspec.Struct):
    meta_info: _SGLangInfo
    output_ids: list[int] | None = None

    def contradiction(self, prompt_tokens: int) -> str:
        """Return what the reply contradicts: the request or itself. Empty if nothing."""
        info, entries = self.meta_info, self.meta_info.output_token_logprobs
        if info.prompt_tokens not in (None, prompt_tokens):
            return f"it reports {info.prompt_tokens} prompt tokens"
        if info.completion_tokens not in (None, len(entries)):
            return f"{info.completion_tokens} tokens but {len(entries)} log-probabilities"
        if any(entry[0] is None for entry in entries):
            return "a token has no log-probability"
        return "" if self.output_ids in (None, info.ids) else "its log-probabilities are not those of its output_ids"


_SPELLED = "token_id:"
_NOT_SAID = b"null"


class VLLMEngine(TokenServer):
    """One vLLM server, through its OpenAI API with token-id prompts or through the `/generate` that Atropos adds.

    Sources of the formats: vLLM's `CompletionRequest` and `CompletionResponseChoice` (`return_token_ids` since 0.10.2;
    older servers spell ids as `token_id:N` in the log-probabilities), and `vllm_api_server.py` of atroposlib 0.4.
    Servers without `/v1/completions` get requests in Atropos' form. A server that takes a label for its weights (vLLM
    0.32) and reports it with the tokens (0.33, `return_weight_versions`) decides which policy version is recorded; of
    others, it is that of the last `load_weights`.
    """

    events = "VLLMEvents"
    policy_version = ""
    _labelled = False
    _stock: bool | None = None

    async def load_weights(self, folder: str, version: str) -> None:
        """Load the weights in `folder`, as `SGLangEngine.load_weights` does. The server must run with
        `VLLM_SERVER_DEV_MODE=1`.

        Source: `vllm/entrypoints/serve/rlhf/api_router.py` (`/pause`, `/resume`), the routes `/collective_rpc` and
        `/reset_prefix_cache` of the same package, `GPUModelRunner.reload_weights(weights_path=...)`, vLLM 0.15, and
        `/update_weight_version` of vLLM 0.32 (docs/training/async_rl.md).
        """
        update = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        async with self._updating_weights():
            await self._post("pause", {}, mode="abort")
            try:
                await self._load_folder("collective_rpc", update, folder)
                await self._post("reset_prefix_cache", {})
                label = encode_json({"new_version": version})
                answer = await self.transport.request(
                    "POST", self.root_url / "update_weight_version", lambda: label, retried=frozenset()
                )
                self._labelled, self.policy_version = answer.status == 200, version
            finally:
                await self._post("resume", {})

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        sampled = await self._when_sampling(partial(self._sampled_once, input_ids, sampling))
        # An update ends the requests that run, so one version has sampled these tokens. It is known only now: vLLM
        # holds back what arrives during an update, and samples it with the new weights.
        return replace(sampled, policy_version=sampled.policy_version or self.policy_version)

    async def _sampled_once(self, input_ids: Sequence[int], given: Mapping[str, JSON]) -> Sampled:
        sampling = await self._complete_settings(len(input_ids), given)
        lane, on_ids = sampling.pop("split", "train"), sampling.pop("on_ids", None)
        if self._stock is False:
            return await self._from_atropos(list(input_ids), sampling, lane)
        url = self.base_url / "completions"
        body = {
            **sampling,
            "model": self.name,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            **({"return_weight_versions": True} if self._labelled else {}),
        }
        if on_ids is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = await self._post_ids(url, "prompt", input_ids, encode_json(body), lane, _VLLMReply, on_ids)
        # Concurrent first requests all get this answer; the first of them may have been read already.
        if response.status in (404, 405) and not self._stock and not _is_about_the_request(response.body):
            self._stock = False
            return await self._from_atropos(list(input_ids), sampling, lane)
        if not 200 <= response.status < 300:
            raise self.transport.refusal(url, response.status, response.body)
        self._stock = True
        return self._from_stock(response.value, input_ids)

    def _from_stock(self, reply: _VLLMReply, input_ids: Sequence[int]) -> Sampled:
        url = self.base_url / "completions"
        if not reply.choices or reply.choices[0].logprobs is None:
            raise self._wrong(url, len(input_ids), "it has no log-probabilities")
        choice, logprobs = reply.choices[0], reply.choices[0].logprobs
        # A server that cut or re-encoded the prompt has sampled from a conversation other than the ledger's (T1).
        if not _are(choice.prompt_token_ids, input_ids):
            raise self._wrong(url, len(input_ids), "the prompt tokens it reports are not the ones that were sent")
        if reply.usage is not None and reply.usage.prompt_tokens != len(input_ids):
            raise self._wrong(url, len(input_ids), f"it reports {reply.usage.prompt_tokens} prompt tokens")
        if choice.finish_reason is None:
            raise self._wrong(url, len(input_ids), "it has no finish reason")
        ids, spelled = choice.token_ids, _spelled_ids(logprobs.tokens)
        if ids is None:
            if spelled is None:
                raise self._wrong(url, len(input_ids), "it has no token ids (vLLM 0.10.2 or newer returns them)")
            ids = spelled
        elif spelled is not None and spelled != ids:
            raise self._wrong(url, len(input_ids), "its log-probabilities are not those of its token ids")
        values = [value for value in logprobs.token_logprobs if value is not None]
        if not len(ids) == len(values) == len(logprobs.token_logprobs):
            raise self._wrong(url, len(input_ids), f"{len(ids)} tokens but {len(values)} log-probabilities")
        version, earlier = self._versions_of(url, len(input_ids), choice.weight_versions, len(ids))
        return Sampled(ids, values, choice.finish_reason, version, earlier)

    async def _from_atropos(self, input_ids: list[int], sampling: Mapping[str, JSON], lane: str) -> Sampled:
        url = self.root_url / "generate"
        body = {**sampling, "prompt": {"prompt_token_ids": input_ids}, "logprobs": 0}
        decode = partial(self._decoded, shape=_AtroposReply, url=url, prompt_tokens=len(input_ids))
        reply = await self.transport.ask(url, body, decode, lane=lane)
        if not reply.logprobs or not reply.finish_reasons:
            raise self._wrong(url, len(input_ids), "it has no completion")
        ids: list[int] = []
        logprobs: list[float] = []
        for position in reply.logprobs[0]:
            if len(position) != 1 or len(position[0]) != 1:
                raise self._wrong(url, len(input_ids), "a position does not have exactly one token")
            (token, logprob), *_ = position[0].items()
            ids.append(token)
            logprobs.append(logprob)
        return Sampled(ids=ids, logprobs=logprobs, finish_reason=reply.finish_reasons[0])


def _spelled_ids(tokens: Sequence[str]) -> list[int] | None:
    if not all(token.startswith(_SPELLED) for token in tokens):
        return None
    try:
        return [int(token.removeprefix(_SPELLED)) for token in tokens]
    except ValueError:
        return None


def _is_about_the_request(raw: bytes) -> bool:
    """Return whether a 404 comes from vLLM (unknown model) and not from its web server (unknown path)."""
    try:
        said = msgspec.json.decode(raw)
    except NOT_JSON:
        return False
    return isinstance(said, dict) and ("error" in said or "message" in said)


def _are(said: msgspec.Raw, ids: Sequence[int]) -> bool:
    """Return whether the server reports these ids as received, or reports no ids at all. The texts are compared first,
    because they are nearly always identical."""
    text = bytes(said)
    return text in (_NOT_SAID, ids_json(ids)) or msgspec.json.decode(text) == list(ids)


class _VLLMLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str] = []


class _VLLMChoice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: _VLLMLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(_NOT_SAID)
    weight_versions: list[_VersionSpan] | None = None


class _VLLMUsage(msgspec.Struct):
    prompt_tokens: int


class _VLLMReply(msgspec.Struct):
    choices: list[_VLLMChoice]
    usage: _VLLMUsage | None = None


class _AtroposReply(msgspec.Struct):
    """`logprobs[C][N]` hold, per completion and position, a list with one mapping from an id to its log-probability."""

    logprobs: list[list[list[dict[int, float]]]]
    finish_reasons: list[str]
