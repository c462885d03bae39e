"""Runs slots on other machines, which it reaches with OpenSSH.

Each host runs one slot server for as long as the connection lasts. Its slots have the same isolation levels as slots on
this machine: at best `full` if the login user is root, otherwise `userns` or `confined`, as the host's kernel allows.

A host needs Python 3.11 or newer as `python3`, and a login without a prompt: a key or an agent. Everything that the
backend's settings leave open, such as a jump host, is set in `~/.ssh/config`. A connection that is silent for a minute
counts as dead.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.remote import MachineBackend, PlaceSpec, run_command
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Rung

_CHECK_S = 30.0
_OPTIONS = (
    "BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4",
    # Commands on the host must not use this machine's keys, ports and display.
    "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes",
)  # fmt: skip


class SSHBackend(MachineBackend):
    """Slots on other machines. Each of `hosts` is `user@host`, `user@host:port` or a name from `~/.ssh/config`.
    `options` are additional arguments for `ssh`."""

    name = "ssh"
    with_images = "docker"

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        slots_per_host: int = 64,
        options: Sequence[str] = (),
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        places = max(1, len(hosts))
        super().__init__(hosts=hosts, places=places, slots_per_place=slots_per_host, rung=rung, require=require)
        self._options = options
        self._ssh = ["ssh", "-T", *(word for each in _OPTIONS for word in ("-o", each)), *options]

    @classmethod
    def from_config(cls, config: JSON) -> SSHBackend:
        """Return the backend for the settings of a run."""
        if not config.ssh_hosts:
            raise ConfigError("the backend ssh needs a machine: set ssh_hosts to user@host")
        rung, require = levels(config.isolation, config.require_sandbox)
        words = (("-l", config.ssh_user), ("-p", config.ssh_port), ("-i", config.ssh_key))
        options = [word for flag, value in words if value is not None for word in (flag, str(value))]
        slots = config.ssh_slots_per_host
        return cls(config.ssh_hosts, slots_per_host=slots, options=options, rung=rung, require=require)

    @property
    def credentials(self) -> str:
        return f"key {self._ssh[self._ssh.index('-i') + 1]}" if "-i" in self._ssh else "~/.ssh or an agent"

    async def check(self, host: str) -> None:
        status, text = await run_command([*self._ssh, _destination(host), "python3 -V"], _CHECK_S)
        if status != 0:
            by_hand = shlex.join(["ssh", *self._options, _destination(host), "python3", "-V"])
            raise ConfigError(f"ssh {host} cannot run python3: {text.rstrip('.')}. Try it: {by_hand}")

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        # ssh joins its arguments with blanks, and the host's shell splits the result again.
        return [*self._ssh, _destination(place.host), shlex.join(call)]


def _destination(host: str) -> str:
    """Return the destination for the command line of `ssh`; a host with a port becomes `ssh://HOST:PORT`."""
    name, colon, port = host.partition(":")
    return f"ssh://{name}:{port}" if colon and port.isdecimal() else host
