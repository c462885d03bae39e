"""Score in the sandbox, or locally: the setting decides which hooks are used."""

from typing import Any

from pydantic import Field

from palaestra import AgentResult, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, Item, ToolContext


class SandboxChoiceConfig(HermesAgentEnvConfig):
    verify_in_sandbox: bool = Field(default=True, description="Use the hooks of the sandbox.")


class SandboxChoiceEnv(HermesAgentBaseEnv):
    name = "sandbox_choice"
    env_config_cls = SandboxChoiceConfig

    @classmethod
    def config_init(cls) -> tuple[SandboxChoiceConfig, list[APIServerConfig]]:
        env_config = SandboxChoiceConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=1)
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    def _use_sandbox_backend(self) -> bool:
        return self.config.verify_in_sandbox

    async def setup(self):
        self.left = 1

    async def get_next_item(self) -> Item:
        self.left -= 1
        return {"id": "choice", "solution": "ls > seen.txt"} if self.left >= 0 else None

    def format_prompt(self, item: Item) -> str:
        return "List the files."

    async def setup_trajectory_workspace(self, item: Item, *, trajectory_id: str, exec_tool) -> dict[str, Any]:
        done = await exec_tool("bash", {"command": "touch planted.txt"}, timeout=60)
        assert done.success
        return {"planted": True}

    async def verify_and_score_trajectory(
        self,
        item: Item,
        result: AgentResult,
        *,
        trajectory_id: str,
        exec_tool,
        workspace_meta: dict[str, Any] | None = None,
    ) -> tuple[float, dict[str, Any]]:
        seen = await exec_tool("bash", {"command": "cat seen.txt"})
        return (0.75 if "planted.txt" in seen.output else 0.0), {"planted": workspace_meta["planted"]}

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 0.25 if "planted.txt" not in ctx.terminal("cat seen.txt")["output"] else 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    SandboxChoiceEnv.cli()
