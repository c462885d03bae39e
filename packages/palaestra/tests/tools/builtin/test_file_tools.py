"""read_file and write_file in a real slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra.tools.builtin.file_tools import MAX_CONTENT_CHARS, MAX_LINE_CHARS, numbered
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


def test_what_is_written_is_read_with_line_numbers(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        written = await desk.call("write_file", path="src/a.py", content="def f():\n    return 'ä'\n")
        assert written == {"path": "src/a.py", "bytes_written": 25, "created": True, "syntax_check": "ok"}
        read = await desk.call("read_file", path="/workspace/src/a.py")
        assert read == {"content": "1|def f():\n2|    return 'ä'", "total_lines": 2, "truncated": False}
        again = await desk.call("write_file", path="src/a.py", content="def f(:\n")
        assert again["created"] is False
        assert "line 1" in again["syntax_check"]

    at_desk(scenario)


def test_a_long_file_is_read_in_windows(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("long.txt", "".join(f"line {n}\n" for n in range(1, 1201)))
        first = await desk.call("read_file", path="long.txt")
        assert first["content"].startswith("1|line 1\n")
        assert first["content"].endswith("\n500|line 500")
        assert (first["total_lines"], first["truncated"]) == (1200, True)
        assert "offset=501" in first["hint"]
        last = await desk.call("read_file", path="long.txt", offset=1199, limit=2000)
        assert last == {"content": "1199|line 1199\n1200|line 1200", "total_lines": 1200, "truncated": False}
        assert "1200 lines" in (await desk.call("read_file", path="long.txt", offset=1201))["error"]

    at_desk(scenario)


def test_what_is_no_text_file_is_refused_clearly(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("data.bin", b"\x00\x01" * 50)
        await desk.slot.execute("mkfifo pipe; mkdir folder; ln -s /dev/zero zero")
        assert "binary file (100 bytes)" in (await desk.call("read_file", path="data.bin"))["error"]
        assert "directory" in (await desk.call("read_file", path="folder"))["error"]
        assert "pipe" in (await desk.call("read_file", path="pipe"))["error"]
        assert "Cannot read zero" in (await desk.call("read_file", path="zero"))["error"]
        assert "is a directory" in (await desk.call("write_file", path="folder", content=""))["error"]
        assert "Cannot write" in (await desk.call("write_file", path="data.bin/x", content=""))["error"]
        assert "NUL" in (await desk.call("read_file", path="a\0b"))["error"]

    at_desk(scenario)


@pytest.mark.parametrize("name", ["read_file", "write_file", "patch", "search_files"])
def test_what_is_no_path_is_told_by_every_tool(at_desk: AtDesk, name: str) -> None:
    more: dict[str, dict[str, JSON]] = {
        "write_file": {"content": "x"},
        "patch": {"mode": "replace", "old_string": "a", "new_string": "b"},
        "search_files": {"pattern": "x"},
    }

    async def scenario(desk: Desk) -> None:
        async def error(path: str) -> str:
            reply: JSON = await desk.call(name, path=path, **more.get(name, {}))
            return str(reply["error"])

        await desk.slot.execute("ln -s loop loop; mkfifo pipe")
        check_message(await error("x" * 300), "characters")
        check_message(await error("loop/x"), "loop/x", "Too")
        assert "encoded" in await error("\ud800")
        check_message(await error("pipe"), "device")
        assert "loop" in await error("loop")

    at_desk(scenario)


def test_a_path_may_begin_at_home_as_in_a_command(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        assert (await desk.call("write_file", path="~/notes/a.txt", content="one\n"))["created"]
        assert (await desk.call("terminal", command="cat ~/notes/a.txt"))["output"] == "one\n"
        assert (await desk.call("read_file", path="~/notes/a.txt"))["content"] == "1|one"
        change = (
            "*** Begin Patch\n*** Update File: ~/notes/a.txt\n*** Move to: ~/notes/b.txt\n@@\n-one\n+two\n*** End Patch"
        )
        assert (await desk.call("patch", mode="patch", patch=change))["success"]
        replaced = {"mode": "replace", "path": "~/notes/b.txt", "old_string": "two", "new_string": "three"}
        assert (await desk.call("patch", **replaced))["success"]
        found = await desk.call("search_files", pattern="three", path="~/notes")
        assert [match["path"].rpartition("/")[2] for match in found["matches"]] == ["b.txt"]
        assert (await desk.call("terminal", command="ls", workdir="~/notes"))["output"] == "b.txt\n"
        await desk.call("terminal", command="mkdir '~'; echo other > '~/x'")
        assert (await desk.call("read_file", path="./~/x"))["content"] == "1|other"

    at_desk(scenario)


def test_a_link_to_nothing_and_text_that_no_file_can_hold(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.execute("ln -s nowhere dangling")
        assert await desk.call("read_file", path="dangling") == {"error": "dangling is a link to a missing file"}
        check_message((await desk.call("write_file", path="a", content="\ud800"))["error"])
        assert await desk.slot.stat("a") is None

    at_desk(scenario)


def test_a_miss_suggests_names_that_are_there(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        for name in ("src/Config.py", "src/configs.py", "src/other.txt"):
            await desk.slot.write_text(name, "")
        reply = await desk.call("read_file", path="src/config.py")
        assert set(reply["similar_files"]) == {"src/Config.py", "src/configs.py"}
        check_message((await desk.call("read_file", path="scr/a"))["error"], "/workspace/scr")

    at_desk(scenario)


def test_an_empty_file_has_no_lines(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("empty", "")
        assert await desk.call("read_file", path="empty") == {
            "content": "", "total_lines": 0, "truncated": False, "hint": "The file is empty"
        }  # fmt: skip

    at_desk(scenario)


def test_writing_keeps_the_mode_and_follows_links(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.execute("printf 'echo 1' > run.sh; chmod 755 run.sh; ln -s run.sh link.sh")
        await desk.call("write_file", path="link.sh", content="echo 2\n")
        assert (await desk.call("terminal", command="./run.sh; test -L link.sh"))["output"] == "2\n"

    at_desk(scenario)


def test_lines_and_content_are_bounded() -> None:
    assert numbered(["x" * (MAX_LINE_CHARS + 5)], 1, 1)[0].endswith("[5 more characters in this line]")
    shown = numbered(["y" * 1000] * 2000, 1, 2000)
    assert MAX_CONTENT_CHARS - 1100 < len("\n".join(shown)) <= MAX_CONTENT_CHARS
    assert numbered(["a\r"], 1, 1) == ["1|a"]


def test_what_a_reply_does_not_show_is_said(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("latin.txt", "café\n".encode("latin-1"))
        assert "not UTF-8" in (await desk.call("read_file", path="latin.txt"))["hint"]
        await desk.slot.write_text("wide.txt", "short\n" + "x" * 5000 + "\n")
        assert "are cut" in (await desk.call("read_file", path="wide.txt"))["hint"]
        reply = await desk.call("read_file", path="wide.txt", limit=1)
        check_message(reply["hint"], "Lines")

    at_desk(scenario)


def test_in_a_large_directory_names_that_begin_alike_are_suggested(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.execute("for n in $(seq 10000 13000); do : > picture-$n.jpg; done")
        reply = await desk.call("read_file", path="picture-12345.jpeg")
        assert "picture-12345.jpg" in reply["similar_files"]

    at_desk(scenario)


@pytest.mark.parametrize(
    ("old", "content", "said"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\r\n", "one\r\nTWO\n", ["byte order mark", "CRLF"]),
        (b"\xef\xbb\xbfone\n", "two\n", ["byte order mark"]),
        (b"one\r\ntwo\r\n", "one\r\nTWO\n", ["CRLF"]),
        (b"one\n", "two", ["line end at its end"]),
        (b"\xef\xbb\xbfone\r\n", "\ufefftwo\r\n", []),
        (b"one\ntwo\r\n", "one\ntwo\n", []),
        (b"one\n", "", []),
        (b"one", "two", []),
        (b"", "two", []),
        (b"a\0b\r\n", "two\n", []),
        (None, "two", []),
    ],
)
def test_a_form_that_is_lost_is_named(at_desk: AtDesk, old: bytes | None, content: str, said: list[str]) -> None:
    async def scenario(desk: Desk) -> None:
        if old is not None:
            await desk.slot.write_bytes("w.txt", old)
        reply = await desk.call("write_file", path="w.txt", content=content)
        assert await desk.slot.read_bytes("w.txt") == content.encode()
        assert ("note" in reply) is bool(said)
        assert all(part in reply["note"] for part in said)

    at_desk(scenario)


@pytest.mark.parametrize(
    ("old", "content", "new"),
    [
        (b"one\r\ntwo\r\n", "one\nTWO\nthree\n", b"one\r\nTWO\r\nthree\r\n"),
        (b"one\r\ntwo\r\nthree\n", "a\nb\n", b"a\r\nb\r\n"),
        (b"one\r\n", "a\nb", b"a\r\nb"),
        (b"one\r\ntwo\r\n", "one\r\nTWO\n", b"one\r\nTWO\n"),
        (b"one\r\ntwo\nthree\n", "a\nb\n", b"a\nb\n"),
        (b"one\rtwo\r", "a\nb\n", b"a\nb\n"),
        (b"one\r\n", "alone", b"alone"),
        (b"a\0b\r\n", "a\nb\n", b"a\nb\n"),
    ],
)
def test_a_rewritten_file_keeps_the_line_ends_that_most_lines_had(
    at_desk: AtDesk, old: bytes, content: str, new: bytes
) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("w.txt", old)
        reply = await desk.call("write_file", path="w.txt", content=content)
        assert await desk.slot.read_bytes("w.txt") == new
        assert reply["bytes_written"] == len(new)
        assert ("has the CRLF" in reply.get("note", "")) is (new != content.encode())

    at_desk(scenario)
