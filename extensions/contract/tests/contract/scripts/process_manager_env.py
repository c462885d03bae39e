"""Keep a service of the environment's own alive while rollouts are written."""

from pathlib import Path

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class ProcessManagerEnv(HermesAgentBaseEnv):
    name = "process_manager"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"], group_size=2, total_steps=1, ensure_scores_are_not_same=False
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def process_manager(self):
        self.service = "up"
        try:
            return await super().process_manager()
        finally:
            self.service = "down"
            Path("service.txt").write_text(
                f"{self.service} after {self.iter} items, {self.max_token_len} tokens at most"
            )

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"written-{self.iter}", "solution": "true"}

    def format_prompt(self, item: Item) -> str:
        return "Do nothing."

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0 if self.service == "up" else 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    ProcessManagerEnv.cli()
