"""The `AgentEnv` form, whose agent writes its calls as text."""

from typing import Any

from pydantic import Field

from palaestra import AgentConfig, AgentEnv, AgentEnvConfig, APIServerConfig, ToolCall


class WordAgentConfig(AgentEnvConfig):
    words: list[str] = Field(default=["alpha", "beta"], description="The words.")


class WordAgentEnv(AgentEnv[WordAgentConfig]):
    name = "word_agent"
    env_config_cls = WordAgentConfig

    @classmethod
    def config_init(cls):
        config = WordAgentConfig(
            group_size=2, total_steps=2, include_messages=True, agent_max_steps=4, enabled_toolsets=["terminal"]
        )
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup_agent_env(self):
        self.left = list(self.config.words)

    async def get_next_item(self):
        if not self.left:
            return None
        word = self.left.pop(0)
        return {"id": word, "word": word, "solution": ["cat seed.txt > word.txt", "cat word.txt"]}

    def build_task(self, item):
        return f"Write {item['word']} to word.txt"

    def build_agent_config(self, item) -> AgentConfig:
        config = super().build_agent_config(item)
        config.temperature = 0.5
        return config

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool) -> dict[str, Any]:
        done = await exec_tool(ToolCall(name="bash", arguments={"command": f"echo {item['word']} > seed.txt"}))
        return {"seeded": done.success}

    async def score_trajectory(self, item, final_response):
        raise AssertionError("verify_and_score_trajectory replaces this")

    async def verify_and_score_trajectory(
        self, item, final_response, *, trajectory_id, exec_tool, agent_result=None, workspace_meta=None
    ):
        seen = await exec_tool(ToolCall(name="bash", arguments={"command": "cat word.txt"}))
        share = 1.0 if trajectory_id.endswith("/0") else 0.5
        return share * (seen.output.strip() == item["word"]), {"steps": agent_result.num_steps, **workspace_meta}
