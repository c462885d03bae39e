"""The shared folder against what an agent or the person does at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra.chat.config import ChatConfig, prompt
from palaestra.chat.workdir import WorkFolder
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.slot import Slot, SlotSpec

pytestmark = pytest.mark.slots


def with_slot(root: Path, body: Callable[[WorkFolder, Slot], Awaitable[None]]) -> None:
    """Run with a folder that is copied into a slot."""

    async def main() -> None:
        backend, folder = LocalBackend(), WorkFolder(root)
        try:
            await backend.start()
            slot = await backend.create(spec=SlotSpec(), trajectory_id="t")
            await folder.fill(slot)
            await body(folder, slot)
        finally:
            await backend.aclose()

    asyncio.run(main())


def test_a_file_that_changes_while_the_person_reads_the_diff_is_kept(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute("echo agent > a.txt; echo agent > b.txt; echo agent > new.txt; rm gone.txt")
        changes = await folder.changes(slot)
        for name in ("a.txt", "new.txt", "gone.txt"):
            (tmp_path / name).write_text("person")
        assert sorted(change.path for change in folder.apply(changes)) == ["a.txt", "gone.txt", "new.txt"]
        assert [(tmp_path / name).read_text() for name in ("a.txt", "new.txt", "gone.txt")] == ["person"] * 3
        assert (tmp_path / "b.txt").read_text() == "agent\n"

    for name in ("a.txt", "b.txt", "gone.txt"):
        (tmp_path / name).write_text("before")
    with_slot(tmp_path, body)


def test_a_name_that_is_not_text_keeps_no_other_file_back(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute("touch $'\\xff'; echo agent > a.txt")
        assert folder.apply(await folder.changes(slot)) == []
        assert (tmp_path / "a.txt").read_text() == "agent\n"

    with_slot(tmp_path, body)


def test_instructions_are_read_from_the_folder_alone(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.write_text("a secret")
    folder.mkdir()
    (folder / "AGENTS.md").symlink_to(secret)
    assert "a secret" not in str(prompt(ChatConfig(), WorkFolder(folder)))
    (folder / "rules.md").write_text("the rules")
    (folder / "CLAUDE.md").symlink_to("rules.md")
    assert "the rules" in str(prompt(ChatConfig(), WorkFolder(folder)))
