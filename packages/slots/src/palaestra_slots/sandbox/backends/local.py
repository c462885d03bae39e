"""Runs slots on this machine's own kernel, without a container runtime.

At `full` and `userns`, a slot is a set of namespaces around a copy-on-write root. A fork adds one layer, however large
the layers below it are. Processes, mounts, IPC, the host name and the network are isolated. With the network on, the
slot has a device whose packets a server process forwards; the slot cannot reach the host itself, except its resolver
and the ports in `host_ports`. The root contains only the image or an allow-list of system directories. Commands get no
new privileges, few capabilities and a system call filter; disk, open files and output are limited. If the slot server
or the process that watches it is killed, the kernel ends all slots. A list of allowed hosts needs root: the slot's
network then contains only a proxy that enforces the list.

`full` needs root. Outside the slot, the slot's root user is a private uid from a range that all slots of a backend
share. Owners of system files are mapped, so the slot can change everything in its root. Control groups limit memory
(including files in the workspace and /tmp), the number of processes, and processor time.

`userns` needs no root. The slot's root user is the caller (or, if the caller is root, a uid from a private range), and
no other user exists: system files cannot be changed, and `chown` to other users fails. Memory is limited per process;
processor time is not limited.

`confined` is for ordinary containers, which do not allow namespaces. A slot is a directory whose commands run with
Landlock, a system call filter, limits per process and, if the server is root, a user of their own. The commands cannot
use files outside the slot's workspace, home and TMPDIR, except that they can read the system's programs and settings.
They are also cut off from other slots' signals, tracing and System V objects, from unix sockets with a path or name
and, with the network off, from TCP and UDP. The following are neither isolated nor limited: the names and command lines
of all processes in the container, total disk and memory, and processor time. `confined` also differs in the following
ways. A slot cannot have a list of hosts or an image. A directory can be mounted only at the path that it has on the
host. `/workspace` is a link, and exists only if root was able to make it; the link does not work in programs that close
all descriptors. TMPDIR replaces /tmp. A running slot cannot be forked or checkpointed. A slot that starts from a
snapshot is a copy, so absolute paths into the original workspace are wrong in it. Without root, there is only one slot
at a time, and a command can end its own slot.

`none`, which must be requested by name, runs commands as the caller in a temporary directory. Nothing is isolated.

No level protects against kernel bugs or side channels between slots. At `confined`, and if /dev/net/tun is missing,
slots with the network on share the host's network and loopback. They can then reach cloud metadata addresses, except at
`full` with control groups of version 2. A slot without an image can read the files under the host's /usr.
"""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.local.client import SlotClient
from palaestra_slots.sandbox.local.direct.direct_slot import DirectClient
from palaestra_slots.sandbox.server_backend import (
    SYSTEM_PATH,
    ServerBackend,
    allowed_hosts,
    environment,
    forget_topmost,
    host_path,
    levels,
    limits_of,
    mounts_of,
    snapshot_of,
)
from palaestra_slots.sandbox.slot import WORKSPACE, Rung, Slot, SlotSpec, Snapshot, decode_lease, encode_lease
from palaestra_slots.sandbox.slotd.protocol.frames import CHUNK

if TYPE_CHECKING:
    from palaestra_slots.sandbox.images.image_store import ImageStore

_MOST_FILES = 64  # the server writes these files one after the other, and serves no other request meanwhile


class LocalBackend(ServerBackend):
    """Slots on this machine. If `service` names a service, the slots belong to a separate process: they survive this
    backend, and the next backend with the same `service` lists them in `leases`.

    Slots with the network on can reach the ports `host_ports` of this machine's loopback under the name
    `host.internal`.
    """

    name = "local"
    image_kinds = ("name", "path")  # names of pulled images
    joins_slots = True

    def __init__(
        self,
        *,
        rung: Rung | None = None,
        require: Rung | None = None,
        images: ImageStore | None = None,
        service: str | None = None,
        service_directory: Path | None = None,
        host_ports: Sequence[int] = (),
    ) -> None:
        super().__init__(rung=rung, require=require)
        self._host_ports = list(host_ports)
        self._images = images
        self._service: Path | None = None
        if service is not None:
            from palaestra_slots.sandbox.service.service_client import socket_path  # few backends have a service

            self._service = socket_path(service, service_directory)
        self._loaded: dict[str, tuple[str, ...]] = {}

    @classmethod
    def from_isolation(
        cls, isolation: str, *, require_sandbox: bool = False, host_ports: Sequence[int] = ()
    ) -> LocalBackend:
        """Return the backend for `best` or the name of an isolation level. Raises `ConfigError` for any other value."""
        rung, require = levels(isolation, require_sandbox)
        return cls(rung=rung, require=require, host_ports=host_ports)

    @classmethod
    def from_config(cls, config: JSON) -> LocalBackend:
        """Return the backend for the settings of a run."""
        return cls.from_isolation(
            config.isolation, require_sandbox=config.require_sandbox, host_ports=config.host_ports
        )

    async def _start_server(self, rung: Rung) -> None:
        # A server that is started again continues the epochs, so that no lease of the dead server names a new slot.
        first = self._last_epoch + 1
        settings = {"prefix": _interpreter_prefix(), "machine": True, "first_epoch": first}
        settings["host_ports"] = self._host_ports
        if self._service is None:
            kind = DirectClient if rung is Rung.FULL else SlotClient  # the only place that selects the direct path
            self._server = await kind.start(rung.label, settings, self._on_lost)
        else:
            from palaestra_slots.sandbox.service import service_client

            self._server = await service_client.attach(self._service, rung.label, settings, self._on_lost)

    async def aclose(self) -> None:
        """End the server, every slot and every layer. If the slots belong to a service, only detach from the service,
        which keeps its slots. Idempotent."""
        await super().aclose()
        if self._images is not None:
            await self._images.aclose()

    async def end(self) -> None:
        """Close the backend. If it has a service, end the service with all its slots."""
        await self.aclose()
        if self._service is not None:
            from palaestra_slots.sandbox.service import service_client

            await service_client.end(self._service)

    @property
    def stays(self) -> bool:
        """Whether the slots belong to a service, so that they stay when the backend is closed or dies."""
        return self._service is not None

    def leases(self) -> list[Slot]:
        """Return the slots that a service held when this backend attached to it, under new leases."""
        server, found = self._running_server(), []
        for lease in server.hello.get("leases", ()):
            trajectory_id, spec = decode_lease(lease["about"])
            found.append(self._register_slot(server, server, lease, spec, trajectory_id))
        return list(found)

    @property
    def capacity(self) -> int | None:
        """The maximum number of slots: one at `confined` without root, because a second slot would have the same user;
        otherwise None."""
        return 1 if self.rung is Rung.CONFINED and os.geteuid() != 0 else None

    @property
    def copies_folders(self) -> bool:
        # At `userns`, the slots of the host's root have another user, to whom the directories do not belong.
        return self.rung is Rung.FULL or (self.rung is Rung.USERNS and os.geteuid() != 0)

    @property
    def server_pid(self) -> int:
        """The pid of the process that watches the slot server, or of the service."""
        return self._running_server().pid

    async def _place(self, spec: SlotSpec) -> dict[str, JSON]:
        image = await self._image(spec)
        if image is None or self._images is None:
            env = environment(spec, host_path())
        else:
            env = environment(spec, SYSTEM_PATH, self._images.variables(image))
        return {"image": image, "allow": _allowed(spec), "mounts": mounts_of(spec.mounts), "env": env}

    def _about(self, trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
        return {} if self._service is None else {"about": encode_lease(trajectory_id, spec)}

    async def _image(self, spec: SlotSpec) -> str | None:
        """Return the unpacked directory of the spec's image; None if the spec has no image."""
        if spec.image is None:
            return None
        if self._images is None:
            from palaestra_slots.sandbox.images.image_store import ImageStore  # imported here: few tasks name an image

            self._images = ImageStore()
        return await self._images.directory(spec.image)

    async def compose(self, spec: SlotSpec, files: Mapping[str, bytes]) -> Snapshot | None:
        """Return the snapshot of a new slot in which only these files were written, without making the slot. Returns
        None if that takes a slot: for many or large files, for paths outside the workspace, with an image or mounts,
        and at levels without layers."""
        data = b"".join(files.values())
        bare = self._server is not None and self.rung >= Rung.USERNS and spec.image is None
        bare = bare and not spec.mounts and not spec.copies
        if not bare or len(files) > _MOST_FILES or len(data) > CHUNK or not all(map(_is_plain, files)):
            return None
        sizes = [[path, len(content)] for path, content in files.items()]
        server, fields = await self._living(), {"limits": limits_of(spec.limits), "files": sizes}
        return snapshot_of(await server.make("compose", fields, forget_topmost, data), spec)

    async def save(self, snapshot: Snapshot, folder: str) -> int:
        """Copy a snapshot, with whiteouts and owners, to an empty folder on this machine. Returns the total size of the
        snapshot's files in bytes."""
        fields: dict[str, JSON] = {"layers": list(snapshot.layers), "folder": os.path.realpath(folder)}
        reply = await self._running_server().call("save", fields)
        return int(reply.fields["bytes"])

    async def load(self, folder: str, spec: SlotSpec) -> Snapshot:
        """Return the snapshot that was saved in a folder. The folder is used in place. While the snapshot is in use,
        the server holds a shared lock on the folder (flock).

        Raises FileNotFoundError if the folder is gone.
        """
        fields: dict[str, JSON] = {"folder": os.path.realpath(folder), "image": await self._image(spec)}
        server = await self._living()
        snapshot = snapshot_of(await server.make("load", fields, lambda made: ("forget", made)), spec)
        self._loaded[snapshot.snapshot_id] = snapshot.layers
        return snapshot

    async def forget(self, snapshot: Snapshot) -> None:
        await self._forget_layers(self._loaded.pop(snapshot.snapshot_id, snapshot.layers[:1]))


def _is_plain(path: str) -> bool:
    """Return whether a path stays below the workspace, in which a new slot has nothing that could lead elsewhere."""
    full = posixpath.join(WORKSPACE, path)
    return full.startswith(f"{WORKSPACE}/") and posixpath.normpath(full) == full


def _interpreter_prefix() -> str:
    """Return the folder where the running interpreter is installed, or an empty string if slots see that folder
    anyway."""
    prefix = os.path.realpath(sys.base_prefix)
    return "" if f"{prefix}/".startswith("/usr/") else prefix


def _allowed(spec: SlotSpec) -> JSON:
    hosts = allowed_hosts(spec)
    if hosts is not None and os.geteuid() != 0:  # the proxy's socket is made inside the slot's network namespace
        raise IsolationUnavailable("a list of hosts needs root here; use network 'on' or 'off', or run as root")
    return hosts
