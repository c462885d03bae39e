"""Whether a fresh slot really is isolated: asked of the slot itself, before anything else runs on its rung.

Not a test suite; it catches a kernel, container or policy that took a call and did not do it.
"""

from __future__ import annotations

import os

from palaestra.core.errors import IsolationUnavailable
from palaestra.sandbox.isolation import self_test_confined
from palaestra.sandbox.slot import Rung, Slot
from palaestra.sandbox.slotd.namespaced.privileges import KEPT

_SCRIPT = r"""
read -r _ outside count < /proc/self/uid_map; echo "outside $outside"; echo "ids $count"
while read -r key value effective _; do case $key in
NoNewPrivs:|Seccomp:|CapBnd:|CapEff:) echo "$key $value";; Uid:) echo "uid $effective";; esac
done < /proc/self/status
read -r _ name _ < /proc/1/stat; echo "init $name"
n=0; while read -r name _; do case $name in *:*) [ "$name" = lo: ] || n=$((n+1));; esac; done < /proc/net/dev
echo "interfaces $n"
[ -e /etc/shadow ] && echo shadow yes
( : > /proc/sys/kernel/hostname ) 2>/dev/null && echo sysctl writable
: > /workspace/.proof && echo "workspace writable"
"""


async def prove(slot: Slot) -> None:
    """Raise `IsolationUnavailable`, naming what is missing, unless the slot is what its rung promises."""
    if slot.rung < Rung.USERNS:
        await _prove_confined(slot)
        return
    result = await slot.execute(_SCRIPT, timeout_s=10.0)
    lines = (line.split(None, 1) for line in result.output.splitlines())
    facts = {parts[0].rstrip(":"): parts[1].strip() for parts in lines if len(parts) == 2}
    failures = [name for name, held in _claims(facts, slot.rung).items() if not held]
    if failures:
        raise IsolationUnavailable(f"a throw-away slot shows: {', '.join(failures)}")
    await _prove_files(slot)


async def _prove_files(slot: Slot) -> None:
    """That the server reaches the slot's files, and nothing but them. Commands do not need what this needs."""
    await slot.read_bytes(".proof", max_bytes=0)


async def _prove_confined(slot: Slot) -> None:
    """The same for the rungs without namespaces; `none` only has to run commands."""
    result = await slot.execute(self_test_confined.SCRIPT, timeout_s=10.0)
    facts: dict[str, list[str]] = {}
    for line in result.output.splitlines():
        name, _, value = line.partition(" ")
        facts.setdefault(name, []).append(value.strip())
    claims = self_test_confined.claims(facts, server_is_root=os.geteuid() == 0)
    if slot.rung is Rung.NONE:
        claims = {"commands do not run": claims["commands do not run"]}
    failures = [name for name, held in claims.items() if not held]
    if failures:
        raise IsolationUnavailable(f"a throw-away slot shows: {', '.join(failures)}")
    await _prove_files(slot)


def _claims(facts: dict[str, str], rung: Rung) -> dict[str, bool]:
    capabilities = int(facts.get("CapBnd", "ffffffffffffffff"), 16) | int(facts.get("CapEff", "ffffffffffffffff"), 16)
    return {
        "commands do not run": facts.get("uid") == "0",
        "its processes are not its own": facts.get("init") == "(slot-init)",
        "it can gain privileges": facts.get("NoNewPrivs") == "1",
        "no system call filter": facts.get("Seccomp") == "2",
        "it holds capabilities it should not": capabilities & ~KEPT == 0,
        "it sees network interfaces of the host": facts.get("interfaces") == "0",
        "it sees the host's accounts": "shadow" not in facts,
        "it can write kernel settings": "sysctl" not in facts,
        "its workspace is not writable": facts.get("workspace") == "writable",
        "its root is root outside": rung is not Rung.FULL or int(facts.get("outside", "0")) > 0,
    }
