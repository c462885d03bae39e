"""Separates the files that a check writes from files of the work that the agent has linked to them.

A check often writes the expected result to a file of its own and compares the work with that file. If one of the two is
a link to the other, the work equals whatever the check wrote. So before a check, this module examines the agent's links
between a file that the task's messages name and a file that they do not name. Each such link is replaced by a copy of
its target. A link is removed if its target is missing or is neither a file nor a directory. A named file with hard
links becomes a copy. A symbolic link that the messages name stays if the messages mention links.

Not covered: messages that name both files or neither, and a check that runs programs of the work, which can copy its
files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from palaestra.core.types import Task
from palaestra.rollouts.grading.tampering import SCRATCH
from palaestra.sandbox.slot import WORKSPACE, Change, Slot

_NAME = re.compile(r"[\w.+@%-]+")
_ABOUT_LINKS = re.compile(r"\b(?:sym|hard)?links?\b|\blinked\b|\bln\b|\bsymbolic", re.IGNORECASE)

_LOOK = """\
for each; do
  if [ ! -h "$each" ]; then
    ls -ldn -- "$each" | { read -r mode links rest; echo "links $links"; }
    continue
  fi
  if [ -f "$each" ]; then kind=file; elif [ -d "$each" ]; then kind=dir; else kind=none; fi
  if [ $kind = none ]; then end=$(readlink -- "$each"); else end=$(readlink -f -- "$each"); fi
  printf '%s %s\\n' $kind "$(printf %s "$end" | tr '\\n' '?')"
done
"""

_DETACH = """\
for each; do
  copy="${each%/*}/.palaestra-copy"
  rm -rf -- "$copy"
  if [ -f "$each" ] || [ -d "$each" ]; then cp -aH -- "$each" "$copy"; fi
  rm -f -- "$each"
  if [ -e "$copy" ]; then mv -- "$copy" "$each"; fi
done
"""
_DETACH_S = 300.0
_AT_ONCE = 200
"""The maximum number of links per command, because the kernel limits a command's arguments."""


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """The names in the messages of a task, and whether the messages mention links."""

    names: frozenset[str]
    about_links: bool

    @classmethod
    def of(cls, task: Task) -> NamedFiles:
        """Return the names in the task's messages, and whether the messages mention links."""
        text = "\n".join(str(message.get("content")) for message in task.messages())
        names = frozenset(name.rstrip(".") for name in _NAME.findall(text))
        return cls(names, _ABOUT_LINKS.search(text) is not None)

    def equates(self, link: str, kind: str, end: str, changed: Collection[str]) -> bool:
        """Return whether a link must be replaced: because it makes a named file and an unnamed file one file, because
        its target is missing, or because it is a named file with further hard links. `changed` are the paths of the
        agent's files.

        For a symbolic link, `kind` is the kind of its target `end`. For a named file, `kind` is `links` and `end` is
        the file's number of hard links.
        """
        link_named, end_named = self._has(link), self._has(end)
        if kind == "links":
            return end != "1"
        if kind == "dir":
            below = f"{end.rstrip('/')}/"
            end_named = end_named or any(path.startswith(below) and self._has(path) for path in changed)
        if link_named and (self.about_links or end_named):
            return False
        return kind == "none" or link_named != end_named

    def _has(self, path: str) -> bool:
        """Return whether the messages name a file. A name without a dot counts only for files directly in a folder
        where an answer belongs, because installed packages have links with the same names as their programs."""
        folder, _, base = path.rstrip("/").rpartition("/")
        return base in self.names and ("." in base or folder in ("", WORKSPACE, *SCRATCH))


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


async def detach_links(slot: Slot, task: Task, changes: Sequence[Change]) -> None:
    """Replace each link of the agent that would make a file of the work and a file of the check one file.

    `changes` are the changes that the grading slot shows.
    """
    named = NamedFiles.of(task)
    links = [
        change.path
        for change in changes
        if change.kind == "symlink" or (change.kind == "file" and _base(change.path) in named.names)
    ]
    changed = [change.path for change in changes if change.kind in ("file", "symlink")]
    for start in range(0, len(links), _AT_ONCE):
        some = links[start : start + _AT_ONCE]
        looked = await slot.execute(
            ["/bin/sh", "-c", _LOOK, "sh", *some], cwd="/", timeout_s=_DETACH_S, max_output_bytes=1 << 21, spill=False
        )
        found = [line.partition(" ") for line in looked.output.splitlines()]
        wrong = [
            link for link, (kind, _, end) in zip(some, found, strict=False) if named.equates(link, kind, end, changed)
        ]
        if wrong:
            await slot.execute(["/bin/sh", "-c", _DETACH, "sh", *wrong], cwd="/", timeout_s=_DETACH_S, spill=False)
