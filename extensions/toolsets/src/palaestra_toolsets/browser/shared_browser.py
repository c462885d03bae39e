"""One Chromium for all rollouts of a run: `SharedBrowser` starts it for the first rollout that browses. If it dies, the
next request for a context starts another.

The object is kept in `ToolRun.shared`. Each rollout has its own context: cookies, storage and pages that no other
rollout sees. `BrowserProxy` is the browser's only way to the network: Chromium uses it for everything, including
loopback addresses, and resolves no names itself.

Invariants: every connection was allowed by the `HostPolicy`, by name and by address. `aclose` waits until the browser
and its driver have ended, but not longer than `CLOSE_S` for each. If this process is killed, Playwright's driver reads
the end of its input and exits, and Chromium exits with the driver.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from palaestra.tools.net.host_policy import HostPolicy
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.io.temporary_folder import TemporaryFolder
from palaestra_slots.core.io.threads import in_own_thread
from palaestra_slots.sandbox.host_tools import HEAD_BYTES, Forwarder, users
from palaestra_toolsets.browser import chromium
from palaestra_toolsets.settings import ToolsetSettings

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright, ProxySettings

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
MAX_CONNECTIONS = 512
_REMEMBERED = 256
_USER = "browser"
WIDTH, HEIGHT = 1280, 800
"""The viewport of a page, in CSS pixels."""


class BrowserProxy:
    """A proxy on the loopback interface. It needs a password, because programs in slots with a network could reach its
    port."""

    def __init__(self, reach: HostPolicy) -> None:
        self._refused: OrderedDict[tuple[str, int], str] = OrderedDict()
        self.user, self.password = _USER, secrets.token_urlsafe(24)
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="browser-names")
        key = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        self._forwarder = Forwarder(reach, self._resolver, most=MAX_CONNECTIONS, key=key, refused=self._note_refusal)
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen on a free port, and set `address`."""
        self._server = await asyncio.start_server(self._forwarder.accept, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._forwarder.close()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def settings(self) -> ProxySettings:
        """Return the proxy settings in Playwright's form."""
        return {"server": self.address, "username": self.user, "password": self.password}

    def why(self, host: str, port: int) -> str | None:
        """Return the reason why the latest failed connection to the host and port failed, or None."""
        return self._refused.get((host, port))

    def _note_refusal(self, host: str, port: int, why: str) -> None:
        """Keep the reason, because Chromium only reports that a tunnel failed."""
        self._refused[host, port] = why
        self._refused.move_to_end((host, port))
        while len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)


@dataclass(slots=True)
class BrowserLease:
    """A context of the running browser."""

    context: BrowserContext
    running: RunningBrowser


@dataclass(slots=True)
class RunningBrowser:
    """One Chromium with its Playwright driver, proxy and files."""

    playwright: Playwright
    browser: Browser
    way: chromium.LaunchMethod
    proxy: BrowserProxy
    home: TemporaryFolder

    async def aclose(self) -> None:
        """End the browser, its driver and its proxy, and remove its files. If the browser ran as a separate user, all
        processes of that user are killed."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.browser.close(), CLOSE_S)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.playwright.stop(), CLOSE_S)
        # Not asyncio.to_thread: the process's own session closes at its exit, when executors accept no more work.
        if users.can_become() and self.way.uid != 0:
            await in_own_thread(partial(users.kill, self.way.uid))
        await self.proxy.aclose()
        await in_own_thread(self.home.cleanup)


class SharedBrowser:
    """Lends contexts of the `running` browser. The `browser_max_contexts` of the first caller limits their number."""

    def __init__(self) -> None:
        self.running: RunningBrowser | None = None
        self._starting = asyncio.Lock()
        self._turns: asyncio.Semaphore | None = None

    async def lease(self, settings: ToolsetSettings) -> BrowserLease:
        """Lease a new context; return it with `give_back`. Raises `ToolUnavailable`."""
        if self._turns is None:
            self._turns = asyncio.Semaphore(settings.browser_max_contexts)
        try:
            await asyncio.wait_for(self._turns.acquire(), settings.browser_wait_s)
        except TimeoutError:
            raise ToolUnavailable(
                f"all {settings.browser_max_contexts} browser contexts were in use for {settings.browser_wait_s:g} s; "
                "raise browser_max_contexts"
            ) from None
        try:
            return await self._context(settings)
        except BaseException:
            self._turns.release()
            raise

    async def give_back(self, lease: BrowserLease) -> None:
        """Close the context with its pages. A context that does not close in time ends with the browser."""
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
            running, self.running = self.running, None
            if running is not None:
                await asyncio.shield(running.aclose())

    async def _context(self, settings: ToolsetSettings) -> BrowserLease:
        from playwright.async_api import Error

        async with self._starting:
            if self.running is not None and not self.running.browser.is_connected():
                logger.warning("the browser has died; starting a new one")
                dead, self.running = self.running, None
                await dead.aclose()
            if self.running is None:
                self.running = await _launch_browser(settings)
            running = self.running
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
            raise ToolUnavailable(f"the browser cannot create a context: {error.message}") from None
        context.set_default_timeout(settings.browser_action_timeout_s * 1000)
        context.set_default_navigation_timeout(settings.browser_navigation_timeout_s * 1000)
        return BrowserLease(context, running)


def _unwanted(making: asyncio.Future[BrowserContext]) -> None:
    """Close a context whose caller was cancelled in the meantime."""
    if not making.cancelled() and making.exception() is None:
        closing = asyncio.ensure_future(making.result().close())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _launch_browser(settings: ToolsetSettings) -> RunningBrowser:
    from playwright.async_api import async_playwright

    reason = await asyncio.to_thread(chromium.problem, settings.browser_executable)
    if reason is not None:
        raise ToolUnavailable(reason)
    executable = chromium.usable(settings.browser_executable)
    assert executable is not None
    proxy = BrowserProxy(HostPolicy(settings.browser_allow, settings.browser_block))
    home = await asyncio.to_thread(new_home)
    playwright = None
    try:
        await proxy.start()
        playwright = await async_playwright().start()
        browser, way = await chromium.start(playwright, executable, proxy.settings(), home.path)
    except BaseException:
        if playwright is not None:
            await asyncio.shield(playwright.stop())
        await proxy.aclose()
        home.cleanup()
        raise
    return RunningBrowser(playwright, browser, way, proxy, home)


def new_home() -> TemporaryFolder:
    """Return a new directory, into which the browser's user can go. First removes directories that killed processes
    left behind."""
    return TemporaryFolder("browser", 0o711)
