"""Images given by path in docker containers: what the image itself has is no sign of a missing protection."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from palaestra_slots.sandbox.backends.docker import ContainerOptions, DockerBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from sandbox.containers import Docker, docker
from sandbox.python_image import make_python_root

pytestmark = [pytest.mark.slots, pytest.mark.docker, pytest.mark.slow, pytest.mark.xdist_group("docker")]

IMAGE = "python:here"


def secret(path: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("root:*:19000:0:99999:7:::\n")
        (root / path).chmod(0o640)

    return write


def dangling(root: Path) -> None:
    (root / "etc/shadow").symlink_to("nowhere")


def everything_of_debian(root: Path) -> None:
    for path in ("etc/shadow", "etc/shadow-", "etc/gshadow", "etc/group", "var/lib/dpkg/status", "workspace/.proof"):
        secret(path)(root)


IMAGES: dict[str, Callable[[Path], None]] = {
    "no passwords": lambda root: None,
    "passwords": secret("etc/shadow"),
    "a link in place of passwords": dangling,
    "passwords of groups": secret("etc/gshadow"),
    "a file where the proof writes": secret("workspace/.proof"),
    "everything": everything_of_debian,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def daemon(root: Path) -> Iterator[Docker]:
    with docker() as client:
        client.load(root, IMAGE)
        yield client


@pytest.mark.parametrize("name", IMAGES)
async def test_an_image_by_path_may_have_accounts_of_its_own(
    name: str, daemon: Docker, root: Path, tmp_path: Path
) -> None:
    own = tmp_path / "image"
    shutil.copytree(root, own, symlinks=True)
    IMAGES[name](own)
    options = ContainerOptions(privileged=True)
    async with DockerBackend(IMAGE, hosts=[daemon.address], options=options) as backend:
        slot = await backend.create(SlotSpec(str(own)), "t")
        assert slot.rung is Rung.FULL
        there = await slot.execute("ls -A /etc; cat /etc/shadow 2>/dev/null")
        assert ("root:*" in there.output) == ((own / "etc/shadow").is_file())
        await backend.destroy(slot)
