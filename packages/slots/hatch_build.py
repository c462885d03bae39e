"""Builds the init of slots (`sandbox/slotd/native/`), which slots need for their namespaces.

As a build hook of hatchling, this module compiles with `cc` or with the `ziglang` package: for this machine when a
checkout is installed, and for x86-64 and aarch64 when a wheel is built. As a script, `python hatch_build.py` builds for
this machine, and exits with code 1 if it cannot.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "src/palaestra_slots/sandbox/slotd/native"
MACHINES = ("x86_64", "aarch64")
FLAGS = ("-std=gnu11", "-Os", "-s", "-static", "-Wall")


def build(machines: tuple[str, ...]) -> list[Path]:
    """Return the binaries for these machines that exist or can be built."""
    sources = sorted(FOLDER.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    built = []
    for machine in machines:
        target = FOLDER / f"init-{machine}-{digest}"
        if target.exists() or _compile(target, machine):
            built.append(target)
            for old in FOLDER.glob(f"init-{machine}-*"):
                if old != target:
                    old.unlink(missing_ok=True)
    return built


def _compile(target: Path, machine: str) -> bool:
    """Try each compiler until one succeeds."""
    unfinished = target.with_suffix(".part")
    for compiler in _compilers(machine):
        try:
            command = [*compiler, *FLAGS, "-o", str(unfinished), *map(str, FOLDER.glob("*.c"))]
            done = subprocess.run(command, capture_output=True, timeout=600, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            unfinished.replace(target)
            return True
    unfinished.unlink(missing_ok=True)
    return False


def _compilers(machine: str) -> list[list[str]]:
    """Return the compilers to try. Zig comes first, because it builds for both machines, and its C library, musl, keeps
    the process small."""
    found = []
    if find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"])
    if machine == platform.machine():
        musl = shutil.which("musl-gcc")
        if musl is not None:  # the compiler finds only its own headers; Linux's headers are the system's
            found.append([musl, "-idirafter", "/usr/include", "-idirafter", f"/usr/include/{machine}-linux-gnu"])
        found += [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    return found


def main() -> int:
    """Build for this machine."""
    if platform.machine() in MACHINES and not build((platform.machine(),)):
        sys.stderr.write(
            "the init of slots was not built: no C compiler here links statically; install one "
            "(a package like gcc, or `pip install ziglang`) and run this again\n"
        )
        return 1
    return 0


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script by an interpreter without hatchling
    pass
else:

    class NativeInit(BuildHookInterface[Any]):
        """Adds the binaries to the distribution that is built."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile the binaries; hatchling calls this before it collects the files."""
            machines = MACHINES if version == "standard" else (platform.machine(),)
            for path in build(tuple(machine for machine in machines if machine in MACHINES)):
                build_data["artifacts"].append(str(path.relative_to(Path(__file__).parent)))


if __name__ == "__main__":
    sys.exit(main())
