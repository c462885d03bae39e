"""Puts a verifier's files into a slot: its tests, and the commands of ours that stand in for its bootstrap.

Where they lie nothing of an agent's is shown (`guard.py`).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from importlib import resources

from palaestra.core.errors import GraderError
from palaestra.sandbox.slot import Slot
from palaestra.suites.swe import reporter
from palaestra.suites.terminal_bench import launcher
from palaestra.suites.terminal_bench.scripts import Script
from palaestra.suites.terminal_bench.terminal_task import (
    AGENT_LOGS,
    ARTIFACT_LOGS,
    TESTS_DIR,
    VERIFIER_LOGS,
    TerminalTask,
)

HARNESS_DIR = "/opt/palaestra/verifier"
SHIMS = ("pytest", "py.test", "uv", "uvx", "palaestra-python")

_NEEDS = """\
#!/bin/sh
# Stands for an installation: what it asks for is there, or the verifier cannot work.
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
    """The file that starts the verifier, as it is called in the slot."""
    return task.verifier.script.rpartition("/")[2]


async def install(slot: Slot, command: Sequence[str], dependencies: Sequence[str], library_path: str | None) -> None:
    """Put our commands into the slot, to stand in front of PATH. `command` starts Python, empty where none is needed;
    `library_path` is the loader's path that the image sets."""
    await slot.remove(HARNESS_DIR)
    package = resources.files(launcher.__package__)
    await slot.write_bytes(f"{HARNESS_DIR}/launcher.py", package.joinpath("launcher.py").read_bytes())
    own = resources.files(reporter.__package__).joinpath("reporter.py")
    await slot.write_bytes(f"{HARNESS_DIR}/reporter.py", own.read_bytes())
    plan = {
        "dependencies": list(dependencies),
        "tests": TESTS_DIR,
        "library_path": library_path,
    }
    await slot.write_text(f"{HARNESS_DIR}/plan.json", json.dumps(plan))
    for name, check in _CHECKS.items():
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", _NEEDS.format(check=check), mode=0o755)
    start = " ".join(f'"{word}"' for word in command)
    for name in SHIMS if command else ():
        text = f'#!/bin/sh\nexec {start} "{HARNESS_DIR}/launcher.py" {name} "$@"\n'
        await slot.write_text(f"{HARNESS_DIR}/bin/{name}", text, mode=0o755)


async def place_tests(slot: Slot, task: TerminalTask, script: Script, instead: Mapping[str, str]) -> None:
    """Fresh log folders and the verifier's files. Raises `GraderError` where the slot does not take them."""
    logs = f"{VERIFIER_LOGS} {AGENT_LOGS} {ARTIFACT_LOGS}"
    fresh = f"rm -rf {TESTS_DIR} {VERIFIER_LOGS} && mkdir -p {TESTS_DIR} {logs} && chmod 777 {logs}"
    await _must(slot, ["/bin/sh", "-c", fresh], "making its folders")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in task.verifier.files().items():
            if name not in instead and name != script_name(task) and "__pycache__" not in path.parts:
                archive.add(path, name, recursive=False, filter=_owned_by_root)
    await _must(slot, ["tar", "-x", "-C", TESTS_DIR], "unpacking its tests", packed.getvalue())
    for name, text in {**script.others, **instead}.items():
        await slot.write_text(f"{TESTS_DIR}/{name}", text)
    await slot.write_text(f"{TESTS_DIR}/{script_name(task)}", script.text, mode=0o755)


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode |= 0o444
    return info


async def _must(slot: Slot, argv: Sequence[str], doing: str, stdin: bytes = b"") -> None:
    result = await slot.execute(argv, cwd="/", stdin=stdin, timeout_s=120)
    if not result.success:
        raise GraderError(f"{doing} failed in {slot.slot_id}: {result.error}\n{result.output[-500:]}")
