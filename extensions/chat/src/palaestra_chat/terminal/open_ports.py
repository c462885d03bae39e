"""Ports of the sandbox that the person opens on this machine, for example to see a development server in a browser."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.slot import Slot
from palaestra_slots.sandbox.slot_port import local_port

_MOST = 64
"""How many connections a browser and its page may have to one port."""


class OpenPorts:
    """The open ports, each with its number in the sandbox. They lead to the sandbox that `slot` returns then, so they
    stay open when the sandbox is replaced. Only programs on this machine can connect."""

    def __init__(self, slot: Callable[[], Slot | None]) -> None:
        self.numbers: dict[int, int] = {}
        self._slot = slot
        self._open: dict[int, AsyncExitStack] = {}

    async def open(self, port: int, here: int) -> None:
        """Open the sandbox's `port` under the number `here`. Raises `ConfigError` if that is not possible."""
        if not (0 < port < 1 << 16 and 0 < here < 1 << 16):
            raise ConfigError("a port is a number from 1 to 65535")
        await self.close(here)
        stack = AsyncExitStack()
        try:
            # By name, because some servers listen only on ::1.
            await stack.enter_async_context(local_port(self._slot, "localhost", port, here, most=_MOST))
        except OSError as error:
            raise ConfigError(
                f"port {here} of this machine cannot be opened ({error.strerror}); /port {port}:NUMBER uses another"
            ) from None
        self._open[here], self.numbers[here] = stack, port

    async def close(self, here: int) -> bool:
        """Close the port `here`, and return whether it was open."""
        self.numbers.pop(here, None)
        if (stack := self._open.pop(here, None)) is None:
            return False
        await stack.aclose()
        return True

    async def aclose(self) -> None:
        """Close all ports."""
        for here in list(self._open):
            await self.close(here)
