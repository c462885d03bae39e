"""Lease a slot of the environment's own, run the agent's commands in it, and verify there."""

import json
from typing import Any

from palaestra import (
    AgentResult,
    APIServerConfig,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    Item,
    ToolContext,
    handle_function_call_async,
)


class OwnSlotEnv(HermesAgentBaseEnv):
    name = "own_slot"
    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        env_config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"],
            tool_pool_mode="modal",
            modal_image="python:3.11",
            group_size=2,
            total_steps=1,
        )
        return env_config, [APIServerConfig(model_name="m", base_url="http://localhost:8000/v1", api_key="x")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"id": f"slot-{self.iter}", "solution": "cd tree && echo done > answer.txt && git add -A"}

    def format_prompt(self, item: Item) -> str:
        return "Write done to tree/answer.txt and add it."

    async def setup_trajectory_workspace(self, item: Item, *, trajectory_id: str, exec_tool) -> dict[str, Any]:
        commands = (
            "mkdir -p /data/cache && cd /data/cache && git init -q --bare r.git && git init -q /tmp/w && cd /tmp/w && "
            "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m base && "
            "git push -q /data/cache/r.git HEAD:refs/heads/main && "
            "cd /workspace && git -C /data/cache/r.git worktree add -q --detach $PWD/tree main"
        )
        made = await exec_tool("bash", {"command": commands}, timeout=60)
        if not made.success:
            raise RuntimeError(f"{made.error}: {made.output}")
        return {"tree": "tree", "returncode": made.metadata["returncode"]}

    async def verify_and_score_trajectory(
        self,
        item: Item,
        result: AgentResult,
        *,
        trajectory_id: str,
        exec_tool,
        workspace_meta: dict[str, Any] | None = None,
    ) -> tuple[float, dict[str, Any]]:
        seen = await exec_tool("bash", {"command": f"git -C {workspace_meta['tree']} status --porcelain"})
        failed = await exec_tool("bash", {"command": "echo out; echo err >&2; exit 3"})
        assert (failed.success, failed.metadata["returncode"]) == (False, 3)
        assert "[stderr]" in failed.output
        return float(seen.output.split() == ["A", "answer.txt"]), {}

    async def _collect_trajectory_sandbox(
        self,
        item: Item,
        task_id: str,
        tools: list[dict[str, Any]],
        valid_names: set[str],
        messages: list[dict[str, Any]],
    ) -> tuple[Any | None, list[Item]]:
        slot = await self._backend.acquire(task_id)
        try:

            async def exec_tool(tool_name: str, args: dict[str, Any], timeout: float = 300):
                results = await self._backend.execute_batch([(slot, tool_name, args)], timeout_s=timeout)
                return results[0]

            async def sandbox_tool_handler(tool_name: str, args: dict[str, Any], _task_id: str) -> str:
                if tool_name != "terminal":
                    return await handle_function_call_async(tool_name, args, task_id=_task_id)
                ran = await exec_tool("bash", {"command": args["command"]})
                return json.dumps({"output": ran.output, "exit_code": ran.metadata["returncode"], "error": None})

            meta = await self.setup_trajectory_workspace(item, trajectory_id=task_id, exec_tool=exec_tool)
            result = await self._run_agent_loop(
                task_id, tools, valid_names, messages, tool_handler=sandbox_tool_handler
            )
            reward, _ = await self.verify_and_score_trajectory(
                item, result, trajectory_id=task_id, exec_tool=exec_tool, workspace_meta=meta
            )
            return self._build_scored_item(item, result, reward)
        finally:
            await self._backend.release(slot, reset_workspace=True)

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        return 0.0

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    OwnSlotEnv.cli()
