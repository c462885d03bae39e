"""What a model server says about itself in `GET /v1/models`: which models it has, and what kind of server it is.

Wire source: OpenAI's list of models; vLLM and SGLang sign the entries with their names and add the window. Invariant:
an answer of another shape is no list, never an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from palaestra.inference.http.chat_completions import NOT_JSON

ServerKind: TypeAlias = Literal["vllm", "sglang", "other"]


class Listed(msgspec.Struct):
    """One model. `owned_by` is who serves it, `max_model_len` its window in tokens."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[Listed]


def listed_models(body: bytes) -> list[Listed]:
    """The models; none where the body is no such list."""
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except NOT_JSON:
        return []


def server_kind(models: Sequence[Listed]) -> ServerKind:
    """The kind of server, as far as its list tells."""
    for model in models:
        if model.owned_by == "vllm":
            return "vllm"
        if model.owned_by == "sglang":
            return "sglang"
    return "other"
