"""Providers of web searches and pages: their protocol, the APIs of seven providers, and the choice by configuration.

A provider's key is `web_api_keys.NAME`. Its address is `web_urls.NAME`, or the provider's public address if that is not
set. No request is sent before `search` or `read`.
"""

from __future__ import annotations

import asyncio
import html
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palaestra.tools.settings import WEB_KEYS, WEB_URLS
from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON
from palaestra_toolsets.json_client import JsonServer, objects_at, text
from palaestra_toolsets.settings import ToolsetSettings


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One result of a search. `description` is a short extract of the page."""

    title: str
    url: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class WebPage:
    """One page as text, or the reason why it could not be read. `note` describes an omission."""

    url: str
    title: str = ""
    content: str = ""
    error: str = ""
    note: str = ""


class Searcher(Protocol):
    """Searches the web."""

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        """Return at most `limit` results, the best first. Raises `ToolMistake` if the provider refuses the query, and
        `ToolUnavailable` for any other failure."""
        ...


class PageReader(Protocol):
    """Reads pages as text."""

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        """Return one page for each address, in their order. Raises as `Searcher.search` does if the whole request
        fails."""
        ...


@dataclass(frozen=True, slots=True)
class _Provider:
    server: JsonServer

    def results(self, reply: JSON, path: tuple[str, ...], url: str, *description: str) -> list[SearchResult]:
        """Return the results at `path` of a reply. `url` names the field with a result's address, and `description` the
        fields that may have its extract; the first one with text is used."""
        return [
            SearchResult(text(row, "title"), text(row, url), text(row, *description))
            for row in objects_at(self.server, reply, *path)
        ]


class Tavily(_Provider):
    """`POST /search` and `POST /extract`. API: https://docs.tavily.com/documentation/api-reference."""

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        reply = await self.server.post("/search", {"query": query, "max_results": limit})
        return self.results(reply, ("results",), "url", "content")

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        reply = await self.server.post("/extract", {"urls": list(urls), "format": "markdown"})
        done = {
            text(row, "url"): WebPage(text(row, "url"), text(row, "title"), text(row, "raw_content"))
            for row in objects_at(self.server, reply, "results")
        }
        return _in_order(
            urls,
            done,
            {text(row, "url"): text(row, "error") for row in objects_at(self.server, reply, "failed_results")},
        )


class Exa(_Provider):
    """`POST /search` with highlights as extracts, and `POST /contents`. API: https://exa.ai/docs/reference."""

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        contents = {"highlights": {"maxCharacters": 500}}
        reply = await self.server.post("/search", {"query": query, "numResults": limit, "contents": contents})
        return [
            SearchResult(text(row, "title"), text(row, "url"), _highlights(row))
            for row in objects_at(self.server, reply, "results")
        ]

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        reply = await self.server.post("/contents", {"urls": list(urls), "text": True})
        done: dict[str, WebPage] = {}
        for row in objects_at(self.server, reply, "results"):
            page = WebPage(text(row, "url"), text(row, "title"), text(row, "text"))
            done |= {text(row, "url"): page, text(row, "id"): page}
        return _in_order(
            urls, done, {text(row, "id"): _exa_error(row) for row in objects_at(self.server, reply, "statuses")}
        )


class Brave(_Provider):
    """`GET /res/v1/web/search`. API: https://api-dashboard.search.brave.com/documentation.

    Brave marks matching words with HTML, which is removed. A request is limited to 20 results and a query of 400
    characters.
    """

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        asked = {"q": query[:400], "count": str(min(limit, 20))}
        reply = await self.server.get("/res/v1/web/search", asked)
        found = self.results(reply, ("web", "results"), "url", "description")
        return [SearchResult(_unmarked(each.title), each.url, _unmarked(each.description)) for each in found]


class Serper(_Provider):
    """`POST /search`: Google's results. API: https://serper.dev."""

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        reply = await self.server.post("/search", {"q": query, "num": limit})
        return self.results(reply, ("organic",), "link", "snippet")


class Firecrawl(_Provider):
    """`POST /v2/search`, and `POST /v2/scrape` for each address. API: https://docs.firecrawl.dev/api-reference."""

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        reply = await self.server.post("/v2/search", {"query": query, "limit": limit})
        return self.results(reply, ("data", "web"), "url", "description", "snippet")

    async def read(self, urls: Sequence[str]) -> list[WebPage]:
        pages = await asyncio.gather(*(self._scrape_page(url) for url in urls), return_exceptions=True)
        for page in pages:
            if isinstance(page, BaseException):  # raised only after all requests have ended
                raise page
        return [page for page in pages if isinstance(page, WebPage)]

    async def _scrape_page(self, url: str) -> WebPage:
        try:
            reply = await self.server.post("/v2/scrape", {"url": url, "formats": ["markdown"]})
        except ToolMistake as refused:  # only this address failed
            return WebPage(url, error=str(refused))
        data: JSON = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict):
            raise self.server.malformed(reply)
        about = data.get("metadata")
        about = about if isinstance(about, dict) else {}
        status = about.get("statusCode")
        if isinstance(status, int) and status >= 400:
            return WebPage(url, error=f"the server answered with HTTP {status}")
        return WebPage(url, text(about, "title"), text(data, "markdown"))


class Searxng(_Provider):
    """`GET /search?format=json` of your own instance. API: https://docs.searxng.org/dev/search_api.html.

    Its settings.yml must allow JSON (`search: formats: [html, json]`); otherwise it replies with status 403.
    """

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        reply = await self.server.get("/search", {"q": query, "format": "json"})
        return self.results(reply, ("results",), "url", "content")[:limit]


@dataclass(frozen=True, slots=True)
class Ddgs:
    """Public search engines without a key, through the library `ddgs` (extra `web`).

    The library reads pages made for people, so it is slower than an API, and the engines block it sooner. `lane`
    bounds concurrent searches.
    """

    lane: asyncio.Semaphore

    async def search(self, query: str, limit: int) -> list[SearchResult]:
        async with self.lane:
            found = await asyncio.to_thread(_ddgs, query, limit)
        return [SearchResult(text(row, "title"), text(row, "href"), text(row, "body")) for row in found]


def _ddgs(query: str, limit: int) -> list[dict[str, JSON]]:
    library, failures = importlib.import_module("ddgs"), importlib.import_module("ddgs.exceptions")
    try:
        found: list[dict[str, JSON]] = library.DDGS(timeout=20).text(query, max_results=limit)
        return found
    except failures.DDGSException as error:
        if "no results" in str(error).lower():
            return []
        raise ToolUnavailable(f"ddgs could not search: {type(error).__name__}: {error}") from error


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


_APIS: Mapping[str, tuple[Callable[[JsonServer], Any], str, Callable[[str], dict[str, str]]]] = {
    "tavily": (Tavily, "https://api.tavily.com", _bearer),
    "exa": (Exa, "https://api.exa.ai", lambda key: {"x-api-key": key}),
    "brave": (Brave, "https://api.search.brave.com", lambda key: {"X-Subscription-Token": key}),
    "serper": (Serper, "https://google.serper.dev", lambda key: {"X-API-KEY": key}),
    "firecrawl": (Firecrawl, "https://api.firecrawl.dev", _bearer),
    "searxng": (Searxng, "", _bearer),
}
"""The class, public address and key header of each provider, in the order in which `auto` tries them."""


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """The name of a provider, which is empty if none was found. `missing` is the reason why there is none or why it
    cannot be used, and None if it can."""

    name: str = ""
    missing: str | None = None


def choose_searcher(settings: ToolsetSettings) -> ProviderChoice:
    """Return the choice of provider for web_search."""
    name = settings.web_provider
    if name != "auto":
        return ProviderChoice(name, _lacks(name, settings))
    for candidate in _APIS:
        if _lacks(candidate, settings) is None:
            return ProviderChoice(candidate)
    return ProviderChoice(
        missing="no search provider: set a key (TAVILY_API_KEY, EXA_API_KEY, BRAVE_API_KEY, SERPER_API_KEY, "
        "FIRECRAWL_API_KEY or web_api_keys), the address of SearXNG (SEARXNG_URL), or web_provider ddgs, which needs "
        "no key"
    )


def choose_reader(settings: ToolsetSettings) -> ProviderChoice:
    """Return the choice of page reader for web_extract."""
    name = settings.web_extract_provider
    if name != "fetch":
        return ProviderChoice(name, _lacks(name, settings))
    if importlib.util.find_spec("trafilatura") is None:
        return ProviderChoice(
            name,
            f"reading pages needs the extra `web` ({install_command('web')}), or web_extract_provider and its key",
        )
    return ProviderChoice(name)


def searcher(name: str, settings: ToolsetSettings) -> Searcher:
    """Return the search provider with this name, whose requirements must be met."""
    made: Searcher = Ddgs(settings.lane()) if name == "ddgs" else _provider(name, settings)
    return made


def reader(name: str, settings: ToolsetSettings) -> PageReader:
    """Return the page provider with this name, whose requirements must be met; `fetch` is not a provider."""
    made: PageReader = _provider(name, settings)
    return made


def _provider(name: str, settings: ToolsetSettings) -> Any:  # each class is a Searcher, a PageReader or both
    made, base_url, headers = _APIS[name]
    server = JsonServer(
        name=name,
        base_url=settings.web_urls.get(name) or base_url,
        key=f"web_api_keys.{name}" if name in WEB_KEYS else f"web_urls.{name}",
        headers=headers(settings.web_api_keys.get(name, "")),
        lane=settings.lane(),
    )
    return made(server)


def _lacks(name: str, settings: ToolsetSettings) -> str | None:
    """Return the reason why a provider cannot be used, with the setting or extra that it lacks, or None."""
    if name == "ddgs":
        installed = importlib.util.find_spec("ddgs") is not None
        return None if installed else f"web_provider ddgs needs the extra `web`: {install_command('web')}"
    if settings.web_api_keys.get(name) or (settings.web_urls.get(name) and name in WEB_URLS):
        return None
    if name == "searxng":
        return "searxng needs the address of an instance: set SEARXNG_URL or web_urls.searxng"
    return f"{name} needs a key: set {WEB_KEYS[name]} or web_api_keys.{name}"


def _in_order(urls: Sequence[str], done: Mapping[str, WebPage], why: Mapping[str, str]) -> list[WebPage]:
    return [done.get(url) or WebPage(url, error=why.get(url) or "the provider could not read it") for url in urls]


def _highlights(row: dict[str, JSON]) -> str:
    highlights = row.get("highlights")
    if isinstance(highlights, list):
        return " … ".join(str(each) for each in highlights)
    return text(row, "summary", "text")


def _exa_error(row: dict[str, JSON]) -> str:
    error = row.get("error")
    if not isinstance(error, dict):
        return ""
    status = error.get("httpStatusCode")
    return f"{text(error, 'tag') or 'it failed'}{f' (HTTP {status})' if status else ''}"


def _unmarked(marked: str) -> str:
    return html.unescape(re.sub(r"</?[a-z][^>]*>", "", marked, flags=re.IGNORECASE))
