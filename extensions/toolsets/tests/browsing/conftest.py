"""One browser and one site for the tests of a module, and a visitor with a context of its own for each test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

import pytest

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import States
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_toolsets.browser import chromium

from .site import Site


class Visitor:
    """The browser tools of one rollout, as an agent calls them."""

    def __init__(self, site: Site, shared: States, **settings: JSON) -> None:
        self.site = site
        self.shared = shared
        told = ToolSettings(**{"browser_allow": [site.host, "*:*"], "browser_action_timeout_s": 10.0, **settings})
        self.tools = ToolRuntime(build_tool_registry(["browser"], settings=told), self._slot, "visit", shared=shared)

    async def _slot(self) -> Slot:
        raise AssertionError("a browser needs no slot")

    async def call(self, action: str, **arguments: JSON) -> JSON:
        """The reply to `browser_<action>`, as the model reads it."""
        return json.loads(await self.tools.handle(f"browser_{action}", arguments))

    async def go(self, path: str) -> JSON:
        """Open a page of the site; it must open."""
        reply = await self.call("navigate", url=self.site.url + path)
        assert reply.get("success"), reply
        return reply

    async def ref(self, words: str, *, full: bool = False) -> str:
        """The reference in the line of the page that has these words."""
        snapshot = (await self.call("snapshot", full=full))["snapshot"]
        line = next(line for line in snapshot.splitlines() if words in line)
        return next(word.rstrip(":") for word in line.split() if word.startswith("@e"))


Visit: TypeAlias = Callable[[Visitor], Awaitable[None]]
Visiting: TypeAlias = Callable[..., None]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Site, States]]:
    """A loop with the site and what all visitors share. Skips where no Chromium starts."""
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    with asyncio.Runner() as runner:
        site, shared = Site(), States()
        runner.run(site.__aenter__())
        try:
            yield runner, site, shared
        finally:
            runner.run(shared.aclose())
            runner.run(site.__aexit__())


@pytest.fixture
def visiting(running: tuple[asyncio.Runner, Site, States]) -> Visiting:
    """Run a visit in a context of its own."""
    runner, site, shared = running

    def run(visit: Visit, **settings: JSON) -> None:
        async def main() -> None:
            visitor = Visitor(site, shared, **settings)
            try:
                await visit(visitor)
            finally:
                await visitor.tools.aclose()

        runner.run(main())

    return run
