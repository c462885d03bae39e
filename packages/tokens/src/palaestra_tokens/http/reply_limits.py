"""Reads what a server's refusal says about the limit of a reply: another name for it, or a smaller value.

A limit that is too large is not a full context: the prompt fits, and the request is repeated with what is left.
Sources: the messages of OpenAI, Azure, Anthropic, Mistral, DeepSeek, Groq, Qwen, Cohere, OpenRouter, vLLM, SGLang and
TGI.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palaestra_tokens.http.transport import window_tokens

_NEWER_NAME = re.compile(r"max_completion_tokens['\"`]? instead|use ['\"`]?max_completion_tokens", re.IGNORECASE)

_NUMBER = r"(\d[\d,]*)"
_PROMPT = re.compile(
    rf"{_NUMBER} (?:input tokens|tokens from the input|in the messages|of text input|in your prompt|`?inputs`? tokens)"
    rf"|prompt contains at least {_NUMBER} input tokens|limit: {_NUMBER} \+ \d"
    rf"|messages resulted in {_NUMBER} tokens",
    re.IGNORECASE,
)
_ALL_BUT = re.compile(
    rf"requested (?:about )?(?:a total of )?{_NUMBER} tokens[^0-9]{{1,3}}[^.]*?{_NUMBER} (?:tokens )?(?:in|for) the "
    "(?:completion|output)",
    re.IGNORECASE,
)
"""The sum of prompt and limit, and the limit: the prompt may consist of more than the messages."""
_AT_LEAST = re.compile("at least [0-9]+ input tokens", re.IGNORECASE)
_PLUS = re.compile(rf"\+ *\d[\d,]* *> *{_NUMBER}")
"""The window in Anthropic's sum of prompt and limit."""
_MOST = re.compile(
    rf"(?:supports )?at most {_NUMBER} (?:completion|output) tokens|max_tokens: *\d[\d,]* *> *{_NUMBER}"
    rf"|max_(?:completion_|new_|output_)?tokens[^.\[\]]{{0,60}}\[ *\d+ *, *{_NUMBER} *\]"
    r"|max_?(?:completion_|new_|output_)?[ _]?tokens\W{0,3}(?: value)?(?:=\d+)? (?:must|should|cannot|can not|may not)"
    rf"[^.0-9]{{0,60}}?{_NUMBER}",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class AllowedLimit:
    """The largest limit that a server accepts: for this prompt, or `always`."""

    tokens: int
    always: bool


def wants_newer_name(refusal: str) -> bool:
    """Return whether the server wants `max_completion_tokens` in place of `max_tokens`, as OpenAI's newer models do."""
    return _NEWER_NAME.search(refusal) is not None


def largest_limit(refusal: str) -> AllowedLimit | None:
    """Return the largest limit that the server accepts, or None if the refusal has another cause. One token of the
    window is left free, because SGLang does not let a request fill it."""
    # First, because `_MOST` would read the window in a message such as TGI's as the limit of every reply.
    summed = _ALL_BUT.search(refusal)
    total, limit = (int(each.replace(",", "")) for each in summed.groups()) if summed else (0, 0)
    if prompt := total - limit or _first_number(_PROMPT, refusal):
        room = (_first_number(_PLUS, refusal) or window_tokens(refusal) or 0) - prompt - 1
        if _AT_LEAST.search(refusal):
            # vLLM stops counting where the limit no longer fits, so the prompt may be longer.
            room //= 2
        return AllowedLimit(room, False) if room > 0 else None
    most = _first_number(_MOST, refusal)
    return AllowedLimit(most, True) if most else None


def _first_number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(each for each in found.groups() if each).replace(",", "")) if found else None
