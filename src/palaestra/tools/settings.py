"""What tools can be told: whom they ask, with which keys, and what they may reach.

An environment's configuration is one of these, so each field is also a flag, `--env.web_provider`. Keys come from
there and nowhere else: no tool reads the process environment.
"""

from __future__ import annotations

from pydantic import Field

from palaestra.core.config import Settings


class ToolSettings(Settings):
    """Settings of the tools that need any. A tool that lacks what it needs is missing, with the setting's name."""

    web_provider: str = Field(
        default="auto",
        description="Whom web_search asks: tavily, exa, brave, serper, firecrawl, searxng, ddgs; auto: the first of "
        "these that has what it needs.",
    )
    web_extract_provider: str = Field(
        default="fetch",
        description="Who reads pages for web_extract: fetch (this machine, with the extra `web`), tavily, exa, "
        "firecrawl.",
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
