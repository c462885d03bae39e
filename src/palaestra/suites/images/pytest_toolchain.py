"""pytest for verifiers: an interpreter and packages of this machine, mounted read-only where no agent can change them.

The interpreter lies at a place of its own. Where it cannot run there (another C library than the image's, or one that
belongs to this machine's system directories), the image's own `python3` serves, with the same packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaestra.core.errors import PrepareError
from palaestra.sandbox.slot import Mount, Slot
from palaestra.suites.images.interpreter_libraries import gathered
from palaestra.suites.swe.install import DependencyCache, interpreter
from palaestra.suites.swe.swe_rows import Install

PYTEST = ("pytest==8.4.2", "pluggy==1.6.0", "iniconfig==2.1.0", "packaging==25.0", "pygments==2.19.2")
"""What is mounted when a script asks for nothing else. All of it is plain Python and runs on 3.9 and newer."""

PYTHON_DIR = "/opt/palaestra/python"
LIBRARIES_DIR = "/opt/palaestra/libraries"

_FLAGS = ("-E", "-s", "-S", "-B")
_TRIAL = "import sys, json, _pytest.config; sys.exit(sys.version_info < (3, 9))"


@dataclass(frozen=True, slots=True)
class TestTools:
    """How pytest is started. `commands` are tried in order; the mounts must be in the slot's spec.

    Without commands there is no pytest, for scripts that do not ask for it.
    """

    __test__ = False

    commands: tuple[tuple[str, ...], ...] = ()
    mounts: tuple[Mount, ...] = ()
    dependencies: tuple[str, ...] = ()


async def find_test_tools(cache: DependencyCache, requirements: Sequence[str]) -> TestTools:
    """The tools for a task whose script installs these packages. Raises `PrepareError` where they cannot be had."""
    try:
        if requirements:
            chain = await cache.toolchain(Install(requirements=("pytest<9", *requirements)), closed=False)
        else:
            chain = await cache.toolchain(Install(requirements=PYTEST))
    except PrepareError as error:
        raise PrepareError(f"what its tests run with is not to be had: {error}") from None
    executable, prefixes = interpreter()
    mounts = tuple(mount for mount in chain.mounts if mount not in prefixes)
    commands = [_started("/usr/bin/python3"), _started("/usr/local/bin/python3")]
    for prefix in prefixes:  # at a place that every user of the slot may enter, wherever it lies on the host
        mounts = (*mounts, replace(prefix, target=PYTHON_DIR))
        moved = _started(executable.replace(prefix.target, PYTHON_DIR, 1))
        commands.insert(0, ("env", f"LD_LIBRARY_PATH={PYTHON_DIR}/lib:{LIBRARIES_DIR}", *moved))
        mounts = (*mounts, Mount(str(await gathered(cache.root)), LIBRARIES_DIR))
    return TestTools(tuple(commands), mounts, chain.dependencies)


def _executable(command: Sequence[str]) -> str:
    return next(word for word in command if word.startswith("/"))


def _started(executable: str) -> tuple[str, ...]:
    return (executable, *_FLAGS)


async def working_command(slot: Slot, tools: TestTools) -> tuple[str, ...]:
    """The first command that runs pytest in this slot. Raises `PrepareError` when none does."""
    if not tools.commands:
        return ()
    complaints = []
    path = f"import sys; sys.path += {list(tools.dependencies)!r}; "
    for command in tools.commands:
        result = await slot.execute([*command, "-c", path + _TRIAL], cwd="/", timeout_s=60)
        if result.success:
            return command
        complaints.append(f"{_executable(command)}: {result.error} {result.output[-200:].strip()}")
    raise PrepareError("no Python runs its tests in this image: " + "; ".join(complaints))
