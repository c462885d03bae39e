"""A small web for tests, on the loopback: pages of every kind, and servers that speak the providers' wires.

The provider servers check what they are sent as the real ones do: the key where it belongs, known fields only.
"""

from __future__ import annotations

import asyncio
import html
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType

from aiohttp import web

from palaestra_slots.core.types import JSON

KEY = "the-key"
DOCUMENTS: tuple[tuple[str, str, str], ...] = (
    ("The heron", "https://birds.example/heron", "A heron stands in shallow water and waits."),
    ("The tern", "https://birds.example/tern", "A tern dives for fish & flies far."),
    ("The owl", "https://birds.example/owl", "An owl hunts at night."),
)

ARTICLE = """<!doctype html><html><head><title>The heron and the tern</title><meta charset="utf-8"></head><body>
<nav><a href="/home">Home</a> <a href="/shop">Shop</a></nav>
<article><h1>The heron and the tern</h1>
<p>A heron stands in shallow water and waits for a long time before it strikes. It was seen at <a href="/lake">the
lake</a> on many mornings, always at the same place, always alone.</p>
<p>A tern dives for fish from a height of several metres, which the heron never does. Both eat the same small fish, and
neither seems to mind the other: ½ of the lake belongs to each.</p>
<table><tr><th>bird</th><th>fish per day</th></tr><tr><td>heron</td><td>12</td></tr></table></article>
<footer>All rights reserved. Cookies are used here.</footer><script>var secret = 1;</script></body></html>"""


class Site:
    """One server in a thread of its own, as a context manager. `url` is where it listens, `seen` what it was asked."""

    def __init__(self, app: web.Application) -> None:
        self.seen: list[str] = []
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Site:
        self._thread.start()
        self.url = self._run(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Awaitable[str] | Awaitable[None]) -> str:
        async def wait() -> str:
            return str(await work)

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(10)

    async def _start(self) -> str:
        @web.middleware
        async def note(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.seen.append(request.path)
            return await handler(request)

        self._app.middlewares.append(note)
        self._runner = web.AppRunner(self._app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"


def found(query: str, limit: int) -> list[tuple[str, str, str]]:
    """The documents that any word of the query is in."""
    words = query.lower().split()
    return [each for each in DOCUMENTS if any(word in " ".join(each).lower() for word in words)][:limit]


async def _body(request: web.Request, *fields: str) -> dict[str, JSON]:
    body: dict[str, JSON] = await request.json()
    if set(body) - set(fields):
        raise web.HTTPUnprocessableEntity(text=f"unknown fields {sorted(set(body) - set(fields))}")
    if len(str(body.get("query") or body.get("q") or "")) > 400:
        raise web.HTTPBadRequest(text='{"detail": "Query is too long"}')
    return body


def _signed(request: web.Request, header: str, value: str) -> None:
    if request.headers.get(header) != value:
        raise web.HTTPUnauthorized(text='{"detail": "Unauthorized: missing or invalid API key."}')


def tavily() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        _signed(request, "Authorization", f"Bearer {KEY}")
        body = await _body(request, "query", "max_results")
        results = [
            {"title": title, "url": url, "content": text, "score": 0.9, "raw_content": None}
            for title, url, text in found(body["query"], body["max_results"])
        ]
        return web.json_response({"query": body["query"], "answer": None, "results": results, "response_time": 0.1})

    async def extract(request: web.Request) -> web.Response:
        _signed(request, "Authorization", f"Bearer {KEY}")
        body = await _body(request, "urls", "format")
        known = {url: text for _, url, text in DOCUMENTS}
        return web.json_response(
            {
                "results": [{"url": url, "raw_content": known[url]} for url in reversed(body["urls"]) if url in known],
                "failed_results": [{"url": url, "error": "not found"} for url in body["urls"] if url not in known],
            }
        )

    return _app(post={"/search": search, "/extract": extract})


def exa() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        _signed(request, "x-api-key", KEY)
        body = await _body(request, "query", "numResults", "contents")
        results = [
            {"id": url, "title": title, "url": url, "highlights": text.split(" and "), "score": 0.3}
            for title, url, text in found(body["query"], body["numResults"])
        ]
        return web.json_response({"requestId": "r", "results": results})

    async def contents(request: web.Request) -> web.Response:
        _signed(request, "x-api-key", KEY)
        body = await _body(request, "urls", "text")
        known = {url: (title, text) for title, url, text in DOCUMENTS}
        missing = {"tag": "CRAWL_NOT_FOUND", "httpStatusCode": 404}
        statuses = [
            {"id": url, "status": "success"} if url in known else {"id": url, "status": "error", "error": missing}
            for url in body["urls"]
        ]
        results = [
            {"id": url, "url": url, "title": known[url][0], "text": known[url][1]}
            for url in body["urls"]
            if url in known
        ]
        return web.json_response({"results": results, "statuses": statuses})

    return _app(post={"/search": search, "/contents": contents})


def brave() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        _signed(request, "X-Subscription-Token", KEY)
        if int(request.query["count"]) > 20 or set(request.query) != {"q", "count"}:
            raise web.HTTPUnprocessableEntity
        results = [
            {
                "title": title,
                "url": url,
                "description": html.escape(text).replace("fish", "<strong>fish</strong>"),
            }
            for title, url, text in found(request.query["q"], int(request.query["count"]))
        ]
        return web.json_response({"type": "search", "web": {"type": "search", "results": results}} if results else {})

    return _app(get={"/res/v1/web/search": search})


def serper() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        _signed(request, "X-API-KEY", KEY)
        body = await _body(request, "q", "num")
        organic = [
            {"title": title, "link": url, "snippet": text, "position": place}
            for place, (title, url, text) in enumerate(found(body["q"], body["num"]), 1)
        ]
        return web.json_response({"searchParameters": body, "organic": organic})

    return _app(post={"/search": search})


def firecrawl() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        _signed(request, "Authorization", f"Bearer {KEY}")
        body = await _body(request, "query", "limit")
        results = [
            {"url": url, "title": title, "description": text}
            for title, url, text in found(body["query"], body["limit"])
        ]
        return web.json_response({"success": True, "data": {"web": results} if results else {}})

    async def scrape(request: web.Request) -> web.Response:
        _signed(request, "Authorization", f"Bearer {KEY}")
        body = await _body(request, "url", "formats")
        known = {url: (title, text) for title, url, text in DOCUMENTS}
        if "forbidden" in body["url"]:
            raise web.HTTPBadRequest(text='{"success": false, "error": "This website is not supported"}')
        title, text = known.get(body["url"], ("Not found", "gone"))
        about = {"title": title, "sourceURL": body["url"], "statusCode": 200 if body["url"] in known else 404}
        return web.json_response({"success": True, "data": {"markdown": text, "metadata": about}})

    return _app(post={"/v2/search": search, "/v2/scrape": scrape})


def searxng() -> web.Application:
    async def search(request: web.Request) -> web.Response:
        if request.query.get("format") != "json":
            raise web.HTTPForbidden
        results = [
            {"url": url, "title": title, "content": text, "engine": "small", "score": 1.0}
            for title, url, text in found(request.query["q"], 20)
        ]
        return web.json_response({"query": request.query["q"], "number_of_results": 0, "results": results})

    return _app(get={"/search": search})


PROVIDERS: Mapping[str, Callable[[], web.Application]] = {
    "tavily": tavily,
    "exa": exa,
    "brave": brave,
    "serper": serper,
    "firecrawl": firecrawl,
    "searxng": searxng,
}


def pages() -> web.Application:
    """Pages of every kind, and what else can happen when one is asked for."""

    async def article(request: web.Request) -> web.Response:
        return web.Response(text=ARTICLE, content_type="text/html")

    async def latin(request: web.Request) -> web.Response:
        body = ARTICLE.replace("utf-8", "iso-8859-1").encode("iso-8859-1")
        return web.Response(body=body, headers={"Content-Type": "text/html"})

    async def of_kind(request: web.Request) -> web.Response:
        kind = request.query["type"]
        body = {"application/json": b'{"birds": ["heron"], "n": 1}', "application/pdf": b"%PDF-1.7 ..."}
        return web.Response(body=body.get(kind, b"# Birds\n\nheron\n"), headers={"Content-Type": kind} if kind else {})

    async def binary(request: web.Request) -> web.Response:
        return web.Response(body=b"\x7fELF\0\0\0", headers={"Content-Type": "application/octet-stream"})

    async def empty(request: web.Request) -> web.Response:
        return web.Response(text="<html><body><script>render()</script></body></html>", content_type="text/html")

    async def status(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]), text="no")

    async def redirect(request: web.Request) -> web.Response:
        left = int(request.match_info["left"])
        raise web.HTTPFound(request.query["to"] if left == 0 else f"/redirect/{left - 1}?{request.query_string}")

    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await reply.prepare(request)
        while True:
            await reply.write(b"heron " * 20_000)

    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def slow(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await reply.prepare(request)
        await reply.write(b"begins and never")
        await asyncio.Event().wait()
        return reply

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def long(request: web.Request) -> web.Response:
        return web.Response(text="".join(f"line {number}\n" for number in range(5000)))

    return _app(
        get={
            "/article": article,
            "/latin": latin,
            "/kind": of_kind,
            "/binary": binary,
            "/empty": empty,
            "/status/{status}": status,
            "/redirect/{left}": redirect,
            "/endless": endless,
            "/silent": silent,
            "/slow": slow,
            "/cut": cut,
            "/long": long,
        }
    )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _app(get: Mapping[str, Handler] = {}, post: Mapping[str, Handler] = {}) -> web.Application:
    app = web.Application()
    app.add_routes([web.get(path, handler) for path, handler in get.items()])
    app.add_routes([web.post(path, handler) for path, handler in post.items()])
    return app
