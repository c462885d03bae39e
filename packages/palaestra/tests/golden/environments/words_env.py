"""The class form with every workspace hook and an evaluation of its own."""

from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

WORDS = ["alpha", "beta"]


class WordsEnv(HermesAgentBaseEnv):
    name = "words"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal", "file", "image_gen"], group_size=2, total_steps=2, include_messages=True
        )
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.items = [
            {"id": word, "prompt": f"Write {word} to word.txt", "word": word, "solution": "cat seed.txt > word.txt"}
            for word in WORDS
        ]
        self.left = list(self.items)

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def prepare_group(self, item, exec_tool):
        await exec_tool("write_file", {"path": "group.txt", "content": item["id"]})

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        wrote = await exec_tool("write_file", {"path": "seed.txt", "content": item["word"]})
        return {"seeded": wrote.success}

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        seen = await exec_tool("terminal", {"command": "cat word.txt group.txt"})
        right = seen.output.strip() == item["word"] + item["id"]
        share = 1.0 if trajectory_id.endswith("/0") else 0.5
        return right * share, {"seen": seen.output, "turns": result.turns_used, **(workspace_meta or {})}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError("verify_and_score_trajectory replaces this")

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "train/words_left": len(self.left)})

    async def evaluate(self, *args, **kwargs):
        done = await self.evaluate_items(self.items, 2)
        mean = sum(each.reward for each in done) / len(done)
        await self.evaluate_log({"eval/mean": mean}, samples=[{"id": each.task_id} for each in done])
