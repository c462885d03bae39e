"""Counterfactual runs in the viewer: the success rate beside each turn, and the links in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from recorded import TWO_CALLS, call, result, rollout, turns, write_run

from palaestra.rollouts.journal.reader import FORK_NAME
from palaestra.rollouts.records import Group, Origin
from palaestra_slots.core.types import JSON
from palaestra_view.runs import open_runs

from .fixing import HOSTILE
from .test_page import chromium as chromium
from .test_page import go, see, unharmed, until
from .test_server import Caller, visit

if TYPE_CHECKING:
    from playwright.async_api import Page

FIRST = "000000-sky/0"
AGAIN = {"role": "assistant", "content": "", "tool_calls": [call(3, '{"city": "Rom"}')]}
LONG = [*TWO_CALLS[:-1], AGAIN, result(3, "?"), TWO_CALLS[-1]]


def group(*rewards: float | None, **fields: JSON) -> Group:
    made = [
        rollout(n, LONG, each, turns=turns(("weather", "weather"), ("weather",), ()), **fields)
        for n, each in enumerate(rewards)
    ]
    return Group(group_id="000000-sky", number=0, task_id="sky", trajectories=made)


def named(folder: Path, found: Group, config: dict[str, JSON] | None = None) -> Path:
    """A run whose id is the name of its folder."""
    journal = write_run(folder, found, config=config) / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"run_id":"run-1"', f'"run_id":"{folder.name}"'.encode(), 1))
    return folder


def fork(root: Path, name: str, turn: int, *rewards: float | None, run_id: str = "first", **fields: str) -> Path:
    origin = Origin(run_id=run_id, rollout_id=FIRST, turn=turn, state="rebuilt", **fields)
    facts = {"run_id": run_id, "rollout_id": FIRST, "turn": turn}
    folder = named(root / name, group(*rewards, origin=origin), {"fork": facts})
    (folder / FORK_NAME).write_bytes(msgspec.json.encode({"origin": msgspec.to_builtins(origin)}))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "runs"
    named(place / "sky--m" / "first", group(0.0, 1.0))
    fork(place / "sky--m", "second", 1, 1.0, 1.0, 0.5, None)
    fork(place / "sky--other", "third", 1, 0.0)
    fork(place / "sky--m", "fourth", 2, 0.0, 0.0, difference="turn 1: weather {}: 'sun' was recorded")
    fork(place / "sky--m", "stranger", 1, 1.0, run_id="elsewhere")
    return place


def test_the_odds_of_each_turn_count_every_fork(root: Path) -> None:
    async def scenario(caller: Caller) -> None:
        for name, rollouts in (("first", 2), ("second", 4), ("fourth", 2), ("stranger", 1)):
            await caller.indexed(f"sky--m/{name}", rollouts)
        await caller.indexed("sky--other/third", 1)
        found = await caller.get("forks", run="sky--m/first", id=FIRST)
        assert [(each["turn"], each["passed"], each["scored"], each["rate"]) for each in found["turns"]] == [
            (1, 2, 4, 0.5),
            (2, 0, 2, 0.0),
        ]
        low, high = found["turns"][0]["interval"]
        assert 0 < low < 0.5 < high < 1
        runs = {each["name"]: (each["passed"], each["scored"], each["rollouts"]) for each in found["turns"][0]["runs"]}
        assert runs == {"sky--m/second": (2, 3, 4), "sky--other/third": (0, 1, 1)}
        assert found["origin"] is None
        assert (await caller.get("forks", run="sky--m/first", id="000000-sky/1"))["turns"] == []
        back = await caller.get("forks", run="sky--m/second", id=FIRST)
        assert (back["origin"], back["turns"]) == ("sky--m/first", [])
        assert (await caller.get("run", run="sky--m/second"))["fork"]["run"] == "sky--m/first"
        assert (await caller.get("run", run="sky--m/stranger"))["fork"]["run"] is None
        assert (await caller.get("rollout", run="sky--m/second", id=FIRST))["origin"]["turn"] == 1
        both = await caller.get("compare", base="sky--m/first", run=["sky--m/second", "sky--other/third"])
        assert both["sky--m/second"]["difference"] == pytest.approx(2.5 / 3 - 0.5)
        assert both["sky--m/second"]["with_unscored"]["difference"] == pytest.approx(2.5 / 4 - 0.5)
        assert all(each["counterfactual"] for each in both.values())

    visit(root, scenario)


def test_a_viewer_of_one_run_shows_its_forks_and_its_origin(root: Path) -> None:
    place = root / "sky--m"
    assert {Path(name).name for name in open_runs(str(place / "first"))} == {"first", "second", "third", "fourth"}
    assert next(iter(open_runs(str(place / "first")))) == "first"
    assert {Path(name).name for name in open_runs(str(place / "second"))} == {"second", "first"}
    assert list(open_runs(str(place / "stranger"))) == ["stranger"]


def test_a_fork_of_another_person_names_no_other_folder(root: Path, tmp_path: Path) -> None:
    outside = named(tmp_path / "outside", group(1.0))
    bad = fork(root / "sky--m", "bad", 1, 1.0, run_id="../../outside")
    assert list(open_runs(str(bad))) == ["bad"]
    (root / "sky--m" / "linked").symlink_to(fork(tmp_path, "away", 1, 1.0))
    assert "linked" not in str(list(open_runs(str(root / "sky--m" / "first"))))
    for text in (b"", b"[]", b'{"origin": 3}', b"\xff"):
        (bad / FORK_NAME).write_bytes(text)
        assert list(open_runs(str(bad))) == ["bad"]
    assert outside.is_dir()


def test_the_page_links_turns_to_forks_and_back(root: Path, chromium: str) -> None:
    async def look(page: Page, base: str) -> None:
        await go(page, base, "rollout", run="sky--m/first", id=FIRST)
        marks = page.locator(".turn .forked")
        assert await marks.count() == 2
        assert "0.50" in await marks.nth(0).inner_text()
        title = await marks.nth(0).locator(".odds").get_attribute("title")
        assert title is not None
        assert "2 of 4 rollouts that continue it after turn 1 have the full reward, 95% interval" in title
        assert await page.locator(".step .odds-small").all_inner_texts() == ["2/4", "0/2"]
        await marks.nth(1).locator("a").click()
        await until(page, "location.hash.includes('fourth')")
        await page.wait_for_selector("a.row")
        assert "All rollouts continue" in await page.inner_text("#main")
        await page.locator("a.row").first.click()
        await page.wait_for_selector(".turn")
        text = await page.inner_text("#main")
        assert "Counterfactual." in text
        assert "'sun' was recorded" in text
        assert await page.locator(".turn.shared").count() == 2
        await page.locator(".callout a").first.click()
        await until(page, "location.hash.includes('first') && location.hash.includes('turn=2')")

    see(chromium, root, look)


def test_hostile_origins_do_nothing(tmp_path: Path, chromium: str) -> None:
    origin = Origin(run_id=HOSTILE, rollout_id=HOSTILE, turn=1, state=HOSTILE, difference=HOSTILE)
    config = {"fork": {"run_id": HOSTILE, "rollout_id": HOSTILE, "turn": 1}}
    run = named(tmp_path / "run", group(1.0, origin=origin), config)

    async def look(page: Page, base: str) -> None:
        for view in ("run", "rollout"):
            await go(page, base, view, run="run", id=FIRST)
            await unharmed(page)

    see(chromium, run, look)
