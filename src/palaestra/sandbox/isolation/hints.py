"""Why a rung cannot be had, in words: what the kernel or a container has refused, and what would change that.

The slot server reports the call that failed. Which setting is behind it cannot be known for sure from inside; what is
said here is what usually is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
        "parts of /proc are masked here, and then no other may be mounted: docker's "
        "`--security-opt systempaths=unconfined` lifts that",
    ),
    (
        r"mount overlay on .*(No such device|not permitted|Invalid argument)",
        "the kernel has no overlay file system, or (before Linux 5.11) none in user namespaces, "
        "or the directory below is on a file system that it does not take",
    ),
    (
        r"mount_setattr: (Function not implemented|Invalid argument|not permitted|Operation not)",
        "owners of files cannot be mapped: that takes Linux 5.12 (5.19 below overlays) and a file system that has it; "
        "the rung userns does without",
    ),
    (r"open_tree|move_mount", "this takes the mount calls of Linux 5.2, and the right to mount"),
    (r"step 12 ?: Operation not permitted", "a network of its own takes docker's `--cap-add NET_ADMIN` too"),
    (r"close_range: Function not implemented", "this takes Linux 5.9"),
    (r"openat2|RESOLVE", "this takes Linux 5.6"),
    (r"control groups? .*(Read-only|denied|not permitted)", "docker: `-v /sys/fs/cgroup:/sys/fs/cgroup`"),
)  # fmt: skip


def explain(message: str) -> str:
    """The message, and what is usually behind it."""
    for pattern, hint in _HINTS:
        if re.search(pattern, message):
            return f"{message} ({hint})"
    return message
