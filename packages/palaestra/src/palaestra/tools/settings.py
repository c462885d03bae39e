"""The tools' settings: providers, keys, and reachable hosts.

An environment's configuration includes them, so each field is also a flag, such as `--env.web_provider`. Keys come only
from these settings: no tool reads the process environment, and no model sees or sets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, PrivateAttr

from palaestra_slots.core.config import Settings

WEB_KEYS: Mapping[str, str] = {
    "tavily": "TAVILY_API_KEY",
    "exa": "EXA_API_KEY",
    "brave": "BRAVE_API_KEY",
    "serper": "SERPER_API_KEY",
    "firecrawl": "FIRECRAWL_API_KEY",
}
"""The usual environment variables of these providers. The command line reads them into `web_api_keys`."""

WEB_URLS: Mapping[str, str] = {"searxng": "SEARXNG_URL", "firecrawl": "FIRECRAWL_API_URL"}
"""The environment variables that the command line reads into `web_urls`."""


class ToolSettings(Settings):
    """The tools' settings: those of this class, and those of the toolsets of other packages. A tool is unavailable if
    a setting that it needs is not set; the reason names the setting."""

    parts: ClassVar[tuple[str, ...]] = ("palaestra.tool_settings",)
    web_concurrency: int = Field(
        default=16, ge=1, description="Maximum number of concurrent requests by web tools; further requests wait."
    )

    _lane: asyncio.Semaphore | None = PrivateAttr(default=None)

    def lane(self) -> asyncio.Semaphore:
        """Return the semaphore that limits the concurrent requests of all tools with these settings. A browser's page
        loads do not count."""
        if self._lane is None:
            self._lane = asyncio.Semaphore(self.web_concurrency)
        return self._lane
