"""What every format looks like on disk, byte for byte. To rewrite the files, run this one as a script."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.rollouts.export.exporter import ExportReport
from palaestra.rollouts.export.formats import FORMATS, exporter_named

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from recorded import META, groups

GOLDEN = Path(__file__).parent / "golden"


def exported(name: str) -> tuple[Path, bytes, ExportReport]:
    exporter, out = exporter_named(name), io.BytesIO()
    report = exporter.export(groups(), out, replace(META, everything=exporter.everything))
    return GOLDEN / f"{name}{exporter.ending}", out.getvalue(), report


def readable(data: bytes) -> dict[str, str]:
    """The members of an archive, because another library may compress them otherwise; or the one text."""
    if not data.startswith(b"PK"):
        return {"": data.decode()}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_as_it_was(name: str) -> None:
    if name == "batch":
        pytest.importorskip("palaestra_chat")
    path, written, _ = exported(name)
    assert readable(written) == readable(path.read_bytes())


@pytest.mark.parametrize("name", FORMATS)
def test_every_rollout_is_in_the_file_or_counted(name: str) -> None:
    _, _, report = exported(name)
    assert report.rollouts + report.left_out.total() == sum(len(group.trajectories) for group in groups())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in FORMATS:
        target, content, _ = exported(each)
        target.write_bytes(content)
