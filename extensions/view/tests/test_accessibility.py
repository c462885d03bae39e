"""Every view in a real Chromium under axe-core, light and dark, and at widths from 400 px to 3840 px.

axe-core is unpacked by `scripts/axe_env`, with a fixed version and hash. Where it is missing, these tests skip.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from recorded import TWO_CALLS, call, result, rollout, sky, turns, write_run

from palaestra.rollouts.annotations import annotation, write_annotations
from palaestra.rollouts.records import Fork, Group
from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade, write_grades
from palaestra_slots.core.types import Blame, Label, Message, Outcome
from palaestra_view.page_file import Chosen, write_page
from palaestra_view.runs import open_runs
from palaestra_view.server import Viewer, serving_viewer
from palaestra_view.token_texts import TokenTexts

from .test_forks import FIRST, fork, group, named
from .test_page import TOKEN, browse, go, hostile_run, until
from .test_page import chromium as chromium

if TYPE_CHECKING:
    from playwright.async_api import Page

__all__ = ["chromium"]

AXE = Path(__file__).parents[3] / ".axe/axe.min.js"
LOGS = Path(__file__).parent / "imports/logs"

FINDINGS = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => [each.id, each.nodes.length, each.nodes[0].target.join(" "), each.nodes[0].failureSummary]);
}"""

OVERLAPS = r"""() => {
  const clip = (box, node) => {
    let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
    for (let up = node.parentElement; up; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (style.position === "fixed" && up.id === "status") return null;
      if (style.visibility === "hidden" || style.opacity === "0") return null;
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      const edge = up.getBoundingClientRect();
      if (style.overflowX !== "visible") [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
      if (style.overflowY !== "visible") [top, bottom] = [Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
    }
    return right - left > 2 && bottom - top > 2 ? { left, top, right, bottom } : null;
  };
  const APART = "#bar, .skip, .menu .items, dialog, script, noscript, option";
  const boxes = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode;
    const parent = text.parentElement;
    if (!text.data.trim() || !parent.checkVisibility() || parent.closest(APART)) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const each of range.getClientRects()) {
      const box = clip(each, text);
      if (box) boxes.push({ ...box, text });
    }
  }
  boxes.sort((one, two) => one.top - two.top);
  const found = [];
  boxes.forEach((one, place) => {
    for (let next = place + 1; next < boxes.length && boxes[next].top < one.bottom - 4; next++) {
      const two = boxes[next];
      if (two.text === one.text) continue;
      const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const high = Math.min(one.bottom, two.bottom) - two.top;
      if (wide > 3 && high > 4) found.push([one.text.data.slice(0, 40), two.text.data.slice(0, 40)]);
    }
  });
  return found.slice(0, 5);
}"""
"""Returns pairs of texts that are drawn over each other, apart from those of an open menu and of the bar."""


WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((each) => each.scrollWidth > innerWidth && getComputedStyle(each).overflowX === "visible")
  .map((each) => `${each.tagName}.${each.className}`)"""
"""Returns the elements whose content reaches beyond the window."""


OUTSIDE = """() => [...document.querySelectorAll(".menu[open] .items")]
  .some((each) => each.getBoundingClientRect().left < 0)"""


class View(NamedTuple):
    """One view of the page, and what is done there before it is checked."""

    name: str
    params: dict[str, Any]
    act: Callable[[Page], Awaitable[None]] | None = None


class Case(NamedTuple):
    """What the viewer shows, and the views of it."""

    target: Path
    views: list[View]


async def keys(page: Page) -> None:
    await page.keyboard.press("?")


async def unfolded(page: Page) -> None:
    await page.evaluate("document.querySelectorAll('#main details').forEach((each) => { each.open = true })")


async def first_turn(page: Page) -> None:
    for key in ("j", "j", "o", "r"):
        await page.keyboard.press(key)


async def compared_with_the_first(page: Page) -> None:
    await page.click("text=set as baseline >> nth=0")
    await page.wait_for_selector("text=baseline ×")


async def problem(page: Page) -> None:
    await page.wait_for_selector("[role=alert]")


async def with_tokens(page: Page) -> None:
    await page.wait_for_selector(".token-line .token, .token-pair .token")


async def chosen_token(page: Page) -> None:
    await with_tokens(page)
    await page.focus(".token-page")
    for _ in range(3):
        await page.keyboard.press("ArrowRight")


def coloured(mode: str) -> Callable[[Page], Awaitable[None]]:
    async def act(page: Page) -> None:
        await chosen_token(page)
        await page.select_option("[aria-label='Colour by']", mode)

    return act


async def drawn_tree(page: Page) -> None:
    """The rollouts 1 and 2 continue 0, and 3 continues 1."""
    assert [each for each in (await page.inner_text(".branches")).split() if each[0] == "#"] == [
        "#0",
        "#1",
        "#3",
        "#2",
        "#4",
    ]
    assert await page.locator(".branches > ul > li").count() == 2
    assert await page.locator(".branches li li li").count() == 1


async def no_rollout(page: Page) -> None:
    await page.fill("[aria-label='Filter rollouts']", "reward>5")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("text=No rollout fits")


async def found_texts(page: Page) -> None:
    await until(page, "document.querySelectorAll('.found li').length > 0")


def of_run(run: str, rollout_id: str, *others: str) -> list[View]:
    """The views that every run has."""
    one = {"run": run, "id": rollout_id}
    pair = [View("siblings", {"run": run, "id": [rollout_id, *others]})] if others else []
    return [
        View("runs", {}),
        View("run", {"run": run}),
        *(View("run", {"run": run, "tab": tab}) for tab in ("groups", "scores", "settings")),
        View("rollout", one),
        View("rollout", one, unfolded),
        View("rollout", one, first_turn),
        *pair,
    ]


def case_real(real: Path, tmp_path: Path) -> Case:
    first = "000000-count/0"
    ids = [f"{first}/{n}" for n in range(4)]
    tokens = {"run": real.name, "id": ids[0]}
    views = [
        *of_run(real.name, *ids),
        View("run", {"run": real.name, "sort": "reward desc", "where": '[["index","<",2]]'}),
        View("run", {"run": real.name, "text": "Write the number"}, found_texts),
        View("run", {"run": real.name}, no_rollout),
        *(View("rollout", {"run": real.name, "id": each}) for each in ids[1:]),
        View("tokens", tokens, chosen_token),
        *(View("tokens", tokens, coloured(mode)) for mode in ("mask", "turn")),
        View("siblings", {"run": real.name, "id": ids}, with_tokens),
        View("rollout", tokens, keys),
    ]
    return Case(real, views)


def case_problems(real: Path, tmp_path: Path) -> Case:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs/good", sky())
    broken = tmp_path / "runs/broken/journal.jsonl"
    broken.parent.mkdir()
    broken.write_text("no journal\n")
    damaged = write_run(tmp_path / "runs/damaged", sky(), ended=False) / "journal.jsonl"
    damaged.write_bytes(damaged.read_bytes() + b'{"event": 3}\n')
    run, missing = "good", {"run": "good", "id": "nobody/0"}
    views = [
        View("runs", {}),
        View("runs", {}, keys),
        View("run", {"run": "damaged"}),
        View("run", {"run": run, "tab": "scores"}),
        *(View("rollout", {"run": run, "id": f"000000-sky/{n}"}) for n in range(4)),
        View("tokens", {"run": run, "id": "000000-sky/2"}, with_tokens),
        View("runs", {}, compared_with_the_first),
    ]
    return Case(tmp_path / "runs", [*views, *(View(name, missing, problem) for name in ("rollout", "nothing"))])


def case_training(real: Path, tmp_path: Path) -> Case:
    folder = write_run(tmp_path / "run", sky(), model="tiny")
    (folder / "training").mkdir()
    with (folder / "training/steps.jsonl").open("w") as file:
        for step in range(1, 60):
            figures = {"reward": 0.2 + step / 100, "loss": 1 / step, "kl": step * 1e-6, "completion_tokens": 80.0}
            kind = "evaluation" if step % 10 == 0 else "step"
            file.write(json.dumps({"kind": kind, "step": step, "at": 1.0, "time": 1.0, **figures}) + "\n")
    return Case(folder, [View("run", {"run": "run"}), View("run", {"run": "run", "tab": "training"}), View("runs", {})])


def case_tree(real: Path, tmp_path: Path) -> Case:
    members = [
        rollout(n, TWO_CALLS, n / 4, turns=turns(("weather",), ()),
                parent=Fork(index=above, turn=1) if above is not None else None)
        for n, above in enumerate((None, 0, 0, 1, None))
    ]  # fmt: skip
    made = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=members)
    ids = [f"000000-sky/{n}" for n in range(5)]
    views = [*of_run("run", *ids), View("siblings", {"run": "run", "id": ids}, drawn_tree),
             View("rollout", {"run": "run", "id": ids[3]})]  # fmt: skip
    return Case(write_run(tmp_path / "run", made), views)


def case_forks(real: Path, tmp_path: Path) -> Case:
    place = tmp_path / "runs/sky--m"
    named(place / "first", group(0.0, 1.0))
    fork(place, "second", 1, 1.0, 1.0, 0.5, None)
    fork(place, "third", 2, 0.0, difference="turn 1: weather {}: 'sun' was recorded")
    run, one = "sky--m/first", {"run": "sky--m/third", "id": FIRST}
    return Case(tmp_path / "runs", [*of_run(run, FIRST), View("run", one), View("rollout", one), View("runs", {})])


LONG = "\n".join(f"\x1b[3{n % 8}mline {n} \x1b[1;4{n % 8}mof the output\x1b[0m" for n in range(400))


def case_judged(real: Path, tmp_path: Path) -> Case:
    detail = {
        "category": "files", "tests": {"test_a": True, "test_" + "long_" * 40: False},
        "output": LONG, "difference": "official 1, reward 0, because of tests_edited",
        "patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+new\n",
    }  # fmt: skip
    shown: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "# Head\n\n`code` and **bold**\n\n```python\nx = 1\n```"},
        {"role": "assistant", "content": "<think>why</think>Now", "tool_calls": [call(1, '{"command": "ls\\nls"}')]},
        result(1, json.dumps({"exit_code": 1, "output": LONG, "error": "it failed"})),
        {"role": "assistant", "content": None, "tool_calls": [call(2, '{"a": [1, {"b": null}], "c": true}')]},
        result(2, json.dumps({"deep": [{"x": 1.5, "y": False}], "text": "z"})),
        {"role": "assistant", "content": None, "tool_calls": [call(3, "{")]},
    ]
    members = [
        rollout(0, shown, 0.0, official=1.0, labels=[Label("tests_edited", "x.py", True)], detail=detail,
                metrics={"tests_passed": 0.5}, turns=turns(("a",), ("b",), ("c",)), cost=0.5),
        rollout(1, shown, 0.5, outcome=Outcome.MAX_TURNS, blame=Blame.MODEL),
        rollout(2, shown, None, outcome=Outcome.API_ERROR, blame=Blame.ENGINE, error="the server\nanswered 500"),
        rollout(3, shown[:2], None, outcome=Outcome.CANCELLED),
    ]  # fmt: skip
    run = write_run(tmp_path / "run", Group(group_id="000000-sky", number=0, task_id="sky", trajectories=members))
    write_annotations(run, [annotation(FIRST, "ada", verdict="hack", note="It *edits* the tests", tags=["a", "b"])])
    write_grades(run, [Grade(schema=GRADE_SCHEMA, at=5.0, rollout_id=FIRST, before=0.0, reward=0.5)])
    views = of_run("run", FIRST, "000000-sky/1", "000000-sky/2", "000000-sky/3")
    return Case(run, [*views, *(View("rollout", {"run": "run", "id": f"000000-sky/{n}"}, unfolded) for n in (1, 2, 3))])


def case_hostile(real: Path, tmp_path: Path) -> Case:
    return Case(hostile_run(tmp_path / "run"), of_run("run", "g/0", "g/1"))


def case_inspect(real: Path, tmp_path: Path) -> Case:
    return Case(LOGS / "sums.eval", of_run("sums.eval", "000000-one/0", "000000-one/1"))


def case_file(real: Path, tmp_path: Path) -> Case:
    runs = open_runs(str(real))
    page = write_page(tmp_path / "run.html", runs, Chosen(()), TokenTexts(runs))
    runs.close()
    return Case(page, of_run(real.name, *(f"000000-count/0/{n}" for n in range(4)))[1:])


CASES = (
    case_real,
    case_problems,
    case_training,
    case_tree,
    case_forks,
    case_judged,
    case_hostile,
    case_inspect,
    case_file,
)


@pytest.fixture(params=CASES, ids=lambda make: make.__name__.removeprefix("case_"))
def case(request: pytest.FixtureRequest, real: Path, tmp_path: Path) -> Case:
    made: Case = request.param(real, tmp_path)
    return made


def visited(case: Case, chromium: str, check: Callable[[Page, View], Awaitable[None]]) -> None:
    """Open each view and check it."""

    async def visit(page: Page, base: str) -> None:
        for view in case.views:
            await page.evaluate("() => document.querySelector('dialog')?.close()")
            await page.evaluate("() => { location.hash = '#/runs' }")
            await asyncio.sleep(0.02)
            if view.act is problem:
                await page.evaluate("each => { location.hash = each }", f"#/{view.name}?run=good&id=nobody/0")
            else:
                await go(page, base, view.name, **view.params)
            if view.act is not None:
                await view.act(page)
            await check(page, view)

    async def main() -> None:
        if case.target.suffix == ".html":
            await browse(chromium, case.target.as_uri(), visit)
            return
        runs = open_runs(str(case.target))
        for name in runs:
            while runs.update(name):
                continue
        async with serving_viewer(Viewer(runs, TOKEN, TokenTexts(runs)), TOKEN) as url:
            await browse(chromium, f"{url}/?token={TOKEN}", visit, allowed="400 (Bad Request)")

    asyncio.run(main())


async def accessibility_problems(page: Page) -> list[Any]:
    """Return the serious violations that axe-core finds, in both colour schemes."""
    found = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        if not await page.evaluate("() => 'axe' in window"):
            await page.evaluate(AXE.read_text())
        found += [[scheme, *each] for each in await page.evaluate(FINDINGS)]
    return found


async def layout_problems(page: Page) -> list[Any]:
    """Return what lies outside the window or over other texts, at three widths."""
    found: list[Any] = []
    for width in (400, 1280, 3840):
        await page.set_viewport_size({"width": width, "height": 900})
        await asyncio.sleep(0.05)
        if await page.evaluate(OUTSIDE):
            found.append((width, "a menu is outside the window"))
        if not await page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            found.append((width, "scrolls sideways", await page.evaluate(WIDE)))
        found += [(width, *each) for each in await page.evaluate(OVERLAPS)]
    await page.set_viewport_size({"width": 1280, "height": 720})
    return found


@pytest.mark.timeout(300)
def test_no_view_has_problems_of_accessibility_or_layout(case: Case, chromium: str) -> None:
    """The views are opened once for all three, because opening them is most of the work. Without axe-core, only the
    layout is checked."""
    found: list[Any] = []

    async def check(page: Page, view: View) -> None:
        problems = [*(await accessibility_problems(page) if AXE.exists() else ()), *await layout_problems(page)]
        found.extend((view.name, view.params, *each) for each in problems)

    visited(case, chromium, check)
    assert found == [], "\n".join(str(each) for each in found)
