import re
import weakref
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from palaestra.core.types import JSON, Blame, Outcome
from palaestra.rollouts.export import html
from palaestra.rollouts.export.html import PageBudget
from palaestra.rollouts.observe.metrics import Figures
from palaestra.rollouts.records import Beside, Group, TokenRow, Trajectory, TurnRecord

HOSTILE = (
    "</script></pre></style></textarea>--><img src=x onerror=alert(1)><script>alert(2)</script>"
    "'\"><a href=javascript:alert(3)> {{ 7*7 }} {% raw %} **bold** &lt;b&gt;"
)
ALLOWED = set(
    re.findall(
        r"\w+",
        "html head meta title style script body header h1 h3 nav main section p div span b i small pre a kbd ul li"
        " table tr th td dl dt dd details summary input select option button svg rect",
    )
)


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, their attributes, and the text people read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._code = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def marked(self, css: str) -> int:
        return sum(css in (attributes.get("class") or "").split() for _, attributes in self.elements)


def write_report(path: Path, groups: Iterable[Group], meta: Mapping[str, JSON], page: PageBudget | None = None) -> None:
    figures = Figures()
    for group in groups:
        figures.add(group)
    html.write_report(path, groups, meta, figures, page)


@pytest.fixture
def report(tmp_path):
    def write(*groups, **meta):
        path = tmp_path / "run" / "report.html"
        write_report(path, groups, {"env": "count", "model": "oracle", **meta})
        return Reader(path.read_text())

    return write


def asks(arguments, content=None, name="terminal"):
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def hostile_page(report, group, trajectory, words):
    """A page of a run in which everything that others name or write is `words`."""
    everywhere = trajectory(
        0,
        rollout_id=words,
        messages=[
            {"role": words, "content": words},
            {"role": "system", "content": words},
            {"role": "user", "content": [{"type": "text", "text": words}, {"type": words}]},
            {**asks(words, words, words), "reasoning": words},
            {"role": "tool", "tool_call_id": "c", "content": words},
            {"role": "tool", "tool_call_id": words, "content": words},
        ],
        error=words,
        metrics={words: 1.0},
        detail={words: words, "patch": f"+{words}"},
        turns=[TurnRecord(number=1, finish_reason=words)],
        beside=Beside(stages={words: 1.0}, sandbox={words: words}),
        row=TokenRow(tokens=[], masks=[], source=words),
    )
    tool = {"type": "function", "function": {"name": words, "description": words, "parameters": {words: words}}}
    return report(
        group(everywhere, task_id=words, group_id=words, toolsets=(words,), tools=[tool], error=words),
        env=words,
        model=words,
        started_at=words,
        **{words: words},
    )


def test_no_control_character_of_any_name_reaches_the_page(report, group, trajectory):
    words = "\x1b[31mred\x1b]0;title\x07\x00\u202e\x9bleft"
    page = hostile_page(report, group, trajectory, words)
    written = page.text + "".join(value or "" for _, attributes in page.elements for value in attributes.values())
    assert not {"\x1b", "\x00", "\x07", "\u202e", "\x9b"} & set(written)


def test_nothing_hostile_becomes_part_of_the_page(report, group, trajectory):
    page = hostile_page(report, group, trajectory, HOSTILE)
    assert set(page.tags()) <= ALLOWED
    assert page.tags().count("script") == 1
    assert page.tags().count("style") == 1
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert {"src", "style", "srcdoc", "action", "formaction"}.isdisjoint(attributes)
        assert tag != "a" or re.fullmatch(r"#r\d+-\d+", attributes["href"] or "")
    assert page.text.count(HOSTILE) > 15, "and all of it can be read as it was written"


def test_the_page_loads_nothing_and_allows_only_its_own_script(report, tmp_path, group, trajectory):
    report(group(trajectory(0)))
    source = (tmp_path / "run" / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)
    assert policy
    assert policy[1].startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"https?://|url\(|@import|<link", source)


def test_escape_codes_and_control_characters_do_not_reach_the_page(report, group, trajectory):
    page = report(
        group(trajectory(0, messages=[{"role": "user", "content": "\x1b[31mred\x1b[0m\x00\x1b]0;t\x07\u202e\ud800"}]))
    )
    assert "red\u2400\u27e8U+202E\u27e9\ufffd" in page.text
    assert page.marked("t-fg1") == 1
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(page.text)


def test_a_call_stands_with_its_result_and_exit_code(report, group, trajectory):
    page = report(
        group(
            trajectory(
                0,
                messages=[
                    asks('{"command": "make test"}'),
                    {"role": "tool", "tool_call_id": "c", "content": '{"output": "2 failed", "exit_code": 2}'},
                    asks('{"command": "make'),
                ],
            )
        )
    )
    told = " ".join(page.text.split())
    assert "terminal make test exit 2 2 failed" in told
    assert "malformed arguments" in told
    assert "no result was recorded" in told
    assert page.marked("bad") == 2


def test_a_megabyte_of_output_is_cut_with_a_note(report, tmp_path, group, trajectory):
    page = report(group(trajectory(0, messages=[{"role": "tool", "content": "x" * 1_000_000}])))
    assert "900,000 characters are not shown here" in page.text
    assert (tmp_path / "run" / "report.html").stat().st_size < 200_000


def test_the_top_of_the_page_says_how_the_run_went(report, group, trajectory):
    lost = trajectory(1, None, blame=Blame.SANDBOX, error="the slot died", outcome=Outcome.INFRA_ERROR)
    page = report(
        group(trajectory(0, 0.5), lost, number=0),
        group(number=1, error="pip failed"),
        started_at=0,
        backend={"name": "local"},
    )
    told = " ".join(page.text.split())
    assert "count oracle · 1970-01-01 00:00:00 UTC" in told
    for fact in ("0.500mean reward, 95% interval", "2groups", "1/2rollouts scored", "1 natural", "1 blamed on sandbox"):
        assert fact in told
    assert 'backend{"name":"local"}'.replace(":", ": ") in told
    assert told.index("task-0") < told.index("task-1")
    assert "not run" in told
    assert "pip failed" in told
    assert "the slot died" in told


def test_rollouts_carry_what_the_filter_asks_for(report, group, trajectory):
    page = report(group(*(trajectory(place, reward) for place, reward in enumerate((1.5, 0.5, -1.0, None)))))
    rollouts = [attributes for _, attributes in page.elements if attributes.get("class") == "rollout"]
    assert [one["data-verdict"] for one in rollouts] == ["full", "partial", "zero", "unscored"]
    assert [one["data-outcome"] for one in rollouts] == ["natural"] * 3 + ["infra_error"]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{one['id']}" for one in rollouts]


def test_an_empty_run_has_a_page_too(report):
    page = report()
    assert "No group has finished." in page.text


def test_a_failed_write_leaves_the_old_page_and_no_rubbish(tmp_path, group, trajectory):
    path = tmp_path / "report.html"
    write_report(path, [], {"env": "old"})

    def broken():
        yield group(trajectory(0))
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_report(path, broken(), {"env": "new"})
    assert "<h1>old</h1>" in path.read_text()
    occupied = tmp_path / "folder"
    occupied.mkdir()
    with pytest.raises(OSError):
        write_report(occupied, [], {})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "report.html"]


def test_a_page_that_is_full_says_where(tmp_path, group, trajectory):
    talks = [group(trajectory(0, messages=[{"role": "user", "content": "x" * 1_500}]), number=n) for n in range(3)]
    write_report(tmp_path / "page.html", talks, {}, PageBudget(page_chars=2_000))
    text = Reader((tmp_path / "page.html").read_text()).text
    assert text.count("from here on, long texts are cut short") == 1
    assert text.index("task-1") < text.index("from here on") < text.index("task-2")


class Watched(Trajectory, weakref=True, kw_only=True):
    """A trajectory that can be seen to have gone."""


def test_one_group_at_a_time_is_in_memory(tmp_path, group, trajectory):
    made = []

    class Groups:
        def __iter__(self):
            for number in range(8):
                one = Watched(**msgspec.structs.asdict(trajectory(0)))
                made.append(weakref.ref(one))
                yield group(one, number=number)
                one = None
                assert sum(each() is not None for each in made) <= 3, "the one shown, the one before, the one to come"

    write_report(tmp_path / "page.html", Groups(), {})
    assert len(made) == 16
