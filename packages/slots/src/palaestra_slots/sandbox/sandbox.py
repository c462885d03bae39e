"""Provides `Sandbox`, one slot as an async context manager, and `SyncSandbox`, its counterpart for synchronous code.

    async with Sandbox(network="off", memory="512MB") as box:
        print((await box.execute("id -u")).output)
        async with box.fork() as other:
            ...

A sandbox starts its own slot server, unless it is given a pool or another sandbox's snapshot.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import AllowList, Limits, Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot

P = ParamSpec("P")
T = TypeVar("T")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LEAST_MEMORY = 4 << 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SandboxSnapshot:
    """The files of a sandbox at one moment, for `Sandbox(snapshot=…)`. Use it inside the block of the sandbox that made
    it or, if that sandbox was given a pool, while the pool runs.

    `loop` is the event loop of that sandbox; for a blocking sandbox, `thread` is the thread that runs the loop.
    """

    snapshot: Snapshot
    pool: SlotPool
    loop: asyncio.AbstractEventLoop
    thread: LoopThread | None = None

    def check_open(self) -> None:
        """Raise `SandboxError` if the pool or the event loop of the snapshot's sandbox is closed."""
        if self.loop.is_closed() or not self.pool.get_stats()["started"]:
            raise SandboxError(
                "the snapshot ended with the sandbox that made it: open sandboxes from it inside that sandbox's block"
            )

    def check_loop(self) -> None:
        """Raise `SandboxError` if the running event loop is not the loop of the snapshot's sandbox."""
        if self.loop is not asyncio.get_running_loop():
            here = "`with`" if self.thread is not None else "`async with`, in the same event loop"
            raise SandboxError(f"the snapshot belongs to another event loop: open sandboxes from it in {here}")


def _of_slot(method: Callable[Concatenate[Slot, P], T]) -> Callable[Concatenate[Sandbox, P], T]:
    @functools.wraps(method)
    def call(self: Sandbox, /, *args: P.args, **named: P.kwargs) -> T:
        result: T = getattr(self.slot, method.__name__)(*args, **named)
        return result

    return call


class Sandbox:
    """An isolated workspace for commands and files. Use it in an `async with` block, or in a `with` block, which yields
    a `SyncSandbox`.

    `image` is a root file system (a directory, a tar file or an OCI layout). None means the image of `snapshot` or,
    without a snapshot, the backend's default: on this machine, the host's system directories. `network` is "off", "on",
    or a list of hosts. `memory` and `disk` are bytes or text such as "512MB" (units are powers of 1024); `cpus` is in
    cores; `limits` replaces these three arguments. `env` holds environment variables for commands. `isolation` is
    "best" or a level: "full", "userns", "confined" or "none". If `pool` or `snapshot` is given, the sandbox starts in a
    pool that is already running. The level of that pool may also be better than `isolation`.

    Raises ValueError, in most cases its subclass `ConfigError`, for an unusable argument. Entering the block raises
    `IsolationUnavailable` if this machine cannot provide the isolation level, and `ConfigError` if the pool's level is
    lower than `isolation`.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        network: str | Network | AllowList | Sequence[str] = Network.OFF,
        memory: str | int | None = None,
        disk: str | int | None = None,
        cpus: float | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        isolation: str = "best",
        pool: SlotPool | None = None,
        snapshot: SandboxSnapshot | None = None,
    ) -> None:
        standard = Limits()
        limits = limits or Limits(
            memory_bytes=standard.memory_bytes if memory is None else size_in_bytes(memory),
            disk_bytes=standard.disk_bytes if disk is None else size_in_bytes(disk),
            cpus=cpus,
        )
        if memory is not None and limits.memory_bytes is not None and limits.memory_bytes < _LEAST_MEMORY:
            raise ConfigError(
                f"memory={memory!r} is {limits.memory_bytes} bytes, too little to start a sandbox: "
                "use '512MB', for example"
            )
        # `Network` is a StrEnum and counts as text, so this is a list of hosts.
        if not isinstance(network, str | AllowList):
            network = AllowList(tuple(network))
        if snapshot is not None:
            image = image or snapshot.snapshot.spec.image
            pool = pool or snapshot.pool
        try:
            allowed = network if isinstance(network, AllowList) else Network(network)
        except ValueError:
            raise ConfigError(f'network must be "off", "on" or a list of hosts, not {network!r:.100}') from None
        self._spec = SlotSpec(image, allowed, limits, env=_env_pairs(env))
        self._lowest, _ = levels(isolation)
        self._pool = pool
        self._snapshot = snapshot
        self._slot: Slot | None = None
        self._running: SlotPool
        self._open: AsyncExitStack | None = None
        self._sync: SyncSandbox | None = None

    @property
    def slot(self) -> Slot:
        """The sandbox's slot. Raises `SandboxError` outside of the `async with` block."""
        if self._slot is None:
            raise SandboxError("the sandbox is not open: use it in `async with Sandbox(…) as box:`")
        return self._slot

    @property
    def spec(self) -> SlotSpec:
        """What the sandbox is made of; also known before the block is entered."""
        return self._spec

    @property
    def isolation(self) -> str:
        """The name of the isolation level in force."""
        return self.slot.rung.label

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            pool, snapshot = self._pool, self._snapshot
            if snapshot is not None:
                snapshot.check_open()
                snapshot.check_loop()
            if pool is None:
                backend = LocalBackend(rung=self._lowest)
                pool = await stack.enter_async_context(SlotPool(backend=backend))
            elif self._lowest is not None and pool.rung < self._lowest:
                raise ConfigError(
                    f"the pool's isolation is {pool.rung.label}, which is below {self._lowest.label}: use another "
                    "pool, or request a lower level"
                )
            layers = None if snapshot is None else snapshot.snapshot
            slot = await pool.acquire("sandbox", spec=self._spec, snapshot=layers)
            stack.push_async_callback(pool.release, slot)
            # From here on, `__aexit__` closes everything; if a step before fails, this block does.
            self._slot, self._running, self._open = slot, pool, stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        stack, self._open, self._slot = self._open, None, None
        if stack is not None:
            await stack.aclose()

    def __enter__(self) -> SyncSandbox:
        if self._snapshot is not None:
            self._snapshot.check_open()
        self._sync = SyncSandbox(self, None if self._snapshot is None else self._snapshot.thread)
        return self._sync.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._sync is not None:
            self._sync.__exit__(*exc)

    execute = _of_slot(Slot.execute)
    shell = _of_slot(Slot.shell)
    spawn = _of_slot(Slot.spawn)
    processes = _of_slot(Slot.processes)
    read_bytes = _of_slot(Slot.read_bytes)
    write_bytes = _of_slot(Slot.write_bytes)
    write_text = _of_slot(Slot.write_text)
    list_dir = _of_slot(Slot.list_dir)
    stat = _of_slot(Slot.stat)
    make_dir = _of_slot(Slot.make_dir)
    remove = _of_slot(Slot.remove)
    upload = _of_slot(Slot.upload)
    download = _of_slot(Slot.download)
    changes = _of_slot(Slot.changes)

    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """Return the file's text, decoded as UTF-8 with undecodable bytes replaced. If the file cannot be read and
        `missing` is given, return `missing`."""
        return await (self.slot.read_text(path) if missing is None else self.slot.read_text(path, missing=missing))

    @asynccontextmanager
    async def fork(self) -> AsyncIterator[Sandbox]:
        """Yield a second sandbox that starts with this sandbox's current files and ends with the block; this sandbox
        continues. Processes and the contents of `/tmp` and `/dev/shm` are not copied. Raises `SandboxError` at
        isolation levels below "userns"."""
        async with self.slot.fork() as slot:
            other = Sandbox(limits=self._spec.limits, pool=self._running)
            other._slot, other._running, other._spec = slot, self._running, self._spec
            yield other

    async def snapshot(self) -> SandboxSnapshot:
        """Return a snapshot of the current files, from which other sandboxes can start; this sandbox continues. Raises
        `SandboxError` at isolation levels below "userns"."""
        layers = await self._running.checkpoint(self.slot)
        return SandboxSnapshot(layers, self._running, asyncio.get_running_loop())


def _blocking(
    method: Callable[Concatenate[Sandbox, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncSandbox, P], T]:
    @functools.wraps(method)
    def call(self: SyncSandbox, /, *args: P.args, **named: P.kwargs) -> T:
        return self._loop.wait(method(self._box, *args, **named))

    return call


class SyncSandbox:
    """A sandbox whose methods block: `with Sandbox() as box:`. It also works while another event loop runs, as in a
    notebook."""

    def __init__(self, box: Sandbox, loop: LoopThread | None = None) -> None:
        self._box = box
        self._own_loop = loop is None
        self._loop = loop or LoopThread("palaestra-sandbox")

    @property
    def isolation(self) -> str:
        """The name of the isolation level in force."""
        return self._box.isolation

    def __enter__(self) -> Self:
        try:
            self._loop.wait(self._box.__aenter__())
        except BaseException:
            if self._own_loop:
                self._loop.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._loop.wait(self._box.__aexit__(*exc))
        finally:
            if self._own_loop:
                self._loop.close()

    execute = _blocking(Sandbox.execute)
    read_bytes = _blocking(Sandbox.read_bytes)
    read_text = _blocking(Sandbox.read_text)
    write_bytes = _blocking(Sandbox.write_bytes)
    write_text = _blocking(Sandbox.write_text)
    list_dir = _blocking(Sandbox.list_dir)
    stat = _blocking(Sandbox.stat)
    make_dir = _blocking(Sandbox.make_dir)
    remove = _blocking(Sandbox.remove)
    upload = _blocking(Sandbox.upload)
    download = _blocking(Sandbox.download)
    changes = _blocking(Sandbox.changes)

    def snapshot(self) -> SandboxSnapshot:
        """Return a snapshot of the current files, from which other blocking sandboxes can start."""
        return replace(self._loop.wait(self._box.snapshot()), thread=self._loop)

    @contextmanager
    def fork(self) -> Iterator[SyncSandbox]:
        """Yield a second blocking sandbox with this sandbox's current files, like `Sandbox.fork`."""
        forked, loop = self._box.fork(), self._loop
        box = loop.wait(forked.__aenter__())
        try:
            yield SyncSandbox(box, loop)
        finally:
            loop.wait(forked.__aexit__(None, None, None))


def size_in_bytes(size: str | int) -> int:
    """Return a size such as 512, "512MB" or "1.5 GiB" in bytes; units are powers of 1024. Raises `ConfigError` for text
    that is not a size."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ConfigError(f"{size!r} is not a size: use bytes, or a number with K, M, G or T, such as '512MB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _env_pairs(env: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    if env is not None and not isinstance(env, Mapping):
        raise ConfigError(f"env must be a mapping of names to strings, not {env!r:.100}")
    return tuple((env or {}).items())
