import io
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_messages import raises
from palaestra.rollouts.export.atropos import AtroposExporter, GroupsFile, claim_path, encode_line, group_line
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.records import Group, TokenRow, ToolErrorRecord, TurnRecord
from palaestra_slots.core.errors import DiskError
from palaestra_slots.core.types import Blame, Outcome

ENGINE_ROW = TokenRow(tokens=[5, 6, 7], masks=[-100, 6, 7], logprobs=[1.0, -0.5, -0.25], source="engine")


@pytest.fixture
def line_of(group):
    def make(*trajectories, **fields):
        line = group_line(group(*trajectories, **fields), env="count", model="m")
        assert line is not None
        return line

    return make


def lines_in(path: Path) -> list[str]:
    return [json.loads(line)["task_id"] for line in path.read_text().splitlines()]


def test_a_group_in_the_shape_that_the_api_server_takes(line_of, trajectory):
    line = line_of(trajectory(0, 1.0, row=ENGINE_ROW), trajectory(1, 0.0, row=ENGINE_ROW), toolsets=("terminal",))
    assert json.loads(encode_line(line)) == {
        "tokens": [[5, 6, 7], [5, 6, 7]],
        "masks": [[-100, 6, 7], [-100, 6, 7]],
        "scores": [1.0, 0.0],
        "advantages": [],
        "ref_logprobs": [],
        "messages": [[{"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"}]] * 2,
        "group_overrides": {},
        "overrides": [],
        "images": [],
        "distill_token_ids": None,
        "distill_logprobs": None,
        "generation_params": None,
        "inference_logprobs": [[1.0, -0.5, -0.25]] * 2,
        "schema": "palaestra.atropos_group/1",
        "env": "count",
        "model": "m",
        "group_id": "g0",
        "task_id": "task-0",
        "toolsets": ["terminal"],
        "tools_hash": "",
        "token_source": "engine",
        "spans": [[], []],
        "rollouts": line["rollouts"],
    }


def test_an_unscored_rollout_is_told_of_but_not_trained_on(line_of, trajectory):
    failed = trajectory(
        0,
        None,
        outcome=Outcome.INFRA_ERROR,
        blame=Blame.SANDBOX,
        error="the slot died",
        turns=[TurnRecord(number=1), TurnRecord(number=2)],
        tool_errors=[ToolErrorRecord(turn=1, tool="terminal", arguments="{", error="malformed")],
        prompt_tokens=10,
        completion_tokens=3,
        metrics={"f2p": 0.5},
        detail={"patch": "+x"},
    )
    line = line_of(trajectory(2, 0.25), failed, trajectory(1, 0.75))
    assert line["scores"] == [0.75, 0.25], "index order"
    assert line["group_overrides"] == {"group_size": 2}
    assert line["rollouts"][0] == {
        "rollout_id": "r0",
        "index": 0,
        "outcome": "infra_error",
        "reward": None,
        "blame": "sandbox",
        "error": "the slot died",
        "metrics": {"f2p": 0.5},
        "detail": {"patch": "+x"},
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "turns": 2,
        "rows": 0,
        "tool_errors": 1,
    }
    assert [rollout["index"] for rollout in line["rollouts"]] == [0, 1, 2]


def test_an_export_counts_the_rollouts_without_tokens(group, trajectory):
    def report(*trajectories):
        return AtroposExporter().export([group(*trajectories)], io.BytesIO(), ExportMeta(run_id="r", env="count"))

    with_tokens, without = trajectory(0, 1.0, row=ENGINE_ROW), trajectory(1, 0.0)
    assert list(report(with_tokens, without).remarks.values()) == [1]
    assert not +report(with_tokens).remarks


def test_a_group_without_a_score_has_no_line(group, trajectory):
    assert group_line(group(trajectory(0, None)), env="e", model="m") is None
    assert group_line(group(error="setup failed"), env="e", model="m") is None


def test_logprobs_are_left_out_unless_every_row_has_them(line_of, trajectory):
    line = line_of(trajectory(0, row=ENGINE_ROW), trajectory(1))
    assert "inference_logprobs" not in line
    assert line["tokens"] == [[5, 6, 7], []]
    assert line["token_source"] == "mixed"
    assert line_of(trajectory(0))["token_source"] == "placeholder"


def test_every_message_has_role_and_content(line_of, trajectory):
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "terminal", "arguments": "{}"}}]}
    kept = trajectory(0, messages=[call])
    assert line_of(kept)["messages"] == [[call | {"content": None}]]
    assert "content" not in kept.messages[0], "the record itself stays as it was"
    with pytest.raises(ValueError, match=r"r0.*no role"):
        line_of(trajectory(0, messages=[{"content": "who says?"}]))


@pytest.mark.parametrize(
    "row",
    [
        TokenRow(tokens=[1, 2], masks=[1]),
        TokenRow(tokens=[1, 2], masks=[1, 2], logprobs=[0.0]),
        TokenRow(tokens=[], masks=[], logprobs=[0.0]),
    ],
)
def test_a_row_of_unequal_lengths_reaches_no_trainer(row, line_of, trajectory):
    with pytest.raises(ValueError, match="differ in length"):
        line_of(trajectory(0, row=row))


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_score_that_json_cannot_hold_is_refused(reward, line_of, trajectory):
    with raises(ValueError):
        line_of(trajectory(0, reward))


def test_what_an_environment_of_its_own_adds_per_rollout_is_kept_when_it_is_there_for_all(line_of, trajectory):
    line = line_of(
        trajectory(0, extra={"overrides": {"weight": 2}, "advantages": [0.5], "generation_params": {"temperature": 1}}),
        trajectory(1, extra={"overrides": {}}),
    )
    assert line["overrides"] == [{"weight": 2}, {}]
    assert line["advantages"] == []
    assert line["generation_params"] == {"temperature": 1}


def test_text_that_utf8_cannot_hold_does_not_lose_the_line(line_of, trajectory):
    line = line_of(trajectory(0, messages=[{"role": "user", "content": "a\ud800b"}]))
    assert json.loads(encode_line(line))["messages"][0][0]["content"] == "a\ud800b"


def test_a_file_that_exists_is_never_taken(tmp_path):
    wanted = tmp_path / "data" / "x.jsonl"
    claimed = [claim_path(wanted) for _ in range(3)]
    assert [path.name for path in claimed] == ["x.jsonl", "x_1.jsonl", "x_2.jsonl"]


@pytest.mark.parametrize("name", [".", "there"])
def test_a_directory_is_no_place_for_a_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    with raises(DiskError):
        GroupsFile(Path(name), env="e", model="m")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "there"]


def test_claims_at_the_same_moment_get_different_files(tmp_path):
    gate = threading.Barrier(8)
    claimed = []

    def claim():
        gate.wait()
        claimed.append(claim_path(tmp_path / "x.jsonl"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == 8


def test_lines_go_out_in_item_order_as_soon_as_their_turn_comes(tmp_path, group, trajectory):
    def one(number: int) -> Group:
        return group(trajectory(0), number=number)

    with GroupsFile(tmp_path / "x.jsonl", env="e", model="m") as file:
        file.add(one(1))
        assert lines_in(file.path) == []
        file.add(one(0))
        assert lines_in(file.path) == ["task-0", "task-1"], "on disk already, not at close"
        file.add(one(4))
        file.add(group(trajectory(0, None), number=2))
        assert lines_in(file.path) == ["task-0", "task-1"]
        file.skip(3)
        assert lines_in(file.path) == ["task-0", "task-1", "task-4"]


def test_close_after_an_interruption_writes_what_waits(tmp_path, group, trajectory):
    file = GroupsFile(tmp_path / "x.jsonl", env="e", model="m")
    for number in (7, 3):
        file.add(group(trajectory(0), number=number))
    file.close()
    file.close()
    assert lines_in(file.path) == ["task-3", "task-7"]
    with pytest.raises(ValueError, match="closed"):
        file.skip(0)


def test_a_disk_that_is_full_is_said_when_it_is_closed_too(tmp_path, group, trajectory):
    path = tmp_path / "groups.jsonl"
    path.symlink_to("/dev/full")
    groups = GroupsFile(path, env="e", model="m", again=True)
    for close in (lambda: groups.add(group(trajectory(0), number=0)), groups.close):
        with raises(DiskError, "groups.jsonl"):
            close()
    groups.close()


def test_a_part_of_a_run_that_came_to_no_group_leaves_the_file_as_it_was(tmp_path, group, trajectory):
    path = tmp_path / "groups.jsonl"
    for tasks, found in ((["a", "b"], ["a", "b"]), ([], ["a", "b"]), (["c"], ["c"])):
        with GroupsFile(path, env="e", model="m", again=True) as file:
            for number, task in enumerate(tasks):
                file.add(group(trajectory(0), number=number, task_id=task))
        assert lines_in(path) == found


def test_a_number_counts_once(tmp_path, group, trajectory):
    with GroupsFile(tmp_path / "x.jsonl", env="e", model="m") as file:
        file.add(group(trajectory(0), number=0))
        for number in (0, 5):
            file.skip(5) if number else None
            with raises(ValueError, number):
                file.add(group(trajectory(0), number=number))


def test_a_line_is_in_the_file_before_add_returns(tmp_path, group, trajectory):
    with GroupsFile(tmp_path / "x.jsonl", env="e", model="m") as file:
        file.add(group(trajectory(0), number=0))
        assert os.stat(file.path).st_size > 0


def test_lines_that_wait_for_an_earlier_group_are_not_in_memory(tmp_path, group, trajectory):
    with GroupsFile(tmp_path / "x.jsonl", env="e", model="m") as file:
        long = trajectory(0, messages=[{"role": "user", "content": "x" * 100_000}])
        file.add(group(long, number=1))  # what a first line takes once
        tracemalloc.start()
        for number in range(2, 40):
            file.add(group(long, number=number))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 200_000, "38 lines of 100 kB wait"
        file.add(group(trajectory(0), number=0))
        assert lines_in(file.path) == [f"task-{number}" for number in range(40)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@settings(deadline=None)  # it writes to a disk
@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_any_order_of_finishing_gives_the_same_file(tmp_path_factory, group, trajectory, order, skipped):
    folder = tmp_path_factory.mktemp("order")
    with GroupsFile(folder / "x.jsonl", env="e", model="m") as file:
        for number in order:
            if number in skipped:
                file.skip(number)
            else:
                file.add(group(trajectory(0), number=number))
    assert lines_in(file.path) == [f"task-{number}" for number in range(6) if number not in skipped]
