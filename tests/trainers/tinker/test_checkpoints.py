"""The folder of checkpoints against what a client may ask of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from palaestra.trainers.tinker.checkpoints import Checkpoint, CheckpointFolder
from palaestra.trainers.tinker.model import UserError


def test_a_checkpoint_cannot_expire_beyond_the_calendar(tmp_path: Path) -> None:
    saved = Checkpoint(
        run="r", kind="weights", name="n", base_model="m", digest="d", lora=None, steps=0, folder="n.0",
        size_bytes=0, created_s=0.0,
    )  # fmt: skip
    file = tmp_path / "r/weights/n.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.json.encode(saved))
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(UserError, match="ttl_seconds"):
        folder.set_expiry(saved.path, 1e300)
    folder.set_expiry(saved.path, 3600)
    assert folder.find(saved.path).expires_s is not None
