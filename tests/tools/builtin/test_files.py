"""read_file and write_file in a real slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from palaestra.tools.builtin.files import MAX_CONTENT_CHARS, MAX_LINE_CHARS, numbered

if TYPE_CHECKING:
    from tests.tools.conftest import AtDesk, Desk

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
        assert "not a file" in (await desk.call("write_file", path="folder", content=""))["error"]
        assert "Cannot write" in (await desk.call("write_file", path="data.bin/x", content=""))["error"]
        assert "NUL" in (await desk.call("read_file", path="a\0b"))["error"]

    at_desk(scenario)


def test_a_miss_suggests_names_that_are_there(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        for name in ("src/Config.py", "src/configs.py", "src/other.txt"):
            await desk.slot.write_text(name, "")
        reply = await desk.call("read_file", path="src/config.py")
        assert set(reply["similar_files"]) == {"src/Config.py", "src/configs.py"}
        assert "neither does its directory /workspace/scr" in (await desk.call("read_file", path="scr/a"))["error"]

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
