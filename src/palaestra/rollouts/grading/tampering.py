"""Finds changes with which the agent would decide its own grade, because they take effect before the check's code runs.

A check sees only the workspace and the paths that its task declares (`grader.py`). Even below those paths, it does not
see changes to:

- directories in which shells look for programs, except to programs that the task names
- files of the loader, and libraries of the root
- files of the root below `/usr` and `/opt`, except in packages and below paths that the task declares
- Python's standard library and start-up files, and an installed pytest
- settings in a home or for the whole system, unless the task names or declares them
- files whose names begin with `-`, unless the task's messages name them
- modules in temporary directories with the names of installed ones, unless the task's messages name them

Other new files are shown, because a task may ask to install them. The exception is a file that the loader, a compiler
or an interpreter would prefer to a file of the root.

Invariant: the decision depends on the paths and kinds of the changes, on the names in the original root and on the
task's declarations, but never on the content of a file.

Not covered: a program or package that the task names or asks to install and that the check trusts, and packages of
interpreters other than Python, Perl and Ruby. An environment whose check runs code of the workspace must isolate that
code from the check (`suites/grading/run_tests.py` does). Sources: ld.so(8), ldconfig(8), Python's `site` and `getpath`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import TypeAlias

from palaestra.core.errors import InfraError
from palaestra.core.types import Task
from palaestra.sandbox.slot import Change, Slot, View

CACHE = "/etc/ld.so.cache"
"""The cache in which the loader of the GNU C library first looks up a library's name."""

SCRATCH = ("/tmp", "/dev/shm")  # noqa: S108  in the slot
"""Writable directories that are not in a slot's layers."""

_SCRATCH_MODULE = re.compile(
    r"(?:/\.palaestra-carried)?(?:/tmp|/dev/shm|/var/tmp)/(\w+)"
    r"((?:/__init__)?(?:\.[\w-]+)*\.(?:py|pyc|so))?"
)
"""A module in a temporary directory. Python imports it before all others in a script that a check writes there."""

LOADER = re.compile(
    r"/etc/(?:ld\.so\.(?:preload|cache|conf|conf\.d(?:/.*)?)|ld-musl-[^/]*\.path|nsswitch\.conf|ssl/openssl\.cnf"
    r"|perl(?:/.*)?)|.*/gconv/.*",
    re.DOTALL,
)
"""Files that select the libraries of every program, or of programs that look up a user, a cipher or a charset, and the
settings of Perl."""

PROGRAM_DIRECTORIES = frozenset(
    {
        *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/root/bin"),
        *("/root/.local/bin", "/usr/games", "/usr/local/games", "/snap/bin"),
    }
)
"""Directories in which shells look for programs, in addition to the slot's own PATH."""

_LINKS = "/etc/alternatives"

_COMPILERS = frozenset({"gcc", "cc", "g++", "clang", "rustc", "go", "gfortran", "build-essential"})
_COMPILER_PARTS = frozenset({"as", "ld", "ld.bfd", "ld.gold", "ar", "ranlib", "nm", "cc", "c++", "cpp"})
"""Programs that compilers start, under all of their usual names."""

_OWN = re.compile(r"/(?:usr/)?lib(?:32|64|x32|exec)?/.+|/usr/share/perl5?/.+", re.DOTALL)
"""Files that the programs of a root load or start."""

_INSTALLED = re.compile(r"/(?:usr/.+|opt(?:/.+)?)", re.DOTALL)
"""Files of installed software: parts of programs, and headers, time zones or archives that programs read. An agent may
add such files. It may replace those of the root only below a path that the task declares."""

_SHARED = re.compile(r"lib.+\.so(?:\..*)?|ld-.*\.so(?:\..*)?", re.DOTALL)
_SEARCHED = re.compile(
    r"(/(?:usr/)?(?:local/)?lib(?:32|64|x32)?(?:/[\w-]+-linux-\w+)?)"
    r"(?:/(?:glibc-hwcaps|tls|haswell|avx512_1|x86_64)(?:/.*)?)?",
    re.DOTALL,
)
"""A default directory of the loader, and the directories below it that the loader prefers on some machines."""

_SCRIPTS = (
    (
        re.compile(r"/usr/(?:share|lib/[\w-]+)/perl5(?:/[\d.]+)?/(.+)", re.DOTALL),
        ("/usr/lib/*/perl-base", "/usr/lib/*/perl/*", "/usr/share/perl/*"),
    ),
    (
        re.compile(
            r"/usr/(?:local/lib/site_ruby|lib/ruby/vendor_ruby)(?:/[\d.]+)?(?:/[\w-]+-linux[\w-]*)?/(.+)", re.DOTALL
        ),
        ("/usr/lib/ruby/[0-9]*",),
    ),
)
"""For Perl and for Ruby: a pattern for modules in the directories that are searched before the standard library, and
the directories of the standard library."""

_SETTINGS = re.compile(
    r"/etc/(?:magic(?:\.mime)?|sqliterc|inputrc|wgetrc|npmrc|curlrc|gitconfig|gdb(?:/.*)?)"
    r"|/usr/share/(?:misc|file|awk|terminfo|bc)/.*|/usr/local/(?:share|lib(?:/[\w-]+)?)/perl5?/.*",
    re.DOTALL,
)
"""System-wide settings and modules that programs load automatically. Sources: their manual pages, section FILES."""

_HOMES = re.compile(r"^(?:/root|/home/[^/]+)(?=/)")
_HOME_MODULES = frozenset({"node_modules", "node_libraries", "perl5", "R", "go", "bin"})
"""Directories of a home in which interpreters and shells look for code, apart from those with a leading dot."""

_HEADERS = re.compile(r"/usr/local/include/(.+)", re.DOTALL)

_MULTIARCH = re.compile(r"[\w]+-linux-\w+")
_SYSTEM = frozenset(
    {"/etc", "/usr", "/usr/local", "/usr/local/lib", "/usr/libexec", "/etc/alternatives", "/usr/share"}
    | {f"{at}/lib{kind}" for at in ("", "/usr") for kind in ("", "32", "64", "x32")}
) | {each for each in PROGRAM_DIRECTORIES if not each.startswith("/root")}
"""Directories above protected paths. Replacing one of them replaces everything in it."""

_SEARCH_PATHS = re.compile(
    r"/usr/(?:local/)?lib(?:32|64)?/(?:python[\d.]*(?:/(?:site|dist)-packages)?|site_ruby(?:/.*)?|.*perl5?(?:/[\d.]+)?)"
    r"|/usr/(?:local/)?share/perl5?(?:/[\d.]+)?|/usr/share/(?:misc|file|awk|terminfo|bc)|/usr/local/include"
    r"|/etc/(?:perl|gdb|ld\.so\.conf\.d)|.*/gconv",
    re.DOTALL,
)
"""Directories in which programs look for modules and settings. A link in place of one redirects the search."""

_STANDARD = re.compile(
    r"(/(?:usr/(?:local/)?|opt/(?:.+/)?)?lib(?:32|64)?/python3\.\d+)/(?!site-packages/|dist-packages/)(.+)", re.DOTALL
)
_PYTHON = re.compile(r"/(?:site-packages|dist-packages|python3?(?:\.\d+)?)/")
_SITE = re.compile(r"(.*/(?:site-packages|dist-packages))/([^/]+).*", re.DOTALL)
_PACKAGES = re.compile(r"/(?:site-packages|dist-packages|node_modules|gems|site-library)/")
"""Directories into which users install packages."""

PYTHON_STARTS = frozenset({"sitecustomize", "usercustomize"})
_HOME_OF_PYTHON = re.compile(r"(?:/|/usr|/usr/local|/root|/root/\.local)?(?:/s?bin)?/(?:pyvenv\.cfg|pybuilddir\.txt)")
_BEFORE_STANDARD = re.compile(r".*/lib(?:32|64)?/python\d+\.zip|.*/s?bin/lib(?:32|64)?/python.*", re.DOTALL)
"""Places in which Python looks for its standard library before the real location."""

_HOOKS = frozenset({"_distutils_hack", "apport", "apport_python_hook"})
"""Packages that the Python start-up files of Linux distributions import."""

_TESTING = frozenset(
    {"_pytest", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest", "tomli"}
)
"""pytest and the packages that it imports before the tests."""


_AT_ONCE = 200
"""The maximum number of paths per command."""

Names: TypeAlias = Callable[[str], Awaitable[frozenset[str]]]
"""Returns the names in a directory of the root as it was before the agent started; empty for a missing directory."""


async def _no_names(directory: str) -> frozenset[str]:
    return frozenset()


def names_in(slot: Slot) -> Names:
    """Return a `Names` function that reads an unused slot and lists each directory only once."""
    known: dict[str, frozenset[str]] = {}

    async def names(directory: str) -> frozenset[str]:
        if directory not in known:
            try:
                entries = await slot.list_dir(directory)
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


def batches(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the paths in parts that fit into one command, because the kernel limits a command's arguments."""
    return (paths[start : start + _AT_ONCE] for start in range(0, len(paths), _AT_ONCE))


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Return whether a path is one of these paths or is below one of them."""
    return any(path == top or top == "/" or path.startswith(f"{top.rstrip('/')}/") for top in tops)


def changes_in(view: View, changes: Iterable[Change]) -> list[Change]:
    """Return the changes that a view shows."""
    return [each for each in changes if is_below(each.path, view.only) and not is_below(each.path, view.without)]


def _in_site(path: str) -> bool:
    match = _SITE.fullmatch(path)
    return match is not None and _distribution(match[2]) in _HOOKS | _TESTING


def _distribution(name: str) -> str:
    """Return the package name of a file or directory in a site directory."""
    return re.split(r"[-.]", name, maxsplit=1)[0].lower()


def _starts_python(path: str, workspace: str) -> bool:
    """Return whether Python runs this file on start-up and the file is outside the workspace. A directory `.local` in
    the workspace counts as outside."""
    whole = PurePosixPath(path)
    inside = workspace != "/" and whole.is_relative_to(workspace) and ".local" not in whole.parts
    if inside:
        return False
    if path.endswith(".pth"):
        return _PYTHON.search(path) is not None
    python = whole.suffix in (".py", ".pyc", ".so")
    return python and not PYTHON_STARTS.isdisjoint((whole.name.partition(".")[0], whole.parent.name))


@dataclass(slots=True)
class Rule:
    """Decides which changes a check does not see.

    `workspace` is the agent's working directory. `programs` may be added and replaced, `new_programs` only added.
    `declared` are the paths whose changes a check sees, except `/`. `directories` are those of the slot's PATH, and
    `homes` are the home directories of its users. `text` is that of the task's messages.
    """

    workspace: str
    programs: frozenset[str] = frozenset()
    new_programs: frozenset[str] = frozenset()
    declared: Sequence[str] = ()
    directories: frozenset[str] = frozenset()
    homes: frozenset[str] = frozenset({"/root"})
    text: str = ""
    _names: Names = _no_names

    def is_suspect(self, change: Change) -> bool:
        """Return whether the change may have to be left out of the graded view. If no change is suspect, the original
        root need not be read."""
        path = str(PurePosixPath("/", change.path))
        if self._is_option(path):
            return True
        if change.kind == "dir" and not change.opaque:
            return False  # its entries are separate changes
        if self._is_place(path) or self._hidden_by(change) or self._scratch_module(path, change.kind):
            return True
        if self._is_program(path) or path.rpartition("/")[0] == _LINKS or self._in_home(path):
            return True
        patterns = (LOADER, _OWN, _INSTALLED, _BEFORE_STANDARD, _HOME_OF_PYTHON, _SETTINGS)
        matches = any(pattern.fullmatch(path) for pattern in patterns)
        return matches or _starts_python(path, self.workspace) or _in_site(path)

    async def planted(self, changes: Sequence[Change], names: Names) -> tuple[str, ...]:
        """Return the sorted paths of `changes` to leave out of the graded view. `names` lists the root's original
        directories."""
        self._names = names
        suspects = list(filter(self.is_suspect, changes))
        found = {change.path for change in suspects if await self._leaves_out(change)}
        return tuple(sorted(found.union(*map(self._hidden_by, suspects))))

    async def _leaves_out(self, change: Change) -> bool:
        path = str(PurePosixPath("/", change.path))
        folder, _, name = path.rpartition("/")
        if self._is_option(path):
            return True
        module = self._scratch_module(path, change.kind)
        if module in sys.stdlib_module_names or (module and module.lower() in await self._packages()):
            return True
        if self._is_place(path):
            return change.kind not in ("dir", "deleted") or await self._has(path)
        if self._is_program(path) or folder == _LINKS:
            return not (name in self.programs or await self._is_new_program(name))
        if _SETTINGS.fullmatch(path) or self._in_home(path):
            return name.removeprefix(".") not in self.programs and name not in self.programs
        if header := _HEADERS.fullmatch(path):
            return await self._has(f"/usr/include/{header[1]}")
        always = (LOADER, _BEFORE_STANDARD, _HOME_OF_PYTHON)
        if any(pattern.fullmatch(path) for pattern in always) or _starts_python(path, self.workspace):
            return True
        if _PACKAGES.search(f"{path}/"):
            return _in_site(path) and await self._has_package(path)
        installed = _INSTALLED.fullmatch(path) and not is_below(path, self.declared)
        if _STANDARD.fullmatch(path) and (installed or not path.startswith("/opt/")):
            return await self._shadows_module(path)
        kept = installed or _OWN.fullmatch(path)
        if (kept and await self._has(path)) or await self._shadows_script(path):
            return True
        return _SHARED.fullmatch(name) is not None and await self._shadows_library(path, name)

    def _is_option(self, path: str) -> bool:
        """Return whether programs that are called with `*` take the file's name for an option, and the task's messages
        do not name the file."""
        name = path.rpartition("/")[2]
        return name.startswith("-") and name not in self.text

    def _scratch_module(self, path: str, kind: str) -> str:
        """Return the name of the Python module that a change adds to a temporary directory. Return an empty string if
        there is none or the task's messages name its file."""
        match = _SCRATCH_MODULE.fullmatch(path)
        if match is None or not (match[2] or kind == "symlink"):
            return ""
        return "" if (f"{match[1]}.py" if match[2] else f"/{match[1]}") in self.text else match[1]

    def _is_program(self, path: str) -> bool:
        """Return whether the path is in a directory where shells look for programs."""
        return self._has_programs(path.rpartition("/")[0])

    def _has_programs(self, folder: str) -> bool:
        """Return whether shells look for programs in the folder: a usual program directory, or a directory of PATH
        outside the workspace."""
        inside = self.workspace != "/" and is_below(folder, (self.workspace,))
        return folder in PROGRAM_DIRECTORIES or (folder in self.directories and not inside)

    def _is_place(self, path: str) -> bool:
        """Return whether programs look for other programs, modules or settings in this directory or below it."""
        if path in _SYSTEM or path in self.homes or self._has_programs(path):
            return True
        return _SEARCH_PATHS.fullmatch(path) is not None

    def _hidden_by(self, change: Change) -> tuple[str, ...]:
        """Return the directories of PATH, and the home, that are hidden because this change removed or replaced a
        directory above them."""
        if change.kind == "dir" and not change.opaque:
            return ()
        places = sorted({*filter(self._has_programs, self.directories), *self.homes})
        return tuple(place for place in places if place.startswith(f"{change.path}/"))

    def _in_home(self, path: str) -> bool:
        """Return whether a path holds settings or modules in a home, and the task does not declare that path."""
        for home in [*self.homes, *_HOMES.findall(path)]:
            if home == "/" or not path.startswith(f"{home}/"):
                continue
            inside = path[len(home) + 1 :]
            if inside.startswith(".") or inside.partition("/")[0] in _HOME_MODULES:
                return not is_below(path, [each for each in self.declared if each.startswith(f"{home}/")])
        return False

    async def _is_new_program(self, name: str) -> bool:
        """Return whether the root lacks this program, and the task names it, a part of its name (`gcc` of
        `x86_64-linux-gnu-gcc-12`) or a compiler that starts it."""
        wanted = self.new_programs & {name, *re.split(r"[-.]", name)}
        if self.new_programs & _COMPILERS and name in _COMPILER_PARTS:
            wanted = frozenset({name})
        return bool(wanted) and not await self._exists(name)

    async def _exists(self, name: str) -> bool:
        return any([name in await self._names(each) for each in sorted(PROGRAM_DIRECTORIES | self.directories)])

    async def _has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in await self._names(folder or "/")

    async def _shadows_library(self, path: str, name: str) -> bool:
        """Return whether the loader would load this file in place of a library of the root."""
        if await self._has(path):
            return True
        match = _SEARCHED.fullmatch(path.rpartition("/")[0])
        if match is None:
            return False
        local = match[1].startswith("/usr/local/")
        if local and match[0] == match[1] and not any(each.startswith("ld-musl") for each in await self._names("/lib")):
            return False  # the check's loader cache lists the root's own directories first
        return any([name in await self._names(each) for each in await library_directories(self._names)])

    async def _shadows_script(self, path: str) -> bool:
        """Return whether Perl or Ruby would load this file in place of a module of the root's standard library."""
        for pattern, standard in _SCRIPTS:
            if match := pattern.fullmatch(path):
                return any(
                    [await self._has(f"{place}/{match[1]}") for each in standard for place in await self._at(each)]
                )
        return False

    async def _at(self, pattern: str) -> list[str]:
        """Return the directories of the root that match a pattern with `*` in place of a name."""
        found = ["/"]
        for part in PurePosixPath(pattern).parts[1:]:
            if "*" not in part:
                found = [f"{place.rstrip('/')}/{part}" for place in found]
            else:
                found = [
                    f"{place}/{name}" for place in found for name in await self._names(place) if fnmatch(name, part)
                ]
        return found

    async def _shadows_module(self, path: str) -> bool:
        """Return whether Python would import this file in place of a module of the root's standard library."""
        match = _STANDARD.fullmatch(path)
        assert match is not None
        place, parts = match[1], match[2].split("/")
        for depth, part in enumerate(parts):
            names = await self._names(place)
            if part in names and depth < len(parts) - 1 and part != "__pycache__":
                place = f"{place}/{part}"
                continue
            names |= await self._names(match[1]) if part == "lib-dynload" or place.endswith("/lib-dynload") else set()
            if part == "__pycache__" and depth < len(parts) - 1:
                part = parts[depth + 1]
            return part.partition(".")[0] in {name.partition(".")[0] for name in names}
        return False

    async def _has_package(self, path: str) -> bool:
        """Return whether the root has the package of this path, in this or another site directory, and either uses the
        package on start-up or has pytest."""
        match = _SITE.fullmatch(path)
        assert match is not None
        had = {*map(_distribution, await self._names(match[1])), *await self._packages()}
        package = _distribution(match[2])
        return package in had and (package in _HOOKS or "_pytest" in had)

    async def _packages(self) -> set[str]:
        """Return the packages in the site directories of the root."""
        found: set[str] = set()
        for at in ("/usr/lib", "/usr/local/lib"):
            for python in await self._names(at):
                if python.startswith("python3"):
                    found |= await self._names(f"{at}/{python}/site-packages")
                    found |= await self._names(f"{at}/{python}/dist-packages")
        return set(map(_distribution, found))


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
