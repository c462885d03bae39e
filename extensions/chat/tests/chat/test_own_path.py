"""The project at its own path in a real sandbox: virtual environments, commits, worktrees, and large folders."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra_chat import workdir
from palaestra_chat.host_git import without_history
from palaestra_chat.service import ChatService
from palaestra_chat.store import ConversationStore
from palaestra_chat.workdir import WorkFolder
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Rung, Slot
from palaestra_tokens.config import APIServerConfig

pytestmark = pytest.mark.slots


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("a\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=Ann", "-c", "user.email=a@x.org", "commit", "-qm", "begin")
    return folder


def in_sandbox(
    root: Path, tmp_path: Path, body: Callable[[WorkFolder, Slot], Awaitable[None]], rung: Rung | None = None
) -> None:
    """Run with the slot that a conversation about this folder gets."""

    async def main() -> None:
        folder, server = WorkFolder(root), APIServerConfig(base_url="http://127.0.0.1:1/v1", model_name="m")
        with ConversationStore(tmp_path / "store.sqlite") as store:
            async with ChatService(server, store, pool=SlotPool(backend=LocalBackend(rung=rung))) as service:
                place = "" if folder.place == "/workspace" else folder.place
                slot, _ = await service.lease("c", None, place, folder.uncopied)
                await folder.fill(slot)
                await body(folder, slot)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("rung", [None, Rung.USERNS])
def test_a_virtual_environment_with_absolute_paths_works(tmp_path: Path, rung: Rung | None) -> None:
    root = tmp_path / "my shop"
    root.mkdir()
    (tmp_path / "private").write_text("key")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    script = root / ".venv/bin/where"
    script.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -c \'import sys; print(sys.prefix)\'\n')
    script.chmod(0o755)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(f"pwd; '{root}/.venv/bin/where'; .venv/bin/where; /workspace/.venv/bin/where")
        assert done.output.splitlines()[:3] == [str(root), f"{root}/.venv", f"{root}/.venv"]
        assert (await slot.execute("ls -A ..")).output == "my shop\n"
        await slot.execute(f"echo new > '{root}/new.txt'")
        assert [change.path for change in await folder.changes(slot)] == ["new.txt"]
        assert folder.apply(await folder.changes(slot)) == []
        assert (root / "new.txt").read_text() == "new\n"

    in_sandbox(root, tmp_path, body, rung)


def test_a_folder_of_the_system_is_at_the_workspace_only() -> None:
    assert WorkFolder(Path("/etc")).place == WorkFolder(Path("/usr/lib")).place == "/workspace"


def test_commits_have_the_name_of_the_person_and_no_other_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, settings = repository(tmp_path / "work" / "shop"), tmp_path / "settings"
    (tmp_path / "of-work").write_text("[user]\nemail = ann@work.example\n")
    ran = tmp_path / "ran"
    settings.write_text(
        f"[user]\nname = Ann Ö\nemail = ann@home.example\nsigningkey = K\n[commit]\ngpgsign = true\n[alias]\n"
        f"config = !touch {ran}\n[credential]\nhelper = !touch {ran}\n[core]\nhooksPath = {tmp_path}\n"
        f'[includeIf "gitdir:{tmp_path}/work/"]\npath = {tmp_path}/of-work\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute("echo b >> a.txt; git commit -qam more && git log -1 --format='%an %ae %cn'")
        assert done.output == "Ann Ö ann@work.example Ann Ö\n"
        listed = (await slot.execute("git config --global --list")).output
        assert listed == "user.name=Ann Ö\nuser.email=ann@work.example\n"
        assert folder.apply(await folder.changes(slot)) == []
        assert git(root, "log", "-1", "--format=%s %ae") == "more ann@work.example"
        assert not ran.exists()

    in_sandbox(root, tmp_path, body)


def test_the_settings_of_the_repository_hold_before_those_of_the_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, settings = repository(tmp_path / "shop"), tmp_path / "settings"
    settings.write_text("[user]\nname = Ann\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    git(root, "config", "user.email", "here@x.org")

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute("git commit -q --allow-empty -m more && git log -1 --format='%an %ae'")
        assert done.output == "Ann here@x.org\n"

    in_sandbox(root, tmp_path, body)


def test_a_folder_without_its_history_is_explained(tmp_path: Path) -> None:
    root = repository(tmp_path / "shop")
    (root / "src").mkdir()
    git(root, "worktree", "add", "-q", str(tmp_path / "tree"))
    allowed = ("-c", "protocol.file.allow=always")
    git(root, *allowed, "submodule", "--quiet", "add", str(repository(tmp_path / "part")), "part")
    (tmp_path / "plain").mkdir()
    assert without_history(root) == without_history(tmp_path / "plain") == ""
    for folder in (root / "src", tmp_path / "tree", root / "part"):
        assert str(root) in without_history(folder)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute("git -C part log --format=%s; git submodule status --cached | wc -l; git status -s")
        assert done.output.splitlines()[:2] == ["begin", "1"]

    in_sandbox(root, tmp_path, body)


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.CONFINED])
def test_a_large_folder_begins_with_its_packages_and_offers_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Rung
) -> None:
    root = repository(tmp_path / "shop")
    for name in ("node_modules/left/index.js", "web/node_modules/right/index.js", "target/debug/out", ".venv/bin/tool"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("theirs\n")
    (root / ".gitignore").write_text("target\n")
    (root / "target/CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    limits: dict[str, JSON] = {"files": sum(path.is_file() for path in (root / ".git").rglob("*")) + 2, "lean": False}
    monkeypatch.setattr(workdir.fits, "__kwdefaults__", limits)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        paths = "node_modules/left/index.js web/node_modules/right/index.js target/debug/out .venv/bin/tool"
        assert (await slot.execute(f"cat {paths}")).success is bool(slot.spec.copies)
        assert bool(slot.spec.copies) is (rung is Rung.FULL)
        await slot.execute(f"for f in {paths}; do mkdir -p $(dirname $f); echo mine > $f; done")
        await slot.execute("rm -rf node_modules/left; mkdir -p node_modules/new; touch node_modules/new/x x.pyc")
        await slot.execute("echo own > own.txt")
        assert [change.path for change in await folder.changes(slot)] == ["own.txt"]
        assert (root / "node_modules/left/index.js").read_text() == "theirs\n"

    in_sandbox(root, tmp_path, body, rung)
