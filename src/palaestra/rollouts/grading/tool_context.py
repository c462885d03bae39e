"""`ToolContext`: what a reward function written to the contract uses to look at a rollout's workspace.

The synchronous methods may be called inside an `async def compute_reward` without blocking the event loop (see
`core/sync_bridge.py`), and from other threads. Each has an async twin, `<name>_async`. All of them work on the grading
view of the rollout, so nothing a reward function does can be answered by a process that the agent left behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from palaestra.core.errors import InfraError
from palaestra.core.sync_bridge import wait_for_sync
from palaestra.core.types import JSON
from palaestra.processes.registry import ProcessRegistry
from palaestra.sandbox.slot import Slot
from palaestra.sandbox.transfer import Transferred, download_dir, upload_dir
from palaestra.tools.runtime.runtime import ToolRuntime

T = TypeVar("T")

CONTEXT_OUTPUT_BYTES = 4 << 20
"""How much output `terminal` returns; a reward function may have to parse a whole test log."""


class ToolContext:
    """Open access to one rollout's workspace and tools, for scoring. `task_id` names the rollout."""

    def __init__(self, task_id: str, *, slot: Callable[[], Awaitable[Slot]], tools: ToolRuntime) -> None:
        self.task_id = task_id
        self._slot = slot
        self._tools = tools
        self._loop = asyncio.get_running_loop()

    def terminal(self, command: str, timeout: float = 180) -> dict[str, JSON]:
        """Run a shell command in the workspace: `{"exit_code", "output"}`; 124 after `timeout` seconds."""
        return self._wait(self.terminal_async(command, timeout), "terminal_async")

    async def terminal_async(self, command: str, timeout: float = 180) -> dict[str, JSON]:
        """`terminal`, to be awaited."""
        slot = await self._slot()
        done = await slot.execute(command, timeout_s=timeout, max_output_bytes=CONTEXT_OUTPUT_BYTES)
        return {"exit_code": done.exit_code, "output": done.output}

    def read_file(self, path: str) -> dict[str, JSON]:
        """The whole text of a file: `{"content", "path"}`, or `{"error", "path"}` when it cannot be read."""
        return self._wait(self.read_file_async(path), "read_file_async")

    async def read_file_async(self, path: str) -> dict[str, JSON]:
        """`read_file`, to be awaited."""
        slot = await self._slot()
        try:
            return {"content": await slot.read_text(path), "path": path}
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}

    def write_file(self, path: str, content: str) -> dict[str, JSON]:
        """Write a text file: `{"bytes_written", "path"}`, or `{"error", "path"}`."""
        return self._wait(self.write_file_async(path, content), "write_file_async")

    async def write_file_async(self, path: str, content: str) -> dict[str, JSON]:
        """`write_file`, to be awaited."""
        slot = await self._slot()
        data = content.encode()
        try:
            await slot.write_bytes(path, data)
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}
        return {"bytes_written": len(data), "path": path}

    def upload_file(self, local_path: str | Path, remote_path: str) -> dict[str, JSON]:
        """Copy a file of this machine into the workspace, any size and content: `{"success", "bytes"}`, or
        `{"success", "error"}`."""
        return self._wait(self.upload_file_async(local_path, remote_path), "upload_file_async")

    async def upload_file_async(self, local_path: str | Path, remote_path: str) -> dict[str, JSON]:
        """`upload_file`, to be awaited."""
        return await _told((await self._slot()).upload(Path(local_path), remote_path))

    def upload_dir(self, local_dir: str | Path, remote_dir: str) -> dict[str, JSON]:
        """Copy a directory of this machine: `{"success", "bytes", "files", "left_out"}`, or `{"success", "error"}`."""
        return self._wait(self.upload_dir_async(local_dir, remote_dir), "upload_dir_async")

    async def upload_dir_async(self, local_dir: str | Path, remote_dir: str) -> dict[str, JSON]:
        """`upload_dir`, to be awaited."""
        return await _told(upload_dir(await self._slot(), Path(local_dir), remote_dir))

    def download_file(self, remote_path: str, local_path: str | Path) -> dict[str, JSON]:
        """Copy a file of the workspace to this machine, any size and content; replies as `upload_file` does."""
        return self._wait(self.download_file_async(remote_path, local_path), "download_file_async")

    async def download_file_async(self, remote_path: str, local_path: str | Path) -> dict[str, JSON]:
        """`download_file`, to be awaited."""
        return await _told((await self._slot()).download(remote_path, Path(local_path)))

    def download_dir(self, remote_dir: str, local_dir: str | Path) -> dict[str, JSON]:
        """Copy a directory of the workspace to this machine; replies as `upload_dir` does."""
        return self._wait(self.download_dir_async(remote_dir, local_dir), "download_dir_async")

    async def download_dir_async(self, remote_dir: str, local_dir: str | Path) -> dict[str, JSON]:
        """`download_dir`, to be awaited."""
        return await _told(download_dir(await self._slot(), remote_dir, Path(local_dir)))

    def search(self, query: str, path: str = ".") -> dict[str, JSON]:
        """Search file contents with the tool `search_files`: its reply, or `{"error"}` where it is missing."""
        return self._wait(self.search_async(query, path), "search_async")

    async def search_async(self, query: str, path: str = ".") -> dict[str, JSON]:
        """`search`, to be awaited."""
        return _object(await self.call_tool_async("search_files", {"pattern": query, "path": path}))

    def web_search(self, query: str) -> dict[str, JSON]:
        """Ask the tool `web_search`: its reply, or `{"error"}` where it is missing."""
        return self._wait(self.web_search_async(query), "web_search_async")

    async def web_search_async(self, query: str) -> dict[str, JSON]:
        """`web_search`, to be awaited."""
        return _object(await self.call_tool_async("web_search", {"query": query}))

    def web_extract(self, urls: Sequence[str]) -> dict[str, JSON]:
        """Ask the tool `web_extract`: its reply, or `{"error"}` where it is missing."""
        return self._wait(self.web_extract_async(urls), "web_extract_async")

    async def web_extract_async(self, urls: Sequence[str]) -> dict[str, JSON]:
        """`web_extract`, to be awaited."""
        return _object(await self.call_tool_async("web_extract", {"urls": list(urls)}))

    def browser_navigate(self, url: str) -> dict[str, JSON]:
        """Ask the tool `browser_navigate`: its reply, or `{"error"}` where it is missing."""
        return self._wait(self.browser_navigate_async(url), "browser_navigate_async")

    async def browser_navigate_async(self, url: str) -> dict[str, JSON]:
        """`browser_navigate`, to be awaited."""
        return _object(await self.call_tool_async("browser_navigate", {"url": url}))

    def browser_snapshot(self) -> dict[str, JSON]:
        """Ask the tool `browser_snapshot`: its reply, or `{"error"}` where it is missing."""
        return self._wait(self.browser_snapshot_async(), "browser_snapshot_async")

    async def browser_snapshot_async(self) -> dict[str, JSON]:
        """`browser_snapshot`, to be awaited."""
        return _object(await self.call_tool_async("browser_snapshot", {}))

    def call_tool(self, tool_name: str, arguments: Mapping[str, JSON]) -> str:
        """Call any tool by name, the agent's or not; the reply is the JSON text that a model would get."""
        return self._wait(self.call_tool_async(tool_name, arguments), "call_tool_async")

    async def call_tool_async(self, tool_name: str, arguments: Mapping[str, JSON]) -> str:
        """`call_tool`, to be awaited."""
        return await self._tools.handle(self._tools.registry.known_as(tool_name), arguments)

    def cleanup(self) -> None:
        """End the background processes and the browser that the check itself has started. All else ends with the
        grading view."""
        self._wait(self.cleanup_async(), "cleanup_async")

    async def cleanup_async(self) -> None:
        """`cleanup`, to be awaited."""
        await self._tools.state(ProcessRegistry).kill_all(self._tools.task_id)
        await self._tools.aclose()

    def _wait(self, call: Coroutine[object, object, T], twin: str) -> T:
        return wait_for_sync(call, loop=self._loop, twin=f"ToolContext.{twin}")


async def _told(transfer: Awaitable[int | Transferred]) -> dict[str, JSON]:
    """What came of a transfer, as the contract tells it."""
    try:
        done = await transfer
    except InfraError:
        raise
    except (OSError, ValueError) as error:
        return {"success": False, "error": str(error)}
    if isinstance(done, int):
        return {"success": True, "bytes": done}
    return {"success": True, "bytes": done.size, "files": done.files, "left_out": done.left_out}


def _object(reply: str) -> dict[str, JSON]:
    """A tool's reply, which is a JSON object; another text stands under `output`."""
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"output": reply}
