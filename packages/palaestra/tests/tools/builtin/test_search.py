"""search_files in a real slot. Where ripgrep is installed, it must agree with grep on every query."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Rung

if TYPE_CHECKING:
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots

FILES: Mapping[str, bytes] = {
    "a.py": b"def foo(x):\n    return x\n\ndef bar():\n    foo(1)\n",
    "b/c.py": b"foo\r\nbar\r\n",
    ".git/x": b"foo\n",
    "sub/.git": b"foo\n",
    "bin.dat": b"foo\0foo\n",
    "-n.txt": b"foo\n",
    "latin.txt": "café foo\n".encode("latin-1"),
    "utf8.txt": "café foo ünï\n".encode(),
    "utf16.txt": "foo\n".encode("utf-16"),
    ".hidden/z.txt": b"foo foo\nfoo\n",
    ".gitignore": b"b/\n",
    "long.js": b"x" * 5000 + b"foo\n",
    "odd name\n.txt": b"foo\n",
    "empty": b"",
    "noend": b"foo",
    **{
        f"m/{i:02}.txt": b"".join(b"line %d%s\n" % (n, b" hit" * (n % 7 == i % 7)) for n in range(30))
        for i in range(20)
    },
}
QUERIES: list[dict[str, JSON]] = [
    {"pattern": "foo"},
    {"pattern": "foo", "context": 1},
    {"pattern": "hit", "limit": 7, "offset": 13},
    {"pattern": "foo", "output_mode": "count"},
    {"pattern": "foo", "output_mode": "files_only", "limit": 3, "offset": 2},
    {"pattern": r"\bfoo\b\("},
    {"pattern": "caf."},
    {"pattern": "é"},
    {"pattern": "[éü]"},
    {"pattern": r"\w+\s\d+ hit$", "file_glob": "m/*.txt", "limit": 5},
    {"pattern": "foo", "file_glob": "*.{py,txt}"},
    {"pattern": r"foo(?=\()"},
    {"pattern": "a{"},
    {"pattern": "^$"},
    {"pattern": "foo$"},
    {"pattern": "(?i)FOO"},
    {"pattern": "-n"},
    {"pattern": r"^\w+ \w+ \w+$"},
    {"pattern": r"\bcafé\b"},
    {"pattern": "^.{12}$"},
    {"pattern": "[^a-z ]", "output_mode": "count"},
    {"pattern": "foo", "path": "a.py"},
    {"pattern": "foo", "path": "link.py"},
    {"pattern": "foo", "path": "./b"},
    {"pattern": "foo", "path": "-n.txt"},
    {"pattern": "foo", "path": "/workspace/b"},
    {"pattern": "nothing like it"},
]


async def fill(desk: Desk) -> None:
    for path, data in FILES.items():
        await desk.slot.write_bytes(path, data)
    await desk.slot.execute(["ln", "-s", "a.py", "link.py"])
    await desk.slot.execute(["ln", "-s", "b", "linkdir"])


def test_matching_lines_come_sorted_without_git_and_binaries(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await fill(desk)
        reply = await desk.call("search_files", pattern="foo")
        assert [(match["path"], match["line"]) for match in reply["matches"]] == [
            ("-n.txt", 1),
            (".hidden/z.txt", 1),
            (".hidden/z.txt", 2),
            ("a.py", 1),
            ("a.py", 5),
            ("b/c.py", 1),
            ("latin.txt", 1),
            ("long.js", 1),
            ("noend", 1),
            ("odd name\n.txt", 1),
            ("utf8.txt", 1),
        ]
        assert reply["matches"][5]["content"] == "foo"
        assert reply["matches"][7]["content"].endswith("xfoo")
        assert (reply["total_count"], reply["truncated"]) == (11, False)

    at_desk(scenario)


CHARACTERS: Mapping[str, list[str]] = {
    r"^\w+$": ["u.txt:1", "u.txt:2", "u.txt:4"],
    r"\bcafé\b": ["u.txt:1"],
    "^.{4}$": ["l.txt:1", "u.txt:1"],
    "^.{2}$": ["u.txt:2"],
    "^caf.$": ["l.txt:1", "u.txt:1"],
    "^[^a-z]+$": ["u.txt:2", "u.txt:3", "u.txt:4"],
    r"\p{Han}": ["u.txt:2"],
    r"^\W$": ["u.txt:3"],
    r"^\D{4}$": ["l.txt:1", "u.txt:1"],
    r"a\B.": ["l.txt:1", "u.txt:1"],
    "(?i)^CAFÉ$": ["u.txt:1"],
    r"^x\sy$": [],
    "x.": [],
}


def test_a_pattern_matches_characters_in_utf8_and_bytes_elsewhere(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("u.txt", "café\n中文\n—\nÜ\n".encode())
        await desk.slot.write_bytes("l.txt", "café\n".encode("latin-1"))
        await desk.slot.write_bytes("bin.dat", b"x\0y\n")
        for pattern, found in CHARACTERS.items():
            reply = await desk.call("search_files", pattern=pattern, context=1)
            assert [f"{match['path']}:{match['line']}" for match in reply["matches"]] == found, pattern
            counts = await desk.call("search_files", pattern=pattern, output_mode="count")
            assert counts["total_matches"] == reply["total_count"] == len(found)

    at_desk(scenario)


def test_pages_follow_each_other_without_gap(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await fill(desk)
        everything = (await desk.call("search_files", pattern="hit", limit=500))["matches"]
        pages, offset = [], 0
        while offset < len(everything):
            page = await desk.call("search_files", pattern="hit", limit=9, offset=offset)
            assert page["total_count"] == len(everything)
            assert page["truncated"] is (offset + 9 < len(everything))
            pages += page["matches"]
            offset += 9
        assert pages == everything
        beyond = await desk.call("search_files", pattern="hit", offset=10_000)
        assert (beyond["matches"], beyond["total_count"]) == ([], len(everything))

    at_desk(scenario)


def test_context_counts_and_file_names(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await fill(desk)
        reply = await desk.call("search_files", pattern="bar", path="a.py", context=1)
        assert reply["matches"] == [
            {"path": "a.py", "line": 4, "content": "def bar():", "before": [""], "after": ["    foo(1)"]}
        ]
        counts = await desk.call("search_files", pattern="foo", output_mode="count", file_glob="*.py")
        assert (counts["counts"], counts["total_matches"]) == ({"a.py": 2, "b/c.py": 1}, 3)
        files = await desk.call("search_files", pattern="foo", output_mode="files_only", file_glob="*.py")
        assert files == {"files": ["a.py", "b/c.py"], "total_count": 2, "truncated": False}

    at_desk(scenario)


def test_files_are_found_by_name(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await fill(desk)
        globbed = await desk.call("search_files", target="files", pattern="*.py")
        assert globbed == {"files": ["a.py", "b/c.py", "link.py"], "total_count": 3, "truncated": False}
        part = await desk.call("search_files", target="files", pattern="0", path="m", limit=2)
        assert (part["files"], part["total_count"], part["truncated"]) == (["m/00.txt", "m/01.txt"], 11, True)
        assert "offset=2" in part["hint"]

    at_desk(scenario)


def test_names_with_brackets_absolute_globs_and_directories_are_found(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        for path in ("app/users/[id].tsx", "app/i.tsx", "app/m.ts", "app/{a}.ts", "docs/x.md"):
            await desk.slot.write_bytes(path, b"foo\n")
        await desk.slot.execute(["mkdir", "-p", "empty/inner"])

        async def found(pattern: str, **more: JSON) -> JSON:
            return (await desk.call("search_files", target="files", pattern=pattern, **more))["files"]

        assert await found("[id].tsx") == ["app/i.tsx", "app/users/[id].tsx"]
        assert await found("[a-z].tsx") == ["app/i.tsx"]
        assert await found("users/[id].tsx", path="app") == ["app/users/[id].tsx"]
        assert await found("{a}.ts") == ["app/{a}.ts"]
        assert await found("/workspace/app/*.ts") == ["app/m.ts", "app/{a}.ts"]
        assert await found("/workspace/**/*.md", path="docs") == ["docs/x.md"]
        assert await found("/workspace/app/m.ts") == ["app/m.ts"]
        assert await found("/elsewhere/*.ts") == []
        matches = await desk.call("search_files", pattern="foo", file_glob="[id].tsx", output_mode="files_only")
        assert matches["files"] == ["app/i.tsx", "app/users/[id].tsx"]
        for pattern in ("empty", "emp*", "empty/inner", "/workspace/empty"):
            reply = await desk.call("search_files", target="files", pattern=pattern)
            assert (reply["files"], "path=empty" in reply["hint"]) == ([], True)
        assert "hint" not in await desk.call("search_files", target="files", pattern="nothing like it")

    at_desk(scenario)


@pytest.mark.parametrize("pattern", ["needle", "n[e]+dle", "(?i)NEEDLE", "é needle"])
def test_the_match_itself_is_shown_on_a_long_line(at_desk: AtDesk, pattern: str) -> None:
    async def scenario(desk: Desk) -> None:
        long = "ü" * 3000 + "é needle" + "b" * 3000
        await desk.slot.write_bytes("min.js", f"short\n{long}\nneedle first {'x' * 3000}\n".encode())
        await desk.slot.write_bytes("other.js", ("a" * 450 + " é needle " + "c" * 450 + "\n").encode())
        reply = await desk.call("search_files", pattern=pattern, context=1)
        shown = [each["content"] for each in reply["matches"]]
        assert len(shown) == reply["total_count"]
        assert all("needle" in content and len(content) < 600 for content in shown)
        assert shown[0].startswith("[2")
        assert "characters before] ..." in shown[0]
        assert shown[0].endswith("... [line cut]")

    at_desk(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["a" * 1900, "\x01a" * 900, '"a\\' * 600])
def test_a_page_has_one_bound_and_says_how_to_continue(at_desk: AtDesk, line: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("l.txt", (line + "\n").encode() * 400)
        seen, offset = 0, 0
        for _ in range(3):
            reply = await desk.call("search_files", pattern="a", limit=500, context=5, offset=offset)
            assert len(json.dumps(reply, ensure_ascii=False)) < 102_000
            seen += len(reply["matches"])
            offset += len(reply["matches"])
            assert f"offset={offset}" in reply["hint"]
        assert reply["matches"][-1]["line"] == seen

    at_desk(scenario)


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ({"pattern": "foo("}, "The pattern cannot be used"),
        ({"pattern": "a\nb"}, "line by line"),
        ({"pattern": r"a\nb"}, "line by line"),
        ({"pattern": "x", "path": "a.pi"}, "Did you mean a.py?"),
        ({"pattern": ""}, "Invalid arguments"),
        ({"pattern": "x", "file_glob": "a\0"}, "file_glob cannot contain NUL"),
        ({"pattern": "\ud800"}, "half of a surrogate pair"),
        ({"pattern": "x", "limit": 501}, "'limit' must be"),
    ],
)
def test_mistakes_are_told(at_desk: AtDesk, query: dict[str, JSON], part: str) -> None:
    async def scenario(desk: Desk) -> None:
        await fill(desk)
        assert part in (await desk.call("search_files", **query))["error"]

    at_desk(scenario)


@pytest.mark.skipif(shutil.which("rg") is not None, reason="ripgrep says nothing that tells these apart")
def test_a_file_that_cannot_be_read_makes_no_pattern_wrong(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        found = await desk.call("search_files", pattern="no such text", path="/proc/1/task/1/mem")
        assert "cannot be read" in found["error"]
        found = await desk.call("search_files", pattern="no such text", path="/proc/1/task/1")
        assert (found.get("error"), found["matches"]) == (None, [])

    at_desk(scenario)


@pytest.mark.skipif(shutil.which("rg") is None, reason="ripgrep is not installed")
def test_ripgrep_and_grep_agree(at_desk: AtDesk) -> None:
    ripgrep = Path(str(shutil.which("rg"))).read_bytes()

    async def scenario(desk: Desk) -> None:
        if desk.slot.rung < Rung.FULL:
            pytest.skip("putting ripgrep into the slot needs a root that can be changed")
        await fill(desk)
        await desk.slot.execute("rm -f /usr/bin/rg /usr/local/bin/rg /bin/rg")
        by_grep = [await desk.call("search_files", **query) for query in QUERIES]
        await desk.slot.write_bytes("/usr/local/bin/rg", ripgrep, mode=0o755)
        by_ripgrep = [await desk.call("search_files", **query) for query in QUERIES]
        assert by_ripgrep == by_grep

    at_desk(scenario)


def test_a_pattern_that_takes_too_long_in_one_file_finds_all_or_says_so(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        for name in ("a.txt", "c.txt"):
            await desk.slot.write_text(f"s/{name}", "aaa\n")
        await desk.slot.write_text("s/b.txt", "aaa\n" + "a" * 60 + "b\naaa\n")
        reply = await desk.call("search_files", pattern="(a+)+$", path="s", output_mode="count")
        if "error" in reply:  # grep; ripgrep needs no more steps there than anywhere
            check_message(reply["error"], "s/b.txt")
        else:
            assert reply["counts"] == {"s/a.txt": 1, "s/b.txt": 2, "s/c.txt": 1}

    at_desk(scenario)
