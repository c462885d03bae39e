"""The files of a verifier in a slot: its tests, our replacements for its bootstrap, and what it must not see.

`hidden_paths` selects changes of the agent that could influence its grade, besides those that no grader of any
environment sees (`rollouts/grading/tampering.py`): the folders of the verifier, pytest's configuration above the tests,
and start-up files of shells if the verifier's script loads them. The path alone decides.

Not covered: programs that a task installed and a verifier trusts, and tests that import the work into their process;
`verifier.py` runs a passing verdict against negated tests.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from collections.abc import Collection, Mapping, Sequence
from posixpath import basename, dirname

from palaestra.core.errors import GraderError, InfraError
from palaestra.sandbox.slot import Change, Slot
from palaestra.suites.grading.harness import send_scripts
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
"""Hidden whether they changed or not, because a planted link could lead elsewhere."""

_PARENTS = frozenset({"/logs", "/opt"})
"""Directories above hidden ones. A link in the place of one would put the verifier's files among the agent's."""

_NOT_FOR_LINKS = (*ALWAYS_HIDDEN, "/proc", "/dev/fd", "/dev/stdin")
_MOST_LINKS = 40

_STARTUP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)"
    r"|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)",
    re.DOTALL,
)

_INLINE_PYTHON = re.compile(r"\bpython[\d.]*\s+(?:-[A-Za-z]+\s+)*(?:-[A-Za-z]*[cm]\b|-(?=[\s;]|$)|<<)", re.M)
"""Python that looks for modules in its working directory before its own: a command, a module, or standard input."""

_CHANGED_DIRECTORY = re.compile(r"^\s*(?:cd|pushd)\s+['\"]?(/[^\s;&|'\"]+)", re.M)
_MODULE = re.compile(r"(\w+)(?:/__init__)?(?:\.[\w-]+)*\.(?:py|pyc|so)")

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
    """The name of the script below `TESTS_DIR`."""
    return task.verifier.script.rpartition("/")[2]


async def install(
    slot: Slot,
    command: Sequence[str],
    dependencies: Sequence[str],
    library_path: str | None,
    *,
    ends_well: bool = False,
    all_tests: bool = False,
) -> None:
    """Copy our commands into the slot, to precede PATH.

    `command` starts Python (empty: not needed); `library_path` is the image's LD_LIBRARY_PATH. `ends_well`: pytest ends
    with status 0, so that the script starts it as often as for passing work. `all_tests`: ignore a selection by name.
    """
    await slot.remove(HARNESS_DIR)
    await send_scripts(
        slot, HARNESS_DIR, "verdict_channel.py", "audit_hook.py", "pytest_launcher.py", "pytest_reporter.py"
    )
    plan = {
        "dependencies": list(dependencies),
        "tests": TESTS_DIR,
        "library_path": library_path,
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


async def remove_links(slot: Slot, changes: Sequence[Change]) -> tuple[str, ...]:
    """Remove the agent's links that lead to the verifier's files or into `/proc`, before those files exist.

    Returns their paths. A link is followed through other links as the slot's file system has them now.
    """
    removed = []
    for change in changes:
        if change.kind == "symlink" and await _leads_away(slot, change.path):
            await slot.remove(change.path)
            removed.append(change.path)
    return tuple(removed)


async def _leads_away(slot: Slot, path: str) -> bool:
    """Whether a link ends below a hidden path. A chain that does not end in time does."""
    parts = [part for part in path.split("/") if part]
    at, followed = "", 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            at = dirname(at).rstrip("/")
            continue
        step = f"{at}/{part}"
        if any(step == hidden or step.startswith(f"{hidden}/") for hidden in _NOT_FOR_LINKS):
            return True
        try:
            entry = await slot.stat(step)
        except InfraError:
            raise
        except OSError:
            return False
        if entry is None or entry.kind != "symlink":
            at = step
            continue
        followed += 1
        if followed > _MOST_LINKS:
            return True
        target = [each for each in entry.target.split("/") if each not in ("", ".")]
        parts, at = [*target, *parts], "" if entry.target.startswith("/") else at
    return False


def hidden_paths(
    changes: Sequence[Change],
    planted: Sequence[str],
    *,
    script: str,
    declared: Sequence[str] = (),
    workdir: str = "/app",
    words: Collection[str] = (),
) -> tuple[str, ...]:
    """The paths to leave out of the graded view: `planted`, and those that could influence this `script`.

    The script starts in `workdir`. A start-up file of a shell that the task is about (`declared`), and a module whose
    file is among the `words` of the task's texts, stay.
    """
    folders = {workdir, *_CHANGED_DIRECTORY.findall(script)} if _INLINE_PYTHON.search(script) else set()
    starts_shell = STARTUP_FILES.search(script) is not None
    found = {
        change.path
        for change in changes
        if (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (change.path in _PARENTS and change.kind != "dir")
        or (starts_shell and change.path not in declared and _STARTUP.fullmatch(change.path))
        or any(_shadows_python(change.path, folder.rstrip("/"), words) for folder in folders)
    }
    return (*ALWAYS_HIDDEN, *sorted(found.union(planted)))


def _shadows_python(path: str, folder: str, words: Collection[str]) -> bool:
    """Whether Python that starts in a folder would import this file in place of a module of its standard library."""
    match = _MODULE.fullmatch(path.removeprefix(f"{folder}/")) if path.startswith(f"{folder}/") else None
    return match is not None and match[1] in sys.stdlib_module_names and f"{match[1]}.py" not in words
