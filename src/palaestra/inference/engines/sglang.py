"""SGLang's own `/generate`: token ids in, token ids with their log-probabilities out.

Wire source: `sglang.srt.managers.io_struct.GenerateReqInput` and the server's `meta_info`, version 0.5. The end-of-turn
token is among the ids. A request aborted by a weight update ends with finish reason `abort`; `weight_version` names the
policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from palaestra.core.types import JSON
from palaestra.inference.engine import Sampled
from palaestra.inference.engines.token_engine import TokenServer
from palaestra.inference.http.transport import encode_json

_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}
"""OpenAI's names to SGLang's, where they differ."""


class SGLangEngine(TokenServer):
    """One SGLang server."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`."""
        url = self.root_url / "generate"
        lane, asked = sampling.get("split", "train"), _asked(sampling)
        response = await self._continued(url, "input_ids", input_ids, asked, lane)
        if not 200 <= response.status < 300:
            raise self.transport.refusal(url, response.status, response.body)
        reply = self._decoded(response.body, _Generated, url, len(input_ids))
        info = reply.meta_info
        reason = info.finish_reason
        if reason.type == "abort" and reason.status_code is not None and 400 <= reason.status_code < 500:
            raise self.transport.refusal(url, reason.status_code, reason.message.encode())
        if info.prompt_tokens is not None and info.prompt_tokens != len(input_ids):
            raise self._wrong(url, len(input_ids), f"it was given {info.prompt_tokens} tokens, it says")
        if info.completion_tokens not in (None, len(info.output_token_logprobs)):
            sampled, given = info.completion_tokens, len(info.output_token_logprobs)
            raise self._wrong(url, len(input_ids), f"{sampled} tokens but {given} log-probabilities")
        if any(entry[0] is None for entry in info.output_token_logprobs):
            raise self._wrong(url, len(input_ids), "a token has no log-probability")
        ids = [entry[1] for entry in info.output_token_logprobs]
        if reply.output_ids is not None and reply.output_ids != ids:
            raise self._wrong(url, len(input_ids), "its log-probabilities are of other tokens than its output_ids")
        return Sampled(
            ids=ids,
            logprobs=[entry[0] or 0.0 for entry in info.output_token_logprobs],
            finish_reason=reason.type,
            policy_version=str(info.weight_version or ""),
        )


def _asked(sampling: Mapping[str, JSON]) -> bytes:
    settings = {_NAMES.get(name, name): value for name, value in sampling.items() if name != "split"}
    settings.setdefault("max_new_tokens", None)  # up to the window; left out, it would be 128
    return encode_json(
        {
            "sampling_params": {**settings, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": -1,
        }
    )


class _Finish(msgspec.Struct):
    type: str
    message: str = ""
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    """`output_token_logprobs` are (log-probability, id, text or null)."""

    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, JSON]]
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None
