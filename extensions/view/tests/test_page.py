"""The page in a real Chromium: every view of a real run, hostile texts, the keyboard, and the file that is one page."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from recorded import rollout, sky, write_run

from golden_messages import check_message
from palaestra.cli.main import main as palaestra
from palaestra.rollouts.records import Group, ToolErrorRecord, TurnRecord
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome
from palaestra_toolsets.browser.chromium import problem, usable
from palaestra_view.page_file import bundled
from palaestra_view.runs import open_runs
from palaestra_view.server import Viewer, serving_viewer
from palaestra_view.token_texts import TokenTexts

from .fixing import HOSTILE

if TYPE_CHECKING:
    from playwright.async_api import Page

TOKEN = "secret"
Visit = Callable[["Page", str], Awaitable[None]]


@pytest.fixture(scope="module")
def chromium() -> str:
    if (reason := problem()) is not None:
        pytest.skip(reason)
    found = usable()
    assert found is not None
    return found


async def browse(chromium: str, address: str, visit: Visit, allowed: str = "", **context: JSON) -> None:
    """Open an address and visit it. The page must report no error but those that contain `allowed`, and send nothing to
    another host."""
    from playwright.async_api import async_playwright

    problems: list[str] = []
    asked: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = await (await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})).new_page()
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        await page.goto(address)
        await page.wait_for_selector("#main h1")
        await visit(page, address.split("?")[0].split("#")[0])
        await browser.close()
    assert [problem for problem in problems if not allowed or allowed not in problem] == []
    origin = address.split("?")[0].split("#")[0]
    assert [url for url in asked if not url.startswith((origin, "data:", "blob:"))] == []


def see(chromium: str, run: Path, visit: Visit, at: str = "", allowed: str = "", **context: JSON) -> None:
    """Serve a run, index it, and visit its list of runs, or the view with the address `at`."""

    async def main() -> None:
        runs = open_runs(str(run))
        for name in runs:
            while runs.update(name):
                continue
        async with serving_viewer(Viewer(runs, TOKEN, TokenTexts(runs)), TOKEN) as url:
            await browse(chromium, f"{url}/?token={TOKEN}{at}", visit, allowed, **context)

    asyncio.run(main())


async def until(page: Page, condition: str) -> None:
    """Wait until a condition holds. Playwright's own wait uses `eval`, which the page's policy forbids."""
    for _ in range(300):
        if await page.evaluate(f"() => {condition}"):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{condition} never holds: {await page.inner_text('body')}")


async def go(page: Page, base: str, view: str, **params: Any) -> None:
    """Open a view by its address, and wait until it is there."""
    await page.evaluate("address => { location.hash = address }", f"#/{view}?{urlencode(params, doseq=True)}")
    await asyncio.sleep(0.05)
    await until(page, "!document.querySelector('main[aria-busy]')")
    await page.wait_for_selector("#main h1")


def test_every_view_of_a_real_run_opens_without_an_error(real: Path, chromium: str) -> None:
    run, first = real.name, "000000-count/0"

    async def visit(page: Page, base: str) -> None:
        assert await page.locator("table.wide tbody tr").count() == 1
        await page.click("text=table of figures")
        await page.wait_for_selector("table.wide caption")
        assert "pass@1" in await page.locator("table.wide", has=page.locator("caption")).inner_text()
        await page.click("text=table of figures")
        assert await page.locator("table.wide").count() == 1
        await page.click("table.wide tbody th a")
        await page.wait_for_selector("a.row")
        assert await page.locator("a.row").count() == 12
        for tab, found in (("groups", ".group .cell"), ("settings", ".card tr")):
            await go(page, base, "run", run=run, tab=tab)
            assert await page.locator(found).count() >= 12 - 8
        await go(page, base, "rollout", run=run, id=f"{first}/0")
        assert await page.locator(".turn.r-user").inner_text() != ""
        assert await page.locator(".turn.r-assistant").count() >= 2
        assert await page.locator(".tests li").count() == 2
        await go(page, base, "tokens", run=run, id=f"{first}/0")
        await page.wait_for_selector(".token-line .token.trained, .token-line .token.given")
        assert "T1 to T4 hold" in await page.inner_text("#main")
        assert "lines" in "".join(await page.locator(".token-line .token").all_inner_texts())
        await go(page, base, "siblings", run=run, id=[f"{first}/{n}" for n in range(4)])
        await page.wait_for_selector("table.calls td")
        assert await page.locator("table.siblings thead th").count() == 5
        await go(page, base, "run", run=run, text="Write the number")
        await until(page, "document.querySelectorAll('.found li').length == 12")

    see(chromium, real, visit)


@pytest.mark.parametrize("width", [400, 3840])
def test_no_view_is_wider_than_the_window(real: Path, chromium: str, width: int) -> None:
    async def visit(page: Page, base: str) -> None:
        one = {"run": real.name, "id": "000000-count/0/0"}
        views = [("runs", {}), ("run", one), ("run", {**one, "tab": "groups"}), ("rollout", one), ("tokens", one),
                 ("siblings", {**one, "id": ["000000-count/0/0", "000000-count/0/1"]})]  # fmt: skip
        for view, params in views:
            await go(page, base, view, **params)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view

    see(chromium, real, visit, viewport={"width": width, "height": 900}, color_scheme="dark")


def test_the_filter_and_the_keyboard(real: Path, chromium: str) -> None:
    async def visit(page: Page, base: str) -> None:
        await go(page, base, "run", run=real.name)
        await page.keyboard.press("/")
        await page.keyboard.type('task:count/1 calls>=1 "count/1"')
        await page.keyboard.press("Enter")
        await until(page, "document.querySelectorAll('a.row').length == 4")
        await page.keyboard.press("Escape")
        for key in ("j", "j", "k", "Enter"):
            await page.keyboard.press(key)
        await page.wait_for_selector(".turn")
        assert "id=000001-count%2F1%2F0" in page.url
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        assert await page.locator(".step[aria-current]").inner_text() != ""
        await page.keyboard.press("n")
        await until(page, "location.hash.includes('000001-count%2F1%2F1')")
        await page.keyboard.press("?")
        assert "next rollout" in await page.inner_text("dialog")
        await page.keyboard.press("Escape")
        await until(page, "!document.querySelector('dialog')")
        await page.keyboard.press("t")
        await page.wait_for_selector(".token-page")
        await page.focus(".token-page")
        for _ in range(3):
            await page.keyboard.press("ArrowRight")
        assert "position 2" in (await page.inner_text(".token-info")).replace("\n", " ")

    see(chromium, real, visit)


def hostile_run(folder: Path) -> Path:
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    image = {"type": "image_url", "image_url": {"url": "http://evil.example/x.png"}}
    script = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+"}}
    messages = [
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}, image, script]},
        {
            "role": "assistant",
            "content": f"<think>{HOSTILE}</think>{HOSTILE}",
            "tool_calls": [call, None, {"function": 3}],
        },
        {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE},
        {"role": "tool", "tool_call_id": 7, "content": {"x": [HOSTILE]}},
        {"role": "assistant", "content": {"$cut": "/x", "head": None, "tail": 3}, "tool_calls": {"toString": HOSTILE}},
        {"role": {"toString": 1}, "content": [{"$cut": 5}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": {"toString": 1}, "function": {"name": {"toString": 2}}}],
        },
    ]
    detail = {HOSTILE: HOSTILE, "patch": f"--- a\n+++ b\n+{HOSTILE}", "tests": {HOSTILE: False}}
    given: dict[str, JSON] = {"group_id": "g", "task_id": HOSTILE, "error": HOSTILE, "detail": detail}
    rollouts = [rollout(n, messages, float(n), rollout_id=f"g/{n}", **given) for n in range(2)]
    return write_run(folder, Group(group_id="g", number=0, task_id=HOSTILE, trajectories=rollouts), model=HOSTILE)


async def unharmed(page: Page) -> None:
    """Nothing of the hostile texts ran or hides."""
    assert await page.evaluate("window.broken") is None
    assert (
        await page.locator(
            "main script, main iframe, main [onerror], main a[href^='http'], main a[href^='javascript']"
        ).count()
        == 0
    )
    text = await page.evaluate("document.querySelector('main').textContent + document.title")
    assert not set("\u202e\u202c\x1b\x07\x9b") & set(text)


def test_hostile_texts_do_nothing(tmp_path: Path, chromium: str) -> None:
    async def visit(page: Page, base: str) -> None:
        one = {"run": "run", "id": "g/0"}
        pair = {"run": "run", "id": ["g/0", "g/1"]}
        views = [("runs", {}), ("run", one), ("run", {**one, "tab": "groups"}), ("run", {**one, "text": "broken"}),
                 ("rollout", one), ("siblings", pair)]  # fmt: skip
        for view, params in views:
            await go(page, base, view, **params)
            await unharmed(page)
        await go(page, base, "rollout", **one)
        shown = await page.inner_text("main")
        assert "<script>window.broken = 1</script>" in shown
        assert "⟨U+202E⟩reversed" in shown
        assert await page.locator(".a-fg1", has_text="red").count() > 0

    see(chromium, hostile_run(tmp_path / "run"), visit)


async def test_the_file_shows_the_same_without_a_server(real: Path, tmp_path: Path, chromium: str) -> None:
    out = tmp_path / "group.html"
    assert palaestra(["view", str(real), "--html", str(out), "--rollout", "000000-*"]) == 0
    assert out.stat().st_size < 2_000_000

    async def visit(page: Page, base: str) -> None:
        assert await page.locator("a.row").count() == 4
        assert "has 4 of the run's 12" in await page.inner_text(".run-notes")
        await go(page, base, "runs")
        assert await page.locator("table.wide tbody tr").count() == 1
        await go(page, base, "run", run=real.name)
        await go(page, base, "run", run=real.name, where='[["index","<",2]]', sort="reward desc")
        assert await page.locator("a.row").count() == 2
        await go(page, base, "run", run=real.name, tab="groups")
        assert await page.locator(".group").count() == 1
        await go(page, base, "rollout", run=real.name, id="000000-count/0/1")
        assert await page.locator(".turn.r-assistant").count() >= 1
        await go(page, base, "tokens", run=real.name, id="000000-count/0/1")
        await page.wait_for_selector(".token-line .token")
        await go(page, base, "siblings", run=real.name, id=[f"000000-count/0/{n}" for n in range(4)])
        await page.wait_for_selector("table.calls td")

    await browse(chromium, out.as_uri(), visit)


async def test_hostile_texts_in_a_file_do_nothing(tmp_path: Path, chromium: str) -> None:
    run, out = hostile_run(tmp_path / "run"), tmp_path / "run.html"
    assert palaestra(["view", str(run), "--html", str(out)]) == 0
    assert "window.broken" not in out.read_text()

    async def visit(page: Page, base: str) -> None:
        await go(page, base, "rollout", run="run", id="g/0")
        await unharmed(page)
        assert "<script>window.broken = 1</script>" in await page.inner_text("main")

    await browse(chromium, out.as_uri(), visit)


TRACEBACK = """Traceback (most recent call last):
  File "/tmp/.palaestra-tests/tests.py", line 4, in test_discount
    assert discount(100) == 90
           ^^^^^^^^^^^^^^^^^^^
AssertionError: 80
"""

ENDS: dict[str, tuple[dict[str, JSON], list[str]]] = {
    "sandbox": (
        {"reward": None, "outcome": Outcome.INFRA_ERROR, "blame": Blame.SANDBOX, "error": "SlotLost: the slot died"},
        ["Failed (sandbox).", "SlotLost: the slot died", "unscored"],
    ),
    "parser": (
        {"tool_errors": [ToolErrorRecord(turn=1, tool="", arguments="{", error="the call is not JSON")],
         "tool_calls_attempted": 1},
        ["1 call failed", "the call is not JSON"],
    ),
    "tests": (
        {"detail": {"tests": {"test_sum": True, "test_empty_line": False}}, "metrics": {"tests_passed": 0.5}},
        ["1 of 2 tests failed", "test_empty_line"],
    ),
    "turns": (
        {"outcome": Outcome.MAX_TURNS, "blame": Blame.MODEL},
        ["It reached the limit of turns before the model ended."],
    ),
    "hack": (
        {"official": 1.0, "labels": [Label("tests_edited", "tests/test_main.py was replaced", True)],
         "detail": {"difference": "official 1, reward 0, because of tests_edited"}},
        ["tests_edited (certain)", "tests/test_main.py was replaced", "The reward differs from the official verdict."],
    ),
    "discount": (
        {"detail": {"not_passed": {"test_discount": TRACEBACK}}, "metrics": {"tests_passed": 2.0, "tests_total": 3.0}},
        ["1 of 3 tests failed", "test_discount", "assert discount(100) == 90", "AssertionError: 80"],
    ),
    "crash": (
        {"detail": {"work_breaks_check": "JSONDecodeError: Expecting value: line 1 column 1"}},
        ["The check fails over this work:", "JSONDecodeError: Expecting value"],
    ),
}  # fmt: skip
"""What made a rollout end without a reward, and what the first screen of its page must show."""


def played(folder: Path) -> Path:
    """A run with five tasks, in each of which the third of four rollouts got no reward, for one of the reasons."""
    long = "\n".join(f"line {n}" for n in range(400))
    talk = [{"role": "user", "content": long}, *({"role": "assistant", "content": long} for _ in range(8))]
    groups = []
    for number, (name, (given, _)) in enumerate(ENDS.items()):
        group = f"{number:06}-{name}"
        facts: dict[str, JSON] = {"group_id": group, "task_id": name}
        members = [rollout(n, talk, 1.0, rollout_id=f"{group}/{n}", **facts) for n in (0, 1, 3)]
        lost = rollout(2, talk, **{"reward": 0.0, "rollout_id": f"{group}/2", **facts, **given})
        groups.append(Group(group_id=group, number=number, task_id=name, trajectories=[*members, lost]))
    return write_run(folder, *groups)


@pytest.mark.parametrize("name", list(ENDS))
def test_a_new_user_finds_the_reason_with_two_clicks(name: str, tmp_path: Path, chromium: str) -> None:
    """From the address that the command prints for a run. A rollout without a score is found with its blame."""
    _, wanted = ENDS[name]

    async def visit(page: Page, base: str) -> None:
        await page.click("text=blame: sandbox" if name == "sandbox" else "text=below full reward")
        await until(page, "document.querySelectorAll('a.row').length < 20 && document.querySelector('a.row')")
        await page.click(f"a.row:has-text('{name}')")
        await page.wait_for_selector(".turn")
        seen = await page.evaluate(SEEN)
        assert [each for each in wanted if each not in seen] == [], seen

    see(chromium, played(tmp_path / "run"), visit, at="#/run?run=run")


def test_the_reasons_lead_to_the_turn_the_evidence_and_the_rollout(tmp_path: Path, chromium: str) -> None:
    async def visit(page: Page, base: str) -> None:
        await page.click(".run-notes a >> text=000000-sandbox/2")
        await page.wait_for_selector(".turn")
        assert "id=000000-sandbox%2F2" in page.url
        await go(page, base, "rollout", run="run", id="000002-tests/2")
        assert "✕ test_empty_line" not in await page.evaluate(SEEN)
        await page.click(".callout >> text=evidence")
        assert "✕ test_empty_line" in await page.evaluate(SEEN)

    see(chromium, played(tmp_path / "run"), visit, at="#/run?run=run")


def test_a_score_that_is_only_a_number_is_explained_by_a_sibling(tmp_path: Path, chromium: str) -> None:
    def talk(command: str) -> list[Message]:
        called = {"id": "1", "function": {"name": "terminal", "arguments": f'{{"command": "{command}"}}'}}
        return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "", "tool_calls": [called]}]

    given: list[tuple[str, float, dict[str, JSON]]] = [
        ("wc -c a", 0.0, {}), ("wc -l a", 1.0, {}), ("wc -c a", 0.5, {"detail": {"output": "expected 3"}}),
        ("wc -l a", 0.0, {}), ("wc -c a", 0.0, {"labels": [Label("odd", "x")]}),
    ]  # fmt: skip
    members = [rollout(n, talk(command), reward, **more) for n, (command, reward, more) in enumerate(given)]
    made = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=members)
    alone = rollout(0, talk("ls"), 0.0, rollout_id="a/0", group_id="a", task_id="a")
    run = write_run(tmp_path / "run", made, Group(group_id="a", number=1, task_id="a", trajectories=[alone]))
    shown = {
        "000000-sky/0": "The check recorded only a number. The sibling #1 has the reward 1; call 1 is terminal wc -c a "
        "here and terminal wc -l a there: compare",
        "000000-sky/2": "No test is listed. See what the check recorded. The sibling #1 has",
        "000000-sky/3": "The sibling #1 has the reward 1 with the same calls: compare",
        "a/0": "The check recorded only a number. A check records why with Score(reward, detail={…}).",
    }

    async def visit(page: Page, base: str) -> None:
        for name, wanted in shown.items():
            await go(page, base, "rollout", run="run", id=name)
            assert wanted in await page.evaluate(SEEN)
        for number in (1, 4):
            await go(page, base, "rollout", run="run", id=f"000000-sky/{number}")
            assert "sibling #" not in await page.inner_text("#main")
        await go(page, base, "rollout", run="run", id="000000-sky/0")
        await page.click("text=compare")
        await page.wait_for_selector("td.parts")
        assert await page.locator("td.parts").count() == 1

    see(chromium, run, visit)


def test_the_first_screen_answers_why_a_rollout_got_no_reward(tmp_path: Path, chromium: str) -> None:
    long = "\n".join(f"line {n}" for n in range(400))
    talk = [{"role": "user", "content": long}, *({"role": "assistant", "content": long} for _ in range(8))]
    rollouts = [
        rollout(n, talk, **{"reward": 0.0, "rollout_id": f"g/{n}", "group_id": "g", "task_id": "fix", **given})
        for n, (given, _) in enumerate(ENDS.values())
    ]
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="fix", trajectories=rollouts))

    async def visit(page: Page, base: str) -> None:
        for n, (_, wanted) in enumerate(ENDS.values()):
            await go(page, base, "rollout", run="run", id=f"g/{n}")
            seen = await page.evaluate(SEEN)
            assert [each for each in wanted if each not in seen] == [], seen

    see(chromium, run, visit)


SEEN = r"""() => {
  const found = [];
  const walk = document.createTreeWalker(document.querySelector("#main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(walk.currentNode);
    const box = range.getBoundingClientRect();
    const inside = box.height && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
    if (inside) found.push(walk.currentNode.data);
  }
  return found.join("").replace(/\s+/g, " ");
}"""
"""Returns the text that is on the screen, without scrolling and without opening anything."""


async def test_a_report_has_scores_causes_and_the_rollouts_that_fit(tmp_path: Path, chromium: str) -> None:
    lost = {"outcome": Outcome.INFRA_ERROR, "blame": Blame.GRADER, "error": "no such column"}
    rollouts = [
        rollout(n, [{"role": "user", "content": "x"}], None if n == 2 else float(n), rollout_id=f"g/{n}", group_id="g",
                detail={"category": "files"}, **(lost if n == 2 else {}))
        for n in range(3)
    ]  # fmt: skip
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=rollouts))
    assert palaestra(["report", str(run)]) == 0

    async def visit(page: Page, base: str) -> None:
        assert await page.locator("a.row").count() == 3, "the file opens with the page of the run"
        await go(page, base, "run", run="run", tab="scores")
        text = await page.inner_text("main")
        assert "1 rollout failed (grader), first g/2: no such column" in text
        assert await page.locator("table.scores tbody tr").count() == 2
        assert "files" in text
        assert "2 of 3" in text

    await browse(chromium, (run / "report.html").as_uri(), visit)


def test_a_log_of_inspect_is_shown_with_its_scores_messages_and_calls(chromium: str) -> None:
    async def visit(page: Page, base: str) -> None:
        await go(page, base, "run", run="sums.eval")
        assert await page.locator("a.row").count() == 6
        await go(page, base, "rollout", run="sums.eval", id="000000-one/0")
        text = await page.inner_text("main")
        for wanted in ("You add.", "add", "The answer is 2", "match", "because"):
            assert wanted in text
        assert "palaestra replay" not in text

    see(chromium, Path(__file__).parent / "imports/logs/sums.eval", visit)


def test_the_bundle_has_every_module_once_and_no_import() -> None:
    script = bundled()
    assert script.count("const $_dom = ") == 1
    assert "\nimport " not in script
    assert "\nexport " not in script


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["--rollout", "x"], "--html"),
        (["--html", "OUT", "--rollout", "nothing*"], "no finished rollout"),
        (["--html", "OUT", "--tokenizer", "./missing"], "no model folder"),
    ],
)
def test_a_wrong_command_line_gets_a_reason(
    tmp_path: Path, line: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(tmp_path / "run")
    words = [str(tmp_path / "out.html") if word == "OUT" else word for word in line]
    assert palaestra(["view", str(run), *words]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


FAILING_COMMAND: list[Message] = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "function": {"name": "terminal", "arguments": '{"command": "make all"}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": '{"output": "\\"exit_code\\": 3", "exit_code": 2}'},
]  # fmt: skip


def test_crashing_checks_and_nonzero_exits_are_named(tmp_path: Path, chromium: str) -> None:
    given: list[dict[str, JSON]] = [
        {"detail": {"work_breaks_check": "JSONDecodeError: Expecting value"}}, {"detail": {"work_failed": "no file"}},
        {},
    ]  # fmt: skip
    members = [
        rollout(n, FAILING_COMMAND, 0.0, rollout_id=f"g/{n}", group_id="g", task_id="fix", outcome=Outcome.MAX_TURNS,
                blame=Blame.MODEL, turns=[TurnRecord(number=1)], **more)
        for n, more in enumerate(given)
    ]  # fmt: skip
    made = Group(group_id="g", number=0, task_id="fix", trajectories=members)
    run = write_run(tmp_path / "run", made, config={"env": {"max_agent_turns": 7}})

    async def visit(page: Page, base: str) -> None:
        notes = await page.inner_text(".run-notes")
        assert "1 rollout, first g/0: JSONDecodeError" in notes
        assert "first g/1: no file" in notes
        assert "failed (" not in notes
        assert "1≠0" in await page.inner_text("a.row >> nth=0")
        await go(page, base, "rollout", run="run", id="g/2")
        seen = await page.evaluate(SEEN)
        assert "the limit of 7 turns" in seen
        assert "1 call ended with a nonzero exit code. terminal, turn 1: exit code 2: make all" in seen

    see(chromium, run, visit, at="#/run?run=run")


def test_a_long_command_is_cut_where_it_can_be_seen(tmp_path: Path, chromium: str) -> None:
    def talk(command: str) -> list[Message]:
        called = {"id": "1", "function": {"name": "terminal", "arguments": f'{{"command": "{command}", "timeout": 9}}'}}
        return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "", "tool_calls": [called]}]

    members = [rollout(n, talk(f"echo {n} " + "word " * 200), float(n)) for n in range(2)]
    made = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=members)
    run = write_run(tmp_path / "run", made)

    async def visit(page: Page, base: str) -> None:
        await go(page, base, "siblings", run="run", id=["000000-sky/0", "000000-sky/1"])
        shown = await page.locator(".why code, table.calls code").all_inner_texts()
        assert len(shown) == 4
        assert all(each.startswith("echo") and each.endswith("…") for each in shown), shown

    see(chromium, run, visit)


def test_criteria_are_fields_and_a_wrong_filter_keeps_the_page(real: Path, chromium: str) -> None:
    async def visit(page: Page, base: str) -> None:
        async def asked(text: str) -> None:
            await page.fill("input[aria-label='Filter rollouts']", text)
            await page.keyboard.press("Enter")

        field = "document.querySelector(\"input[aria-label='Filter rollouts']\").value"
        for text, reason in (("reward<abc", "reward needs a number, not abc"), ("foo:bar", "there is no field foo")):
            await asked(text)
            await until(page, f"document.querySelector('[role=alert]')?.textContent === '{reason}'")
            assert await page.evaluate(field) == text
            assert await page.locator("a.row").count() == 12
        await asked("written = 1 time>=0")
        await until(page, "location.hash.includes('metric.written')")
        await until(page, f"{field} === 'metric.written=1 seconds>=0'")
        assert 0 < await page.locator("a.row").count() < 12
        await go(page, base, "run", run=real.name, where='[["reward","<","abc"]]')
        assert "filter reward<abc" in await page.inner_text("[role=alert]")
        assert await page.evaluate(field) == "reward<abc"

    see(chromium, real, visit, at=f"#/run?run={real.name}", allowed="400")


def test_the_rollouts_of_a_filtered_list_are_read_one_after_the_other(tmp_path: Path, chromium: str) -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    members = [rollout(n, talk, float(n % 2), rollout_id=f"g/{n}", group_id="g", task_id="t") for n in range(8)]
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=members))

    async def visit(page: Page, base: str) -> None:
        await page.click("text=below full reward")
        await until(page, "document.querySelectorAll('a.row').length == 4")
        for key in ("j", "j", "Enter"):
            await page.keyboard.press(key)
        await page.wait_for_selector(".turn")
        assert "id=g%2F2&" in page.url
        for key, wanted in (("n", 4), ("n", 6), ("p", 4), ("p", 2), ("p", 0)):
            await page.keyboard.press(key)
            await until(page, f"location.hash.includes('id=g%2F{wanted}&')")
            await until(page, f"document.querySelector('#main h1')?.textContent.endsWith('#{wanted}')")
        await page.keyboard.press("p")
        await until(page, "document.body.textContent.includes('no rollout before this one in the filtered list')")
        await page.keyboard.press("u")
        await until(page, "document.querySelectorAll('a.row').length == 4")

    see(chromium, run, visit, at="#/run?run=run")


def test_a_text_that_was_found_is_shown(tmp_path: Path, chromium: str) -> None:
    long = "\n".join(f"line {n}" for n in range(400))
    talk = [{"role": "user", "content": long}, {"role": "assistant", "content": long + "\nThe Needle is here\n" + long}]
    run = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=[
        rollout(0, talk, 0.0, rollout_id="g/0", group_id="g", task_id="t", turns=[TurnRecord(number=1)])]))  # fmt: skip

    async def visit(page: Page, base: str) -> None:
        await go(page, base, "run", run="run", text="needle is")
        await page.click(".found a")
        await page.wait_for_selector("mark.hit")
        assert "The Needle is here" in await page.evaluate(SEEN)
        assert await page.inner_text("mark.hit") == "Needle is"

    see(chromium, run, visit)


def test_the_file_of_a_folder_names_the_run_that_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("old", "new")):
        journal = write_run(tmp_path / "runs" / name, sky()) / "journal.jsonl"
        os.utime(journal, (1e9 + number, 1e9 + number))
    out = tmp_path / "out.html"
    assert palaestra(["view", str(tmp_path / "runs"), "--html", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"path": str(out)}
    check_message(told.err, "new")
    assert palaestra(["view", str(tmp_path / "runs/old"), "--html", str(out)]) == 0
    assert capsys.readouterr().err == ""
