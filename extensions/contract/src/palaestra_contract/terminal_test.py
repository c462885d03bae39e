"""Create small files with the terminal: a smoke test of model, tools, slots and grading that takes seconds.

The oracle scores 1.0 on every task; doing nothing scores 0.0. No dataset and no network are needed.
"""

from __future__ import annotations

from palaestra.agent.result import AgentResult
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_contract.base_env import Item
from palaestra_contract.hermes_env import HermesAgentBaseEnv
from palaestra_contract.tool_context import ToolContext
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

TRAIN = [
    {
        "id": "greeting",
        "prompt": "Make a file greeting.txt whose only line is: Hello, terminal!",
        "path": "greeting.txt",
        "content": "Hello, terminal!",
        "solution": "echo 'Hello, terminal!' > greeting.txt",
    },
    {
        "id": "count",
        "prompt": "Make a file count.txt that holds the numbers from 1 to 5, one on each line.",
        "path": "count.txt",
        "content": "1\n2\n3\n4\n5",
        "solution": "seq 5 > count.txt",
    },
    {
        "id": "nested",
        "prompt": "Make the directory data/inner and in it a file ready.txt whose only line is: ready",
        "path": "data/inner/ready.txt",
        "content": "ready",
        "solution": "mkdir -p data/inner && echo ready > data/inner/ready.txt",
    },
]
HELD_OUT = [
    {
        "id": "reversed",
        "prompt": "Make a file reversed.txt that holds the numbers from 3 down to 1, one on each line.",
        "path": "reversed.txt",
        "content": "3\n2\n1",
        "solution": "seq 3 -1 1 > reversed.txt",
    },
]


class TerminalTestEnv(HermesAgentBaseEnv):
    """Create small files with the terminal: a smoke test that takes seconds."""

    name = "terminal_test"

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal", "file"],
            group_size=2,
            total_steps=len(TRAIN),
            max_agent_turns=10,
            allow_network=False,
            ensure_scores_are_not_same=False,
        )
        return config, [APIServerConfig(base_url="http://localhost:8000/v1", model_name="NAME")]

    async def setup(self) -> None:
        self.drawn = 0

    async def get_next_item(self) -> Item:
        self.drawn += 1
        return TRAIN[(self.drawn - 1) % len(TRAIN)]

    def format_prompt(self, item: Item) -> str:
        return str(item["prompt"])

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        """Return 1.0 for the right content, 0.5 for the right words with a different layout, else 0.0."""
        seen = ctx.read_file(item["path"]).get("content", "")
        if seen.strip() == item["content"]:
            return 1.0
        return 0.5 if seen.split() == item["content"].split() else 0.0

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> None:
        done = await self.evaluate_items(HELD_OUT, samples=self.config.group_size)
        rewards = [each.reward for each in done if each.reward is not None]  # unscored rollouts have no reward
        figures: dict[str, JSON] = {"eval/unscored": len(done) - len(rewards)}
        if rewards:
            figures["eval/mean_reward"] = sum(rewards) / len(rewards)
            figures["eval/pass_rate"] = rewards.count(1.0) / len(rewards)
        await self.evaluate_log(figures, samples=[{"id": each.task_id, "reward": each.reward} for each in done])
