"""Which of an agent's changes must not decide its own grade. Does no I/O.

A verifier runs programs of the same root that the agent could change as root. Left out of the graded view are: where
the verifier's own files lie, programs that verifiers use where the image had them (a changed or a shadowing one), what
the loader and Python start by themselves, and pytest's configuration above the tests.

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
from palaestra.sandbox.base import Change

ALWAYS = (TESTS_DIR, VERIFIER_LOGS, "/solution", "/oracle", "/opt/palaestra", "/etc/ld.so.preload")
"""Left out whether they were changed or not: a link planted there would lead elsewhere."""

PROGRAM_DIRECTORIES = (
    "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/root/.local/bin", "/root/bin",
)  # fmt: skip

_NAMES = """
[ awk base64 basename bash cat chmod chown cmp comm cp curl cut dash date diff dirname echo egrep env false fgrep file
find gawk git grep gunzip gzip head id jq kill ln ls mawk md5sum mkdir mv od openssl perl pgrep printf ps py.test pytest
python python2 python3 readlink realpath rm rmdir sed seq setpriv sh sha1sum sha256sum sha512sum sleep sort sqlite3
stat su sudo tail tar tee test timeout touch tr true uniq uv uvx wc wget whoami xargs xxd
"""
PROGRAMS = frozenset(_NAMES.split())
"""What verifiers use."""

_VERSIONED = re.compile(r"(python|perl)\d[\d.]*")
_LOADER = re.compile(
    r"/(?:usr/)?lib(?:32|64|x32)?/(?:[\w-]+-linux-[\w]+/)?(?:ld-[\w.-]+|lib(?:c|m|dl|pthread)[.-][\w.-]*)"
)
_PYTHON = re.compile(r"/(?:site-packages|dist-packages|python3?(?:\.\d+)?)/")
_STARTUP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)"
)


def left_out(
    changes: Sequence[Change], *, programs: Collection[str], script: str, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """The paths that a graded view is cut by.

    `programs` are the names in the image's program directories before the agent came, `kept` those of them that a task
    may change. `script` is the verifier's.
    """
    starts_shell = STARTUP_FILES.search(script) is not None
    found = [
        change.path
        for change in changes
        if _is_program(change.path, programs, kept)
        or _LOADER.fullmatch(change.path)
        or _starts_python(change.path)
        or (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (starts_shell and _STARTUP.fullmatch(change.path))
    ]
    return (*ALWAYS, *found)


def _is_program(path: str, programs: Collection[str], kept: Collection[str]) -> bool:
    name = basename(path)
    if dirname(path) not in PROGRAM_DIRECTORIES or name in kept:
        return False
    return name in programs and (name in PROGRAMS or _VERSIONED.fullmatch(name) is not None)


def _starts_python(path: str) -> bool:
    """Modules and files that any Python imports or reads when it starts."""
    name = basename(path)
    if name in ("sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"):
        return True
    return name.endswith(".pth") and _PYTHON.search(path) is not None
