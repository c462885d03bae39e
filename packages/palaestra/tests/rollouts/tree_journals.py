"""Journals with tree rollouts, which earlier versions made: `exact` has tokens, `scripted` plays a reference solution.

In each, the rollouts 2 and 3 of the group continue a turn of 0 or 1."""

from __future__ import annotations

import lzma
from pathlib import Path


def unpacked(folder: Path, name: str) -> Path:
    """Write the journal into this folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "journal.jsonl"
    path.write_bytes(lzma.decompress((Path(__file__).parent / "journals" / f"tree_{name}.jsonl.xz").read_bytes()))
    return path
