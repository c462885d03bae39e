"""Starts, finds, attaches to and ends services: named processes whose slots outlive their client.

A service is a process (`broker.py`) with a unix socket `NAME.sock` in a directory that only this user can enter. Starts
are serialised by a lock. A socket on which nothing listens was left by a killed service, and the next start removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.local.client import OnLost, SlotClient
from palaestra_slots.sandbox.slotd.protocol import frames
from palaestra_slots.sandbox.slotd.protocol.frames import FrameDecoder, FrameKind

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
_LOOK_PATIENCE_S, _END_PATIENCE_S, _TURN_S = 5.0, 20.0, 0.02


@dataclass(frozen=True, slots=True)
class RunningService:
    """One running service. Each of `leases` is an object with `slot`, `epoch` and `about` (see `encode_lease`).
    `attached` is true if the service has a client."""

    name: str
    pid: int
    rung: str
    attached: bool
    leases: tuple[JSON, ...]


def default_directory() -> Path:
    """Return the directory of this user's services, in /run if possible. Isolated slots cannot see the directory."""
    run = Path("/run") if os.geteuid() == 0 else Path(f"/run/user/{os.geteuid()}")
    return (run if os.access(run, os.W_OK) else Path("/var/tmp")) / f"palaestra-{os.geteuid()}"  # noqa: S108


def socket_path(name: str, directory: Path | None = None) -> Path:
    """Return the path of a service's socket, whose directory is made if it does not exist. Raises `ConfigError` if the
    name is invalid or other users have access to the directory."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a service; use up to 41 letters, digits, dots, dashes and underscores"
        )
    folder = directory or default_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"the directory {str(folder)!r} must be accessible only to you (chmod 700), because it gives "
            "access to your slots"
        )
    return folder / f"{name}.sock"


async def attach(path: Path, rung: str, settings: dict[str, JSON], on_lost: OnLost) -> SlotClient:
    """Attach to a service, starting it first if it is not running. Raises `SandboxError` while another process is
    attached, and `IsolationUnavailable` if the service cannot be started or runs at another isolation level."""
    async with _service_lock(path):
        if not _listens(path):
            await _start_service(path, rung, settings)
        server = await SlotClient.attach(str(path), on_lost)
    if server.hello["rung"] != rung:
        await server.aclose()
        runs = f"the service {path.stem} runs at the level {server.hello['rung']}, not {rung}"
        raise IsolationUnavailable(f"{runs}; end the service, or request that level")
    return server


async def service_state(path: Path) -> RunningService | None:
    """Return the state of a service without attaching; None if the service is not running. Raises `SandboxError` if the
    service does not answer."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return None
    try:
        writer.write(frames.encode(FrameKind.HELLO, 1, {"version": frames.VERSION, "look": True}))
        async with asyncio.timeout(_LOOK_PATIENCE_S):
            decoder = FrameDecoder()
            while data := await reader.read(frames.RECEIVE_BYTES):
                for frame in decoder.feed(data):
                    fields = frame.fields
                    leases = tuple(fields["leases"])
                    return RunningService(path.stem, fields["pid"], fields["rung"], fields["attached"], leases)
    except TimeoutError:
        raise SandboxError(f"the service {path.stem} does not answer; end its process") from None
    finally:
        writer.close()
    return None


async def end(path: Path) -> None:
    """End a service and every slot it holds, even if a client is attached. Does nothing if no service is running."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return
    try:
        writer.write(frames.encode(FrameKind.REQUEST, 1, {"op": "end"}))
        async with asyncio.timeout(_END_PATIENCE_S):
            while await reader.read(frames.RECEIVE_BYTES):
                pass
    except TimeoutError:
        raise SandboxError(f"the service {path.stem} does not end; kill its process") from None
    finally:
        writer.close()


async def sweep(directory: Path, *, only_list: bool = False) -> list[str]:
    """Return the names of services that were killed. Unless `only_list` is true, also remove their sockets."""
    gone = []
    for path in sorted(directory.glob("*.sock")) if directory.is_dir() else ():
        async with _service_lock(path):
            if not _listens(path):
                if not only_list:
                    path.unlink(missing_ok=True)
                gone.append(path.stem)
    return gone


async def _start_service(path: Path, rung: str, settings: dict[str, JSON]) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        # The socket exists before the service does, so a client that connects early waits and is not refused.
        listener.listen()
        arguments = [str(listener.fileno()), str(path), rung, json.dumps(settings)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "palaestra_slots.sandbox.service.broker", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # The service outlives this process, so it gets none of its other variables, which may hold keys.
            env={"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            cwd="/",
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    assert process.stdout is not None
    said = await process.stdout.readline()
    await process.wait()
    if said != b"{}\n":
        why = json.loads(said or b"{}").get("message", "its process ended early")
        raise IsolationUnavailable(f"the service {path.stem} cannot be started: {why}")


def _service_lock(path: Path) -> contextlib.AbstractAsyncContextManager[None]:
    """Return the lock to hold while deciding whether a service is running."""
    return file_lock(path.with_suffix(".lock"), poll_s=_TURN_S)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
