"""Separates the files that a check writes from files of the work that the agent has linked to them.

A check often writes the expected result to a file of its own and compares the work with that file. If one of the two is
a link to the other, the work equals whatever the check wrote. So before a check, this module examines the agent's links
between a file that the task's messages name and a file that they do not name. Each such link is replaced by a copy of
its target. A link is removed if its target is missing, is neither a file nor a directory, or contains the link. A named
file with hard links becomes a copy. A symbolic link that the messages name stays if the messages mention links, and
hard links stay if the messages mention these. Links into `/proc`, `/sys` and `/dev` are removed, unless the messages
name the link or it is a log, and ask for its target. A link to a file below `/usr` stays: no check writes there.

Not covered: messages that name both files or neither, and a check that runs programs of the work, which can copy its
files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import dirname, join, normpath

from palaestra.rollouts.grading.tampering import SCRATCH, batches, is_below, text_of_task
from palaestra_slots.core.errors import GraderError
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import WORKSPACE, Change, Slot

_NAME = re.compile(r"[\w.+@%-]+")
_ABOUT_LINKS = re.compile(r"\b(?:sym|hard)?links?\b|\blinked\b|\bln\b|\bsymbolic", re.IGNORECASE)
_ABOUT_HARD_LINKS = re.compile(r"\bhard[ -]?link|\bln\b|\binodes?\b", re.IGNORECASE)
_KERNEL_FILES = re.compile(r"/dev/(null|zero|u?random|stdout|stderr)|/proc/(?:self/)?(mounts)|.*/fd/([12])")
"""Files of the kernel that tasks ask for. None of them leads a check to a file of its own."""
_OUT, _ERRORS = "stdout|standard output", "stderr|standard error"
_ASKS = {"null": "null|discard|mask", "stdout": _OUT, "1": _OUT, "stderr": _ERRORS, "2": _ERRORS}

_OF_PROGRAMS = frozenset({"bin", ".bin"})
"""Folders in which packages put links to programs."""

_LOOK = """\
exec 2> /dev/null
for each; do
  if [ -f "$each" ]; then kind=file; elif [ -d "$each" ]; then kind=dir; else kind=none; fi
  next=$(readlink -- "$each")
  if [ $kind = none ]; then end=$next; else end=$(readlink -f -- "$each"); fi
  for shown in $kind "$end" "$next"; do printf %s "$shown" | tr '\\n' '?'; echo; done
done
"""
"""Prints three lines per link: the kind of its target, where it ends, and where it leads first. It prints no error
messages, because each would be a further line."""

_DETACH = """\
for each; do
  copy="${each%/*}/.palaestra-copy"
  rm -rf -- "$copy"
  end=$(readlink -f -- "$each")
  case $end in
    /dev/shm | /dev/shm/*) ;;
    /proc | /proc/* | /sys | /sys/* | /dev | /dev/*) rm -f -- "$each" ;;
  esac
  if [ -d "$each" ]; then case $each in "${end%/}"/*) rm -f -- "$each" ;; esac; fi
  if [ -f "$each" ] || [ -d "$each" ]; then cp -aH -- "$each" "$copy"; fi
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
_DETACH_S = 300.0
_MOST_LINKS = 20_000
"""The maximum number of links that are examined, because each takes a process. Further ones are removed."""


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


async def detach_links(
    slot: Slot, task: Task, changes: Sequence[Change], private: Collection[str] = ()
) -> tuple[str, ...]:
    """Replace each link of the agent that would make a file of the work and a file of the check one file. Return the
    paths of these links.

    `changes` are the changes that the grading slot shows, without paths that are too long to open. `private` are
    directories of the check, to which no link may lead. Raises `GraderError` if the links cannot be examined.
    """
    replaced: list[str] = []
    named = NamedFiles(task)
    hard = ("-prune", "-type", "f", "-links", "+1", "-exec", *_DETACHING, "{}", ";")
    files = [each.path for each in changes if each.kind == "file"]
    # A task about hard links may have a check that counts them, so copies would make honest work fail.
    if _ABOUT_HARD_LINKS.search(named.text):
        listed = "\n".join(path for path in files if "\n" not in path).encode("utf-8", "surrogateescape")
        await slot.execute(["/bin/sh", "-c", _RELINK], cwd="/", stdin=listed + b"\n", timeout_s=_DETACH_S, spill=False)
        files = []
    for some in batches([path for path in files if named.has(path)]):
        await slot.execute(["find", *some, *hard], cwd="/", timeout_s=_DETACH_S, spill=False)
    # Links that the messages name come first, so that those beyond the limit, which are removed, are the least wanted.
    links = sorted((each.path for each in changes if each.kind == "symlink"), key=lambda path: not named.has(path))
    with_answers = named.directories(each.path for each in changes if each.kind in ("file", "symlink"))
    found: dict[str, tuple[str, str, str]] = {}
    for some in batches(links[:_MOST_LINKS]):
        looked = await slot.execute(
            ["/bin/sh", "-c", _LOOK, "sh", *some], cwd="/", timeout_s=_DETACH_S, max_output_bytes=1 << 22, spill=False
        )
        lines = looked.output.split("\n")[:-1]
        # The script may have timed out or printed too much. Unexamined links must not count as harmless.
        if len(lines) != 3 * len(some):
            raise GraderError(f"the links of the work could not be examined: {looked.error or looked.output[-500:]!r}")
        found |= zip(some, zip(lines[::3], lines[1::3], lines[2::3], strict=True), strict=True)
    asked = named.passed({link: next_ for link, (_, _, next_) in found.items()})
    wrong = [
        link
        for link, (kind, end, _) in found.items()
        if is_below(normpath(join(dirname(link), end)), private) or named.equates(link, kind, end, with_answers, asked)
    ]
    for some in batches(wrong):
        await slot.execute([*_DETACHING, *some], cwd="/", timeout_s=_DETACH_S, spill=False)
    replaced += wrong
    for some in batches(links[_MOST_LINKS:]):
        await slot.execute(["rm", "-f", "--", *some], cwd="/", timeout_s=_DETACH_S, spill=False)
        replaced += some
    return tuple(replaced)
