"""An `AgentEnv` as users write it, as a file for the tests that run it from a command line."""

AGENT_ENV = '''
"""Write a word to a file, and say it."""

from typing import Any, Awaitable, Callable, Dict, List, Optional, Tuple

from pydantic import Field

from palaestra import (
    AgentConfig, AgentEnv, AgentEnvConfig, AgentResult, APIServerConfig, Item, ToolCall, ToolResult,
)


class WordAgentConfig(AgentEnvConfig):
    words: List[str] = Field(default=["alpha", "beta"], description="The words.")


class WordAgentEnv(AgentEnv[WordAgentConfig]):
    name = "word_agent"
    env_config_cls = WordAgentConfig

    @classmethod
    def config_init(cls) -> Tuple[WordAgentConfig, List[APIServerConfig]]:
        config = WordAgentConfig(
            group_size=2, total_steps=2, include_messages=True, agent_max_steps=4, tool_pool_mode="nomad"
        )
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1", api_key="x")]

    async def setup_agent_env(self) -> None:
        self.iter = 0

    async def get_next_item(self) -> Item:
        word = self.config.words[self.iter % len(self.config.words)]
        self.iter += 1
        return {"id": word, "word": word, "solution": "cat seed.txt > word.txt"}

    def build_task(self, item: Item) -> str:
        return f"Write {item['word']} to word.txt"

    def build_agent_config(self, item: Item) -> AgentConfig:
        config = super().build_agent_config(item)
        config.temperature = 0.5
        return config

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: Callable[["ToolCall"], Awaitable["ToolResult"]]
    ) -> Dict[str, Any]:
        done = await exec_tool(ToolCall(name="bash", arguments={"command": f"echo {item['word']} > seed.txt"}))
        assert done.success, done.error
        return {"seeded": item["word"]}

    async def score_trajectory(self, item: Item, final_response: str) -> float:
        raise AssertionError("the verification replaces this")

    async def verify_and_score_trajectory(
        self,
        item: Item,
        final_response: str,
        *,
        trajectory_id: str,
        exec_tool: Callable[["ToolCall"], Awaitable["ToolResult"]],
        agent_result: Optional[AgentResult] = None,
        WORKSPACE_META
    ) -> tuple[float, Dict[str, Any]]:
        call = ToolCall(name="bash", arguments={"command": "cat word.txt"})
        seen = await exec_tool(call)
        assert isinstance(seen, ToolResult)
        assert (seen.uniq_id, seen.exit_code) == (call.uniq_id, 0)
        assert seen.to_xml().startswith('<tool_response>{"success": true, "output": ')
        right = seen.success and seen.output.strip() == item["word"]
        return float(right), {
            "calls": agent_result.total_tool_calls, "final": final_response, "success": agent_result.success,
            "steps": agent_result.num_steps,
        }


if __name__ == "__main__":
    WordAgentEnv.cli()
'''

WITHOUT_META = AGENT_ENV.replace("        WORKSPACE_META\n", "")
WITH_META = AGENT_ENV.replace("WORKSPACE_META", "workspace_meta: Optional[Dict[str, Any]] = None,").replace(
    '"steps":', '"seeded": workspace_meta["seeded"], "steps":'
)
