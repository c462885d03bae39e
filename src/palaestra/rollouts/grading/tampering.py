"""What of an agent's change would decide its own grade, whatever the check: what runs before the check's own code does.

A check starts programs of the root that the agent could change as root. So what they are and what they load is shown as
it stood before the agent came: programs that checks use, the loader's files and every library of the root, the standard
library of Python, what Python runs when it starts, and pytest where the root has it. What the root had not stays, since
a task may be about installing it, unless the loader or an interpreter would take it in place of what the root has.

Invariant: the path decides, whatever characters it has, and whether the root had it before; never the content. Not
covered: a program or package that a task has installed and a check trusts, and packages of interpreters other than
Python; an environment whose check runs code of the workspace must keep the two apart (`suites/swe/run_tests.py` does).
Sources: ld.so(8), ldconfig(8), Python's `site` and `getpath`; the names that the POSIX utilities and the shells have on
every system.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import Protocol

from palaestra.core.errors import InfraError
from palaestra.sandbox.slot import Change, Slot

CACHE = "/etc/ld.so.cache"
"""Where the loader of the GNU C library looks a name up first."""

LOADER = re.compile(
    r"/etc/(?:ld\.so\.(?:preload|cache|conf|conf\.d(?:/.*)?)|ld-musl-[^/]*\.path|nsswitch\.conf|ssl/openssl\.cnf"
    r"|perl(?:/.*)?)|.*/gconv/.*",
    re.DOTALL,
)
"""Which libraries every program loads, from where, and those that ask for a user, a cipher or a charset."""

PROGRAM_DIRECTORIES = frozenset(
    {"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/root/bin", "/root/.local/bin"}
)
_LINKS = "/etc/alternatives"

_NAMES = """
[ awk basename bash cat chmod cmp cp cut dash date diff dirname echo egrep env expr false fgrep find grep head id
kill ls md5sum mkdir mktemp mv od printf ps pwd readlink rm sed seq sh sha256sum sleep sort stat tail tee test timeout
touch tr true uname uniq wc which xargs
"""
PROGRAMS = frozenset(_NAMES.split())
"""Programs that every root has. A task installs others."""

_TOOL_NAMES = """
base64 busybox chown comm coreutils curl file gawk git gunzip gzip jq ldconfig ln mawk openssl perl pgrep py.test pytest
python python2 python3 realpath rmdir setpriv sha1sum sha512sum sqlite3 su sudo tar uv uvx wget whoami xxd
"""
TOOLS = frozenset(_TOOL_NAMES.split())
"""What checks use besides where the root has it; a task may install one that is missing."""

_VERSIONED = re.compile(r"(?:python|perl)\d[\d.]*")

_OWN = re.compile(r"/(?:usr/)?lib(?:32|64|x32|exec)?/.+|/usr/share/perl5?/.+", re.DOTALL)
"""Where a root has what its programs load and start."""

_LOCAL = re.compile(r"/usr/local/lib(?:32|64)?/.+", re.DOTALL)
_SHARED = re.compile(r"lib.+\.so(?:\..*)?|ld-.*\.so(?:\..*)?", re.DOTALL)
_SEARCHED = re.compile(
    r"(/(?:usr/)?(?:local/)?lib(?:32|64|x32)?(?:/[\w-]+-linux-\w+)?)"
    r"(?:/(?:glibc-hwcaps|tls|haswell|avx512_1|x86_64)(?:/.*)?)?",
    re.DOTALL,
)
"""A directory that the loader searches by itself, and those below it that it takes first on some machines."""

_MULTIARCH = re.compile(r"[\w]+-linux-\w+")
_SYSTEM = frozenset(
    {"/etc", "/usr", "/usr/local", "/usr/local/lib", "/usr/libexec", "/etc/alternatives", "/usr/share"}
    | {f"{at}/lib{kind}" for at in ("", "/usr") for kind in ("", "32", "64", "x32")}
) | {each for each in PROGRAM_DIRECTORIES if not each.startswith("/root")}
"""Directories that the paths above lead through: one that is replaced is as good as everything in it."""

_STANDARD = re.compile(
    r"(/(?:usr/(?:local/)?)?lib(?:32|64)?/python3\.\d+)/(?!site-packages/|dist-packages/)(.+)", re.DOTALL
)
_PYTHON = re.compile(r"/(?:site-packages|dist-packages|python3?(?:\.\d+)?)/")
_SITE = re.compile(r"(.*/(?:site-packages|dist-packages))/([^/]+).*", re.DOTALL)
_PACKAGES = re.compile(r"/(?:site-packages|dist-packages|node_modules|gems|site-library)/")
"""Where users install what a task asks for."""

_STARTS = frozenset({"sitecustomize", "usercustomize"})
_HOME_OF_PYTHON = re.compile(r"(?:/|/usr|/usr/local|/root|/root/\.local)?(?:/s?bin)?/(?:pyvenv\.cfg|pybuilddir\.txt)")
_BEFORE_STANDARD = re.compile(r".*/lib(?:32|64)?/python\d+\.zip|.*/s?bin/lib(?:32|64)?/python.*", re.DOTALL)
"""What Python takes for its standard library, or for what says where that is, before it comes to the real one."""

_HOOKS = frozenset({"_distutils_hack", "apport", "apport_python_hook"})
"""Packages that start-up files of distributions import."""

_TESTING = frozenset(
    {"_pytest", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest", "tomli"}
)
"""pytest, and what it imports before the tests."""


class Pristine(Protocol):
    """The root as it stood before the agent came."""

    async def names(self, directory: str) -> frozenset[str]:
        """What a directory holds; nothing where there is none."""
        ...


class SlotRoot:
    """The root of a slot that nobody has worked in."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._names: dict[str, frozenset[str]] = {}

    async def names(self, directory: str) -> frozenset[str]:
        if directory not in self._names:
            self._names[directory] = await self._listed(directory)
        return self._names[directory]

    async def _listed(self, directory: str) -> frozenset[str]:
        try:
            return frozenset(entry.path.rpartition("/")[2] for entry in await self._slot.list_dir(directory))
        except InfraError:
            raise
        except OSError:
            return frozenset()


def suspects(changes: Sequence[Change], workspace: str) -> list[Change]:
    """The changes that can be plants at all: where there is none, nobody needs to look at the root as it was."""
    return [change for change in changes if _is_suspect(change, str(PurePosixPath("/", change.path)), workspace)]


async def planted(
    changes: Sequence[Change], workspace: str, before: Pristine, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """The changed paths to leave out, sorted, as they stand in `changes`; never programs whose names are in `kept`."""
    rule = _Rule(before, workspace, frozenset(kept))
    return tuple(sorted([change.path for change in suspects(changes, workspace) if await rule.leaves_out(change)]))


def _is_suspect(change: Change, path: str, workspace: str) -> bool:
    if change.kind == "dir" and not change.opaque:
        return False  # what is in it is judged by itself
    if path in _SYSTEM or path.rpartition("/")[0] in (*PROGRAM_DIRECTORIES, _LINKS):
        return True
    patterns = (LOADER, _OWN, _LOCAL, _BEFORE_STANDARD, _HOME_OF_PYTHON)
    return any(pattern.fullmatch(path) for pattern in patterns) or _starts_python(path, workspace) or _in_site(path)


def _in_site(path: str) -> bool:
    match = _SITE.fullmatch(path)
    return match is not None and _distribution(match[2]) in _HOOKS | _TESTING


def _distribution(name: str) -> str:
    """The package that a file or directory of a site directory belongs to."""
    return re.split(r"[-.]", name, maxsplit=1)[0].lower()


def _starts_python(path: str, workspace: str) -> bool:
    """Whether a Python that finds the file outside of the workspace runs it when it starts."""
    whole = PurePosixPath(path)
    inside = workspace != "/" and whole.is_relative_to(workspace) and ".local" not in whole.parts
    if inside:
        return False
    if path.endswith(".pth"):
        return _PYTHON.search(path) is not None
    python = whole.suffix in (".py", ".pyc", ".so")
    return python and not _STARTS.isdisjoint((whole.name.partition(".")[0], whole.parent.name))


class _Rule:
    """Which suspect is left out, by what the root had."""

    def __init__(self, before: Pristine, workspace: str, kept: frozenset[str]) -> None:
        self._before = before
        self._workspace = workspace
        self._kept = kept

    async def leaves_out(self, change: Change) -> bool:
        path = str(PurePosixPath("/", change.path))
        folder, _, name = path.rpartition("/")
        if folder in PROGRAM_DIRECTORIES or folder == _LINKS:
            if name in self._kept:
                return False
            if name in PROGRAMS or await self._is_tool(name):
                return True
        if path in _SYSTEM:
            return await self._has(path)
        always = (LOADER, _BEFORE_STANDARD, _HOME_OF_PYTHON)
        if any(pattern.fullmatch(path) for pattern in always) or _starts_python(path, self._workspace):
            return True
        if _PACKAGES.search(f"{path}/"):
            return _in_site(path) and await self._has_package(path)
        if _STANDARD.fullmatch(path):
            return await self._shadows_module(path)
        if _OWN.fullmatch(path) and await self._has(path):
            return True
        return _SHARED.fullmatch(name) is not None and await self._shadows_library(path, name)

    async def _has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in await self._before.names(folder or "/")

    async def _is_tool(self, name: str) -> bool:
        if name not in TOOLS and _VERSIONED.fullmatch(name) is None:
            return False
        return any([name in await self._before.names(each) for each in sorted(PROGRAM_DIRECTORIES)])

    async def _shadows_library(self, path: str, name: str) -> bool:
        """Whether it stands where the loader would take it for a library that the root has."""
        if await self._has(path):
            return True
        match = _SEARCHED.fullmatch(path.rpartition("/")[0])
        if match is None:
            return False
        local = match[1].startswith("/usr/local/")
        if local and match[0] == match[1] and not any(each.startswith("ld-musl") for each in await self._names("/lib")):
            return False  # the cache that is made for the check names the root's own directories first
        return any([name in await self._names(each) for each in await library_directories(self._before)])

    async def _names(self, directory: str) -> frozenset[str]:
        return await self._before.names(directory)

    async def _shadows_module(self, path: str) -> bool:
        """Whether Python would find it in place of a module of the standard library that the root has."""
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
        """Whether the root has the package of a path in a site directory, there or in another."""
        match = _SITE.fullmatch(path)
        assert match is not None
        found = set(await self._names(match[1]))
        for at in ("/usr/lib", "/usr/local/lib"):
            for python in await self._names(at):
                if python.startswith("python3"):
                    found |= await self._names(f"{at}/{python}/site-packages")
                    found |= await self._names(f"{at}/{python}/dist-packages")
        had = {_distribution(name) for name in found}
        package = _distribution(match[2])
        return package in had and (package in _HOOKS or "_pytest" in had)


async def library_directories(before: Pristine) -> list[str]:
    """The directories of libraries that the root has, those of one architecture first."""
    plain = [f"{at}/lib{kind}" for at in ("", "/usr") for kind in ("", "64", "32", "x32")]
    own = [f"{at}/{name}" for at in plain for name in sorted(await before.names(at)) if _MULTIARCH.fullmatch(name)]
    return [*own, *[each for each in plain if await before.names(each)]]


async def link(slot: Slot, directories: Sequence[str]) -> None:
    """Make the loader's cache anew for a check, so that new libraries are found, after those in the root's directories.

    Where the root has no `ldconfig`, or another loader, its cache stays as it was.
    """
    conf = "/tmp/.palaestra-ld.so.conf"  # noqa: S108  in the slot
    await slot.write_text(conf, "\n".join([*directories, "include /etc/ld.so.conf", ""]))
    await slot.execute(["ldconfig", "-X", "-f", conf], cwd="/", timeout_s=60, spill=False)
    await slot.remove(conf)
