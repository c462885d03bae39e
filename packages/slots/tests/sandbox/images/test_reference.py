"""Which texts are images, and that nothing else becomes an argument of a container tool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, ImageError, TaskError
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.task_root import TaskRoots
from palaestra_slots.sandbox.backends.docker import DockerBackend, build_docker_image, docker_image_exists
from palaestra_slots.sandbox.backends.remote import PlaceSpec
from palaestra_slots.sandbox.backends.singularity import SingularityBackend
from palaestra_slots.sandbox.images.reference import check_image, image_name
from palaestra_slots.sandbox.slot import Mount, SlotSpec

NAMES = [
    "python:3.13",
    "atropos-sandbox:local",
    "ghcr.io/laude-institute/t-bench/python-3-13:20250620",
    "localhost:5000/a__b/c-d.e:V1_2",
    "swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
    f"python@sha256:{'a' * 64}",
    "docker://python:3.13",
    "oras://ghcr.io/owner/name:tag",
    "python.sif",
    "roots/python.tar.gz",
]
PATHS = ["/srv/my root/python.tar", "./python.sif", "../roots/debian", "/srv/a,b", "."]
BAD = [
    "--privileged",
    "-v/:/host",
    "python:3.13 --privileged",
    " python",
    "python\n",
    "python:3.13\t",
    "/srv/root\n--privileged",
    "a\0b",
    "docker-archive:/root/secret.tar",
    "oci:/root/layout",
    "instance://other",
    "file:///etc",
    "docker-daemon:python:3.13",
    "python:-v",
    "owner//name",
    "a/../../b",
    "ghcr.io/-owner/name",
    "a" * 5000,
]


@pytest.mark.parametrize("image", [*NAMES, *PATHS])
def test_names_and_paths_are_images(image: str) -> None:
    check_image(image)
    assert SlotSpec(image=image).image == image


@pytest.mark.parametrize("image", BAD)
def test_other_texts_are_not_images(image: str) -> None:
    with raises(ImageError, repr(image[:200])):
        SlotSpec(image=image)


@pytest.mark.parametrize("image", ["--privileged", "python -v/:/host"])
def test_a_container_tool_gets_no_option_as_its_image(image: str, tmp_path: Path) -> None:
    with raises(ImageError):
        DockerBackend().command(PlaceSpec(image=image), ["python3"])
    with raises(ImageError):
        asyncio.run(docker_image_exists(image))
    with raises(ImageError):
        asyncio.run(build_docker_image(tmp_path, image))
    with raises(TaskError):
        asyncio.run(ImageBuilder(tmp_path, tool="true").root(ImageRecipe(tmp_path, None, image)))


def test_apptainer_gets_no_option_as_its_image() -> None:
    with raises(ConfigError):
        SingularityBackend("--bind=/:/host").command(PlaceSpec(image="--bind=/:/host"), ["python3"])


def test_apptainer_takes_no_name_of_a_task_for_a_file() -> None:
    backend = SingularityBackend("python.sif")
    images = [backend.place_spec(SlotSpec(image=image)).image for image in ("backup.sif", "./a.sif", "oras://a/b", "")]
    assert images == ["docker://backup.sif", "./a.sif", "oras://a/b", "python.sif"]


def test_a_folder_whose_name_would_be_read_as_two_mounts_is_refused() -> None:
    strange = PlaceSpec(image="python:3.13", mounts=(Mount("/srv/a:/etc", "/opt/a"),))
    with raises(ConfigError, "/srv/a", "/etc"):
        DockerBackend().command(strange, ["python3"])
    several = PlaceSpec(image="python:3.13", mounts=(Mount("/srv/a,/etc", "/opt/a"),))
    with raises(ConfigError, "/srv/a", "/etc"):
        SingularityBackend("python.sif").command(several, ["python3"])
    assert "/srv/a,/etc:/opt/a:ro" in DockerBackend().command(several, ["python3"])


@pytest.mark.parametrize("pair", [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")])
def test_variables_that_no_process_can_have_are_refused(pair: tuple[str, str]) -> None:
    with raises(ConfigError):
        SlotSpec(env=(pair,))


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "sub/other"])
def test_a_name_of_a_row_leads_to_no_folder_outside_the_images(name: str, tmp_path: Path) -> None:
    (tmp_path / "images/sub/other").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    assert TaskRoots(ImageBuilder(tmp_path), {}, tmp_path / "images").ready(name) is None


DIGEST = f"sha256:{'a1' * 32}"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.13", "docker.io/library/python:3.13"),
        ("docker://owner/name", "docker.io/owner/name:latest"),
        ("index.docker.io/owner/name", "docker.io/owner/name:latest"),
        ("GHCR.io/owner/name:V1", "ghcr.io/owner/name:V1"),
        ("localhost/name", "localhost/name:latest"),
        ("registry:5000/a/b_c/d-e:1", "registry:5000/a/b_c/d-e:1"),
        (f"name:tag@{DIGEST}", f"docker.io/library/name@{DIGEST}"),
    ],
)
def test_names_have_the_defaults_of_docker(text: str, full: str) -> None:
    assert str(image_name(text)) == full


@pytest.mark.parametrize(
    "text",
    [*BAD, "", "/srv/root", "./name", "Owner/name", "name@sha256:abc", f"name@{DIGEST}0", "a.b:x/y", "user@host/name",
     f"a/{'b' * 256}", "oras://ghcr.io/a/b", "name:" + "t" * 129],
)  # fmt: skip
def test_other_texts_name_no_image_of_a_registry(text: str) -> None:
    with pytest.raises(ImageError, match="image in a registry"):
        image_name(text)
