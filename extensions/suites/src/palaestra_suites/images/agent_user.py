"""Start an agent's commands in its image's directory and as its image's user."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from palaestra.rollouts.rollout import Rollout
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.images.as_user import is_root
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.slot import WORKSPACE, Slot


async def start_in(slot: Slot, workdir: str, *folders: str) -> None:
    """Make `workdir` the directory of an agent's commands and relative paths, and create further folders.

    WORKSPACE becomes a link to `workdir`. Raises `PrepareError`.
    """
    start = 'mkdir -p "$@" && { [ "$1" -ef %s ] || { rm -rf %s && ln -s "$1" %s; }; }'
    script = start.replace("%s", WORKSPACE)
    argv = ["/bin/sh", "-c", script, "start", workdir, *folders]
    await check_execute(slot, argv, f"the directory {workdir} cannot be created", timeout_s=60)


def tools_of_user(rollout: Rollout, user: str, slot: Callable[[], Awaitable[Slot]], about: str) -> ToolRuntime | None:
    """Return tools that run calls as the image's user. Return None if the user is root, because root uses the rollout's
    tools.

    `about` is the agent's task.
    """
    if is_root(user):
        return None
    return rollout.seat.bind_tools(slot, about)
