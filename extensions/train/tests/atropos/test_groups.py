"""What is written down of the groups that a trainer has: full disks, kills, damage."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_train.atropos.groups import Deliveries

HEAD = '{"schema":"palaestra.deliveries/1"}\n'


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """What follows once there is room again must not begin in the middle of a line."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], check=True)
    try:
        path, room = tmp_path / "deliveries.jsonl", tmp_path / "room"
        deliveries = Deliveries(path)
        room.write_bytes(bytes(4096))
        with pytest.raises(DiskError, match=r"deliveries\.jsonl: No space left"):
            deliveries.add("run/" + "0" * 20_000)
        room.unlink()
        deliveries.add("run/1")
        deliveries.close()
        assert path.read_text() == HEAD + '{"delivery_id":"run/1"}\n'
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_that_is_full_at_the_start_is_said_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "full").write_bytes(bytes(1 << 20))
        with pytest.raises(DiskError, match=r"deliveries\.jsonl: No space left"):
            Deliveries(tmp_path / "deliveries.jsonl")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "deliveries.jsonl"
    path.write_text(HEAD + '{"delivery_id":"run/0"}\n{"delivery_')
    deliveries = Deliveries(path)
    assert "run/0" in deliveries
    assert len(deliveries) == 1
    deliveries.add("run/1")
    deliveries.close()
    assert path.read_text() == HEAD + '{"delivery_id":"run/0"}\n{"delivery_id":"run/1"}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + '{"delivery_id":"run/0"}\n{"deliv\0\0\n', "line 3 is damaged"),
        (HEAD + '{"delivered":"run/0"}\n', "line 2 is damaged"),
        (HEAD + "7\n", "line 2 is damaged"),
        ('{"schema":"palaestra.deliveries/2"}\n', r"deliveries\.jsonl has schema 'palaestra.deliveries/2'"),
        ("\n", r"deliveries\.jsonl has schema None"),
    ],
)
def test_damage_is_said_and_left_as_it_is(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "deliveries.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        Deliveries(path)
    assert path.read_text() == text
