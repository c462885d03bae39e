"""The Tinker cookbook's recipes run commands in our slots.

    await cli_main(config, tasks, sandbox_factory=sandbox_factory(image="/images/python"))

`sandbox_factory` is what `tinker_cookbook.recipes.harbor_rl` asks for in place of Modal; each sandbox is a slot. The
recipe trains through the Tinker service, or through `palaestra serve tinker`.

Source: `SandboxInterface` and `SandboxFactory` of tinker-cookbook 0.6.1, which must be installed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra import Sandbox

if TYPE_CHECKING:
    from tinker_cookbook.sandbox import SandboxResult

MOST_OUTPUT_BYTES = 128 * 1024
"""Of a command, if the recipe sets no bound: the cookbook's own default."""


class SlotSandbox:
    """One slot as a `SandboxInterface`. It ends with `cleanup`, or after `lifetime_s` seconds. Raises the cookbook's
    `SandboxTerminatedError` for a call after its end."""

    def __init__(self, sandbox: Sandbox, lifetime_s: float) -> None:
        self.sandbox_id = f"slot-{uuid.uuid4().hex[:12]}"
        self._sandbox = sandbox
        self._open = AsyncExitStack()
        self._lifetime_s = lifetime_s
        self._end: asyncio.Task[None] | None = None
        self._ended = False

    async def start(self) -> None:
        await self._open.enter_async_context(self._sandbox)
        self._end = asyncio.ensure_future(self._expire())

    async def _expire(self) -> None:
        await asyncio.sleep(self._lifetime_s)
        self._end = None
        await self.cleanup()

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Nothing to do: a slot needs no sign of life."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run a command; the exit code is 124 after a timeout, which kills its process tree."""
        found = await self._running().execute(
            command,
            cwd=workdir or "/workspace",
            timeout_s=timeout,
            max_output_bytes=max_output_bytes or MOST_OUTPUT_BYTES,
            spill=False,
            stderr=True,
        )
        return _result(found.metadata["stdout"], found.metadata["stderr"], found.metadata["exit_code"])

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        """The text of a file; exit code 1 and the reason if it cannot be read."""
        try:
            slot = self._running()
            data = await (slot.read_bytes(path) if max_bytes is None else slot.read_bytes(path, max_bytes=max_bytes))
        except OSError as error:
            return _result("", f"{path}: {error.strerror or error}", 1)
        return _result(data.decode(errors="replace"))

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Write a file with its folders; exit code 1 and the reason if it cannot be written."""
        data = content.encode() if isinstance(content, str) else content
        try:
            await self._running().write_bytes(path, data, mode=0o755 if executable else None)
        except OSError as error:
            return _result("", f"{path}: {error.strerror or error}", 1)
        return _result()

    async def cleanup(self) -> None:
        """End the slot and all its processes. Idempotent."""
        if self._end is not None:
            self._end.cancel()
        self._ended = True
        await self._open.aclose()

    def _running(self) -> Sandbox:
        if self._ended:
            from tinker_cookbook.sandbox import SandboxTerminatedError

            raise SandboxTerminatedError(f"the sandbox {self.sandbox_id} has ended")
        return self._sandbox


def sandbox_factory(*, image: str | Callable[[Path], str] | None = None, **settings: Any) -> Callable[[Path, int], Any]:
    """A `SandboxFactory` whose sandboxes are slots of this machine.

    `image` is the root file system of all tasks, or gives that of a task from its `environment` folder; Dockerfiles are
    not built. `settings` are those of `palaestra.Sandbox`, such as `network`, `memory` or `isolation`.
    """

    async def make(env_dir: Path, timeout: int) -> SlotSandbox:
        chosen = image(env_dir) if callable(image) else image
        made = SlotSandbox(Sandbox(image=chosen, **settings), timeout)
        await made.start()
        return made

    return make


def _result(stdout: str = "", stderr: str = "", exit_code: int = 0) -> SandboxResult:
    from tinker_cookbook.sandbox import SandboxResult

    return SandboxResult(stdout=stdout, stderr=stderr, exit_code=exit_code)
