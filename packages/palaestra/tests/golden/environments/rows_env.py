"""Classes that collect their rollouts themselves: row by row, or a whole group."""

from palaestra import BaseEnv


class Rows(BaseEnv):
    """Returns no row for the item 2."""

    name = "rows"

    async def setup(self):
        self.left = [1, 2, 3]

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"pass": 1.0})

    async def collect_trajectory(self, item):
        if item == 2:
            return None, []
        messages = [{"role": "user", "content": f"{item}?"}]
        reply = await self.server.chat_completion(messages=messages, max_tokens=5)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        row = {"tokens": [item, 7, 8], "masks": [-100, 7, 8], "scores": item / 4, "messages": messages}
        return {**row, "inference_logprobs": [1.0, -0.5, -0.25], "overrides": {"of": item}}, []


class Groups(Rows):
    """Returns three rows for each item, whatever the group size."""

    name = "groups"

    async def collect_trajectories(self, item):
        if item == 2:
            return None, []
        return {
            "tokens": [[item, index] for index in range(3)],
            "masks": [[-100, index] for index in range(3)],
            "scores": [index / 2 for index in range(3)],
            "advantages": [[0.0, 0.5 - index] for index in range(3)],
            "ref_logprobs": [[1.0, -1.5] for _ in range(3)],
            "group_overrides": {"temperature": 0.5},
            "generation_params": {"top_p": 0.9},
        }, []
