"""Keep the best rollout of each group to be shown."""

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class WandbRolloutsEnv(HermesAgentBaseEnv):
    name = "wandb_rollouts"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=1)
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"best-{self.iter}", "solution": "true"}

    def format_prompt(self, item: Item) -> str:
        return "Do nothing."

    async def collect_trajectory(self, item: Item):
        scored, backlog = await super().collect_trajectory(item)
        if scored is not None:
            scored["scores"] = scored["scores"] * 2
        return scored, backlog

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0 if ctx.task_id.endswith("/0") else 0.25

    async def add_rollouts_for_wandb(self, scored_data, item=None):
        await super().add_rollouts_for_wandb(scored_data, item)
        best = max(range(len(scored_data["scores"])), key=lambda index: scored_data["scores"][index])
        self.rollouts_for_wandb.append([(f"the best of {item['id']}", scored_data["scores"][best])])

    async def wandb_log(self, wandb_metrics=None):
        texts = [text for group in self.rollouts_for_wandb for text, _ in group]
        await super().wandb_log({**(wandb_metrics or {}), "train/kept": texts[-1] if texts else ""})

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    WandbRolloutsEnv.cli()
