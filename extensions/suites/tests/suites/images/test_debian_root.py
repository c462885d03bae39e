"""Root file systems of Debian, made without a container tool."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra_slots.core.errors import ConfigError, ImageError
from palaestra_slots.images.debian_root import make_root, roots
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.slot import SlotSpec

TOOL = shutil.which("mmdebstrap") or shutil.which("debootstrap")


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(900)
@pytest.mark.skipif(TOOL is None, reason="needs mmdebstrap or debootstrap")
@pytest.mark.parametrize(("release", "options"), [("debian:12", []), ("ubuntu:24.04", ["--insecure"])])
def test_a_root_of_a_release_is_made_listed_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], release: str, options: list[str]
) -> None:
    name = release.replace(":", "-")
    assert main(["images", "make", release, "--dir", str(tmp_path / "roots"), *options]) == 0
    tar = Path(capsys.readouterr().out.strip())
    assert tar.name == f"{name}.tar"
    assert main(["images", "list", "--dir", str(tmp_path / "roots"), "--json"]) == 0
    (root,) = json.loads(capsys.readouterr().out)["roots"]
    assert (root["name"], root["source"], root["bytes"]) == (name, release, tar.stat().st_size)

    async def use() -> str:
        async with LocalBackend(images=ImageStore(str(tmp_path / "store"))) as backend:
            slot = await backend.create(SlotSpec(image=str(tar)), "test")
            return (
                await slot.execute(". /etc/os-release; echo $ID $VERSION_ID; getent hosts localhost; dpkg -l apt")
            ).output

    output = asyncio.run(use())
    assert output.startswith(f"{release.replace(':', ' ')}\n")
    assert "localhost" in output
    assert "ii  apt" in output


def test_releases_and_tools_that_there_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="debian:12"):
        asyncio.run(make_root("debian:99", tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="mmdebstrap"):
        asyncio.run(make_root("debian:12", tmp_path, verify=False))
    with pytest.raises(ImageError, match=r"own\.gpg.*--keyring"):
        asyncio.run(make_root("ubuntu:24.04", tmp_path, keyring=str(tmp_path / "own.gpg")))
    assert roots(tmp_path) == []


def test_an_empty_folder_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "list", "--dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "palaestra images make" in captured.err
