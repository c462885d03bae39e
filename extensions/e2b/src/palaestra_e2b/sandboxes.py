"""The sandboxes of the server: their slots, their leases, and who may use them.

A sandbox belongs to the API key that created it, and to that key alone: to any other, it does not exist. It ends when
it is killed, when its lease ends, when its slot dies, or with the server. `endings.py` remembers how.

Paused with memory, a sandbox keeps its slot, whose processes stand still. Paused without memory, only its files are
kept, as a snapshot. A fork starts from the files of the sandbox; processes and `/tmp` are not copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import string
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.endings import Endings
from palaestra_e2b.processes import ProcessRequest, ProcessTable
from palaestra_e2b.requests import NewSandbox
from palaestra_e2b.templates import Template, Templates, spec_of
from palaestra_e2b.watchers import Watchers
from palaestra_e2b.wire_errors import ApiError, NotRunning, api_error, not_found
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import InfraError, PalaestraError, SandboxError, SlotLost
from palaestra_slots.core.types import JSON, AllowList, Limits, Network
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot, Snapshot

_log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.25
_READY_S, _READY_EVERY_S = 60.0, 0.1
_ALPHABET = string.ascii_lowercase + string.digits


class SandboxState(StrEnum):
    """The state of a sandbox, in the API's words."""

    RUNNING = "running"
    PAUSED = "paused"


@dataclass(slots=True, eq=False)
class HostedSandbox:
    """One sandbox. While it runs, it has a slot. Paused, it has its slot (with memory) or a snapshot (without)."""

    sandbox_id: str
    key: ApiKey
    template: Template
    request: NewSandbox
    network: Network | AllowList
    slot: Slot | None
    ends_at: float
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    traffic_token: str | None = None
    state: SandboxState = SandboxState.RUNNING
    snapshot: Snapshot | None = None
    started_at: float = field(default_factory=time.time)
    processes: ProcessTable = field(default_factory=ProcessTable)
    watchers: Watchers = field(default_factory=Watchers)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def running_slot(self) -> Slot:
        """The slot of a running sandbox. Raises `ApiError` if the sandbox is paused."""
        if self.slot is None or self.state is not SandboxState.RUNNING:
            raise NotRunning(self.sandbox_id, "it is paused; connect to it to resume it", remains=True)
        return self.slot

    def environment(self, user: str) -> dict[str, str]:
        """Return the variables of a user's commands, which those of the command may override."""
        home = self.template.home if user == "user" else "/root" if user == "root" else f"/home/{user}"
        return {
            "HOME": home, "USER": user, "LOGNAME": user, "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.sandbox_id,
            "E2B_TEMPLATE_ID": self.template.template_id, **self.request.env,
        }  # fmt: skip

    def check_running(self) -> None:
        """Raise `ApiError` with status 409 if the sandbox is paused."""
        if self.slot is None or self.state is not SandboxState.RUNNING:
            raise ApiError(409, f"the sandbox {self.sandbox_id} is paused; connect to it first")

    def set_timeout(self, timeout_s: float, *, only_longer: bool = False) -> None:
        """Let the sandbox's lease end in this many seconds."""
        ends_at = time.time() + timeout_s
        self.ends_at = max(ends_at, self.ends_at) if only_longer else ends_at

    async def run_start_command(self) -> bool:
        """Start the template's command, which at E2B is part of the saved memory. Returns whether it became ready in
        `_READY_S` seconds."""
        template, slot = self.template, self.running_slot
        env = self.environment(template.user)
        shell, *arguments = command = ["/bin/bash", "-l", "-c", template.start_command]
        await self.processes.start(
            slot, ProcessRequest(command, template.workdir, env, {"cmd": shell, "args": arguments})
        )
        deadline = time.monotonic() + _READY_S
        command = ["/bin/bash", "-l", "-c", template.ready_command]
        while template.ready_command:
            if time.monotonic() >= deadline:
                return False
            if (await slot.execute(command, cwd=template.workdir, env=env)).success:
                return True
            await asyncio.sleep(_READY_EVERY_S)
        return True


class KeyLimits:
    """The limits of each key: how many sandboxes run, and how many snapshots are kept."""

    def __init__(self, of_key: Callable[[ApiKey], list[HostedSandbox]], templates: Templates) -> None:
        self._of_key, self._templates = of_key, templates
        self._pending: dict[str, int] = {}  # by key: sandboxes that are being made

    @contextlib.contextmanager
    def place(self, key: ApiKey) -> Iterator[None]:
        """Count a sandbox that is being made against its key's limit. Raises `ApiError` with status 429."""
        held = sum(each.slot is not None for each in self._of_key(key)) + self._pending.get(key.name, 0)
        if held >= key.sandboxes:
            raise ApiError(
                429, f"the key {key.name} has {held} sandboxes, which is its limit; kill one first", retry=False
            )
        self._pending[key.name] = self._pending.get(key.name, 0) + 1
        try:
            yield
        finally:
            self._pending[key.name] -= 1

    def check_kept(self, key: ApiKey) -> None:
        """Raise `ApiError` with status 429 if the key may keep no more snapshots."""
        kept = self._templates.kept_by(key) + sum(each.snapshot is not None for each in self._of_key(key))
        if kept >= key.kept:
            raise ApiError(
                429, f"the key {key.name} keeps {kept} snapshots, templates and paused sandboxes, which is its limit; "
                "delete one first", retry=False,
            )  # fmt: skip


class IdempotentRequests:
    """The sandboxes that were made for requests with an idempotency key, as long as they exist."""

    def __init__(self, exists: Callable[[HostedSandbox], bool]) -> None:
        self._exists = exists
        self._made: dict[tuple[str, str], asyncio.Future[HostedSandbox]] = {}

    async def once(
        self, name: tuple[str, str], make: Callable[[], Coroutine[object, object, HostedSandbox]]
    ) -> HostedSandbox:
        """Return the sandbox of the first request with this name; `make` makes it."""
        known = self._made.get(name)
        if known is not None and not (known.done() and self._is_over(known)):
            return await asyncio.shield(known)
        self._made[name] = made = asyncio.ensure_future(make())
        try:
            return await asyncio.shield(made)
        except BaseException:
            if made.done():
                self._made.pop(name, None)
            raise

    def sweep(self) -> None:
        """Forget the sandboxes that no longer exist."""
        for name in [name for name, made in self._made.items() if made.done() and self._is_over(made)]:
            del self._made[name]

    def _is_over(self, made: asyncio.Future[HostedSandbox]) -> bool:
        return made.cancelled() or made.exception() is not None or not self._exists(made.result())


class Sandboxes:
    """All sandboxes of one server. Use it in an `async with` block, whose end ends them.

    `network` is the network of sandboxes whose request names none; `most_network` False refuses those that ask for one.
    """

    def __init__(
        self, pool: SlotPool, templates: Templates, endings: Endings, *, limits: Limits, network: Network = Network.ON
    ) -> None:
        self.pool, self.templates, self.endings, self.limits = pool, templates, endings, limits
        self._network = network
        self._found: dict[str, HostedSandbox] = {}
        self._key_limits = KeyLimits(self.of_key, templates)
        self._repeated = IdempotentRequests(lambda sandbox: sandbox.sandbox_id in self._found)
        self._jobs: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._found)

    async def __aenter__(self) -> Sandboxes:
        self._start_job(self._end_leases())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await end_tasks(*self._jobs)
        await asyncio.gather(
            *(self._end_sandbox(each, "the server was stopped") for each in list(self._found.values()))
        )

    # Lookups

    def of_key(self, key: ApiKey) -> list[HostedSandbox]:
        """Return the sandboxes of a key, oldest first."""
        return [each for each in self._found.values() if each.key == key]

    def get(self, key: ApiKey, sandbox_id: str) -> HostedSandbox:
        """Return a sandbox of a key. Raises `ApiError` with status 404."""
        found = self._found.get(sandbox_id)
        if found is None or found.key != key:
            raise not_found(sandbox_id[:100], self.endings.reason(sandbox_id, key.name))
        return found

    def inside(self, sandbox_id: str) -> HostedSandbox:
        """Return a sandbox for a call into it, whose caller is still to be checked. Raises `ApiError` with the status
        502, which the SDKs expect."""
        found = self._found.get(sandbox_id)
        if found is None:
            raise NotRunning(sandbox_id[:100], self.endings.reason(sandbox_id, None))
        return found

    def all(self) -> list[HostedSandbox]:
        """Return every sandbox of the server."""
        return list(self._found.values())

    # Life and death

    async def create(self, key: ApiKey, request: NewSandbox, idempotency: str = "") -> HostedSandbox:
        """Create a sandbox. A second request with the same idempotency key gets the sandbox of the first, as long as it
        exists. Raises `ApiError`."""
        if not idempotency:
            return await self._create_sandbox(key, request)
        return await self._repeated.once((key.name, idempotency), lambda: self._create_sandbox(key, request))

    async def _create_sandbox(self, key: ApiKey, request: NewSandbox) -> HostedSandbox:
        request.refuse_unsupported()
        network = self._allowed(request.wanted_network())
        template = self.templates.find(key, request.template)
        with self._key_limits.place(key):
            try:
                snapshot = await self.templates.prepared(template)
                sandbox = await self._begin_sandbox(key, template, request, network, snapshot, request.timeout_s)
            except SandboxError:
                if not await self.templates.is_lost(template):
                    raise
                snapshot = await self.templates.prepared(template)
                sandbox = await self._begin_sandbox(key, template, request, network, snapshot, request.timeout_s)
        if template.start_command and not await sandbox.run_start_command():
            await self._end_sandbox(sandbox, "its start command did not become ready")
            raise ApiError(504, f"the start command of {template.name} did not become ready in {_READY_S:g} s")
        template.spawned += 1
        return sandbox

    def _allowed(self, wanted: Network | AllowList | None) -> Network | AllowList:
        if wanted is None:
            return self._network
        if wanted is not Network.OFF and self._network is Network.OFF:
            raise ApiError(403, "sandboxes of this server have no network; leave out allow_internet_access and network")
        return wanted

    async def _begin_sandbox(
        self, key: ApiKey, template: Template, request: NewSandbox, network: Network | AllowList, snapshot: Snapshot,
        timeout_s: float,
    ) -> HostedSandbox:  # fmt: skip
        sandbox_id = "i" + "".join(secrets.choice(_ALPHABET) for _ in range(19))
        spec = replace(spec_of(template, snapshot), network=network, limits=self.limits)
        slot = await self.pool.acquire(sandbox_id, spec=spec, snapshot=snapshot)
        sandbox = HostedSandbox(sandbox_id, key, template, request, network, slot, time.time() + timeout_s)
        if request.network.allow_public_traffic is False:
            sandbox.traffic_token = secrets.token_urlsafe(24)
        self._found[sandbox_id] = sandbox
        self.endings.began(sandbox_id, key.name)
        return sandbox

    async def kill(self, key: ApiKey, sandbox_id: str) -> None:
        """End a sandbox. Raises `ApiError` with status 404."""
        await self._end_sandbox(self.get(key, sandbox_id), "it was killed")

    async def lost(self, sandbox: HostedSandbox, why: str) -> None:
        """End a sandbox whose slot has died."""
        await self._end_sandbox(sandbox, f"its slot died: {why}")

    async def _end_sandbox(self, sandbox: HostedSandbox, why: str) -> None:
        if self._found.pop(sandbox.sandbox_id, None) is None:
            return
        self.endings.ended(sandbox.sandbox_id, sandbox.key.name, why)
        async with sandbox.changing:
            await sandbox.processes.aclose(NotRunning(sandbox.sandbox_id, why))
            await sandbox.watchers.aclose()
            slot, sandbox.slot = sandbox.slot, None
            if slot is not None:
                await self.pool.release(slot)
            if sandbox.snapshot is not None:
                await self.pool.snapshots.forget(sandbox.snapshot)

    # Pause, resume, fork

    async def pause(self, sandbox: HostedSandbox, *, memory: bool) -> None:
        """Pause a running sandbox. Raises `ApiError`, with status 409 if it is paused already."""
        async with sandbox.changing:
            if sandbox.slot is None or sandbox.state is SandboxState.PAUSED:
                raise ApiError(409, f"the sandbox {sandbox.sandbox_id} is paused already")
            if not memory:
                self._key_limits.check_kept(sandbox.key)
            gone = NotRunning(sandbox.sandbox_id, "it was paused", remains=True)
            if memory:
                await sandbox.processes.stand_still(gone)
                await sandbox.slot.freeze()
            else:
                snapshot = await self._checkpoint(sandbox, continued=True)
                await sandbox.processes.aclose(gone)
                sandbox.processes = ProcessTable()
                slot, sandbox.slot, sandbox.snapshot = sandbox.slot, None, snapshot
                await self.pool.release(slot)
            await sandbox.watchers.aclose()
            sandbox.watchers, sandbox.state = Watchers(), SandboxState.PAUSED

    async def resume(self, sandbox: HostedSandbox, timeout_s: float, *, memory: bool | None = None) -> bool:
        """Resume a paused sandbox, and return whether it was paused. `memory` False starts it from its files alone. The
        lease of a running sandbox only becomes longer. Raises `ApiError`."""
        async with sandbox.changing:
            if sandbox.state is SandboxState.RUNNING:
                sandbox.set_timeout(timeout_s, only_longer=True)
                return False
            if sandbox.slot is not None and memory is False:
                await self._reboot(sandbox)
            elif sandbox.slot is not None:
                await sandbox.slot.stat("/")  # the first call thaws the processes
                sandbox.processes.go_on()
            else:
                with self._key_limits.place(sandbox.key):
                    await self._start_again(sandbox)
            sandbox.state = SandboxState.RUNNING
            sandbox.set_timeout(timeout_s)
            return True

    async def _reboot(self, sandbox: HostedSandbox) -> None:
        assert sandbox.slot is not None
        sandbox.snapshot = await self._checkpoint(sandbox, continued=True)
        await sandbox.processes.aclose(NotRunning(sandbox.sandbox_id, "it was rebooted", remains=True))
        sandbox.processes = ProcessTable()
        slot, sandbox.slot = sandbox.slot, None
        await self.pool.release(slot)
        await self._start_again(sandbox)

    async def _start_again(self, sandbox: HostedSandbox) -> None:
        snapshot = sandbox.snapshot
        assert snapshot is not None
        sandbox.slot = await self.pool.acquire(sandbox.sandbox_id, spec=snapshot.spec, snapshot=snapshot)
        sandbox.snapshot = None
        await self.pool.snapshots.forget(snapshot)

    async def fork(self, sandbox: HostedSandbox, count: int, timeout_s: float) -> list[HostedSandbox | ApiError]:
        """Start `count` sandboxes from the files of a running one; each succeeds or fails alone. Raises `ApiError` if
        the sandbox does not run."""
        async with sandbox.changing:
            sandbox.check_running()
            snapshot = await self._checkpoint(sandbox)

        async def start_fork() -> HostedSandbox | ApiError:
            try:
                with self._key_limits.place(sandbox.key):
                    return await self._begin_sandbox(
                        sandbox.key, sandbox.template, sandbox.request, sandbox.network, snapshot, timeout_s
                    )
            except (ApiError, PalaestraError) as error:
                return api_error(error, sandbox.sandbox_id)

        try:
            return list(await asyncio.gather(*(start_fork() for _ in range(count))))
        finally:
            await self.pool.snapshots.forget(snapshot)

    async def save(self, sandbox: HostedSandbox, name: str | None) -> Template:
        """Keep the files of a running sandbox as a snapshot, from which its key can start sandboxes. Raises
        `ApiError`."""
        async with sandbox.changing:
            sandbox.check_running()
            self._key_limits.check_kept(sandbox.key)
            files = await self._checkpoint(sandbox)
        template_id = "s" + "".join(secrets.choice(_ALPHABET) for _ in range(19))
        names = () if name is None else (name if ":" in name else f"{name}:default",)
        saved = replace(
            sandbox.template, template_id=template_id, names=names, owner=sandbox.key.name, snapshot=files,
            source=sandbox.sandbox_id, spawned=0, created_at=time.time(), start_command="", ready_command="",
        )  # fmt: skip
        self.templates.add(saved)
        return saved

    async def _checkpoint(self, sandbox: HostedSandbox, *, continued: bool = False) -> Snapshot:
        assert sandbox.slot is not None
        try:
            snapshot = await self.pool.checkpoint(sandbox.slot)
        except SlotLost as error:
            self._start_job(self.lost(sandbox, str(error)))
            raise not_found(sandbox.sandbox_id, str(error)) from None
        except InfraError as error:  # the isolation level cannot copy a running slot
            raise ApiError(400, str(error)) from None
        return self.pool.snapshots.continued(snapshot) if continued else snapshot

    # Jobs

    def _start_job(self, work: JSON) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            now = time.time()
            for sandbox in list(self._found.values()):
                if sandbox.state is SandboxState.RUNNING and sandbox.ends_at <= now and not sandbox.changing.locked():
                    self._start_job(self._on_timeout(sandbox))
            self._repeated.sweep()

    async def _on_timeout(self, sandbox: HostedSandbox) -> None:
        """End a sandbox whose lease is over, or pause it if its request says so."""
        if sandbox.request.auto_pause:
            try:
                await self.pause(sandbox, memory=sandbox.request.auto_pause_memory)
                return
            except (ApiError, PalaestraError) as error:
                if sandbox.state is SandboxState.PAUSED or sandbox.ends_at > time.time():
                    return
                _log.warning(
                    "%s could not be paused at the end of its lease and is killed: %s", sandbox.sandbox_id, error
                )
        if sandbox.ends_at <= time.time():
            await self._end_sandbox(sandbox, "its lease ended; a longer timeout would have kept it")


@asynccontextmanager
async def resumed(sandboxes: Sandboxes, sandbox: HostedSandbox) -> AsyncIterator[Slot]:
    """Yield the slot of a sandbox for one call into it; a paused sandbox whose request allows it is resumed first. If
    the slot turns out to be dead, the sandbox ends."""
    if sandbox.state is SandboxState.PAUSED and sandbox.request.auto_resume.enabled:
        await sandboxes.resume(sandbox, sandbox.request.timeout_s)
    try:
        yield sandbox.running_slot
    except SlotLost as error:
        await sandboxes.lost(sandbox, str(error))
        raise NotRunning(sandbox.sandbox_id, str(error)) from None
