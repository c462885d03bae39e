"""Tools that touch the world, outside of runs: recorded by a tool session or an executor, played with no network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden_messages import raises
from pages.site import Site, pages, searxng
from palaestra import ToolCall, open_world
from palaestra.rollouts.journal.reader import WORLD_NAME
from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
from palaestra.tools.registry.build import RunConditions, build_tool_registry
from palaestra_contract import ToolExecutor, ToolSession, ToolSettings, handle_function_call, use_session
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, ToolUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_toolsets.browser import chromium


@pytest.fixture(scope="module")
def engine() -> Iterator[Site]:
    with Site(searxng()) as running:
        yield running


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(pages()) as running:
        yield running


def told(engine: Site) -> ToolSettings:
    return ToolSettings(web_urls={"searxng": engine.url}, web_allow=["127.0.0.1"])


def say(session: ToolSession, task_id: str, name: str, **arguments: JSON) -> JSON:
    return json.loads(session.handle(name, arguments, task_id))


def look_around(session: ToolSession, site: Site) -> list[JSON]:
    """The web calls of two tasks, one of which ends and begins anew."""
    urls = [site.url + "/article"]
    replies = [
        say(session, "a", "web_search", query="tern"),
        say(session, "b", "web_extract", urls=urls),
        say(session, "a", "web_extract", urls=urls, offset=100),
        say(session, "b", "web_extract", urls=[site.url + "/status/404"]),
    ]
    session.release("a")
    return [*replies, say(session, "a", "web_search", query="tern", limit=1)]


def test_what_a_session_was_told_is_told_again_without_anybody_there(tmp_path: Path, engine: Site, site: Site) -> None:
    with ToolSession(settings=told(engine), world=open_world("record", tmp_path / "kept")) as session:
        recorded = look_around(session, site)
    assert "results" in recorded[1]
    assert "404" in recorded[3]["results"][0]["error"]
    lines = [json.loads(line) for line in (tmp_path / "kept" / WORLD_NAME).read_text().splitlines()]
    assert [line["rollout"] for line in lines] == ["a", "b", "a", "b", "a#2"]
    before = len(engine.seen), len(site.seen)
    with ToolSession(world=open_world("replay", tmp_path / "kept")) as session:  # no engine, no address
        assert look_around(session, site) == recorded
        lacking = say(session, "a", "web_search", query="heron")
    assert lacking == {"error": "web_search is not available for this call: no reply to it was recorded"}
    strict = open_world("replay", str(tmp_path / "kept"), strict=True)
    with ToolSession(world=strict) as session, raises(ToolUnavailable, "web_search"):
        session.handle("web_search", {"query": "heron"}, "a")
    assert (len(engine.seen), len(site.seen)) == before


def test_filling_asks_for_what_is_new_and_keeps_it(tmp_path: Path, engine: Site, site: Site) -> None:
    kept = tmp_path / "birds.jsonl"
    with ToolSession(settings=told(engine), world=open_world("record", kept)) as session:
        first = say(session, "a", "web_search", query="tern")
    asked = len(engine.seen)
    with ToolSession(settings=told(engine), world=open_world("fill", kept)) as session:
        assert say(session, "b", "web_search", query="tern") == first
        assert len(engine.seen) == asked
        second = say(session, "b", "web_search", query="heron")
    assert len(engine.seen) == asked + 1
    with ToolSession(world=open_world("replay", kept)) as session:
        assert [say(session, "c", "web_search", query=query) for query in ("tern", "heron")] == [first, second]


@pytest.mark.slots
def test_programs_of_the_slot_are_told_the_same(tmp_path: Path, engine: Site, site: Site) -> None:
    code = "from palaestra_tools import web_extract\n"
    code += f"print(web_extract([{site.url + '/article'!r}])['results'][0]['title'])"
    kept = tmp_path / "kept.jsonl"
    try:
        with ToolSession(settings=told(engine), world=open_world("record", kept)) as session:
            recorded = say(session, "a", "execute_code", code=code)
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    assert "The heron and the tern" in recorded["output"]
    seen = len(site.seen)
    settings = ToolSettings(web_extract_provider="tavily")  # whose key is not there
    with ToolSession(settings=settings, world=open_world("replay", kept)) as session:
        assert say(session, "a", "execute_code", code=code)["output"] == recorded["output"]
    assert len(site.seen) == seen


def test_a_browsers_session_is_played_without_a_browser(tmp_path: Path, site: Site) -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    here = site.url.removeprefix("http://")

    def browse(world: RunWorld, **settings: JSON) -> list[JSON]:
        with ToolSession(settings=ToolSettings(**settings), world=world) as session:
            return [
                say(session, "a", "browser_navigate", url=site.url + "/article"),
                say(session, "a", "browser_snapshot", full=True),
                say(session, "a", "browser_scroll", direction="down"),
            ]

    recorded = browse(open_world("record", tmp_path), browser_allow=[here])
    assert recorded[0]["success"], recorded
    seen = len(site.seen)
    assert browse(open_world("replay", tmp_path), browser_executable="/nowhere/chromium") == recorded
    assert len(site.seen) == seen


def test_the_functions_of_the_package_go_through_the_session_that_is_named(
    tmp_path: Path, engine: Site, site: Site
) -> None:
    use_session(ToolSession(settings=told(engine), world=open_world("record", tmp_path)))
    try:
        recorded = handle_function_call("web_search", {"query": "tern"}, "a")
        use_session(ToolSession(world=open_world("replay", tmp_path)))
        assert handle_function_call("web_search", {"limit": 5, "query": "tern"}, "a") == recorded
    finally:
        use_session(ToolSession())
    assert json.loads(recorded)["success"]


@pytest.mark.slots
def test_an_executor_records_and_plays(tmp_path: Path, engine: Site, site: Site) -> None:
    call = ToolCall("web_search", {"query": "tern"}, uniq_id="u1")

    async def run(settings: ToolSettings, world: RunWorld) -> list[JSON]:
        registry = build_tool_registry(["web"], settings=settings, conditions=RunConditions(replayed=world.replayed))
        async with (
            SlotPool(SlotPoolConfig(), LocalBackend()) as pool,
            ToolExecutor(pool, registry, world=world) as executor,
        ):
            return [(await executor.execute("t", call)).to_dict() for _ in range(2)]

    try:
        recorded = asyncio.run(run(told(engine), open_world("record", tmp_path)))
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    assert recorded[0]["success"]
    seen = len(engine.seen)
    assert asyncio.run(run(ToolSettings(), open_world("replay", tmp_path))) == recorded
    assert len(engine.seen) == seen


def test_a_world_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for mode, path, says in (
        ("replays", tmp_path, r"one of record, live, replay, fill\. Did you mean replay"),
        ("replay", None, "needs a recording"),
        ("fill", None, "needs a recording"),
        ("replay", tmp_path, "does not exist"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_world(mode, path)
