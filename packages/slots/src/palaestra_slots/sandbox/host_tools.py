"""Exports the parts of the slot server that the rest of the package uses on the host. Nothing outside `sandbox` imports
`slotd`.

The exports are the rules for hosts and addresses, the forwarding proxy, users for isolated programs, bounded capture of
output, and the removal of control groups that killed servers have left behind.
"""

from palaestra_slots.sandbox.slotd.exec.pipes import Capture
from palaestra_slots.sandbox.slotd.namespaced.cgroups import find as find_control_groups
from palaestra_slots.sandbox.slotd.namespaced.cgroups import sweep as sweep_control_groups
from palaestra_slots.sandbox.slotd.network import allowlist
from palaestra_slots.sandbox.slotd.network.allowlist import Address
from palaestra_slots.sandbox.slotd.network.forward import HEAD_BYTES, PROXY_NAME, Forwarder
from palaestra_slots.sandbox.slotd.unprivileged import users

__all__ = [
    "HEAD_BYTES",
    "PROXY_NAME",
    "Address",
    "Capture",
    "Forwarder",
    "allowlist",
    "find_control_groups",
    "sweep_control_groups",
    "users",
]
