"""A stock environment of the original runtime. Ours runs what `palaestra env port` makes of it."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field


class StockConfig(BaseEnvConfig):
    logprobs: bool = Field(default=False, description="Put the group together ourselves, log-probabilities included.")
    raises: int = Field(default=-1, description="The item whose rollouts raise an exception.")
    nothing: int = Field(default=-1, description="The item whose rollouts give nothing.")


class StockEnv(BaseEnv):
    name = "stock"
    env_config_cls = StockConfig

    @classmethod
    def config_init(cls):
        return StockConfig(wandb_name="stock"), [APIServerConfig(model_name="answering", api_key="none")]

    async def setup(self):
        self.drawn = 0

    async def get_next_item(self):
        self.drawn += 1
        return {"number": self.drawn}

    async def evaluate(self, *args, **kwargs):
        return None

    async def collect_trajectory(self, item):
        number = item["number"]
        if number == self.config.raises:
            raise RuntimeError("this item breaks")
        if number == self.config.nothing:
            return None, []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            prompt = f"What is {number} + {number}? This is item {number}."
            answer = await managed.chat_completion(messages=[{"role": "user", "content": prompt}], max_tokens=256)
            node = managed.get_state()["nodes"][-1]
        right = f" {2 * number}." in answer.choices[0].message.content
        row = {"tokens": node.tokens, "masks": node.masked_tokens, "scores": float(right)}
        return row | {"inference_logprobs": node.logprobs}, []

    async def collect_trajectories(self, item):
        if not self.config.logprobs:
            return await super().collect_trajectories(item)
        rows = [(await self.collect_trajectory(item))[0] for _ in range(self.config.group_size)]
        return ScoredDataGroup(**{name: [row[name] for row in rows] for name in rows[0]}), []


if __name__ == "__main__":
    StockEnv.cli()
