"""The changes in a sandbox to the files of a shared folder, and how a person sees them: as edits, of a file or of a
repository's history."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaestra_chat.git_files import HISTORY, OF_A_COMMIT, history_of, split
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import escaped

CHANGED_HISTORY = (
    "the repository has changed on this machine in the meantime, so nothing of its history is written; let the agent "
    "write its commits to a file with `git format-patch`, and apply it with `git am`"
)


@dataclass(frozen=True, slots=True)
class FolderChange:
    """One file or symlink that differs in the sandbox. `kind` is new, changed or deleted; `before` is the file's
    content on this machine, `after` its content in the sandbox, and for a symlink its target. `mode` and `mode_before`
    are their modes as in `os.stat_result`. `problem` is the reason why the file is not written back, or empty."""

    path: str
    kind: str
    before: bytes | None
    after: bytes | None
    mode: int = stat.S_IFREG | 0o644
    problem: str = ""
    mode_before: int = 0

    @property
    def link(self) -> bool:
        """Whether it is a symlink in the sandbox."""
        return self.after is not None and stat.S_ISLNK(self.mode)

    @property
    def name(self) -> str:
        """The kind and the path, with the target of a symlink or the new permissions of a file."""
        name = f"{self.kind} {escaped(self.path)}"
        if self.link:
            return f"{name} -> {escaped(os.fsdecode(self.after or b''))}"
        if stat.S_ISLNK(self.mode_before):
            return f"{name} (a symlink)" if self.after is None else f"{name} (a file instead of a symlink)"
        permissions, before = stat.S_IMODE(self.mode), stat.S_IMODE(self.mode_before)
        return f"{name} (mode {permissions:o})" if self.kind == "changed" and permissions not in (0, before) else name

    def diff(self) -> str:
        """Return the change as a unified diff, or as one line if the file is not text, after a line about the type and
        the permissions if those differ."""
        if self.after is not None and self.before is not None and self.mode != self.mode_before:
            about = f"{escaped(self.path)}: mode {self.mode_before:o}, now {self.mode:o}\n"
            return about if self.before == self.after else about + self._content_diff()
        return self._content_diff()

    def _content_diff(self) -> str:
        texts = [_decoded_text(data) for data in (self.before, self.after)]
        if None in texts:
            return f"{self.kind} binary file {self.path} ({len(self.after or b'')} bytes)\n"
        before, after = ((text or "").splitlines(keepends=True) for text in texts)
        names = (self.path if self.before is not None else "/dev/null"), self.path
        lines = difflib.unified_diff(before, after, names[0], names[1] if self.after is not None else "/dev/null")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class Edit:
    """The changes that are written or not as one: those of one file, or of the history of one repository."""

    name: str
    changes: Sequence[FolderChange]

    def diff(self) -> str:
        """Return the change of a file as `FolderChange.diff` does, and what is new in a history."""
        if history_of(self.changes[0].path) is None:
            return self.changes[0].diff()
        return "".join(f"+{line}\n" for line in subjects(self.changes)) or f"{self.name}\n"


def edits(changes: Sequence[FolderChange]) -> list[Edit]:
    """Return the changes as edits. The history of a repository comes after the files."""
    found = [Edit(change.name, [change]) for change in changes if history_of(change.path) is None]
    for repository in dict.fromkeys(map(history_of, (change.path for change in changes))):
        if repository is not None:
            history = [change for change in changes if history_of(change.path) == repository]
            new = sum(each.startswith("commit") for each in subjects(history))
            found.append(Edit(f"{plural(new, 'commit') if new else 'branches'} in {repository}", history))
    return found


def history_only(changes: Sequence[FolderChange]) -> list[FolderChange]:
    """Return the changes without git's bookkeeping. If one file of a commit changed on this machine, too, then no file
    of that repository's history may be written."""
    histories: dict[str | None, list[FolderChange]] = {}
    for change in changes:
        if (repository := history_of(change.path)) is not None:
            histories.setdefault(repository, []).append(change)
    kept = {change.path: change for change in changes}
    for history in histories.values():
        names = {change.path: split(change.path)[1] for change in history}
        written = not HISTORY.isdisjoint(names.values())
        broken = any(change.problem for change in history if names[change.path] in OF_A_COMMIT)
        for change in history:
            if not written:
                del kept[change.path]
            elif broken:
                kept[change.path] = replace(change, problem=CHANGED_HISTORY)
    return list(kept.values())


def subjects(changes: Sequence[FolderChange]) -> list[str]:
    """Return what the logs of the HEADs of a repository and its submodules say about these changes, such as
    `commit: Fix the parser`."""
    found = []
    for change in changes:
        if split(change.path)[0] is not None and change.path.endswith("/logs/HEAD"):
            before, after = ((data or b"").decode(errors="replace") for data in (change.before, change.after))
            known = set(before.splitlines())
            found += [line.partition("\t")[2] for line in after.splitlines() if "\t" in line and line not in known]
    return found


def _decoded_text(data: bytes | None) -> str | None:
    if data is None:
        return ""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
