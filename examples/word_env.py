"""The class form for an agent with tools: docs/environments/class_form.md."""

from palaestra_contract import HermesAgentBaseEnv, HermesAgentEnvConfig
from palaestra_tokens import APIServerConfig


class WordEnv(HermesAgentBaseEnv):
    name = "word"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal", "file"], group_size=2, total_steps=2)
        return config, [APIServerConfig(base_url="http://localhost:8000/v1", model_name="NAME")]

    async def setup(self):
        self.items = [{"id": word, "word": word, "solution": f"echo {word} > word.txt"} for word in ("alpha", "beta")]
        self.iter = 0

    async def get_next_item(self):
        self.iter += 1
        return self.items[(self.iter - 1) % len(self.items)]

    def format_prompt(self, item):
        return f"Write the word {item['word']} to word.txt"

    async def compute_reward(self, item, result, ctx):
        return float(ctx.read_file("word.txt").get("content", "").strip() == item["word"])

    async def evaluate(self, *args, **kwargs):
        done = await self.evaluate_items(self.items, samples=1)
        rewards = [each.reward for each in done if each.scored]  # an unscored rollout has no reward, not 0
        mean = sum(rewards) / len(rewards) if rewards else None
        await self.evaluate_log({"mean": mean, "unscored": len(self.items) - len(rewards)})


if __name__ == "__main__":
    WordEnv.cli()
