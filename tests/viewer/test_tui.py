"""`palaestra view --tui`: every screen with the keyboard, through textual's pilot and in a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pexpect
import pyte
import pytest
from recorded import TWO_CALLS, rollout, write_run
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from palaestra.cli.main import main as palaestra
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.rollouts.annotations import annotation, write_annotations
from palaestra.rollouts.events import RolloutEnded
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import Group
from palaestra.viewer.filter_words import filter_text, parse_filter
from palaestra.viewer.runs import open_runs
from palaestra.viewer.token_texts import TokenTexts
from palaestra.viewer.tui.app import TerminalViewer
from palaestra.viewer.tui.rollout_screen import RolloutScreen, StepView
from palaestra.viewer.tui.run_screens import RunScreen, RunsScreen
from palaestra.viewer.tui.safe_text import coloured
from palaestra.viewer.tui.siblings_screen import SiblingsScreen
from palaestra.viewer.tui.view_screen import Help

from .fixing import HOSTILE
from .test_page import ENDS, TRACEBACK, played

PAGE = Path(__file__).parents[2] / "src/palaestra/viewer/page"
Visit = Callable[["Pilot[None]"], Awaitable[None]]


def look(target: Path, visit: Visit, size: tuple[int, int] = (100, 40)) -> None:
    async def main() -> None:
        runs = open_runs(str(target))
        for name in runs:
            while runs.update(name):
                continue
        app = TerminalViewer(runs, TokenTexts(runs))
        async with app.run_test(size=size) as pilot:
            await loaded(pilot)
            await visit(pilot)
        runs.close()

    asyncio.run(main())


async def loaded(pilot: Pilot[None]) -> None:
    """Wait until the open screen has read its data."""
    for _ in range(200):
        await pilot.pause()
        if not any(worker.group == "load" and not worker.is_finished for worker in pilot.app.workers):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the screen never loads")


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await loaded(pilot)


def screen_text(pilot: Pilot[None]) -> str:
    """What the terminal shows, row by row."""
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips).replace("\xa0", " ")


def cells(pilot: Pilot[None], selector: str = "DataTable") -> list[list[str]]:
    table = pilot.app.screen.query_one(selector, DataTable)
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


def reference_column(pilot: Pilot[None]) -> int:
    columns = pilot.app.screen.query_one("#facts", DataTable).ordered_columns[1:]
    return next(place for place, column in enumerate(columns) if "reference" in str(column.label))


def test_every_screen_opens_with_the_keyboard(real: Path) -> None:
    async def visit(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app.screen, RunScreen)
        assert len(cells(pilot)) == 12
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, RunsScreen)
        assert cells(pilot)[0][:4][0] == "count_and_check"
        await press(pilot, "enter", "j", "enter")
        assert isinstance(pilot.app.screen, RolloutScreen)
        assert "count/0 #1" in screen_text(pilot)
        await press(pilot, "s")
        assert isinstance(pilot.app.screen, SiblingsScreen)
        await press(pilot, "question_mark")
        assert isinstance(pilot.app.screen, Help)
        assert "use as reference" in screen_text(pilot)
        await press(pilot, "escape", "escape", "n")
        assert "count/0 #2" in screen_text(pilot)
        await press(pilot, "p", "p", "p")
        assert "count/0 #0" in screen_text(pilot)
        assert "there is no rollout before this one" in screen_text(pilot)

    look(real, visit)


def test_the_keys_are_named_in_60_columns(real: Path) -> None:
    async def visit(pilot: Pilot[None]) -> None:
        for keys in ("escape", "enter", "enter", "s"):
            await press(pilot, keys)
            assert "? keys" in screen_text(pilot).splitlines()[-1]

    look(real, visit, (60, 30))


def test_rollouts_are_filtered_and_sorted(real: Path) -> None:
    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"task:count/1 calls>=1", "enter")
        assert [row[0] for row in cells(pilot)] == ["count/1"] * 4
        await press(pilot, "x", "o")
        rewards = [row[2] for row in cells(pilot)]
        assert rewards == sorted(rewards)
        assert len(set(rewards)) == 2
        await press(pilot, "O")
        assert [row[2] for row in cells(pilot)] == sorted(rewards, reverse=True)
        await press(pilot, "slash", *"size<3", "enter")
        assert "there is no field size" in screen_text(pilot)
        await press(pilot, "escape")
        assert not pilot.app.screen.query_one(Input).has_class("on")
        assert len(cells(pilot)) == 12

    look(real, visit)


@pytest.mark.parametrize(
    "text",
    ["reward<1 outcome:max_turns", "differs", "label=none", 'task:"a b" parser', "metric.tests_passed>=0.5 tokens>9",
     "changed regraded<1", "verdict=hack tag:slow note:tests", "a/b<3", "size<3", "error!=none", '"', "x:y",
     'any "q w"', "http://x", "reward<", "différent", "index>=3 id=a/0", "right=0", "answered = 1 right>=0.5", "time>1",
     "reward = 0", 'reward < 0.5 task : "a b"', "reward<abc", "tokens>0.5k", "foo:bar", "foo=1", '"foo:bar"', "task<3",
     "reward!=none", "reward<none", "Error: x", "a.py::test_b", "x = 3", 'task:"reward = 1"', "reward:1e3",
     "reward=0x1", "reward=.5", "tag!=slow", "KeyError:", "metric.a.b = 2", "turns=none", "reward=1_0",
     "labels:x failed>0 exits>1"],
)  # fmt: skip
def test_the_filter_is_the_one_of_the_page(text: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    program = f"import {{ parse, asText }} from {json.dumps((PAGE / 'filter.js').as_uri())};" + (
        "const found = parse(process.argv[1], ['right', 'answered', 'turns']);"
        "console.log(JSON.stringify([found, asText(found.where)]));"
    )
    words = [node, "--input-type=module", "-e", program, text]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found, back = json.loads(out)
    if found["problems"]:
        with pytest.raises(ConfigError, match=re.escape(found["problems"][0])):
            parse_filter(text, ("right", "answered", "turns"))
        return
    where = parse_filter(text, ("right", "answered", "turns"))
    assert [list(each) for each in where] == found["where"]
    assert filter_text(where) == back


def test_a_visible_column_is_a_field_with_spaces_around_the_comparison() -> None:
    wanted = [("metric.right", "=", "0"), ("seconds", ">", "1"), ("reward", "=", "0"), ("any", ":", "a")]
    assert parse_filter("right=0 time > 1 reward = 0 a", ["right"]) == wanted
    assert parse_filter("turns=1", ["turns"]) == [("turns", "=", "1")], "the field of the index comes first"
    for text, reason in (("right=0", "no field right"), ("foo:bar", "no field foo"), ("tokens>0.5k", "not 0.5k"),
                         ("reward<abc", "needs a number")):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            parse_filter(text)


def test_a_rollout_shows_its_reasons_calls_and_results(tmp_path: Path) -> None:
    rollouts = [
        rollout(n, TWO_CALLS, **{"reward": 0.0, "rollout_id": f"g/{n}", "group_id": "g", "task_id": "fix", **given})
        for n, (given, _) in enumerate(ENDS.values())
    ]
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="fix", trajectories=rollouts))
    write_annotations(run, [annotation("g/0", "ada", verdict="grader_mistake", note="Why [b]?", tags=["odd"])])

    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        for place, (_, wanted) in enumerate(ENDS.values()):
            seen = " ".join(screen_text(pilot).split())
            assert [each for each in wanted if each not in seen] == []
            if place == 0:
                for each in ("judged: grader_mistake", "tag: odd", "note of ada: Why [b]?"):
                    assert each in seen
            assert "tests failed:test" not in seen
            assert "weather" in seen
            await press(pilot, "n")

    look(run, visit)


@pytest.mark.parametrize("name", list(ENDS))
def test_a_new_user_finds_the_reason_with_a_few_keys(name: str, tmp_path: Path) -> None:
    """Sorting by reward puts the rollouts without the full reward first; those without a score are last."""
    _, wanted = ENDS[name]

    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "o")
        place = next(place for place, row in enumerate(cells(pilot)) if row[0] == name)
        await press(pilot, *(["G"] if name == "sandbox" else ["j"] * place), "enter")
        seen = " ".join(screen_text(pilot).split())
        assert [each for each in wanted if each not in seen] == []

    look(played(tmp_path / "run"), visit)


def test_long_results_are_folded_until_they_are_opened(tmp_path: Path) -> None:
    long = "\n".join(f"line {n}" for n in range(400))
    huge = "0123456789\n" * 20_000 + "the end"
    calls = TWO_CALLS[2]["tool_calls"]
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": long}, {"role": "tool", "content": huge}]  # fmt: skip
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=[rollout(0, talk)]))

    async def visit(pilot: Pilot[None]) -> None:
        def shown(place: int) -> str:
            return str(list(pilot.app.screen.query(StepView))[place].render())

        await press(pilot, "enter")
        assert "line 9" in shown(2)
        assert "line 10" not in shown(2)
        assert "390 more lines" in shown(2)
        await press(pilot, "j", "j", "o")
        assert "line 399" in shown(2)
        await press(pilot, "o", "j", "o")
        assert "line 10" not in shown(2)
        assert len(shown(3)) > 190_000
        assert "characters …" not in shown(3)

    look(run, visit)


def test_siblings_mark_the_first_token_and_call_that_differ(real: Path) -> None:
    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "s")
        rows = {row[0]: row[1:] for row in cells(pilot, "#facts")}
        assert len(rows["reward"]) == 4
        assert rows["first other token"][reference_column(pilot)] == ""
        assert rows["reward"][reference_column(pilot)] == max(rows["reward"])
        marked = [[cell for cell in row if cell.startswith("▶")] for row in cells(pilot, "#calls")]
        firsts = [each for each in rows["first other call"] if each]
        assert sum(map(len, marked)) == len(firsts)
        part = pilot.app.screen.query_one(".part", Static)
        text = part.render()
        assert "parts from" in str(text)
        assert sum(bool(getattr(span.style, "reverse", None)) for span in text.spans) == 2
        other = (reference_column(pilot) + 1) % 4
        await press(pilot, *["left"] * 4, *["right"] * (other + 1), "r")
        assert reference_column(pilot) == other
        assert {row[0]: row[1:] for row in cells(pilot, "#facts")}["first other token"][other] == ""
        await press(pilot, "enter")
        assert f"count/0 #{other}" in screen_text(pilot)

    look(real, visit)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_hostile_texts_do_nothing_at_any_width(tmp_path: Path, width: int) -> None:
    markup = "[red]x[/red] [@click=app.quit]y[/] [link=http://evil.example]z[/link] [/nothing] " + HOSTILE
    called = {"id": "1", "function": {"name": markup, "arguments": markup}}
    messages = [{"role": "user", "content": markup}, {"role": "tool", "content": markup},
                {"role": markup, "content": markup, "tool_calls": [called]}]  # fmt: skip
    given = {"group_id": "h", "task_id": markup, "error": markup, "detail": {markup: markup, "tests": {markup: False}}}
    members = [rollout(n, messages, float(n), rollout_id=f"h/{n}", **given) for n in range(2)]
    group = Group(group_id="h", number=0, task_id=markup, trajectories=members)
    run = write_run(tmp_path / "run", group, model=markup)
    write_annotations(run, [annotation("h/0", "ada", note=markup)])

    async def visit(pilot: Pilot[None]) -> None:
        async def unharmed(*, seen: bool = True) -> None:
            text = screen_text(pilot)
            assert not set("\x1b\x07\x9b\u202e\u202c") & set(text)
            assert "[red]x[/red]" in text or not seen
            for strip in pilot.app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    assert style is None or (style.link is None and "evil" not in str(style.meta)), segment
                    assert style is None or "app.quit" not in str(style.meta)

        await unharmed()
        await press(pilot, "escape")
        await unharmed(seen=width > 60)  # the model's column is further right
        await press(pilot, "enter", "enter")
        await unharmed()
        await press(pilot, "a", "G")
        await pilot.click("#steps")
        await unharmed()
        await press(pilot, "s")
        assert pilot.app.is_running

    look(run, visit, (width, 30))


def test_colours_are_kept_and_everything_else_is_inert() -> None:
    text = coloured("\x1b[1;31mred\x1b[0m [b]plain[/b] \x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\ \u202e")
    assert text.plain == "red [b]plain[/b] link ⟨U+202E⟩"
    assert [(span.start, span.end, span.style.color.number) for span in text.spans] == [(0, 3, 1)]
    assert isinstance(text, Text)


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    group = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, TWO_CALLS)])
    folder = write_run(tmp_path / "run", group, ended=False)

    async def visit(pilot: Pilot[None]) -> None:
        assert len(cells(pilot)) == 1
        journal = Journal(folder / "journal.jsonl")
        journal.append(RolloutEnded(trajectory=rollout(1, TWO_CALLS, 0.0)))
        journal.close()
        for _ in range(100):
            if len(cells(pilot)) == 2:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the rollout never appears")

    look(folder, visit)


def test_a_long_list_of_rollouts_is_read_in_parts(tmp_path: Path) -> None:
    members = [rollout(n, TWO_CALLS[:1], float(n % 2)) for n in range(450)]
    run = write_run(tmp_path / "run", Group(group_id="000000-sky", number=0, task_id="sky", trajectories=members))

    async def visit(pilot: Pilot[None]) -> None:
        assert len(cells(pilot)) == 200
        for rows in (400, 450):
            await press(pilot, "G")
            for _ in range(100):
                await pilot.pause()
                if len(cells(pilot)) == rows:
                    break
            assert len(cells(pilot)) == rows
        assert "450 rollouts" in screen_text(pilot)

    look(run, visit)


def test_a_real_terminal_shows_it_and_is_left_as_it_was(real: Path) -> None:
    screen = pyte.Screen(100, 30)
    stream = pyte.Stream(screen)
    words = ["-m", "palaestra", "view", str(real), "--tui"]
    child = pexpect.spawn(sys.executable, words, dimensions=(30, 100), encoding="utf-8", timeout=20,
                          env={**os.environ, "TERM": "xterm-256color"})  # fmt: skip

    def until(wanted: str, *, there: bool = True) -> None:
        for _ in range(400):
            with contextlib.suppress(pexpect.TIMEOUT):
                stream.feed(child.read_nonblocking(65536, timeout=0.05))
            if any(wanted in row for row in screen.display) == there:
                return
        raise AssertionError(f"{wanted!r} never appears or goes:\n" + "\n".join(screen.display))

    until("12 rollouts")
    child.send("j\r")
    until("count/0 #1")
    child.send("s")
    until("siblings")
    child.send("?")
    until("use as reference")
    child.send("q")
    until("Keys", there=False)
    child.send("q")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "\x1b[?1049l" in child.before, "the terminal's own screen is back"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tui"], "needs a terminal"),
        (["--tui", "--html", "x.html"], "leave out --html"),
        (["--tui", "--json"], "--json"),
    ],
)
def test_a_wrong_command_line_gets_a_reason(
    real: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert palaestra(["view", str(real), *words]) == 2
    assert reason in capsys.readouterr().err


def test_without_textual_the_extra_is_named(real: Path, tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text("raise ImportError('no textual')\n")
    words = [sys.executable, "-m", "palaestra", "view", str(real), "--tui"]
    found = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr.strip().endswith("palaestra view --tui needs textual: pip install 'palaestra[tui]'")
    assert len(found.stderr.strip().splitlines()) == 1


def test_the_list_of_runs_shows_id_start_and_forks(tmp_path: Path) -> None:
    group = Group(group_id="g", number=0, task_id="t", trajectories=[rollout(0, TWO_CALLS)])
    fork: dict[str, JSON] = {"fork": {"run_id": "run-1", "rollout_id": "g/0", "turn": 3}}
    write_run(tmp_path / "runs/first", group)
    write_run(tmp_path / "runs/other", group, config=fork)

    async def visit(pilot: Pilot[None]) -> None:
        rows = {row[5].split(",")[0]: row for row in cells(pilot)}
        assert rows["first"][0] == "weather"
        assert rows["other"][0] == "⑂ weather"
        assert rows["other"][5] == "other, turn 3 of g/0"
        assert all(row[4].startswith("19") for row in rows.values())
        assert "turn 3 of g/0" in screen_text(pilot), "no column is outside the screen"

    look(tmp_path / "runs", visit)


def test_the_next_rollout_is_that_of_the_filtered_list(tmp_path: Path) -> None:
    members = [rollout(n, TWO_CALLS, float(n % 2), rollout_id=f"g/{n}", group_id="g", task_id="t") for n in range(6)]
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=members))

    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"reward < 1", "enter", "j", "enter")
        assert "t #2" in screen_text(pilot)
        await press(pilot, "n")
        assert "t #4" in screen_text(pilot)
        await press(pilot, "n")
        assert "there is no rollout after this one in the filtered list" in screen_text(pilot)
        await press(pilot, "p", "p", "p")
        assert "t #0" in screen_text(pilot)
        await press(pilot, "escape")
        assert len(cells(pilot)) == 3

    look(run, visit)


def test_tracebacks_and_commands_are_text_and_the_failing_test_is_reached(tmp_path: Path) -> None:
    called = {"id": "1", "function": {"name": "terminal", "arguments": json.dumps(
        {"command": "cat <<E > a\nx\nE", "timeout": 9})}}  # fmt: skip
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    detail: dict[str, JSON] = {"not_passed": {"test_discount": TRACEBACK}, "report": {"log": "a\nb", "n": 2}}
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=[
        rollout(0, talk, 0.0, rollout_id="g/0", group_id="g", task_id="t", detail=detail),
        rollout(1, talk, 0.0, rollout_id="g/1", group_id="g", task_id="t", detail={"work_failed": "no file"}),
    ]))  # fmt: skip

    async def visit(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        steps = [str(view.render()) for view in pilot.app.screen.query(StepView)]
        assert "terminal cat <<E > a\nx\nE timeout=9" in steps[1]
        grading = next(each for each in steps if each.startswith("grading"))
        assert "✕ test_discount\nTraceback (most recent call last):\n  File" in grading
        assert "log:\na\nb\nn: 2" in grading
        assert not any("\\n" in each for each in steps)
        for _ in range(2):
            await press(pilot, "f")
            assert "grading" in str(pilot.app.focused.render())  # type: ignore[union-attr]
            assert "no test failed" not in screen_text(pilot)
            await press(pilot, "n")

    look(run, visit)
