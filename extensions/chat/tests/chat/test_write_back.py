"""Which changes a person is asked about: not git's own bookkeeping, not what programs make anew."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from chat.test_terminal import PROMPT, asked, echo_server, finish, seen, terminal, terminal_call
from chat.test_workdir import with_slot
from palaestra_chat.folder_changes import CHANGED_HISTORY, edits
from palaestra_chat.generated_files import generated
from palaestra_chat.git_files import fingerprint, makes_git_run
from palaestra_chat.terminal.people import FolderChanges, TerminalPeople
from palaestra_chat.terminal.slash_commands import COMMANDS
from palaestra_chat.unwritten_changes import UnwrittenChanges
from palaestra_chat.workdir import MAKES_GIT_RUN, Refreshed, WorkFolder
from palaestra_slots.sandbox.slot import Slot

_AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *words: str) -> str:
    """Run git as the person does on this machine."""
    done = subprocess.run(["git", *_AUTHOR, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def repository(folder: Path) -> Path:
    """A repository with one commit, that ignores the folder `out`."""
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / ".gitignore").write_text("out/\n*.log\n!keep.log\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "First")
    return folder


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "offered"),
    [
        ("git status --short", []),
        ("touch calc.py && git status && git diff --stat && git log", []),
        ("python3 -c 'import calc' && ls __pycache__/*.pyc", []),
        ("mkdir -p out .pytest_cache node_modules/a && touch out/a.o .pytest_cache/x node_modules/a/b.js a.log", []),
        ("echo x > keep.log; echo x > a.log", ["new keep.log"]),
        ("echo x > new.txt && git add -A && git status", ["new new.txt"]),
        ("git add -A && git stash list && git fetch . 2>&1", []),
        ("sed -i s/-/+/ calc.py && git GIT commit -qam Fix", ["changed calc.py", "1 commit in .git"]),
        ("git GIT commit -q --allow-empty -m A && git GIT commit -q --allow-empty -m B", ["2 commits in .git"]),
        ("git checkout -qb topic", ["branches in .git"]),
        ("git tag v1", ["branches in .git"]),
        ("echo x >> calc.py && git GIT stash", ["branches in .git"]),
    ],
)  # fmt: skip
def test_a_person_is_asked_about_edits_and_history_alone(tmp_path: Path, command: str, offered: list[str]) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(command.replace("GIT", " ".join(_AUTHOR)))
        assert done.success, done.output
        changes = await folder.changes(slot)
        assert [edit.name for edit in edits(changes)] == offered
        assert folder.apply(changes) == []
        assert [edit.name for edit in edits(await folder.changes(slot))] == []

    root = repository(tmp_path / "work")
    with_slot(root, body)
    git(root, "fsck", "--strict")


@pytest.mark.slots
@pytest.mark.slow
def test_a_commit_is_written_whole_although_the_person_asked_for_the_status(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(f"sed -i s/-/+/ calc.py && git {' '.join(_AUTHOR)} commit -qam 'Add for real'")
        assert done.success, done.output
        (root / "calc.py").touch()
        git(root, "status")  # refreshes the index here
        changes = await folder.changes(slot)
        assert "commit: Add for real" in edits(changes)[-1].diff()
        assert folder.apply(changes) == []

    root = repository(tmp_path / "work")
    with_slot(root, body)
    assert git(root, "log", "--format=%s").split("\n")[:2] == ["Add for real", "First"]
    assert git(root, "status", "--porcelain") == ""
    git(root, "fsck", "--strict")


@pytest.mark.slots
@pytest.mark.slow
def test_a_history_is_not_written_in_part_over_what_the_person_staged(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(f"sed -i s/-/+/ calc.py && git {' '.join(_AUTHOR)} commit -qam Fix")
        assert done.success, done.output
        changes = await folder.changes(slot)
        (root / "mine.txt").write_text("x")
        git(root, "add", "mine.txt")  # while the question is open
        assert [edit.changes[0].problem for edit in edits(folder.apply(changes))] == [CHANGED_HISTORY]

    root = repository(tmp_path / "work")
    with_slot(root, body)
    assert git(root, "log", "--format=%s").split() == ["First"]
    assert git(root, "diff", "--cached", "--name-only").split() == ["mine.txt"]


@pytest.mark.slots
@pytest.mark.slow
def test_a_declined_commit_comes_with_the_next_one(tmp_path: Path) -> None:
    asked: list[str] = []

    class Answers(TerminalPeople):
        def __init__(self) -> None: ...

        async def choose(self, question: str, choices: object) -> str | None:  # type: ignore[override]
            asked.append(question)
            return "yes" if len(asked) > 1 else None

    async def body(folder: WorkFolder, slot: Slot) -> None:
        kept = UnwrittenChanges(tmp_path / "kept")
        talk = SimpleNamespace(slots=SimpleNamespace(folder=folder, unwritten=kept), seat=SimpleNamespace(slot=slot))
        shown = FolderChanges(MagicMock(), Answers())
        shown.write = lambda talk, changes: written.append(folder.apply(changes)) or []  # type: ignore
        for name in ("One", "Two"):
            done = await slot.execute(f"git {' '.join(_AUTHOR)} commit -q --allow-empty -m {name}")
            assert done.success, done.output
            await shown.offer(talk, "ask", lambda mode: None)  # type: ignore[arg-type]

    written: list[object] = []
    root = repository(tmp_path / "work")
    with_slot(root, body)
    assert ["1 commit" in asked[0], "2 commits" in asked[1]] == [True, True]
    assert written == [[]]
    assert git(root, "log", "--format=%s").split() == ["Two", "One", "First"]
    git(root, "fsck", "--strict")


@pytest.mark.slots
@pytest.mark.slow
def test_commits_on_both_sides_are_not_mixed(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(f"echo x > theirs.txt && git add -A && git {' '.join(_AUTHOR)} commit -qm Theirs")
        assert done.success, done.output
        (root / "mine.txt").write_text("x")
        git(root, "add", "-A")
        git(root, "commit", "-qm", "Mine")
        left = edits(folder.apply(await folder.changes(slot)))
        assert [(edit.name, edit.changes[0].problem) for edit in left] == [("1 commit in .git", CHANGED_HISTORY)]

    root = repository(tmp_path / "work")
    with_slot(root, body)
    assert git(root, "log", "--format=%s").split("\n")[:2] == ["Mine", "First"]
    assert git(root, "status", "--porcelain") == "?? theirs.txt\n"


@pytest.mark.slots
@pytest.mark.slow
def test_commits_of_a_person_reach_the_sandbox_unless_the_agent_has_commits(tmp_path: Path) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        async def agent(command: str) -> str:
            done = await slot.execute(command.replace("GIT", f"git {' '.join(_AUTHOR)}"))
            assert done.success, done.output
            return done.output

        await agent("git status; echo x >> calc.py")
        assert folder.apply(await folder.changes(slot)) == []
        git(root, "status")
        assert await folder.refresh(slot) == Refreshed()
        git(root, "commit", "-qam", "Mine")
        git(root, "checkout", "-qb", "topic")
        (root / "more").write_text("x")
        git(root, "add", "-A")
        git(root, "commit", "-qm", "More")
        git(root, "gc", "-q")
        assert await folder.refresh(slot) == Refreshed(["more"], [], [".git"], [])
        assert await agent("git status --porcelain") == ""
        assert (await agent("git log --format=%s; git branch --show-current")).split() == [
            "More",
            "Mine",
            "First",
            "topic",
        ]
        await agent("git fsck --strict; GIT commit -q --allow-empty -m Theirs")
        changes = await folder.changes(slot)
        assert [edit.name for edit in edits(changes)] == ["1 commit in .git"]
        assert folder.apply(changes) == []
        assert await folder.refresh(slot) == Refreshed()
        await agent("GIT commit -q --allow-empty -m Again")
        git(root, "commit", "-q", "--allow-empty", "-m", "Meanwhile")
        assert await folder.refresh(slot) == Refreshed([], [], [], [".git"])
        assert await folder.refresh(slot) == Refreshed([], [], [], [])
        assert [each.problem for each in folder.apply(await folder.changes(slot))][:1] == [CHANGED_HISTORY]

    root = repository(tmp_path / "work")
    with_slot(root, body)
    assert git(root, "log", "--format=%s").split() == ["Meanwhile", "Theirs", "More", "Mine", "First"]
    git(root, "fsck", "--strict")


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vendor/lib", "objects"])
def test_a_commit_of_a_submodule_is_written_with_the_commit_that_names_it(tmp_path: Path, name: str) -> None:
    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(f"git status; git -C {name} status")
        assert await folder.changes(slot) == []
        author = " ".join(_AUTHOR)
        done = await slot.execute(
            f"cd {name} && echo two > calc.py && git {author} commit -qam Two && git config core.fsmonitor x && "
            f"cd /workspace && git add -A && git {author} commit -qm Bump"
        )
        assert done.success, done.output
        changes = await folder.changes(slot)
        assert [edit.name for edit in edits(changes)][-1] == "2 commits in .git"
        left = folder.apply(changes)
        assert {(change.path, change.problem) for change in left} == {(f".git/modules/{name}/config", MAKES_GIT_RUN)}

    library, root = repository(tmp_path / "library"), repository(tmp_path / "work")
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), name)
    git(root, "commit", "-qm", "Add the library")
    with_slot(root, body)
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "log", "--format=%s").split("\n")[0] == "Bump"
    assert git(root / name, "cat-file", "-t", git(root, "rev-parse", f"HEAD:{name}").strip()) == "commit\n"
    assert git(root / name, "log", "--format=%s").split("\n")[0] == "Two"
    for each in (root, root / name):
        git(each, "fsck", "--strict")


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        ("a/b/objects/aa/bb", False), ("a/refs/heads/main", False), ("a/HEAD", False), ("a/objects/info/packs", False),
        ("a/config", True), ("a/b/hooks/post-checkout", True), ("objects/config", True), ("refs/info/attributes", True),
        ("objects/hooks/x", True), ("a/objects/b/config", True), ("a/commondir", True), ("HEAD", True), ("a/x", True),
    ],
)  # fmt: skip
def test_files_of_a_submodule_that_make_git_run_commands_are_known(path: str, runs: bool) -> None:
    assert makes_git_run(f"x/.git/modules/{path}") == runs


@pytest.mark.parametrize("index_version", ["2", "3", "4"])
def test_the_times_in_an_index_do_not_count(tmp_path: Path, index_version: str) -> None:
    root, index = repository(tmp_path / "work"), tmp_path / "work/.git/index"
    git(root, "update-index", "--index-version", index_version)
    if index_version == "3":
        (root / "later").write_text("x")
        git(root, "add", "-N", "later")
    before = fingerprint(".git/index", index.read_bytes())
    (root / "calc.py").touch()
    git(root, "status")
    if index_version != "4":  # its names are compressed, so it is compared as it is
        assert fingerprint(".git/index", index.read_bytes()) == before
    (root / "more").write_text("x")
    git(root, "add", "more")
    assert fingerprint(".git/index", index.read_bytes()) != before
    assert fingerprint(".git/index", index.read_bytes()[:100]) != before
    assert fingerprint("index", b"one") == fingerprint(".git/index", b"one")


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("a/__pycache__/b.cpython-311.pyc", True), ("b.pyc", True), (".pytest_cache/v/x", True), (".venv/x", True),
        ("web/node_modules/a/index.js", True), ("src/a.egg-info/PKG-INFO", True), ("a/.DS_Store", True),
        ("calc.py", False), ("build/a.c", False), ("dist/a.js", False), ("target/a.rs", False), ("node_modules", False),
        ("venv.py", False), ("lib/pyc", False), (".git/refs/heads/node_modules/a.pyc", False), (".env", False),
    ],
)  # fmt: skip
def test_generated_files_are_known_by_their_names(path: str, made: bool) -> None:
    assert generated(path) == made


@pytest.mark.slow
def test_a_message_is_no_answer_and_edits_are_taken_one_by_one(tmp_path: Path) -> None:
    work = repository(tmp_path / "work")
    with echo_server() as server, terminal(work, server.url, home=tmp_path) as child:
        seen(child, PROMPT)
        child.send("!git status --short; python3 -c 'import calc'\r")
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo a > a.txt; echo b > b.txt')}\r")
        seen(child, r"Write to .*new a\.txt, new b\.txt")
        child.send("yes, and say hello\r")
        seen(child, "your next message")
        seen(child, "not written: 2 changes")
        asked(server, 3)
        assert str(server.asked[2]["messages"][-1]["content"]).endswith("yes, and say hello")
        seen(child, PROMPT)  # what was declined is not asked about again
        child.send("say again\r")
        asked(server, 4)
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo c > c.txt; echo d > d.txt')}\r")
        seen(child, r"Write to .*new c\.txt, new d\.txt")
        child.send("/cost\r")
        seen(child, "5 model calls|6 model calls")
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo e > e.txt; echo f > f.txt; rm -rf g')}\r")
        seen(child, "Run it")
        child.send("not that one, say why\r")  # more than one key, although the first one is an answer
        seen(child, "your next message")
        seen(child, "Run it")
        child.send("y\r")
        seen(child, r"Write to .*new e\.txt, new f\.txt")
        child.send("o\r")
        seen(child, r"Write new e\.txt \(1 of 2\)")
        child.send("n\r")
        seen(child, r"Write new f\.txt \(2 of 2\)")
        child.send("y\r")
        seen(child, r"wrote 1 file\b")
        seen(child, PROMPT)
        child.send("/exit\r")
        seen(child, r"not written: 5 changes.*/sandbox write")
        child.send("/sandbox write\r")
        seen(child, "wrote 5 files")
        finish(child)
    assert sorted(path.name for path in work.glob("*.txt")) == [f"{name}.txt" for name in "abcdef"]
    assert not (work / "__pycache__").exists()


@pytest.mark.parametrize("command", ["/new", "/resume other", "/sandbox new"])
async def test_another_conversation_does_not_lose_changes_without_a_word(command: str) -> None:
    screen = MagicMock()
    changes = FolderChanges(screen, MagicMock())
    changes.unwritten = 2
    desk = MagicMock(changes=changes)
    name, _, rest = command.partition(" ")
    desk.opened.service.conversations = {}
    await COMMANDS[name].run(desk, rest)
    assert "not written: 2 changes" in screen.line.call_args[0][0]
    desk.use.assert_not_called()
    desk.talk.drop_slot.assert_not_called()
    assert not changes.would_be_lost()  # the second time, the person means it
