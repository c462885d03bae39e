"""`web_crawl` over real servers: which pages, in which order, within which bounds, and what is never asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from golden_messages import check_message
from palaestra import open_world
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract import ToolSession, ToolSettings
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_toolsets.tools.web_crawl import web_crawl_tool

from .site import Site

ELSEWHERE = "http://127.0.0.9/"
LINKS = {
    "/": ["/herons", "/about#us", "/about", "/old", "mailto:a@b", "http://[bad", ELSEWHERE, "/private/x", "/away"],
    "/herons": ["/herons/grey", "/", "/missing"],
    "/herons/grey": ["/herons/grey/eggs"],
    "/herons/grey/eggs": ["/herons/grey/eggs/blue"],
    "/about": ["../terns"],
    "/private/x": [],
    "/terns": [],
}


def site_of(links: dict[str, list[str]]) -> web.Application:
    """A page for each path, with its links; `/old` redirects within, `/away` to another host."""

    async def page(request: web.Request) -> web.Response:
        if request.path == "/old":
            raise web.HTTPFound("/about")
        if request.path == "/away":
            raise web.HTTPFound(f"http://localhost:{request.url.port}/")
        if request.path == "/robots.txt":
            return web.Response(text="User-agent: *\nDisallow: /private/\n")
        if request.path not in links:
            raise web.HTTPNotFound
        found = "".join(f'<p>More on <a href="{each}">the page {each}</a>.</p>' for each in links[request.path])
        text = f"<title>{request.path}</title></head><body><p>Words of {request.path}.</p>{found}</body></html>"
        return web.Response(text=f"<html><head>{text}", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    return app


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(site_of(LINKS)) as running:
        yield running


async def no_slot() -> Slot:
    raise AssertionError("the web needs no slot")


def crawl(url: str, *, time_s: float = 60.0, allow: str = "127.0.0.1", **arguments: JSON) -> JSON:
    tool = web_crawl_tool(ToolSettings(web_allow=[allow]), time_s)
    bound = ToolRuntime(ToolRegistry([tool]), no_slot, "task-1")
    return json.loads(asyncio.run(bound.handle("web_crawl", {"url": url, **arguments})))


def paths(reply: JSON, site: Site) -> list[str]:
    return [each["url"].removeprefix(site.url) for each in reply["results"]]


def test_a_site_is_read_nearest_pages_first_and_nothing_else_is(site: Site) -> None:
    reply = crawl(site.url + "/")
    assert paths(reply, site) == ["/", "/herons", "/about", "/away", "/herons/grey", "/missing", "/terns"]
    assert reply["links_left"] == 0
    results = dict(zip(paths(reply, site), reply["results"], strict=True))
    assert results["/herons"]["title"] == "/herons"
    assert "Words of /herons." in results["/herons"]["content"]
    assert "HTTP 404 Not Found" in results["/missing"]["error"]
    assert "another site, http://localhost:" in results["/away"]["error"]
    assert "/private/x" not in site.seen
    assert site.seen.count("/robots.txt") == 1


def test_a_page_is_read_once_whichever_address_leads_to_it() -> None:
    links = {
        "/": ["/old", "/old?again", "/x", "/y", "/about", "/z", "/herons"],
        "/x": [], "/y": [], "/z": ["/about"], "/about": ["/old?once more"], "/herons": [],
    }  # fmt: skip
    with Site(site_of(links)) as site:
        reply = crawl(site.url + "/", depth=3)
        assert paths(reply, site) == ["/", "/old", "/x", "/y", "/z", "/herons"]
        assert [each["title"] for each in reply["results"]] == ["/", "/about", "/x", "/y", "/z", "/herons"]
        assert reply["links_left"] == 0
        assert paths(crawl(site.url + "/old"), site) == ["/old"]


def test_bounds_are_kept_and_said(site: Site) -> None:
    reply = crawl(site.url + "/", limit=2, depth=3)
    assert (paths(reply, site), reply["links_left"]) == (["/", "/herons"], 5)
    assert "/herons/grey/eggs" in paths(crawl(site.url + "/herons", depth=2), site)
    assert "/herons/grey/eggs" not in paths(crawl(site.url + "/herons", depth=1), site)
    assert "/herons/grey/eggs/blue" not in paths(crawl(site.url + "/", depth=3, limit=20), site)
    for wrong in ({"limit": 21}, {"limit": 0}, {"depth": 4}, {"depth": 0}):
        assert "error" in crawl(site.url + "/", **wrong)


def test_what_is_looked_for_comes_first(site: Site) -> None:
    reply = crawl(site.url + "/", instructions="What is told ABOUT us, not herons", limit=3)
    assert paths(reply, site) == ["/", "/about", "/herons"]
    assert paths(crawl(site.url + "/", instructions="about", limit=2), site) == ["/", "/about"]


def test_a_site_without_end_is_read_to_the_limit() -> None:
    async def endless(request: web.Request) -> web.Response:
        links = "".join(f'<a href="{request.path}/{number}">{number}</a>' for number in range(3000))
        return web.Response(text=f"<html><body><p>Words.</p>{links}</body></html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", endless)
    with Site(app) as running:
        reply = crawl(running.url + "/x", limit=20, depth=3)
        assert len(reply["results"]) == 20
        assert len(running.seen) == 21  # and robots.txt
        assert all(len(each["content"]) <= 3000 for each in reply["results"])
        check_message(reply["results"][0]["hint"], "web_extract")


def test_a_site_that_does_not_answer_in_time_is_said_to() -> None:
    async def slow(request: web.Request) -> web.Response:
        if request.path != "/":
            await asyncio.Event().wait()
        return web.Response(text='<p>Words.</p><a href="/slow">more</a>', content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", slow)
    with Site(app) as running:
        reply = crawl(running.url + "/", time_s=1.0)
    assert len(reply["results"]) == 1
    check_message(reply["note"], "1 s")


def test_private_addresses_are_no_sites(site: Site) -> None:
    reply = crawl(site.url + "/", allow="127.0.0.2")
    assert "private" in reply["results"][0]["error"]
    check_message(reply["error"])
    assert site.seen == []
    check_message(crawl("file:///etc/passwd")["results"][0]["error"])


def test_a_crawl_is_recorded_and_played_without_the_site(tmp_path: Path) -> None:
    settings = ToolSettings(web_allow=["127.0.0.1"])
    with Site(site_of(LINKS)) as site:
        call = {"url": site.url + "/", "instructions": "herons"}
        with ToolSession(settings=settings, world=open_world("record", tmp_path)) as session:
            recorded = session.handle("web_crawl", call, "a")
    assert json.loads(recorded)["results"][0]["title"] == "/"
    with ToolSession(world=open_world("replay", tmp_path)) as session:
        assert session.handle("web_crawl", {**call, "limit": 10}, "a") == recorded


def test_it_is_there_for_who_names_it_and_reads_from_this_machine() -> None:
    assert "web_crawl" not in build_tool_registry().list_tools()
    assert build_tool_registry(["web_crawl"]).list_tools() == ["web_crawl"]
    tavily = ToolSettings(web_extract_provider="tavily", web_api_keys={"tavily": "k"})
    assert "must be fetch" in build_tool_registry(["web_crawl"], settings=tavily).missing["web_crawl"]
