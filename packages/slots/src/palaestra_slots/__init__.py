"""Sandboxes in milliseconds: slots, pools, snapshots, images and backends.

    async with Sandbox() as sandbox:
        await sandbox.execute("echo hello > a.txt")

Each public name is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, PalaestraError, SandboxError, SlotLost
    from palaestra_slots.core.types import AllowList, Limits, Network
    from palaestra_slots.processes.registry import ProcessRegistry
    from palaestra_slots.sandbox.backends.docker import DockerBackend
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.backends.ssh import SSHBackend
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_slots.sandbox.sandbox import Sandbox, SandboxSnapshot, SyncSandbox
    from palaestra_slots.sandbox.slot import Backend, ExecutionResult, Mount, Rung, Slot, SlotSpec, Snapshot, View

__version__ = "0.1.0"

_MODULES = {
    "AllowList": "core.types",
    "Backend": "sandbox.slot",
    "ConfigError": "core.errors",
    "DockerBackend": "sandbox.backends.docker",
    "ExecutionResult": "sandbox.slot",
    "IsolationUnavailable": "core.errors",
    "Limits": "core.types",
    "LocalBackend": "sandbox.backends.local",
    "Mount": "sandbox.slot",
    "Network": "core.types",
    "PalaestraError": "core.errors",
    "ProcessRegistry": "processes.registry",
    "Rung": "sandbox.slot",
    "SSHBackend": "sandbox.backends.ssh",
    "Sandbox": "sandbox.sandbox",
    "SandboxError": "core.errors",
    "SandboxSnapshot": "sandbox.sandbox",
    "Slot": "sandbox.slot",
    "SlotLost": "core.errors",
    "SlotPool": "sandbox.pool",
    "SlotPoolConfig": "sandbox.pool",
    "SlotSpec": "sandbox.slot",
    "Snapshot": "sandbox.slot",
    "SyncSandbox": "sandbox.sandbox",
    "View": "sandbox.slot",
}

__all__ = [
    "AllowList",
    "Backend",
    "ConfigError",
    "DockerBackend",
    "ExecutionResult",
    "IsolationUnavailable",
    "Limits",
    "LocalBackend",
    "Mount",
    "Network",
    "PalaestraError",
    "ProcessRegistry",
    "Rung",
    "SSHBackend",
    "Sandbox",
    "SandboxError",
    "SandboxSnapshot",
    "Slot",
    "SlotLost",
    "SlotPool",
    "SlotPoolConfig",
    "SlotSpec",
    "Snapshot",
    "SyncSandbox",
    "View",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra_slots' has no attribute {name!r}")
    value: object = getattr(import_module(f"palaestra_slots.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
