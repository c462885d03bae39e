"""Log figures and texts of the environment's own, with the errors of tools."""

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class WandbFiguresEnv(HermesAgentBaseEnv):
    name = "wandb_figures"
    env_config_cls = HermesAgentEnvConfig

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []
        assert self.server is not None

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=2)
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"figure-{self.iter}", "solution": "true"}

    def format_prompt(self, item: Item) -> str:
        return "Do nothing."

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        self.percent_correct_buffer.append(1.0)
        return 1.0

    async def wandb_log(self, wandb_metrics: dict | None = None):
        if wandb_metrics is None:
            wandb_metrics = {}
        if self.percent_correct_buffer:
            correct = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
            wandb_metrics["train/percent_correct"] = correct
        wandb_metrics["train/last_errors"] = "; ".join(each["error"] for each in self._tool_error_buffer)
        wandb_metrics["train/group_tools"] = str(self._current_group_tools)
        wandb_metrics["train/longest"] = self.max_token_len
        await super().wandb_log(wandb_metrics)

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    WandbFiguresEnv.cli()
