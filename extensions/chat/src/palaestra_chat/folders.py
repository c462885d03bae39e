"""The folders in which one user's conversations and chat settings are stored."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder that holds the conversations: `$PALAESTRA_STATE`, or else the folder `palaestra` in
    `$XDG_STATE_HOME` (by default `~/.local/state`)."""
    if named := os.environ.get("PALAESTRA_STATE"):
        return Path(named)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "palaestra"


def settings_file() -> Path:
    """Return the path of the chat settings: `palaestra/chat.yaml` in `$XDG_CONFIG_HOME` (by default `~/.config`)."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "palaestra" / "chat.yaml"
