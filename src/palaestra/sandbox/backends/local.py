"""Slots on this machine's own kernel, without a container runtime.

`full` and `userns`: a slot is a set of namespaces around a copy-on-write root; forks stack layers, whatever their size.
Covered: processes, mounts, IPC, host name and (network off) network; a root with only the image or an allow-list of
system directories; no new privileges, few capabilities, a system call filter; limits on disk, open files and output. If
a process of ours is killed, the kernel ends all slots. A list of hosts needs root: the slot's network is empty except
for a proxy that enforces the list.

`full` needs root. The slot's root is a private uid outside, the same range for all slots of a backend; owners of system
files are mapped, so the slot can change everything in its root. Control groups limit memory (with files in the
workspace and /tmp), processes and processor.

`userns` needs no root. The slot's root is the caller (for root: a private uid range), and no other user exists: system
files cannot be changed, `chown` to other users fails. Memory is limited per process; processor time is not limited.

`confined` is for ordinary containers, which allow no namespaces. A slot is a directory with Landlock, a system call
filter, limits per process and, for root, a user. Covered: files outside its own workspace, home and TMPDIR (it can read
the system's programs and settings), signals, tracing, System V objects; with the network off TCP, UDP and abstract
sockets. Not covered: names and command lines of all processes in the container, sockets that are files open to all
users (without root: to the same user), total disk and memory, processor time; before Linux 6.12 abstract sockets while
the network is on. Differences for commands: no list of hosts, no image, mounts only at their own path; `/workspace` is
a link, if root could make it (lost by programs that close all descriptors); TMPDIR instead of /tmp; absolute paths into
a workspace do not hold in its forks, which are copies. Without root there is one slot at a time, and a command in it
can end it.

`none`, only by name, runs commands as the caller in a temporary directory. Nothing is isolated.

Not covered at any level: kernel bugs, and side channels between slots. A slot with the network on shares the host's
network namespace with its loopback and abstract sockets, and reaches cloud metadata addresses except on `full` with
control groups of version 2; a list of hosts never leads to them. A slot can read files under the host's /usr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path

from palaestra.core.errors import ConfigError, IsolationUnavailable, SandboxError, SlotLost
from palaestra.core.types import JSON, AllowList, Network
from palaestra.sandbox.images.image_store import ImageStore
from palaestra.sandbox.isolation.self_test import explain, prove
from palaestra.sandbox.local.client import Requests, SlotClient
from palaestra.sandbox.local.direct.direct_slot import DirectClient
from palaestra.sandbox.local.local_slot import LocalSlot
from palaestra.sandbox.service import service_client
from palaestra.sandbox.slot import Change, Rung, Slot, SlotSpec, Snapshot, View, decode_lease, encode_lease
from palaestra.sandbox.slotd.network import allowlist

BUILT = (Rung.FULL, Rung.USERNS, Rung.CONFINED, Rung.NONE)  # best first; the last only if asked for by name

_TO_FIX = "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
_TO_FIX += "user.max_user_namespaces > 0); `palaestra doctor` shows what this machine can do"
_NARROWER = "give a list of hosts instead, or run as root"

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class LocalBackend:
    """One slot server and its slots. `rung` asks for exactly that isolation level, `require` for that one or better.

    The default is the best available level. With `service`, a name, the slots live in a process of their own: they
    stay when this backend is closed or dies, and the next backend of that name has them in `leases`.
    """

    name = "local"

    def __init__(
        self,
        *,
        rung: Rung | None = None,
        require: Rung | None = None,
        images: ImageStore | None = None,
        service: str | None = None,
        service_directory: Path | None = None,
    ) -> None:
        self._wanted, self._required = rung, require
        self._images = images
        self._service = None if service is None else service_client.socket_path(service, service_directory)
        self._server: SlotClient | None = None
        self._rung: Rung | None = None
        self._slots: dict[int, LocalSlot] = {}
        self._loaded: dict[str, tuple[str, ...]] = {}
        self._lost = 0
        self._last_epoch = 0
        self._restarting = asyncio.Lock()
        self._bin_dir = os.path.join(os.path.realpath(sys.base_prefix), "bin")

    @classmethod
    def from_isolation(cls, isolation: str, *, require_sandbox: bool = False) -> LocalBackend:
        """From `best` or the name of an isolation level. Raises `ConfigError` for another value."""
        require = Rung.USERNS if require_sandbox else None
        if isolation == "best":
            return cls(require=require)
        names = {rung.label: rung for rung in Rung}
        if isolation not in names:
            raise ConfigError(f"unknown isolation {isolation!r}; use best, {', '.join(reversed(names))}")
        return cls(rung=names[isolation], require=require)

    async def start(self) -> None:
        """Start the server at the best allowed level and prove it in a throw-away slot. Idempotent.

        Raises `IsolationUnavailable`, with the reasons, before any other slot exists.
        """
        if self._server is not None:
            return
        reasons = []
        for rung in self._candidates():
            reason = await self.attempt(rung)
            if reason is None:
                return
            reasons.append(f"{rung.label}: {reason}")
        raise IsolationUnavailable(f"no isolation is available here ({'; '.join(reasons)}). To fix it: {_TO_FIX}.")

    def _candidates(self) -> list[Rung]:
        wanted = [rung for rung in BUILT if rung > Rung.NONE] if self._wanted is None else [self._wanted]
        allowed = [rung for rung in wanted if rung >= (self._required or rung)]
        if not allowed:
            raise ConfigError(
                f"{_name(self._wanted)} isolation is asked for, but {_name(self._required)} or better is required"
            )
        return allowed

    async def attempt(self, rung: Rung) -> str | None:
        """Start at one level and prove it; returns the reason for a failure, after which nothing is left running."""
        try:
            await self._start_server(rung)
            if not self._running().hello.get("leases"):  # a service with leases was proved when it was started
                slot = await self.create(SlotSpec(), "proof")
                await prove(slot)
                await self.destroy(slot)
        except (SandboxError, OSError) as error:
            await self.aclose()
            return explain(str(error))
        except BaseException:
            await self.aclose()
            raise
        return None

    async def _start_server(self, rung: Rung) -> None:
        prefix = _interpreter_prefix()
        self._rung = rung
        settings = {"prefix": prefix, "first_epoch": self._last_epoch + 1}
        if self._service is None:
            kind = DirectClient if rung is Rung.FULL else SlotClient  # the one place that plugs in the direct path
            self._server = await kind.start(rung.label, settings, self._on_lost)
        else:
            self._server = await service_client.attach(self._service, rung.label, settings, self._on_lost)

    async def aclose(self) -> None:
        """End the server, every slot and every layer; detach from a service, which keeps its slots. Idempotent."""
        server, self._server = self._server, None
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        if server is not None:
            await server.aclose()
        if self._images is not None:
            await self._images.aclose()

    async def end(self) -> None:
        """Close, and end the service with all its slots if there is one."""
        await self.aclose()
        if self._service is not None:
            await service_client.end(self._service)

    @property
    def stays(self) -> bool:
        """Whether it is a service, whose slots stay when it is closed or dies."""
        return self._service is not None

    def leases(self) -> list[Slot]:
        """The slots that a service held when this backend attached to it, under new leases."""
        server, found = self._running(), []
        for lease in server.hello.get("leases", ()):
            trajectory_id, spec = decode_lease(lease["about"])
            found.append(self._add(server, server, lease, spec, trajectory_id))
        return list(found)

    async def __aenter__(self) -> LocalBackend:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def rung(self) -> Rung:
        """The isolation level in force; before `start`, the requested or best one."""
        chosen = self._wanted if self._rung is None else self._rung
        return Rung.FULL if chosen is None else chosen  # not `or`: `none` is 0

    @property
    def capacity(self) -> int | None:
        """The number of slots there can be: one on `confined` without root, where a second would be the same user."""
        return 1 if self.rung is Rung.CONFINED and os.geteuid() != 0 else None

    @property
    def server_pid(self) -> int:
        """The process that watches the slot server."""
        return self._running().pid

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """A new slot. `spec.image` must be that of the snapshot."""
        if snapshot is not None and snapshot.spec.image != spec.image:
            raise ConfigError(f"a snapshot of image {snapshot.spec.image} cannot start a slot of image {spec.image}")
        image = await self._image(spec)
        fields: dict[str, JSON] = {
            "image": image,
            "layers": [] if snapshot is None else list(snapshot.layers),
            "network": spec.network is Network.ON,
            "allow": _allowed(spec),
            "limits": asdict(spec.limits),
            "mounts": _mounts(spec),
            "env": _environment(spec, self._bin_dir if image is None else ""),
        }
        if self._service is not None:
            fields["about"] = encode_lease(trajectory_id, spec)
        server = await self._living()
        made, requests = await server.create(fields)
        if made["exposed"]:
            _warn_once(f"slots with the network on reach cloud metadata addresses here: {made['exposed']}; {_NARROWER}")
        return self._add(server, requests, made, spec, trajectory_id)

    async def _image(self, spec: SlotSpec) -> str | None:
        """The directory of the spec's image."""
        if spec.image is None:
            return None
        self._images = self._images or ImageStore()
        return await self._images.directory(spec.image)

    def _add(
        self, server: SlotClient, requests: Requests, lease: Mapping[str, JSON], spec: SlotSpec, trajectory_id: str
    ) -> LocalSlot:
        name, epoch = lease["slot"], lease["epoch"]
        slot = LocalSlot(requests, name, epoch, self.rung, spec, trajectory_id, self._forked, server.loop)
        self._last_epoch = max(self._last_epoch, epoch)
        return self._slots.setdefault(epoch, slot)

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and its processes (proved by pidfd); its change, cut to `view`, becomes an immutable layer."""
        ours = self._own(slot)
        fields = {**ours.lease(), "view": _view(view)}
        ours.release()
        self._slots.pop(ours.epoch, None)
        return _snapshot(await ours.requests.make("seal", fields, _forget_topmost), ours.spec)

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """The slot's present files; its processes are stopped meanwhile, then continue.

        Files are shared with the slot's last checkpoint; the cost grows with the change since then. Raises
        `SandboxError` for a process that does not stop, and at isolation levels without layers.
        """
        ours = self._own(slot)
        return _snapshot(await ours.requests.make("checkpoint", ours.lease(), _forget_topmost), ours.spec)

    @contextlib.asynccontextmanager
    async def _forked(self, slot: LocalSlot) -> AsyncIterator[Slot]:
        snapshot = await self.checkpoint(slot)
        try:
            fork = await self.create(slot.spec, f"{slot.trajectory_id} fork", snapshot)
            try:
                yield fork
            finally:
                await self.destroy(fork)
        finally:
            await self.forget(snapshot)

    async def save(self, snapshot: Snapshot, folder: str) -> int:
        """Copy a snapshot to an empty folder of this machine, with whiteouts and owners; the bytes of its files."""
        fields: dict[str, JSON] = {"layers": list(snapshot.layers), "folder": os.path.realpath(folder)}
        reply = await self._running().call("save", fields)
        return int(reply.fields["bytes"])

    async def load(self, folder: str, spec: SlotSpec) -> Snapshot:
        """A saved snapshot, used in place; meanwhile the server locks the folder (flock, shared).

        Raises FileNotFoundError if it is gone.
        """
        fields: dict[str, JSON] = {"folder": os.path.realpath(folder), "image": await self._image(spec)}
        server = await self._living()
        snapshot = _snapshot(await server.make("load", fields, lambda made: ("forget", made)), spec)
        self._loaded[snapshot.snapshot_id] = snapshot.layers
        return snapshot

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """A second, cut snapshot of the same files. It costs a link per changed file, `seal(slot, view)` does not."""
        fields: dict[str, JSON] = {"layers": list(snapshot.layers), "view": _view(view)}
        return _snapshot(await self._running().make("view", fields, _forget_topmost), snapshot.spec)

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """The changes in the topmost layer, sorted by path."""
        found = await self._running().listing("layer_changes", {"layers": list(snapshot.layers)})
        return [Change(**change) for change in found]

    async def destroy(self, slot: Slot) -> None:
        """End the slot and drop its files. Does nothing if it is gone already."""
        ours = self._own(slot)
        if ours.released:
            return
        fields = ours.lease()
        ours.release()
        self._slots.pop(ours.epoch, None)
        with contextlib.suppress(SlotLost):  # then it has ended with its server
            await ours.requests.call("destroy", fields)

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer once no slot uses it. Does nothing if it is gone already."""
        layers = self._loaded.pop(snapshot.snapshot_id, snapshot.layers[:1])
        if self._server is not None:
            await self._running().call("forget", {"layers": list(layers)})

    def stats(self) -> Mapping[str, JSON]:
        """The present counts."""
        return {"backend": self.name, "rung": self.rung.label, "slots": len(self._slots), "lost": self._lost}

    async def _living(self) -> SlotClient:
        """The server, started again if it has died. Its slots and snapshots are lost then."""
        async with self._restarting:
            server, rung = self._running(), self.rung
            if server.ended:
                self._slots.clear()
                await server.aclose()
                await self._start_server(rung)
            return self._running()

    def _running(self) -> SlotClient:
        if self._server is None:
            raise SandboxError("the local backend is not running; call start() first")
        return self._server

    def _own(self, slot: Slot) -> LocalSlot:
        if not isinstance(slot, LocalSlot):
            raise TypeError(f"{slot!r} is not a slot of the local backend")
        return slot

    def _on_lost(self, name: str, epoch: int) -> None:
        if not name:  # the whole server, which every call will report
            for slot in self._slots.values():
                slot.requests.slot_ended()
            return
        if epoch in self._slots:
            self._slots[epoch].requests.slot_ended()
        self._lost += 1


def _warn_once(note: str) -> None:
    if note not in _warned:
        _warned.add(note)
        _log.warning("%s", note)


def _name(rung: Rung | None) -> str:
    return "any" if rung is None else rung.label


def _interpreter_prefix() -> str:
    """Where the running interpreter is installed, unless slots see it anyway."""
    prefix = os.path.realpath(sys.base_prefix)
    return "" if f"{prefix}/".startswith("/usr/") else prefix


_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _environment(spec: SlotSpec, bin_dir: str) -> dict[str, JSON]:
    """The variables of all commands of a slot; `bin_dir`, if given, comes first in PATH."""
    path = f"{bin_dir}:{_SYSTEM_PATH}" if bin_dir and bin_dir not in _SYSTEM_PATH.split(":") else _SYSTEM_PATH
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **_proxies(spec), **dict(spec.env)}


def _proxies(spec: SlotSpec) -> dict[str, str]:
    """The proxy variables of a slot with a list of hosts."""
    if not isinstance(spec.network, AllowList):
        return {}
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    own = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    return {**dict.fromkeys(names, f"http://127.0.0.1:{allowlist.PROXY_PORT}"), **own}


def _allowed(spec: SlotSpec) -> JSON:
    if not isinstance(spec.network, AllowList):
        return None
    for host in spec.network.hosts:
        try:
            allowlist.parse(host)
        except ValueError as error:
            raise ConfigError(f"a slot's list of hosts: {error}") from None
    if os.geteuid() != 0:  # the proxy's socket is made inside the slot's network namespace, which setns() guards
        raise IsolationUnavailable("a list of hosts needs root here; use network 'on' or 'off', or run as root")
    return list(spec.network.hosts)


def _mounts(spec: SlotSpec) -> list[list[str]]:
    for mount in spec.mounts:
        if not os.path.isdir(mount.source):
            raise ConfigError(f"cannot mount {mount.source!r} into a slot: it is not a directory on this machine")
        if not os.path.isabs(mount.target) or os.path.normpath(mount.target) == "/":
            raise ConfigError(f"cannot mount at {mount.target!r}: give an absolute path below the root")
    return [[os.path.realpath(mount.source), os.path.normpath(mount.target)] for mount in spec.mounts]


def _view(view: View | None) -> JSON:
    return None if view is None else {"only": list(view.only), "without": list(view.without)}


def _forget_topmost(made: dict[str, JSON]) -> tuple[str, dict[str, JSON]]:
    """The request that drops a new snapshot; the layers below its topmost one belong to others."""
    return "forget", {"layers": made["layers"][:1]}


def _snapshot(fields: Mapping[str, JSON], spec: SlotSpec) -> Snapshot:
    layers = tuple(fields["layers"])
    return Snapshot(layers[0], layers, spec)
