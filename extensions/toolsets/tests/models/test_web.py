"""`web_search` and `web_extract` as models and reward functions call them: bounds, availability, settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from aiohttp import web

from pages.site import DOCUMENTS, KEY, Site, firecrawl, pages, searxng
from palaestra.tools.registry.build import RunConditions, build_tool_registry, unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra_contract.tool_context import ToolContext
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot


@pytest.fixture(scope="module")
def engine() -> Iterator[Site]:
    with Site(searxng()) as running:
        yield running


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(pages()) as running:
        yield running


async def no_slot() -> Slot:
    raise AssertionError("the web needs no slot")


def tools(**settings: JSON) -> ToolRuntime:
    return ToolRuntime(build_tool_registry(["web"], settings=ToolSettings(**settings)), no_slot, "task-1")


def call(bound: ToolRuntime, name: str, **arguments: JSON) -> JSON:
    return json.loads(asyncio.run(bound.handle(name, arguments)))


def test_a_search_replies_in_the_contracts_shape(engine: Site) -> None:
    reply = call(tools(web_urls={"searxng": engine.url}), "web_search", query="tern", limit=1)
    title, url, text = DOCUMENTS[1]
    found = {"position": 1, "title": title, "url": url, "description": text}
    assert reply == {"success": True, "data": {"web": [found]}}


@pytest.mark.parametrize("arguments", [{}, {"query": ""}, {"query": "  "}, {"query": "x", "limit": 0}, {"query": 1}])
def test_a_search_for_nothing_asks_nobody(engine: Site, arguments: dict[str, JSON]) -> None:
    before = len(engine.seen)
    assert call(tools(web_urls={"searxng": engine.url}), "web_search", **arguments)["error"]
    assert len(engine.seen) == before


def test_long_extracts_are_cut_and_say_so() -> None:
    async def search(request: web.Request) -> web.Response:
        return web.json_response({"results": [{"url": "u", "title": "t", "content": "x" * 5000}]})

    app = web.Application()
    app.router.add_get("/search", search)
    with Site(app) as running:
        reply = call(tools(web_urls={"searxng": running.url}), "web_search", query="x")
    assert reply["data"]["web"][0]["description"] == "x" * 1000 + "… [4000 more characters]"


def test_a_search_engine_that_is_gone_ends_the_rollout_unscored() -> None:
    with Site(web.Application()) as empty, pytest.raises(ToolUnavailable, match="HTTP 404"):
        call(tools(web_urls={"searxng": empty.url}), "web_search", query="x")


def test_pages_come_with_their_titles_or_their_reasons(site: Site) -> None:
    urls = [site.url + "/article", site.url + "/status/404", "http://127.0.0.9/"]
    results = call(tools(web_allow=["127.0.0.1"]), "web_extract", urls=urls)["results"]
    assert [each["url"] for each in results] == urls
    assert results[0]["title"] == "The heron and the tern"
    assert "404" in results[1]["error"]
    assert "private" in results[2]["error"]


def test_a_long_page_is_read_in_parts_that_make_the_whole(site: Site) -> None:
    whole, offset, bound = "", 0, tools(web_allow=["127.0.0.1"])
    while True:
        (part,) = call(bound, "web_extract", urls=[site.url + "/long"], offset=offset)["results"]
        whole += part["content"]
        if "hint" not in part:
            break
        assert part["total_chars"] == 48_890
        assert part["hint"].endswith(f"continue with offset={len(whole)}")
        offset = len(whole)
    assert whole == "".join(f"line {number}\n" for number in range(5000))
    beyond = call(bound, "web_extract", urls=[site.url + "/long"], offset=99_999)
    assert "beyond the end" in beyond["results"][0]["error"]


def test_when_no_page_can_be_read_the_whole_is_an_error(site: Site) -> None:
    reply = call(tools(), "web_extract", urls=[site.url + "/article"])
    assert reply["error"]
    assert "private" in reply["results"][0]["error"]


@pytest.mark.parametrize("urls", [[], ["u"] * 6, "http://one.example/", [1]])
def test_a_list_of_addresses_is_wanted(urls: JSON) -> None:
    assert "urls" in call(tools(), "web_extract", urls=urls)["error"]


def test_ones_own_firecrawl_is_not_asked_for_what_is_private() -> None:
    with Site(firecrawl()) as running:
        own = {"web_urls": {"firecrawl": running.url}, "web_api_keys": {"firecrawl": KEY}}
        bound = tools(web_extract_provider="firecrawl", **own)
        urls = ["http://169.254.169.254/latest", "http://localhost:1/", "http://93.184.216.34/"]
        results = call(bound, "web_extract", urls=urls)["results"]
        assert running.seen == ["/v2/scrape"]
    assert ["private" in each["error"] for each in results] == [True, True, False]


def test_without_a_provider_the_tool_is_missing_and_says_what_to_set() -> None:
    registry = build_tool_registry(["search"])
    assert registry.list_tools() == []
    assert "SEARXNG_URL" in registry.missing["web_search"]
    reply = call(ToolRuntime(unrestricted(registry), no_slot, "task-1"), "web_extract", urls=["http://127.0.0.1:1/"])
    assert "private" in reply["results"][0]["error"]


def test_a_replayed_world_needs_no_key() -> None:
    assert build_tool_registry(["search"], conditions=RunConditions(replayed=True)).list_tools() == ["web_search"]
    assert build_tool_registry(["search"], conditions=RunConditions(replayed=True)).missing == {}


def test_an_agent_without_a_network_has_the_web_only_by_name() -> None:
    settings = ToolSettings(web_urls={"searxng": "http://s.example"})
    everything = build_tool_registry(settings=settings).list_tools()
    offline = build_tool_registry(settings=settings, conditions=RunConditions(network=False)).list_tools()
    assert {"web_search", "web_extract"} <= set(everything) - set(offline)
    assert not any(name.startswith(("web_", "browser_")) for name in offline)
    assert build_tool_registry(["web"], settings=settings, conditions=RunConditions(network=False)).list_tools() == [
        "web_search",
        "web_extract",
    ]


async def test_a_reward_function_searches_and_reads(engine: Site, site: Site) -> None:
    settings = ToolSettings(web_urls={"searxng": engine.url}, web_allow=["127.0.0.1"])
    registry = unrestricted(build_tool_registry([], settings=settings))
    context = ToolContext("task-1", slot=no_slot, tools=ToolRuntime(registry, no_slot, "task-1"))
    found = await asyncio.to_thread(context.web_search, "owl")
    assert found["data"]["web"][0]["url"] == DOCUMENTS[2][1]
    assert found == await context.web_search_async("owl")
    pages = await context.web_extract_async([site.url + "/article"])
    assert pages["results"][0]["title"] == "The heron and the tern"
    assert pages == await asyncio.to_thread(context.web_extract, [site.url + "/article"])
