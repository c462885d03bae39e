"""Decodes text by the name of its encoding as browsers do, for mails and web pages.

Source: WHATWG Encoding Standard, section 4.2. Many programs write the name of a smaller or older encoding than the one
they use, so a name stands for the encoding that is a superset of it and that is used in practice.
"""

from __future__ import annotations

import codecs

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
    try:
        name = codecs.lookup(charset or "utf-8").name
        return data.decode(_MEANT.get(name, name), "replace")
    except (LookupError, ValueError, UnicodeError):
        return data.decode("utf-8-sig", "replace")
