"""OpenAI's legacy completions: `POST /v1/completions`, continuations of one text.

Source: the OpenAI API reference (`CreateCompletionRequest`, `Completion`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from palaestra.core.types import JSON
from palaestra.inference.engine import ChatCompletion
from palaestra.inference.recording.dialects.chat import openai_error, usage
from palaestra.inference.recording.request import (
    MOST_CHOICES,
    SAMPLING,
    ModelRequest,
    Refusal,
    event,
    flag,
    ignored_fields,
    invalid,
    required,
    sampling,
    unsupported,
)

_REFUSED = ("suffix", "logprobs", "logit_bias")
_USED = SAMPLING | {"model", "prompt", "n", "best_of", "stream", "stream_options", "echo"}
_DEFAULT_MAX_TOKENS = 16


class CompletionsDialect:
    """Translates legacy completions. Internally a continuation is a reply whose content is the text."""

    def read(self, body: Mapping[str, JSON], features: Collection[str]) -> ModelRequest:
        for name in _REFUSED:
            if body.get(name):
                raise unsupported(name)
        if flag(body, "echo"):
            raise unsupported("echo")
        prompt = required(body, "prompt", (str, list))
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise invalid("prompt", "prompt must be one text; this endpoint continues one at a time")
        n = body.get("n") or 1
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
            raise invalid("n", f"n must be a whole number from 1 to {MOST_CHOICES}")
        if body.get("best_of") not in (None, n):
            raise unsupported("best_of")
        options = body.get("stream_options")
        return ModelRequest(
            model=required(body, "model", str),
            prompt=prompt,
            settings={"max_tokens": _DEFAULT_MAX_TOKENS, **sampling(body)},
            n=n,
            stream=flag(body, "stream"),
            stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
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


class CompletionsStream:
    """The chunks of one reply."""

    def __init__(self, request: ModelRequest, reply_id: str, created: int) -> None:
        self._shared = _envelope(request, reply_id, created)
        self._usage, self._sent = request.stream_usage, 0

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
        if self._usage:
            written += event({**self._shared, "choices": [], "usage": usage(completion)})
        return bytes(written + b"data: [DONE]\n\n")

    def ping(self) -> bytes:
        return b": waiting\n\n"

    def failure(self, refusal: Refusal) -> bytes:
        return event(openai_error(refusal))

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._shared, "choices": [choice]})
