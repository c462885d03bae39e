"""Run commands and access files as another user of the slot: the USER of an image.

Files are written by commands that run as this user, so that a tool can do no more than the user's shell. Only uploads
are written as root and then given to the user.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, AllowList, Network
from palaestra_slots.sandbox.slot import (
    MAX_FILE_BYTES,
    WORKSPACE,
    Change,
    ExecutionResult,
    FileInfo,
    Process,
    Shell,
    Slot,
    SlotState,
)

_FILE_S = 60.0


def is_root(user: str | None) -> bool:
    """Return whether a USER of a Dockerfile (`name`, `uid`, `name:group`) is root."""
    return (user or "").partition(":")[0] in ("", "0", "root")


def as_user(argv: Sequence[str], user: str | None) -> list[str]:
    """Return a command that runs `argv` as the user, through the slot's `setpriv` (util-linux). A user who is given by
    name alone has the groups of that account."""
    if is_root(user):
        return list(argv)
    name, _, group = (user or "").partition(":")
    if group or name.isdigit():  # --init-groups needs an account, which a number may lack
        return ["setpriv", f"--reuid={name}", f"--regid={group or name}", "--clear-groups", "--", *argv]
    script = f'exec setpriv --reuid={shlex.quote(name)} --regid="$(id -g {shlex.quote(name)})" --init-groups -- "$@"'
    return ["/bin/sh", "-c", script, "setpriv", *argv]


async def acting_as(slot: Slot, user: str) -> Slot:
    """Return the slot with the rights of a user. Raises `PrepareError` as `home_of` does."""
    return slot if is_root(user) else UserSlot(slot, user, await home_of(slot, user))


async def home_of(slot: Slot, user: str) -> str:
    """Return the home directory of a user. Raises `PrepareError` if `setpriv` cannot switch to that user."""
    if is_root(user):
        return "/root"
    trial = await slot.execute(as_user(["/bin/sh", "-c", "true"], user), cwd="/")
    if not trial.success:
        raise PrepareError(
            f"its image's user {user} cannot be used (setpriv is needed): {without_middle(trial.output.strip(), 300)}"
        )
    name = user.partition(":")[0]
    for line in (await slot.read_text("/etc/passwd", missing="")).splitlines():
        fields = line.split(":")
        if len(fields) > 5 and name in (fields[0], fields[2]):
            return fields[5]
    return "/"


class UserSlot(Slot):
    """A slot whose commands and file accesses have the rights of one user; `upload` is an exception. A stateful shell
    is not available."""

    def __init__(self, slot: Slot, user: str, home: str) -> None:
        self._slot, self._user, self._home = slot, user, home
        self.slot_id, self.epoch, self.trajectory_id = slot.slot_id, slot.epoch, slot.trajectory_id
        self.rung, self.metadata = slot.rung, slot.metadata

    @property
    def state(self) -> SlotState:
        return self._slot.state

    def _argv(self, command: str | Sequence[str]) -> list[str]:
        return as_user(["bash", "-c", command] if isinstance(command, str) else command, self._user)

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {"HOME": self._home, "USER": self._user.partition(":")[0], **(env or {})}

    async def execute(self, command: str | Sequence[str], **options: JSON) -> ExecutionResult:
        """Call `Slot.execute` as the user."""
        return await self._slot.execute(self._argv(command), **{**options, "env": self._env(options.get("env"))})

    async def shell(self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b"") -> Shell:
        """Raise PermissionError, because a stateful shell would run as root."""
        raise PermissionError(1, f"a stateful shell as the user {self._user} is not available")

    async def spawn(self, command: str | Sequence[str], **options: JSON) -> Process:
        """Call `Slot.spawn` as the user."""
        return await self._slot.spawn(self._argv(command), **{**options, "env": self._env(options.get("env"))})

    async def freeze(self) -> int:
        return await self._slot.freeze()

    @contextlib.asynccontextmanager
    async def fork(self, *, network: Network | AllowList | None = None) -> AsyncIterator[Slot]:
        """Call `Slot.fork`; the fork has the same user."""
        async with self._slot.fork(network=network) as fork:
            yield UserSlot(fork, self._user, self._home)

    async def processes(self) -> Sequence[Process]:
        return await self._slot.processes()

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes:
        await self._allowed(path, "-r")
        return await self._slot.read_bytes(path, max_bytes=max_bytes, offset=offset)

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write through the user's shell, so that new files belong to the user. Raises PermissionError."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"' + (f' && chmod {mode:o} -- "$1"' if mode else "")
        await self._execute_as_user(["/bin/sh", "-c", script, "write", path], path, data)

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        await self._allowed(path, "-r")
        return await self._slot.list_dir(path)

    async def stat(self, path: str) -> FileInfo | None:
        return await self._slot.stat(path)

    async def make_dir(self, path: str) -> None:
        await self._execute_as_user(["mkdir", "-p", "--", path], path)

    async def make_link(self, path: str, target: str) -> None:
        await self._execute_as_user(["ln", "-sfn", "--", target, path], path)

    async def upload(self, local: Path, path: str) -> int:
        """Call `Slot.upload`; the files then belong to the user."""
        count = await self._slot.upload(local, path)
        name, _, group = self._user.partition(":")
        await self._slot.execute(["chown", "-R", f"{name}:{group}" if group else name, path], timeout_s=_FILE_S)
        return count

    async def download(self, path: str, local: Path) -> int:
        await self._allowed(path, "-r")
        return await self._slot.download(path, local)

    async def remove(self, path: str) -> None:
        await self._execute_as_user(["rm", "-rf", "--", path], path)

    async def arguments(self, pid: int) -> Sequence[str] | None:
        return await self._slot.arguments(pid)

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        return await self._slot.ask(port, request, timeout_s=timeout_s, max_bytes=max_bytes)

    async def changes(self) -> list[Change]:
        return await self._slot.changes()

    async def _allowed(self, path: str, access: str) -> None:
        """Raise PermissionError if the path exists and the user lacks the access that `access`, an option of test(1),
        stands for."""
        if await self._slot.stat(path) is None:
            return
        # The slot itself reads files as root.
        tried = await self.execute(["test", access, path], timeout_s=_FILE_S)
        if not tried.success:
            raise PermissionError(13, f"the user {self._user} may not read it", path)

    async def _execute_as_user(self, argv: Sequence[str], path: str, data: bytes = b"") -> None:
        done = await self.execute(argv, stdin=data, timeout_s=_FILE_S)
        if not done.success:
            raise PermissionError(13, done.output.strip()[-200:] or f"the user {self._user} may not change it", path)
