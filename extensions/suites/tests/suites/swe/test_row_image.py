"""A row in the image that it names: the tests run on the image's interpreter, with what the image installed."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from palaestra_slots.images.debian_root import make_root
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import BASE, TESTS, Source, roll_out

pytestmark = [pytest.mark.network, pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(900)]

NEEDS_IT = f"import only_in_the_image\n{TESTS}"


@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap")
def test_a_row_runs_in_the_root_of_its_image(tmp_path: Path, installed_pytest: DependencyCache) -> None:
    source = Source.make(tmp_path / "source", {**BASE, "tests/test_calc.py": NEEDS_IT})
    made = asyncio.run(make_root("debian:12", tmp_path / "roots", include=("python3-pytest",)))
    image = made.rename(tmp_path / "roots" / "sweb.eval.x86_64.o__n-1.tar")
    with tarfile.open(image, "a") as archive:
        archive.add(source.path, "testbed")
        installed = {"only_in_the_image.py": "", "installed.pth": "/testbed\n"}  # as `pip install -e` does
        for name, text in {f"usr/lib/python3/dist-packages/{name}": text for name, text in installed.items()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    row = source.row(image_name="swebench/sweb.eval.x86_64.o__n-1:latest")
    del row["install"]
    for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
        flags = (f"--env.image_dir={tmp_path / 'roots'}", "--env.controls=false")
        (group,) = roll_out([row], policy, tmp_path / policy, installed_pytest, *flags)
        assert not group.error, group.error
        (trajectory,) = group.trajectories
        assert trajectory.reward == reward, (trajectory.detail, trajectory.error)
