"""What tools can be told: whom they ask, with which keys, and what they may reach.

An environment's configuration is one of these, so each field is also a flag, `--env.web_provider`. Keys come from
there and nowhere else: no tool reads the process environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PrivateAttr

from palaestra.core.config import Settings

WEB_KEYS: Mapping[str, str] = {
    "tavily": "TAVILY_API_KEY",
    "exa": "EXA_API_KEY",
    "brave": "BRAVE_API_KEY",
    "serper": "SERPER_API_KEY",
    "firecrawl": "FIRECRAWL_API_KEY",
}
"""Environment variables that users of these providers have: the command line reads them into `web_api_keys`."""

WEB_URLS: Mapping[str, str] = {"searxng": "SEARXNG_URL", "firecrawl": "FIRECRAWL_API_URL"}
"""The same for `web_urls`."""


class ToolSettings(Settings):
    """Settings of the tools that need any. A tool that lacks what it needs is missing, with the setting's name."""

    web_provider: Literal["auto", "tavily", "exa", "brave", "serper", "firecrawl", "searxng", "ddgs"] = Field(
        default="auto",
        description="Whom web_search asks; auto: the first that has a key or an address. ddgs needs neither, but the "
        "extra `web`.",
    )
    web_extract_provider: Literal["fetch", "tavily", "exa", "firecrawl"] = Field(
        default="fetch",
        description="Who reads pages for web_extract; fetch: this machine, with the extra `web`.",
    )
    web_api_keys: dict[str, str] = Field(
        default_factory=dict, description="Keys of providers by name, such as `tavily=KEY`; also TAVILY_API_KEY, …"
    )
    web_urls: dict[str, str] = Field(
        default_factory=dict, description="Addresses of one's own servers by provider, such as `searxng=URL`."
    )
    web_allow: list[str] = Field(
        default_factory=list,
        description="Private addresses or networks that web tools may reach all the same, such as 10.1.0.0/16.",
    )
    web_concurrency: int = Field(
        default=16, ge=1, description="Requests of web tools under way at once; more of them wait their turn."
    )

    _lane: asyncio.Semaphore | None = PrivateAttr(default=None)

    def lane(self) -> asyncio.Semaphore:
        """The one bound on requests of all tools that were made with these settings."""
        if self._lane is None:
            self._lane = asyncio.Semaphore(self.web_concurrency)
        return self._lane
