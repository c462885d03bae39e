"""Marks the runs of this user on this machine, so that their records may name code and settings of this machine.

A run's folder is data: whoever made it could name any file as its environment. So each run gets a mark, an HMAC of its
settings (`config.json`) and its path, with a key that stays in the user's state directory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

from palaestra.rollouts.journal.reader import Recording

MARK = "origin"
CONFIG_NAME = "config.json"
_KEY_BYTES = 32


def mark_origin(folder: Path) -> None:
    """Mark a run that has its `config.json`. Without a place for the key, the run stays unmarked."""
    try:
        (folder / MARK).write_text(_mark(folder, _key(make=True)) + "\n")
    except OSError:
        return


def is_ours(recording: Recording) -> bool:
    """Whether this user recorded the run here, in this folder, with the settings that its journal has."""
    folder = recording.path.parent
    try:
        found = (folder / MARK).read_text().strip()
        settings = json.loads((folder / CONFIG_NAME).read_bytes())
        ours = hmac.compare_digest(found.encode(), _mark(folder, _key()).encode())
    except (OSError, ValueError):
        return False
    return ours and bool(settings == json.loads(json.dumps(recording.meta.config)))


def _mark(folder: Path, key: bytes) -> str:
    settings = (folder / CONFIG_NAME).read_bytes()
    return hmac.new(key, os.fsencode(folder.resolve()) + b"\n" + settings, hashlib.sha256).hexdigest()


def _key(*, make: bool = False) -> bytes:
    """The key of this user. Raises OSError if it is missing or damaged."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "palaestra", "run.key")
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(unfinished, path)  # another process may have been faster
        except FileExistsError:
            pass
        finally:
            unfinished.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged; remove it")
    return key
