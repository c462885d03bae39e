"""A browser in whole rollouts: the agents' and their rewards' one, closed with each of them, recorded and replayed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from envs.scripts import groups_file
from palaestra.cli.main import main
from palaestra_toolsets.browser import chromium

ENV = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolStep
from palaestra_toolsets.browser.shared_browser import SharedBrowser

SITE = "{site}"


class Shop(HermesAgentBaseEnv):
    name = "shop"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["browser"], group_size=2, total_steps=1, browser_allow=[SITE])
        return config, [APIServerConfig()]

    async def setup(self): ...

    async def get_next_item(self):
        opening = ToolStep("browser_navigate", {{"url": f"http://{{SITE}}/"}})
        visit = [opening, ToolStep("browser_click", {{"ref": "@e1"}})]
        return {{"id": "one", "solution": visit}}

    def format_prompt(self, item):
        return "Open the door."

    async def compute_reward(self, item, result, ctx):
        said = [message["content"] for message in result.messages if message["role"] == "tool"]
        assert "/opened" in said[1], said
        browser = self.shared.get(SharedBrowser)
        first = browser.running
        assert "error" in ctx.browser_snapshot()
        assert ctx.browser_navigate(f"http://{{SITE}}/opened")["title"] == "Opened"
        assert "Welcome in" in ctx.browser_snapshot()["snapshot"]
        assert (await ctx.browser_navigate_async(f"http://{{SITE}}/"))["title"] == "Door"
        assert 'link "Open"' in (await ctx.browser_snapshot_async())["snapshot"]
        assert browser.running is first  # the agents' browser
        assert "not allowed" in ctx.browser_navigate("http://127.0.0.1:1/")["error"]
        ctx.cleanup()
        assert "browser_navigate" in ctx.browser_snapshot()["error"]
        return 1.0

    async def evaluate(self, *args, **kwargs): ...
"""


@pytest.fixture
def site() -> Iterator[str]:
    """A site with a door, on a loop of its own; its host and port."""

    async def answer(request: web.Request) -> web.Response:
        pages = {
            "/": "<title>Door</title><a href=/opened>Open</a>",
            "/opened": "<title>Opened</title><h1>Welcome in</h1>",
        }
        return web.Response(text=pages.get(request.path, ""), content_type="text/html")

    async def serve() -> str:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runners.append(web.AppRunner(app, shutdown_timeout=0.01, access_log=None))
        await runners[0].setup()
        await web.TCPSite(runners[0], "127.0.0.1", 0).start()
        return f"127.0.0.1:{runners[0].addresses[0][1]}"

    runners: list[web.AppRunner] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(serve(), loop).result()
    asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.slots
def test_an_agent_and_its_reward_browse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    Path("shop_env.py").write_text(ENV.format(site=site))
    argv = ["run", "shop_env.py", "process", "--policy", "oracle"]
    assert main(argv) == 0
    assert json.loads(groups_file().read_text())["scores"] == [1.0, 1.0]
    (recording,) = Path("runs").glob("*/**/world.jsonl")
    replay = ["--env.world", "replay", "--env.world_file", str(recording), "--env.browser_executable", "/no/browser"]
    assert main([*argv, *replay]) == 0
    assert json.loads(groups_file().read_text())["scores"] == [1.0, 1.0]
