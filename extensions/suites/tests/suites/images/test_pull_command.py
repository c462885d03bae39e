"""`palaestra images pull`, and tasks whose image was pulled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from image_registry import PROGRAM, Registry, layer, running_registry
from palaestra.cli.main import main
from palaestra_slots.core.errors import ImageError, TaskError
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.task_images import TaskImages
from palaestra_slots.images.task_root import FROM, TaskRoots
from palaestra_suites.swe.row_image import RowImages
from palaestra_suites.swe.swe_row import parse_row

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs the Debian package docker-registry")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "real") as running:
        running.push("team/tool", "1", [layer({"usr/x": b"x"})])
        yield running


def test_the_command_pulls_lists_and_removes(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, store = f"127.0.0.1:{registry.port}/team/tool:1", ["--store", str(tmp_path / "store")]
    assert main(["images", "pull", name, *store]) == 0
    layout = capsys.readouterr().out.strip()
    assert (Path(layout) / "oci-layout").is_file()
    assert main(["images", "pull", name, *store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["path"] == layout
    assert main(["images", "list", *store, "--dir", str(tmp_path), "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["pulled"]] == [name]
    assert main(["images", "remove", name, *store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 0
    assert not Path(layout).exists()
    assert main(["images", "pull", f"127.0.0.1:{registry.port}/team/missing", *store]) == 1
    check_message(capsys.readouterr().err, "registry")
    assert main(["images", "pull", "Not/a Name", *store]) == 2
    assert main(["images", "pull", name, *store, "--auth", str(tmp_path / "missing.json")]) == 2


async def test_tasks_find_pulled_images(registry: Registry, tmp_path: Path) -> None:
    name = f"127.0.0.1:{registry.port}/team/tool:1"
    recipe = ImageRecipe(tmp_path, docker_image=name)
    (tmp_path / "Dockerfile").write_text(f"ARG IMAGE={name}\nFROM $IMAGE AS base\nENV A=1\n")
    built = ImageRecipe(tmp_path, tmp_path / "Dockerfile")
    builder, store = ImageBuilder(tmp_path / "roots", tool="no-such-tool"), tmp_path / "store"
    never = TaskImages(folder=store)
    with raises(TaskError, name):
        await TaskRoots(builder, {}, pulled=never).of("task", recipe)
    with raises(ImageError, name):
        await TaskRoots(builder, {}, base_image=FROM, pulled=never).of("task", built)
    roots = TaskRoots(builder, {}, pulled=TaskImages("missing", store))
    found = await roots.of("task", recipe)
    assert found == await TaskRoots(builder, {}, pulled=never).of("task", recipe)
    assert found.config.workdir == "/srv"
    over = await TaskRoots(builder, {}, base_image=FROM, pulled=never).of("task", built)
    assert (over.image, dict(over.config.env), over.config.workdir) == (found.image, {"A": "1"}, "/srv")
    assert over.build_key is not None
    assert str(found.image) in over.build_key  # so that a new image of the tag is built over again
    async with asyncio.TaskGroup() as group:
        other = TaskRoots(builder, {}, pulled=TaskImages("missing", tmp_path / "other"))
        several = [group.create_task(other.of(f"task{n}", recipe)) for n in range(5)]
    assert len({each.result().image for each in several}) == 1
    missing = replace(built, docker_image=f"127.0.0.1:{registry.port}/team/missing")
    with pytest.raises(TaskError, match="container tool"):  # it would build the Dockerfile
        await roots.of("task", missing)
    with raises(ImageError):
        await roots.of("task", replace(missing, dockerfile=None))
    forced = TaskRoots(ImageBuilder(tmp_path / "roots", tool="no-such-tool", force=True), {}, pulled=never)
    with pytest.raises(TaskError, match="container tool"):
        await forced.of("task", recipe)


async def test_rows_run_in_pulled_images(registry: Registry, tmp_path: Path) -> None:
    name = f"127.0.0.1:{registry.port}/team/tool:1"
    store, given = tmp_path / "store", tmp_path / "root"
    given.mkdir()
    row = {"instance_id": "one", "repo": "o/n", "base_commit": "0" * 40, "problem_statement": "p"}
    named = parse_row({**row, "FAIL_TO_PASS": ["t.py::t"], "image_name": name})
    other = parse_row({**row, "FAIL_TO_PASS": ["t.py::t"], "image_name": f"127.0.0.1:{registry.port}/team/missing"})
    never, missing = TaskImages(folder=store), TaskImages("missing", store)
    assert (never.may_have(name), missing.may_have(name), missing.may_have("")) == (False, True, False)
    assert await RowImages({}, None, never).find(named) is None
    found = await RowImages({}, None, missing).find(named)
    assert found is not None
    assert (Path(found) / "oci-layout").is_file()
    assert await RowImages({}, None, never).find(named) == found
    assert never.may_have(name)
    assert await RowImages({"one": str(given)}, None, missing).find(other) == str(given)
    with raises(TaskError):
        await RowImages({}, None, missing).find(other)
