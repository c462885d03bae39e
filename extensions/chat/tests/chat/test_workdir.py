"""The shared folder against what an agent or the person does at the same time."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra_chat import workdir
from palaestra_chat.config import ChatConfig, prompt
from palaestra_chat.workdir import CHANGED_HERE, FULL_FOLDER, LEADS_OUT, NOT_A_FILE, NOT_UTF_8, Refreshed, WorkFolder
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec

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


def test_a_name_that_is_not_text_is_left_out_and_keeps_no_other_file_back(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute("touch $'\\xff'; rm $'\\xfe'; mkfifo pipe; echo agent > a.txt")
        left = folder.apply(await folder.changes(slot))
        assert {change.path: change.problem for change in left} == {"\udcff": NOT_UTF_8, "pipe": NOT_A_FILE}
        assert (tmp_path / "a.txt").read_text() == "agent\n"
        assert os.listdir(os.fsencode(tmp_path)) == [b"a.txt"]

    (tmp_path / "\udcfe").write_text("x")
    with_slot(tmp_path, body)


def everything(root: Path) -> dict[str, tuple[int, str]]:
    """The mode of each file, and its content or, for a symlink, its target."""
    found = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            text = os.readlink(path) if stat.S_ISLNK(mode) else path.read_text("latin-1")
            found[path.relative_to(root).as_posix()] = (mode, text)
    return found


def test_modes_links_and_unusual_names_are_written_and_taken_back(tmp_path: Path) -> None:
    command = """
        chmod +x s.sh; chmod 600 secret; echo more >> run.sh; chmod -x run.sh; cat same > new && mv new same
        mkdir real && mv app.conf real/ && ln -s real/app.conf app.conf; ln -s s.sh alias
        rm link.py; cp m.py link.py; ln -sfn real dir; rm cur && mkdir cur && echo z > cur/x; rm gone
        echo t > "$(printf 'tab\\there\\nline')"; echo one > hard
    """
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    root = tmp_path / "work"
    root.mkdir()
    for name in ("s.sh", "secret", "run.sh", "same", "app.conf", "m.py", "hard", "old/x"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{name}\n")
    os.link(root / "hard", root / "other")
    (root / "run.sh").chmod(0o755)
    (root / "same").chmod(0o664)
    for name, target in {
        "link.py": "m.py",
        "dir": "old",
        "cur": "old",
        "gone": "../outside",
        "kept": str(outside),
    }.items():
        (root / name).symlink_to(target)
    before = everything(root)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(command)
        assert done.success, done.output
        assert folder.apply(await folder.changes(slot)) == []
        assert await folder.changes(slot) == []
        after = everything(root)
        modes = {name: stat.S_IMODE(after[name][0]) for name in ("s.sh", "secret", "run.sh", "same")}
        assert modes == {"s.sh": 0o755, "secret": 0o600, "run.sh": 0o644, "same": 0o664}
        links = {name: text for name, (mode, text) in after.items() if stat.S_ISLNK(mode)}
        assert links == {"app.conf": "real/app.conf", "alias": "s.sh", "dir": "real", "kept": str(outside)}
        new = ("real/app.conf", "link.py", "cur/x", "tab\there\nline", "other", "hard")
        assert {after[name][1] for name in new} == {
            "app.conf\n", "m.py\n", "z\n", "t\n", "hard\n", "one\n",
        }  # fmt: skip
        assert folder.take_back(0) == []
        assert everything(root) == before

    with_slot(root, body)
    assert outside.read_text() == "theirs"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "in/../../secret", "/workspace/../etc/passwd"])
def test_a_link_out_of_the_folder_is_left_out_and_the_file_stays(tmp_path: Path, target: str) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute(f"mv a.txt b.txt; ln -s {target} a.txt; ln -s {target} b")
        left = folder.apply(await folder.changes(slot))
        assert {change.path: change.problem for change in left} == {"a.txt": LEADS_OUT, "b": LEADS_OUT}

    (tmp_path / "a.txt").write_text("precious")
    with_slot(tmp_path, body)
    assert {name: text for name, (_, text) in everything(tmp_path).items()} == {
        "a.txt": "precious",
        "b.txt": "precious",
    }


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    root = tmp_path / "work"
    for name in ("conf/a.ini", "conf/deep/b.ini", "lib/x.py", "out/y", "busy/z", "real/r"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "lib/link").symlink_to("x.py")
    before = everything(root)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute("""
            rm -r conf lib out busy; echo merged > conf; ln -s real lib; ln -s /etc out; echo new > busy
        """)
        assert done.success, done.output
        changes = await folder.changes(slot)
        (root / "busy/mine").write_text("mine")
        problems = {each.path: each.problem for each in folder.apply(changes)}
        assert problems == {"out": LEADS_OUT, "out/y": FULL_FOLDER, "busy": FULL_FOLDER, "busy/z": FULL_FOLDER}
        after = everything(root)
        assert (after["conf"][1], after["lib"][1]) == ("merged\n", "real")
        assert {"out/y", "busy/z", "busy/mine"} <= after.keys()
        assert not {"conf/a.ini", "lib/x.py"} & after.keys()
        (root / "busy/mine").unlink()
        assert folder.take_back(0) == []
        assert everything(root) == before

    with_slot(root, body)


def test_nothing_is_written_back_that_makes_git_run_commands(tmp_path: Path) -> None:
    command = """
        printf '#!/bin/sh\ntouch /tmp/owned\n' > .git/hooks/pre-commit; chmod 755 .git/hooks/pre-commit
        printf '[core]\n fsmonitor = touch /tmp/owned\n' > .git/config
        mkdir -p .git/rebase-merge sub evil/objects/aa evil/refs/heads evil/hooks
        echo 'exec touch /tmp/owned' > .git/rebase-merge/git-rebase-todo
        echo 'gitdir: ../evil' > sub/.git
        echo 'ref: refs/heads/main' > evil/HEAD; echo x > evil/objects/aa/bb; echo x > evil/refs/heads/main
        cp .git/config evil/config; cp .git/hooks/pre-commit evil/hooks/
        rm link; mkdir link; cp .git/config link/config
        echo commit > .git/refs/heads/main; echo agent > a.txt; mkdir hooks; echo mine > hooks/config
    """
    for name in ("hooks", "refs/heads"):
        (tmp_path / ".git" / name).mkdir(parents=True)
    (tmp_path / ".git" / "config").write_text("before")
    (tmp_path / "link").symlink_to(".git")

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(command)
        assert done.success, done.output
        left = {change.path for change in folder.apply(await folder.changes(slot))}
        assert left == {
            ".git/hooks/pre-commit", ".git/config", ".git/rebase-merge/git-rebase-todo", "sub/.git", "evil/config",
            "evil/hooks/pre-commit", "link/config",
        }  # fmt: skip
        assert not [path for path in left - {".git/config", "link/config"} if (tmp_path / path).exists()]

    with_slot(tmp_path, body)
    assert (tmp_path / ".git" / "config").read_text() == "before"
    assert (tmp_path / ".git" / "refs/heads/main").read_text() == "commit\n"
    assert (tmp_path / "hooks/config").read_text() == "mine\n"


def test_more_than_may_be_written_back_is_refused_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def many(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute("for n in 1 2 3 4; do echo $n > $n.txt; done")
        with pytest.raises(SandboxError, match="4 files"):
            await folder.changes(slot)
        await slot.execute("rm 4.txt; head -c 3000000 /dev/zero > 3.txt")
        with pytest.raises(SandboxError, match="2 MB"):
            await folder.changes(slot)

    monkeypatch.setattr(workdir, "MAX_FILES", 3)
    monkeypatch.setattr(workdir, "MAX_BYTES", 2 << 20)
    with_slot(tmp_path, many)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_keeps_no_other_back(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        await slot.execute("mkdir new; echo x > new/a.txt; echo x > b.txt")
        changes = await folder.changes(slot)
        (tmp_path / "new").write_text("a file of the person")
        assert [change.path for change in folder.apply(changes)] == ["new/a.txt"]
        assert (tmp_path / "b.txt").read_text() == "x\n"

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


def test_what_a_person_changes_reaches_the_sandbox_unless_the_agent_changed_it(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        async def in_sandbox() -> set[str]:
            done = await slot.execute("find . -type f -exec grep -H '' {} +; find . -type l -printf '%P=%l\\n'")
            return set(done.output.split())

        assert await folder.refresh(slot) == Refreshed()
        await slot.execute("echo agent > both; echo agent > written; touch touched; echo new > both-new")
        assert [
            each.path for each in folder.apply([c for c in await folder.changes(slot) if c.path == "written"])
        ] == []
        for name in ("both", "mine", "written", "both-new", "new/x", "of-folder/x"):
            if name == "of-folder/x":
                (tmp_path / "of-folder").unlink()
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("person\n")
        (tmp_path / "gone").unlink()
        (tmp_path / "touched").touch()
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("mine")
        (tmp_path / "x.pyc").write_text("generated")
        found = await folder.refresh(slot)
        assert found == Refreshed(
            ["gone", "link", "mine", "new/x", "of-folder", "of-folder/x", "written"], ["both", "both-new"], [], []
        )
        assert await in_sandbox() == {
            "./both:agent", "./both-new:new", "./mine:person", "./written:person", "./new/x:person", "link=mine",
            "./of-folder/x:person", "./touched:old",
        }  # fmt: skip
        assert await folder.refresh(slot) == Refreshed()
        assert [(each.path, each.problem) for each in await folder.changes(slot)] == [
            ("both", CHANGED_HERE), ("both-new", CHANGED_HERE)
        ]  # fmt: skip
        await slot.execute("echo more >> mine")
        assert [each.path for each in folder.apply(await folder.changes(slot))] == ["both", "both-new"]
        assert (tmp_path / "mine").read_text() == "person\nmore\n"

    for name in ("both", "mine", "written", "gone", "touched", "of-folder"):
        (tmp_path / name).write_text("old\n")
    (tmp_path / "link").symlink_to("both")
    with_slot(tmp_path, body)
