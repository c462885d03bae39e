"""Finds a Chromium that starts on this machine, and starts it as safely as possible.

A candidate is tested by starting it. Chromium is started in the first of these ways that works, and the way is logged:

    with root       as a separate user, in Chromium's sandbox; the same without that sandbox; as root without it
    without root    in Chromium's sandbox; without it
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.extras import install_command
from palaestra_slots.sandbox.host_tools import users
from palaestra_toolsets.browser import setuid_exec

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright, ProxySettings

logger = logging.getLogger(__name__)

PROBE_S, START_S = 30.0, 60.0
_SILENT = f"it showed nothing within {PROBE_S:g} s"

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATH = "/usr/local/bin:/usr/bin:/bin:/snap/bin"
_DOWNLOADED = ("chromium-*/chrome-linux*/chrome", "chromium_headless_shell-*/chrome-*linux*/*headless*shell")
"""Paths below the cache of `playwright install chromium`."""

_ARGUMENTS = (
    "--disable-crash-reporter",
    "--disable-gpu",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # the same for older versions
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # the proxy resolves names
)
_NO_CHROMIUM = "no Chromium is installed: apt-get install chromium, or playwright install chromium"


@functools.cache
def absent(executable: str | None = None) -> str | None:
    """Return which component the browser tools lack and how to install it, or None. Starts nothing, so it is cheap.

    That an installed Chromium does not start is noticed only by `problem`, which runs when a rollout opens its first
    page.
    """
    if importlib.util.find_spec("playwright") is None:
        return f"install the extra `browser`: {install_command('browser')}"
    return None if any(Path(path).exists() for path in _candidates(executable)) else _NO_CHROMIUM


@functools.cache
def problem(executable: str | None = None) -> str | None:
    """Return the reason why no browser starts here, and the remedy, or None. The result is computed once per
    process."""
    if importlib.util.find_spec("playwright") is None:
        return f"install the extra `browser`: {install_command('browser')}"
    from playwright.async_api import Page

    if not hasattr(Page, "aria_snapshot"):
        return "this Playwright is too old for page snapshots: pip install -U playwright"
    if usable(executable) is not None:
        return None
    return "; ".join(f"{path} does not start: {_probe(path)}" for path in _candidates(executable)) or _NO_CHROMIUM


@functools.cache
def usable(executable: str | None = None) -> str | None:
    """Return the first Chromium that shows an empty page, or None. If `executable` is given, it is the only
    candidate."""
    return next((path for path in _candidates(executable) if _probe(path) is None), None)


def _candidates(executable: str | None) -> list[str]:
    if executable is not None:
        return [executable]
    installed = [path for name in _NAMES if (path := shutil.which(name, path=_PATH))]
    with contextlib.suppress(RuntimeError):  # the user may have no home
        cache = Path.home() / ".cache" / "ms-playwright"
        installed += [str(path) for pattern in _DOWNLOADED for path in sorted(cache.glob(pattern), reverse=True)]
    return list(dict.fromkeys(installed))


@functools.cache
def _probe(path: str) -> str | None:
    """Start a Chromium with an empty page. Returns the error, or None if it works. A Chromium that hangs is tried once
    more."""
    said = _tried(path)
    return _tried(path) if said == _SILENT else said


def _tried(path: str) -> str | None:
    with tempfile.TemporaryDirectory(prefix="palaestra-chromium-", ignore_cleanup_errors=True) as home:
        command = [path, "--headless", "--no-sandbox", *_ARGUMENTS, f"--user-data-dir={home}/profile"]
        environment = {"HOME": home, "TMPDIR": home, "PATH": _PATH, "LANG": "C.UTF-8"}
        try:
            chromium = subprocess.Popen(
                [*command, "--dump-dom", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        try:
            page, errors = chromium.communicate(timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            os.killpg(chromium.pid, signal.SIGKILL)
            chromium.communicate()
            return _SILENT
    if chromium.returncode == 0 and b"<html" in page:
        return None
    words = errors.decode(errors="replace").strip().splitlines()
    return f"exit code {chromium.returncode}, {words[-1][:200] if words else 'no error output'}"


@dataclass(frozen=True, slots=True)
class LaunchMethod:
    """One way to start Chromium: its user, and whether it confines its own renderers."""

    uid: int
    sandboxed: bool

    def __str__(self) -> str:
        who = "root" if self.uid == 0 else f"the user {self.uid}"
        return f"as {who}, {'in' if self.sandboxed else 'without'} Chromium's own sandbox"


async def start(
    playwright: Playwright, executable: str, proxy: ProxySettings, home: Path
) -> tuple[Browser, LaunchMethod]:
    """Start Chromium in the first way that works. Its home directory is below `home`. Raises `ToolUnavailable` if no
    way works."""
    from playwright.async_api import Error

    problems: list[str] = []
    for way in _ways():
        own = home / f"{way.uid}-{'in' if way.sandboxed else 'out'}"
        try:
            browser = await playwright.chromium.launch(
                executable_path=_script(own, executable, way.uid),
                chromium_sandbox=way.sandboxed,
                args=list(_ARGUMENTS),
                proxy=proxy,
                timeout=START_S * 1000,
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
        except Error as error:
            problems.append(f"{way}: {error.message.splitlines()[0]}")
            continue
        logger.log(logging.INFO if way.sandboxed else logging.WARNING, "the browser runs %s", way)
        return browser, way
    raise ToolUnavailable(f"{executable} cannot be started: {'; '.join(problems)}")


def _ways() -> Iterator[LaunchMethod]:
    free = next((start for start in users.starts() if users.living(start) == 0), None)
    if free is not None:
        yield from (LaunchMethod(free, True), LaunchMethod(free, False))
    if os.getuid() != 0:
        yield LaunchMethod(os.getuid(), True)
    yield LaunchMethod(os.getuid(), False)


def _script(home: Path, executable: str, uid: int) -> str:
    """Write a program that switches to the user and then starts Chromium. Return its path, for Playwright to start."""
    (home / "home").mkdir(parents=True)
    home.chmod(0o711)
    os.chown(home / "home", uid, uid)
    script = home / "chromium"
    words = [sys.executable, "-I", "-S", setuid_exec.__file__, str(uid), str(home / "home"), executable]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return str(script)
