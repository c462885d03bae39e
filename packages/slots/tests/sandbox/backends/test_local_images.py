"""Slots of images: a tar file as the root, and what is said of one that cannot be."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ImageError, IsolationUnavailable
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.slot import Rung, SlotSpec

pytestmark = pytest.mark.slots


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with nothing but this host's bash and cat, as `docker export` would write it."""
    path = tmp_path / "bash.tar"
    with tarfile.open(path, "w", dereference=True) as archive:
        for name in ("etc", "proc", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        for program in ("/bin/bash", "/bin/cat"):
            listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
            for file in {program, *re.findall(r"(/[^ ]+) \(", listed)}:
                archive.add(file)
    return path


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
async def test_a_tar_file_is_the_root_of_many_slots(rung: Rung, image: Path, tmp_path: Path) -> None:
    backend = LocalBackend(rung=rung, images=ImageStore(str(tmp_path / "store")))
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        spec = SlotSpec(image=str(image))
        first, second = await asyncio.gather(backend.create(spec, "1"), backend.create(spec, "2"))
        result = await first.execute("echo /bin/* /usr/*; echo mine > mine; cat mine; pwd; echo $UID")
        assert result.output.splitlines() == ["/bin/bash /bin/cat /usr/*", "mine", "/workspace", "0"]
        assert await second.stat("mine") is None
        snapshot = await backend.seal(first)
        third = await backend.create(spec, "3", snapshot)
        assert await third.read_text("mine") == "mine\n"
        [folder] = [path for path in (tmp_path / "store").iterdir() if (path / "bin").is_dir()]
        assert not (folder / "workspace/mine").exists()


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
@pytest.mark.parametrize("own", [None, "", "10.0.0.1 mine localhost\n"], ids=["missing", "empty", "own"])
def test_localhost_and_the_resolver_are_in_slots_of_images(rung: Rung, own: str | None, tmp_path: Path) -> None:
    """`docker export` leaves `/etc/hosts` and `/etc/resolv.conf` empty."""
    root = tmp_path / "root"
    for folder in ("etc", "proc", "tmp"):
        (root / folder).mkdir(parents=True)
    for program in ("/bin/bash", "/bin/cat"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in {program, *re.findall(r"(/[^ ]+) \(", listed)}:
            (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / file[1:])
    if own is not None:
        (root / "etc/hosts").write_text(own)
        (root / "etc/resolv.conf").write_text("")
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)

    async def main() -> None:
        backend = LocalBackend(rung=rung, images=ImageStore(str(tmp_path / "store")))
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            slot = await backend.create(SlotSpec(image=str(root)), "off")
            hosts = (await slot.execute("cat /etc/hosts")).output
            assert hosts == own if own else "127.0.0.1\tlocalhost" in hosts
            if not own:  # below full, a file of the image may have another owner than the slot's root
                added = await slot.execute("echo '127.0.0.1 other' >> /etc/hosts && cat /etc/hosts")
                assert added.output.endswith("other\n")
            on = await backend.create(SlotSpec(image=str(root), network=Network.ON), "on")
            if "nameserver" in Path("/etc/resolv.conf").read_text():
                assert "nameserver" in (await on.execute("cat /etc/resolv.conf")).output
        assert (root / "etc/hosts").exists() == (own is not None)

    asyncio.run(main())


async def test_an_image_that_cannot_be_used_is_named_and_harms_nobody(image: Path, tmp_path: Path) -> None:
    backend = LocalBackend(images=ImageStore(str(tmp_path / "store")))
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        (tmp_path / "broken.tar").write_bytes(image.read_bytes()[:100_000])
        for name in ("missing", "broken.tar"):
            with pytest.raises(ImageError, match=name):
                await backend.create(SlotSpec(image=str(tmp_path / name)), "test")
        slot = await backend.create(SlotSpec(), "test")
        assert (await slot.execute("echo fine")).output == "fine\n"
