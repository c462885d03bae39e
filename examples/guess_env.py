"""The class form that collects its rollouts itself: docs/environments/class_form.md."""

from palaestra_contract import BaseEnv, BaseEnvConfig
from palaestra_tokens import APIServerConfig


class GuessEnv(BaseEnv):
    name = "guess"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2, include_messages=True), [APIServerConfig()]

    async def setup(self):
        self.left = ["heads", "tails"]

    async def get_next_item(self):
        return self.left.pop() if self.left else None

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": "Heads or tails?"}]
        reply = await self.server.chat_completion(messages=messages, max_tokens=8)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        score = float(item in (messages[-1]["content"] or ""))
        return {"tokens": [0], "masks": [-100], "scores": score, "messages": messages}, []

    async def evaluate(self, *args, **kwargs):
        return {}


if __name__ == "__main__":
    GuessEnv.cli()
