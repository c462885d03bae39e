"""The `web_crawl` tool: reads pages of a site, starting at one page. The project's interface contract fixes the name
and the parameters.

It is available on request only, because `web_search` and `web_extract` find more with fewer pages. `instructions` only
decide which links are followed first. Only links with the first page's origin are followed. Pages are read by
`page_text.py`, each from an address that `host_policy.py` allows. robots.txt (RFC 9309) decides which links may be
followed; the first page is always read.

Invariants: a reply is bounded, and reports cuts and omissions. The same site gives the same pages in the same
order unless time runs out, which is reported. Pages that are fewer links away from the first page come first; among
equally distant pages, those whose links contain the most wanted words come first.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.robotparser import RobotFileParser

from yarl import URL

from palaestra.tools import parameters
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra.tools.tool import FunctionTool, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.web.fetch import Fetched, PageUnreadable, fetch
from palaestra_toolsets.web.page_text import HTML, Fetcher, as_text, decoded, page_json
from palaestra_toolsets.web.providers import WebPage, choose_reader

MAX_PAGES, MAX_DEPTH = 20, 3
PAGE_CHARS = 3_000
TIME_S = 60.0
AGENT = "Palaestra"
AT_ONCE = 4
"""The maximum number of pages that one crawl reads concurrently."""
MAX_LINKS = 1000
"""The maximum number of links of one page that are considered."""
MAX_ROBOTS_BYTES = 500 << 10
_WORD = re.compile(r"\w+")

SCHEMA = ToolSchema(
    name="web_crawl",
    external=True,
    description=(
        f"Crawl a website from a start page, following links within the same site. Returns the first {PAGE_CHARS} "
        "characters of each page. Use web_extract to read a complete page."
    ),
    parameters={
        "url": parameters.text("The URL of the start page.", minLength=1),
        "instructions": parameters.text("Keywords to look for. Links that contain more of them are followed first."),
        "limit": parameters.integer("Maximum number of pages.", default=10, minimum=1, maximum=MAX_PAGES),
        "depth": parameters.integer(
            "Maximum link distance from the start page.", default=2, minimum=1, maximum=MAX_DEPTH
        ),
    },
    required=("url",),
)


def web_crawl_tool(settings: ToolsetSettings, time_s: float = TIME_S) -> FunctionTool:
    """Return the tool with these settings. A crawl stops after `time_s` seconds."""

    def missing() -> str | None:
        if settings.web_extract_provider != "fetch":
            return "it reads pages from this machine, so web_extract_provider must be fetch"
        return choose_reader(settings).missing

    async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        fetcher = Fetcher(AddressPolicy(settings.web_allow), settings.lane())
        crawl = _Crawl(fetcher, arguments)
        over = False
        try:
            async with asyncio.timeout(time_s):
                await crawl.run(str(arguments["url"]))
        except TimeoutError:
            over = True
        return _crawl_reply(crawl, time_s if over else None)

    return FunctionTool(SCHEMA, run, "web_crawl", parallel_safe=True, missing=missing, touches_world=True)


def _crawl_reply(crawl: _Crawl, over_s: float | None) -> dict[str, JSON]:
    """Return the reply: `results` as in `web_extract`, the number `links_left`, and a `note` if the time `over_s` ran
    out."""
    results = [page_json(page, 0, PAGE_CHARS, "read the whole page with web_extract") for page in crawl.pages]
    reply: dict[str, JSON] = {"results": results, "links_left": crawl.left}
    if over_s is not None:
        reply["note"] = f"The crawl stopped after {over_s:g} s, before it had read all pages"
    if all("error" in each for each in results):
        reply["error"] = "No page could be read; each result has the reason" if results else str(reply.get("note"))
    return reply


@dataclass(frozen=True, slots=True, order=True)
class _Link:
    """A queued link; links are read in sort order. `missing` counts the wanted words that are not in it."""

    depth: int
    missing: int
    number: int
    url: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Visit:
    """The result of following one link: the page, its address after redirects, and the address and text of each of its
    links. `place` is None if the page could not be fetched or belongs to another site."""

    page: WebPage
    place: str | None = None
    links: Sequence[tuple[str, str]] = ()


class _Crawl:
    """One crawl: at most `limit` pages, unreadable ones included, up to `depth` links away from the first.

    `pages` holds each page once, in reading order, even if links lead to several of its addresses. `left` is the number
    of queued links that were not followed.
    """

    def __init__(self, fetcher: Fetcher, arguments: Mapping[str, JSON]) -> None:
        self.pages: list[WebPage] = []
        self.left = 0
        self._fetcher = fetcher
        self._limit, self._depth = int(arguments.get("limit", 10)), int(arguments.get("depth", 2))
        self._words = _folded_words(str(arguments.get("instructions") or ""))
        self._waiting: list[_Link] = []
        self._seen: set[str] = set()
        self._read: set[str] = set()
        """The addresses of read pages, after redirects."""
        self._site: URL | None = None
        self._robots = RobotFileParser()

    async def run(self, url: str) -> None:
        """Crawl, starting with the page at `url`. The page's address after redirects defines the site."""
        first = await self._visit(url)
        self._keep_page(first)
        if self._site is None:
            return
        await self._ask_robots(self._site)
        self._queue_links(first.links, 1)
        while self._waiting and len(self.pages) < self._limit:
            batch = self._next(min(AT_ONCE, self._limit - len(self.pages)))
            # Taken in the order of the links, not of their arrival, so that the same site gives the same pages.
            visits = await asyncio.gather(*(self._visit(link.url) for link in batch))
            for link, visit in zip(batch, visits, strict=True):
                self._keep_page(visit)
                self._queue_links(visit.links, link.depth + 1)

    def _next(self, most: int) -> list[_Link]:
        """Return up to `most` queued links in reading order. Drops links whose page was already read after a redirect
        from another address."""
        self._waiting = sorted(link for link in self._waiting if link.url not in self._read)
        batch, self._waiting = self._waiting[:most], self._waiting[most:]
        self.left = len(self._waiting)
        return batch

    def _keep_page(self, visit: _Visit) -> None:
        """Keep a page unless it was already read at another address."""
        if visit.place is None or visit.place not in self._read:
            self.pages.append(visit.page)
        if visit.place is not None:
            self._read.add(visit.place)

    async def _visit(self, url: str) -> _Visit:
        place = None
        try:
            async with self._fetcher.lane:
                fetched = await fetch(url, self._fetcher.policy)
                self._stay(URL(fetched.url))
                place = _without_fragment(URL(fetched.url))
                return _Visit(await as_text(url, fetched), place, await asyncio.to_thread(_links, fetched))
        except PageUnreadable as why:
            return _Visit(WebPage(url, error=str(why)), place)

    def _stay(self, url: URL) -> None:
        """Raise `PageUnreadable` for a page of another site. The first page defines the site."""
        if self._site is None:
            self._site = url
        elif url.origin() != self._site.origin():
            raise PageUnreadable(f"it leads to another site, {url.origin()}")

    def _queue_links(self, links: Sequence[tuple[str, str]], depth: int) -> None:
        """Queue those links of a page that should be followed."""
        for url, text in links if depth <= self._depth else ():
            if self._site is None or URL(url).origin() != self._site.origin() or url in self._seen | self._read:
                continue
            self._seen.add(url)
            if self._robots.can_fetch(AGENT, url):
                missing = len(self._words - _folded_words(f"{text} {URL(url).path_qs}"))
                self._waiting.append(_Link(depth, missing, len(self._seen), url))
        self.left = len(self._waiting)

    async def _ask_robots(self, site: URL) -> None:
        """Read the site's robots.txt. If the site has no robots.txt or does not answer, everything is allowed."""
        address, policy = str(site.origin() / "robots.txt"), self._fetcher.policy
        try:
            rules = await fetch(address, policy, max_bytes=MAX_ROBOTS_BYTES, timeout_s=10.0)
        except PageUnreadable:
            # Until it has parsed something, `RobotFileParser` allows no page at all.
            self._robots.parse([])
        else:
            self._robots.parse(rules.body.decode("utf-8", "replace").splitlines())


def _links(fetched: Fetched) -> list[tuple[str, str]]:
    """Return the targets of an HTML page's links, each once and without its fragment, with the text of the link."""
    if fetched.content_type.lower() not in HTML:
        return []
    html = importlib.import_module("lxml.html")
    try:
        tree = html.document_fromstring(
            decoded(fetched).encode("utf-8", "replace"), parser=html.HTMLParser(encoding="utf-8")
        )
    except importlib.import_module("lxml.etree").LxmlError:  # an empty page
        return []
    found: dict[str, str] = {}
    for element in tree.xpath(f"(//a[@href])[position() <= {MAX_LINKS}]"):
        try:
            url = URL(fetched.url).join(URL(element.get("href").strip()))
            if url.scheme in ("http", "https") and url.host:
                found.setdefault(_without_fragment(url), " ".join(element.text_content().split()))
        except ValueError:
            continue
    return list(found.items())


def _without_fragment(url: URL) -> str:
    return str(url.with_fragment(None))


def _folded_words(text: str) -> frozenset[str]:
    return frozenset(word.casefold() for word in _WORD.findall(text))
