"""What nobody wrote to the shared folder is kept, however its sandbox ends."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from chat.test_terminal import CTRL_D, PROMPT, echo_server, seen, terminal, terminal_call
from chat.test_workdir import everything, with_slot
from chat.test_write_back import git, repository
from palaestra_chat.unwritten_changes import UnwrittenChanges
from palaestra_chat.workdir import CHANGED_HERE, WorkFolder
from palaestra_slots.sandbox.slot import Slot

COMMANDS = r"""
    chmod +x s.sh; rm gone.txt empty; ln -s s.sh alias; rm link; cp s.sh link; mv text to-link; ln -s to-link text
    printf 'no end' > "with space"; printf 'a\nb' > end; printf 'x\r\ny\r\nz\rw\n' > crlf; touch new-empty; : > full
    printf 'b\0inary' > binary; head -c 30000 /dev/urandom > random; seq 80000 > long; printf '\377\n' > latin
    mkdir -p d/e; echo x > d/e/f; echo x > "$(printf 'tab\there\"quote')"; echo x > ünï; echo y > "-n"; chmod -x run
"""


@pytest.mark.slots
@pytest.mark.slow
def test_a_kept_patch_makes_the_same_files(tmp_path: Path) -> None:
    root, other, kept = tmp_path / "work", tmp_path / "other", UnwrittenChanges(tmp_path / "kept")
    root.mkdir()
    for name in ("s.sh", "gone.txt", "text", "end", "crlf", "full", "random", "latin", "run"):
        (root / name).write_bytes(f"{name}\none\ntwo".encode() * 3)
    (root / "empty").touch()
    (root / "run").chmod(0o755)
    (root / "binary").write_bytes(b"\0\1")
    (root / "link").symlink_to("s.sh")
    shutil.copytree(root, other, symlinks=True)

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(COMMANDS)
        assert done.success, done.output
        changes = await folder.changes(slot)
        assert str(tmp_path / "kept") in kept.save(root, changes)
        [patch] = (tmp_path / "kept").glob("*/changes.patch")
        git(other, "apply", str(patch))
        assert folder.apply(changes) == []
        assert everything(other) == everything(root)
        assert kept.save(root, await folder.changes(slot)) == ""
        assert kept.saved() == []

    with_slot(root, body)


@pytest.mark.slots
@pytest.mark.slow
def test_what_changed_on_both_sides_and_commits_are_kept_as_files(tmp_path: Path) -> None:
    root, kept = repository(tmp_path / "work"), UnwrittenChanges(tmp_path / "kept")

    async def body(folder: WorkFolder, slot: Slot) -> None:
        done = await slot.execute(
            "echo agent >> calc.py; echo x > x; git add x; git -c user.name=a -c user.email=a@b commit -qm X; "
            "git config alias.x '!true'"
        )
        assert done.success, done.output
        (root / "calc.py").write_text("person\n")
        changes = await folder.changes(slot)
        assert {change.path for change in changes if change.problem == CHANGED_HERE} == {"calc.py"}
        kept.save(root, changes)
        [files] = (tmp_path / "kept").glob("*/files")
        assert "agent" in (files / "calc.py").read_text()
        assert not (files / ".git/config").exists()
        shutil.copytree(files / ".git", root / ".git", dirs_exist_ok=True)
        assert git(root, "log", "--format=%s").split() == ["X", "First"]
        kept.new_sandbox()
        kept.save(root, changes)
        assert len(kept.saved()) == 2

    with_slot(root, body)


def at_the_question(child: pexpect.spawn, command: str) -> None:
    seen(child, PROMPT)
    child.send(f"{terminal_call(command)}\r")
    seen(child, r"Write to .*\[n\]")


def closed(child: pexpect.spawn) -> None:
    child.kill(signal.SIGHUP)
    child.expect(pexpect.EOF)


def killed(child: pexpect.spawn) -> None:
    child.kill(signal.SIGKILL)
    child.expect(pexpect.EOF)


def ended(child: pexpect.spawn) -> None:
    child.send("n\r")
    seen(child, "not written: 1 change")
    for _ in range(2):
        seen(child, PROMPT)
        child.send(CTRL_D)
    child.expect(pexpect.EOF)


def renewed(child: pexpect.spawn) -> None:
    child.send("n\r")
    for answer in ("not written: 1 change", "not written: 1 change", "not written to"):
        seen(child, answer)
        seen(child, PROMPT)
        child.send("/sandbox new\r")
    seen(child, "next command")
    closed(child)


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize("end", [closed, killed, ended, renewed])
def test_the_next_start_names_what_is_kept(tmp_path: Path, end: Callable[[pexpect.spawn], None]) -> None:
    work = repository(tmp_path / "work")
    before = everything(work)
    with echo_server() as server:
        with terminal(work, server.url, home=tmp_path) as child:
            at_the_question(child, "echo precious > p.txt")
            end(child)
        assert everything(work) == before
        with terminal(work, server.url, "-c", home=tmp_path) as child:
            seen(child, "kept in")
            closed(child)
    [patch] = tmp_path.rglob("changes.patch")
    git(work, "apply", str(patch))
    assert (work / "p.txt").read_text() == "precious\n"


@pytest.mark.slots
@pytest.mark.slow
def test_a_closed_terminal_keeps_what_the_running_turn_did(tmp_path: Path) -> None:
    work = repository(tmp_path / "work")
    with echo_server() as server, terminal(work, server.url, home=tmp_path) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo precious > p.txt; echo written; sleep 60')}\r")
        seen(child, "│ written")
        closed(child)
    [patch] = tmp_path.rglob("changes.patch")
    assert "precious" in patch.read_text()


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "files"),
    [
        ("t", {"a.txt": "one\nagent\n"}), ("k", {"a.txt": "person\n"}),
        ("b", {"a.txt": "person\n", "a.txt.agent": "earlier\n", "a.txt.agent2": "one\nagent\n"}),
    ],
)  # fmt: skip
def test_a_person_decides_about_a_file_that_both_changed(tmp_path: Path, key: str, files: dict[str, str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    with echo_server() as server, terminal(work, server.url, home=tmp_path) as child:
        at_the_question(child, "echo agent >> a.txt")
        (work / "a.txt").write_text("person\n")
        if key == "b":
            (work / "a.txt.agent").write_text("earlier\n")
        child.send("y\r")
        seen(child, "left out: .*a.txt")
        seen(child, PROMPT)
        child.send(CTRL_D)
        seen(child, "not written: 1 change")
        seen(child, PROMPT)
        child.send("/sandbox write\r")
        seen(child, r"take the agent.*\[k\]")
        child.send(f"{key}\r")
        seen(child, r"wrote \d file")
        seen(child, PROMPT)
        child.send(CTRL_D)
        child.expect(pexpect.EOF)
        assert not re.search("not written", child.before)
    assert {path.name: path.read_text() for path in work.glob("a.txt*")} == files
    assert not list(tmp_path.rglob("changes.patch"))
