"""Run the agent loop with a tool handler that counts calls, and answer one tool from here."""

import json
from typing import Any

from palaestra import (
    AgentResult,
    APIServerConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    HermesAgentLoop,
    Item,
    ToolContext,
    handle_function_call,
)

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class AgentLoopEnv(HermesAgentBaseEnv):
    name = "agent_loop"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"], group_size=1, total_steps=3, max_agent_turns=5, include_messages=True
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.items = [
            {"id": "own", "kind": "own", "solution": "echo yes > done.txt"},
            {"id": "base", "kind": "base", "solution": "echo yes > done.txt"},
            {"id": "bare", "kind": "bare", "solution": "echo yes > done.txt"},
        ]

    async def get_next_item(self) -> Item:
        return self.items.pop(0) if self.items else None

    def format_prompt(self, item: Item) -> str:
        return item["kind"]

    async def _run_agent_loop(
        self,
        task_id: str,
        tools: list[dict[str, Any]],
        valid_names: set[str],
        messages: list[dict[str, Any]],
        tool_handler=None,
    ) -> AgentResult:
        calls: list[str] = []

        async def counting_handler(tool_name: str, args: dict[str, Any], task_id: str) -> str:
            calls.append(tool_name)
            if tool_name == "clock":
                return json.dumps({"time": "noon"})
            return await tool_handler(tool_name, args, task_id)

        tools, valid_names = [*tools, CLOCK], {*valid_names, "clock"}
        if messages[-1]["content"] == "own":
            agent = HermesAgentLoop(
                server=self.server,
                tool_schemas=tools,
                valid_tool_names=valid_names,
                max_turns=self.config.max_agent_turns,
                task_id=task_id,
                temperature=self.config.agent_temperature,
                max_tokens=self.config.max_token_length,
                tool_handler=counting_handler,
            )
            result = await agent.run(messages)
        elif messages[-1]["content"] == "bare":
            agent = HermesAgentLoop(self.server, tools, valid_names, max_turns=5, task_id=task_id)
            result = await agent.run(messages)
            seen = json.loads(handle_function_call("terminal", {"command": "cat done.txt"}, task_id=task_id))
            calls = [seen["output"].strip()]
        else:
            result = await super()._run_agent_loop(task_id, tools, valid_names, messages, tool_handler=counting_handler)
        result.metadata["calls"] = calls
        return result

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        seen = ctx.terminal("cat done.txt")
        return len(result.metadata["calls"]) if seen["exit_code"] == 0 else 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    AgentLoopEnv.cli()
