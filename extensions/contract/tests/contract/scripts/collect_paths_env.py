"""Add a hint to the conversation on one path, and halve the score on the other."""

from typing import Any

from pydantic import Field

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class CollectPathsConfig(HermesAgentEnvConfig):
    sandbox: bool = Field(default=False, description="Collect through the sandbox.")


class CollectPathsEnv(HermesAgentBaseEnv):
    name = "collect_paths"
    env_config_cls = CollectPathsConfig

    @classmethod
    def config_init(cls) -> tuple[CollectPathsConfig, list[APIServerConfig]]:
        env_config = CollectPathsConfig(
            enabled_toolsets=["terminal"], group_size=2, total_steps=1, include_messages=True, system_prompt="Be short."
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"path-{self.iter}", "solution": "echo hi > hi.txt"}

    def format_prompt(self, item: Item) -> str:
        return "Write hi to hi.txt"

    def _use_sandbox_backend(self) -> bool:
        return self.config.sandbox

    async def _collect_trajectory_local(
        self,
        item: Item,
        task_id: str,
        tools: list[dict[str, Any]],
        valid_names: set[str],
        messages: list[dict[str, Any]],
    ) -> tuple[Any | None, list[Item]]:
        assert valid_names == {"terminal", "process"}, valid_names
        messages.append({"role": "user", "content": "Hint: use echo."})
        return await super()._collect_trajectory_local(item, task_id, tools, valid_names, messages)

    async def _collect_trajectory_sandbox(
        self,
        item: Item,
        task_id: str,
        tools: list[dict[str, Any]],
        valid_names: set[str],
        messages: list[dict[str, Any]],
    ) -> tuple[Any | None, list[Item]]:
        scored, backlog = await super()._collect_trajectory_sandbox(item, task_id, tools, valid_names, messages)
        scored["scores"] *= 0.5
        return scored, backlog

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0 if ctx.read_file("hi.txt").get("content", "").strip() == "hi" else 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    CollectPathsEnv.cli()
