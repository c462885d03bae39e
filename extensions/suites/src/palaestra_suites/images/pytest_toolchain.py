"""Provide pytest to verifiers: the interpreter of the image with its packages, and pytest from this package's cache,
mounted read-only.

Tests may import packages of the image. The image's own `python3` therefore runs the tests if the agent cannot have
changed it. That is the case for a system interpreter, which the grading slot has in its original state
(`rollouts/grading/tampering.py`). The interpreter starts without `site`, so that no start-up file runs. The directories
that `site` finds before the agent begins are added to the import path after the mounted packages.

Otherwise an interpreter of this machine runs the tests. It is mounted in the slot, with the libraries that it loads,
except the C library. If it cannot run in an image either (a different C library, or an interpreter in this machine's
system directories), the image's own `python3` runs with the mounted packages only.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.images.build_once import build_once
from palaestra_slots.sandbox.slot import Mount, Slot
from palaestra_suites.toolchain.toolchain import DependencyCache, Install, interpreter

PYTEST = ("pytest==8.4.2", "pluggy==1.6.0", "iniconfig==2.1.0", "packaging==25.0", "pygments==2.19.2")
"""The packages that are mounted if a script requests no others. All of them are pure Python for 3.9 and newer."""

PYTHON_DIR = "/opt/palaestra/python"
LIBRARIES_DIR = "/opt/palaestra/libraries"

_C_LIBRARY = re.compile(r"(?:ld-linux|ld-musl|lib(?:c|m|dl|rt|pthread|util|resolv|nsl|crypt)[.-])")
_GATHER_S = 60.0

_FLAGS = ("-E", "-s", "-S", "-B")
_TRIAL = "import sys, json, _pytest.config; sys.exit(sys.version_info < (3, 9))"


@dataclass(frozen=True, slots=True)
class TestTools:
    """The ways to start pytest. `commands` are tried in order; they are empty if the script does not use pytest.

    The slot's spec must contain `mounts`.
    """

    __test__ = False

    commands: tuple[tuple[str, ...], ...] = ()
    mounts: tuple[Mount, ...] = ()
    dependencies: tuple[str, ...] = ()


async def find_test_tools(cache: DependencyCache, requirements: Sequence[str]) -> TestTools:
    """Return the tools for a task whose script installs these packages. Raises `PrepareError` if they cannot be
    installed."""
    try:
        if requirements:
            chain = await cache.toolchain(Install(requirements=("pytest<9", *requirements)), closed=False)
        else:
            chain = await cache.toolchain(Install(requirements=PYTEST))
    except PrepareError as error:
        raise PrepareError(f"the packages of its tests cannot be installed: {error}") from None
    executable, prefixes = interpreter()
    mounts = tuple(mount for mount in chain.mounts if mount not in prefixes)
    commands = [_python_command("/usr/bin/python3"), _python_command("/usr/local/bin/python3")]
    for prefix in prefixes:  # at a path that every user of the slot may read
        mounts = (*mounts, replace(prefix, target=PYTHON_DIR))
        moved = _python_command(executable.replace(prefix.target, PYTHON_DIR, 1))
        commands.insert(0, ("env", f"LD_LIBRARY_PATH={PYTHON_DIR}/lib:{LIBRARIES_DIR}", *moved))
        mounts = (*mounts, Mount(str(await _libraries(cache.root)), LIBRARIES_DIR))
    return TestTools(tuple(commands), mounts, chain.dependencies)


def _executable(command: Sequence[str]) -> str:
    return next(word for word in command if word.startswith("/"))


def _python_command(executable: str) -> tuple[str, ...]:
    return (executable, *_FLAGS)


async def working_command(slot: Slot, tools: TestTools) -> tuple[str, ...]:
    """Return the first command that runs pytest in this slot. Raises `PrepareError` if none does."""
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


_IMAGE_PYTHONS = ("python3", "/usr/local/bin/python3", "/usr/bin/python3")

_OWN = """
import glob, json, os, sys
given = json.loads(sys.argv[1])
tag = sys.implementation.cache_tag
foreign = [name for at in given for name in glob.glob(at + "/**/*.cpython-*.so", recursive=True) if tag not in name]
if sys.version_info < (3, 9) or foreign:
    sys.exit(1)
sys.path[:0] = given
import _pytest.config
standard = os.path.dirname(os.__file__)
own = [at for at in sys.path if os.path.isdir(at) and at not in given and at != standard]
own = [at for at in own if os.path.dirname(at) != standard or at.endswith("-packages")]
print(json.dumps([os.path.realpath(sys.executable), own]))
"""


async def image_command(slot: Slot, tools: TestTools) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the command that starts the image's own interpreter, and the directories of its packages; None if it
    cannot run the tests.

    No agent may have used the slot before.
    """
    for python in _IMAGE_PYTHONS if tools.commands else ():
        trial = [python, "-s", "-B", "-c", _OWN, json.dumps(list(tools.dependencies))]
        result = await slot.execute(trial, cwd="/", timeout_s=60)
        try:
            executable, packages = json.loads(result.output.splitlines()[-1]) if result.success else ("", ())
        except (ValueError, IndexError):
            continue
        if executable.startswith("/usr/"):  # graders see these programs as they were before the agent
            return _python_command(executable), tuple(packages)
    return None


async def _libraries(cache: Path) -> Path:
    """Return a folder with the libraries that this interpreter loads. If they cannot be listed, the folder is empty;
    the image may then still have the libraries itself."""
    key = hashlib.sha256(f"{sys.executable}\0{sys.version}".encode()).hexdigest()[:20]

    async def gather(fresh: Path) -> None:
        for library in await _linked_libraries():
            shutil.copy2(library, fresh / library.name)

    return await build_once(cache / f"libraries-{key}", gather, timeout_s=_GATHER_S)


async def _linked_libraries() -> set[Path]:
    """Return the libraries that the interpreter and its extension modules load, according to `ldd`."""
    if shutil.which("ldd") is None:
        return set()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    modules = sorted(map(str, Path(sys.base_exec_prefix, sys.platlibdir, version, "lib-dynload").glob("*.so")))
    modules = [name for name in modules if "_tkinter" not in name]
    shown = await run_process(["ldd", sys.executable, *modules], timeout_s=_GATHER_S)
    found = {Path(word) for word in shown.stdout.decode(errors="replace").split() if word.startswith("/")}
    return {path for path in found if path.is_file() and ".so" in path.name and not _C_LIBRARY.match(path.name)}
