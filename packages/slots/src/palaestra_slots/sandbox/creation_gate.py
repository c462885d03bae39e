"""Limits the rate at which all processes of a user on this host together start containers and sandboxes.

The state is kept in files in a shared folder. One file holds the time at which the next start may begin. Each
concurrent start holds one lock file; the kernel releases the lock when the holder dies. After a provider's "too many
requests", all processes start containers more slowly until some starts have succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from palaestra_slots.core.errors import ConfigError, InfraError
from palaestra_slots.core.io.file_lock import file_lock

_SLOWEST_S, _FIRST_S = 60.0, 1.0
_POLL_S = 0.02


class CreationGate:
    """The gate of one backend. It allows `per_s` starts a second and `most` concurrent starts; None means no limit.
    `throttled` slows the starts down in either case."""

    def __init__(
        self, name: str, *, per_s: float | None = None, most: int | None = None, folder: Path | None = None
    ) -> None:
        self._per_s, self._most = per_s, most
        self._folder = folder or Path(tempfile.gettempdir(), f"palaestra-gates-{os.geteuid()}")
        self._name = name

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Wait until one container or sandbox may start. The body of the `async with` block then starts it."""
        async with contextlib.AsyncExitStack() as held:
            if self._most is not None:
                await held.enter_async_context(self._place(self._most))
            await self._turn()
            yield
        # A start that fails raises and does not get here, so only success makes the gap smaller.
        await self._change(lambda gap_s: 0.0 if gap_s <= _FIRST_S else gap_s / 2)

    async def throttled(self, asked_s: float | None = None) -> float:
        """Slow all starts down, because the provider has reported too many requests; `asked_s` is the pause in seconds
        that the provider requested. Returns the number of seconds for which all starts pause."""
        found = 0.0

        def slower(gap_s: float) -> float:
            nonlocal found
            found = min(_SLOWEST_S, max(_FIRST_S, 2 * gap_s, asked_s or 0.0))
            return found

        await self._change(slower, pause=True)
        return found

    async def _turn(self) -> None:
        """Wait until the next start may begin."""
        while True:
            async with self._locked() as state:
                now = time.monotonic()
                wait_s = state["next"] - now
                # A time that is further ahead than any gap can be was recorded before this host's last boot.
                if wait_s <= 0 or wait_s > 2 * _SLOWEST_S:
                    own = 0.0 if self._per_s is None else 1 / self._per_s
                    state["next"] = now + max(own, state["gap"])
                    return
            # Another process may change the time meanwhile.
            await asyncio.sleep(min(wait_s, 1.0))

    async def _change(self, gap: Callable[[float], float], *, pause: bool = False) -> None:
        if not pause and not self._state_path.exists():
            return
        async with self._locked() as state:
            state["gap"] = gap(state["gap"])
            if pause:
                state["next"] = max(state["next"], time.monotonic() + state["gap"])

    def _make_folder(self) -> None:
        """Make the folder. Raises `ConfigError` if another user made it or may write to it, because that user could
        redirect our files with links."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ConfigError(f"{self._folder} is not a directory that only you can write to: remove it, or set TMPDIR")

    @property
    def _state_path(self) -> Path:
        return self._folder / f"{self._name}.json"

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[dict[str, float]]:
        """Yield the shared state, which is written back at the end of the block."""
        self._make_folder()
        async with file_lock(self._folder / f"{self._name}.lock", poll_s=_POLL_S):
            try:
                state = json.loads(self._state_path.read_text())
            except (OSError, ValueError):
                state = {"next": 0.0, "gap": 0.0}
            yield state
            # By a rename, so that a process that dies here leaves the former state whole.
            temporary = self._state_path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(state))
            temporary.replace(self._state_path)

    @contextlib.asynccontextmanager
    async def _place(self, most: int) -> AsyncIterator[None]:
        """Hold one of the locks for concurrent starts."""
        self._make_folder()
        while True:
            for number in range(most):
                lock = file_lock(self._folder / f"{self._name}-{number}.lock", timeout_s=0.0)
                try:
                    await lock.__aenter__()
                except InfraError:
                    continue
                try:
                    yield
                finally:
                    await lock.__aexit__(None, None, None)
                return
            await asyncio.sleep(_POLL_S)
