"""Which of an agent's changes must not decide its own grade. Does no I/O.

Left out of the graded view are, besides what no check of any environment may meet (`rollouts/grading/tampering.py`):
where the verifier's own files lie, pytest's configuration above the tests, and start-up files of shells where the
verifier's
script reads them.

Invariant: what decides is the path alone. Not covered: programs that a verifier trusts and a task has installed, and
tests that import the work into their own process; `verifier.py` holds a passing verdict against tests made false.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from posixpath import basename, dirname

from palaestra.sandbox.slot import Change
from palaestra.suites.swe.protected import CONFIG_NAMES
from palaestra.suites.terminal_bench.scripts import STARTUP_FILES
from palaestra.suites.terminal_bench.terminal_task import TESTS_DIR, VERIFIER_LOGS

ALWAYS = (TESTS_DIR, VERIFIER_LOGS, "/solution", "/oracle", "/opt/palaestra")
"""Left out whether they were changed or not: a link planted there would lead elsewhere."""

_STARTUP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bashrc|bash_profile|bash_login|profile|bash_aliases)"
    r"|/etc/(?:profile(?:\.d/.*)?|bash\.bashrc|environment)",
    re.DOTALL,
)


def left_out(changes: Sequence[Change], plants: Sequence[str], *, script: str) -> tuple[str, ...]:
    """The paths that a graded view is cut by: `plants`, and what this verifier's `script` would meet besides."""
    starts_shell = STARTUP_FILES.search(script) is not None
    found = {
        change.path
        for change in changes
        if (dirname(change.path) == "/" and basename(change.path) in CONFIG_NAMES)
        or (starts_shell and _STARTUP.fullmatch(change.path))
    }
    return (*ALWAYS, *sorted(found.union(plants)))
