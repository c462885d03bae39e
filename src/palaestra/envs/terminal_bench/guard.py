"""Which of an agent's changes must not decide its own grade. Does no I/O.

A verifier runs programs of the same root that the agent could change as root. Left out of the graded view are, besides
what no check of any environment may meet (`rollouts/plants.py`): where the verifier's own files lie, interpreters and
tools that verifiers use where the image had them, the C library and its loader, what Python starts by itself, and
pytest's configuration above the tests.

Invariant: what decides is the path alone. Not covered: programs that are none of these and that a verifier trusts, and
tests that import the work into their own process; `verifier.py` holds a passing verdict against tests that must fail.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from posixpath import basename, dirname

from palaestra.envs.swe.protected import CONFIG_NAMES
from palaestra.envs.terminal_bench.scripts import STARTUP_FILES
from palaestra.envs.terminal_bench.tasks import TESTS_DIR, VERIFIER_LOGS
from palaestra.rollouts.plants import PROGRAM_DIRECTORIES, planted
from palaestra.sandbox.base import Change

ALWAYS = (TESTS_DIR, VERIFIER_LOGS, "/solution", "/oracle", "/opt/palaestra")
"""Left out whether they were changed or not: a link planted there would lead elsewhere."""

_NAMES = """
base64 chown comm curl file find gawk git grep gunzip gzip jq ln mawk openssl perl pgrep py.test pytest python python2
python3 realpath rmdir setpriv sha1sum sha512sum sqlite3 su sudo tar uv uvx wget whoami xxd
"""
TOOLS = frozenset(_NAMES.split())
"""What verifiers use of an image besides what every root has; a task may install one that its image lacks."""

_VERSIONED = re.compile(r"(python|perl)\d[\d.]*")
_LOADER = re.compile(
    r"/(?:usr/)?lib(?:32|64|x32)?/(?:[\w-]+-linux-[\w]+/)?(?:ld-[\w.-]+|lib(?:c|m|dl|pthread)[.-][\w.-]*)"
)
_PYTHON = re.compile(r"/(?:site-packages|dist-packages|python3?(?:\.\d+)?)/")
_STARTUP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)"
    r"|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)"
)


def left_out(
    changes: Sequence[Change],
    *,
    programs: Collection[str],
    script: str,
    workspace: str,
    kept: Collection[str] = (),
) -> tuple[str, ...]:
    """The paths that a graded view is cut by.

    `programs` are the names in the image's program directories before the agent came, `kept` those that a task may
    change. `script` is the verifier's, `workspace` the directory of the task.
    """
    starts_shell = STARTUP_FILES.search(script) is not None
    found = {
        change.path
        for change in changes
        if _is_tool(change.path, programs)
        or _LOADER.fullmatch(change.path)
        or (change.path.endswith(".pth") and _PYTHON.search(change.path))
        or (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (starts_shell and _STARTUP.fullmatch(change.path))
    }
    found |= set(planted(changes, workspace))
    return (*ALWAYS, *sorted(path for path in found if not _is_kept(path, kept)))


def _is_tool(path: str, programs: Collection[str]) -> bool:
    name = basename(path)
    return (
        dirname(path) in PROGRAM_DIRECTORIES
        and name in programs
        and (name in TOOLS or _VERSIONED.fullmatch(name) is not None)
    )


def _is_kept(path: str, kept: Collection[str]) -> bool:
    return dirname(path) in PROGRAM_DIRECTORIES and basename(path) in kept
