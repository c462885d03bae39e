"""Replaces secrets in text that is written or shown: keys in addresses, headers, arguments and messages. Does no I/O.

It knows secrets by their place (user and key parts of an address, `Bearer …`, `--api-key …`, `token=…`) and by the
shapes of well-known keys; a secret that looks like an ordinary word cannot be found. For settings and error texts: what
models and tools wrote is data and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "(hidden)"

_NAMES = (
    r"(?:[a-z0-9]+[-_])*(?:api[-_]?keys?|apikey|auth|authorization|credentials?|key|passwd|password|private[-_]?key|pwd"
    r"|secret|sig|signature|token)"
)
_USER = re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(rf"(?P<kept>[?&;](?:{_NAMES})=)[^\s&#\"'<>]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<kept>(?<![\w-])(?:--?)?(?:{_NAMES})[=:]\s*[\"']?)(?!\()[^\s\"'&,;}}\]]{{6,}}", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<kept>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bpypi-[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
)
_FLAG = re.compile(rf"--?(?:{_NAMES})", re.IGNORECASE)


def redacted(text: str, *known: str | None) -> str:
    """The text without secrets: those known by their place or shape, and the `known` ones, wherever they are."""
    for secret in known:
        if secret and len(secret) > 3:
            text = text.replace(secret, HIDDEN)
    text = _USER.sub(rf"\g<kept>{HIDDEN}@", text)
    for pattern in (_QUERY, _BEARER, _ASSIGNED):
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program without secrets; the one after a flag such as `--api-key` is a secret."""
    shown: list[str] = []
    for index, argument in enumerate(arguments):
        follows = index > 0 and _FLAG.fullmatch(arguments[index - 1]) and not argument.startswith("-")
        shown.append(HIDDEN if follows else redacted(argument))
    return shown
