"""Which folder a conversation works on, which one `-c` continues, and what is remembered for a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chat.chat_process import environment
from chat.test_terminal import CTRL_D, PROMPT, echo_server, finish, seen, terminal, terminal_call
from golden_messages import check_message
from palaestra_chat import current_folder, workdir
from palaestra_chat.command import own_flags, which
from palaestra_chat.config import read_options
from palaestra_chat.current_folder import Place, current_place, place_of, short
from palaestra_chat.one_shot import answer_once, list_conversations
from palaestra_chat.store import ConversationStore
from palaestra_chat.workdir import NONE
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.testing.echo_chat_server import EchoChatServer


def checkout(folder: Path) -> Path:
    (folder / ".git").mkdir(parents=True)
    return folder


def files(folder: Path, count: int, below: str = "") -> Path:
    (folder / below).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / below / f"{number}.txt").write_text("x")
    return folder


def open_to_all(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda home: checkout(home / "project"), ""),
        (lambda home: files(checkout(home / "project"), 4), ""),
        (lambda home: files(checkout(home / "project") / "part", 4), ""),
        (lambda home: files(checkout(home / ".local" / "project"), 4), ""),
        (lambda home: files(home / "notes", 3), ""),
        (lambda home: files(home.parent / "elsewhere", 3), ""),
        (lambda home: files(checkout(home / "project"), 4, "node_modules/a"), ""),
        (lambda home: files(checkout(home / "project"), 6), "has more than 5 files"),
        (lambda home: files(home / "photos", 4), "is not a git checkout and has more than 3 files"),
        (lambda home: files(home / "web", 4, "node_modules"), "is not a git checkout and has more than 3 files"),
        (lambda home: home, "is your home directory"),
        (checkout, "is your home directory"),
        (lambda home: checkout(home) and files(home / "photos", 4), "is not a git checkout"),
        (lambda home: home.parent, "contains your home directory"),
        (lambda home: Path("/"), "contains your home directory"),
        (lambda home: files(home / ".ssh", 1), "is in a hidden folder"),
        (lambda home: files(home / ".config" / "program", 1), "is in a hidden folder"),
        (lambda home: checkout(home / ".ssh"), "is in a hidden folder"),
        (lambda home: files(checkout(home / ".password-store") / "work", 1), "is in a hidden folder"),
        (lambda home: Path("/etc"), "belongs to the system"),
        (lambda home: open_to_all(home.parent / "open"), "can be written to by other users"),
    ],
)  # fmt: skip
def test_the_current_folder_is_shared_by_a_clear_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], why: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(current_folder, "MAX_PLAIN_FILES", 3)
    monkeypatch.setattr(workdir, "MAX_FILES", 5)
    monkeypatch.setattr(current_folder, "MAX_FILES", 5)
    monkeypatch.setattr(workdir.fits, "__kwdefaults__", {"files": 5, "lean": False})
    folder = make(home)
    place = current_place(None, folder)
    assert place.folder == folder
    assert place.shared == (not why)
    assert place.why.startswith(why)
    assert ("--workdir" in place.notice) == bool(why)
    assert current_place(NONE, folder) == Place(folder, shared=False)
    assert current_place(NONE, folder).notice == ""


def test_a_named_folder_is_always_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert current_place(str(tmp_path), Path("/")) == Place(tmp_path, shared=True)
    assert short(tmp_path) == "~"
    assert short(tmp_path / "a") == "~/a"
    with pytest.raises(ConfigError, match="does not exist"):
        current_place(str(tmp_path / "nowhere"), tmp_path)
    monkeypatch.setattr(workdir.fits, "__kwdefaults__", {"files": 2, "lean": False})
    with pytest.raises(ConfigError, match="too large"):
        current_place(str(files(tmp_path, 3)), Path("/"))


def test_a_stored_conversation_keeps_its_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with ConversationStore(tmp_path / "c.sqlite") as store:
        for settings, place in (
            ({}, Place(tmp_path, shared=False)),
            ({"cwd": str(tmp_path)}, Place(tmp_path, shared=True)),  # of an editor
            ({"cwd": str(tmp_path), "workdir": ""}, Place(tmp_path, shared=False)),
            ({"cwd": str(gone), "workdir": str(gone)}, Place(gone, shared=False, why="does not exist any more")),
        ):
            assert place_of(store.create(settings=settings), tmp_path) == place
        first, second = (store.create(settings={"cwd": str(tmp_path / name)}) for name in ("a", "b"))
        for record in (first, second):
            store.turns.begin(record.id, "a message")
        store.create(settings=first.settings)  # without a turn
        assert store.latest(tmp_path / "a").id == first.id
        assert store.latest(tmp_path / "b").id == second.id
        with pytest.raises(ConfigError, match="--resume NAME"):
            store.latest(tmp_path / "c")


READ = terminal_call("cat a.txt; ls | wc -l")


def two_projects(folder: Path) -> tuple[Path, Path]:
    one, two = (checkout(folder / name) for name in ("one", "two"))
    (one / "a.txt").write_text("text of one\n")
    (two / "a.txt").write_text("text of two\n")
    return one, two


@pytest.mark.slow
@pytest.mark.slots
async def test_a_conversation_keeps_its_folder_and_c_continues_that_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = two_projects(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    async def said(server: EchoChatServer, folder: Path, *words: str) -> str:
        """Return what `palaestra chat -p` prints in this folder."""
        monkeypatch.chdir(folder)
        own, rest = own_flags([*words, "--base-url", server.url, "--model", "echo"])
        options = read_options(rest, "palaestra chat")
        await answer_once(options, which(own), own["-p"], as_json=False, allow=False)
        printed = capsys.readouterr()
        return printed.out + printed.err

    async def scene() -> None:
        async with EchoChatServer() as server:
            assert "text of one" in await said(server, one, "-p", READ, "--name", "mine")
            with pytest.raises(ConfigError, match="no conversation about"):
                await said(server, two, "-c", "-p", "say x")
            assert "text of two" in await said(server, two, "-p", READ)
            assert "text of one" in await said(server, one, "-c", "-p", READ)
            with ConversationStore() as store:
                rows = json.loads(list_conversations(store, as_json=True))
                assert str(two) in list_conversations(store, as_json=False)
            assert [(row["folder"], row["turns"]) for row in rows] == [(str(one), 2), (str(two), 1)]
            assert "text of one" in await said(server, two, "--resume", "mine", "-p", READ)
            assert "text of two" in await said(server, one, "--resume", "mine", "--workdir", str(two), "-p", READ)
            assert "No such file" in await said(server, one, "--workdir", "none", "-p", READ)
            printed = await said(server, Path("/"), "-p", READ)
            check_message(printed, "--workdir")
            assert printed.count("--workdir") == 1

    await scene()


@pytest.mark.slow
def test_the_terminal_names_the_folder_and_remembers_how_to_write(tmp_path: Path) -> None:
    one, two = (checkout(tmp_path / name) for name in ("one", "two"))
    (one / "a.txt").write_text("old\n")
    with echo_server() as server:
        with terminal(one, server.url, "--write", "yes", home=tmp_path) as child:
            seen(child, r"a copy of [\s\S]*one;[\s\S]*turn")
            seen(child, r"tokens · one")
            child.send(f"{terminal_call('echo new > a.txt')}\r")
            seen(child, r"wrote 1 file\b")
            seen(child, PROMPT)
            child.send("/sandbox\r")
            seen(child, "the conversation began 20")
            finish(child)
        with terminal(one, server.url, "-c", home=tmp_path) as child:
            seen(child, r"continues .* of 20\d\d-.*, 1 turn")
            seen(child, r"a copy of [\s\S]*one;[\s\S]*turn")
            child.send(f"{terminal_call('cat a.txt; echo newer > a.txt')}\r")
            seen(child, "│ new")
            seen(child, r"wrote 1 file\b")
            seen(child, PROMPT)
            child.send("/sandbox write ask\r")
            seen(child, r"[\s\S]*asked")
            child.send(CTRL_D)
            child.wait()
        with terminal(two, server.url, home=tmp_path) as child:
            seen(child, r"a copy of [\s\S]*two; [\s\S]*asked")
            child.send("/resume 2\r")
            seen(child, r"a copy of [\s\S]*one; [\s\S]*asked")
            finish(child)
        with terminal(Path("/"), server.url, home=tmp_path) as child:
            seen(child, r"contains[\s\S]*home")
            finish(child)
    assert (one / "a.txt").read_text() == "newer\n"
