"""One rollout's browser: its context, its current page, element references, and events of its pages.

The session is kept in `ToolRun.state`, so it closes when the rollout ends. The tools are in `builtin/browser.py`.

Invariants: an error in a page or by the model raises `ToolMistake`, which the model reads. A browser that died raises
`ToolUnavailable`, and the next `navigate` of any rollout gets a new browser. The kept console lines, script errors and
notes are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from palaestra.tools.net.host_policy import HostPolicy
from palaestra.tools.tool import ToolMistake, ToolRun
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.host_tools import PROXY_NAME
from palaestra_toolsets.browser.accessibility_tree import Numbers, PageView, show
from palaestra_toolsets.browser.shared_browser import BrowserLease, SharedBrowser
from palaestra_toolsets.settings import ToolsetSettings

if TYPE_CHECKING:
    from playwright.async_api import Dialog, Download, JSHandle, Locator, Page, Response

T = TypeVar("T")

MAX_TABS = 8
NEW_TAB_S = 0.15
"""The time, in seconds, that a click or key has to open a new tab. The next reply reports a tab that opens later."""
SETTLE_S = 5.0
"""The maximum time, in seconds, that a page may load before the reply shows its current state."""
ANSWER_S = 3.0
"""The maximum time, in seconds, for a page to answer a trivial script. `navigate` replaces a page that takes longer."""
HANG_S = 10.0
"""A page counts as hung if it has not answered this many seconds after the call's own time limit."""

MOST_ENTRIES, MOST_NOTES = 200, 20
LONGEST_ENTRY = 2000
_DIED = "the browser has died, and this rollout's pages with it"
_SCHEMES = frozenset({"http", "https", "data"})
_PORTS = {"http": 80, "https": 443}


class PageEvents:
    """Console lines, script errors, and notes on dialogs, downloads and new tabs. Dropped entries are counted."""

    def __init__(self) -> None:
        self._console: deque[dict[str, JSON]] = deque(maxlen=MOST_ENTRIES)
        self._errors: deque[dict[str, JSON]] = deque(maxlen=MOST_ENTRIES)
        self._notes: list[str] = []
        self._unsaid = self._new_errors = 0
        self.total_messages = self.total_errors = 0

    def console(self, kind: str, text: str) -> None:
        """Record a line of a page's console."""
        self.total_messages += 1
        self._console.append({"type": kind, "text": text[:LONGEST_ENTRY], "source": "console"})

    def script_error(self, text: str) -> None:
        """Record an uncaught exception of a page's script."""
        self.total_errors += 1
        self._new_errors += 1
        self._errors.append({"message": text[:LONGEST_ENTRY], "source": "exception"})

    def note(self, text: str) -> None:
        """Add a note to the next reply."""
        if len(self._notes) < MOST_NOTES:
            self._notes.append(text[:LONGEST_ENTRY])
        else:
            self._unsaid += 1

    def take_notes(self) -> Sequence[str]:
        """Return the notes for a reply and forget them."""
        notes, self._notes = self._notes, []
        if self._unsaid:
            notes.append(f"{self._unsaid} more events are not listed")
        if self._new_errors:
            many = "a script of the page failed" if self._new_errors == 1 else f"{self._new_errors} script errors"
            notes.append(f"{many}: see browser_console")
        self._unsaid = self._new_errors = 0
        return notes

    def read(self, *, clear: bool) -> dict[str, JSON]:
        """Return all kept entries in the format of `browser_console`. With `clear`, forget them."""
        reply: dict[str, JSON] = {
            "console_messages": list(self._console),
            "js_errors": list(self._errors),
            "total_messages": self.total_messages,
            "total_errors": self.total_errors,
        }
        if clear:
            self._console.clear()
            self._errors.clear()
            self.total_messages = self.total_errors = 0
        return reply


class BrowserSession:
    """A rollout's browser, opened by the first `navigate`. Its calls run one after the other (`turn`)."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.events = PageEvents()
        self._numbers = Numbers()
        self._shared: SharedBrowser | None = None
        self._lease: BrowserLease | None = None
        self._tabs: list[Page] = []
        self._broken: set[Page] = set()
        self._documents: dict[Page, tuple[JSHandle, int]] = {}
        self._seen = 0
        self._tab_came = asyncio.Event()

    @property
    def page(self) -> Page:
        """The current page. Raises `ToolMistake` if no page is open or the page has crashed or hangs, and
        `ToolUnavailable` if the browser has died."""
        if self._dead:
            raise ToolUnavailable(_DIED)
        if not self._tabs:
            raise ToolMistake("No page is open. Open one with browser_navigate")
        if self._tabs[-1] in self._broken:
            raise ToolMistake("The page has crashed or hangs. Open another with browser_navigate")
        return self._tabs[-1]

    @property
    def _dead(self) -> bool:
        return self._lease is not None and not self._lease.running.browser.is_connected()

    async def check(self) -> None:
        """Raise `ToolUnavailable` if the browser has died, and close the session, so that the next call does not raise
        again."""
        if self._dead:
            await self.aclose()
            raise ToolUnavailable(_DIED)

    @property
    def started(self) -> bool:
        """Whether this rollout has a context of the browser."""
        return self._lease is not None

    async def aclose(self) -> None:
        """Close all pages and their context; keep the recorded events. Idempotent; a later `navigate` opens a new
        context."""
        lease, self._lease = self._lease, None
        self._tabs.clear()
        self._broken.clear()
        self._documents.clear()
        if lease is not None and self._shared is not None:
            await asyncio.shield(self._shared.give_back(lease))

    async def navigate(self, url: str, run: ToolRun, settings: ToolsetSettings) -> int | None:
        """Open an address in the current page, or in another if that page hangs. Return the HTTP status, or None."""
        url, host, port = _checked_address(url)
        reach = HostPolicy(settings.browser_allow, settings.browser_block)
        if host and (why := reach.refusal(host, port)) is not None:
            raise ToolMistake(f"{url} was not opened: {why}")
        await self._open_browser(run, settings)
        if self._tabs[-1] in self._broken or await self._hangs(self._tabs[-1]):
            await self._replace_broken()
        response = await self._open_page(url, host, port, settings)
        await self.settle()
        if response is None:
            return None
        if (await self.ask(response.all_headers())).get("proxy-status", "").startswith(f"{PROXY_NAME};"):
            why = (await self.ask(response.text())).strip()
            raise ToolMistake(f"{_led(url, self.page.url)} was not opened: {why}")
        return response.status

    async def _open_page(self, url: str, host: str, port: int, settings: ToolsetSettings) -> Response | None:
        """Open `url` and return the response. Return None if there is no response, or if a script of the page navigated
        elsewhere first."""
        page, limit_s = self.page, settings.browser_navigation_timeout_s
        for _ in range(3):
            try:
                return await self.ask(page.goto(url, wait_until="domcontentloaded"), limit_s)
            except ToolMistake as mistake:
                words = str(mistake)
            if "interrupted by another navigation" not in words:
                break
            if "chrome-error:" not in words:
                return None
        why = self._lease.running.proxy.why(host, port) if self._lease is not None and "ERR_TUNNEL" in words else None
        raise ToolMistake(f"{url} cannot be opened: {why or words}")

    async def snapshot(self, settings: ToolsetSettings, *, full: bool, skipped_lines: int = 0) -> PageView:
        """Return the page as text, with references for `element`."""
        page = self.page
        for _ in range(3):
            document = await self._current_document(page)
            source = await self.ask(page.aria_snapshot(mode="ai"))
            if document == await self._current_document(page):
                break
        return show(
            source,
            self._numbers,
            document,
            full=full,
            most_chars=settings.browser_snapshot_chars,
            skipped_lines=skipped_lines,
        )

    async def element(self, reference: str) -> Locator:
        """Return the element that a reference names. Raises `ToolMistake` for an unknown or outdated reference."""
        page, known = self.page, self._numbers.find(reference)
        if known is None:
            raise ToolMistake(f"There is no reference {reference!r}. browser_snapshot shows references such as @e5")
        stale = ToolMistake(
            f"{reference} ({known.role} {known.name!r}) is out of date: the page has changed since. Take a new "
            "browser_snapshot and use its references"
        )
        if known.document != await self._current_document(page):
            raise stale
        found = page.locator(f"aria-ref={known.own}")
        try:
            count = await self.ask(found.count())
        except ToolMistake:
            count = 0
        if count != 1:
            raise stale
        return found

    def expect_tab(self) -> None:
        """Let the next `settle(new_tab=True)` wait for a tab that opens after this call."""
        self._tab_came.clear()

    async def ask(self, answer: Awaitable[T], limit_s: float = 0.0) -> T:
        """Await an answer from the browser; `limit_s` is the time limit of the Playwright call.

        Raises `ToolMistake`, or `ToolUnavailable` if the browser has died.
        """
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(limit_s + HANG_S):
                return await answer
        except TimeoutError:
            self._broken.update(self._tabs[-1:])
            raise ToolMistake("The page hangs, perhaps in one of its scripts. Leave it with browser_navigate") from None
        except Error as error:
            await self.check()
            raise ToolMistake(_explained(error.message)) from None

    async def settle(self, *, new_tab: bool = False) -> None:
        """Give the page up to `SETTLE_S` seconds to load; with `new_tab`, first wait for a new tab."""
        from playwright.async_api import Error

        if new_tab:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEW_TAB_S):
                    await self._tab_came.wait()
        with contextlib.suppress(Error, TimeoutError, ToolMistake):
            async with asyncio.timeout(SETTLE_S):
                await self.page.wait_for_load_state("load")
                await self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    async def back(self, settings: ToolsetSettings) -> None:
        """Go to the previous page. If the tab has no previous page, close it, so that the tab before it becomes
        current. Raises `ToolMistake` if there is no such tab."""
        page, before, limit_s = self.page, self.page.url, settings.browser_navigation_timeout_s
        if await self.ask(page.go_back(wait_until="domcontentloaded"), limit_s) is None and page.url == before:
            if len(self._tabs) == 1:
                raise ToolMistake("There is no page before this one")
            await self.ask(self._tabs[-1].close())
        await self.settle()

    def with_notes(self, reply: dict[str, JSON]) -> dict[str, JSON]:
        """Return the reply, extended by the notes since the last reply."""
        notes = self.events.take_notes()
        return {**reply, "notes": list(notes)} if notes else reply

    async def _open_browser(self, run: ToolRun, settings: ToolsetSettings) -> None:
        if self._lease is None:
            self._shared = run.shared.get(SharedBrowser)
            self._lease = await self._shared.lease(settings)
            context = self._lease.context
            context.on("page", self._add_tab)
            context.on("console", lambda message: self.events.console(message.type, message.text))
            context.on("weberror", lambda error: self.events.script_error(str(error.error)))
            context.on("dialog", self._asked)
        if not self._tabs:
            await self.ask(self._lease.context.new_page())

    async def _hangs(self, page: Page) -> bool:
        """Return whether a script keeps the page from answering. Such a page cannot navigate either."""
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(ANSWER_S):
                await page.evaluate("0")
        except TimeoutError:
            return True
        except Error:
            return False
        return False

    async def _replace_broken(self) -> None:
        """Close a page that hangs or crashed, without waiting. The tab before it or a new page becomes current."""
        assert self._lease is not None
        broken = self._tabs.pop()
        self._run_in_background(broken.close())
        if not self._tabs:
            await self.ask(self._lease.context.new_page())

    async def _current_document(self, page: Page) -> int:
        """Return the number of the document that the page shows. Handles into earlier documents are invalid."""
        from playwright.async_api import Error

        if page in self._documents:
            handle, number = self._documents[page]
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(HANG_S):
                    if await handle.evaluate("mine => mine === document"):
                        return number
        self._seen += 1
        self._documents[page] = await self.ask(page.evaluate_handle("document")), self._seen
        return self._seen

    def _add_tab(self, page: Page) -> None:
        if self._tabs:
            self.events.note(f"a new tab was opened and is now the current page: {page.url}")
        self._tabs.append(page)
        self._tab_came.set()
        page.on("close", self._closed)
        page.on("crash", lambda crashed: self._broken.add(crashed))
        page.on("download", self._note_download)
        if len(self._tabs) > MAX_TABS:
            self.events.note(f"more than {MAX_TABS} tabs: the oldest was closed")
            self._run_in_background(self._tabs[0].close())

    def _closed(self, page: Page) -> None:
        if page in self._tabs:
            self._tabs.remove(page)
        self._broken.discard(page)
        self._documents.pop(page, None)

    def _note_download(self, download: Download) -> None:
        self.events.note(
            f"a download was refused: {download.suggested_filename} from {download.url[:300]} "
            "(the terminal can fetch files into the workspace)"
        )

    def _asked(self, dialog: Dialog) -> None:
        """Accept a dialog, because the page waits for it. A prompt gets its default answer."""
        answer = f" with {dialog.default_value!r}" if dialog.type == "prompt" else ""
        self.events.note(f"the page showed a dialog ({dialog.type}): {dialog.message!r}; it was accepted{answer}")
        self._run_in_background(dialog.accept(dialog.default_value) if dialog.type == "prompt" else dialog.accept())

    def _run_in_background(self, work: Awaitable[None]) -> None:
        """Run work from an event handler, which cannot await."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _checked_address(url: str) -> tuple[str, str, int]:
    """Return the address with its scheme, the host, and the port. Raises `ToolMistake` for an address that must not be
    opened."""
    url = url.strip()
    if not url:
        raise ToolMistake("url is empty: specify the page to open")
    if url == "about:blank":
        return url, "", 0
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?!\d+([/?#]|$))", url):
        url = f"{'http' if re.match(_WITH_PORT, url) else 'https'}://{url}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme.lower(), 0)
    except ValueError as error:
        raise ToolMistake(f"{url!r} is not an address: {error}") from None
    if parts.scheme.lower() not in _SCHEMES:
        raise ToolMistake(f"{url} was not opened: only http, https and data addresses can be opened")
    if parts.scheme.lower() != "data" and not host:
        raise ToolMistake(f"{url!r} is not an address: it has no host")
    return url, host, port


def _led(asked: str, got: str) -> str:
    return asked if got.rstrip("/") == asked.rstrip("/") else f"{asked} leads to {got}, which"


def _explained(message: str) -> str:
    """Return Playwright's message in one line. If its log names an obstacle, such as a covered element, the line ends
    with it."""
    lines = message.strip().splitlines()
    what = re.sub(r"^\w+\.\w+: ", "", lines[0]) if lines else "the browser could not perform the action"
    hindrance = [line.strip(" -") for line in lines[1:] if _HINDRANCE.search(line)]
    return f"{what} ({hindrance[-1]})" if hindrance else what


_WITH_PORT = re.compile(r"[^/?#]*:\d+([/?#]|$)")
_HINDRANCE = re.compile(r"intercepts pointer events|is not (visible|enabled|editable|stable)|outside of the viewport")
