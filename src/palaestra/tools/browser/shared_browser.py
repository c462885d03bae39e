"""One Chromium for all rollouts of a run: `SharedBrowser` starts it for the first, and starts another when it died.

A `ToolRun.shared` state: it closes when the run's tools do. What a rollout has of it is a context of its own: cookies,
storage and pages that no other one sees.

Invariant: nothing stays behind. A closed browser's processes are gone before `aclose` returns; when this process is
killed, Playwright's driver reads the end of its input and ends, and Chromium ends with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.core.errors import ToolUnavailable
from palaestra.sandbox.host_tools import users
from palaestra.tools.browser import launch
from palaestra.tools.browser.browser_proxy import Egress
from palaestra.tools.net.host_policy import Reach
from palaestra.tools.settings import ToolSettings

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
_HOME, _LOCK = "palaestra-browser-", "lock"
WIDTH, HEIGHT = 1280, 800
"""The view of a page, in CSS pixels."""


@dataclass(slots=True)
class Lease:
    """A context, and the way out that its pages have."""

    context: BrowserContext
    egress: Egress
    running: _Running


@dataclass(slots=True)
class _Running:
    """One Chromium with what belongs to it."""

    playwright: Playwright
    browser: Browser
    way: launch.Way
    egress: Egress
    home: Path
    lock: int

    async def aclose(self) -> None:
        """End everything. A browser that does not answer is killed with all that is its user's."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.browser.close(), CLOSE_S)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.playwright.stop(), CLOSE_S)
        if users.can_become() and self.way.uid != 0:
            await asyncio.to_thread(users.kill, self.way.uid)
        await self.egress.aclose()
        await asyncio.to_thread(shutil.rmtree, self.home, True)
        os.close(self.lock)


class SharedBrowser:
    """Hands out contexts, `browser_max_contexts` of the first caller's settings at a time."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._running: _Running | None = None
        self._turns: asyncio.Semaphore | None = None

    @property
    def way(self) -> launch.Way | None:
        """How the browser was started; None while there is none."""
        return self._running.way if self._running is not None else None

    @property
    def egress(self) -> Egress | None:
        """The browser's way to the network; None while there is none."""
        return self._running.egress if self._running is not None else None

    @property
    def home(self) -> Path | None:
        """The directory of the browser's files; None while there is none."""
        return self._running.home if self._running is not None else None

    @property
    def contexts(self) -> int:
        """How many contexts are open."""
        return len(self._running.browser.contexts) if self._running is not None else 0

    async def lease(self, settings: ToolSettings) -> Lease:
        """A context of one's own, to be given back. Raises `ToolUnavailable`."""
        if self._turns is None:
            self._turns = asyncio.Semaphore(settings.browser_max_contexts)
        try:
            await asyncio.wait_for(self._turns.acquire(), settings.browser_wait_s)
        except TimeoutError:
            raise ToolUnavailable(
                f"all {settings.browser_max_contexts} browser contexts were taken for {settings.browser_wait_s:g} s; "
                "raise browser_max_contexts"
            ) from None
        try:
            return await self._context(settings)
        except BaseException:
            self._turns.release()
            raise

    async def give_back(self, lease: Lease) -> None:
        """Close the context with its pages. One that does not close in time is left to the browser's end."""
        assert self._turns is not None
        try:
            await asyncio.wait_for(lease.context.close(), CLOSE_S)
        except Exception as error:
            level = logging.WARNING if lease.running.browser.is_connected() else logging.DEBUG
            logger.log(level, "a browser context did not close: %s", error)
        finally:
            self._turns.release()

    async def aclose(self) -> None:
        """End the browser. Idempotent."""
        async with self._starting:
            running, self._running = self._running, None
            if running is not None:
                await asyncio.shield(running.aclose())

    async def _context(self, settings: ToolSettings) -> Lease:
        from playwright.async_api import Error

        async with self._starting:
            if self._running is not None and not self._running.browser.is_connected():
                logger.warning("the browser has died; starting another")
                dead, self._running = self._running, None
                await dead.aclose()
            if self._running is None:
                self._running = await _started(settings)
            running = self._running
        making = asyncio.ensure_future(
            running.browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT},
                locale="en-US",
                timezone_id="UTC",
                reduced_motion="reduce",
                accept_downloads=False,
                service_workers="block",
            )
        )
        try:
            context = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_unwanted)
            raise
        except Error as error:
            raise ToolUnavailable(f"the browser gives no context: {error.message}") from None
        context.set_default_timeout(settings.browser_action_timeout_s * 1000)
        context.set_default_navigation_timeout(settings.browser_navigation_timeout_s * 1000)
        return Lease(context, running.egress, running)


def _unwanted(making: asyncio.Future[BrowserContext]) -> None:
    """Close a context that came after its caller had gone."""
    if not making.cancelled() and making.exception() is None:
        closing = asyncio.ensure_future(making.result().close())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _started(settings: ToolSettings) -> _Running:
    from playwright.async_api import async_playwright

    reason = await asyncio.to_thread(launch.problem, settings.browser_executable)
    if reason is not None:
        raise ToolUnavailable(reason)
    executable = launch.usable(settings.browser_executable)
    assert executable is not None
    egress = Egress(Reach(settings.browser_allow, settings.browser_block))
    home, lock = await asyncio.to_thread(new_home)
    playwright = None
    try:
        await egress.start()
        playwright = await async_playwright().start()
        proxy = {"server": egress.address, "username": egress.user, "password": egress.password}
        browser, way = await launch.start(playwright, executable, proxy, home)  # type: ignore[arg-type]
    except BaseException:
        if playwright is not None:
            await asyncio.shield(playwright.stop())
        await egress.aclose()
        shutil.rmtree(home, ignore_errors=True)
        os.close(lock)
        raise
    return _Running(playwright, browser, way, egress, home, lock)


def new_home() -> tuple[Path, int]:
    """A directory, and a lock that is held while it is used. Those whose holders were killed are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_HOME}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.getuid():
                _remove_if_left(left)
    made = Path(tempfile.mkdtemp(prefix="palaestra-new-"))
    made.chmod(0o711)
    lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(_HOME + made.name.rpartition("-")[2])), lock  # seen by others once it is locked


def _remove_if_left(home: Path) -> None:
    lock = os.open(home / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(home, ignore_errors=True)
    finally:
        os.close(lock)
