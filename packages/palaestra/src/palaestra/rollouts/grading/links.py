"""Separates the files that a check writes from files of the work that the agent has linked to them.

A check often writes the expected result to a file of its own and compares the work with that file. If one of the two is
a link to the other, the work equals whatever the check wrote. So before a check, this module examines the agent's links
between a file that the task's messages name and a file that they do not name. Each such link is replaced by a copy of
its target. A link is removed if its target is missing, is neither a file nor a directory, or contains the link, and if
the time limit of the examination ends before its turn. A named file with hard links becomes a copy. A symbolic link
that the messages name stays if the messages mention links, and hard links stay if the messages mention these. Links
into `/proc`, `/sys` and `/dev` are removed, unless the messages name the link or it is a log, and ask for its target. A
link to a file below `/usr` stays: no check writes there.

Not covered: messages that name both files or neither, and a check that runs programs of the work, which can copy its
files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import dirname, join, normpath

from palaestra.rollouts.grading.tampering import SCRATCH, is_below, text_of_task
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import WORKSPACE, Change, FileInfo, Slot

_NAME = re.compile(r"[\w.+@%-]+")
_ABOUT_LINKS = re.compile(r"\b(?:sym|hard)?links?\b|\blinked\b|\bln\b|\bsymbolic", re.IGNORECASE)
_ABOUT_HARD_LINKS = re.compile(r"\bhard[ -]?link|\bln\b|\binodes?\b", re.IGNORECASE)
_KERNEL_FILES = re.compile(r"/dev/(null|zero|u?random|stdout|stderr)|/proc/(?:self/)?(mounts)|.*/fd/([12])")
"""Files of the kernel that tasks ask for. None of them leads a check to a file of its own."""
_OUT, _ERRORS = "stdout|standard output", "stderr|standard error"
_ASKS = {"null": "null|discard|mask", "stdout": _OUT, "1": _OUT, "stderr": _ERRORS, "2": _ERRORS}

_OF_PROGRAMS = frozenset({"bin", ".bin"})
"""Folders in which packages put links to programs."""

_DETACH = """\
for each; do
  copy="${each%/*}/.palaestra-copy"
  if [ -e "$copy" ] || [ -L "$copy" ]; then rm -rf -- "$copy"; fi
  cp -aH -- "$each" "$copy"
  rm -f -- "$each"
  if [ -e "$copy" ]; then mv -- "$copy" "$each"; fi
done
"""
_RELINK = """\
while IFS= read -r each; do
  inode=$(stat -c %i -- "$each") || continue
  eval "first=\\$first_$inode"
  if [ "$first" ]; then ln -f -- "$first" "$each"
  else
    cp -a -- "$each" "$each.palaestra-copy" && mv -- "$each.palaestra-copy" "$each"
    eval "first_$inode=\\$each"
  fi
done
"""
"""Gives each file as many hard links as the agent gave it. Copies of a layer share their files by hard links too."""
_OF_KERNEL = ("/proc", "/sys", "/dev")
"""Directories without files of the work, except for `/dev/shm`. Some of their files differ between processes."""

_DETACHING = ("/bin/sh", "-c", _DETACH, "sh")
_REMOVING = ("/bin/sh", "-c", 'find "$@" -prune -type l -exec rm -f -- {} +', "sh")
_HARD = 'find "$@" -prune -type f -links +1 -exec {} {{}} +'
_MOST_HOPS = 40
"""The number of links on one path that the kernel follows. Source: MAXSYMLINKS in `include/linux/namei.h`."""

LIMIT_S = 15.0
"""The time limit of the whole examination, because the agent decides how many links there are. Links that are not
examined in time are removed."""


class NamedFiles:
    """The text of a task's messages, the names in it, and whether it mentions links."""

    def __init__(self, task: Task) -> None:
        self.text = text_of_task(task)
        self.names = frozenset(name.rstrip(".") for name in _NAME.findall(self.text))
        self.about_links = _ABOUT_LINKS.search(self.text) is not None

    def equates(
        self, link: str, kind: str, end: str, with_answers: Collection[str], asked: Collection[str] = ()
    ) -> bool:
        """Return whether a symbolic link must be replaced: because it makes a named file and an unnamed file one file,
        because its target is missing, or because it leads to a different file in each process. `with_answers` are the
        directories that count as named, and `asked` links that stay like named ones.

        `kind` is the kind of the link's target `end`.
        """
        target = normpath(join(dirname(link), end))
        if is_below(target, _OF_KERNEL) and not is_below(target, SCRATCH):
            return not ((self.has(link) or "log" in link) and self._asks_for(target))
        # Programs are linked to these files everywhere, and no check writes its result there.
        if is_below(target, ("/usr",)) and kind == "file":
            return False
        link_named, end_named = self.has(link), self.has(end)
        end_named = end_named or (kind == "dir" and end in with_answers)
        if link in asked or (link_named and (self.about_links or end_named)):
            return False
        return kind == "none" or link_named != end_named

    def passed(self, links: Mapping[str, str]) -> set[str]:
        """Return those of the links, given with their targets, through which a link leads that the messages ask for."""
        found = {link for link in links if self.about_links and self.has(link)}
        ahead, asked = list(found), set[str]()
        while ahead:
            link = ahead.pop()
            target = normpath(join(dirname(link), links[link]))
            through = {target, *map(str, PurePosixPath(target).parents)} & links.keys()
            ahead += through - found - asked
            asked |= through - found
        return {link for link in asked if not is_below(link, SCRATCH)}

    def _asks_for(self, target: str) -> bool:
        """Return whether the messages ask for a file of the kernel."""
        if not (match := _KERNEL_FILES.fullmatch(target)):
            return False
        word = "".join(match.groups(""))
        return target in self.text or re.search(rf"\b(?:{_ASKS.get(word, word)})", self.text, re.I) is not None

    def has(self, path: str) -> bool:
        """Return whether the messages name a file.

        Installed packages have links with the same names as their programs. So a name without a dot counts only for
        files directly in a folder for answers, or if the messages contain it together with the name of its folder.
        """
        folder, _, base = path.rstrip("/").rpartition("/")
        if base not in self.names and (_NAME.fullmatch(base) or base not in self.text):
            return False
        if "." in base or folder in ("", WORKSPACE, *SCRATCH):
            return True
        parent = folder.rpartition("/")[2]
        return parent not in _OF_PROGRAMS and any(f"{each}/{base}" in self.text for each in (parent, "~"))

    def directories(self, paths: Iterable[str]) -> set[str]:
        """Return the directories that contain a named file of `paths` or a folder where an answer belongs."""
        found = {WORKSPACE, *SCRATCH}
        for path in [*found, *filter(self.has, paths)]:
            found.update(map(str, PurePosixPath(path).parents))
        return found


def _is_of_kernel(path: str) -> bool:
    return is_below(path, _OF_KERNEL) and not is_below(path, SCRATCH)


def _names_reversed(path: str) -> list[str]:
    """Return the names in a path, the last one first."""
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


class _Places:
    """Looks up where links lead, with one call per directory and no process."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._known: dict[str, Mapping[str, FileInfo]] = {}

    async def _entry(self, path: str) -> FileInfo | None:
        folder, _, name = path.rpartition("/")
        if folder not in self._known:
            try:
                listed = await self._slot.list_dir(folder or "/")
            except InfraError:
                raise
            except OSError:
                listed = []
            self._known[folder] = {each.path.rpartition("/")[2]: each for each in listed}
        return self._known[folder].get(name)

    async def look_until(self, end_s: float, links: Sequence[str]) -> dict[str, tuple[str, str, str]]:
        """Return what `look` returns for as many of the first links as time permits."""
        found: dict[str, tuple[str, str, str]] = {}
        for link in links:
            if time.monotonic() > end_s:
                break
            found[link] = await self.look(link)
        return found

    async def look(self, link: str) -> tuple[str, str, str]:
        """Return the kind of a link's target (file, dir or none), where the link ends, and where it leads first. A path
        of the kernel is not looked up, because it may differ in each process."""
        own = await self._entry(link)
        first = own.target if own is not None else ""
        here, ahead, hops, kind = "/", _names_reversed(link), 0, "dir"
        while ahead:
            part = ahead.pop()
            if part == "..":
                here = dirname(here)
                continue
            path = join(here, part)
            whole = normpath(join(path, *ahead[::-1]))
            if _is_of_kernel(whole):
                return "none", whole, first
            entry = await self._entry(path)
            # without namespaces, the workspace is a link that each process sees differently, or is not listed
            if path == WORKSPACE and (entry is None or entry.target.startswith("/proc/")):
                here = path
                continue
            if entry is None or hops == _MOST_HOPS:
                return "none", first, first
            if entry.kind == "symlink":
                hops += 1
                ahead += _names_reversed(entry.target)
                here = "/" if entry.target.startswith("/") else here
                continue
            here, kind = path, entry.kind
            if kind != "dir":
                return ("none", first, first) if ahead or kind != "file" else (kind, here, first)
        return kind, here, first


async def detach_links(
    slot: Slot, task: Task, changes: Sequence[Change], private: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Replace each link of the agent that would make a file of the work and a file of the check one file. Return the
    paths of these links, and of those that were removed because they could not be examined in time.

    `changes` are the changes that the grading slot shows, without paths that are too long to open. `private` are
    directories of the check, to which no link may lead.
    """
    commands, named = _Commands(slot), NamedFiles(task)
    late = await _detach_hard_links(commands, named, [each for each in changes if each.kind == "file"])
    links = [each.path for each in changes if each.kind == "symlink"]
    with_answers = named.directories(each.path for each in changes if each.kind in ("file", "symlink"))
    links.sort(key=lambda path: not named.has(path))  # the least wanted links come last
    found = await _Places(slot).look_until(commands.end_s, links)
    late += links[len(found) :]
    asked = named.passed({link: next_ for link, (_, _, next_) in found.items()})
    wrong = [
        link
        for link, (kind, end, _) in found.items()
        if is_below(normpath(join(dirname(link), end)), private) or named.equates(link, kind, end, with_answers, asked)
    ]
    # A link to a directory around it would be copied into itself without end.
    leading = [link for link in wrong if found[link][0] == "file" or not is_below(link, (found[link][1],))]
    leading = [link for link in leading if found[link][0] != "none"]
    await commands.over([*late, *{*wrong}.difference(leading)], *_REMOVING, limit_s=LIMIT_S)
    if leading and not await commands.over(leading, *_DETACHING):
        copies = {f"{dirname(link)}/.palaestra-copy" for link in leading}
        await commands.over(copies, "rm", "-rf", "--", limit_s=LIMIT_S)
        await commands.over(leading, *_REMOVING, limit_s=LIMIT_S)
        late += leading
    unseen = {*late}
    return tuple(link for link in wrong if link not in unseen), tuple(late)


class _Commands:
    """Runs commands over the agent's files until the time limit of the examination, which begins now."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.end_s = time.monotonic() + LIMIT_S

    async def over(self, paths: Iterable[str], *argv: str, limit_s: float = 0.0) -> bool:
        """Run a command with these paths as its last arguments, and return whether it ended in time. Without paths, no
        command runs, because a process takes longer than the rest of most examinations."""
        told = b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)
        if not told:
            return True
        limit_s = limit_s or max(1.0, self.end_s - time.monotonic())
        done = await self.slot.execute(["xargs", "-0", *argv], cwd="/", stdin=told, timeout_s=limit_s, spill=False)
        return not done.metadata.get("timeout")


async def _detach_hard_links(commands: _Commands, named: NamedFiles, changed: Sequence[Change]) -> list[str]:
    """Replace named files with hard links by copies. Returns the files that were removed because of the time limit."""
    # A task about hard links may have a check that counts them, so copies would make honest work fail.
    if _ABOUT_HARD_LINKS.search(named.text):
        listed = "\n".join(each.path for each in changed if "\n" not in each.path)
        relink = ["/bin/sh", "-c", _RELINK]
        told = listed.encode("utf-8", "surrogateescape") + b"\n"
        await commands.slot.execute(relink, cwd="/", stdin=told, timeout_s=LIMIT_S, spill=False)
        return []
    files = [each.path for each in changed if not each.single and named.has(each.path)]
    if await commands.over(files, "/bin/sh", "-c", _HARD.format('/bin/sh -c "$0" sh'), _DETACH):
        return []
    await commands.over(files, "/bin/sh", "-c", _HARD.format("rm -f --"), "sh", limit_s=LIMIT_S)
    return files
