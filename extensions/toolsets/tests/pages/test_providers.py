"""Each provider against a server that speaks its wire and checks what it is sent."""

from __future__ import annotations

import asyncio
import importlib.util
import re

import pytest
from aiohttp import web

from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_toolsets.web.providers import choose_reader, choose_searcher, reader, searcher

from .site import DOCUMENTS, KEY, PROVIDERS, Site


def settings(name: str, url: str, **more: JSON) -> ToolSettings:
    keys = {} if name == "searxng" else {name: KEY}
    return ToolSettings(**{"web_provider": name, "web_urls": {name: url}, "web_api_keys": keys} | more)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_search_gives_titles_addresses_and_extracts(name: str) -> None:
    with Site(PROVIDERS[name]()) as site:
        provider = searcher(name, settings(name, site.url))
        found = asyncio.run(provider.search("tern", 5))
        both = asyncio.run(provider.search("birds.example", 2))
        nothing = asyncio.run(provider.search("penguin", 5))
    title, url, text = DOCUMENTS[1]
    assert found[0].title == title
    assert found[0].url == url
    assert found[0].description.replace(" … ", " and ") == text
    assert [each.url for each in both] == [DOCUMENTS[0][1], DOCUMENTS[1][1]]
    assert nothing == []


@pytest.mark.parametrize("name", ["tavily", "exa", "firecrawl"])
async def test_pages_come_in_the_order_they_were_asked_for_and_the_others_say_why(name: str) -> None:
    urls = [DOCUMENTS[1][1], "https://birds.example/none", DOCUMENTS[0][1]]
    with Site(PROVIDERS[name]()) as site:
        pages = await reader(name, settings(name, site.url)).read(urls)
    assert [page.url for page in pages] == urls
    assert [page.content for page in pages] == [DOCUMENTS[1][2], "", DOCUMENTS[0][2]]
    assert [bool(page.error) for page in pages] == [False, True, False]
    assert "404" in pages[1].error or "not found" in pages[1].error


async def test_a_page_that_a_provider_refuses_is_its_own_error() -> None:
    with Site(PROVIDERS["firecrawl"]()) as site:
        pages = await reader("firecrawl", settings("firecrawl", site.url)).read(["https://forbidden.example/"])
    assert "not supported" in pages[0].error


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "searxng"])
async def test_a_wrong_key_is_named_and_never_shown(name: str) -> None:
    with Site(PROVIDERS[name]()) as site:
        provider = searcher(name, settings(name, site.url, web_api_keys={name: "another-key"}))
        with pytest.raises(ToolUnavailable, match=rf"{name} at .* check web_api_keys\.{name}") as caught:
            await provider.search("tern", 5)
    assert "another-key" not in str(caught.value)


async def test_a_query_that_is_refused_is_the_models_to_mend() -> None:
    with Site(PROVIDERS["tavily"]()) as site:
        provider = searcher("tavily", settings("tavily", site.url))
        with pytest.raises(ToolMistake, match=r"HTTP 400.*too long"):
            await provider.search("tern " * 100, 5)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(
    "body", [b"<html>down for maintenance", b"[1, 2]", b'{"results": 1, "web": 1, "organic": 1, "data": 1}']
)
async def test_an_answer_of_another_shape_is_the_providers_failure(name: str, body: bytes) -> None:
    async def other(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", other)
    with Site(app) as site, pytest.raises(ToolUnavailable, match=name):
        await searcher(name, settings(name, site.url)).search("tern", 5)


CHOICES: list[tuple[dict[str, JSON], str]] = [
    ({"web_api_keys": {"serper": "k", "exa": "k"}}, "exa"),
    ({"web_api_keys": {"serper": "k"}, "web_urls": {"searxng": "http://s"}}, "serper"),
    ({"web_urls": {"searxng": "http://s"}}, "searxng"),
    ({"web_urls": {"firecrawl": "http://f"}}, "firecrawl"),
    ({"web_provider": "brave", "web_api_keys": {"brave": "k", "exa": "k"}}, "brave"),
]


@pytest.mark.parametrize(("given", "name"), CHOICES)
def test_whom_a_configuration_means(given: dict[str, JSON], name: str) -> None:
    choice = choose_searcher(ToolSettings(**given))
    assert (choice.name, choice.missing) == (name, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "TAVILY_API_KEY.*SEARXNG_URL.*ddgs"),
        ({"web_provider": "brave", "web_api_keys": {"exa": "k"}}, "BRAVE_API_KEY or web_api_keys.brave"),
        ({"web_provider": "tavily", "web_urls": {"tavily": "http://t"}}, "tavily needs a key"),
        ({"web_provider": "searxng"}, "SEARXNG_URL or web_urls.searxng"),
    ],
)
def test_what_is_missing_names_the_way_out(given: dict[str, JSON], says: str) -> None:
    missing = choose_searcher(ToolSettings(**given)).missing
    assert re.search(says, missing or "")


@pytest.mark.skipif(importlib.util.find_spec("ddgs") is not None, reason="ddgs is installed here")
def test_ddgs_names_the_extra_that_it_needs() -> None:
    assert "[web]'" in (choose_searcher(ToolSettings(web_provider="ddgs")).missing or "")


def test_reading_by_a_provider_needs_its_key() -> None:
    assert "EXA_API_KEY" in (choose_reader(ToolSettings(web_extract_provider="exa")).missing or "")
    assert choose_reader(ToolSettings(web_extract_provider="exa", web_api_keys={"exa": "k"})).missing is None


async def test_no_more_requests_at_once_than_the_settings_say() -> None:
    under_way, most = 0, 0
    three = asyncio.Barrier(3)

    async def search(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await three.wait()  # fewer at once would wait here for ever
        under_way -= 1
        return web.json_response({"results": []})

    app = web.Application()
    app.router.add_get("/search", search)

    async def ask(url: str) -> None:
        told = settings("searxng", url, web_concurrency=3)
        await asyncio.gather(*(searcher("searxng", told).search("tern", 1) for _ in range(12)))

    with Site(app) as site:
        await ask(site.url)
    assert most == 3
