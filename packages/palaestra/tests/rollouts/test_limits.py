"""When a run stops taking groups: what counts towards it, and how it then ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import rollout
from toy import Sums, changed, services, sum_task, tell

from golden_messages import check_message
from palaestra.rollouts.events import GroupFinished, RolloutEnded, TokensSpent, TurnTaken
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.limits import CutShort, RunLimits
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import RunContext
from palaestra_slots.core.types import JSON, Blame, Outcome, Prices, Task, ToolStep


def ended(blame: Blame | None = None, outcome: Outcome = Outcome.INFRA_ERROR, index: int = 0) -> Trajectory:
    if blame is None:
        return rollout(index, [], 1.0)
    return rollout(index, [], None, outcome=outcome, blame=blame)


def open_gate(stops: RunLimits) -> bool:
    return asyncio.run(stops.gate())


def test_more_failures_than_allowed_close_the_gate() -> None:
    told: list[str] = []
    stops = RunLimits(max_infra_rate=0.2)
    stops.report_to(told.append)
    for _ in range(20):
        tell(stops, RolloutEnded(trajectory=ended(Blame.SANDBOX)))
    assert open_gate(stops)
    tell(stops, RolloutEnded(trajectory=ended(Blame.GRADER)))
    assert not open_gate(stops)
    assert (stops.reason, stops.exit_code) == ("paused", 3)
    check_message(stops.message, "21", "rollouts", "sandbox", "20")
    assert len(told) == 1
    tell(stops, RolloutEnded(trajectory=ended(Blame.GRADER)))
    assert len(told) == 1, "said once"


async def test_who_waits_at_another_gate_hears_that_this_one_closes() -> None:
    async def scenario() -> None:
        stops, trainer = RunLimits(), asyncio.Event()
        begin = asyncio.ensure_future(stops.unless_stopped(trainer.wait()))
        trainer.set()
        assert await begin
        trainer.clear()
        begin = asyncio.ensure_future(stops.unless_stopped(trainer.wait()))
        await asyncio.sleep(0)
        stops.drain()
        assert not await begin

    await asyncio.wait_for(scenario(), 30)


def test_old_failures_are_forgotten() -> None:
    stops = RunLimits(max_infra_rate=0.2)
    for number in range(400):
        tell(stops, RolloutEnded(trajectory=ended(Blame.SANDBOX if number % 5 == 0 else None)))
    assert open_gate(stops), "exactly the rate that is allowed"


@pytest.mark.parametrize(
    "harmless",
    [
        ended(Blame.TASK),
        ended(Blame.RUN, Outcome.CANCELLED),
        rollout(0, [], 0.0, outcome=Outcome.MAX_TURNS, blame=Blame.MODEL),
        rollout(0, [], None, outcome=Outcome.API_ERROR, blame=Blame.ENGINE, beside=Beside(started_at=7.0)),
    ],
)
def test_what_is_not_the_worlds_doing_or_was_counted_before(harmless: Trajectory) -> None:
    stops = RunLimits(max_infra_rate=0.0, counted={(harmless.rollout_id, 7.0)})
    tell(stops, RolloutEnded(trajectory=harmless))
    assert open_gate(stops)
    tell(stops, RolloutEnded(trajectory=ended(Blame.TOOL)))
    assert not open_gate(stops)


def test_a_group_that_could_not_be_prepared_counts_with_all_its_rollouts() -> None:
    stops = RunLimits(max_infra_rate=0.2, group_size=8)
    for blame in (Blame.TASK, Blame.TASK, Blame.TASK, Blame.SANDBOX, Blame.SANDBOX):
        tell(stops, GroupFinished(Group(group_id="g", number=0, task_id="t", error="x", blame=blame)))
        assert open_gate(stops)
    tell(stops, GroupFinished(Group(group_id="g", number=0, task_id="t", error="x", blame=Blame.SANDBOX)))
    assert "sandbox 24" in stops.message


def test_a_model_server_that_is_gone_has_its_own_exit_code() -> None:
    stops = RunLimits(max_infra_rate=0.0)
    tell(stops, RolloutEnded(trajectory=ended(Blame.ENGINE, Outcome.API_ERROR)))
    assert (open_gate(stops), stops.exit_code) == (False, 4)


def test_the_cost_counts_turn_by_turn_from_where_it_was() -> None:
    stops = RunLimits(max_cost=1.0, prices=Prices(prompt=2.0, completion=10.0), spent=0.5)
    tell(stops, TokensSpent("r", 100_000, 0))
    assert open_gate(stops)
    tell(stops, TokensSpent("r", 0, 30_000))
    assert not open_gate(stops)
    assert (stops.reason, stops.exit_code, stops.spent) == ("paused", 3, pytest.approx(1.0))
    assert not open_gate(RunLimits(max_cost=1.0, spent=1.0)), "what an earlier part has used up stays used up"


def test_a_server_without_usage_pauses_a_run_with_a_cost_limit_and_is_named_once_in_others() -> None:
    for limit in (1.0, None):
        notes: list[str] = []
        stops = RunLimits(max_cost=limit, prices=Prices(prompt=2.0, completion=10.0))
        stops.report_to(notes.append)
        tell(stops, TokensSpent("r", 0, 0))
        tell(stops, TokensSpent("r", 0, 0))
        assert len(notes) == 1
        if limit is None:
            assert open_gate(stops)
            stops.check(begun=True)
            continue
        assert (open_gate(stops), stops.reason, stops.exit_code) == (False, "paused", 3)
        with pytest.raises(CutShort):
            stops.check(begun=True)


def test_a_server_without_usage_does_not_matter_to_a_run_without_prices() -> None:
    stops = RunLimits()
    tell(stops, TokensSpent("r", 0, 0))
    assert open_gate(stops)


def test_the_cost_of_slots_counts_with_that_of_tokens() -> None:
    stops = RunLimits(max_cost=1.0, prices=Prices(prompt=2.0, completion=10.0))
    tell(stops, TokensSpent("r", 0, 50_000))
    assert open_gate(stops)
    stops.count_slots(lambda: 0.6)
    assert not open_gate(stops)
    assert stops.spent == pytest.approx(1.1)


class Slow(Sums):
    """Each rollout calls its tool four times, and all of a group's go on side by side."""

    async def tasks(self) -> AsyncIterator[Task]:
        yield replace(sum_task(0), solution=[ToolStep("add", {"a": 0, "b": 1})] * 4)


def test_a_cost_that_is_reached_ends_each_rollout_after_its_turn_and_all_of_them_go_on(tmp_path: Path) -> None:
    stops = RunLimits(max_cost=10.0, prices=Prices(prompt=0.0, completion=1e6))

    def run(stops: RunLimits, **more: JSON) -> RunContext:
        async def main() -> RunContext:
            shared = changed(services(tmp_path, group_size=8), stops, limits=stops, **more)
            await Runner(Slow(), shared).run()
            shared.events.journal.close()
            return shared

        return asyncio.run(main())

    run(stops)
    taken = [event for event in read_journal(tmp_path / "journal.jsonl") if isinstance(event, TurnTaken) and event.turn]
    each = taken[0].tokens[1]
    assert 10.0 <= stops.spent < 10.0 + 8 * each, "at most the turn that each was in"
    first = [event.trajectory for event in read_journal(tmp_path / "journal.jsonl") if isinstance(event, RolloutEnded)]
    assert {(one.outcome, one.blame, one.reward) for one in first} == {(Outcome.CANCELLED, Blame.RUN, None)}
    assert all("between two turns" in one.error or "before this rollout started" in one.error for one in first)
    assert sum(one.completion_tokens for one in first) == stops.spent


def test_somebody_who_wants_it_to_end_overrides() -> None:
    stops = RunLimits(max_infra_rate=0.0)
    tell(stops, RolloutEnded(trajectory=ended(Blame.SANDBOX)))
    stops.drain()
    assert (stops.reason, stops.exit_code) == ("interrupted", 130)
