"""A stateful shell of a local slot, and carrying its state over to another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from palaestra.core.errors import SandboxError, SlotLost, StaleLease
from palaestra.core.types import JSON
from palaestra.sandbox.local.lease import MAX_OUTPUT_BYTES, Lease, limit
from palaestra.sandbox.local.requests import CommandNotStarted, Reply
from palaestra.sandbox.slot import DEFAULT_OUTPUT_BYTES, ExecutionResult

# Options come last when they are restored, since some of them would end the restoring. Variables of bash itself and
# read-only ones cannot be set. In a subshell, so that nothing of the shell changes.
_SAVE = r"""(printf '__slot_options() {\n'; set +o; shopt -p; umask -p; printf '}\n'; set +eux
for __slot_name in $(compgen -v); do
  case $__slot_name in
    BASH*|COMP_*|DIRSTACK|EPOCH*|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|*RANDOM|SECONDS|_|__slot_name) continue
  esac
  case ${!__slot_name@a} in *r*) continue; esac
  declare -p "$__slot_name"
done
declare -f; alias -p; printf 'builtin cd -- %q\n__slot_options; unset -f __slot_options\n' "$PWD") 2>/dev/null
"""
_STATE_TIMEOUT_S = 30.0


Command = Callable[..., Awaitable[Reply]]
"""Makes one of the shell's requests: see `LocalSlot.command`, of whose `line` it has been told."""


class LocalShell:
    """Implements `Shell`. Made by `LocalSlot.shell`."""

    def __init__(self, command: Command, lease: Lease, name: int, state: bytes) -> None:
        self._command, self._lease, self._name, self._state = command, lease, name, state
        self._turn = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls, command: Command, lease: Lease, cwd: str, env: Mapping[str, str] | None, state: bytes
    ) -> LocalShell:
        """A new shell of the slot. Whoever `command` asks has it to its end."""
        reply = await command("shell", {"cwd": cwd, "env": dict(env or {})})
        return cls(command, lease, reply.fields["shell"], state)

    async def run(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecutionResult:
        """Run a command; see `Shell.run`. Its time starts when the commands before it are over."""
        fields = {"shell": self._name, "command": command}
        limit(fields, timeout_s, max_output_bytes, stdin)
        if on_output is not None:
            fields["stream"] = True
        await self._turn.acquire()  # not `async with`, which is two more coroutines for each command
        try:
            if self._state:
                state, self._state = self._state.decode(errors="surrogateescape"), b""
                before = {"shell": self._name, "command": state}
                limit(before, _STATE_TIMEOUT_S, 0, b"")
                await self._run(before, b"", _STATE_TIMEOUT_S, None)
            return await self._run(fields, stdin, timeout_s, on_output)
        finally:
            self._turn.release()

    async def _run(
        self, fields: dict[str, JSON], stdin: bytes, timeout_s: float, on_output: Callable[[bytes], None] | None
    ) -> ExecutionResult:
        try:
            reply = await self._command("run", fields, stdin, on_output)
        except CommandNotStarted as error:
            return self._lease.not_started(str(fields["command"]), error)
        return self._lease.result(reply.fields, reply.data, timeout_s)

    async def state(self) -> bytes:
        """What a new shell needs to go on from here; see `Shell.state`. Raises `SandboxError` where it is too large."""
        result = await self.run(_SAVE, timeout_s=_STATE_TIMEOUT_S, max_output_bytes=MAX_OUTPUT_BYTES)
        if result.metadata["truncated"] or result.metadata["timeout"]:
            raise SandboxError(f"the state of the shell in {self._lease.slot_id} cannot be saved: it is too large")
        return result.output.encode(errors="surrogateescape")

    async def aclose(self) -> None:
        """End the shell. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(StaleLease, SlotLost):  # then it has ended with its slot
                await self._command("close_shell", {"shell": self._name})

    async def __aenter__(self) -> LocalShell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
