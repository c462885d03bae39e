"""Removes the agent's git settings with which git would start programs of the agent's choice during a check.

Git starts programs that the settings of a repository name, even for `git status`: `core.fsmonitor`, filters, external
diffs, hooks. So before a check, each settings file that the agent changed keeps only settings from `_HARMLESS`, and
hooks that the agent changed are removed. A setting or hook stays if the task's messages name it (`core.hooksPath`,
`post-receive`, or just "hook"), if it is one of the task's `programs`, or if the task declares the path of the file. A
`.gitconfig` stays if the messages name it.

A directory counts as a repository if it has an entry `HEAD`, or `objects` and `refs`, whatever the directory's own
name, because a `.git` file may lead to any directory. A directory whose name ends in `.git` counts too, because the
check may run `git init` there. A file with the name of a hook is removed from any directory, because a prepared
`core.hooksPath` may name that directory.

Not covered: settings that programs of the work write while the check runs, files that a prepared setting includes or
starts, and the commands of an unfinished rebase if the check continues that rebase. Sources:
https://git-scm.com/docs/gitrepository-layout, https://git-scm.com/docs/git-config, https://git-scm.com/docs/githooks
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from palaestra.core.types import Task
from palaestra.rollouts.grading.tampering import batches, is_below, text_of_task
from palaestra.sandbox.slot import Change, Slot

_SETTINGS_FILES = frozenset({"config", "config.worktree"})
_USER_FILE = ".gitconfig"
_USER_SETTINGS = (f"/{_USER_FILE}", "/.config/git/config")
_ABOVE_USER_SETTINGS = ("/.config", "/.config/git")
_REPOSITORY = ".git"
_HOOKS = "hooks"
_HOOK_NAMES = frozenset(
    {
        *("applypatch-msg", "commit-msg", "fsmonitor-watchman", "post-applypatch", "post-checkout", "post-commit"),
        *("post-index-change", "post-merge", "post-receive", "post-rewrite", "post-update", "pre-applypatch"),
        *("pre-auto-gc", "pre-commit", "pre-merge-commit", "pre-push", "pre-rebase", "pre-receive"),
        *("prepare-commit-msg", "proc-receive", "push-to-checkout", "reference-transaction", "sendemail-validate"),
    }
)
"""The names of git's hooks. The hook `update` is missing, because other files and ordinary sentences have this word."""
_SAMPLE = ".sample"
"""The ending of the examples that `git init` writes; git never starts a hook with this name."""

_MOST_BYTES = 1 << 16
"""The size from which a settings file is removed instead of read."""

_HARMLESS: Mapping[str, frozenset[str]] = {
    "core": frozenset(
        {
            *("abbrev", "attributesfile", "autocrlf", "bare", "commentchar", "compression", "eol", "excludesfile"),
            *("filemode", "ignorecase", "logallrefupdates", "precomposeunicode", "quotepath"),
            *("repositoryformatversion", "safecrlf", "sharedrepository", "sparsecheckout", "sparsecheckoutcone"),
            *("symlinks", "whitespace"),
        }
    ),
    "branch": frozenset({"description", "merge", "rebase", "remote"}),
    "color": frozenset({"ui"}),
    "diff": frozenset({"algorithm", "renames"}),
    "extensions": frozenset({"objectformat", "partialclone", "refstorage", "worktreeconfig"}),
    "fetch": frozenset({"prune"}),
    "init": frozenset({"defaultbranch"}),
    "merge": frozenset({"conflictstyle", "ff"}),
    "pull": frozenset({"ff", "rebase"}),
    "push": frozenset({"autosetupremote", "default", "followtags"}),
    "receive": frozenset({"denycurrentbranch", "denydeletes", "denynonfastforwards"}),
    "remote": frozenset(
        {"fetch", "mirror", "partialclonefilter", "promisor", "prune", "push", "pushurl", "tagopt", "url"}
    ),
    "rerere": frozenset({"autoupdate", "enabled"}),
    "safe": frozenset({"directory"}),
    "status": frozenset({"showuntrackedfiles"}),
    "submodule": frozenset({"active", "branch", "path", "url"}),
    "uploadpack": frozenset({"allowanysha1inwant", "allowfilter"}),
    "user": frozenset({"email", "name"}),
}
"""Settings, by section, with which git starts no program, in lower case. All of the section `alias` are harmless too,
because git's own commands have precedence over an alias."""

_WORD = re.compile(r"[\w.-]+")
_SECTION = re.compile(r'\s*\[([A-Za-z0-9-]+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?\]\s*')
_SETTING = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*(?:=(?:[^\\]|\\[\\\"nt])*)?")
_COMMENT = re.compile(r"\s*(?:[#;].*)?")

_IN_REPOSITORY = """\
is() { [ -e "$1" ] || [ -h "$1" ]; }
for each; do
  if [ -h "$each" ] && [ -e "$each/commondir" ]; then echo no
  elif is "$each/HEAD" || { is "$each/objects" && is "$each/refs"; }; then echo yes
  else echo no; fi
done
"""
_REMOVE = """\
rm -rf -- "$@" || for each; do chmod u+rwx -- "${each%/*}"; rm -rf -- "$each"; done
"""
_COMMAND_S = 300.0
_MOST_READ = 1000
"""The maximum number of settings files that are read. Further ones are removed."""


def repository_of(change: Change) -> str | None:
    """Return the directory that would be the repository of a settings file or hook; None if the path of the change
    belongs to neither.

    A link to a directory with settings, and a file that names the repository's other half, are returned themselves,
    because git uses or makes a repository or settings where they lead.
    """
    if change.kind not in ("file", "symlink"):
        return None
    path, link = change.path, change.kind == "symlink"
    folder, _, name = path.rpartition("/")
    if (link and path.endswith((_REPOSITORY, *_ABOVE_USER_SETTINGS))) or path.endswith(f"{_REPOSITORY}/commondir"):
        return path
    if name in _SETTINGS_FILES or path.endswith(_USER_SETTINGS) or (link and name == _HOOKS):
        return folder
    above, _, last = folder.rpartition("/")
    if last == _HOOKS and not name.endswith(_SAMPLE):
        return above
    return folder if name in _HOOK_NAMES else None


async def remove_git_settings(slot: Slot, task: Task, changes: Sequence[Change]) -> tuple[str, ...]:
    """Remove the agent's hooks, and settings that are not harmless, from the repositories of a grading slot.

    `changes` are the changes that the slot shows. Returns the paths of the files that were changed or removed.
    """
    places = {change.path: place for change in changes if (place := repository_of(change)) is not None}
    repositories = await _repositories(slot, sorted({*places.values()}))
    named = frozenset(word.rstrip(".").lower() for word in _WORD.findall(text_of_task(task)))
    words = named.union(word.lower() for word in task.programs)
    gone, read, rewritten = [], 0, []
    for path, place in places.items():
        name, of_user = path.rpartition("/")[2], path.endswith(_USER_SETTINGS)
        if path == place:
            if place not in repositories:
                gone.append(path)
            continue
        if not (place in repositories or place.endswith(_REPOSITORY) or of_user or name in _HOOK_NAMES):
            continue
        if name == _USER_FILE and name in named:
            continue
        if is_below(path, [each for each in task.paths if each.startswith(f"{place}/")]):
            continue
        if name not in _SETTINGS_FILES and not of_user:
            if words.isdisjoint({"hook", _HOOKS, *_HOOK_NAMES.intersection({name})}):
                gone.append(path)
            continue
        read += 1
        entry = await slot.stat(path) if read <= _MOST_READ else None
        if entry is None or entry.kind != "file" or entry.size > _MOST_BYTES:
            gone.append(path)
        elif await _rewrite(slot, path, words):
            rewritten.append(path)
    for some in batches(gone):
        await slot.execute(["/bin/sh", "-c", _REMOVE, "sh", *some], cwd="/", timeout_s=_COMMAND_S, spill=False)
    return (*rewritten, *gone)


async def _repositories(slot: Slot, places: Sequence[str]) -> set[str]:
    """Return those of the directories that git may take for a repository."""
    found: set[str] = set()
    for some in batches(places):
        argv = ["/bin/sh", "-c", _IN_REPOSITORY, "sh", *some]
        looked = await slot.execute(argv, cwd="/", timeout_s=_COMMAND_S, spill=False)
        lines = looked.output.split() if looked.success else ["yes"] * len(some)
        found.update(place for place, line in zip(some, lines, strict=False) if line == "yes")
    return found


async def _rewrite(slot: Slot, path: str, words: Collection[str]) -> bool:
    """Remove the settings that are not harmless from a file, and return whether there were any."""
    text = (await slot.read_bytes(path, max_bytes=_MOST_BYTES)).decode("utf-8", "surrogateescape")
    kept = harmless_settings(text, words)
    if kept == text:
        return False
    await slot.remove(path)  # the file may have hard links, which keep its content
    await slot.write_bytes(path, kept.encode("utf-8", "surrogateescape"), mode=0o644)
    return True


def harmless_settings(text: str, words: Collection[str] = ()) -> str:
    """Return the text of a settings file without the settings that are neither harmless nor one of `words`.

    Git must read the result as this function does, so a line stays only if it is a whole comment, section name or
    setting: no setting that continues on the next line, and none on the line of a section's name.
    """
    kept, section, within = [], "", ""
    for line in text.split("\n"):
        if match := _SECTION.fullmatch(line):
            section, within = match[1].lower(), "" if match[2] is None else f".{match[2].lower()}"
        elif match := _SETTING.fullmatch(line):
            key = match[1].lower()
            harmless = section == "alias" or key in _HARMLESS.get(section, ())
            if not harmless and f"{section}{within}.{key}" not in words:
                continue
        elif not _COMMENT.fullmatch(line):
            section = "" if line.lstrip().startswith("[") else section
            continue
        kept.append(line)
    return "\n".join(kept)
