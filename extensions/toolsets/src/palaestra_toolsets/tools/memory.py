"""The `memory` tool and the notes that it keeps for later sessions: two small files in one folder.

Rollouts must not learn from each other, so nothing is kept, and calls are refused, unless `memory_dir` is set or the
program shares `Notes` with the tool. The files are plain text that a person may edit: notes with a line `§` between
them.

Invariants: a file that the tool writes never exceeds its limit and is replaced atomically; a lock orders the changes of
concurrent processes, and no change is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.io.durable_files import read_regular, replaced
from palaestra_slots.core.io.file_lock import thread_lock
from palaestra_slots.core.types import JSON
from palaestra_toolsets.settings import ToolsetSettings

MAX_CHARS: Mapping[str, int] = {"memory": 4000, "user": 2000}
"""The maximum number of characters of each file, because every reply has all notes of the file."""
_BETWEEN = "\n§\n"

SCHEMA = ToolSchema(
    name="memory",
    description=(
        "Manage notes that persist across sessions: about the work (`memory`: facts about this environment, lessons "
        "learned, past mistakes) or about the user (`user`: identity, preferences). Save facts that will still "
        "matter later, in one or two sentences each; do not log the progress of this session. Returns all notes of "
        f"the target. Limits: {MAX_CHARS['memory']} and {MAX_CHARS['user']} characters."
    ),
    parameters={
        "action": parameters.choice("The action to perform.", ["add", "replace", "remove", "read"]),
        "target": parameters.choice("Which notes to use.", list(MAX_CHARS)),
        "content": parameters.text("For add and replace: the text of the note.", {"minLength": 1}),
        "old_text": parameters.text("For replace and remove: a unique part of the existing note.", {"minLength": 1}),
    },
    required=("action", "target"),
)

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "add": ("content",), "replace": ("old_text", "content"), "remove": ("old_text",), "read": ()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes in one folder, which the first write creates. If `folder` is None, no notes may be kept.

    Methods block while they read or write a small file. They raise `OSError` if that fails, and `ToolMistake` if there
    is no folder, if the notes would be too long, or if not exactly one note contains `old_text`.
    """

    folder: Path | None = None

    def read(self, target: str) -> list[str]:
        """Return all notes of `target` (memory or user), oldest first."""
        try:
            text = read_regular(self._path(target)).decode(errors="replace")  # no link may show another file
        except FileNotFoundError:
            return []
        return [note.strip() for note in text.split(_BETWEEN) if note.strip()]

    def add(self, target: str, content: str) -> list[str]:
        """Add a note unless it exists. Returns all notes."""
        with self._changing(target) as notes:
            if content not in notes:
                notes.append(content)
            return self._write_notes(target, notes)

    def replace(self, target: str, old_text: str, content: str) -> list[str]:
        """Replace the only note that contains `old_text` with `content`. If another note already equals `content`, only
        remove the old note. Returns all notes."""
        with self._changing(target) as notes:
            place = _place(notes, old_text)
            others = [*notes[:place], *notes[place + 1 :]]
            notes = others if content in others else [*notes[:place], content, *notes[place + 1 :]]
            return self._write_notes(target, notes)

    def remove(self, target: str, old_text: str) -> list[str]:
        """Remove the only note that contains `old_text`. Returns all notes."""
        with self._changing(target) as notes:
            del notes[_place(notes, old_text)]
            return self._write_notes(target, notes)

    def _path(self, target: str) -> Path:
        if self.folder is None:
            raise ToolMistake("No notes are kept here: no folder is set")
        return self.folder / f"{target}.md"

    @contextlib.contextmanager
    def _changing(self, target: str) -> Iterator[list[str]]:
        """Yield the notes, locked against other writers during the block."""
        path = self._path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        with thread_lock(path.with_name(f".{path.name}.lock")):
            yield self.read(target)

    def _write_notes(self, target: str, notes: list[str]) -> list[str]:
        text, most = _BETWEEN.join(notes), MAX_CHARS[target]
        if len(text) > most:
            raise ToolMistake(
                f"That would be {len(text)} of {most} characters; nothing was changed. Remove or shorten notes first",
                notes=self.read(target),
            )
        with replaced(self._path(target)) as file:
            file.write(text.encode())
        return notes


async def run_memory(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Perform `action`; the reply has the resulting notes."""
    kept = run.found_state(Notes) or Notes(Path(settings.memory_dir) if settings.memory_dir else None)
    action, target = arguments["action"], arguments["target"]
    for name in _NEEDED[action]:
        if not str(arguments.get(name, "")).strip():
            raise ToolMistake(f"{name} is needed for {action}; nothing was changed")
    if "§" in str(arguments.get("content", "")):
        raise ToolMistake("A note cannot contain the sign §, which separates notes; nothing was changed")
    given = (str(arguments[name]).strip() for name in _NEEDED[action])
    values = [text.replace("\r\n", "\n").replace("\r", "\n") for text in given]  # as `read` returns them
    notes = await asyncio.to_thread(getattr(kept, action), target, *values)
    used = f"{len(_BETWEEN.join(notes))} of {MAX_CHARS[target]} characters"
    return {"success": True, "target": target, "entries": notes, "usage": used}


def _place(notes: list[str], old_text: str) -> int:
    found = [place for place, note in enumerate(notes) if old_text in note]
    if len(found) != 1:
        how_many = f"{len(found)} notes contain" if found else "No note contains"
        raise ToolMistake(f"{how_many} that old_text; exactly one must contain it. Nothing was changed", notes=notes)
    return found[0]


def memory_tool(settings: ToolsetSettings) -> FunctionTool:
    return FunctionTool(SCHEMA, partial(run_memory, settings), "memory", touches_world=True, world_session="memory")
