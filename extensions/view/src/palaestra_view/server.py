"""The viewer's server: the page, and a JSON API over the runs, on a loopback address.

Invariants: every request needs the token, which the first address carries and a cookie keeps; the server reads only the
runs that it shows, and writes only their annotations, for its own page or for a program that sends the token in a
header; no answer can run a script that is not the page's own (`POLICY`). Lists are paged: `offset` and `limit` (at most
1,000).

    GET /                            the page; with ?token=… it sets the cookie and redirects
    GET /page/NAME                   the page's own scripts and styles
    GET /api/runs                    [{name, reward, official, labels, indexed, …}]: `summary.run_summary` of each run,
                                     with `problems` and the number of older runs that are left out (`more`)
    GET /api/run?run                 one run: {summary, settings, provenance, training}, and `overview.overview`
    GET /api/table?run…              {columns, rows: [{run, cells}], …}: the table of `palaestra runs --table`
    GET /api/compare?base&by&run…    paired differences between each run and `base`, by `reward` or `official`
    GET /api/rollouts?run            {total, rows}; with `where` (JSON: [[field, comparison, value], …]), `sort`,
                                     `descending=1`, `offset`, `limit`: `run_index.RunIndex.rows`
    GET /api/groups?run              {total, groups}: the groups with a cell for each rollout; `offset`, `limit`
    GET /api/search?run&text         {found: [[id, passage]], next, total}: repeat with `after=next` until it is total
    GET /api/rollout?run&id          the whole rollout: `rollout_record.rollout_record`
    GET /api/forks?run&id            how often the rollout succeeds from each of its turns: `forks.forks`
    GET /api/judgement?run&id        tags, notes, verdict and new reward of a rollout: `marks.Marks.of`
    POST /api/annotate               {run, id, tags, untag, note, verdict}: add to the run's annotations; the answer is
                                     that of `judgement`
    GET /api/text?run&id&path        {text}: part of a text that was cut; `start`, `chars` (at most 1,000,000)
    GET /api/tokens?run&id&row       the exact tokens of a row: `rollout_record.token_record`
    GET /api/siblings?run&id&id…     2 to 16 rollouts compared; `reference`: `divergence.siblings`
    GET /api/events                  server-sent events: {run} when a run has changed, {} when runs were added

Errors are `{"detail": …}` with status 400 for a wrong request, 401 without the token, 404 for an unknown address, and
500 if the viewer itself fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from palaestra.envs.run.run_table import TableRow, about, cells, table_row
from palaestra.rollouts.annotations import Annotation, annotation, write_annotations
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.io.durable_files import UNREADABLE
from palaestra_slots.core.io.http_server import Handler, invite_body, is_loopback, listening, refusal
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import JSON
from palaestra_view.comparison import compared
from palaestra_view.divergence import MOST, siblings
from palaestra_view.forks import fork_of, forks, origin_of
from palaestra_view.overview import overview
from palaestra_view.page_file import page_file, page_files
from palaestra_view.rollout_record import Names, rollout_record, text_at, token_record
from palaestra_view.run_index import Condition
from palaestra_view.runs import OpenRuns
from palaestra_view.summary import run_details, run_summary

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy. Images of a conversation are data in the record; nothing else is loaded."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_MOST_ROWS = 1000
_MOST_CHARS = 1_000_000
_MOST_POSTED_BYTES = 64 << 10
_POLL_S = 0.5
_DISCOVER_S = 3.0
_QUEUED = 100
logger = logging.getLogger(__name__)


class Viewer:
    """Answers the requests of one viewer. `names` returns the texts of tokens, if a tokenizer is known. `author` is the
    name under which annotations are stored."""

    def __init__(
        self,
        runs: OpenRuns,
        token: str,
        names: Callable[[str], Names | None] = lambda run: None,
        author: str = "viewer",
    ) -> None:
        self.runs = runs
        self._author = author
        self._token = token
        self._names = names
        self._listeners: set[asyncio.Queue[str]] = set()

    def application(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_POSTED_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/page/{name}", self._file)
        app.router.add_get("/api/events", self._events)
        app.router.add_post("/api/annotate", self._annotate)
        for path, answer in self._answers().items():
            app.router.add_get(f"/api/{path}", _json_handler(answer))
        return app

    async def follow(self) -> None:
        """Index the runs, and tell the pages when a run has changed. Runs until it is cancelled."""
        quiet = _DISCOVER_S
        while True:
            changed = [name for name in self.runs if await asyncio.to_thread(self.runs.update, name)]
            for name in changed:
                self._tell({"run": name})
            quiet += 0 if changed else _POLL_S
            if quiet >= _DISCOVER_S:
                quiet = 0.0
                if await asyncio.to_thread(self.runs.discover):
                    self._tell({})
            await asyncio.sleep(0 if changed else _POLL_S)

    def _tell(self, event: Mapping[str, JSON]) -> None:
        for queue in self._listeners:
            if not queue.full():
                queue.put_nowait(json.dumps(event))

    def _answers(self) -> dict[str, _Answer]:
        return {
            "runs": lambda asked: all_runs(self.runs),
            "run": lambda asked: one_run(self.runs, asked.run),
            "table": lambda asked: table(self.runs, asked.every("run")),
            "compare": lambda asked: compared(
                {name: self.runs[name] for name in dict.fromkeys((*asked.every("run"), asked.one("base")))},
                asked.one("base"),
                asked.one("by", "reward"),
            ),
            "rollouts": lambda asked: rollouts_page(self.runs, asked),
            "groups": lambda asked: groups(self.runs, asked.run, asked.offset, asked.limit),
            "search": self._search,
            "rollout": lambda asked: rollout_record(self.runs[asked.run], asked.one("id")),
            "judgement": lambda asked: self.runs.marks(asked.run).of(asked.one("id")),
            "forks": lambda asked: forks(self.runs, asked.run, asked.one("id")),
            "text": lambda asked: {
                "text": text_at(
                    self.runs[asked.run],
                    asked.one("id"),
                    asked.one("path"),
                    asked.number("start"),
                    min(_MOST_CHARS, asked.number("chars", 20_000)),
                )
            },
            "tokens": lambda asked: token_record(
                self.runs[asked.run], asked.one("id"), asked.number("row"), self._names(asked.run)
            ),
            "siblings": lambda asked: compared_rollouts(
                self.runs, asked.run, asked.every("id"), asked.one("reference", "")
            ),
        }

    def _search(self, asked: Query) -> JSON:
        text = asked.one("text")
        found, following, total = self.runs[asked.run].search(text, after=asked.number("after"))
        return {"found": [list(each) for each in found], "next": following, "total": total}

    @property
    def _guard(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                response = self._access_refusal(request) or await handler(request)
            except web.HTTPException as error:
                response = web.json_response({"detail": error.reason}, status=error.status)
            except ConnectionError:  # the page was closed
                raise
            except Exception as error:  # a fault of one answer must not fill the terminal
                response = _failed(request, error)
            if not response.prepared:
                response.headers.update(_HEADERS)
            return response

        return check

    def _access_refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a caller who may not read, or to one who shows the token for the first time."""
        name = request.headers.get("Host", "")
        if not is_loopback(name if name.endswith("]") else name.rpartition(":")[0] or name):
            return web.json_response({"detail": f"this server is localhost, not {name}"}, status=403)
        given = request.query.get("token")
        sent = given or request.cookies.get(_cookie(request), "")
        headers = {"Authorization": request.headers.get("Authorization") or f"Bearer {sent}"}
        if refusal(self._token, headers) is not None:
            hint = "open the address that `palaestra view` printed, which has the token"
            return web.json_response({"detail": hint}, status=401)
        if request.method == "POST" and not _is_own(request):
            return web.json_response({"detail": "only the viewer's own page may change annotations"}, status=403)
        if given and request.path == "/":
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(_cookie(request), self._token, httponly=True, samesite="Strict", path="/")
            return response
        return None

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=page_file("index.html"), content_type="text/html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in page_files():
            raise web.HTTPNotFound
        return web.Response(text=page_file(name), content_type=_TYPES["." + name.rpartition(".")[2]])

    async def _annotate(self, request: web.Request) -> web.Response:
        """Add to the annotations of a run, which `_access_refusal` has allowed."""
        await invite_body(request)
        try:
            asked = msgspec.json.decode(await request.read(), type=_Asked)
            said = annotation(
                asked.id, self._author, tags=asked.tags, untag=asked.untag, note=asked.note, verdict=asked.verdict
            )
            return web.json_response(await asyncio.to_thread(self._write_annotation, asked.run, said))
        except (PalaestraError, UnicodeError, *UNREADABLE) as error:
            return web.json_response({"detail": str(error)}, status=400)

    def _write_annotation(self, run: str, said: Annotation) -> JSON:
        index, marks = self.runs[run], self.runs.marks(run)
        if index.trajectory(said.rollout_id) is None:
            raise ConfigError(f"the run has no rollout {said.rollout_id!r} that has ended")
        write_annotations(index.path.parent, [said])
        marks.update()
        return marks.of(said.rollout_id)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        await response.prepare(request)
        queue: asyncio.Queue[str] = asyncio.Queue(_QUEUED)
        self._listeners.add(queue)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), 15.0)
                    await response.write(f"data: {event}\n\n".encode())
                except TimeoutError:
                    await response.write(b": alive\n\n")
        except ConnectionResetError:
            return response
        finally:
            self._listeners.discard(queue)


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to annotate a rollout."""

    run: str
    id: str
    tags: list[str] = []
    untag: list[str] = []
    note: str = ""
    verdict: str = ""


def _failed(request: web.Request, error: Exception) -> web.Response:
    """Return the answer to a request in which the viewer itself failed: one line, which the terminal gets too. The
    traceback is for `-v`."""
    what = one_line(f"{type(error).__name__}: {error}", 300)
    logger.warning("%s failed: %s (palaestra -v view shows the traceback)", one_line(request.path, 100), what)
    logger.debug("the traceback", exc_info=error)
    todo = "reload the page; if it happens again, report it with the output of `palaestra -v view`"
    return web.json_response({"detail": f"the viewer failed with {what}; {todo}"}, status=500)


def _is_own(request: web.Request) -> bool:
    """Return whether a request that changes something comes from the viewer's own page, or from a program that sends
    the token in a header, which no other page can do. The body must be JSON, which no form of another page can send."""
    if request.content_type != "application/json":
        return False
    origin = request.headers.get("Origin")
    if origin is None:
        return "Authorization" in request.headers and "Sec-Fetch-Site" not in request.headers
    return origin == f"http://{request.headers.get('Host', '')}"


class Query:
    """The parameters of a request. Wrong ones raise `ConfigError`."""

    def __init__(self, request: web.Request) -> None:
        self._given = request.query

    def one(self, name: str, default: str | None = None) -> str:
        found = self._given.get(name, default)
        if found is None:
            raise ConfigError(f"the parameter {name} is missing")
        return found

    def every(self, name: str) -> list[str]:
        return self._given.getall(name, [])

    def number(self, name: str, default: int = 0) -> int:
        found = self._given.get(name, str(default))
        if not found.isdecimal() or len(found) > 15:
            raise ConfigError(f"the parameter {name} must be a number, not {found!r}")
        return int(found)

    @property
    def run(self) -> str:
        return self.one("run")

    @property
    def offset(self) -> int:
        return self.number("offset")

    @property
    def limit(self) -> int:
        return min(_MOST_ROWS, self.number("limit", 200))

    @property
    def where(self) -> list[Condition]:
        try:
            return msgspec.json.decode(self._given.get("where", "[]"), type=list[Condition])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the parameter where is not a list of [field, comparison, value]: {error}") from None


_Answer = Callable[[Query], JSON]


def table(runs: OpenRuns, names: Sequence[str]) -> JSON:
    """Return the table over these runs. A run that has none, such as a file of another program, is a problem."""
    rows, problems = dict[str, TableRow](), dict[str, str]()
    for name in dict.fromkeys(names):
        try:
            rows[name] = table_row(runs[name].path.parent)
        except (PalaestraError, OSError, ValueError) as error:
            problems[name] = str(error)
    columns, lines = cells(list(rows.values()))
    shown = [{"run": name, "cells": line} for name, line in zip(rows, lines, strict=True)]
    return {"columns": columns, "rows": shown, "about": about(list(rows.values())), "problems": problems}


def all_runs(runs: OpenRuns) -> JSON:
    """Return the summaries of all runs."""
    found = [run_summary(runs[name], name) for name in runs]
    return {"runs": found, "problems": runs.problems, "more": runs.more, "root": str(runs.root)}


def one_run(runs: OpenRuns, name: str) -> JSON:
    """Return the summary and the details of a run."""
    fork = fork_of(runs[name])
    details = run_details(runs[name]) | {"judged": runs.marks(name).summary()}
    details |= {"fork": fork and {**fork, "run": origin_of(runs, name)}}
    return {"summary": run_summary(runs[name], name), **details, **overview(runs[name])}


def groups(runs: OpenRuns, name: str, offset: int, limit: int) -> JSON:
    """Return one page of a run's groups."""
    total, found = runs[name].groups(offset=offset, limit=limit)
    return {"total": total, "groups": found}


def rollouts_page(runs: OpenRuns, asked: Query) -> JSON:
    """Return one page of a run's rollouts."""
    total, rows = runs[asked.run].rows(
        asked.where,
        sort=asked.one("sort", ""),
        descending=asked.one("descending", "") == "1",
        offset=asked.offset,
        limit=asked.limit,
    )
    return {"total": total, "rows": runs.marks(asked.run).annotated(rows)}


def compared_rollouts(runs: OpenRuns, name: str, ids: Sequence[str], reference: str) -> JSON:
    """Compare rollouts of a run."""
    if not 2 <= len(set(ids)) <= MOST:
        raise ConfigError(f"2 to {MOST} rollouts can be compared, not {len(set(ids))}")
    found = [runs[name].trajectory(each) for each in dict.fromkeys(ids)]
    finished = [each for each in found if each is not None]
    if len(finished) < 2:
        raise ConfigError("fewer than two of these rollouts have ended")
    return siblings(finished, reference)


def _json_handler(answer: _Answer) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            body = await asyncio.to_thread(lambda: _json_bytes(answer(Query(request))))
        except PalaestraError as error:
            return web.json_response({"detail": str(error)}, status=400)
        response = web.Response(body=body, content_type="application/json")
        response.enable_compression()
        return response

    return handle


def _json_bytes(value: JSON) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, msgspec.MsgspecError):  # a lone surrogate, which JSON can only escape
        return json.dumps(value).encode()


def _cookie(request: web.Request) -> str:
    """Return the cookie's name, which has the port, because browsers do not keep cookies of ports apart."""
    try:
        return f"palaestra_view_{request.url.port}"
    except ValueError:
        raise web.HTTPBadRequest(reason="the address has no valid port") from None


@asynccontextmanager
async def serving_viewer(viewer: Viewer, token: str, port: int = 0) -> AsyncIterator[str]:
    """Serve the viewer on 127.0.0.1 while the block runs, and yield its address without the token. Raises
    `ConfigError` if the port cannot be opened."""
    async with listening(viewer.application(), "127.0.0.1", port, token=token, handler_cancellation=True) as url:
        following = asyncio.ensure_future(viewer.follow())
        try:
            yield url
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            viewer.runs.close()
