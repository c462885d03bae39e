"""Show rollouts in a form of the environment's own."""

from typing import Any

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class DisplayEnv(HermesAgentBaseEnv):
    name = "display"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"], group_size=2, total_steps=1, num_rollouts_per_group_for_logging=1
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"show-{self.iter}", "solution": "echo shown"}

    def format_prompt(self, item: Item) -> str:
        return "Say something."

    @staticmethod
    def _format_trajectory_for_display(messages: list[dict[str, Any]]) -> str:
        shown = HermesAgentBaseEnv._format_trajectory_for_display(messages)
        return f"=== {len(messages)} messages ===\n{shown}"

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0

    async def wandb_log(self, wandb_metrics=None):
        texts = [text for group in self.rollouts_for_wandb for text, _ in group]
        await super().wandb_log({**(wandb_metrics or {}), "train/shown": "\n".join(texts)})

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    DisplayEnv.cli()
