"""The class form with a loop of its own that compacts, branches and edits the conversation, and with own rows."""

from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, HermesAgentLoop, get_parser


class OwnLoopEnv(HermesAgentBaseEnv):
    name = "own_loop"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=2, include_messages=True)
        return config, [APIServerConfig(model_name="by-prompt", server_type="vllm", base_url="http://127.0.0.1:9")]

    async def setup(self):
        self.left = ["first", "second"]

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return f"Look around: {item}."

    async def compute_reward(self, item, result, ctx):
        seen = ctx.terminal("cat seen.txt")
        return float(seen["output"].strip() == "yes") / (2 if ctx.task_id.endswith("/1") else 1)

    async def evaluate(self, *args, **kwargs):
        return {}

    async def _run_agent_loop(self, rollout, messages):
        tools, names = self._resolve_tools_for_group()
        async with self.server.managed_server(
            tokenizer=self.tokenizer, tool_call_parser=get_parser("hermes")
        ) as managed:
            loop = HermesAgentLoop(
                server=managed,
                tool_schemas=tools,
                valid_tool_names=names,
                max_turns=4,
                task_id=rollout.rollout_id,
                tool_handler=rollout.tools.handle,
            )
            first = await loop.run(messages)
            managed.declare("compaction")
            compacted = [{"role": "user", "content": f"Summary: {first.final_response} Write it down."}]
            result = await loop.run(list(compacted))
            await managed.chat_completion(messages=compacted, tools=tools, n=2)
            await managed.chat_completion(messages=[{"role": "user", "content": "Look around again."}], tools=tools)
            result.managed_state = managed.get_state()
            return result

    def _build_scored_item(self, item, result, reward):
        built = super()._build_scored_item(item, result, reward)
        if item == "first":
            return built
        return {**built, "masks": [-100] * len(built["masks"]), "overrides": {"lr": 1}}
