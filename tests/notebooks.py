"""A real Jupyter kernel that executes the cells of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_async_kernel

CELL_S = 120

Execute = Callable[[str], Awaitable[str]]


@contextlib.asynccontextmanager
async def notebook(folder: Path) -> AsyncIterator[Execute]:
    """A kernel that runs in the folder. The function in it executes a cell, and returns what the cell printed."""
    manager, client = await start_new_async_kernel(kernel_name="python3", cwd=str(folder))

    async def execute(cell: str) -> str:
        printed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            data = content.get("data", {})
            printed.append(str(content.get("text") or data.get("text/plain") or ""))

        reply = await client.execute_interactive(cell, timeout=CELL_S, output_hook=hear, allow_stdin=False)
        content = reply["content"]
        assert content["status"] == "ok", "\n".join([cell, *content.get("traceback", [])])
        return "".join(printed)

    try:
        yield execute
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
