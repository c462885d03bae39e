"""Dockerfiles that are built in a slot, and the configuration of the root file system that they start from."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ImageError
from palaestra_slots.images.dockerfile import DEFAULT_PATH, ImageConfig, ImageRecipe
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.slot_build import build_in_slot
from palaestra_slots.images.task_root import TaskRoot, TaskRoots
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from roots import make_root

SETTINGS = {"Env": ["PATH=/opt/base/bin:/usr/bin:/bin", "COLOUR=green"], "WorkingDir": "/srv/base", "User": ""}


def recipe(folder: Path, text: str) -> ImageRecipe:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return ImageRecipe(folder, folder / "Dockerfile")


def root_of(recipe: ImageRecipe, tmp_path: Path, base: str | None, **settings: object) -> TaskRoot:
    roots = TaskRoots(ImageBuilder(tmp_path / "built"), {}, base_image=base, **settings)  # type: ignore[arg-type]
    return asyncio.run(roots.of("task", recipe))


def saved(path: Path, config: object) -> Path:
    """Write an archive as `docker save` does, with a configuration and without layers."""
    listed = [{"Config": "c.json", "RepoTags": None, "Layers": []}]
    with tarfile.open(path, "w") as archive:
        for name, value in (("c.json", {"config": config}), ("manifest.json", listed)):
            data = json.dumps(value).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def layout(folder: Path, config: object) -> Path:
    """Write an OCI layout with a configuration and without layers."""
    (folder / "blobs/sha256").mkdir(parents=True)

    def put(value: object) -> dict[str, str]:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}"}

    manifest = put({"config": put({"config": config}), "layers": []})
    (folder / "oci-layout").write_text("{}")
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return folder


@pytest.mark.slots
def test_a_path_that_a_dockerfile_extends_keeps_the_programs_of_the_system(tmp_path: Path) -> None:
    text = """
FROM python:3.13
ENV PATH="/x:$PATH"
ENV PATH=${PATH}:/y
WORKDIR /app
RUN mkdir /x && printf '#!/bin/sh\\necho from-x' > /x/tool && chmod 755 /x/tool && ls / > listed
RUN tool > said && echo "$PATH" > path
"""
    made = recipe(tmp_path / "task", text)
    root = root_of(made, tmp_path, str(make_root(tmp_path / "root")))
    assert root.config.env["PATH"] == f"/x:{DEFAULT_PATH}:/y"

    async def main() -> None:
        async with LocalBackend() as backend:
            slot = await backend.create(SlotSpec(image=root.image, env=tuple(root.config.env.items())), "build")
            assert await build_in_slot(slot, made, root.base) == root.config
            assert await slot.read_text("/app/said") == "from-x\n"
            assert await slot.read_text("/app/path") == f"/x:{DEFAULT_PATH}:/y\n"
            assert "app" in (await slot.read_text("/app/listed")).split()
            done = await slot.execute("tool && ls /app", cwd="/app")
            assert done.output.split() == ["from-x", "listed", "path", "said"]

    asyncio.run(main())


@pytest.mark.slots
def test_the_directory_and_variables_of_the_base_are_kept(tmp_path: Path) -> None:
    base = make_root(tmp_path / "root")
    record = {"version": 1, "env": {"PATH": "/opt/base/bin:/usr/bin", "COLOUR": "green"}, "workdir": "/srv/base"}
    (tmp_path / "root.json").write_text(json.dumps(record))
    text = 'FROM x\nENV PATH="$PATH:/y" PAINT=$COLOUR\nRUN echo "$COLOUR" > colour\nWORKDIR below\nRUN pwd > here\n'
    made = recipe(tmp_path / "task", text)
    root = root_of(made, tmp_path, str(base))
    env = {"PATH": "/opt/base/bin:/usr/bin:/y", "COLOUR": "green", "PAINT": "green"}
    assert root.config == ImageConfig(env, "/srv/base/below")

    async def main() -> None:
        async with LocalBackend() as backend:
            slot = await backend.create(SlotSpec(image=root.image), "build")
            await slot.execute("mkdir -p /srv/base")
            assert await build_in_slot(slot, made, root.base) == root.config
            assert await slot.read_text("/srv/base/colour") == "green\n"
            assert await slot.read_text("/srv/base/below/here") == "/srv/base/below\n"

    asyncio.run(main())


@pytest.mark.parametrize("write", [saved, layout], ids=["docker save", "OCI layout"])
def test_an_image_states_its_own_directory_and_variables(write: object, tmp_path: Path) -> None:
    assert callable(write)
    image = write(tmp_path / "base.tar", SETTINGS)
    root = root_of(recipe(tmp_path / "task", 'FROM x\nENV PATH="/x:$PATH"\n'), tmp_path, str(image))
    env = {"PATH": "/x:/opt/base/bin:/usr/bin:/bin", "COLOUR": "green"}
    assert root.config == ImageConfig(env, "/srv/base")
    image_dir = tmp_path / "images"
    image_dir.mkdir()
    image.rename(image_dir / f"task{'.tar' if image.is_file() else ''}")
    prebuilt = root_of(ImageRecipe(tmp_path, None, "x"), tmp_path, None, image_dir=image_dir)
    assert prebuilt.config.workdir == "/srv/base"


def test_a_base_with_a_broken_configuration_is_named(tmp_path: Path) -> None:
    image = saved(tmp_path / "base.tar", {"Env": [1]})
    with raises(ImageError):
        root_of(recipe(tmp_path / "task", "FROM x\n"), tmp_path, str(image))


def test_another_configuration_of_the_base_is_another_build(tmp_path: Path) -> None:
    made = recipe(tmp_path / "task", "FROM x\nCOPY Dockerfile .\n")
    base = tmp_path / "base"
    base.mkdir()
    first = root_of(made, tmp_path, str(base))
    (tmp_path / "base.json").write_text('{"workdir": "/app"}')
    second = root_of(made, tmp_path, str(base))
    assert first.build_key != second.build_key
    assert (first.config.workdir, second.config.workdir) == ("/", "/app")


@pytest.mark.parametrize(
    ("lines", "workdir"),
    [
        ("FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\n", "/app"),
        ("FROM --platform=linux/amd64 ghcr.io/laude-institute/t-bench/ubuntu-24-04:latest AS base\n", "/app"),
        ("ARG BASE=ghcr.io/laude-institute/t-bench/ubuntu-24-04\nFROM ${BASE}\nWORKDIR sub\n", "/app/sub"),
        ("FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04\nWORKDIR /srv\n", "/srv"),
        ("FROM ubuntu:24.04\n", "/"),
    ],
)
def test_base_images_of_terminal_bench_start_in_app(lines: str, workdir: str, tmp_path: Path) -> None:
    assert root_of(recipe(tmp_path / "task", lines), tmp_path, "host").config.workdir == workdir


@pytest.mark.slots
def test_files_are_copied_to_the_directory_of_a_terminal_bench_image(tmp_path: Path) -> None:
    made = recipe(tmp_path / "task", "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04\nCOPY note .\nRUN pwd > here\n")
    (made.folder / "note").write_text("x")
    root = root_of(made, tmp_path, "host")

    async def main() -> None:
        async with LocalBackend() as backend:
            slot = await backend.create(SlotSpec(image=root.image), "build")
            assert replace(await build_in_slot(slot, made, root.base), env={}) == ImageConfig({}, "/app")
            assert await slot.read_text("/app/note") == "x"
            assert await slot.read_text("/app/here") == "/app\n"

    asyncio.run(main())


STAGES = """\
FROM debian AS base
RUN mkdir -p /opt/both && echo base > /opt/both/base
FROM base AS made
RUN mkdir -p /out/bin /out/lib && echo tool > /out/bin/tool && chmod 755 /out/bin/tool && ln -s ../bin/tool /out/lib/it
RUN echo one > "/out/a b.txt" && echo two > /tmp/later.txt && chown 1234:1234 /out/lib
FROM debian AS unused
RUN exit 3
FROM base
WORKDIR /app
COPY --from=made /out /usr/local/made
COPY --from=made /out/bin/tool /out/*.txt here/
COPY --from=1 /tmp/later.txt last.txt
COPY --from=made --chmod=600 --chown=5:6 ["/out/a b.txt", "named"]
RUN mkdir /there
COPY --from=1 /tmp/later.txt /there
COPY Dockerfile /there
"""


@pytest.mark.slots
async def test_stages_are_built_beside_each_other(tmp_path: Path) -> None:
    async with LocalBackend() as backend:
        slot = await backend.create(SlotSpec(), "stages")
        assert (await build_in_slot(slot, recipe(tmp_path / "task", STAGES))).workdir == "/app"
        assert await slot.stat("/out") is None, "the other stage's files are not here"
        look = "cat /opt/both/base /usr/local/made/lib/it here/* last.txt named; stat -c '%a %u:%g' named here/tool"
        look += "; stat -c %u:%g /usr/local/made/lib; ls /tmp /there"
        result = (await slot.execute(["/bin/sh", "-c", look], cwd="/app")).output
    assert result.split() == [
        *("base", "tool", "one", "tool", "two", "one", "600", "5:6", "755", "0:0", "1234:1234"),
        *("/there:", "Dockerfile", "later.txt", "/tmp:"),
    ]
