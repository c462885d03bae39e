"""Programs that a test starts, and commands that it finds again among all processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def nap() -> str:
    """A command that runs for long. No other process has the same, in this test or in one beside it."""
    return f"sleep 999.{uuid.uuid4().int}"


@contextlib.contextmanager
def killed_after(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that is killed when the block ends. Popen's own block would wait for it, also after a failure."""
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds, for at most a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def assert_missing_module_is_named(program: ModuleType, folder: Path) -> None:
    """Debian's python3-minimal has no shutil; here, a real interpreter starts with a folder that lacks it."""
    library = Path(os.__file__).parent
    for entry in library.iterdir():
        if entry.name not in ("shutil.py", "site-packages", "__pycache__"):
            (folder / entry.name).symlink_to(entry)
    source = Path(str(program.__file__)).read_text()
    begin = f"import sys; sys.path[:] = [{str(folder)!r}, {str(folder / 'lib-dynload')!r}]; "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{begin}exec(compile({source!r}, 'program', 'exec'))", "full"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{sys.executable} there lacks the module shutil" in done.stderr
    assert "install the package python3 there" in done.stderr
