"""Offer one tool per group instead of a whole toolset."""

import logging
from typing import Any

from pydantic import Field

from palaestra import (
    AgentResult,
    APIServerConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    Item,
    ToolContext,
    get_tool_definitions,
)

logger = logging.getLogger(__name__)


class ResolveToolsConfig(HermesAgentEnvConfig):
    only_tool: str = Field(default="terminal", description="The one tool of the agent.")


class ResolveToolsEnv(HermesAgentBaseEnv):
    name = "resolve_tools"
    env_config_cls = ResolveToolsConfig

    @classmethod
    def config_init(cls) -> tuple[ResolveToolsConfig, list[APIServerConfig]]:
        env_config = ResolveToolsConfig(
            enabled_toolsets=["terminal", "file"], group_size=2, total_steps=2, include_messages=True, use_wandb=False
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.items = [{"id": f"tools-{n}", "n": n, "solution": f"echo {n} > n.txt"} for n in range(2)]
        self.iter = 0
        self.resolved: list[set[str] | None] = []

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, Any]], set[str]]:
        tools, valid_names = super()._resolve_tools_for_group()
        logger.info("The toolsets have %s", sorted(valid_names))
        tools = get_tool_definitions(enabled_toolsets=["terminal"], quiet_mode=True)
        tools = [tool for tool in tools if tool["function"]["name"] == self.config.only_tool]
        tools[0]["function"]["description"] = "Run one command in bash."
        return tools, {self.config.only_tool}

    async def get_next_item(self) -> Item:
        item = self.items[self.iter % len(self.items)]
        self.iter += 1
        return item

    def format_prompt(self, item: Item) -> str:
        return f"Write {item['n']} to n.txt"

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0 if ctx.terminal("cat n.txt")["output"].strip() == str(item["n"]) else 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    ResolveToolsEnv.cli()
