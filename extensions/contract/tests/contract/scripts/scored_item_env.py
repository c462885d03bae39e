"""Change the reward and the tokens of a row; one form returns the row, the other a pair."""

from typing import Any

from palaestra import (
    AgentResult,
    APIServerConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    Item,
    ScoredDataItem,
    ToolContext,
)


class ScoredItemEnv(HermesAgentBaseEnv):
    name = "scored_item"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"], group_size=1, total_steps=3, include_messages=True
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.kinds = ["pair", "row", "own"]

    async def get_next_item(self) -> Item:
        if not self.kinds:
            return None
        kind = self.kinds.pop(0)
        return {"id": kind, "kind": kind, "solution": "echo x > x.txt"}

    def format_prompt(self, item: Item) -> str:
        return "Write x.txt"

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0 if ctx.terminal("cat x.txt")["exit_code"] == 0 else 0.0

    def _build_scored_item(
        self, item: Item, result: AgentResult, reward: float
    ) -> tuple[ScoredDataItem | Any | None, list[Item]]:
        if item["kind"] == "own":
            own: dict[str, Any] = {"tokens": [5, 6], "masks": [-100, 6], "scores": reward, "messages": result.messages}
            return own, []
        scored, rest = super()._build_scored_item(item, result, reward)
        scored["scores"] = reward - 0.1 * result.turns_used
        if item["kind"] == "row":
            return scored
        scored["tokens"], scored["masks"] = [7, 8, 9], [-100, -100, 9]
        return scored, rest

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    ScoredItemEnv.cli()
