"""`palaestra slots`: what it lists is there, what it removes is nobody's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from palaestra_slots.sandbox.snapshots.cache import Prepared, Put, Recipe
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

pytestmark = pytest.mark.slots


async def slots(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> JSON:
    """Run the command beside a running loop."""
    places = ["--directory", str(tmp_path / "services"), "--store", str(tmp_path / "store"), "--json"]
    command = ["slots", *words, *places, *(["--yes"] if words[0] == "clean" and "--dry-run" not in words else [])]
    assert await asyncio.to_thread(main, command) == 0
    return json.loads(capsys.readouterr().out)


async def test_what_runs_is_listed_and_what_is_used_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "services"
    backend = LocalBackend(rung=Rung.USERNS, service="gateway", service_directory=folder)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    slot = await backend.create(SlotSpec(), "chat-7")
    store = SnapshotStore(tmp_path / "store")
    recipe = Recipe(steps=(Put("f", b"x"),))
    await Prepared(backend, store.open).get(recipe)
    held = await Prepared(backend, store.open).get(recipe)
    (store.folder / "new-dead").mkdir()

    seen = await slots(capsys, tmp_path, "list")
    (service,) = seen["services"]
    assert (service["name"], service["attached"], service["rung"]) == ("gateway", True, "userns")
    assert [lease["about"]["trajectory_id"] for lease in service["leases"]] == ["chat-7"]
    assert [entry["key"] for entry in seen["workspaces"]] == [recipe.key(Rung.USERNS)]
    assert any(server["slots"] == 1 for server in seen["servers"])

    gone = await slots(capsys, tmp_path, "clean", "--all")
    assert (gone["services"], gone["workspaces"]) == ([], ["1 half-made"])
    assert (await slot.execute("echo on")).output == "on\n"

    await backend.forget(held)
    await backend.aclose()
    gone = await slots(capsys, tmp_path, "clean")
    assert (gone["services"], gone["workspaces"]) == ([], [])
    gone = await slots(capsys, tmp_path, "clean", "--all")
    assert (gone["services"], gone["workspaces"]) == (["gateway"], [recipe.key(Rung.USERNS)[:12]])
    assert (await slots(capsys, tmp_path, "list"))["services"] == []


async def test_nothing_there_is_not_made_by_looking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = await slots(capsys, tmp_path, "list")
    assert (seen["services"], seen["workspaces"]) == ([], [])
    await slots(capsys, tmp_path, "clean", "--all")
    assert list(tmp_path.iterdir()) == []


def test_the_plain_form_names_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        backend = LocalBackend(rung=Rung.USERNS, service="gateway", service_directory=tmp_path)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        await backend.create(SlotSpec(), "chat-7")
        command = ["slots", "list", "--directory", str(tmp_path), "--store", str(tmp_path / "none")]
        await asyncio.to_thread(main, command)
        text = capsys.readouterr().out
        assert "service gateway  userns, attached" in text
        assert "chat-7" in text
        assert "1 slots" in text
        await backend.end()

    asyncio.run(scenario())
