"""Kernels that lack something: what the ladder says of them. They are played by a filter that answers as they would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from errno import ENOSYS, EPERM

import pytest

from golden_messages import check_message
from palaestra_slots.sandbox.isolation.self_test import with_remedy
from palaestra_slots.sandbox.slotd import syscalls
from palaestra_slots.sandbox.slotd.namespaced import privileges

pytestmark = [
    pytest.mark.slots,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may filter itself and still gain privileges"),
    pytest.mark.skipif(syscalls.MACHINE != "x86_64", reason="the numbers below are those of x86-64"),
]

_LADDER = """
import asyncio, json, struct, sys
from palaestra_slots.sandbox.slotd import syscalls
denied, lines = json.loads(sys.argv[1]), [(0x20, 0, 0, 0)]
for number, answer in denied:
    lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | answer)]
lines.append((0x06, 0, 0, 0x7fff0000))
syscalls.install_filter(b"".join(struct.pack("=HBBI", *line) for line in lines))
from palaestra_slots.sandbox.isolation.isolation_probe import probe
print(json.dumps({step.rung.label: step.reason if not step.available else "" for step in asyncio.run(probe())}))
"""

MOUNT_SETATTR, OPEN_TREE, OPENAT2, LANDLOCK, UNSHARE, SECCOMP_BY_PRCTL = 442, 428, 437, 444, 272, 157


def ladder(*denied: tuple[int, int]) -> dict[str, str]:
    """Why each rung cannot be had where these system calls answer with these errors; empty where it can."""
    result = subprocess.run(
        [sys.executable, "-c", _LADDER, json.dumps(denied)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout)
    return found


def test_the_filter_changes_nothing_by_itself() -> None:
    assert not any(ladder((999, EPERM)).values())


def test_before_mounts_could_map_owners() -> None:
    found = ladder((MOUNT_SETATTR, ENOSYS))
    check_message(found["full"])
    assert found["confined"] == ""


def test_before_landlock_and_without_namespaces() -> None:
    found = ladder((LANDLOCK, ENOSYS), (UNSHARE, EPERM))
    assert "namespaces are not allowed" in found["full"]
    assert "namespaces are not allowed" in found["userns"]
    assert "no Landlock" in found["confined"]
    assert found["none"] == ""


def test_before_paths_could_be_held_inside_a_root() -> None:
    found = ladder((OPENAT2, ENOSYS))
    assert all(found[rung] for rung in ("full", "userns", "confined"))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("unshare 0x10000000: No space left on device", "user.max_user_namespaces"),
        ("unshare 0x10000000: Operation not permitted", "unprivileged_userns_clone"),
        ("cannot make a slot: mount overlay on /stage: Invalid argument", "before Linux 5.11"),
        ("cannot make a slot: mount overlay on /stage: No such device", "the kernel has no overlay file system"),
        ("mount_setattr: Function not implemented", "Linux 5.12"),
        ("control groups cannot be made: Permission denied", "/sys/fs/cgroup"),
        ("mount proc on proc: Operation not permitted", "systempaths=unconfined"),
    ],
)
def test_what_was_refused_is_explained(message: str, words: str) -> None:
    assert with_remedy(message).startswith(message)
    assert words in with_remedy(message)


def test_what_is_not_known_is_left_as_it_is() -> None:
    assert with_remedy("the moon is in the way") == "the moon is in the way"
    assert privileges.supported()
