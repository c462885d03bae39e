"""Writes to the terminal's scrollback, above the prompt if one is shown. What was written is never changed."""

from __future__ import annotations

import shutil
from typing import TextIO

from prompt_toolkit.application.current import get_app_or_none


class Scrollback:
    """The terminal `raw`, only appended to."""

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw

    @property
    def columns(self) -> int:
        """The width of the terminal in characters."""
        return shutil.get_terminal_size().columns

    def write(self, text: str) -> None:
        """Write whole lines. A prompt is erased, and drawn again below the text, in one step of the event loop: keys
        that are typed meanwhile are not echoed into the text."""
        if not text:
            return
        app = get_app_or_none()
        if app is None or not app.is_running:
            self._raw.write(text)
            self._raw.flush()
            return
        app.renderer.erase()
        self._raw.write(text)
        self._raw.flush()
        app.renderer.reset()
        app._redraw()
