"""`ToolContext`: access to a rollout's workspace and tools for reward functions, including those of existing
environments.

The synchronous methods may be called inside an `async def compute_reward` without blocking the event loop (see
`core/sync_bridge.py`), and from other threads. Each has an async version, `<name>_async`. For scoring, a run gives them
the grading view of the rollout, which no process of the agent can change unless the check is live. A path in the slot
may begin with `~`, as in a shell.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from palaestra.rollouts.rollout import CURRENT
from palaestra.tools.builtin.terminal import stopped
from palaestra.tools.files.text_files import in_full
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import ToolOutcome
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.sync_bridge import is_bridged, wait_for_sync
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.sandbox.slot import Slot
from palaestra_slots.sandbox.transfer import Transferred, download_dir, upload_dir

if TYPE_CHECKING:
    from palaestra_contract.tools.function_calls import ToolSession

P = ParamSpec("P")
T = TypeVar("T")

CONTEXT_OUTPUT_BYTES = 4 << 20
"""The maximum size of the output that `terminal` returns: enough for a reward function to parse a whole test log."""


def _sync(
    twin: Callable[Concatenate[ToolContext, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[ToolContext, P], T]:
    """Return the synchronous version of an async method."""

    @functools.wraps(twin)
    def wait(self: ToolContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.session is not None and not is_bridged():  # the session's loop is in another thread, so this may block
            return self.session.post(twin(self, *args, **kwargs)).result()
        return wait_for_sync(twin(self, *args, **kwargs), loop=self.loop, twin=f"ToolContext.{twin.__name__}")

    wait.__name__ = twin.__name__.removesuffix("_async")
    wait.__qualname__ = twin.__qualname__.removesuffix("_async")
    return wait


def _placed(
    method: Callable[Concatenate[ToolContext, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[ToolContext, P], Coroutine[object, object, T]]:
    """Make the method run on its slot's event loop, which is not the caller's loop if a `ToolSession` holds the slot or
    the caller has made a loop of its own."""

    @functools.wraps(method)
    async def run(self: ToolContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work = method(self, *args, **kwargs)
        if asyncio.get_running_loop() is self.loop:
            return await work
        if self.session is not None:
            return await asyncio.wrap_future(self.session.post(work))
        # Waits in a thread, where it is noticed if a hook blocks the slot's loop until this call has ended.
        return await asyncio.to_thread(wait_for_sync, work, loop=self.loop, twin=f"ToolContext.{method.__name__}")

    return run


class ToolContext:
    """Full access to the workspace and tools of one rollout, for scoring. `task_id` names the rollout.

    A run passes the `slot` and `tools` of the grading view. If they are omitted, the context uses the current rollout's
    slot and tools if its id is `task_id`, otherwise those that `handle_function_call` and `HermesAgentLoop` use for
    `task_id`.
    """

    def __init__(
        self, task_id: str, *, slot: Callable[[], Awaitable[Slot]] | None = None, tools: ToolRuntime | None = None
    ) -> None:
        self.task_id = task_id
        self.session: ToolSession | None = None
        rollout = CURRENT.get()
        if tools is None and rollout is not None and rollout.rollout_id == task_id:
            tools = rollout.tools
        if tools is None:
            from palaestra_contract.tools.function_calls import default_session  # imports the sandbox

            self.session = default_session()
            tools, self.loop = self.session.task_tools(task_id), self.session.loop
        else:
            self.loop = asyncio.get_running_loop()
        self._slot = tools.slot if slot is None else slot
        self._tools = tools

    @_placed
    async def terminal_async(self, command: str, timeout: float = 180) -> dict[str, JSON]:
        """Run a shell command in the workspace. Returns `{"exit_code", "output", "error"}`. The exit code is 124 if the
        command was ended after `timeout` seconds; `error` then says so, and is None otherwise."""
        slot = await self._slot()
        done = await slot.execute(command, timeout_s=timeout, max_output_bytes=CONTEXT_OUTPUT_BYTES)
        return {"exit_code": done.exit_code, "output": done.output, "error": stopped(done, timeout)}

    @_placed
    async def read_file_async(self, path: str) -> dict[str, JSON]:
        """Read the whole text of a file. Returns `{"content", "path"}`, or `{"error", "path"}` if the file cannot be
        read."""
        slot = await self._slot()
        try:
            return {"content": await slot.read_text(await in_full(slot, path)), "path": path}
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}

    @_placed
    async def write_file_async(self, path: str, content: str) -> dict[str, JSON]:
        """Write a text file. Returns `{"bytes_written", "path"}`, or `{"error", "path"}` if the file cannot be
        written."""
        slot = await self._slot()
        data = content.encode()
        try:
            await slot.write_bytes(await in_full(slot, path), data)
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}
        return {"bytes_written": len(data), "path": path}

    @_placed
    async def upload_file_async(self, local_path: str | Path, remote_path: str) -> dict[str, JSON]:
        """Copy a file from this machine into the workspace. Returns `{"success", "bytes", "exit_code", "output"}`, or,
        if the copy fails, `{"success", "error", "exit_code", "output"}` with the exit code -1."""
        slot = await self._slot()
        size = slot.upload(Path(local_path), await in_full(slot, remote_path))
        return await _transferred(size, f"{local_path} cannot be copied to {remote_path}")

    @_placed
    async def upload_dir_async(self, local_dir: str | Path, remote_dir: str) -> list[dict[str, JSON]]:
        """Copy a directory from this machine into the workspace. Returns the reply of `upload_file` for each file and
        link, with its `path` below the directory, and a failure for each socket, device or fifo. If the copy of a file
        fails, returns only this failure."""
        slot = await self._slot()
        return await _each(upload_dir(slot, Path(local_dir), await in_full(slot, remote_dir)), str(local_dir))

    @_placed
    async def download_file_async(self, remote_path: str, local_path: str | Path) -> dict[str, JSON]:
        """Copy a file from the workspace to this machine, whose folder is created; the reply is like that of
        `upload_file`."""
        slot = await self._slot()

        async def download() -> int:
            Path(local_path).parent.mkdir(parents=True, exist_ok=True)
            return await slot.download(await in_full(slot, remote_path), Path(local_path))

        return await _transferred(download(), f"{remote_path} cannot be copied to {local_path}")

    @_placed
    async def download_dir_async(self, remote_dir: str, local_dir: str | Path) -> list[dict[str, JSON]]:
        """Copy a directory from the workspace to this machine; the reply is like that of `upload_dir`."""
        slot = await self._slot()
        return await _each(download_dir(slot, await in_full(slot, remote_dir), Path(local_dir)), remote_dir)

    @_placed
    async def search_async(self, query: str, path: str = ".") -> dict[str, JSON]:
        """Search file contents with the tool `search_files`. Returns the tool's reply, or `{"error"}` if the tool is
        missing."""
        return await self._object("search_files", {"pattern": query, "path": path})

    @_placed
    async def web_search_async(self, query: str) -> dict[str, JSON]:
        """Call the tool `web_search`. Returns its reply, or `{"error"}` if the tool is missing."""
        return await self._object("web_search", {"query": query})

    @_placed
    async def web_extract_async(self, urls: Sequence[str]) -> dict[str, JSON]:
        """Call the tool `web_extract`. Returns its reply, or `{"error"}` if the tool is missing."""
        return await self._object("web_extract", {"urls": list(urls)})

    @_placed
    async def browser_navigate_async(self, url: str) -> dict[str, JSON]:
        """Call the tool `browser_navigate`. Returns its reply, or `{"error"}` if the tool is missing."""
        return await self._object("browser_navigate", {"url": url})

    @_placed
    async def browser_snapshot_async(self) -> dict[str, JSON]:
        """Call the tool `browser_snapshot`. Returns its reply, or `{"error"}` if the tool is missing."""
        return await self._object("browser_snapshot", {})

    @_placed
    async def call_tool_async(self, tool_name: str, arguments: Mapping[str, JSON]) -> str:
        """Call any tool by name, whether or not the agent has it. Returns the JSON text that a model would read."""
        return (await self._call_tool(tool_name, arguments)).text

    @_placed
    async def cleanup_async(self) -> None:
        """End the background processes, in a live check also the agent's, and the browser that the check started.
        Everything else ends with the grading view. Outside of a run, this also ends the task's slot."""
        if self.session is not None:
            await self.session.end_task(self.task_id)
            return
        await self._tools.state(ProcessRegistry).kill_all(self._tools.process_task)
        await self._tools.aclose()

    terminal = _sync(terminal_async)
    read_file = _sync(read_file_async)
    write_file = _sync(write_file_async)
    upload_file = _sync(upload_file_async)
    upload_dir = _sync(upload_dir_async)
    download_file = _sync(download_file_async)
    download_dir = _sync(download_dir_async)
    search = _sync(search_async)
    web_search = _sync(web_search_async)
    web_extract = _sync(web_extract_async)
    browser_navigate = _sync(browser_navigate_async)
    browser_snapshot = _sync(browser_snapshot_async)
    call_tool = _sync(call_tool_async)
    cleanup = _sync(cleanup_async)

    async def _call_tool(self, tool_name: str, arguments: Mapping[str, JSON]) -> ToolOutcome:
        return await self._tools.call(self._tools.registry.known_as(tool_name), arguments)

    async def _object(self, tool_name: str, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return a tool's reply as an object; a reply that is not an object is put under `output`."""
        reply = (await self._call_tool(tool_name, arguments)).reply
        if not isinstance(reply, str):
            return dict(reply)
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"output": reply}


async def _transferred(transfer: Awaitable[int], doing: str) -> dict[str, JSON]:
    """Return the result of a file's transfer as a mapping, in the form that `upload_file` describes."""
    try:
        return _copied(await transfer)
    except InfraError:
        raise
    except (OSError, ValueError) as error:
        # The name in an error of this machine may be that of a temporary file.
        return _failed(f"{doing}: {getattr(error, 'strerror', None) or error}")


async def _each(transfer: Awaitable[Transferred], directory: str) -> list[dict[str, JSON]]:
    """Return the result of a directory's transfer, in the form that `upload_dir` describes."""
    try:
        done = await transfer
    except InfraError:
        raise
    except (OSError, ValueError) as error:
        return [_failed(f"{directory} cannot be copied: {error}")]
    copied = [{"path": name, **_copied(size)} for name, size in sorted(done.sizes.items())]
    return copied + [{"path": path, **_failed("neither a file, a link nor a directory")} for path in done.left_out]


def _copied(size: int) -> dict[str, JSON]:
    return {"success": True, "bytes": size, "exit_code": 0, "output": ""}


def _failed(error: str) -> dict[str, JSON]:
    return {"success": False, "error": error, "exit_code": -1, "output": error}
