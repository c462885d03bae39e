"""The devices that take part in encrypted rooms: which ones the gateway has seen, and which ones its owner trusts.

They are kept in the mailbox, so `palaestra gateway devices` and `palaestra gateway verify` work while the gateway runs.
A device keeps the fingerprint with which it was first seen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from palaestra_gateway.platform import PlatformNotes
from palaestra_slots.core.errors import ConfigError

DeviceState: TypeAlias = Literal["own", "seen", "verified", "blocked"]
_PREFIX = "device "


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device of a person, or (`own`) of the bot. `fingerprint` is its public Ed25519 key in base64."""

    user_id: str
    device_id: str
    fingerprint: str
    state: DeviceState = "seen"
    name: str = ""

    @property
    def shown_fingerprint(self) -> str:
        """The fingerprint in groups of four, as chat programs show it."""
        return " ".join(self.fingerprint[start : start + 4] for start in range(0, len(self.fingerprint), 4))


async def known_devices(notes: PlatformNotes) -> dict[tuple[str, str], KnownDevice]:
    """Return the devices that a platform has seen, by user id and device id."""
    rows = (value for name, value in (await notes.read()).items() if name.startswith(_PREFIX))
    found = (KnownDevice(**json.loads(row)) for row in rows)
    return {(each.user_id, each.device_id): each for each in found}


async def remember(notes: PlatformNotes, device: KnownDevice) -> None:
    """Store a device in place of what was stored about it."""
    await notes.write(f"{_PREFIX}{device.user_id} {device.device_id}", json.dumps(asdict(device)))


async def decide(notes: PlatformNotes, user_id: str, device_id: str, state: DeviceState) -> KnownDevice:
    """Record the owner's decision about a device, which takes effect with the next message. Raises `ConfigError` for an
    unknown device, and for the bot's own one."""
    device = (await known_devices(notes)).get((user_id, device_id))
    if device is None or device.state == "own":
        raise ConfigError(
            f"device {device_id} of {user_id} is not a device of a person in an encrypted room; "
            "`palaestra gateway devices` lists them"
        )
    decided = replace(device, state=state)
    await remember(notes, decided)
    return decided
