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
    r"(?:[a-z0-9]+[-_])*(?:api[-_]?keys?|apikey|auth|authorization|credentials?|key|pass(?:wd|word|phrase)|private[-_]?key"
    r"|pwd|secret|sig|signature|token)|_?(?-i:[A-Za-z][A-Za-z0-9]{0,40}(?:Key|Token|Secret|Password|Signature))"
)
_USER = re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/\"'<>]+@", re.IGNORECASE)
_USER_OF_NPM = re.compile(r"(?P<kept>(?<![:/])//)[^\s/@:\"'<>]+:[^\s/\"'<>]+@")
_QUERY = re.compile(rf"(?P<kept>[?&;](?:{_NAMES})=)[^\s&#\"'<>]+", re.IGNORECASE)
_HEADER = re.compile(r"(?P<kept>\b(?:authorization|cookie)[\"']?\s*:\s*[\"']?)[^\r\n\"']{6,}", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<kept>(?<![\w-])(?:--?)?(?:{_NAMES})(?:[:=]|[ \t]+=)\s*[\"']?)(?!\()[^\s\"'&,;}}\]]{{6,}}", re.IGNORECASE
)
_QUOTED = re.compile(rf"(?P<kept>(?P<quote>[\"'])(?:{_NAMES})(?P=quote)\s*:\s*b?[\"'])[^\"']{{6,}}", re.IGNORECASE)
"""A member of an object in JSON, or in a dict of Python."""
_BEARER = re.compile(r"(?P<kept>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bASIA[A-Z0-9]{16}\b|\bya29\.[\w-]{20,}|\bpypi-[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_FLAG = re.compile(rf"--?(?:{_NAMES})", re.IGNORECASE)


def redacted(text: str, *known: str | None) -> str:
    """The text without secrets: those known by their place or shape, and the `known` ones, wherever they are."""
    for secret in known:
        if secret and len(secret) > 3:
            text = text.replace(secret, HIDDEN)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for user in (_USER, _USER_OF_NPM):
        text = user.sub(rf"\g<kept>{HIDDEN}@", text)
    for pattern in (_QUERY, _HEADER, _BEARER, _QUOTED, _ASSIGNED):
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program without secrets; the one after a flag such as `--api-key` is a secret."""
    shown: list[str] = []
    for index, argument in enumerate(arguments):
        follows = index > 0 and _FLAG.fullmatch(arguments[index - 1]) and not argument.startswith("-")
        shown.append(HIDDEN if follows else redacted(argument))
    return shown
