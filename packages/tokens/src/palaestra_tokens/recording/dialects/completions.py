"""OpenAI's legacy completions: `POST /v1/completions`, continuations of one text.

Source: the OpenAI API reference (`CreateCompletionRequest`, `Completion`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.recording.dialects.chat import ChunkStream, openai_error, usage
from palaestra_tokens.recording.request import (
    AGENTS_OWN,
    ModelRequest,
    Refusal,
    choice_count,
    flag,
    ignored_fields,
    invalid,
    refuse_fields,
    required,
    sampling,
    unsupported,
    wants_usage,
)

_REFUSED = ("suffix", "logprobs", "logit_bias")
_USED = AGENTS_OWN | {"model", "prompt", "n", "best_of", "stream", "stream_options", "echo"}
_DEFAULT_MAX_TOKENS = 16


class CompletionsDialect:
    """Translates legacy completions. Internally, a continuation is a reply whose content is the text."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        refuse_fields(body, _REFUSED)
        if flag(body, "echo"):
            raise unsupported("echo")
        prompt = required(body, "prompt", (str, list))
        # Some clients send a single text as a list.
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise invalid("prompt", "prompt must be one string, because this endpoint continues one text at a time")
        n = choice_count(body)
        if body.get("best_of") not in (None, n):
            raise unsupported("best_of")
        return ModelRequest(
            model=required(body, "model", str),
            prompt=prompt,
            # This older API has a default where chat completions have none.
            settings={"max_tokens": _DEFAULT_MAX_TOKENS, **sampling(body)},
            n=n,
            stream=flag(body, "stream"),
            stream_usage=wants_usage(body),
            ignored=ignored_fields(body, _USED),
        )

    def reply(self, request: ModelRequest, completion: ChatCompletion, reply_id: str, created: int) -> JSON:
        choices = [
            {"index": each.index, "text": each.message.content, "logprobs": None, "finish_reason": each.finish_reason}
            for each in completion.choices
        ]
        return {**_envelope(request, reply_id, created), "choices": choices, "usage": usage(completion)}

    def stream(self, request: ModelRequest, reply_id: str, created: int) -> CompletionsStream:
        return CompletionsStream(request, reply_id, created)

    def error(self, refusal: Refusal) -> JSON:
        return openai_error(refusal)


def _envelope(request: ModelRequest, reply_id: str, created: int) -> dict[str, JSON]:
    return {"id": f"cmpl-{reply_id}", "object": "text_completion", "created": created, "model": request.model}


class CompletionsStream(ChunkStream):
    """The chunks of one reply."""

    def __init__(self, request: ModelRequest, reply_id: str, created: int) -> None:
        super().__init__(request, _envelope(request, reply_id, created))
        self._sent = 0

    def begin(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        self._sent += len(text)
        return self._chunk(0, text)

    def reasoning(self, text: str) -> bytes:
        return b""

    def end(self, completion: ChatCompletion) -> bytes:
        written = bytearray()
        for choice in completion.choices:
            text = choice.message.content or ""
            written += self._chunk(choice.index, text[self._sent :] if choice.index == 0 else text)
            written += self._chunk(choice.index, "", choice.finish_reason)
        return bytes(written + self._last(completion))

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> bytes:
        return self._choice(index, finish_reason, text=text)
