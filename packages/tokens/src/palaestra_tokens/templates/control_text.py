"""Finds control tokens in text that must stay text, and splits them with a mark.

A control token is a token that ordinary text does not produce: a special token, or another added token in brackets.
The parts of a text between the marks are encoded one by one, so that no token extends across a mark. Tokens may be
nested (`[[A]]` and `[A]`) or overlap, so a mark is put after the first character of every token. Some tokenizers change
the text (case, Unicode forms) before they look for their tokens; for these, tokens are looked for in the changed text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import repeat
from typing import Any

from palaestra_slots.core.types import JSON
from palaestra_tokens.templates.jinja import MARK, THINK_CLOSE, THINK_OPEN
from palaestra_tokens.tokenizers import Tokenizer

_BRACKETED = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_WRAPPED = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)
_REPLACEMENT = "\ufffd"


class ControlText:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        control, special = _control_texts(tokenizer)
        normalize = _normalizer(tokenizer)
        self._any = _Tokens(control, normalize)
        self._own = _Tokens(special - {THINK_OPEN, THINK_CLOSE}, normalize)
        self._part = _parts_of(control)

    def marked(self, value: JSON, *, own: bool = False) -> JSON:
        """Return the value with marks in the control tokens of its strings and keys. If `own` is true, the model wrote
        the value, and only special tokens other than the thinking tags are marked."""
        return _mapped(value, (self._own if own else self._any).marked)

    def count(self, text: str) -> int:
        """Return the number of places in a marked text where a control token begins."""
        return self._any.count(text)

    def parts(self, value: JSON) -> dict[str, str]:
        """Return the strings and keys in a value that are control tokens without their brackets, each mapped to the
        same text with a mark in it."""
        if self._part is None:
            return {}
        found = {text: self._part.sub(_marked, text) for text in _strings_in(value)}
        return {text: split for text, split in found.items() if split != text}


class _Tokens:
    """A set of control tokens. `normalize` is the function by which the tokenizer changes text before it looks for
    tokens."""

    def __init__(self, texts: Collection[str], normalize: Callable[[str], str] | None) -> None:
        self._pattern = _beginnings(texts)
        self._normalize = normalize
        self._normalized = None if normalize is None else _beginnings({*texts, *map(normalize, texts)})

    def marked(self, text: str) -> str:
        """Return the text with a mark in each token. Marks that are already in it become ordinary text."""
        if MARK in text:
            text = text.replace(MARK, _REPLACEMENT)
        if self._pattern is None:
            return text
        text = self._pattern.sub(_marked, text)
        return text if self._normalized is None else self._halved(text)

    def count(self, text: str) -> int:
        """Return the number of tokens that begin in the text."""
        return 0 if self._pattern is None else sum(1 for _ in self._pattern.finditer(text))

    def _halved(self, text: str) -> str:
        """Return the text with marks where its changed form contains a token."""
        assert self._normalize is not None
        assert self._normalized is not None
        # A place in the changed text cannot be mapped back to the original one, so
        # the text is halved until no half has a token.
        if not self._normalized.search(self._normalize(text)):
            return text
        # A single character that the tokenizer changes into a whole token cannot be split.
        if len(text) == 1:
            return _REPLACEMENT
        middle = len(text) // 2
        return f"{self._halved(text[:middle])}{MARK}{self._halved(text[middle:])}"


def replaced(value: JSON, texts: Mapping[str, str]) -> JSON:
    """Return the value with each string or key that `texts` maps replaced by its new text."""
    return _mapped(value, lambda text: texts.get(text, text))


def _mapped(value: JSON, change: Callable[[str], str]) -> JSON:
    """Return a copy of the value, in which `change` has replaced each string and key."""
    root: list[JSON] = [value]
    pending: list[tuple[Any, Any]] = [(root, 0)]
    while pending:  # not a recursion: a model may nest the arguments of a call as deep as it likes
        holder, place = pending.pop()
        item = holder[place]
        if isinstance(item, str):
            holder[place] = change(item)
        elif isinstance(item, Mapping):
            copied: dict[JSON, JSON] = {}
            for key, each in item.items():
                copied[change(key) if isinstance(key, str) else key] = each
            holder[place] = copied
            pending += zip(repeat(copied), copied)
        elif isinstance(item, list | tuple):
            holder[place] = listed = list(item)
            pending += zip(repeat(listed), range(len(listed)))
    return root[0]


def _marked(found: re.Match[str]) -> str:
    return f"{found[0][0]}{MARK}{found[0][1:]}"


def _strings_in(value: JSON) -> Iterator[str]:
    """Yield the strings and keys in a value, in order."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            pending += reversed([part for pair in each.items() for part in pair])
        elif isinstance(each, list | tuple):
            pending += reversed(each)


def _control_texts(tokenizer: Tokenizer) -> tuple[set[str], set[str]]:
    """Return the texts of all control tokens, and the texts of the special tokens."""
    # Ours and those of transformers name these attributes differently.
    special = set(getattr(tokenizer, "special_ids", None) or getattr(tokenizer, "all_special_ids", None) or ())
    vocabulary = getattr(tokenizer, "get_added_vocab", None)
    added = getattr(tokenizer, "added_ids", None) or (vocabulary().values() if vocabulary is not None else ())
    texts = {number: tokenizer.decode([number], skip_special_tokens=False).strip() for number in {*special, *added}}
    # Some tokenizers do not list their tags of calls and thinking as special, but a model would still read them as
    # control tokens.
    control = {text for number, text in texts.items() if number in special or _BRACKETED.fullmatch(text)}
    return control, {texts[number] for number in special}


def _normalizer(tokenizer: Tokenizer) -> Callable[[str], str] | None:
    """Return the function by which a fast tokenizer changes text before it looks for tokens, or None if it looks for
    all tokens in the unchanged text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if backend is None or normalizer is None:
        return None
    if not any(token.normalized for token in backend.get_added_tokens_decoder().values()):
        return None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return lambda text: normalize(text.encode(errors="replace").decode())


def _beginnings(texts: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of each token, so that nested tokens are found, or None if
    there are no tokens."""
    rests: dict[str, list[str]] = {}
    for text in sorted(texts):
        if len(text) > 1:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
    found = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(found)) if found else None


def _parts_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern for tokens whose brackets are missing, partly or completely, at the beginning or end of a
    text."""
    words: dict[tuple[str, str], list[str]] = {}
    for text in sorted(texts):
        wrapped = _WRAPPED.fullmatch(text)
        if wrapped is not None and wrapped[2]:
            words.setdefault((wrapped[1], wrapped[3]), []).append(re.escape(wrapped[2]))
    found = []
    for (before, after), inner in words.items():
        # At the edge of a text, the missing part may stand in the text beside it, and the prompt would join them.
        starts = "|".join(re.escape(before[cut:]) for cut in range(1, len(before) + 1))
        ends = "|".join(re.escape(after[: len(after) - cut]) for cut in range(1, len(after) + 1))
        start = rf"(?:{re.escape(before)}|\A(?:{starts}))" if before else r"\A"
        end = rf"(?:{re.escape(after)}|(?:{ends})\Z)" if after else r"\Z"
        found.append(f"{start}(?:{'|'.join(inner)}){end}")
    return re.compile("|".join(found), re.DOTALL) if found else None
