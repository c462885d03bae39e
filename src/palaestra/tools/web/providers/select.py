"""Which provider a configuration means, or why there is none. Nothing is asked here.

A provider is a row: its address, the class of its wire, how its key is sent, and what it can do. Its key is
`web_api_keys.NAME`, its address `web_urls.NAME` where that is not the public one.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from palaestra.tools.net.json_client import Server
from palaestra.tools.settings import WEB_KEYS, WEB_URLS, ToolSettings
from palaestra.tools.web.provider import PageReader, Searcher
from palaestra.tools.web.providers import ddgs
from palaestra.tools.web.providers.ddgs import Ddgs

_IN_ORDER = ("tavily", "exa", "brave", "serper", "firecrawl", "searxng")


@dataclass(frozen=True, slots=True)
class Choice:
    """A provider by name, or what is missing for one."""

    name: str = ""
    missing: str | None = None


def choose_searcher(settings: ToolSettings) -> Choice:
    """Whom web_search asks."""
    name = settings.web_provider
    if name != "auto":
        return Choice(name, _lacks(name, settings))
    for candidate in _IN_ORDER:
        if _lacks(candidate, settings) is None:
            return Choice(candidate)
    return Choice(
        missing="no search provider: set a key (TAVILY_API_KEY, EXA_API_KEY, BRAVE_API_KEY, SERPER_API_KEY, "
        "FIRECRAWL_API_KEY or web_api_keys), the address of a SearXNG (SEARXNG_URL), or web_provider ddgs, which needs "
        "no key"
    )


def choose_reader(settings: ToolSettings) -> Choice:
    """Who reads pages for web_extract."""
    name = settings.web_extract_provider
    if name != "fetch":
        return Choice(name, _lacks(name, settings))
    if importlib.util.find_spec("trafilatura") is None:
        return Choice(
            name,
            "reading pages needs the extra `web` (pip install 'palaestra[web]'), or web_extract_provider and its key",
        )
    return Choice(name)


def searcher(name: str, settings: ToolSettings) -> Searcher:
    """The provider of that name, which must not lack anything."""
    made: Searcher = Ddgs(settings.lane()) if name == "ddgs" else _made(name, settings)
    return made


def reader(name: str, settings: ToolSettings) -> PageReader:
    """The same for pages; `fetch` is not a provider."""
    made: PageReader = _made(name, settings)
    return made


def _made(name: str, settings: ToolSettings) -> Any:  # each class is a Searcher, a PageReader or both
    module = importlib.import_module(f"palaestra.tools.web.providers.{name}")
    server = Server(
        name=name,
        base_url=settings.web_urls.get(name) or module.BASE_URL,
        key=f"web_api_keys.{name}" if name in WEB_KEYS else f"web_urls.{name}",
        headers=module.headers(settings.web_api_keys.get(name, "")),
        lane=settings.lane(),
    )
    return getattr(module, name.capitalize())(server)


def _lacks(name: str, settings: ToolSettings) -> str | None:
    """What a known provider needs and has not got."""
    if name == "ddgs":
        return ddgs.missing()
    if settings.web_api_keys.get(name) or (settings.web_urls.get(name) and name in WEB_URLS):
        return None
    if name == "searxng":
        return "searxng needs the address of an instance: set SEARXNG_URL or web_urls.searxng"
    return f"{name} needs a key: set {WEB_KEYS[name]} or web_api_keys.{name}"
