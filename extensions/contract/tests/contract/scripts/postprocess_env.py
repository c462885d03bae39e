"""Normalise the scores of a group after it was collected."""

from palaestra import (
    AgentResult,
    APIServerConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    Item,
    ScoredDataGroup,
    ToolContext,
)


class PostprocessEnv(HermesAgentBaseEnv):
    name = "postprocess"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=2)
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"group-{self.iter}", "solution": "echo ok > ok.txt"}

    def format_prompt(self, item: Item) -> str:
        return "Write ok to ok.txt"

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        right = ctx.terminal("cat ok.txt")["output"].strip() == "ok"
        return float(right) if ctx.task_id.endswith("/1") else 0.5 * right

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        self._current_group_tools = self._resolve_tools_for_group()
        return await super().collect_trajectories(item)

    async def postprocess_histories(
        self, trajectories: ScoredDataGroup | list[ScoredDataGroup | None] | None
    ) -> ScoredDataGroup | list[ScoredDataGroup | None] | None:
        mean = sum(trajectories["scores"]) / len(trajectories["scores"])
        trajectories["scores"] = [score - mean for score in trajectories["scores"]]
        trajectories["group_overrides"] = {"normalised": True}
        return trajectories

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    PostprocessEnv.cli()
