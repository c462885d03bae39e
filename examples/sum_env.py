"""The class form for a model that writes its calls as text: docs/environments/class_form.md."""

from palaestra import ToolCall
from palaestra_contract import AgentEnv, AgentEnvConfig
from palaestra_tokens import APIServerConfig


class SumEnv(AgentEnv):
    name = "sum"

    @classmethod
    def config_init(cls):
        config = AgentEnvConfig(group_size=2, total_steps=2, agent_max_steps=10)
        return config, [APIServerConfig(base_url="http://localhost:8000/v1", model_name="NAME")]

    async def setup_agent_env(self):
        self.numbers = iter(range(2, 100))

    async def get_next_item(self):
        n = next(self.numbers)
        return {"id": f"sum-{n}", "n": n, "solution": "awk '{s += $1} END {print s}' numbers.txt > sum.txt"}

    def build_task(self, item):
        return "Write the sum of the numbers in numbers.txt to sum.txt"

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool(ToolCall("bash", {"command": f"seq {item['n']} > numbers.txt"}))
        return {}

    async def score_trajectory(self, item, final_response):
        return 0.0  # from the answer alone; here the workspace decides

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result=None):
        seen = await exec_tool(ToolCall("read_file", {"path": "sum.txt"}))
        n = item["n"]
        return float(seen.output.strip() == str(n * (n + 1) // 2)), {"steps": agent_result.num_steps}


if __name__ == "__main__":
    SumEnv.cli()
