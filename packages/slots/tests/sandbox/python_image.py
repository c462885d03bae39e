"""A small root file system with Python 3.11 from this machine's own programs, for containers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = Path("/usr/bin/python3.11")
TOOLS = (
    *("bash", "sh", "dash", "cat", "ls", "id", "true", "sleep", "rm", "mkdir", "rmdir", "cp", "mv", "env", "head"),
    *("tail", "grep", "sed", "wc", "echo", "printf", "touch", "ln", "chmod", "seq", "sort", "tr", "cut", "ps", "kill"),
    *("stat", "find", "tee", "basename", "dirname", "date", "uname", "tty", "test", "tar", "base64"),
)


def make_python_root(root: Path) -> Path:
    """Fill the empty directory `root`. Skips the test where this machine has no Debian Python 3.11."""
    if not PYTHON.exists():
        pytest.skip("needs python3.11 in /usr/bin")
    for name in ("etc", "proc", "dev", "sys", "run", "home", "root", "tmp", "var/tmp", "usr/bin", "usr/lib"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    programs = [Path("/usr/bin", name) for name in TOOLS if Path("/usr/bin", name).exists()]
    for program in (PYTHON, *programs):
        shutil.copy2(program, root / "usr/bin" / program.name)
    (root / "usr/bin/python3").symlink_to(PYTHON.name)
    ignored = shutil.ignore_patterns("test", "idlelib", "ensurepip", "__pycache__", "dist-packages")
    shutil.copytree("/usr/lib/python3.11", root / "usr/lib/python3.11", symlinks=True, ignore=ignored)
    objects = [PYTHON, *programs, *Path("/usr/lib/python3.11/lib-dynload").glob("*.so")]
    for library in sorted({path for each in objects for path in _libraries(each)}):
        target = root / os.path.realpath(os.path.dirname(library)).lstrip("/") / os.path.basename(library)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(library, target)
    return root


def _libraries(program: Path) -> list[str]:
    """The shared libraries of a program, the loader included. Source: ldd(1)."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
