"""The original runtime as processes: its interpreter, its server, and scripts that run under it and under ours.

Nothing of it is imported here. Waits are for events and have deadlines that a busy machine can keep.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp

from palaestra_slots.core.types import JSON

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / ".venv-interop/bin/python"
OURS = Path(sys.executable)
SCRIPTS = Path(__file__).parent / "scripts"
STOCK = SCRIPTS / "stock_env.py"
SUMS = SCRIPTS / "sums_env.py"

DEADLINE_S = 90.0
"""For anything that should happen at all."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code and all that it said."""

    code: int
    said: str


@asynccontextmanager
async def running(command: Sequence[str | Path], folder: Path) -> AsyncIterator[Process]:
    """A process in `folder`, which gets its output as `said`; killed in the end."""
    with (folder / "said").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, command), cwd=folder, stdout=log, stderr=asyncio.subprocess.STDOUT, env=os.environ | _ENVIRONMENT
        )
    try:
        yield process
    finally:
        await kill(process)


async def kill(process: Process) -> None:
    """SIGKILL, and wait for the end."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def ended(command: Sequence[str | Path], folder: Path) -> Ended:
    """Run a process to its end."""
    folder.mkdir(exist_ok=True)
    async with running(command, folder) as process, asyncio.timeout(DEADLINE_S):
        code = await process.wait()
    return Ended(code, (folder / "said").read_text())


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until it holds."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"after {DEADLINE_S:g} s still not: {what}") from None


def flags(url: str, folder: Path, **env: object) -> list[str]:
    """A command line for `SUMS` that both runtimes take."""
    given: dict[str, object] = {
        "openai.base_url": url,
        "openai.model_name": "answering",
        "openai.api_key": "none",
        "openai.health_check": "false",
        "openai.tokenizer_name": folder,
        "env.use_wandb": "false",
        "env.tokenizer_name": folder,
        **{f"env.{name}": value for name, value in env.items()},
    }
    given.setdefault("openai.server_type", "openai" if env.get("style") == "tools" else "vllm")
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def lines(path: Path) -> list[JSON]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Server:
    """A trajectory server that runs `command`, at one address through all its lives. Its log is `log`."""

    def __init__(self, folder: Path, *command: str | Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self._port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = folder / "server.log"
        self._command = [*map(str, command), "--host", "127.0.0.1", "--port", str(self._port)]
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=asyncio.subprocess.STDOUT
            )
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                try:
                    async with session.get(self.url) as reply:
                        return reply.status == 200
                except aiohttp.ClientError:
                    return False

            await until(answers, "the trajectory server answers")

    async def kill(self) -> None:
        """SIGKILL: whatever it held in memory is gone."""
        if self._process is not None:
            await kill(self._process)
            self._process = None


class RunApi(Server):
    """Theirs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, THEIRS.with_name("run-api"))

    def requests(self, path: str) -> int:
        """How many requests for this path it has answered with 200, in all its lives."""
        return self.log.read_text().count(f' {path} HTTP/1.1" 200')


class PalaestraApi(Server):
    """Ours."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, OURS, "-m", "palaestra", "serve", "api", "--store", folder / "store")
