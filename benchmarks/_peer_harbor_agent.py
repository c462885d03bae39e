"""Harbor's agent in `peers.py`: it asks the model from Harbor's process and runs the calls in the container.

Harbor imports it in its own interpreter (`--agent-import-path`). A task of Harbor's has its files in its image. So that
no image must be built for each task, the agent uploads them before it starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from _peer_plays import NUMBERS, converse
from harbor.agents.base import BaseAgent


class Loop(BaseAgent):  # type: ignore[misc]
    """Plays one task."""

    @staticmethod
    def name() -> str:
        return "loop"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        await environment.upload_file(Path(environment.environment_dir, NUMBERS), f"/workspace/{NUMBERS}")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        async def shell(command: str) -> str:
            return str((await environment.exec(command, cwd="/workspace")).stdout)

        await converse(os.environ["INSTANT_URL"], shell)
