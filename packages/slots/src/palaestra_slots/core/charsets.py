"""Decodes text by the name of its encoding as browsers do, for mails and web pages.

Source: WHATWG Encoding Standard, section 4.2. Many programs write the name of a smaller or older encoding than the one
they use, so a name stands for the encoding that is a superset of it and that is used in practice.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_MEANT = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "shift_jis": "cp932",
    "utf-8": "utf-8-sig",
}
"""What is used under a name: Python's names of both encodings."""


def decoded(data: bytes, charset: str | None) -> str:
    """Return the text. Invalid bytes become replacement characters. A name that is unknown, or that is no encoding of
    text, such as `hex`, means UTF-8."""
    for label in _labels((charset or "utf-8").strip().lower()):
        try:
            name = codecs.lookup(label).name
            return data.decode(_MEANT.get(name, name), "replace")
        except (LookupError, ValueError, UnicodeError):
            continue
    return data.decode("utf-8-sig", "replace")


def _labels(charset: str) -> Iterator[str]:
    """Yield a label, and other spellings of it that Python knows: `windows-874` and `cp-850` are code pages,
    `iso-8859-8-i` (RFC 1556) says only how its letters are ordered, and `x-` marks names that are not registered."""
    yield charset
    bare = charset.removeprefix("x-")
    yield bare
    yield re.sub(r"^(?:windows|cp|ibm|ms|dos)[-_ ]?(\d+)$", r"cp\1", bare)
    yield re.sub(r"^(iso[-_]?8859[-_]\d+)[-_][ei]$", r"\1", bare)
