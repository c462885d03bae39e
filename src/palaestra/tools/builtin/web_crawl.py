"""The `web_crawl` tool: the pages of a site, from one on. Name and parameters are the contract's, with bounds added.

It is available on request only, because `web_search` and `web_extract` tell more with fewer pages. `instructions` only
decide which links are followed first. Invariant: a reply is bounded, and reports what was cut or left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools import parameters
from palaestra.tools.builtin.web import shown
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import FunctionTool, ToolReply, ToolRun, ToolSchema
from palaestra.tools.web.crawl import Crawled, Crawler
from palaestra.tools.web.page_text import Fetcher
from palaestra.tools.web.providers import choose_reader

MAX_PAGES, MAX_DEPTH = 20, 3
PAGE_CHARS = 3_000
TIME_S = 60.0

SCHEMA = ToolSchema(
    name="web_crawl",
    external=True,
    description=(
        "Read a web site from one page on, following its links within the same site. Of each page the first "
        f"{PAGE_CHARS} characters are shown; read one whole with web_extract."
    ),
    parameters={
        "url": parameters.text("The address of the page to begin with.", minLength=1),
        "instructions": parameters.text(
            "What to look for, in words that its links may have: those with most of them come first."
        ),
        "limit": parameters.integer("How many pages, at most.", default=10, minimum=1, maximum=MAX_PAGES),
        "depth": parameters.integer(
            "How many links away from the first page.", default=2, minimum=1, maximum=MAX_DEPTH
        ),
    },
    required=("url",),
)


def web_crawl_tool(settings: ToolSettings, time_s: float = TIME_S) -> FunctionTool:
    """The tool with these settings; it reports what it lacks. Raises `ConfigError`."""

    def missing() -> str | None:
        if settings.web_extract_provider != "fetch":
            return "it reads pages from this machine, so web_extract_provider must be fetch"
        return choose_reader(settings).missing

    async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        fetcher = Fetcher(AddressPolicy(settings.web_allow), settings.lane())
        crawler = Crawler(fetcher, int(arguments.get("limit", 10)), int(arguments.get("depth", 2)), time_s)
        return _reply(await crawler.crawl(str(arguments["url"]), str(arguments.get("instructions") or "")), time_s)

    return FunctionTool(SCHEMA, run, "web_crawl", parallel_safe=True, missing=missing, touches_world=True)


def _reply(crawled: Crawled, time_s: float) -> dict[str, JSON]:
    """`results` as those of web_extract, `links_left` not followed, and a `note` if the time was over."""
    results = [shown(page, 0, PAGE_CHARS, "read it whole with web_extract") for page in crawled.pages]
    reply: dict[str, JSON] = {"results": results, "links_left": crawled.left}
    if crawled.over:
        reply["note"] = f"Not all that was asked for was read: {time_s:g} s were over"
    if all("error" in each for each in results):
        reply["error"] = "No page could be read; each result says why" if results else str(reply.get("note"))
    return reply
