"""vLLM: its OpenAI server with token-id prompts, and the `/generate` that Atropos adds to it.

Wire sources: vLLM's `CompletionRequest` and `CompletionResponseChoice` (`return_token_ids` since 0.10.2; older servers
spell ids as `token_id:N` in the log-probabilities), and `vllm_api_server.py` of atroposlib 0.4. Servers without
`/v1/completions` get requests in the second shape. vLLM does not report which policy sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from palaestra.core.types import JSON
from palaestra.inference.engine import Sampled
from palaestra.inference.engines.token_engine import TokenServer
from palaestra.inference.http.transport import NOT_JSON, encode_json
from palaestra.inference.ledger import ids_json

_SPELLED = "token_id:"
_NOT_SAID = b"null"


class VLLMEngine(TokenServer):
    """One vLLM server."""

    _stock: bool | None = None

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`, in the server's shape."""
        sampling = {"max_tokens": None, **sampling}  # up to the window; left out, it would be 16
        lane = sampling.pop("split", "train")
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
        }
        response = await self._continued(url, "prompt", input_ids, encode_json(body), lane)
        if response.status in (404, 405) and self._stock is None and not _is_about_the_request(response.body):
            self._stock = False
            return await self._from_atropos(list(input_ids), sampling, lane)
        if not 200 <= response.status < 300:
            raise self.transport.refusal(url, response.status, response.body)
        self._stock = True
        return self._from_stock(response.body, input_ids)

    def _from_stock(self, raw: bytes, input_ids: Sequence[int]) -> Sampled:
        url = self.base_url / "completions"
        reply = self._decoded(raw, _Completion, url, len(input_ids))
        if not reply.choices or reply.choices[0].logprobs is None:
            raise self._wrong(url, len(input_ids), "it has no log-probabilities")
        choice, logprobs = reply.choices[0], reply.choices[0].logprobs
        if not _are(choice.prompt_token_ids, input_ids):
            raise self._wrong(url, len(input_ids), "it was given other prompt tokens, it says")
        if reply.usage is not None and reply.usage.prompt_tokens != len(input_ids):
            raise self._wrong(url, len(input_ids), f"it was given {reply.usage.prompt_tokens} tokens, it says")
        if choice.finish_reason is None:
            raise self._wrong(url, len(input_ids), "it does not say why it ended")
        ids, spelled = choice.token_ids, _spelled_ids(logprobs.tokens)
        if ids is None:
            if spelled is None:
                raise self._wrong(url, len(input_ids), "it has no token ids (vLLM 0.10.2 or newer gives them)")
            ids = spelled
        elif spelled is not None and spelled != ids:
            raise self._wrong(url, len(input_ids), "its log-probabilities are of other tokens than its token ids")
        if len(ids) != len(logprobs.token_logprobs) or None in logprobs.token_logprobs:
            found = sum(value is not None for value in logprobs.token_logprobs)
            raise self._wrong(url, len(input_ids), f"{len(ids)} tokens but {found} log-probabilities")
        values = [value for value in logprobs.token_logprobs if value is not None]
        return Sampled(ids=ids, logprobs=values, finish_reason=choice.finish_reason)

    async def _from_atropos(self, input_ids: list[int], sampling: Mapping[str, JSON], lane: str) -> Sampled:
        url = self.root_url / "generate"
        body = {**sampling, "prompt": {"prompt_token_ids": input_ids}, "logprobs": 0}
        reply = self._decoded(await self.transport.post_json(url, body, lane=lane), _Generated, url, len(input_ids))
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
    """The ids that tokens spell, if all of them do."""
    if not all(token.startswith(_SPELLED) for token in tokens):
        return None
    try:
        return [int(token.removeprefix(_SPELLED)) for token in tokens]
    except ValueError:
        return None


def _is_about_the_request(raw: bytes) -> bool:
    """Whether a 404 is vLLM's own, about an unknown model, and not its web server's, about the path."""
    try:
        said = msgspec.json.decode(raw)
    except NOT_JSON:
        return False
    return isinstance(said, dict) and ("error" in said or "message" in said)


def _are(said: msgspec.Raw, ids: Sequence[int]) -> bool:
    """Whether these are the ids that the server reports it was given, if it does; nearly always they are literally."""
    text = bytes(said)
    return text in (_NOT_SAID, ids_json(ids)) or msgspec.json.decode(text) == list(ids)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(_NOT_SAID)


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Generated(msgspec.Struct):
    """`logprobs[C][N]` hold, per completion and position, a list of one mapping from id to log-probability."""

    logprobs: list[list[list[dict[int, float]]]]
    finish_reasons: list[str]
