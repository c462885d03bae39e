"""Notes that outlive a session: what the `memory` tool keeps, in two small files of one folder.

Not for rollouts that are to be compared: what one of them writes, the next one knows. So nobody has a folder unless
whoever runs the agent says so. Files are plain text that a person may edit: notes, with a line `§` between them.

Invariants: a file never holds more than its limit and is replaced whole, so nobody reads half of one; changes by
several processes at once follow each other, and none is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.types import JSON
from palaestra.tools.tool import ToolMistake

MAX_CHARS: Mapping[str, int] = {"memory": 4000, "user": 2000}
"""How much each file holds: they are there to be read whole, at the start of every session."""

_BETWEEN = "\n§\n"


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one folder, which is made when something is written; None where nothing may be kept.

    Methods block, but for no longer than a small file takes. They raise `ToolMistake` for what cannot be done as asked,
    with the notes as they are, and `OSError`.
    """

    folder: Path | None = None

    def read(self, target: str) -> list[str]:
        """All notes of `target` (memory or user), oldest first."""
        try:
            text = self._path(target).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return [note.strip() for note in text.split(_BETWEEN) if note.strip()]

    def add(self, target: str, content: str) -> list[str]:
        """Add a note; one that is there already stays alone. The notes afterwards."""
        with self._changing(target) as notes:
            if content not in notes:
                notes.append(content)
            return self._write(target, notes)

    def replace(self, target: str, old_text: str, content: str) -> list[str]:
        """Put `content` in place of the one note that contains `old_text`; where it is a note already, that one stays
        alone. The notes afterwards."""
        with self._changing(target) as notes:
            place = _place(notes, old_text)
            others = [*notes[:place], *notes[place + 1 :]]
            notes = others if content in others else [*notes[:place], content, *notes[place + 1 :]]
            return self._write(target, notes)

    def remove(self, target: str, old_text: str) -> list[str]:
        """Drop the one note that contains `old_text`. The notes afterwards."""
        with self._changing(target) as notes:
            del notes[_place(notes, old_text)]
            return self._write(target, notes)

    def _path(self, target: str) -> Path:
        if self.folder is None:
            raise ToolMistake("No notes are kept here: nobody has said where")
        return self.folder / f"{target}.md"

    @contextlib.contextmanager
    def _changing(self, target: str) -> Iterator[list[str]]:
        """The notes, to be written by nobody else meanwhile."""
        path = self._path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read(target)

    def _write(self, target: str, notes: list[str]) -> list[str]:
        text, most = _BETWEEN.join(notes), MAX_CHARS[target]
        if len(text) > most:
            raise ToolMistake(
                f"That would be {len(text)} of {most} characters; nothing was changed. Remove or shorten notes first",
                notes=self.read(target),
            )
        path = self._path(target)
        unfinished = path.with_name(f".{path.name}.tmp")  # only who holds the lock writes it
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        return notes


def written(target: str, notes: list[str]) -> dict[str, JSON]:
    """What there is, as the tool replies."""
    used = len(_BETWEEN.join(notes))
    return {"success": True, "target": target, "entries": notes, "usage": f"{used} of {MAX_CHARS[target]} characters"}


def _place(notes: list[str], old_text: str) -> int:
    found = [place for place, note in enumerate(notes) if old_text in note]
    if len(found) != 1:
        how_many = f"{len(found)} notes contain" if found else "No note contains"
        raise ToolMistake(f"{how_many} that old_text; it must name exactly one. Nothing was changed", notes=notes)
    return found[0]
