"""Makes and ends the slots of one slot server. All backends of this package use it, wherever their servers run.

A subclass defines how the server starts, and which parts of a `SlotSpec` are available where the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Self

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError, SlotLost
from palaestra_slots.core.types import JSON, AllowList, Limits, Network
from palaestra_slots.sandbox.isolation.self_test import prove, with_remedy
from palaestra_slots.sandbox.local.client import Requests, SlotClient
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.slot import WORKSPACE, Change, Mount, Rung, Slot, SlotSpec, Snapshot, View
from palaestra_slots.sandbox.slotd.protocol.frames import Fields

BUILT = (Rung.FULL, Rung.USERNS, Rung.CONFINED, Rung.NONE)  # best first; NONE is used only if requested by name

_LEVEL_FIX = "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
_LEVEL_FIX += "user.max_user_namespaces > 0); `palaestra doctor` shows what this machine can do"

_NARROWER = "use a level with namespaces and /dev/net/tun, or give a list of hosts"

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_log = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class LevelRequest:
    """The isolation level that a caller wants exactly, and the lowest one that it accepts; None means any."""

    wanted: Rung | None
    required: Rung | None

    def candidates(self) -> list[Rung]:
        """Return the levels to try, the best first. Raises `ConfigError` if the wanted level is below the required
        one."""
        wanted = [rung for rung in BUILT if rung > Rung.NONE] if self.wanted is None else [self.wanted]
        allowed = [rung for rung in wanted if rung >= (self.required or rung)]
        if not allowed:
            raise ConfigError(
                f"{_level_name(self.wanted)} isolation is requested, but {_level_name(self.required)} or better is "
                "required: change isolation, or do not require a sandbox"
            )
        return allowed


class StartedBackend(ABC):
    """A backend that `async with` starts and closes."""

    image_kinds: tuple[str, ...] = ()
    """The kinds of images that the backend supports: `name` (known to the platform) or `path` (on this machine)."""

    @property
    def credentials(self) -> str:
        """The identity with which the backend logs in to its platform, without secrets."""
        return "none needed"

    @property
    def level_fix(self) -> str:
        """The remedy if the requested isolation level is not available."""
        return _LEVEL_FIX

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class ServerBackend(StartedBackend):
    """One slot server and its slots. `rung` requests exactly that isolation level, and `require` requests that level or
    a better one. By default, the server runs at the best available level other than `none`. If the server dies, its
    slots are lost, and the next request for a slot starts the server again.
    """

    name: str
    where = "here"
    """How messages describe where the slots are."""
    joins_slots = False
    """Whether slots can be joined by networks of their own (`SlotSpec.group`)."""
    joins_fix = "use the backend local at the level userns or full"
    """The remedy if slots cannot be joined."""
    in_image = ""
    """How messages describe the image that the server runs in."""

    def __init__(self, *, rung: Rung | None = None, require: Rung | None = None) -> None:
        self._request = LevelRequest(rung, require)
        self._server: SlotClient | None = None
        self._rung: Rung | None = None
        self._slots: dict[int, LocalSlot] = {}
        self._lost = 0
        self._never_ran = False
        """Whether the last start ended before the server sent anything."""
        self._last_epoch = 0
        self._restarting = asyncio.Lock()

    def begin_at(self, epoch: int) -> None:
        """Set the lowest epoch of this backend's leases. Call it before the first lease."""
        self._last_epoch = epoch

    @property
    def image_has_accounts(self) -> bool:
        """Whether the slots' default root is an image that has passwords, which are not the host's."""
        return False

    @property
    def places_workspace(self) -> bool:
        """Whether slots can have their workspace at a second path (`SlotSpec.workspace`)."""
        return self.rung >= Rung.USERNS

    @property
    def copies_folders(self) -> bool:
        """Whether slots can begin with directories of this machine (`SlotSpec.copies`)."""
        return False

    @abstractmethod
    async def _start_server(self, rung: Rung) -> None:
        """Start the server at an isolation level. Raises `SandboxError` or `OSError`."""

    @abstractmethod
    async def _place(self, spec: SlotSpec) -> dict[str, JSON]:
        """Return the fields `image`, `mounts`, `env` and `allow` for a request for a slot. Raises `ConfigError` if the
        spec needs something that is not available where the server runs."""

    async def start(self) -> None:
        """Start the server at the best allowed level, and prove the level in a throw-away slot. Idempotent.

        If every level fails, raises `IsolationUnavailable` with the reasons, before any other slot exists. Raises
        `SandboxError` instead if no server ran, or if several levels were tried and all failed for the same reason.
        Raises `ConfigError` if the requested level is lower than the required one.
        """
        if self._server is not None:
            return
        reasons: dict[str, str] = {}
        spoke = False
        for rung in self._request.candidates():
            reason = await self.attempt(rung)
            if reason is None:
                return
            reasons[rung.label] = reason
            spoke = spoke or not self._never_ran
        same = len(reasons) > 1 and len(set(reasons.values())) == 1
        if same or not spoke:  # in these cases, the level is not the cause
            raise SandboxError(f"{self.name} cannot start slots{self.in_image}: {reason}")
        found = "; ".join(f"{label}: {reason}" for label, reason in reasons.items())
        any_level = self._request == LevelRequest(None, None)
        what = "no isolation is available" if any_level else "the requested isolation is not available"
        raise IsolationUnavailable(f"{what} {self.where} ({found}). To fix it: {self.level_fix}.")

    async def attempt(self, rung: Rung) -> str | None:
        """Start at one level and prove it. Returns None, or the reason for a failure, after which nothing is left
        running."""
        try:
            await self._start_at_level(rung)
            hello = self._running_server().hello
            if not hello.get("leases"):  # the level of a service with leases was proved when the service was started
                slot = await self.create(SlotSpec(), "proof")
                is_root, accounts = hello.get("uid", os.geteuid()) == 0, self.image_has_accounts
                await prove(slot, server_is_root=is_root, image_has_accounts=accounts)
                await self.destroy(slot)
        except (SandboxError, OSError) as error:
            self._never_ran = isinstance(error, SlotLost) and self._server is None
            await self.aclose()
            return with_remedy(str(error))
        except BaseException:
            await self.aclose()
            raise
        return None

    async def _start_at_level(self, rung: Rung) -> None:
        self._rung = rung
        await self._start_server(rung)

    async def aclose(self) -> None:
        """End the server, every slot and every layer. Idempotent."""
        server, self._server = self._server, None
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        if server is not None:
            await server.aclose()

    @property
    def rung(self) -> Rung:
        """The isolation level in force. Before `start`, this is the requested level, or `full` if none is requested."""
        chosen = self._request.wanted if self._rung is None else self._rung
        return Rung.FULL if chosen is None else chosen  # not `or`: `none` is 0

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """Return a new slot. If a snapshot is given, the slot starts from it, and `spec.image` must be the snapshot's
        image.

        If the slot shares the machine's network, a warning is logged; raises `IsolationUnavailable` instead if
        `require` was given.
        """
        self._check_spec(spec, snapshot)
        fields: dict[str, JSON] = {
            **await self._place(spec),
            "layers": [] if snapshot is None else list(snapshot.layers),
            "network": spec.network is Network.ON,
            "limits": limits_of(spec.limits),
            **self._about(trajectory_id, spec),
        }
        fields |= _asked_for(spec)
        if snapshot is not None and snapshot.continued:
            fields["continued"] = True
        server = await self._living()
        made, requests = await server.create(fields)
        # Only the server knows, because it depends on what the kernel allowed when the slot was made.
        if made["exposed"]:
            shared = "slots with the network on share the network of this machine and reach its loopback and cloud "
            shared += f"metadata addresses ({made['exposed']}): {_NARROWER}"
            if self._request.required is not None:
                # The slot already exists, and nobody else would end it.
                await requests.call("destroy", {"slot": made["slot"], "epoch": made["epoch"]})
                raise IsolationUnavailable(shared)
            _warn_once(shared)
        return self._register_slot(server, requests, made, spec, trajectory_id)

    def _check_spec(self, spec: SlotSpec, snapshot: Snapshot | None) -> None:
        """Raise `ConfigError` if the backend cannot make such a slot at its level."""
        if snapshot is not None and snapshot.spec.image != spec.image:
            raise ConfigError(f"a snapshot of image {snapshot.spec.image} cannot start a slot of image {spec.image}")
        if spec.group is not None and not (self.joins_slots and self.rung >= Rung.USERNS):
            raise ConfigError(
                f"slots of the backend {self.name} cannot be joined by a network of their own at {self.rung.label}: "
                f"{self.joins_fix}"
            )
        if spec.workspace and not self.places_workspace:
            raise ConfigError(
                f"slots of the backend {self.name} have their workspace only at {WORKSPACE} at {self.rung.label}: "
                "leave out the workspace's path, or use the level userns or full"
            )
        if spec.copies and not self.copies_folders:
            raise ConfigError(
                f"slots of the backend {self.name} at {self.rung.label} cannot begin with directories of this machine: "
                "use the backend local at the level userns or full"
            )

    def _about(self, trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
        """Return the fields that describe a slot to the next client, if the server keeps slots for its next client."""
        return {}

    def _register_slot(
        self, server: SlotClient, requests: Requests, lease: Mapping[str, JSON], spec: SlotSpec, trajectory_id: str
    ) -> LocalSlot:
        name, epoch = lease["slot"], lease["epoch"]
        slot = LocalSlot(requests, name, epoch, self.rung, spec, trajectory_id, self._forked, server.loop)
        self._last_epoch = max(self._last_epoch, epoch)
        return self._slots.setdefault(epoch, slot)

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and its processes (a pidfd proves that they are gone), and return a snapshot whose topmost layer
        is the slot's changes, limited to `view`."""
        ours = self._local_slot(slot)
        fields = {**ours.lease(), "view": _view_fields(view)}
        # Before the request, so that no call of the holder reaches a slot that is being sealed.
        ours.release()
        self._slots.pop(ours.epoch, None)
        return snapshot_of(await ours.requests.make("seal", fields, forget_topmost), ours.spec)

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """Return a snapshot of the slot's current files. The slot's processes are stopped while the files are copied.

        Files that have not changed since the slot's last checkpoint are shared with that checkpoint, so the cost grows
        with the changes since then. Raises `SandboxError` if a process does not stop, and at levels below `userns`.
        """
        ours = self._local_slot(slot)
        return snapshot_of(await ours.requests.make("checkpoint", ours.lease(), forget_topmost), ours.spec)

    @contextlib.asynccontextmanager
    async def _forked(self, slot: LocalSlot, network: Network | AllowList) -> AsyncIterator[Slot]:
        snapshot = await self.checkpoint(slot)
        try:
            spec = replace(snapshot.spec, network=network)
            fork = await self.create(spec, f"{slot.trajectory_id} fork", snapshot)
            try:
                yield fork
            finally:
                await self.destroy(fork)
        finally:
            await self.forget(snapshot)

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """Return a second snapshot of the same files, limited to `view`. Unlike `seal(slot, view)`, this makes a hard
        link for each file in the topmost layer, or copies the layer to memory if it was loaded from disk."""
        fields: dict[str, JSON] = {"layers": list(snapshot.layers), "view": _view_fields(view)}
        return snapshot_of(await self._running_server().make("view", fields, forget_topmost), snapshot.spec)

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """Return the changes in the topmost layer, sorted by path."""
        found = await self._running_server().listing("layer_changes", {"layers": list(snapshot.layers)})
        return [Change(**change) for change in found]

    async def destroy(self, slot: Slot) -> None:
        """End the slot and drop its files. Does nothing if the slot is already gone."""
        ours = self._local_slot(slot)
        if ours.released:
            return
        fields = ours.lease()
        ours.release()
        self._slots.pop(ours.epoch, None)
        with contextlib.suppress(SlotLost):  # in this case, the slot has ended with its server
            await ours.requests.call("destroy", fields)

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer once no slot uses that layer. Does nothing if the layer is already
        gone."""
        await self._forget_layers(snapshot.layers[:1])

    async def _forget_layers(self, layers: Sequence[str]) -> None:
        if self._server is not None:
            await self._running_server().call("forget", {"layers": list(layers)})

    def stats(self) -> Mapping[str, JSON]:
        """Return the current counts, as `Backend.stats` describes."""
        return {"backend": self.name, "rung": self.rung.label, "slots": len(self._slots), "lost": self._lost}

    async def _living(self) -> SlotClient:
        """Return the running server. If the server has died, start a new one; the slots and snapshots of the old server
        are lost."""
        # Several callers may find the server dead, but only one may start it again.
        async with self._restarting:
            server, rung = self._running_server(), self.rung
            if server.ended:
                self._slots.clear()
                await server.aclose()
                await self._start_at_level(rung)
            return self._running_server()

    def _running_server(self) -> SlotClient:
        if self._server is None:
            raise SandboxError(f"the {self.name} backend is not running; call start() first")
        return self._server

    def _local_slot(self, slot: Slot) -> LocalSlot:
        if not isinstance(slot, LocalSlot):
            raise TypeError(f"{slot!r} is not a slot of the {self.name} backend")
        return slot

    def _on_lost(self, name: str, epoch: int) -> None:
        if not name:  # an empty name stands for the whole server, whose end every call will report
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


def _level_name(rung: Rung | None) -> str:
    return "any" if rung is None else rung.label


def levels(isolation: str, require_sandbox: bool = False) -> tuple[Rung | None, Rung | None]:
    """Return `rung` and `require` for a backend, from `best` or the name of an isolation level. Raises `ConfigError`
    for an unknown name."""
    require = Rung.USERNS if require_sandbox else None
    if isolation == "best":
        return None, require
    names = {rung.label: rung for rung in Rung}
    if isolation not in names:
        raise ConfigError(f"unknown isolation {isolation!r}; use best, {', '.join(reversed(names))}")
    return names[isolation], require


def allowed_hosts(spec: SlotSpec) -> JSON:
    """Return the hosts that the slot may reach; None if the spec has no list of hosts. Raises `ConfigError` for an
    invalid host."""
    if not isinstance(spec.network, AllowList):
        return None
    from palaestra_slots.sandbox.slotd.network import allowlist  # imported here, because few slots have such a list

    for host in spec.network.hosts:
        try:
            allowlist.parse(host)
        except ValueError as error:
            raise ConfigError(f"invalid list of hosts: {error}") from None
    return list(spec.network.hosts)


@functools.lru_cache(maxsize=64)
def limits_of(limits: Limits) -> Fields:
    """Return the field `limits` of a request. Most slots of a run have the same limits, so do not change it."""
    return asdict(limits)


@functools.cache
def host_path() -> str:
    """Return the PATH of slots that use this machine's system directories: it includes the directory of this Python."""
    own = os.path.join(os.path.realpath(sys.base_prefix), "bin")
    return SYSTEM_PATH if own in SYSTEM_PATH.split(":") else f"{own}:{SYSTEM_PATH}"


def environment(
    spec: SlotSpec, path: str = SYSTEM_PATH, of_image: Mapping[str, str] = MappingProxyType({})
) -> dict[str, JSON]:
    """Return the environment variables for every command of a slot: the spec's own come before those of its image.
    Programs of declared packages come first, as in a virtual environment."""
    own = dict(spec.env)
    path = own.get("PATH") or of_image.get("PATH") or path
    if spec.mounts:
        from palaestra_slots.sandbox.python_call import PACKAGES_DIR  # imported here, because most slots have no mounts

        if any(mount.target == PACKAGES_DIR for mount in spec.mounts):
            path = f"{PACKAGES_DIR}/bin:{path}"
    usual = {"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
    return {**usual, **of_image, **_proxies(spec), **own, "PATH": path}


def _proxies(spec: SlotSpec) -> dict[str, str]:
    """Return the proxy variables of a slot with a list of hosts."""
    if not isinstance(spec.network, AllowList):
        return {}
    from palaestra_slots.sandbox.slotd.network.allowlist import PROXY_PORT  # imported here, as above

    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    own = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    return {**dict.fromkeys(names, f"http://127.0.0.1:{PROXY_PORT}"), **own}


def mounts_of(mounts: Sequence[Mount]) -> list[list[str | bool]]:
    """Return these mounts of directories of this machine for a request. Raises `ConfigError` for one that cannot be
    mounted."""
    for mount in mounts:
        if not os.path.isdir(mount.source):
            raise ConfigError(f"cannot mount {mount.source!r} into a slot: it is not a directory on this machine")
        if not os.path.isabs(mount.target) or os.path.normpath(mount.target) == "/":
            raise ConfigError(f"cannot mount at {mount.target!r}: give an absolute path below the root")
    # The server finds the path below /host, where an absolute link in it would lead elsewhere.
    real = (Mount(os.path.realpath(each.source), os.path.normpath(each.target), each.whole) for each in mounts)
    return [mount.fields for mount in real]


def _asked_for(spec: SlotSpec) -> dict[str, JSON]:
    """Return the fields for what few slots ask for."""
    fields: dict[str, JSON] = {}
    if spec.on_demand:
        fields["on_demand"] = list(spec.on_demand)
    if spec.workspace:
        fields["workspace"] = spec.workspace
    if spec.copies:
        fields["copies"] = mounts_of(spec.copies)
    if spec.group is not None:
        fields["group"] = [spec.group.group, spec.group.number, spec.group.members]
    return fields


def _view_fields(view: View | None) -> JSON:
    return None if view is None else {"only": list(view.only), "without": list(view.without)}


def forget_topmost(made: dict[str, JSON]) -> tuple[str, dict[str, JSON]]:
    """Return the request that drops a new snapshot. It drops only the topmost layer, because the layers below belong to
    other snapshots."""
    return "forget", {"layers": made["layers"][:1]}


def snapshot_of(fields: Mapping[str, JSON], spec: SlotSpec) -> Snapshot:
    layers = tuple(fields["layers"])
    return Snapshot(layers[0], layers, spec if spec.group is None else replace(spec, group=None))
