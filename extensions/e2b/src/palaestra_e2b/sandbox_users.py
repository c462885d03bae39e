"""The users of a sandbox. `user` and `root` are its root user, with different homes; every other user must have an
account in the image and is switched to by `setpriv`, which needs the isolation level `full`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass

from palaestra_e2b.sandboxes import HostedSandbox
from palaestra_e2b.templates import DEFAULT_USER
from palaestra_e2b.wire_errors import RpcError
from palaestra_slots.core.errors import PrepareError
from palaestra_slots.images.as_user import UserSlot, as_user, home_of
from palaestra_slots.sandbox.slot import Slot

_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}|[0-9]{1,5}")
_ROOTS = (DEFAULT_USER, "root", "0")


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """A user of one sandbox: the name of the key that the sandbox belongs to, the user's name and home, the directory
    where commands start, and the slot with the user's rights. `sandbox_slot` is the slot with the rights of root, and
    `own_home` the home of `user`."""

    key: str
    name: str
    home: str
    start: str
    slot: Slot
    sandbox_slot: Slot
    own_home: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` as this user."""
        return list(argv) if self.name in _ROOTS else as_user(argv, self.name)


async def user_of(sandbox: HostedSandbox, slot: Slot, given: str) -> SandboxUser:
    """Return the user with a name, by default that of the template. Raises `RpcError` for a name that no account
    has."""
    template, key = sandbox.template, sandbox.key.name
    name = given or template.user.partition(":")[0]
    if not _NAME.fullmatch(name):
        raise RpcError("unauthenticated", f"invalid username: {name!r:.60}")
    if name in _ROOTS:
        home = template.home if name == DEFAULT_USER else "/root"
        return SandboxUser(
            key, name, home, template.workdir if not given or name == template.user else home, slot, slot, template.home
        )
    try:
        home = await home_of(slot, name)
    except PrepareError as error:
        raise RpcError("unauthenticated", f"invalid username: {name!r}: {error}") from None
    own = not given and template.config.workdir != "/"
    start = template.workdir if own else home
    return SandboxUser(key, name, home, start, UserSlot(slot, name, home), slot, template.home)


def name_in_header(authorization: str) -> str:
    """Return the user that a Basic `Authorization` names, without a password; empty if there is none. Raises
    `RpcError`."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise RpcError("unauthenticated", "the Authorization header is not Basic USER:") from None
