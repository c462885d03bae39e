"""One environment for both runtimes: items, tool and reward are shared, and each base class has what it asks for.

`--env.style`: `once` is one turn of tokens, `twice` two, `tools` plain chat with a tool.
"""

import json
import random
import re

from pydantic import Field

try:
    from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
    from palaestra.tools.registry.registry import Kit, ToolRegistry
    from palaestra.tools.tool import FunctionTool, ToolSchema

    OURS, Config = True, HermesAgentEnvConfig
except ImportError:
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

    OURS, Config = False, BaseEnvConfig

AGAIN = "Are you sure?"
PARAMETERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": PARAMETERS, "required": ["a", "b"]},
    },
}


def make_item(number):
    return {"id": f"sum-{number}", "number": number, "a": number, "b": 10 * number}


def ask(item):
    return f"What is {item['a']} + {item['b']}? This is item {item['number']}."


def add(arguments):
    return {"result": arguments["a"] + arguments["b"]}


def reward(item, answer):
    """Full marks for the sum as the last number, and a little for any answer."""
    numbers = re.findall(r"\d+", answer)
    return 1.0 if numbers and int(numbers[-1]) == item["a"] + item["b"] else 0.25


class SumsConfig(Config):
    style: str = Field(default="once", description="once, twice or tools")
    max_items: int = Field(default=-1, description="Items at most; -1: no end.")


class Items:
    """What both classes do alike."""

    name = "sums"
    env_config_cls = SumsConfig

    @classmethod
    def config_init(cls):
        return SumsConfig(), [APIServerConfig(model_name="answering", api_key="none")]

    async def setup(self):
        self.drawn = 0

    async def get_next_item(self):
        if 0 <= self.config.max_items <= self.drawn:
            return None
        self.drawn += 1
        return make_item(self.drawn - 1)

    async def evaluate(self, *args, **kwargs):
        return None


if OURS:

    async def add_tool(arguments, run):
        return add(arguments)

    class SumsEnv(Items, HermesAgentBaseEnv):
        def format_prompt(self, item):
            return ask(item)

        def tool_kit(self, rng: random.Random):
            schema = ToolSchema("add", "Add two integers.", PARAMETERS, ("a", "b"))
            return Kit(
                ToolRegistry([FunctionTool(schema, add_tool, toolset="sums")] if self.config.style == "tools" else [])
            )

        async def _run_agent_loop(self, rollout, messages):
            result = await rollout.run_agent(messages)
            if self.config.style == "twice":
                result = await rollout.run_agent([*result.messages, {"role": "user", "content": AGAIN}])
            return result

        async def compute_reward(self, item, result, ctx):
            return reward(item, result.messages[-1]["content"])

else:

    class SumsEnv(Items, BaseEnv):
        async def collect_trajectory(self, item):
            messages = [{"role": "user", "content": ask(item)}]
            if self.config.style == "tools":
                return await self.with_tools(item, messages), []
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                for turn in range(2 if self.config.style == "twice" else 1):
                    if turn:
                        messages.append({"role": "user", "content": AGAIN})
                    answer = await managed.chat_completion(messages=messages, max_tokens=256)
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                node = managed.get_state()["nodes"][-1]
            return {
                "tokens": node.tokens,
                "masks": node.masked_tokens,
                "scores": reward(item, messages[-1]["content"]),
                "messages": messages,
                "inference_logprobs": node.logprobs,
            }, []

        async def with_tools(self, item, messages):
            while True:
                answer = (await self.server.chat_completion(messages=messages, tools=[ADD], max_tokens=256)).choices[0]
                said = {"role": "assistant", "content": answer.message.content or ""}
                calls = answer.message.tool_calls or []
                if calls:
                    said["tool_calls"] = [
                        {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in calls
                    ]
                messages.append(said)
                for call in calls:
                    result = json.dumps(add(json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not calls:
                    break
            row = {"tokens": [1], "masks": [-100], "scores": reward(item, messages[-1]["content"])}
            return row | {"messages": messages}


if __name__ == "__main__":
    SumsEnv.cli()
