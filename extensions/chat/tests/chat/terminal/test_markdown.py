"""Markdown for people, and the results of tools, at the widths of real terminals."""

from __future__ import annotations

import io
import json
import re

import pytest

from palaestra_chat.terminal import markdown
from palaestra_chat.terminal.live_line import LiveLine
from palaestra_chat.terminal.markdown import MarkdownStream, rendered
from palaestra_chat.terminal.renderers import result_lines
from palaestra_chat.terminal.screen import Screen
from palaestra_chat.terminal.scrollback import Scrollback

TEXT = """# A heading

Some **bold** words, `code`, a <tag> and a [link](https://example.org/page) in a paragraph that is long enough to wrap.
A second line.

- one
- two

| name | points |
|------|--------|
| ada  | 3      |

```python
def double(x):
    return 2 * x
```

The end.
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("columns", [60, 120, 200])
def test_text_wraps_between_words_and_loses_nothing(columns: int) -> None:
    lines = plain(rendered(TEXT, columns)).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    for word in ("heading", "bold", "code,", "<tag>", "(https://example.org/page)", "wrap.", "points", "double(x):"):
        assert word in words
    assert "A second line." in lines
    assert "    return 2 * x" in lines


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_shows_the_same_as_the_whole_text(size: int) -> None:
    stream = MarkdownStream()
    pieces = [stream.feed(TEXT[at : at + size], 80) for at in range(0, len(TEXT), size)]
    shown = plain("".join([*pieces, stream.end(80)]))
    assert shown.split() == plain(rendered(TEXT, 80)).split()
    assert any("heading" in piece for piece in pieces)  # while it arrives, not only at the end


def test_results_are_shown_for_people() -> None:
    steps = [{"id": "1", "content": "look", "status": "completed"}, {"id": "2", "content": "fix", "status": "pending"}]
    assert [plain(line) for line in result_lines("todo", "{}", json.dumps({"todos": steps}), 1)] == [
        "  ✓ look",
        "  ☐ fix",
    ]
    content = "".join(f"line {number}\n" for number in range(12))
    reply = json.dumps({"path": "a.py", "bytes_written": 9, "created": True})
    shown = [
        plain(line) for line in result_lines("write_file", json.dumps({"path": "a.py", "content": content}), reply, 4)
    ]
    assert shown[:2] == ["  new file a.py, 9 bytes", "  +line 0"]
    assert shown[-1] == "  │ … 4 more lines (/show 4)"
    hits = json.dumps({"matches": [{"path": "a.py", "line": 3, "content": "x\x1b[8m = 1"}]})
    assert plain(result_lines("search_files", "{}", hits, 1)[0]) == "  │ a.py:3: x = 1"
    mcp = json.dumps({"output": json.dumps({"issue": {"title": "Boats", "labels": ["a", "b"]}})})
    assert [plain(line)[4:] for line in result_lines("mcp_x_y", "{}", mcp, 1)] == [
        "issue:", "  title: Boats", "  labels:", "    - a", "    - b",
    ]  # fmt: skip
    other = result_lines("todo", "{}", json.dumps({"todos": "of another tool"}), 1)  # the same name, another shape
    assert "todos: of another tool" in plain(other[0])


def test_a_notice_wraps_between_words_and_keeps_its_style() -> None:
    raw = io.StringIO()
    Screen(Scrollback(raw), LiveLine()).prose("\x1b[33mnote: " + "word " * 40 + "\x1b[0m")
    lines = plain(raw.getvalue()).splitlines()
    assert len(lines) > 1
    assert all(set(line.split()) <= {"note:", "word"} for line in lines)
    assert "\x1b[33m" in raw.getvalue()


def test_the_live_line_fits_and_shows_the_tail() -> None:
    now = [0.0]
    live = LiveLine(lambda: now[0])
    assert live.lines(80, "", 0, None, ()) == []
    live.begin()
    live.do("terminal make")
    live.output("".join(f"row {number}\n" for number in range(30)))
    now[0] = 65.0
    for columns in (20, 60, 120):
        shown = [plain(line) for line in live.lines(columns, "", 500, 1000, ["say " + "x" * 300])]
        assert max(map(len, shown)) <= columns
        assert shown[5].strip() == "│ row 29"
    assert "terminal make 1 min 5 s · 1 min 5 s · 500/1000 tokens (50 %) · 1 queued" in shown[6]


@pytest.mark.parametrize("size", [10, 400, 3000])
def test_a_long_list_arrives_whole_and_is_parsed_seldom(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    plain = markdown._last_block

    def counted(text: str) -> int:
        nonlocal parsed
        parsed += len(text)
        return plain(text)

    monkeypatch.setattr(markdown, "_last_block", counted)
    stream, lines = MarkdownStream(), [f"- line {number} of a list" for number in range(size)]
    shown = "".join(stream.feed(f"{line}\n", 80) for line in lines)
    shown += stream.feed("\nAfter it.\n\nThe end.\n", 80) + stream.end(80)
    text = "\n".join(lines)
    assert [line.split("line ")[1].split(" ")[0] for line in shown.splitlines() if "of a list" in line] == [
        str(number) for number in range(size)
    ]
    assert shown.index("of a list") < shown.index("After it.") < shown.index("The end.")
    assert parsed < 30 * len(text) + 100_000
