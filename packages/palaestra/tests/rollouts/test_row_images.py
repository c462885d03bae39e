"""A bad image of one row fails that row's group; a bad image of the settings concerns all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import palaestra
from palaestra.rollouts.workspaces import image_of
from palaestra_slots.core.errors import ImageError, TaskError
from palaestra_slots.core.types import Blame, Task

pytestmark = pytest.mark.slots


def images(*named: str | None, setup: str | None = None) -> palaestra.FunctionForm:
    @palaestra.environment
    def rows() -> Iterator[Task]:
        for number, image in enumerate(named):
            yield Task(id=f"row-{number}", prompt="?", image=image, setup=setup, solution="true")

    @rows.score
    async def correct(sandbox: palaestra.Slot) -> bool:
        return (await sandbox.execute("true")).success

    return rows


@pytest.mark.parametrize("setup", [None, "true"])
@pytest.mark.parametrize("image", ["/no/such/root", "python:3.13", "rootfs", "./empty"])
def test_the_bad_image_of_one_row_fails_its_group_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, setup: str | None
) -> None:
    (tmp_path / "rootfs/bin").mkdir(parents=True)  # a name never means a file of the working directory
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    played = palaestra.run_sync(images(None, image, None, setup=setup), policy="oracle", folder=tmp_path)
    groups = {group.task_id: group for group in played.groups}
    assert [each.reward for name in ("row-0", "row-2") for each in groups[name].trajectories] == [1.0, 1.0]
    bad = groups["row-1"]
    errors = [bad.error, *(each.error for each in bad.trajectories)]
    assert any(image in error for error in errors), errors
    assert Blame.TASK in {bad.blame, *(each.blame for each in bad.trajectories)}
    assert all(each.reward is None for each in bad.trajectories)


def test_the_bad_image_of_a_setting_is_not_the_fault_of_a_row() -> None:
    with pytest.raises(ImageError) as raised, image_of(Task(id="t", prompt="?")):
        raise ImageError("the image /srv/root does not exist")
    assert not isinstance(raised.value, TaskError)
