"""Checks from the inside whether a fresh slot is really isolated, before anything else runs at its isolation level.

The check detects a kernel, container or policy that accepts a call but does not perform it. At the levels without
namespaces, the check tries to escape with shell builtins and redirections (sockets only in bash), so that any refusal
comes from the kernel, not from a program.

`with_remedy` adds the usual cause and remedy to an error, because the slot server reports only the call that failed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.slot import Rung, Slot
from palaestra_slots.sandbox.slotd.namespaced.privileges import KEPT

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

CONFINED_SCRIPT = r"""
while read -r key value effective _; do case $key in
NoNewPrivs:|Seccomp:|CapBnd:|CapEff:) echo "$key $value";; Uid:) echo "uid $effective";; esac
done < /proc/self/status
while read -r key value; do case $key in PPid:) server=$value;; esac; done < "/proc/$PPID/status"
kill -0 "$server" 2>/dev/null && echo "signals server"
kill -0 "$PPID" 2>/dev/null && echo "signals init"
( : > /etc/.palaestra-proof ) 2>/dev/null && echo "writes system"
( : > ../.proof ) 2>/dev/null && echo "writes beside"
( : < /etc/shadow ) 2>/dev/null && echo "reads shadow"
set -- /var/*; [ "$1" = "/var/*" ] || echo "reads var"
case "$( ( exec 3<>/dev/tcp/127.0.0.1/9 ) 2>&1 )" in *"not supported"*) echo "inet none";; esac
[ -n "$BASH_VERSION" ] || echo "inet untried"
: > .proof && echo "workspace writable"
"""

_ACCOUNTS = "it sees the host's accounts"

_CONTAINER = "docker allows it with `--cap-add SYS_ADMIN --cap-add NET_ADMIN`, or, for a user other than root, with "
_CONTAINER += "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`"

_HINTS: Sequence[tuple[str, str]] = (
    (
        r"unshare 0x1\w{7}: (Operation not permitted|No space)",
        "user namespaces are not allowed: sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0, "
        f"kernel.apparmor_restrict_unprivileged_userns=0; {_CONTAINER}",
    ),
    (r"unshare 0x\w+: Operation not permitted", f"namespaces are not allowed; {_CONTAINER}"),
    (r"unshare 0x\w+: Invalid argument", "this kernel is built without one of the namespaces"),
    (
        r"mount proc on .*(not permitted|denied)",
        "parts of /proc are masked here, so a slot cannot mount its own: docker's "
        "`--security-opt systempaths=unconfined` removes the masks",
    ),
    (
        r"mount overlay on .*(No such device|not permitted|Invalid argument)",
        "the kernel has no overlay file system, or (before Linux 5.11) none in user namespaces, "
        "or the lower directory is on a file system that overlays do not support",
    ),
    (
        r"mount_setattr: (Function not implemented|Invalid argument|not permitted|Operation not)",
        "owners of files cannot be mapped: that needs Linux 5.12 (5.19 under overlays) and a file system that supports "
        "it; the level userns does not need it",
    ),
    (r"open_tree|move_mount", "this needs the mount calls of Linux 5.2, and the right to mount"),
    # 12 is the operation LOOPBACK of `native_init.py`.
    (r"step 12 ?: Operation not permitted", "a slot's own network also needs docker's `--cap-add NET_ADMIN`"),
    (r"close_range: Function not implemented", "this needs Linux 5.9"),
    (r"openat2|RESOLVE", "this needs Linux 5.6"),
    (r"control groups? .*(Read-only|denied|not permitted)", "docker needs `-v /sys/fs/cgroup:/sys/fs/cgroup`"),
)  # fmt: skip


async def prove(slot: Slot, *, server_is_root: bool, image_has_accounts: bool = False) -> None:
    """Raise `IsolationUnavailable` if the slot lacks a protection of its isolation level. The error names the failed
    checks. At the level `none`, check only that commands run. With `image_has_accounts`, the slot's root is an image
    with passwords of its own."""
    confined = slot.rung < Rung.USERNS
    result = await slot.execute(CONFINED_SCRIPT if confined else _SCRIPT, timeout_s=10.0)
    facts: dict[str, list[str]] = {}
    for line in result.output.splitlines():
        name, _, value = line.partition(" ")
        facts.setdefault(name, []).append(value.strip())
    claims = confined_claims(facts, server_is_root=server_is_root) if confined else _claims(facts, slot.rung)
    if image_has_accounts:
        claims.pop(_ACCOUNTS, None)
    if slot.rung is Rung.NONE:
        claims = {"commands do not run": claims["commands do not run"]}
    failures = [name for name, held in claims.items() if not held]
    if failures:
        raise IsolationUnavailable(f"a throw-away slot has these problems: {', '.join(failures)}")
    await slot.read_bytes(".proof", max_bytes=0)  # the server reads files with other system calls than commands do


def _claims(facts: dict[str, list[str]], rung: Rung) -> dict[str, bool]:
    # A fact that is missing from the output must fail its check.
    capabilities = [int(word, 16) for word in facts.get("CapBnd:", ["ffff"]) + facts.get("CapEff:", ["ffff"])]
    return {
        "commands do not run": facts.get("uid") == ["0"],
        "it has no process namespace of its own": facts.get("init") == ["(slot-init)"],
        "it can gain privileges": facts.get("NoNewPrivs:") == ["1"],
        "no system call filter": facts.get("Seccomp:") == ["2"],
        "it holds capabilities that it should not have": not any(held & ~KEPT for held in capabilities),
        "it sees network interfaces of the host": facts.get("interfaces") == ["0"],
        _ACCOUNTS: "shadow" not in facts,
        "it can write kernel settings": "sysctl" not in facts,
        "its workspace is not writable": facts.get("workspace") == ["writable"],
        "its root user is root outside": rung is not Rung.FULL or int(facts.get("outside", ["0"])[0]) > 0,
    }


def confined_claims(facts: dict[str, list[str]], server_is_root: bool) -> dict[str, bool]:
    """Return whether each check passed, keyed by the check's failure message. `facts` holds the lines that the script
    wrote, keyed by their first word. Two checks are skipped if the server is not root: a command can then signal its
    own init, and processes keep their capability bounding set, which `no_new_privs` does not reduce.
    """
    uid = facts.get("uid", [""])[0]
    bounding = facts.get("CapBnd:", ["1"]) if server_is_root else ["0"]
    return {
        "commands do not run": uid.isdigit(),
        "its user is root": uid != "0",
        "it can gain privileges": facts.get("NoNewPrivs:") == ["1"],
        "no system call filter": facts.get("Seccomp:") == ["2"],
        "it holds capabilities": all(int(word, 16) == 0 for word in (*bounding, *facts.get("CapEff:", ["1"]))),
        "it can signal the slot server": "server" not in facts.get("signals", []),
        "it can signal its init": not server_is_root or "init" not in facts.get("signals", []),
        "it can write outside its directories": "writes" not in facts,
        "it can read more than the system's programs": "reads" not in facts,
        "it can open internet sockets": facts.get("inet") in (["none"], ["untried"]),
        "its workspace is not writable": facts.get("workspace") == ["writable"],
    }


def with_remedy(message: str) -> str:
    """Return the message, followed by its usual cause and remedy if these are known."""
    for pattern, hint in _HINTS:
        if re.search(pattern, message):
            return f"{message} ({hint})"
    return message
