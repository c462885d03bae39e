"""Sandboxes in milliseconds: slots, pools, snapshots, images and backends.

    async with Sandbox() as sandbox:
        await sandbox.execute("echo hello > a.txt")

Each public name is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from palaestra_slots.core.errors import (
        AcquireTimeout,
        ConfigError,
        ContextExceeded,
        DiskError,
        EngineRefused,
        EngineReplyError,
        EngineUnavailable,
        GraderError,
        ImageError,
        IsolationUnavailable,
        PalaestraError,
        SandboxError,
        SlotEnded,
        SlotLost,
        StaleLease,
        TrainerError,
        WorkError,
    )
    from palaestra_slots.core.types import AllowList, Blame, Limits, Network, Usage
    from palaestra_slots.processes.registry import ProcessRegistry
    from palaestra_slots.sandbox.backends.docker import DockerBackend
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.backends.ssh import SSHBackend
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_slots.sandbox.sandbox import Sandbox, SandboxSnapshot, SyncSandbox
    from palaestra_slots.sandbox.slot import (
        Backend,
        Change,
        ExecutionResult,
        FileInfo,
        Mount,
        Rung,
        Slot,
        SlotSpec,
        Snapshot,
        View,
    )
    from palaestra_slots.sandbox.snapshots.cache import Prepared, Recipe

__version__ = "0.1.0"

_MODULES = {
    "AcquireTimeout": "core.errors",
    "AllowList": "core.types",
    "Backend": "sandbox.slot",
    "Blame": "core.types",
    "Change": "sandbox.slot",
    "ConfigError": "core.errors",
    "ContextExceeded": "core.errors",
    "DiskError": "core.errors",
    "DockerBackend": "sandbox.backends.docker",
    "EngineRefused": "core.errors",
    "EngineReplyError": "core.errors",
    "EngineUnavailable": "core.errors",
    "ExecutionResult": "sandbox.slot",
    "FileInfo": "sandbox.slot",
    "GraderError": "core.errors",
    "ImageError": "core.errors",
    "IsolationUnavailable": "core.errors",
    "Limits": "core.types",
    "LocalBackend": "sandbox.backends.local",
    "Mount": "sandbox.slot",
    "Network": "core.types",
    "PalaestraError": "core.errors",
    "Prepared": "sandbox.snapshots.cache",
    "ProcessRegistry": "processes.registry",
    "Recipe": "sandbox.snapshots.cache",
    "Rung": "sandbox.slot",
    "SSHBackend": "sandbox.backends.ssh",
    "Sandbox": "sandbox.sandbox",
    "SandboxError": "core.errors",
    "SandboxSnapshot": "sandbox.sandbox",
    "Slot": "sandbox.slot",
    "SlotEnded": "core.errors",
    "SlotLost": "core.errors",
    "SlotPool": "sandbox.pool",
    "SlotPoolConfig": "sandbox.pool",
    "SlotSpec": "sandbox.slot",
    "Snapshot": "sandbox.slot",
    "StaleLease": "core.errors",
    "SyncSandbox": "sandbox.sandbox",
    "TrainerError": "core.errors",
    "Usage": "core.types",
    "View": "sandbox.slot",
    "WorkError": "core.errors",
}

__all__ = [
    "AcquireTimeout",
    "AllowList",
    "Backend",
    "Blame",
    "Change",
    "ConfigError",
    "ContextExceeded",
    "DiskError",
    "DockerBackend",
    "EngineRefused",
    "EngineReplyError",
    "EngineUnavailable",
    "ExecutionResult",
    "FileInfo",
    "GraderError",
    "ImageError",
    "IsolationUnavailable",
    "Limits",
    "LocalBackend",
    "Mount",
    "Network",
    "PalaestraError",
    "Prepared",
    "ProcessRegistry",
    "Recipe",
    "Rung",
    "SSHBackend",
    "Sandbox",
    "SandboxError",
    "SandboxSnapshot",
    "Slot",
    "SlotEnded",
    "SlotLost",
    "SlotPool",
    "SlotPoolConfig",
    "SlotSpec",
    "Snapshot",
    "StaleLease",
    "SyncSandbox",
    "TrainerError",
    "Usage",
    "View",
    "WorkError",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
