"""Replaces secrets in text that is written or shown: keys in addresses, headers, arguments and messages. Does no I/O.

This module finds the secrets that Palaestra was given (`remember_secret`), and recognises further secrets by their
position (user and key parts of an address, `Bearer …`, `--api-key …`, `token=…`) and by the formats of well-known keys.
Any other secret that looks like an ordinary word is not found. Use this module for settings and error texts; the texts
of models and tools are data and stay unchanged.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from urllib.parse import quote

HIDDEN = "(hidden)"

_STRONG = (
    r"(?:[a-z0-9]+[-_])*(?:api[-_]?keys?|apikey|credentials?|pass(?:wd|word|phrase)|private[-_]?key|pwd|secret|token)"
    r"|_?(?-i:[A-Za-z][A-Za-z0-9]{0,40}(?:Key|Token|Secret|Password|Signature)"
    r"|[A-Z][A-Z0-9]{0,40}(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD))"
)
"""Names whose values are secrets of any length."""
_NAMES = rf"(?:[a-z0-9]+[-_])*(?:auth|authorization|key|sig|signature)|{_STRONG}"
"""The names in `_STRONG`, and names whose values are secrets if they are long."""
_PLAIN = r"(?:(?=[^\s\"'<>]*\d)(?=[^\s\"'<>]*[A-Za-z])[^\s\"'<>,;)\]}`-][^\s\"'<>,;)\]}`]{5,})"
"""A word with letters and digits. After a name and a blank, only such a word is hidden, because most words in that
position are not secrets."""

_KEPT = rf"\g<kept>{HIDDEN}"
# The order matters: a later pattern sees what the earlier ones have left.
_RULES: Sequence[tuple[str, int, str]] = (
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL, HIDDEN),
    # The user part of an address, that of npm's files, and that of an address inside another one.
    (r"(?P<kept>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/\"'<>]+@", re.IGNORECASE, f"{_KEPT}@"),
    (r"(?P<kept>(?<![:/])//)[^\s/@:\"'<>]+:[^\s/\"'<>]+@", 0, f"{_KEPT}@"),
    (r"(?P<kept>%3A(?:%2F|/){2})(?:(?!%3A(?:%2F|/){2})[^\s/\"'<>&])+?(?=%40)", re.IGNORECASE, _KEPT),
    # A parameter of an address, and of an address inside another one.
    (rf"(?P<kept>[?&;](?:{_NAMES})=)[^\s&#\"'<>]+", re.IGNORECASE, _KEPT),
    (rf"(?P<kept>%(?:3F|26|23|3B)(?:{_NAMES})%3D)(?:(?!%(?:26|23|3B))[^\s&#\"'<>])+", re.IGNORECASE, _KEPT),
    (r"(?P<kept>\b(?:authorization|cookie)\\*[\"']?\s*:\s*\\*[\"']?)[^\r\n\"']{6,}", re.IGNORECASE, _KEPT),
    (r"(?P<kept>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE, _KEPT),
    # A member of a JSON object (even inside five JSON strings) or of a Python dict, or a header as a tuple. The number
    # of backslashes is limited so that the time grows linearly with the text.
    (
        rf"(?P<kept>(?P<quote>\\{{0,31}}[\"'])(?:{_STRONG})(?P=quote)\s*:\s*b?\\*[\"']|\(b?(?P<quoted>[\"'])(?:{_STRONG})"
        rf"(?P=quoted),\s*b?[\"']|(?P<other>\\{{0,31}}[\"'])(?:{_NAMES})(?P=other)\s*:\s*b?\\*[\"'](?=[^\"']{{6}}))"
        r"[^\"'\\]+(?:\\+[^\"'\\]+)*",
        re.IGNORECASE,
        _KEPT,
    ),
    # A phrase in quotation marks after a name.
    (
        rf"(?P<kept>(?<![\w-])(?:--?)?(?:{_STRONG})\s{{0,8}}[:=]>?\s{{0,8}}(?P<quote>[\"']))(?:(?!(?P=quote)).)+",
        re.IGNORECASE,
        _KEPT,
    ),
    # An assignment. `${NAME:-default}` is how our messages and pages say that a variable may have a default.
    (
        rf"(?P<kept>(?<![\w-])(?:--?)?(?:(?:{_NAMES})(?:[:=]|[ \t]+=)>?\s*[\"']?(?!\(|-default\}})"
        rf"(?=[^\s\"'&,;}}\]]{{6}})|(?:{_STRONG})=))(?!\()[^\s\"'&,;}}\]]+",
        re.IGNORECASE,
        _KEPT,
    ),
    # The value after a flag, or after a keyword such as `password` in a netrc file.
    (
        rf"(?P<kept>(?<![\w-])(?:--(?:{_NAMES})|(?:password|passwd|secret|token))\s+){_PLAIN}",
        re.IGNORECASE,
        _KEPT,
    ),
    (rf"(?P<kept><(?:{_STRONG})>)[^<]+", re.IGNORECASE, _KEPT),
    (r"(?P<kept>(?<![\w/-])-u\s+[^\s:]+:)[^\s\"']+", 0, _KEPT),
    # The formats of well-known keys. The last one is general: a short prefix, then a long word with digits, lowercase
    # and uppercase letters.
    (
        r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
        r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}"
        r"|\bfc-[0-9a-f]{32}\b|\bdo[opr]_v1_[0-9a-f]{64}\b|\bwandb_v1_\w{20,}|\bASIA[A-Z0-9]{16}\b|\bya29\.[\w-]{20,}|\bpypi-[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
        r"|\bSG\.[\w-]{10,}\.[\w-]{20,}|(?<=/bot)\d{6,12}:[\w-]{30,}|\b\d{6,12}:AA[\w-]{30,}|(?<=hooks\.slack\.com/services/)\S+"
        r"|\b(?!(?:req|msg|call|toolu|chatcmpl|resp|file|run|rollout|batch)[-_])[a-z][a-z0-9]{1,9}[-_]"
        r"(?=[A-Za-z]{0,60}\d)(?=[a-z0-9]{0,60}[A-Z])(?=[A-Z0-9]{0,60}[a-z])[A-Za-z0-9]{20,200}\b",
        0,
        HIDDEN,
    ),
)


@cache
def _rules() -> list[tuple[re.Pattern[str], str]]:
    """Return the compiled patterns with what replaces their matches. A command that prints no text from elsewhere, such
    as `--help`, does without the compilation, which takes 8 ms."""
    return [(re.compile(pattern, flags), shown) for pattern, flags, shown in _RULES]


_MOST_KNOWN = 256
_known: dict[str, None] = {}
_known_pattern: re.Pattern[str] | None = None
_WORDS = re.compile(r"[a-z]+(?:[-_][a-z]+)*", re.IGNORECASE)


def remember_secret(secret: str | None) -> None:
    """Make `redacted` hide this secret from now on. A secret of fewer than 4 characters, or a word of letters with
    fewer than 16 characters (`EMPTY`, `not-needed`), is ignored. Of all other secrets, only the latest 256 are
    hidden."""
    global _known_pattern
    if not secret or len(secret) < 4 or secret in _known or (len(secret) < 16 and _WORDS.fullmatch(secret)):
        return
    _known[secret] = None
    # A limit, because the pattern is searched in every text that is shown, and a gateway may see many keys.
    while len(_known) > _MOST_KNOWN:
        del _known[next(iter(_known))]
    _known_pattern = re.compile("|".join(form for each in _known for form in _forms(each)))


def remember_named(values: Mapping[str, str]) -> None:
    """Call `remember_secret` for the values whose names mark them as secrets, such as headers or variables."""
    for name, value in values.items():
        if re.fullmatch(_NAMES, name, re.IGNORECASE):
            remember_secret(value.rpartition(" ")[2])


def _forms(secret: str) -> list[str]:
    """Return patterns for the forms in which a secret may appear: unchanged, cut off after its first half, or encoded
    for an address, as JSON, base64 or hex. A secret of fewer than 8 characters, or a word of letters, is matched only
    unchanged and only where it is not a part of a path or a longer name."""
    if len(secret) < 8 or _WORDS.fullmatch(secret):  # short secrets and words may also be parts of paths and names
        return [rf"(?<![\w./-]){re.escape(secret)}(?![\w/-]|\.\w)"]
    data = secret.encode("utf-8", "surrogateescape")
    found = [secret, quote(data, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1], data.hex()]
    for skipped, before in ((0, 0), (2, 1), (3, 2)):  # the secret may begin at any byte of a group of three
        for altchars in (b"+/", b"-_"):
            text = base64.b64encode(bytes(before) + data, altchars).decode()
            found.append(text[skipped : (before + len(data)) * 8 // 6])
    # The longest first, because the first alternative that fits is taken, and would leave the rest of a longer one.
    patterns = [re.escape(each) for each in sorted(set(found), key=len, reverse=True)]
    head = secret[: max(12, len(secret) // 2)]
    return [*patterns, re.escape(head) + r"[\w.-]*"] if len(head) < len(secret) else patterns


def redacted(text: str, *known: str | None) -> str:
    """Return the text with its secrets hidden: those recognised by position or format, and the `known` and remembered
    secrets wherever they occur."""
    for secret in known:
        if secret and len(secret) > 3:
            text = re.sub("|".join(_forms(secret)), HIDDEN, text)
    if _known_pattern is not None:
        text = _known_pattern.sub(HIDDEN, text)
    for pattern, shown in _rules():
        text = pattern.sub(shown, text)
    return text


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a program's arguments with their secrets hidden. The argument after a flag such as `--api-key` counts as a
    secret."""
    shown: list[str] = []
    for index, argument in enumerate(arguments):
        follows = (
            index > 0
            and re.fullmatch(rf"--?(?:{_NAMES})", arguments[index - 1], re.IGNORECASE)
            and not argument.startswith("-")
        )
        shown.append(HIDDEN if follows else redacted(argument))
    return shown
