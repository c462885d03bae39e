"""Place the files of a verifier in a slot: its tests, and the commands that replace its installation of test tools.
Find the agent's changes that the verifier must not see.

`hidden_paths` selects changes of the agent that could influence its grade: the folders of the verifier, pytest's
configuration above the tests, and start-up files that shells or other programs of the verifier load. It adds these
paths to those that every environment hides from its grader (`rollouts/grading/tampering.py`). The content of a file
does not matter. `find_shadows` finds files that the verifier's programs would load in place of files of the image.

Not covered: programs that a task installed and a verifier trusts, and tests that import the work into their process;
`verifier.py` checks a passing verdict with falsified tests.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from posixpath import basename, dirname, join, normpath

from palaestra.core.config import read_toml
from palaestra.core.errors import GraderError, InfraError
from palaestra.rollouts.grading.tampering import (
    PROGRAM_DIRECTORIES,
    PYTHON_STARTS,
    is_below,
    library_directories,
    names_in,
)
from palaestra.sandbox.slot import Change, Slot
from palaestra.suites.grading.harness import send_scripts
from palaestra.suites.images.pytest_toolchain import image_modules
from palaestra.suites.slot_commands import check_execute
from palaestra.suites.swe.protected import CONFIG_NAMES
from palaestra.suites.terminal_bench.offline_script import STARTUP_FILES, OfflineScript
from palaestra.suites.terminal_bench.terminal_task import (
    AGENT_LOGS,
    ARTIFACT_LOGS,
    TESTS_DIR,
    VERIFIER_LOGS,
    TerminalTask,
)

HARNESS_DIR = "/opt/palaestra/verifier"
SHIMS = ("pytest", "py.test", "uv", "uvx", "palaestra-python")

ALWAYS_HIDDEN = (TESTS_DIR, VERIFIER_LOGS, "/solution", "/oracle", "/opt/palaestra")
"""Paths that are hidden even if unchanged, because a planted link could lead elsewhere."""

_PARENTS = frozenset({"/logs", "/opt"})
"""Parent directories of hidden paths. A link in place of such a directory would put the verifier's files into a folder
of the agent."""

_OF_PROCESSES = ("/proc", "/dev/fd", "/dev/stdin")
"""Paths that lead to files of the process that opens them."""

_MOST_LINKS = 40
_MOST_FOLDERS, _MOST_PLACES = 64, 512
"""The numbers of directories in which the commands of a script or of Python code may start. Without a limit, the first
doubles with each `cd`."""

_STARTUP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)"
    r"|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)",
    re.DOTALL,
)

_LOADING = frozenset(
    {"BASH_ENV", "ENV", "LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "PYTHONSTARTUP", "PERL5OPT", "RUBYOPT", "NODE_OPTIONS"}
    | {"GCONV_PATH", "LOCPATH", "OPENSSL_CONF", "OPENSSL_MODULES", "GIT_CONFIG_GLOBAL", "GIT_EXEC_PATH"}
)
"""Variables that name files that shells, the loader and interpreters load when they start, whatever they run."""
_ORDINARY = frozenset(
    {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "PWD", "OLDPWD", "TMPDIR", "TMP", "TEMP", *_LOADING}
)
"""Variables that do not name directories in which interpreters look for modules, or that other rules cover."""

_SEARCHED = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "PERL5LIB", "PERLLIB", "RUBYLIB", "GEM_PATH", "NODE_PATH", "LUA_PATH"),
    *("LUA_CPATH", "R_LIBS", "R_LIBS_USER", "AWKPATH", "JULIA_LOAD_PATH", "GUILE_LOAD_PATH", "TCLLIBPATH"),
)
"""Variables that name directories in which programs look for programs, libraries and modules."""

_SETTING = re.compile(
    rf"\b({'|'.join([*_SEARCHED, *sorted(_LOADING)])})\b[\"']?\]?\s*[=:,]\s*[rbf]?[\"']?([^\s\"';,)}}]+)"
)
"""An assignment of such a variable in a shell script or in Python code."""

_INCLUDED = re.compile(r"\b(perl|ruby)\b(?:[^\n;|&]{0,500}?\s)?-I\s*([\w./-]+)")
_REFERENCE = re.compile(r"\$\{(\w+)[^}]*\}|\$\(pwd\)|`pwd`")

_MODULE_ROOT_DEPTH = 4
"""The maximum number of parts of a path in which an image keeps modules, such as `/usr/share/perl/5.36`."""

_AT_ONCE = 50
_FIND_S = 120.0

_ABSOLUTE = re.compile(r"/[^\s:;=,'\"]+")

_INLINE_PYTHON = re.compile(r"\bpython[\d.]*\s+(?:-[A-Za-z]+\s+)*(?:-[A-Za-z]*[cm]\b|-(?=[\s;]|$)|<<)", re.M)
"""Calls of Python that look for modules in the working directory first: a command, a module, or standard input."""

_STARTED_PYTHON = re.compile(r"\bpython[\d.]*\s+(?:-\w+\s+)*(?:-\w*[cm]\b|([\w./-]+\.py)\b)")
_STARTED_IN = re.compile(r"(?:\bcwd\s*=|\bchdir\(|\bcd\s)\s*(?:Path\()?[rbf]?['\"]?([\w./-]+)")
_SYS_PATH = re.compile(r"\bsys\.path\b.{0,80}?['\"]([\w./-]+)['\"]")
"""In Python code: the start of a Python program, the directory of a command, and a directory for modules."""

_CHANGED_DIRECTORY = re.compile(r"(?:^|[;&|(])\s*(?:cd|pushd)\s+['\"]?([^\s;&|'\"()$~`-][^\s;&|'\"()$`]*)", re.M)
_ASSIGNED = re.compile(r"^\s*(?:export\s+|readonly\s+)?([A-Za-z_]\w*)=['\"]?([\w./-]+)['\"]?\s*(?:;|$)", re.M)
_PYTHON_FILE = re.compile(r"(?<![\w./$}~-])([\w./-]+\.py)\b")
_VENV_PROGRAM = re.compile(r"(?:python|pip)[\d.]*")
_COMPILED = "__pycache__"
_ENTRY_POINTS = "entry_points.txt"
_SHARED_SETTINGS = frozenset({"pyproject.toml", "setup.cfg", "setup.py", "tox.ini"})
"""Settings files that other programs than test runners read too."""
_MOST_SETTINGS_BYTES = 1 << 18
_MODULE = re.compile(r"(\w+)(?:\.[\w-]+)*\.(?:py|pyc|so)")

_NEEDS = """\
#!/bin/sh
# Replaces an installation: the verifier cannot work unless the packages are installed.
{check} > /dev/null 2>&1 && exit 0
printf '{{"nonce": "%s", "kind": "unmet", "what": "%s"}}\\n' "$PALAESTRA_NONCE" "$*" >&3
exit 97
"""
_CHECKS = {
    "palaestra-needs": 'dpkg -s "$@"',
    "palaestra-needs-python": """python3 -c '
import importlib.metadata, re, sys
for name in sys.argv[1:]:
    importlib.metadata.version(re.match("[A-Za-z0-9._-]+", name)[0])
' "$@\"""",
}


def script_name(task: TerminalTask) -> str:
    """Return the file name, below `TESTS_DIR`, of the verifier's script."""
    return task.verifier.script.rpartition("/")[2]


async def install(
    slot: Slot,
    command: Sequence[str],
    dependencies: Sequence[str],
    library_path: str | None,
    *,
    ignored: Collection[str] = (),
    ends_well: bool = False,
    all_tests: bool = False,
) -> None:
    """Copy the commands that replace `pytest`, `uv` and `uvx` into a folder of the slot that comes first in PATH.

    `command` starts Python, and is empty if Python is not needed. `library_path` is the image's LD_LIBRARY_PATH.
    `ignored` are files that pytest does not load. With `ends_well`, pytest exits with status 0, so that the script
    starts it as often as for passing work. With `all_tests`, a selection of tests by name is ignored.
    """
    await slot.remove(HARNESS_DIR)
    await send_scripts(
        slot, HARNESS_DIR, "verdict_channel.py", "audit_hook.py", "pytest_launcher.py", "pytest_reporter.py"
    )
    plan = {
        "dependencies": list(dependencies),
        "tests": TESTS_DIR,
        "library_path": library_path,
        "ignored": sorted(ignored),
        "ends_well": ends_well,
        "all_tests": all_tests,
    }
    await slot.write_text(f"{HARNESS_DIR}/plan.json", json.dumps(plan))
    for name, check in _CHECKS.items():
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", _NEEDS.format(check=check), mode=0o755)
    start = " ".join(f'"{word}"' for word in command)
    for name in SHIMS if command else ():
        text = f'#!/bin/sh\nexec {start} "{HARNESS_DIR}/pytest_launcher.py" {name} "$@"\n'
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", text, mode=0o755)


async def place_tests(slot: Slot, task: TerminalTask, script: OfflineScript, instead: Mapping[str, str]) -> None:
    """Create empty log folders and copy the verifier's files. Raises `GraderError`."""
    logs = f"{VERIFIER_LOGS} {AGENT_LOGS} {ARTIFACT_LOGS}"
    fresh = f"rm -rf {TESTS_DIR} {VERIFIER_LOGS} && mkdir -p {TESTS_DIR} {logs} && chmod 777 {logs}"
    await _must(slot, ["/bin/sh", "-c", fresh], "creating the folders of the verifier failed")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in task.verifier.files().items():
            if name not in instead and name != script_name(task) and "__pycache__" not in path.parts:
                archive.add(path, name, recursive=False, filter=_owned_by_root)
    await _must(slot, ["tar", "-x", "-C", TESTS_DIR], "unpacking the tests failed", packed.getvalue())
    for name, text in {**script.others, **instead}.items():
        await slot.write_text(f"{TESTS_DIR}/{name}", text)
    await slot.write_text(f"{TESTS_DIR}/{script_name(task)}", script.text, mode=0o755)


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode |= 0o444
    return info


async def _must(slot: Slot, argv: Sequence[str], problem: str, stdin: bytes = b"") -> None:
    await check_execute(slot, argv, f"{problem} in {slot.slot_id}", stdin=stdin, error=GraderError)


async def remove_links(
    slot: Slot, changes: Sequence[Change], carried: str, hidden: Sequence[str] = ALWAYS_HIDDEN
) -> tuple[str, ...]:
    """Remove the agent's links that lead to the verifier's files (`hidden`) or into `/proc`, before those files exist.

    Returns the paths of the links. The files of `/tmp` are now in `carried`, but links are resolved as if these files
    were still in `/tmp`.
    """
    removed = []
    for change in changes:
        if change.kind == "symlink" and await _leads_away(slot, change.path, carried, (*hidden, *_OF_PROCESSES)):
            await slot.remove(change.path)
            removed.append(change.path)
    return tuple(removed)


async def _leads_away(slot: Slot, path: str, carried: str, hidden: Sequence[str]) -> bool:
    """Return whether a link leads to or through one of the paths `hidden`. A chain of too many links counts as such a
    link."""
    path = f"/tmp{path.removeprefix(carried)}" if is_below(path, (carried,)) else path  # noqa: S108  in the slot
    steps = await _followed(slot, path, carried)
    return steps is None or any(is_below(step, hidden) for step in steps)


async def _followed(slot: Slot, path: str, carried: str) -> list[str] | None:
    """Return the paths through which a path leads, the real one last, or None if there are too many links. Links are
    resolved as if the files in `carried` were still in `/tmp`."""
    parts = [part for part in path.split("/") if part]
    steps, at, followed = ["/"], "", 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            at = dirname(at).rstrip("/")
            steps.append(at or "/")
            continue
        step = f"{at}/{part}"
        steps.append(step)
        now = f"{carried}{step.removeprefix('/tmp')}" if is_below(step, ("/tmp",)) else step  # noqa: S108
        try:
            entry = await slot.stat(now)
        except InfraError:
            raise
        except OSError:
            break
        if entry is None or entry.kind != "symlink":
            at = step
            continue
        followed += 1
        if followed > _MOST_LINKS:
            return None
        target = [each for each in entry.target.split("/") if each not in ("", ".")]
        parts, at = [*target, *parts], "" if entry.target.startswith("/") else at
    return steps


@dataclass(frozen=True, slots=True)
class ShadowScope:
    """The scope of a task: the directory in which the script starts, the paths and words that the task's texts name,
    and the programs that the agent may replace. `carried` is the directory in which the slot has the files of
    `/tmp`. `own_modules` are the modules of the verifier, which the agent may not replace."""

    workdir: str
    paths: Collection[str]
    words: Collection[str]
    programs: Collection[str]
    carried: str
    own_modules: Collection[str] = ()

    @property
    def about_venv(self) -> bool:
        """Whether the task's texts name a virtual environment, which has its own Python."""
        return any("venv" in each or "virtualenv" in each for each in (*self.words, *self.paths))

    def place(self, path: str) -> tuple[str, str]:
        """Return the directory and the name of a path as the script will find it."""
        if is_below(path, (self.carried,)):
            path = f"/tmp{path.removeprefix(self.carried)}"  # noqa: S108  in the slot
        return dirname(path), basename(path)


@dataclass(frozen=True, slots=True)
class SearchedFolders:
    """Directories of the work that are searched first for Python modules, programs and libraries. The mappings list the
    names of programs and libraries that the image has. `new_modules` are the agent's new files named like modules of
    the image's packages or of the verifier."""

    modules: Collection[str] = ()
    new_modules: Collection[str] = ()
    programs: Mapping[str, Collection[str]] = field(default_factory=dict)
    libraries: Mapping[str, Collection[str]] = field(default_factory=dict)


Prepared = Callable[[], AbstractAsyncContextManager[Slot]]
"""Opens a slot with the prepared workspace, without the agent's work."""


async def find_shadows(
    slot: Slot,
    changes: Sequence[Change],
    script: str,
    env: Mapping[str, str],
    scope: ShadowScope,
    prepared: Prepared,
    code: str = "",
) -> tuple[str, ...]:
    """Return the agent's files that the verifier's own programs would load in place of files of the image. These are
    files in directories that Python, shells, the loader or another interpreter search first because of `script`, of
    the verifier's Python `code` or of a variable in `env`.

    Files that the task's texts name are not included.
    """
    changed = {scope.place(change.path)[0] for change in changes if change.kind != "dir"}
    changed |= {dirname(folder) for folder in changed}  # packages
    image_path = _entries(env, "PATH", scope.workdir) | PROGRAM_DIRECTORIES
    env = with_settings(env, script, code, scope.workdir)
    python = python_folders(script, scope.workdir, {change.path for change in changes}, code)
    modules = await _real(slot, python | _entries(env, "PYTHONPATH", scope.workdir), scope) & changed
    work = await _real(slot, {scope.workdir}, scope)
    path = _entries(env, "PATH", scope.workdir)
    own_path = {each for each in path if is_below(each, work) or each not in image_path}
    inside = await _real(slot, own_path, scope)
    libraries = await _real(slot, _entries(env, "LD_LIBRARY_PATH", scope.workdir), scope) & changed
    listed = names_in(slot)
    own: set[str] = set()
    for each in (PROGRAM_DIRECTORIES | path) - inside if inside & changed else ():
        own |= await listed(each)
    loaded: set[str] = set()
    for each in await library_directories(listed) if libraries else ():
        loaded |= await listed(each)
    candidates = [change for change in changes if _module(change, modules, scope)]
    folders = SearchedFolders(
        modules,
        await _new_modules(candidates, scope.own_modules, prepared) if candidates else (),
        dict.fromkeys(inside & changed, own),
        dict.fromkeys(libraries, loaded),
    )
    found = {change.path for change in changes if shadows(change, folders, scope)}
    others = {name: value for name, value in env.items() if name not in _ORDINARY}
    searched = {normpath(join(scope.workdir, each)) for value in others.values() for each in _entries_of(value)}
    searched = {each for each in searched if any(is_below(folder, (each,)) for folder in changed)} - {"/"}
    if searched:
        found |= await _shadowing(changes, await _real(slot, searched, scope), scope, prepared)
    return tuple(change.path for change in changes if change.path in found)


async def restore_prepared(slot: Slot, paths: Collection[str], prepared: Prepared) -> None:
    """Give these paths of a slot the content that they have in the prepared workspace."""
    async with prepared() as before:
        for path in paths:
            await slot.remove(path)
            entry = await before.stat(path)
            if entry is None:
                continue
            if entry.kind == "symlink":
                await slot.make_link(path, entry.target)
            elif entry.kind == "dir":
                await slot.make_dir(path)
            else:
                await slot.write_bytes(path, await before.read_bytes(path), mode=entry.mode & 0o7777)


def _entries_of(value: str) -> list[str]:
    """Return the entries of a search path of any interpreter, each up to its first placeholder (`/app/?.lua`,
    `/app/*`)."""
    return [found for each in re.split("[:;]", value) if (found := re.split("[?*]", each)[0])]


async def _shadowing(
    changes: Sequence[Change], folders: Collection[str], scope: ShadowScope, prepared: Prepared
) -> set[str]:
    """Return the agent's new files below these directories that take the place of a module of the image.

    Interpreters search for modules in different places. This function uses the rule that they share: a module is found
    by its path below a directory of the search path. A file is a shadow if a directory of the image has a file with the
    same path below it, or a package of the same name with a file of the same name.
    """
    places: dict[str, set[str]] = {}
    for change in changes:
        at = "/".join(scope.place(change.path))
        if change.kind not in ("file", "symlink") or change.path in scope.paths or basename(at) in scope.words:
            continue
        for folder in folders:
            if at.startswith(f"{folder}/"):
                places.setdefault(at[len(folder) + 1 :], set()).add(change.path)
    if not places:
        return set()
    async with prepared() as before:
        names = names_in(before)
        new = {
            inside: {path for path in paths if basename(path) not in await names(dirname(path))}
            for inside, paths in places.items()
        }
        wanted = sorted(inside for inside, paths in new.items() if paths)
        found: set[str] = set()
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            had = await _image_files(before, some, scope)
            found |= {path for inside in some if _is_module(inside, had) for path in new[inside]}
    return found


async def _image_files(slot: Slot, wanted: Sequence[str], scope: ShadowScope) -> list[str]:
    """Return the files of the image, outside of the work, that could be the modules at these paths."""
    without = [word for each in (scope.workdir, "/proc", "/sys", "/dev", "/tmp") for word in ("-o", "-path", each)]  # noqa: S108
    patterns = []
    for inside in wanted:
        plain = re.sub(r"([*?\[\]\\])", r"\\\1", inside)
        patterns += ["-o", "-path", f"*/{plain}"]
        if "/" in plain:
            patterns += ["-o", "-path", f"*/{plain.partition('/')[0]}/*/{basename(plain)}"]
    argv = ["find", "/", "(", *without[1:], ")", "-prune", "-o", "(", *patterns[1:], ")", "-print"]
    shown = await slot.execute(argv, cwd="/", timeout_s=_FIND_S, max_output_bytes=1 << 22, spill=False)
    return shown.output.splitlines()


def _is_module(inside: str, had: Collection[str]) -> bool:
    """Return whether the image had the module at the path `inside`. It did if one of the image's files `had` is at this
    path below a directory of modules, or has the same name in a package of the same name there."""
    package, name = inside.partition("/")[0], basename(inside)
    for path in had:
        if path.endswith(f"/{inside}"):
            root = path[: -len(inside) - 1]
        elif "/" in inside and path.endswith(f"/{name}") and f"/{package}/" in path:
            root = path.partition(f"/{package}/")[0]
        else:
            continue
        if 0 < root.count("/") <= _MODULE_ROOT_DEPTH:
            return True
    return False


async def _new_modules(changes: Sequence[Change], own: Collection[str], prepared: Prepared) -> set[str]:
    """Return the paths of the new files among the changes that are named like a module of the image's packages, or like
    one of the modules `own`."""
    async with prepared() as before:
        names = names_in(before)
        modules = {*await image_modules(before), *own}
        found = set()
        for change in changes:
            folder, name = dirname(change.path), basename(change.path)
            module = basename(folder) if name.startswith("__init__.") else name.partition(".")[0]
            if module in modules and name not in await names(folder):
                found.add(change.path)
        return found


async def _real(slot: Slot, folders: set[str], scope: ShadowScope) -> set[str]:
    """Return the directories, and the directories to which links lead from them."""
    ends = [steps[-1] for each in sorted(folders) if (steps := await _followed(slot, each, scope.carried))]
    return folders.union(ends)


def shadows(change: Change, folders: SearchedFolders, scope: ShadowScope) -> bool:
    """Return whether programs would find this change before a file of the image with the same name."""
    if change.kind not in ("file", "symlink") or change.path in scope.paths:
        return False
    folder, name = scope.place(change.path)
    if name in folders.programs.get(folder, ()):
        return name not in scope.programs and not (scope.about_venv and _VENV_PROGRAM.fullmatch(name))
    if name in folders.libraries.get(folder, ()) or (folder in folders.libraries and name.startswith("ld-")):
        return True
    module = _module(change, folders.modules, scope)
    return change.path in folders.new_modules or module in sys.stdlib_module_names or module in PYTHON_STARTS


def _module(change: Change, folders: Collection[str], scope: ShadowScope) -> str:
    """Return the module that Python would import from this change if it is in one of `folders`. Return an empty string
    if there is none or the task's texts name the file."""
    folder, name = scope.place(change.path)
    if change.kind not in ("file", "symlink"):
        return ""
    if name.startswith("__init__."):
        folder, name = dirname(folder), f"{basename(folder)}.py"
    match = _MODULE.fullmatch(name)
    module = match[1] if match is not None else name if change.kind == "symlink" else ""
    named = f"{module}.py" in scope.words and module not in scope.own_modules
    return module if folder in folders and not named else ""


def _entries(env: Mapping[str, str], name: str, workdir: str) -> set[str]:
    """Return the directories of a search path; empty and relative entries refer to the working directory."""
    value = env.get(name, "")
    return {normpath(join(workdir, each)) for each in value.split(":")} if value else set()


def with_settings(env: Mapping[str, str], script: str, code: str, workdir: str) -> dict[str, str]:
    """Return the variables with the directories and files that a verifier's `script` and Python `code` add to them.

    A variable that is not set, as in `PYTHONPATH=/app:$PYTHONPATH`, adds the working directory.
    """
    found, folders = {name: [value] for name, value in env.items()}, _started_in(script, workdir)
    texts = (_substituted(script), code)
    settings = [each for text in texts for each in _SETTING.findall(_REFERENCE.sub(_plain_reference, text))]
    settings += [({"perl": "PERL5LIB", "ruby": "RUBYLIB"}[name], at) for name, at in _INCLUDED.findall(script)]
    for name, value in settings:
        for entry in value.split(":"):
            if entry == f"${name}" and (name == "PATH" or name in env):
                continue
            entry = "." if entry == f"${name}" else entry.replace("$PWD", ".")
            found.setdefault(name, []).extend(sorted({normpath(join(folder, entry)) for folder in folders}))
    return {name: ":".join(filter(None, entries)) for name, entries in found.items()}


def _plain_reference(reference: re.Match[str]) -> str:
    return f"${reference[1]}" if reference[1] else "$PWD"


def _substituted(script: str) -> str:
    """Return the script with the values of the variables that it sets to a word."""
    for name, value in _ASSIGNED.findall(script):
        script = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, script)
    return script


def _started_in(script: str, workdir: str) -> set[str]:
    """Return the directories in which the commands of a script start."""
    folders = {workdir}
    for found in dict.fromkeys(_CHANGED_DIRECTORY.findall(_substituted(script))):
        folders |= {normpath(join(each, found)) for each in folders}
        if len(folders) > _MOST_FOLDERS:
            break
    return folders


def python_folders(script: str, workdir: str, made: Collection[str], code: str = "") -> set[str]:
    """Return the directories in which Python looks for modules first when this script or Python `code` starts it. If
    Python runs a command, a module or standard input, it is the working directory. If it runs a program, it is the
    program's directory, unless the program is one of the files that the agent `made` or is in `TESTS_DIR`. The
    directories that `code` adds to `sys.path` count too."""
    folders = _started_in(script, workdir)
    own = set(folders) if _INLINE_PYTHON.search(script) else set()
    programs = [(folders, each) for each in _PYTHON_FILE.findall(_substituted(script))]
    starts_in = list(dict.fromkeys([".", *_STARTED_IN.findall(code)]))[:_MOST_FOLDERS]
    places = set(list(dict.fromkeys(normpath(join(each, at)) for at in starts_in for each in folders))[:_MOST_PLACES])
    for program in _STARTED_PYTHON.findall(re.sub(r"[\s\"',\[\]()]+", " ", code.replace("sys.executable", "python3"))):
        if program:
            programs.append((places, program))
        else:
            own |= places
    own |= {normpath(join(each, at)) for each in folders for at in _SYS_PATH.findall(code)}
    for starts, program in programs:
        paths = {normpath(join(folder, program)) for folder in starts}
        own |= {dirname(path) for path in paths if not is_below(path, (TESTS_DIR,))} if not paths & set(made) else set()
    return own


async def changed_conftests(changes: Sequence[Change], words: Collection[str], prepared: Prepared) -> tuple[str, ...]:
    """Return the agent's changes to prepared files that only tests use, unless the task's `words` name the file."""
    names = (CONFIG_NAMES - _SHARED_SETTINGS).difference(words)
    found = [change.path for change in changes if basename(change.path) in names]
    if not found:
        return ()
    async with prepared() as before:
        return tuple([path for path in found if await before.stat(path) is not None])


async def ignored_settings(
    slot: Slot, changes: Sequence[Change], words: Collection[str], prepared: Prepared
) -> tuple[str, ...]:
    """Return the agent's files that pytest must not load for a verifier: settings, `conftest.py` and the entry points
    of packages, unless the task's `words` name the file or the plugin.

    Other programs, and the agent's own tests, may use these files, so they are not hidden.
    """
    plugins = {word.replace("-", "_") for word in words if "pytest" in word}
    ignored, shared = [], []
    for change in changes:
        name = basename(change.path)
        if name == _ENTRY_POINTS and re.split("[-.]", basename(dirname(change.path)))[0] not in plugins:
            ignored.append(change.path)
        elif name in _SHARED_SETTINGS and change.kind == "file" and name not in words:
            shared.append(change.path)
        elif name in CONFIG_NAMES and name not in words:
            ignored.append(change.path)
    if shared:
        async with prepared() as before:
            ignored += [path for path in shared if await _of_pytest(slot, path) != await _of_pytest(before, path)]
    return tuple(ignored)


async def _of_pytest(slot: Slot, path: str) -> object:
    """Return the part of a settings file that pytest reads: tables of a TOML file, or lines of an INI file."""
    try:
        text = (await slot.read_bytes(path, max_bytes=_MOST_SETTINGS_BYTES)).decode("utf-8", "replace")
        if path.endswith(".toml"):
            return read_toml(text).get("tool", {}).get("pytest")
    except InfraError:
        raise
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError, RecursionError, AttributeError):
        return path  # pytest may read the file in another way
    found, within = [], False
    for line in text.splitlines():
        within = "pytest" in line if line.startswith("[") else within
        found += [line] if within else []
    return found or None


def hidden_paths(
    changes: Sequence[Change],
    planted: Sequence[str],
    *,
    script: str,
    declared: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    files: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the paths that the grading slot must not have: `planted`, and the paths that could influence this
    `script`, which runs with the variables `env`.

    A start-up file that the task is about (`declared`) is not hidden. A directory named like one of the verifier's
    `files` is hidden, because `cp` would copy the file into it instead of replacing it. Compiled files that Python
    would load in place of a source are hidden, and settings of pytest that the verifier has too.
    """
    loaded = {path for name, value in (env or {}).items() if name in _LOADING for path in _ABSOLUTE.findall(value)}
    names = {name for name in map(basename, files) if "." in name}
    starts_shell = STARTUP_FILES.search(script) is not None
    found = {
        change.path
        for change in changes
        if (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (change.path in _PARENTS and change.kind != "dir")
        or (change.path not in declared and is_below(change.path, loaded))
        or (change.kind == "dir" and basename(change.path) in names)
        or (f"/{_COMPILED}/" in change.path and change.kind != "deleted" and change.path not in declared)
        or basename(change.path) in names & CONFIG_NAMES
        or (starts_shell and change.path not in declared and _STARTUP.fullmatch(change.path))
    }
    return (*ALWAYS_HIDDEN, *sorted(found.union(planted)))
