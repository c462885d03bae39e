"""Place the files of a verifier in a slot: its tests, and the commands that replace its installation of test tools.
Find the agent's changes that a guarded verifier must not see.

`hidden_paths` selects changes of the agent that decide its grade: files in the folders of the verifier, pytest's
configuration above the tests, and start-up files that shells of the verifier load. It adds these paths to those of the
table in `rollouts/grading/tampering.py`. `ignored_settings` selects settings of pytest that apply only to the agent's
own tests.

Not covered: programs that a task installed and a verifier trusts, and tests that import the work into their process;
`verifier.py` checks a passing verdict with falsified tests.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from posixpath import basename, dirname

from palaestra.rollouts.grading.tampering import is_below
from palaestra_slots.core.config import read_toml
from palaestra_slots.core.errors import GraderError, InfraError
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.slot import Change, Slot
from palaestra_suites.grading.harness import send_scripts
from palaestra_suites.swe import protected
from palaestra_suites.terminal_bench.offline_script import STARTUP_FILES, GradedPart
from palaestra_suites.terminal_bench.terminal_task import (
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

OUTSIDE_FILES = "outside_files_decide"
"""The label of work that a verifier pays less if files outside of the working directory are as prepared: settings,
modules and data that programs look for whatever they are called for. Honest installations look the same."""

_PARENTS = frozenset({"/logs", "/opt"})
"""Parent directories of hidden paths. A link in place of such a directory would put the verifier's files into a folder
of the agent."""

_STARTUP = re.compile(
    r"/(?:.+/)?\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)"
    r"|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)",
    re.DOTALL,
)

_LOADING = frozenset(
    {"BASH_ENV", "ENV", "LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "PYTHONSTARTUP", "PERL5OPT", "RUBYOPT", "NODE_OPTIONS"}
    | {"GCONV_PATH", "LOCPATH", "OPENSSL_CONF", "OPENSSL_MODULES", "GIT_CONFIG_GLOBAL", "GIT_EXEC_PATH"}
)
"""Variables that name files that shells, the loader and interpreters load when they start, whatever they run."""

CONFIG_NAMES = protected.CONFIG_NAMES - {"pyvenv.cfg", "noxfile.py", ".coveragerc"}
"""Settings files that pytest reads, or code that it or Python runs."""

_ABSOLUTE = re.compile(r"/[^\s:;=,'\"]+")

_COMPILED = "__pycache__"
_ENTRY_POINTS = "entry_points.txt"
_SHARED_SETTINGS = frozenset({"pyproject.toml", "setup.cfg", "setup.py", "tox.ini"})
"""Settings files that other programs than test runners read too."""
_MOST_SETTINGS_BYTES = 1 << 18
_FRESH_S = 30.0

INLINE_PYTHON = re.compile(r"\bpython[\d.]*\s+(?:-[A-Za-z]+\s+)*(?:-[A-Za-z]*[cm]\b|-(?=[\s;]|$)|<<)", re.M)
"""Calls of Python that look for modules in the working directory first: a command, a module, or standard input."""

_STARTS = re.compile(
    r"\b(?:python[\d.]*|(?:ba|da)?sh|source|exec|node|perl|ruby|php|java|Rscript|timeout|subprocess|Popen|system|run)\b"
)
"""Words of lines that start a program."""
COPIES_TESTS = re.compile(r"\b(?:cp|mv|install|rsync|ln)\b[^\n]*(?:/tests|TEST_?DIR)")

_ABOUT_SHELLS = re.compile(
    r"\b(?:login|interactive|new)\s+(?:\w+\s+)?shells?\b|\baliase?s?\b|\.(?:bash)?rc\b|\bprofile\b", re.IGNORECASE
)
"""Signs that a task is about the start-up files of shells."""

_NEEDS = """\
#!/bin/sh
# Replaces an installation: the verifier cannot work unless the packages are installed.
{check} > /dev/null 2>&1 && exit 0
{unmet}
exit 97
"""
_UNMET = """printf '{"kind": "unmet", "what": "%s"}\\n' "$*" >&3"""
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
    names: Collection[str] = (),
    ends_well: bool = False,
    blank: bool = False,
) -> None:
    """Copy the commands that replace `pytest`, `uv` and `uvx` into a folder of the slot that comes first in PATH.

    `command` starts Python, and is empty if Python is not needed. `library_path` is the image's LD_LIBRARY_PATH.
    `ignored` are files that pytest does not load for the verifier's tests, whose files have these `names`. With
    `ends_well`, pytest exits with status 0, so that the script starts it as often as for passing work. With `blank`,
    tracebacks find no lines of tests.
    """
    await slot.remove(HARNESS_DIR)
    await send_scripts(slot, HARNESS_DIR, "pytest_launcher.py", "pytest_reporter.py", "verdict_broker.py")
    plan = {
        "dependencies": list(dependencies),
        "tests": TESTS_DIR,
        "library_path": library_path,
        "ignored": sorted(ignored),
        "names": sorted(names),
        "ends_well": ends_well,
        "blank": blank,
    }
    await slot.write_text(f"{HARNESS_DIR}/plan.json", json.dumps(plan))
    launch = "exec " + " ".join(f'"{word}"' for word in (*command, f"{HARNESS_DIR}/pytest_launcher.py"))
    for name, check in _CHECKS.items():
        text = _NEEDS.format(check=check, unmet=f'{launch} needs "$@"' if command else _UNMET)
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", text, mode=0o755)
    for name in SHIMS if command else ():
        text = f'#!/bin/sh\n{launch} {name} "$@"\n'
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", text, mode=0o755)


async def place_tests(slot: Slot, part: GradedPart, instead: Mapping[str, str], *, keeps: bool) -> None:
    """Remove old rewards and copy the verifier's files. If `keeps` is true, other files stay in the verifier's folders,
    as in Harbor for a task without steps. Raises `GraderError`."""
    task, script = part.task, part.script
    logs = f"{VERIFIER_LOGS} {AGENT_LOGS} {ARTIFACT_LOGS}"
    old = f"{VERIFIER_LOGS}/reward.txt {VERIFIER_LOGS}/reward.json" if keeps else f"{TESTS_DIR} {VERIFIER_LOGS}"
    fresh = f"rm -rf {old} && mkdir -p {TESTS_DIR} {logs} && chmod 777 {logs}"
    problem = f"placing the files of the verifier failed in {slot.slot_id}"
    # in the agent's own slot, its processes may stop each new one
    await check_execute(slot, ["/bin/sh", "-c", fresh], problem, error=GraderError, timeout_s=_FRESH_S)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in task.verifier.files().items():
            if name not in instead and name != script_name(task) and "__pycache__" not in path.parts:
                archive.add(path, name, recursive=False, filter=_owned_by_root)
    unpack = ["tar", "-x", "-C", TESTS_DIR]
    await check_execute(slot, unpack, problem, stdin=packed.getvalue(), error=GraderError)
    for name, text in {**script.others, **instead}.items():
        await slot.write_text(f"{TESTS_DIR}/{name}", text)
    await slot.write_text(f"{TESTS_DIR}/{script_name(task)}", script.text, mode=0o755)


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode |= 0o444
    return info


Prepared = Callable[[], AbstractAsyncContextManager[Slot]]
"""Opens a slot with the prepared workspace, without the agent's work."""


def runs(texts: Collection[str], path: str, workdir: str) -> bool:
    """Return whether one of a verifier's files runs the program at a path, or gives it to a program that it runs."""
    texts = [text for text in texts if basename(path) in text]
    if not texts:
        return False
    bare = "" if "." in basename(path) else "(?<=/)"  # a name without a folder is that of a program in PATH
    names = "|".join([*map(re.escape, (path, path.removeprefix(f"{workdir}/"))), bare + re.escape(basename(path))])
    named = re.compile(rf"(?<![\w.-])(?:{names})(?![\w/-])")
    found = [(text, line, match) for text in texts for line in text.splitlines() if (match := named.search(line))]
    return any(
        _STARTS.search(line) or not line[: match.start()].strip("\"' (!") or ("subprocess" in text and "." in path)
        for text, line, match in found
    )


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
        if change.kind == "deleted":
            continue
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
    about: str = "",
    env: Mapping[str, str] | None = None,
    files: Collection[str] = (),
    workdir: str = "",
) -> tuple[str, ...]:
    """Return the paths that the grading slot must not have: `planted`, and the paths that could influence this
    `script`, which runs with the variables `env`.

    Start-up files of shells are hidden if the script itself loads them, but not those that the task names (`declared`)
    and not if the instruction `about` the task mentions them. A directory named like one of the verifier's
    `files` is hidden, because `cp` would copy the file into it instead of replacing it. So is a Python file in the
    working directory that is named like one of them, because Python would import it first. Compiled files that Python
    would load in place of a source are hidden, and settings of pytest that the verifier has too.
    """
    loaded = {path for name, value in (env or {}).items() if name in _LOADING for path in _ABSOLUTE.findall(value)}
    names = {name for name in map(basename, files) if "." in name}
    own = {name for name in names if name.endswith(".py") and name not in about}
    starts_shell = STARTUP_FILES.search(script) is not None and _ABOUT_SHELLS.search(about) is None
    found = {
        change.path
        for change in changes
        if (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (change.path in _PARENTS and change.kind != "dir")
        or (change.path not in declared and is_below(change.path, loaded))
        or (change.kind == "dir" and basename(change.path) in names)
        or (f"/{_COMPILED}/" in change.path and change.kind != "deleted" and change.path not in declared)
        or basename(change.path) in names & CONFIG_NAMES
        or (dirname(change.path) == workdir and basename(change.path) in own)
        or (starts_shell and change.path not in declared and _STARTUP.fullmatch(change.path))
    }
    return (*ALWAYS_HIDDEN, *sorted(found.union(planted)))
