"""A reward hook reaches the background processes of the agent where it works in the agent's own slot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from palaestra import ToolStep
from palaestra_contract import HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig

pytestmark = pytest.mark.slots

ECHO = "while read line; do echo got $line; done; echo ended"


def process(ctx: ToolContext, **arguments: JSON) -> Any:
    return json.loads(ctx.call_tool("process", arguments))


def listed(ctx: ToolContext, session: str) -> Any:
    return [each["session_id"] for each in process(ctx, action="list")["processes"]] == [session]


def polled(ctx: ToolContext, session: str) -> Any:
    return process(ctx, action="poll", session_id=session)["status"] == "running"


def written(ctx: ToolContext, session: str) -> Any:
    process(ctx, action="submit", session_id=session, data="word")
    process(ctx, action="submit", session_id=session, data="more", eof=True)
    done = process(ctx, action="wait", session_id=session, timeout=5)
    log = process(ctx, action="log", session_id=session)
    return "ended" in json.dumps(done) + json.dumps(log) and "got word" in json.dumps(log)


def killed(ctx: ToolContext, session: str) -> Any:
    process(ctx, action="kill", session_id=session)
    return ctx.terminal("pgrep -f 'echo [g]ot'")["output"] == ""


def joined_by_another(ctx: ToolContext, session: str) -> Any:
    own = json.loads(ctx.call_tool("terminal", {"command": "sleep 60", "background": True}))["session_id"]
    found = {each["session_id"] for each in process(ctx, action="list")["processes"]}
    return own != session and found == {own, session}


def cleaned(ctx: ToolContext, session: str) -> Any:
    ctx.cleanup()
    return ctx.terminal("pgrep -f 'echo [g]ot'")["output"] == ""


class Serving(HermesAgentBaseEnv):
    check: Any = None

    async def setup(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return {"id": "a", "solution": [ToolStep("terminal", {"command": ECHO, "background": True})]}

    def format_prompt(self, item: JSON) -> str:
        return "Start it"

    async def compute_reward(self, item: JSON, result: JSON, ctx: ToolContext) -> float:
        said = [json.loads(each["content"]) for each in result.messages if each["role"] == "tool"]
        return float(self.check(ctx, said[0]["session_id"]))

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON: ...


def reward(check: Any, **settings: JSON) -> float:
    async def main() -> float:
        config = HermesAgentEnvConfig.model_validate({"enabled_toolsets": ["terminal"], **settings})
        env = Serving(config, [APIServerConfig(server_type="scripted", model_name="oracle")])
        env.check = check
        await env.setup()
        row, _ = await env.collect_trajectory(await env.get_next_item())
        assert row is not None
        return row["scores"]

    return asyncio.run(main())


@pytest.mark.parametrize("check", [listed, polled, written, killed, joined_by_another, cleaned])
def test_a_live_check_reaches_the_processes_of_the_agent(check: Any) -> None:
    assert reward(check) == 1.0


def test_a_sealed_check_sees_none() -> None:
    assert reward(lambda ctx, session: process(ctx, action="list")["processes"] == [], grading="sealed") == 1.0
