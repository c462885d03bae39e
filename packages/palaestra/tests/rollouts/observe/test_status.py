"""How a run stands, from its folder alone: live, ended, killed, resumed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from recorded import broken, rollout, sky, write_run
from toy import Sums, services, until_cancelled

from palaestra.rollouts.events import JOURNAL_SCHEMA, Alive, AttemptDiscarded, GroupStarted, RolloutEnded, RunResumed
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.observe.intervals import mean_interval
from palaestra.rollouts.observe.prometheus import exposition
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.observe.status_file import LONGEST_LISTED, Idle, StatusFile, read_stages
from palaestra.rollouts.records import Beside, Group
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Blame, Outcome


def test_an_ended_run(tmp_path: Path) -> None:
    status = RunReader(write_run(tmp_path, sky(), broken()) / "journal.jsonl").read()
    assert (status.run_id, status.env, status.model, status.state) == ("run-1", "weather", "m", "done")
    assert (status.groups_begun, status.groups_ended, status.groups_failed) == (2, 2, 1)
    assert (status.rollouts, status.scored) == (4, 3)
    assert (status.mean_reward, status.mean_with_unscored) == (pytest.approx(1.25 / 3), pytest.approx(1.25 / 4))
    assert status.outcomes == {"natural": 2, "max_turns": 1, "infra_error": 1}
    rate = status.blame["sandbox"]
    assert (rate.count, rate.share) == (1, 0.25)
    assert 0 < rate.low < 0.25 < rate.high < 1
    assert (status.full.count, status.full.share) == (1, pytest.approx(1 / 3))
    low, high = status.mean_interval
    assert low < 0.1, "one task says little of others"
    assert high > 0.8
    assert status.planned == 4
    assert status.in_flight == {}
    assert status.cost is None
    assert status.disk_free_bytes > 0
    json.dumps(status.to_dict())


def test_how_sure_the_score_is_and_how_long_the_stages_took(tmp_path: Path) -> None:
    folder = write_run(tmp_path, ended=False)
    journal = Journal(folder / "journal.jsonl")
    for number, rewards in enumerate([(1.0, 1.0), (0.0, None)]):
        name = f"g{number}"
        journal.append(GroupStarted(group=Group(group_id=name, number=number, task_id=name, prepare_s=2.0)))
        for index, reward in enumerate(rewards):
            one = rollout(index, [], reward, rollout_id=f"{name}/{index}", group_id=name)
            one.beside = Beside(started_at=1.0, duration_s=9.0, stages={"tool": 3.0}, turn_s=[(1.0, 3.0), (4.0, 0.0)])
            one.blame = None if reward is not None else Blame.SANDBOX
            journal.append(RolloutEnded(trajectory=one))
    journal.close()
    status = RunReader(journal.path).read()
    assert status.mean_interval == pytest.approx(mean_interval([[1.0, 1.0], [0.0]]))
    assert status.mean_with_unscored_interval == pytest.approx(mean_interval([[1.0, 1.0], [0.0, 0.0]]))
    stages = {name: (each.count, each.total_s, each.p50_s) for name, each in status.stages.items()}
    assert stages == {
        "model": (4, 20.0, 5.0),
        "prepare": (2, 4.0, 2.0),
        "rollout": (4, 36.0, 9.0),
        "tool": (4, 12.0, 3.0),
    }


def test_what_a_resumed_run_writes_again_is_counted_once(tmp_path: Path) -> None:
    group = Group(group_id="g", number=0, task_id="t")

    def ended(index: int, started_at: float, reward: float | None = 1.0) -> RolloutEnded:
        one = rollout(index, [], reward, rollout_id=f"g/{index}", group_id="g", prompt_tokens=10, cost=0.5)
        one.beside = Beside(started_at=started_at)
        if reward is None:
            one.outcome, one.blame = Outcome.CANCELLED, Blame.RUN
        return RolloutEnded(trajectory=one)

    folder = write_run(tmp_path, ended=False)
    journal = Journal(folder / "journal.jsonl")
    journal.append(GroupStarted(group=group))
    journal.append(ended(0, 1.0))
    journal.append(AttemptDiscarded(trajectory=ended(1, 2.0).trajectory))
    journal.append(ended(1, 3.0, None))
    reader = RunReader(journal.path)
    assert (reader.read().rollouts, reader.read().discarded) == (2, 1)
    journal.append(RunResumed())
    journal.append(GroupStarted(group=group))
    journal.append(ended(0, 1.0))
    journal.append(ended(1, 4.0))
    journal.close()
    for status in (reader.read(), RunReader(journal.path).read()):
        assert (status.rollouts, status.scored, status.discarded, status.blame) == (2, 2, 1, {})
        assert (status.prompt_tokens, status.cost) == (40, 2.0)


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path, sky(), ended=False) / "journal.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + 5])
    reader = RunReader(path)
    assert reader.read().groups_ended == 0
    path.write_bytes(whole)
    assert reader.read().groups_ended == 1
    path.write_bytes(whole + b"{nonsense}\n")
    with pytest.raises(ConfigError, match="is damaged"):
        reader.read()


async def test_what_is_in_flight_is_seen_from_the_folder(tmp_path: Path) -> None:
    shared = services(tmp_path, group_size=2)
    inflight = StatusFile(shared.events.in_flight)
    entered = asyncio.Event()

    async def waits(rollout: Rollout) -> float:
        return 1.0 if rollout.index == 0 else await until_cancelled(entered)

    async with inflight.written(tmp_path):
        running = asyncio.create_task(Runner(Sums(1, score=waits), shared).run())
        await entered.wait()
        journal = shared.events.journal.path
        while RunReader(journal).read().rollouts < 1:  # noqa: ASYNC110 - the other one ends meanwhile
            await asyncio.sleep(0)
        inflight.write(tmp_path / "status.json")
        status = RunReader(shared.events.journal.path).read()
        running.cancel()
        await asyncio.wait([running])
    shared.events.journal.close()
    assert status.state == "running"
    assert status.in_flight == {"grade": 1}
    assert [(idle.name, idle.stage) for idle in status.oldest] == [("000000-sum-0/1", "grade")]
    after = RunReader(shared.events.journal.path).read()
    assert after.in_flight == {}
    assert after.blame["run"].count == 1


def test_who_died_is_not_taken_for_running(tmp_path: Path) -> None:
    inflight = StatusFile({"g/0": ("tool", 0.0)})
    inflight.write(tmp_path / "status.json")
    path = write_run(tmp_path, sky(), ended=False) / "journal.jsonl"
    reader = RunReader(path)
    assert reader.read().state == "running"
    found = read_stages(tmp_path)
    assert found is not None
    for changes, state in (({"started": found.started + 1}, "killed"), ({"host": "elsewhere.test"}, "elsewhere")):
        other = msgspec.structs.replace(found, **changes)
        (tmp_path / "status.json").write_bytes(msgspec.json.encode(other))
        assert reader.read().state == state
        assert reader.read().in_flight == {"tool": 1}, "what was in flight when it died"
    ended = sky().trajectories[0].rollout_id
    killed = msgspec.structs.replace(found, started=found.started + 1)
    killed.idle.append(Idle(ended, "model", 0.0))
    killed.stages["model"] = 1
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(killed))
    status = reader.read()
    assert (status.in_flight, [each.name for each in status.oldest]) == ({"tool": 1}, ["g/0"])
    (tmp_path / "status.json").write_bytes(b"{")
    assert reader.read().state == "killed"


def test_a_disk_that_does_not_take_the_file_does_not_end_the_run(tmp_path: Path) -> None:
    inflight = StatusFile({})
    (tmp_path / "status.json").mkdir()
    inflight.write(tmp_path / "status.json")
    (tmp_path / "status.json").rmdir()
    inflight.write(tmp_path / "status.json")
    assert read_stages(tmp_path) is not None, "it is written as soon as that works"


def test_the_file_is_bounded_and_names_the_longest_idle_first(tmp_path: Path) -> None:
    events = services(tmp_path).events
    for number in range(LONGEST_LISTED + 10):
        events.alive(Alive(f"r{number}", "model"))
    events.alive(Alive("r0", "tool"))
    events.alive(Alive("r1", ""))
    now = StatusFile(events.in_flight).now()
    assert now.stages == {"model": LONGEST_LISTED + 8, "tool": 1}
    assert [idle.name for idle in now.idle][:2] == ["r2", "r3"]
    assert len(now.idle) == LONGEST_LISTED
    assert now.pid == os.getpid()


def test_nodes_of_a_cluster_with_what_is_on_them(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    lines = [
        {"event": "run", "schema": JOURNAL_SCHEMA, "run_id": "r", "env": "e", "model": "m", "seed": 0, "config": {}},
        {"event": "node", "node": "aa", "host": "one", "level": "full", "slots": 8},
        {"event": "node", "node": "bb", "host": "two", "level": "full", "slots": 4},
        {"event": "placed", "group_id": "g", "node": "aa"},
        {"event": "placed", "group_id": "h", "node": "bb"},
        *({"event": "messages", "rollout_id": name, "turn": 0, "messages": []} for name in ("g/0", "g/1", "h/0")),
        {"event": "node", "node": "bb", "host": "two", "level": "full", "slots": 4, "lost": "power"},
    ]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reader = RunReader(journal)
    one, two = reader.read().nodes
    assert (one.groups, one.in_flight, one.lost) == (1, 2, "")
    assert (two.groups, two.in_flight, two.lost, two.losses) == (0, 0, "power", 1)
    with journal.open("a") as file:
        file.write(json.dumps({"event": "placed", "group_id": "h", "node": "aa"}) + "\n")
    status = reader.read()
    assert (status.nodes[0].groups, status.nodes[0].in_flight) == (2, 3)
    shown = exposition(status, 0.0)
    assert 'palaestra_node_busy_slots{node="one/aa"} 3\n' in shown
    assert "palaestra_nodes_lost_total 1\n" in shown
