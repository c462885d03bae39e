"""Names of keys as tmux has them, and what a terminal sends for them.

Codes are those of xterm with its defaults: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
"""

from __future__ import annotations

_PLAIN = {
    "Enter": "\r", "Tab": "\t", "Space": " ", "BSpace": "\x7f", "Escape": "\x1b", "BTab": "\x1b[Z",
    "Insert": "\x1b[2~", "IC": "\x1b[2~", "Delete": "\x1b[3~", "DC": "\x1b[3~",
    "PageUp": "\x1b[5~", "PgUp": "\x1b[5~", "PPage": "\x1b[5~",
    "PageDown": "\x1b[6~", "PgDn": "\x1b[6~", "NPage": "\x1b[6~",
    "F1": "\x1bOP", "F2": "\x1bOQ", "F3": "\x1bOR", "F4": "\x1bOS", "F5": "\x1b[15~", "F6": "\x1b[17~",
    "F7": "\x1b[18~", "F8": "\x1b[19~", "F9": "\x1b[20~", "F10": "\x1b[21~", "F11": "\x1b[23~", "F12": "\x1b[24~",
}  # fmt: skip
_CURSOR = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "Home": "H", "End": "F"}
_CONTROL = {"Space": 0, "@": 0, "[": 27, "\\": 28, "]": 29, "^": 30, "_": 31, "?": 127}


def code(key: str, *, application_cursor: bool = False) -> bytes | None:
    """What the key of that name sends: `Enter`, `Up`, `F5`, `C-c`, `M-x`, `M-Up`. None for what is no key's name.

    `application_cursor` is the mode that full-screen programs ask for; cursor keys send other codes in it.
    """
    if key in _CURSOR:
        return ("\x1bO" if application_cursor else "\x1b[").encode() + _CURSOR[key].encode()
    if key in _PLAIN:
        return _PLAIN[key].encode()
    if key.startswith("C-"):
        return _control(key[2:])
    if key.startswith("M-") and len(key) > 2:
        rest = code(key[2:], application_cursor=application_cursor)
        if rest is None and len(key) == 3:
            rest = key[2:].encode()
        return None if rest is None else b"\x1b" + rest
    return None


def _control(name: str) -> bytes | None:
    if name in _CONTROL:
        return bytes([_CONTROL[name]])
    if len(name) == 1 and name.isascii() and name.isalpha():
        return bytes([ord(name.lower()) - ord("a") + 1])
    return None
