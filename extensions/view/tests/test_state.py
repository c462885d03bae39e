"""The environment's state beside the conversation: what each turn changed, and the state at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import JOURNAL_NAME
from palaestra_toolsets.browser.chromium import problem, usable
from palaestra_view.rollout_record import rollout_record, state_changes
from palaestra_view.run_index import RunIndex

from .test_page import go, see

if TYPE_CHECKING:
    from playwright.async_api import Page

ENV = """
from palaestra import Say, Task, ToolStep, environment

@environment(toolsets=[])
def desk():
    yield Task("a", "Hello.", solution=[Say("What?"), ToolStep("book", {"seat": "1A"}), ToolStep("look", {}),
                                        ToolStep("book", {"seat": "2B"}), Say("Done.")])

@desk.state
def seats():
    return {"seats": {"1A": None, "2B": "Bo"}, "log": ["open"], "asked": 0, "note": "x" * 30000}

@desk.user
def user(state):
    state["asked"] += 1
    return "1A, please." if state["asked"] == 1 else None

@desk.tool
def look(*, state) -> dict:
    '''Look.'''
    return state["seats"]

@desk.tool
def book(seat: str, *, state) -> str:
    '''Book.'''
    state["log"].append(seat)
    if state["seats"].pop(seat) is None:
        state["seats"][seat] = "Ann"
    return "done"

@desk.score
def right(state):
    return state["seats"] == {"1A": "Ann"}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    (folder / "desk_env.py").write_text(ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "desk_env.py", "--policy", "oracle"]) == 0
    (journal,) = folder.glob(f"runs/*/*/{JOURNAL_NAME}")
    return journal.parent


CHANGES = {
    "1": [["asked", "0", "1"]],
    "2": [["seats.1A", "null", '"Ann"'], ["log.1", None, '"1A"']],
    "4": [["seats.2B", '"Bo"', None], ["log.2", None, '"2B"']],
    "5": [["asked", "1", "2"]],
}


def test_a_record_has_the_state_at_the_end_and_what_each_turn_changed(run: Path) -> None:
    index = RunIndex(run / JOURNAL_NAME)
    index.update()
    record = rollout_record(index, "000000-a/0")
    assert record["state"]["seats"] == {"1A": "Ann"}
    assert record["state"]["note"]["chars"] == 30000
    found = {turn: sorted(changes) for turn, changes in record["state_changes"].items()}
    assert found == {turn: sorted(changes) for turn, changes in CHANGES.items() if turn in found}
    assert found.keys() >= {"1", "2", "4"}


def test_a_rollout_in_flight_and_one_that_began_anew_have_their_own_state(run: Path, tmp_path: Path) -> None:
    lines = (run / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["event"] for line in lines]
    begun = lines[: kinds.index("rollout")]
    turns = [line for line, kind in zip(lines, kinds, strict=True) if kind == "messages"]
    (tmp_path / JOURNAL_NAME).write_bytes(b"".join([*begun, *turns[:3]]))
    index = RunIndex(tmp_path / JOURNAL_NAME)
    index.update()
    record = rollout_record(index, "000000-a/0")
    assert record["in_flight"]
    assert record["state"]["seats"] == {"1A": "Ann", "2B": "Bo"}
    assert state_changes(index, "000000-a/0").keys() == {"1", "2"}


def test_a_page_shows_the_state_when_it_is_opened(run: Path) -> None:
    if (reason := problem()) is not None:
        pytest.skip(reason)
    chromium = usable()
    assert chromium is not None

    async def visit(page: Page, base: str) -> None:
        await go(page, base, "rollout", run=run.name, id="000000-a/0")
        turn = page.locator("section[aria-label='turn 2'] details.state-values")
        assert not await turn.locator("ins").first.is_visible()
        await turn.locator("summary").click()
        assert 'seats.1A null → "Ann"' in " ".join((await turn.inner_text()).split())
        assert await page.locator("section[aria-label='turn 3'] details.state-values").count() == 0
        end = page.locator("section[aria-label=State] details.state-values")
        await end.locator("summary").first.click()
        assert "Ann" in await end.inner_text()

    see(chromium, run, visit)
