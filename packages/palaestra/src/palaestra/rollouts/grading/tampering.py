"""The table of changes that a sealed check does not see, because with them the work would decide its own grade.

A check sees everything that the agent left, with three exceptions:

| exception | files | label |
|---|---|---|
| what the image brought to run programs stays as prepared | programs, libraries, modules and their parts: existing
  files below `/usr`, in the directories of PATH, in directories such as `bin` and `lib` outside of the workspace, and
  in installed packages; the loader's own files | `programs_replaced` |
| no addition stands in for one of them by name | new programs in a directory of PATH, libraries in a directory of the
  loader or of LD_LIBRARY_PATH, modules in Python's own directories, in PYTHONPATH and in temporary directories, and
  packages, if the image has the name and the addition could be found first; files that Python runs on start-up |
  `programs_shadowed` |
| programs of a check read no settings of the agent | files in home directories whose names begin with a dot, files in
  `~/.config` and `~/.jq`, and `~/.NAME/config` | `home_settings` |

None holds for a path that the task declares or that its messages name, for the target of such a path in the original
root, or for a program or package that the task declares or asks to install, to repair or, for the third, to configure.
An environment can except what its reference solution changes too, and all settings of a program of which the solution
changes some. Each exception becomes a label, so that no score differs without a stated cause.

Invariant: the decision depends on the paths and kinds of the changes, on the names in the original root and on the
task, but never on the content of a file.

Not covered: search paths of interpreters other than Python, search paths that a check sets, and modules in the
directory in which a check starts Python. An environment whose check runs code of the workspace must isolate that code
from the check (`suites/grading/harness.py` does). Sources: ld.so(8), ldconfig(8), Python's `site` and `getpath`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import join, normpath
from typing import TypeAlias

from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import Change, Slot, View

REPLACED, SHADOWED, HOME_SETTINGS = "programs_replaced", "programs_shadowed", "home_settings"
STARTUP = "startup_files"
"""Files inside of packages that Python runs on start-up only if a `.pth` file adds their directory to its path."""
CACHES = ""
"""In place of a label: files that programs write by themselves. Their absence is not worth a label."""

CACHE = "/etc/ld.so.cache"
"""The cache in which the loader of the GNU C library first looks up a library's name. A check rebuilds it."""

SCRATCH = ("/tmp", "/dev/shm")  # noqa: S108  in the slot
"""Writable directories that are not in a slot's layers."""

CARRIED = "/.palaestra-carried"
"""The directory of a sealed workspace with copies of the files in `SCRATCH`."""

_USUAL_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""The order of PATH in which images, login shells and `sudo` look for programs."""
PROGRAM_DIRECTORIES = frozenset(_USUAL_PATH).union(
    ("/root/bin", "/root/.local/bin", "/usr/games", "/usr/local/games", "/snap/bin", "/etc/alternatives")
)
"""Directories in which shells look for programs, in addition to the slot's own PATH."""

_PROGRAMS = re.compile(
    r"/(?:usr|s?bin|lib(?:32|64|x32)?|etc/alternatives)(?:/.*)?"
    r"|/(?!var/|etc/|proc/|tmp/|dev/)(?:.+/)?(?:s?bin|lib(?:32|64|exec)?|include)/.+",
    re.DOTALL,
)
"""Places for programs, libraries, modules and their parts."""

_LOADER = re.compile(
    r"/etc/(?:ld\.so\.preload|ld-musl-[^/]*\.path|nsswitch\.conf|ssl/openssl\.cnf)|.*/gconv/.*", re.DOTALL
)
"""Files that make the loader load libraries into every program, or into programs that look up a user or a cipher."""

_LIBRARY = re.compile(r"lib.+\.so(?:\..*)?|ld-.*\.so(?:\..*)?", re.DOTALL)
_LIBRARIES = re.compile(
    r"(/(?:usr/)?(?:local/)?lib(?:32|64|x32)?(?:/[\w-]+-linux-\w+)?)"
    r"(?:/(?:glibc-hwcaps|tls|haswell|avx512_1|x86_64)(?:/.*)?)?",
    re.DOTALL,
)
"""A default directory of the loader, and the directories below it that the loader prefers on some machines."""
_MULTIARCH = re.compile(r"[\w]+-linux-\w+")

_STANDARD = re.compile(r"/.*lib(?:32|64)?/python3\.\d+(?:/lib-dynload)?")
SITE = re.compile(r"(.*/(?:site-packages|dist-packages))/([^/]+).*", re.DOTALL)
_STARTS = re.compile(
    r".*/(?:sitecustomize|usercustomize)(?:/__init__)?(?:\.[\w-]+)*\.(?:py|pyc|so)"
    r"|(?:/|/usr|/usr/local|/root/\.local)?(?:/s?bin)?/(?:pyvenv\.cfg|pybuilddir\.txt)|.*/lib(?:32|64)?/python\d+\.zip"
    r"|.*/s?bin/lib(?:32|64)?/python.*",
    re.DOTALL,
)
"""Files that Python runs on start-up, and places in which it looks for another standard library first."""
_HOME = re.compile(
    r"(?:/root|/home/[^/]+)/\.(?!bash|profile|z|.*hist|viminfo|wget-hsts|gitignore)"
    r"(?:(?:config|jq)/([^/]+).*|([^/]+?)(?:/config(?:\.\w+)?)?)",
    re.DOTALL,
)
"""Settings in a home directory that programs read when they start, whatever they do, with the name of the program.
Start-up files of shells are left to the checks that load them, and histories are no settings."""
_ETC = re.compile(r"/etc/([^/]+)(?:/.*)?", re.DOTALL)
_CONFIGURES = re.compile(
    r"(?<![^\W_])(?:re)?(?:config|setting|set\b|setup|point|prefer|regist|global|alias|default|customi[sz]|dotfile|home\b)",
    re.I,
)
_VERSION = re.compile(r"/python(3\.\d+)/")
_MODULE = re.compile(r"(\w+)(?:/__init__)?(?:\.[\w-]+)*\.(?:py|pyc|so)")
_VENV_PROGRAM = re.compile(r"(?:python|pip)[\d.]*")

_INSTALLS = re.compile(
    r"\b(?:re|un)?(?:install|upgrade|downgrade|replace)(?:s|d|ed|ing)?\s+((?:[^\s.;]+\s+){0,3}[^\s;]+)", re.IGNORECASE
)
"""A request to install something, and the four words that follow."""
_BROKEN = re.compile(
    r"\b(?:fix|repair|debug|correct|patch|rewrit|bug|broken|crash|fail|wrong|rename|remov|delet)", re.I
)
_COMMANDS = re.compile(
    r"\b(?:fix|repair|debug|correct|patch|rewrite|rename|remove|delete|commands?|programs?|scripts?|tools?|utility|executable)"
    r"(?:\s+(?:the|our|a|bug|bugs|in|command|program|script|tool|called|named|broken)){0,4}[\s:]+[`'\"*]+([\w.+-]+)[`'\"*]"
    r"|[`'\"*]([\w.+-]+)[`'\"*]+\s+(?:command|program|script|tool|utility|executable)\b|(?<!\S)([\w.+-]+)(?=\s+command\b)",
    re.I,
)
"""A command that a text asks to repair or rename. Programs of the distribution do not count, which are mere tools."""
_OF_DISTRIBUTION = re.compile(r"/(?:usr/(?!local/)|s?bin/|lib).*", re.DOTALL)
_ABOUT_TIME_ZONE = re.compile(r"\btime[ -]?zone|localtime", re.I)
_PATH = re.compile(r"(?<![\w.:/~$}>-])(?:/[\w.+@%-]+)+")
_TOO_WIDE = frozenset(
    {
        *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root"),
        *("/run", "/sbin", "/srv", "/sys", "/usr", "/usr/bin", "/usr/include", "/usr/lib", "/usr/local"),
        *("/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/sbin", "/usr/share", "/usr/src", "/var"),
        *("/var/lib", "/var/cache", "/etc/alternatives", "/root/.local", "/root/.local/bin"),
    }
)
"""Directories that texts often mention although the task is not about everything in them."""

_BY_THE_WAY = re.compile(
    r"/(?:\.cache|\.npm|__pycache__|\.pytest_cache|\.(?:bash|python|node_repl)_history|\.wget-hsts|\.viminfo)(?:/|$)"
    r"|^/var/(?:cache|log|lib/(?:apt|dpkg))(?:/|$)|^/etc/ld\.so\.cache$"
)

_AT_ONCE = 200
"""The maximum number of paths per command."""

Names: TypeAlias = Callable[[str], Awaitable[frozenset[str]]]
"""Returns the names in a directory of the root as it was before the agent started; empty for a missing directory."""


def names_in(open_root: Callable[[], Awaitable[Slot]]) -> Names:
    """Return a `Names` function that opens an unused slot when it is first called, and lists each directory once."""
    known: dict[str, frozenset[str]] = {}
    opened: list[Slot] = []

    async def names(directory: str) -> frozenset[str]:
        if directory not in known:
            if not opened:
                opened.append(await open_root())
            try:
                entries = await opened[0].list_dir(directory)
            except InfraError:
                raise
            except OSError:
                entries = []
            known[directory] = frozenset(entry.path.rpartition("/")[2] for entry in entries)
        return known[directory]

    return names


def text_of_task(task: Task) -> str:
    """Return the text of a task's messages, with each part of a message on a line of its own."""
    contents = [message.get("content") for message in task.messages()]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def paths_in(text: str) -> set[str]:
    """Return the absolute paths that a text names, without those that texts often mention in passing."""
    return {path.rstrip(".") for path in _PATH.findall(text)} - _TOO_WIDE


def batches(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the paths in parts that fit into one command, because the kernel limits a command's arguments."""
    return (paths[start : start + _AT_ONCE] for start in range(0, len(paths), _AT_ONCE))


def intended(paths: Iterable[str]) -> Iterator[str]:
    """Yield the changed paths without those that ordinary commands change by the way, such as caches."""
    return (path for path in paths if not _BY_THE_WAY.search(path))


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Return whether a path is one of these paths or is below one of them."""
    return any(path == top or top == "/" or path.startswith(f"{top.rstrip('/')}/") for top in tops)


def changes_in(view: View, changes: Iterable[Change]) -> list[Change]:
    """Return the changes that a view shows, with the paths that they have while the check runs."""
    shown = [each for each in changes if is_below(each.path, view.only) and not is_below(each.path, view.without)]
    return [Change(each.path.removeprefix(CARRIED), each.kind, each.opaque, single=each.single) for each in shown]


def _distribution(name: str) -> str:
    """Return the package name of a file or directory in a site directory."""
    return re.split(r"[-.]", name, maxsplit=1)[0].lower()


def program_of(path: str) -> str:
    """Return the program whose settings are in a file of a home directory or of `/etc`; empty for other files. The
    files of a program have one name, such as `sqlite` for `~/.sqliterc` and `~/.config/sqlite3/sqliterc`."""
    found = _HOME.fullmatch(path) or _ETC.fullmatch(path)
    return "" if found is None else _stem(next(filter(None, found.groups()))).rstrip("0123456789").lower()


def programs_of(paths: Iterable[str]) -> set[str]:
    """Return the programs whose settings are among these paths."""
    return {program_of(path) for path in paths} - {""}


def _stem(name: str) -> str:
    return re.sub(r"(?:rc|config|conf|_profile|\W.*)+$", "", name)


class Rule:
    """Applies the table.

    `names` lists the original root, and is not called if the paths and kinds of the changes decide. `workspace` is the
    agent's working directory. What is below the paths `named`, and the `programs`, may be replaced. `text` is that of
    the task's messages. `env` are the variables with which the check's programs run.
    """

    def __init__(
        self,
        names: Names,
        workspace: str,
        *,
        named: Collection[str] = (),
        programs: Collection[str] = (),
        text: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._workspace, self._text, self._env = names, workspace, text, env or {}
        above = [workspace, *map(str, PurePosixPath(workspace).parents)]
        # Tasks ask for a time zone in words, and this file is where a system keeps it.
        zone = {"/etc/localtime"} if _ABOUT_TIME_ZONE.search(text) else set[str]()
        self.named = tuple(({*named} | paths_in(text) | zone).difference(above))
        """The paths that the task declares or names."""
        self._repaired = {name for found in _COMMANDS.findall(text) for name in found if name and _BROKEN.search(text)}
        # What the task asks to install, the agent may put anywhere that its installer chooses.
        words = [word for found in _INSTALLS.findall(text) for word in found.split()]
        self._wanted = frozenset(word.strip("`'\",.()*") for word in words).union(programs)
        self._searched = {
            name: frozenset(normpath(join(workspace, each)) for each in self._env.get(name, "").split(":") if each)
            for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
        }
        self._directories = PROGRAM_DIRECTORIES | self._searched["PATH"]  # in which programs are found
        own = [normpath(join(workspace, each)) for each in self._env.get("PATH", "").split(":") if each]
        self._orders = (own, _USUAL_PATH) if own else (_USUAL_PATH,)
        self._packages: dict[str, frozenset[str]] | None = None

    async def left_out(self, changes: Iterable[Change]) -> dict[str, str]:
        """Return the paths of `changes` to leave out of the graded view, each with its label."""
        found: dict[str, str] = {}
        for change in changes:
            # An opaque directory of overlayfs hides all entries of the image's directory below it, so it is a change by
            # itself.
            if change.kind == "dir" and not change.opaque:
                continue  # its entries are separate changes
            label = await self._label(change)
            if label is not None:
                found[change.path] = label
            found |= dict.fromkeys(self._hidden_by(change), REPLACED)
        return found

    async def _label(self, change: Change) -> str | None:
        path = str(PurePosixPath("/", change.path))
        folder, _, name = path.rpartition("/")
        if path == CACHE:
            return CACHES
        # Before the rules, because a task may ask for the very file that would be a hack elsewhere.
        if self._is_named(path, name):
            return None
        if _LOADER.fullmatch(path):
            return REPLACED
        if change.kind in ("file", "symlink", "deleted") and self._is_home_setting(path):
            return HOME_SETTINGS
        if "/__pycache__/" in path and self._is_brought(path):
            return CACHES
        site = SITE.fullmatch(path)
        if self._runs_at_start(path):
            return await self._of_start(path, change.kind)
        if site and not self._is_work(path):
            return await self._of_package(site[1], site[2], path)
        if self._is_brought(path) and await self._has(path):
            return REPLACED
        # A directory alone runs nothing, and what is removed stands in for nothing.
        if change.kind not in ("file", "symlink"):
            return None
        return SHADOWED if await self._stands_in(path.removeprefix(CARRIED), folder, name, change.kind) else None

    def _is_home_setting(self, path: str) -> bool:
        """Return whether the path is for settings of a program that the messages do not ask to configure."""
        settings = _HOME.fullmatch(path)
        return settings is not None and not self._is_configured(*settings.groups(""))

    def _runs_at_start(self, path: str) -> bool:
        """Return whether every Python of the check would run this file when it starts."""
        if not _STARTS.fullmatch(path):
            return False
        # Python searches the workspace only for a program in it, but PYTHONPATH and the site of the user always.
        return not self._is_work(path) or "PYTHONPATH" in self._env or ".local" in path.split("/")

    def _is_inside_package(self, path: str, entry: str) -> bool:
        """Return whether a module for Python's start-up is inside of a package `entry`, where Python does not look."""
        customizes = "customize" in path.rpartition(f"/{entry}/")[2] and "customize" not in entry
        return customizes and not is_below(path, self._searched["PYTHONPATH"])

    def _is_work(self, path: str) -> bool:
        return self._workspace != "/" and is_below(path, (self._workspace,))

    def _is_brought(self, path: str) -> bool:
        """Return whether an existing file of this path is what the image brought to run programs."""
        if self._is_work(path):
            return False
        return _PROGRAMS.fullmatch(path) is not None or is_below(path, self._directories)

    def _is_named(self, path: str, name: str) -> bool:
        """Return whether the task declares or names a path, or a program or package of this name. The workspace and the
        directories above it do not count."""
        if is_below(path, self.named):
            return True
        if not (_OF_DISTRIBUTION.fullmatch(path) or self._repaired.isdisjoint(path.split("/"))):
            return True
        site = SITE.fullmatch(path)
        wanted = {name, _distribution(site[2])} if site else {name}
        return not wanted.isdisjoint(self._wanted)

    def _is_configured(self, program: str, name: str) -> bool:
        """Return whether the messages ask to configure the program with these settings."""
        named = re.search(rf"(?<![^\W_]){re.escape(_stem(program or name))}", self._text, re.IGNORECASE) is not None
        return f".{name or program}" in self._text or (named and _CONFIGURES.search(self._text) is not None)

    def _hidden_by(self, change: Change) -> tuple[str, ...]:
        """Return the directories of PATH that are hidden because this change removed or replaced a directory above
        them."""
        places = sorted(each for each in self._searched["PATH"] if not self._is_work(each))
        return tuple(place for place in places if place.startswith(f"{change.path}/"))

    async def _has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in await self._names(folder or "/")

    async def _of_start(self, path: str, kind: str) -> str:
        site = SITE.fullmatch(path)
        if site and self._is_inside_package(path, site[2]) and not await self._has(path):
            return STARTUP
        return SHADOWED if kind != "deleted" else REPLACED

    async def _of_package(self, site: str, entry: str, path: str) -> str | None:
        """Return the label of a change to a package that the image has, in this or another site directory of its
        interpreters. The whole package stays as prepared, since a mixture of two versions would not work."""
        if not (re.match(r"/usr/|.*/\.local/lib/", site) or await self._has(site)):
            return None  # of an interpreter that the agent installed
        if _distribution(entry) in await self._image_packages(site) or entry in await self._names(site):
            return REPLACED if await self._has(path) else SHADOWED
        return None

    async def _stands_in(self, path: str, folder: str, name: str, kind: str) -> bool:
        """Return whether programs would take a new file in place of a file of the image."""
        searched = {place for places in self._searched.values() for place in places} | self._directories
        if path in searched and kind == "symlink":
            return True
        # In a virtual environment, `python` and `pip` come first because the task asked for one.
        if folder in self._directories and not ("venv" in self._text and _VENV_PROGRAM.fullmatch(name)):
            return await self._comes_first(folder, name) and not await self._has(path)
        if _LIBRARY.fullmatch(name) and await self._shadows_library(folder, name):
            return True
        # Python takes a package, an extension module or bytecode before a file of the same name, whatever its ending.
        if _STANDARD.fullmatch(folder) and self._is_brought(path):
            stems = {each.partition(".")[0] for each in await self._names(folder)}
            return name.partition(".")[0] in stems
        return await self._hides_module(path, kind)

    async def _hides_module(self, path: str, kind: str) -> bool:
        """Return whether a new module of the work, which the messages do not name, is imported in place of a module of
        Python or of a package of the image."""
        module = self._module(path, kind)
        if not module or f"{module}.py" in self._text or await self._has(path):
            return False
        return module in sys.stdlib_module_names or module.lower() in await self._image_packages()

    async def _comes_first(self, folder: str, name: str) -> bool:
        """Return whether shells could find a new program in this directory of PATH before the image's program of the
        same name. The image's program must stay as prepared if it is found first."""
        unordered = self._directories.difference(*self._orders)
        # The place of the directory in PATH is not known, so the addition counts as one that could be found first.
        if any(folder not in order for order in self._orders):
            return await self._exists(name, self._directories)
        if await self._exists(name, unordered):
            return True
        for order in self._orders:
            before = [each for each in order[: order.index(folder)] if not self._is_work(each)]
            kept = [each for each in before if not self._is_named(f"{each}/{name}", name)]
            if await self._exists(name, order) and not await self._exists(name, kept):
                return True
        return False

    async def _exists(self, name: str, places: Iterable[str]) -> bool:
        # A list, because `any` cannot iterate over an asynchronous generator.
        return any([name in await self._names(each) for each in sorted(places)])

    async def _shadows_library(self, folder: str, name: str) -> bool:
        """Return whether the loader would load a new file in place of a library of the root."""
        if folder in self._searched["LD_LIBRARY_PATH"]:
            own = folder
        elif match := _LIBRARIES.fullmatch(folder):
            musl = any(each.startswith("ld-musl") for each in await self._names("/lib"))
            if match[1].startswith("/usr/local/") and match[0] == match[1] and not musl:
                return False  # the check's loader cache lists the root's own directories first
            own = ""
        else:
            return False
        return await self._exists(name, [each for each in await library_directories(self._names) if each != own])

    def _module(self, path: str, kind: str) -> str:
        """Return the name of the module that a change adds to a directory of PYTHONPATH or to a temporary directory,
        where Python finds it first if a check writes a script there; empty if it adds none."""
        for place in (*self._searched["PYTHONPATH"], *SCRATCH, "/var/tmp"):  # noqa: S108  in the slot
            if path.startswith(f"{place}/"):
                inside = path[len(place) + 1 :]
                if match := _MODULE.fullmatch(inside):
                    return match[1]
                return inside if kind == "symlink" and inside.isidentifier() else ""
        return ""

    async def _image_packages(self, site: str = "") -> frozenset[str]:
        """Return the names of the packages in the site directories of the root: in all, or in those that an interpreter
        could search together with `site`."""
        if self._packages is None:
            found: dict[str, frozenset[str]] = {}
            for at in ("/usr/lib", "/usr/local/lib"):
                for python in await self._names(at):
                    for kind in ("site-packages", "dist-packages") if python.startswith("python3") else ():
                        place = f"{at}/{python}/{kind}"
                        found[place] = frozenset(map(_distribution, await self._names(place)))
            self._packages = found
        return frozenset[str]().union(
            *(names for place, names in self._packages.items() if not site or _searched_together(place, site))
        )


def _searched_together(one: str, other: str) -> bool:
    """Return whether an interpreter could search both site directories. Python of Debian searches `dist-packages`
    instead of `site-packages`, except in home directories; `python3` in a path stands for each of its versions."""
    versions = {match[1] for each in (one, other) if (match := _VERSION.search(each))}
    homes = any("/.local/" in each for each in (one, other))
    return len(versions) < 2 and (homes or one.rpartition("/")[2] == other.rpartition("/")[2])


async def library_directories(names: Names) -> list[str]:
    """Return the library directories of the root, architecture-specific ones first."""
    plain = [f"{at}/lib{kind}" for at in ("", "/usr") for kind in ("", "64", "32", "x32")]
    own = [f"{at}/{name}" for at in plain for name in sorted(await names(at)) if _MULTIARCH.fullmatch(name)]
    return [*own, *[each for each in plain if await names(each)]]


async def link(slot: Slot, directories: Sequence[str]) -> None:
    """Rebuild the loader's cache for a check, so that the loader finds new libraries, but only after those of the root.

    A root without `ldconfig`, or with another loader, keeps its cache.
    """
    conf = "/tmp/.palaestra-ld.so.conf"  # noqa: S108  in the slot
    await slot.write_text(conf, "\n".join([*directories, "include /etc/ld.so.conf", ""]))
    await slot.execute(["ldconfig", "-X", "-f", conf], cwd="/", timeout_s=60, spill=False)
    await slot.remove(conf)
