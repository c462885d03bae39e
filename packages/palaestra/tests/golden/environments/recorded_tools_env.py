"""Tools with recorded replies: a web search, an MCP tool, and a function with a new reply for each call."""

import itertools

from palaestra import Task, ToolStep, environment

ticks = itertools.count(1)


@environment(toolsets=["search"])
def recorded_tools():
    for i in range(2):
        yield Task(
            id=f"bird-{i}",
            prompt="Which bird dives for fish?",
            solution=[
                ToolStep("web_search", {"query": "tern", "limit": 1 + i}),
                ToolStep("mcp_adder_add", {"a": i, "b": 1}),
                ToolStep("tick", {"name": "a clock"}),
                ToolStep("tick", {"name": "a clock"}),
            ],
        )


@recorded_tools.tool(touches_world=True)
async def tick(name: str) -> dict[str, object]:
    """Read a clock.

    Args:
        name: The clock.
    """
    return {"name": name, "ticks": next(ticks)}


@recorded_tools.score
async def seen(rollout):
    return ("The tern" in str(rollout.messages[1:])) / (1 + rollout.index)
