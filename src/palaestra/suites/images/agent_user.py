"""An agent in a slot that was made from an image: where its commands start, and as whom they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from palaestra.core.errors import PrepareError
from palaestra.rollouts.rollout import Rollout, RolloutTool
from palaestra.sandbox.slot import WORKSPACE, Slot
from palaestra.suites.images.as_user import is_root
from palaestra.tools.runtime.runtime import ToolRuntime


async def start_in(slot: Slot, workdir: str, *folders: str) -> None:
    """Make a directory the one that an agent's commands and relative paths start in, and make further folders.

    They start in WORKSPACE, which then is another name of it. Raises `PrepareError`.
    """
    start = 'mkdir -p "$@" && { [ "$1" -ef %s ] || { rm -rf %s && ln -s "$1" %s; }; }'
    script = start.replace("%s", WORKSPACE)
    done = await slot.execute(["/bin/sh", "-c", script, "start", workdir, *folders], cwd="/", timeout_s=60)
    if not done.success:
        raise PrepareError(f"the directory {workdir} cannot be made: {done.output[-500:]}")


def tools_of_user(rollout: Rollout, user: str, slot: Callable[[], Awaitable[Slot]], about: str) -> RolloutTool | None:
    """Runs the agent's calls in a slot as its image's user has it; None for root, for whom the rollout's own tools do.

    `about` is what the agent is asked.
    """
    if is_root(user):
        return None
    tools = ToolRuntime(
        rollout.kit.registry,
        slot,
        task_id=rollout.rollout_id,
        user_task=about,
        timeout_s=rollout.settings.tool_timeout_s,
        middleware=() if rollout.world is None else (rollout.world,),
    )
    rollout.closes(tools)
    return tools.handle
