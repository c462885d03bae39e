"""Marks the runs of this user on this machine, because only the records of such runs may name code and settings of this
machine.

A run's folder may come from another person, who could have named any file as its environment. So each part of a run
adds a mark to the folder: an HMAC of the folder's path and the part's recorded settings. Its key stays in the user's
state directory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.io.durable_files import private, read_regular
from palaestra_slots.core.types import JSON

MARKS = "origin"
_KEY_BYTES = 32


def mark_origin(folder: Path, config: Mapping[str, JSON]) -> None:
    """Add a mark for this part of the run to `folder`, computed from the part's recorded settings (`config`). If the
    key cannot be stored, the part stays unmarked."""
    try:
        mark = _mark(folder, config, _user_key(make=True))
        with open(folder / MARKS, "a", opener=private) as file:
            file.write(f"{mark}\n")
    except OSError:
        return


def is_ours(recording: Recording) -> bool:
    """Return whether this user recorded the run on this machine, in this folder, with the settings that its journal now
    has."""
    return made_here(recording.path.parent, recording.meta.config)


def made_here(folder: Path, config: Mapping[str, JSON]) -> bool:
    """Return whether this user recorded the run in this folder on this machine, with these recorded settings."""
    try:
        marks = read_regular(folder / MARKS).decode().split()
        ours = _mark(folder, config, _user_key())
    except (OSError, ValueError):
        return False
    return any(hmac.compare_digest(mark.encode(), ours.encode()) for mark in marks)


def _mark(folder: Path, config: Mapping[str, JSON], key: bytes) -> str:
    # As the journal gives the settings back: a tuple that was recorded is read as a list.
    plain = json.dumps(msgspec.json.decode(msgspec.json.encode(config)), sort_keys=True)
    # The path of a folder need not be UTF-8.
    return hmac.new(key, f"{folder.resolve()}\n{plain}".encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def _user_key(*, make: bool = False) -> bytes:
    """Return the key of this user. Raises OSError if it is missing or damaged."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "palaestra", "run.key")
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with open(unfinished, "xb", opener=private) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            # A link appears with its whole content, and fails if the key exists. Two runs that start together must not
            # each make a key, because the marks of one of them would then never match.
            os.link(unfinished, path)
        except FileExistsError:  # another process was faster
            pass
        finally:
            unfinished.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged; remove it")
    return key
