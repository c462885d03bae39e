"""Keeps what the agent changed and nobody wrote to the shared folder, because it would end with its sandbox.

The changes of each sandbox are in a folder of their own beside the store: `changes.patch`, which `git apply` takes, and
below `files` what a patch must not or cannot express, with its path: the agent's version of files that changed on this
machine, too, and the history of repositories. What may never be written back is not kept either.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import shlex
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from palaestra_chat.folder_changes import FolderChange, edits
from palaestra_chat.git_files import history_of
from palaestra_chat.workdir import NEVER_WRITTEN
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import private, writing

_MOST_TEXT_BYTES = 256 << 10
"""The size of a file above which it is kept as a whole, because finding the changed lines would take long."""

_LINE_BYTES = 52


def kept(changes: Sequence[FolderChange]) -> list[FolderChange]:
    """Return the changes that would be lost with the sandbox, although they may be written back."""
    return [change for change in changes if change.problem not in NEVER_WRITTEN]


class UnwrittenChanges:
    """What was not written, of the sandboxes of one conversation. `folder` is made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Path | None = None

    def save(self, root: Path, changes: Sequence[FolderChange]) -> str:
        """Keep these changes of the present sandbox to the folder `root`, in place of those that were kept before.
        Returns where they are, for the person; nothing if there are none. Raises `DiskError`."""
        changes = kept(changes)
        if not changes:
            if self._current is not None:
                shutil.rmtree(self._current, ignore_errors=True)
            return ""
        if self._current is None:
            self._current = self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(self.saved())}"
        with writing(self._current):
            shutil.rmtree(self._current, ignore_errors=True)
            self._current.mkdir(mode=0o700, parents=True)
            (self._current / "root").write_text(f"{root}\n", errors="surrogateescape")
            as_patch = [each for each in changes if not each.problem and history_of(each.path) is None]
            if as_patch:
                with open(self._current / "changes.patch", "wb", opener=private) as file:
                    file.writelines(map(git_patch, as_patch))
            for change in changes:
                if change.after is not None and change not in as_patch:
                    self._write_file(self._current / "files" / change.path, change)
        return f"{plural(len(edits(changes)), 'change')} not written to {root}. {_kept_changes(self._current, root)}"

    def new_sandbox(self) -> None:
        """Keep the changes of the next sandbox beside those that are kept."""
        self._current = None

    def saved(self) -> list[str]:
        """Return where the kept changes are, one text for each sandbox that has some."""
        found = sorted(self._folder.glob("*/root"))
        return [
            _kept_changes(each.parent, Path(each.read_text(errors="surrogateescape").rstrip("\n"))) for each in found
        ]

    def _write_file(self, path: Path, change: FolderChange) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if change.link:
            path.symlink_to(os.fsdecode(change.after or b""))
            return
        with open(path, "wb", opener=private) as file:
            file.write(change.after or b"")


def _kept_changes(folder: Path, root: Path) -> str:
    """Return what is kept in a folder, and how to take it."""
    ways = []
    if (folder / "changes.patch").exists():
        ways.append(
            f"`git -C {shlex.quote(str(root))} apply {shlex.quote(str(folder / 'changes.patch'))}` applies them"
        )
    if (folder / "files").exists():
        ways.append(f"files that a patch cannot express are in {folder / 'files'}")
    return f"The unwritten changes are kept in {folder}" + "".join(f"; {way}" for way in ways)


def git_patch(change: FolderChange) -> bytes:
    """Return a change as a patch that `git apply` takes, also in a folder without a repository.

    Source: https://git-scm.com/docs/diff-format and, for binary files, `emit_binary_diff_body` in git's diff.c.
    """
    if change.before is not None and change.after is not None and stat.S_ISLNK(change.mode_before) != change.link:
        gone = replace(change, after=None, mode=0)
        return git_patch(gone) + git_patch(replace(change, before=None, mode_before=0))
    path = os.fsencode(change.path)
    old, new = _quoted(b"a/" + path), _quoted(b"b/" + path)
    lines = [b"diff --git " + old + b" " + new]
    modes = [
        None if data is None else _mode(mode)
        for data, mode in ((change.before, change.mode_before), (change.after, change.mode))
    ]
    if modes[0] is None:
        lines.append(b"new file mode %s" % modes[1])
    elif modes[1] is None:
        lines.append(b"deleted file mode %s" % modes[0])
    elif modes[0] != modes[1]:
        lines += [b"old mode %s" % modes[0], b"new mode %s" % modes[1]]
    before, after = change.before or b"", change.after or b""
    if change.before != change.after:
        names = [_blob(data) for data in (change.before, change.after)]
        lines.append(b"index %s..%s" % (names[0], names[1]))
        if b"\0" in before + after or len(before) + len(after) > _MOST_TEXT_BYTES:
            lines += [b"GIT binary patch", *_literal(after), b"", *_literal(before), b""]
        elif before != after:
            spaced = b"\t" if b" " in path else b""
            named = b"/dev/null" if change.before is None else old + spaced
            lines += [b"--- " + named, b"+++ " + (b"/dev/null" if change.after is None else new + spaced)]
            lines += _hunks(before, after)
    return b"\n".join([*lines, b""])


def _hunks(before: bytes, after: bytes) -> Iterator[bytes]:
    texts = [[line + b"\n" for line in data.split(b"\n")] for data in (before, after)]
    for text in texts:
        # What follows the last line end is a line without one, or nothing.
        text[-1] = text[-1][:-1]
        if not text[-1]:
            text.pop()
    for line in list(difflib.diff_bytes(difflib.unified_diff, texts[0], texts[1], lineterm=b"\n"))[2:]:
        if line.endswith(b"\n"):
            yield line[:-1]
        else:
            yield from (line, b"\\ No newline at end of file")


def _mode(mode: int) -> bytes:
    return b"120000" if stat.S_ISLNK(mode) else b"100755" if mode & stat.S_IXUSR else b"100644"


def _blob(data: bytes | None) -> bytes:
    """Return the name of the content in git; zeros if there is no file."""
    if data is None:
        return b"0" * 40
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest().encode()


def _literal(data: bytes) -> Iterator[bytes]:
    yield b"literal %d" % len(data)
    packed = zlib.compress(data)
    for at in range(0, len(packed), _LINE_BYTES):
        piece = packed[at : at + _LINE_BYTES]
        size = len(piece)
        yield bytes([size + 64 if size <= 26 else size + 70]) + base64.b85encode(piece, pad=True)


def _quoted(path: bytes) -> bytes:
    """Return a path as git writes it: in quotes if it has unusual bytes."""
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in path):
        return path
    shown = (bytes([byte]) if 0x20 <= byte < 0x7F and byte not in b'"\\' else b"\\%03o" % byte for byte in path)
    return b'"' + b"".join(shown) + b'"'
