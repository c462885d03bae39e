"""A small root file system out of this machine's own programs: what an image is, without a registry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

NAMES = """
base64 basename bash cat chmod chown cp date dirname env false find grep gzip head id kill ln ls mkdir mv rm rmdir sed
seq setpriv sh sleep sort tail tar test touch tr true wc whoami
"""
PROGRAMS = NAMES.split()


def make_root(root: Path) -> Path:
    """Copy the programs with the libraries they load, and the few settings that they read."""
    for name in ("usr/bin", "etc", "proc", "dev", "sys", "run", "root", "tmp", "var/tmp", "opt", "srv"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    libraries = _libraries(sys.executable)  # the tests' interpreter is mounted, and runs with the image's C library
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None, name
        shutil.copy2(found, root / "usr/bin" / name)
        libraries |= _libraries(found)
    for library in libraries:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root


def _libraries(program: str) -> set[str]:
    shown = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    inside = sys.base_prefix + "/"
    return {word for word in shown.split() if word.startswith("/") and not word.startswith(inside)}
