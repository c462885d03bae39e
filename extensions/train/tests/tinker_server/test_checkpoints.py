"""The folder of checkpoints against what a client may ask of it, and against checkpoints that others wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from palaestra_train.tinker.checkpoints import Checkpoint, CheckpointFolder
from palaestra_train.tinker.model import UserError


def saved(top: Path, folder: str = "n.00000000", run: str = "r", name: str = "n") -> Checkpoint:
    """Write a checkpoint without tensors at `tinker://r/weights/n`."""
    checkpoint = Checkpoint(
        run=run, kind="weights", name=name, base_model="m", digest="d", lora=None, steps=0, folder=folder,
        size_bytes=0, created_s=0.0,
    )  # fmt: skip
    file = top / "r/weights/n.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(checkpoint))
    return checkpoint


def test_a_checkpoint_cannot_expire_beyond_the_calendar(tmp_path: Path) -> None:
    path = saved(tmp_path).path
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(UserError, match="ttl_seconds"):
        folder.set_expiry(path, 1e300)
    folder.set_expiry(path, 3600)
    assert folder.find(path).expires_s is not None


@pytest.mark.parametrize(
    ("named", "run", "name"),
    [
        ("../../../victim", "r", "n"),
        ("{top}/victim", "r", "n"),
        (".", "r", "n"),
        ("", "r", "n"),
        ("other.00000000", "r", "n"),
        ("n.00000000/../../../../victim", "r", "n"),
        ("n.00000000", "../..", "n"),
        ("n.00000000", "r", "../n"),
    ],
)
def test_a_foreign_checkpoint_cannot_delete_or_load_another_folder(
    named: str, run: str, name: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").touch()
    top = tmp_path / "checkpoints"
    saved(top, named.format(top=tmp_path), run, name)
    folder = CheckpointFolder(top)
    for use in (folder.find, folder.delete):
        with pytest.raises(UserError, match="not its own"):
            use("tinker://r/weights/n")
    with pytest.raises(UserError, match="not its own"):
        folder.sweep()
    assert (victim / "kept").exists()
    assert (top / "r/weights/n.json").exists()


@pytest.mark.parametrize("at", ["r", "r/weights", "r/weights/n.00000000", "r/weights/n.00000000/model.safetensors"])
def test_a_foreign_checkpoint_cannot_lead_out_of_its_folder_by_a_link(at: str, tmp_path: Path) -> None:
    top, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    saved(top)
    (top / "r/weights/n.00000000").mkdir()
    (top / "r/weights/n.00000000/model.safetensors").touch()
    (top / at).rename(elsewhere)
    (top / at).symlink_to(elsewhere)
    folder = CheckpointFolder(top)
    with pytest.raises(UserError, match="links to"):
        folder.delete("tinker://r/weights/n")
    with pytest.raises(UserError, match="links to"):
        folder.sweep()
    assert elsewhere.exists()


def test_a_sweep_removes_only_folders_that_a_crash_left(tmp_path: Path) -> None:
    saved(tmp_path)
    folders = [tmp_path / "r/weights" / name for name in ("n.00000000", "n.11111111", "other")]
    for folder in folders:
        folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    (tmp_path / "r/weights/x.22222222").symlink_to(elsewhere)
    CheckpointFolder(tmp_path).sweep()
    assert [folder.exists() for folder in folders] == [True, False, True]
    assert (elsewhere / "kept").exists()
