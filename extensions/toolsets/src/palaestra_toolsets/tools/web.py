"""The `web_search` and `web_extract` tools. The project's interface contract fixes their names and parameters.

Invariant: a reply is bounded, reports how to get the rest of a cut page, and is never a summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from palaestra.tools import parameters
from palaestra.tools.call_text import shortened
from palaestra.tools.net.host_policy import AddressPolicy
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.web.page_text import MAX_PAGE_CHARS, MAX_TITLE_CHARS, Fetcher, Screened, page_json
from palaestra_toolsets.web.providers import (
    PageReader,
    Searcher,
    choose_reader,
    choose_searcher,
    reader,
    searcher,
)

MAX_RESULTS = 20
MAX_PAGES = 5
_EXTRACT_CHARS = 1_000

SEARCH_SCHEMA = ToolSchema(
    name="web_search",
    external=True,
    description=(
        "Search the web. Returns titles, URLs and short excerpts of the best results. Use web_extract to read a page."
    ),
    parameters={
        "query": parameters.text("The search query.", minLength=1),
        "limit": parameters.integer("Maximum number of results.", default=5, minimum=1, maximum=MAX_RESULTS),
    },
    required=("query",),
)

EXTRACT_SCHEMA = ToolSchema(
    name="web_extract",
    external=True,
    description=(
        f"Read web pages as text, up to {MAX_PAGES} per call. Long pages are truncated after {MAX_PAGE_CHARS} "
        "characters; continue with the offset given in the hint."
    ),
    parameters={
        "urls": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The URLs of the pages.",
            "minItems": 1,
            "maxItems": MAX_PAGES,
        },
        "offset": parameters.integer("Character offset at which to start in each page.", default=0, minimum=0),
    },
    required=("urls",),
)


def web_tools(settings: ToolsetSettings) -> tuple[FunctionTool, ...]:
    """Return both tools with these settings."""
    asked, read = choose_searcher(settings), choose_reader(settings)

    async def search(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return await run_search(searcher(asked.name, settings), arguments)

    async def extract(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return await run_extract(page_reader(read.name, settings), arguments)

    shared = partial(FunctionTool, toolset="web", parallel_safe=True, touches_world=True)
    return (
        shared(schema=SEARCH_SCHEMA, run=search, missing=lambda: asked.missing),
        shared(schema=EXTRACT_SCHEMA, run=extract, missing=lambda: read.missing),
    )


def page_reader(name: str, settings: ToolsetSettings) -> PageReader:
    """Return the reader on this machine (`fetch`), or the provider called `name`. A user's own server gets requests
    only for pages that this machine may read. Raises `ConfigError` for an invalid `web_allow`."""
    policy = AddressPolicy(settings.web_allow)
    if name == "fetch":
        return Fetcher(policy, settings.lane())
    return Screened(reader(name, settings), policy) if name in settings.web_urls else reader(name, settings)


async def run_search(provider: Searcher, arguments: Mapping[str, JSON]) -> ToolReply:
    """Search; the reply has `success`, and `data.web` with the `position`, `title`, `url` and `description` of each
    result."""
    query, limit = str(arguments["query"]).strip(), int(arguments.get("limit", 5))
    if not query:
        raise ToolMistake("The query is empty; specify what to search for")
    found = (await provider.search(query, limit))[:limit]
    results = [
        {
            "position": position,
            "title": shortened(each.title, MAX_TITLE_CHARS),
            "url": each.url,
            "description": shortened(each.description, _EXTRACT_CHARS),
        }
        for position, each in enumerate(found, start=1)
    ]
    return {"success": True, "data": {"web": results}}


async def run_extract(pages: PageReader, arguments: Mapping[str, JSON]) -> ToolReply:
    """Read pages; `results` in the reply has one entry per address. An entry has the page's `title` and `content`, or
    an `error`; a cut page also has `total_chars` and a `hint`. The reply itself has an `error` if no page could be
    read."""
    urls, offset = [str(url) for url in arguments["urls"]], int(arguments.get("offset", 0))
    results = [page_json(page, offset) for page in await pages.read(urls)]
    if all("error" in each for each in results):
        return {"results": results, "error": "No page could be read; each result has the reason"}
    return {"results": results}
