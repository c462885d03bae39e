"""Trees: branches continue the slot and the conversation of another rollout, and shared turns count once."""

from __future__ import annotations

import asyncio
import math
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import palaestra
from envs.scripts import groups_file
from palaestra import ConfigError, HermesAgentBaseEnv, Rollout, Slot, Task, environment
from palaestra.cli.main import main
from palaestra.core.types import Outcome
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engine import Sampled
from palaestra.inference.engines.token_engine import TokenChat
from palaestra.rollouts.events import AttemptDiscarded, RolloutEnded, RolloutResumed, TurnTaken
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import verify_run
from palaestra.rollouts.records import Fork, Group, Trajectory, TurnRecord
from palaestra.rollouts.trees import choose, credit, tree_advantages
from palaestra.sandbox.slot import Rung
from palaestra.testing.fake_engine import toy_tokenizer
from palaestra.trainers.advantages import Batch

pytestmark = pytest.mark.slots

STEPS = 4
CALL = '<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'
ran: list[int] = []


@environment(toolsets=["todo"])
def safe(n: int = 2) -> Iterator[Task]:
    for number in range(n):
        yield Task(id=f"safe-{number}", prompt=f"Open safe {number}.", files={"before": "prepared\n"})


@safe.tool
async def press(key: int, sandbox: Slot) -> str:
    """Press a key."""
    ran.append(key)
    done = await sandbox.execute(
        f"echo {key} >> keys; echo {key} >> /usr/local/bin/ls || true; rm -f before; wc -l < keys"
    )
    return done.output.strip()


@safe.score
async def right(rollout: Rollout, sandbox: Slot) -> float:
    """The slot has the keys of the conversation, and no check sees what stands in for a program of the image."""
    keys = (await sandbox.read_text("keys", missing="")).split()
    assert keys == pressed(rollout.messages)
    assert await sandbox.stat("before") is None
    assert await sandbox.stat("/usr/local/bin/ls") is None
    return sum(int(key) for key in keys) / (3 * STEPS)


def pressed(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of the calls that are whole."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    found = [re.fullmatch(r'\{"key": (\d)\}', call["arguments"]) for call in calls]
    return [each[1] for each in found if each is not None]


class Presser(TokenChat):
    """Presses random keys, and says so after the last one. Its later turns are the more certain, `odd` excepted; the
    turn `cut` ends within a call."""

    def __init__(self, odd: int = 0, cut: int = 0) -> None:
        texts = [CALL.format(key=key) for key in range(4)] * 20
        self.toy = toy_tokenizer(texts, plain=("<tool_call>", "</tool_call>"))
        super().__init__(APIServerConfig(model_name="presser"), tokenizer=self.toy)
        self.rng = random.Random(3)
        self.odd, self.cut = odd, cut
        self.sampled = 0

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        turn = self.toy.decode(list(input_ids), skip_special_tokens=False).count("<|im_start|>assistant")
        text = CALL.format(key=self.rng.randrange(4)) if turn <= STEPS else "Open."
        ids = [*self.toy.encode(text), self.toy.stop_ids[0]]
        if turn == self.cut:
            ids = ids[:-5]
        self.sampled += len(ids)
        logprobs = [-3.0 if turn == self.odd else -1.0 / turn] * len(ids)
        return Sampled(ids, logprobs, "length" if turn == self.cut else "stop", "7")


def roll_out(folder: Path, engine: Presser | None = None, **settings: Any) -> palaestra.Run:
    ran.clear()
    given = {"group_size": 5, "branches": 3, "tasks": 2, "folder": str(folder), "ensure_scores_are_not_same": False}
    return asyncio.run(palaestra.run(safe(), server=engine or Presser(), **{**given, **settings}))


def branches(group: Group) -> list[Trajectory]:
    return [each for each in group.trajectories if each.parent is not None]


def own_calls(trajectory: Trajectory) -> int:
    first = 0 if trajectory.parent is None else trajectory.parent.turn
    return sum(len(turn.tools) for turn in trajectory.turns[first:])


def test_shared_turns_run_count_and_train_once(tmp_path: Path) -> None:
    engine = Presser()
    run = roll_out(tmp_path, engine)
    everything = [each for group in run.groups for each in group.trajectories]
    assert [(each.outcome, each.error) for each in everything] == [(Outcome.NATURAL, "")] * 10
    assert all(branches(group) for group in run.groups)
    assert len(ran) == sum(map(own_calls, everything)) < 10 * STEPS
    assert engine.sampled == sum(each.completion_tokens for each in everything)
    assert engine.sampled == sum(trained for each in everything for _, trained in each.row_sizes)
    for group in run.groups:
        for each in branches(group):
            assert each.parent is not None
            root = group.trajectories[each.parent.index]
            assert each.parent.turn in root.fork_points == [1, 2, 3, 4]
            shared = 1 + 2 * each.parent.turn
            assert each.messages[:shared] == root.messages[:shared]
            assert len(pressed(each.messages)) == len(each.turns) - 1 == STEPS
    verdict = verify_run(run.path / "journal.jsonl", run.path / "groups.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == engine.sampled


def test_a_prefix_that_is_not_the_parents_is_found(tmp_path: Path) -> None:
    run = roll_out(tmp_path, tasks=1)
    journal = run.path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    events = list(read_journal(journal))
    place = next(n for n, event in enumerate(events) if isinstance(event, RolloutEnded) and event.trajectory.parent)
    event = events[place]
    assert isinstance(event, RolloutEnded)
    fork = event.trajectory.parent
    assert fork is not None
    for parent in (Fork(1 - fork.index, fork.turn), Fork(fork.index, 9), Fork(9, fork.turn)):
        wrong = msgspec.structs.replace(event, trajectory=msgspec.structs.replace(event.trajectory, parent=parent))
        journal.write_bytes(b"".join([*lines[:place], msgspec.json.encode(wrong) + b"\n", *lines[place + 1 :]]))
        assert event.trajectory.rollout_id in verify_run(journal).violation


def test_the_rows_have_the_credit_of_the_leaves(tmp_path: Path) -> None:
    run = roll_out(tmp_path)
    out = tmp_path / "rows.jsonl"
    assert main(["export", str(run.path), "--to", "rows", "--out", str(out)]) == 0
    rows = [msgspec.json.decode(line, type=ExportedRow) for line in out.read_bytes().splitlines()]
    assert verify_run(run.path / "journal.jsonl", exported=out).exported == len(rows) == 10
    for group in run.groups:
        rewards = [each.reward or 0.0 for each in group.trajectories]
        mine = {row.index: row for row in rows if row.group_id == group.group_id}
        for each in group.trajectories:
            row = mine[each.index]
            if each.parent is not None:
                assert row.parent == (f"{group.group_id}/{each.parent.index}", each.parent.turn)
            below = [one for one in branches(group) if one.parent and one.parent.index == each.index]
            if row.credit is msgspec.UNSET:
                assert not below
                continue
            leaves = [[each, *(one for one in below if one.parent and one.parent.turn >= turn)] for turn in range(1, 6)]
            expected = [statistics.fmean(one.reward or 0.0 for one in sharing) for sharing in leaves]
            assert [value for _, _, value in row.credit] == pytest.approx(expected)
            assert sum(stop - start for start, stop, _ in row.credit) == sum(row.mask)
        batch = Batch()
        batch.add(group, version=7, most_behind=0, scaled=False)
        assert sum(row.sampled for row in batch.rows) == sum(each.completion_tokens for each in group.trajectories)
        for trained in batch.rows:
            if trained.row.credit is not msgspec.UNSET:
                value = trained.advantage + statistics.fmean(rewards)
                for start, stop, own in trained.row.credit:
                    part = trained.row.mask[start:stop]
                    assert part == [own == pytest.approx(value)] * len(part)


def test_a_chain_is_exported_as_before(tmp_path: Path) -> None:
    run = roll_out(tmp_path, branches=0, tasks=1)
    out = tmp_path / "rows.jsonl"
    assert main(["export", str(run.path), "--to", "rows", "--out", str(out)]) == 0
    text = out.read_text()
    journal = (run.path / "journal.jsonl").read_text()
    assert not any(word in text or f'"{word}"' in journal for word in ("credit", "parent", "fork_points"))


def test_uncertain_branches_begin_before_the_least_likely_turn(tmp_path: Path) -> None:
    run = roll_out(tmp_path, Presser(odd=3), branch_at="uncertain", branches=2, group_size=4)
    assert {each.parent.turn for group in run.groups for each in branches(group) if each.parent} == {2}


def test_nothing_continues_the_last_turn(tmp_path: Path) -> None:
    """A reply that was cut off in a call has an answer, after which the rollout ends."""
    run = roll_out(tmp_path, Presser(cut=3), tasks=1)
    (group,) = run.groups
    assert [each.outcome for each in group.trajectories] == [Outcome.LENGTH] * 5
    assert [each.fork_points for each in group.trajectories[:2]] == [[1, 2]] * 2
    assert all(each.completion_tokens for each in group.trajectories)


def test_the_points_are_chosen_from_the_seed() -> None:
    """The beginnings are points too; each point is used once before any is used again."""
    roots = [root(0, 0.0, [1, 2]), root(1, 1.0, [3]), root(2, 1.0, [])]
    drawn = [choose(roots, 7, "random", random.Random(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0][:5]) == {Fork(0, 0), Fork(0, 1), Fork(0, 2), Fork(1, 0), Fork(1, 3)}
    assert drawn[0][5:] == drawn[0][:2]
    assert choose([root(0, 1.0, [])], 3, "random", random.Random(0)) == []


def root(index: int, reward: float | None, points: list[int], parent: Fork | None = None) -> Trajectory:
    return Trajectory(
        rollout_id=f"g/{index}", group_id="g", task_id="t", index=index, messages=[], outcome=Outcome.NATURAL,
        reward=reward, fork_points=points, parent=parent, turns=[TurnRecord(number=n) for n in range(1, 5)],
    )  # fmt: skip


def test_credit_is_the_mean_of_the_scored_leaves() -> None:
    tree = [
        root(0, 1.0, [1, 2]), root(1, 0.0, []), root(2, 0.0, [], Fork(0, 2)), root(3, 0.5, [3], Fork(0, 1)),
        root(4, None, [], Fork(0, 1)), root(5, 0.1, [], Fork(3, 3)),
    ]  # fmt: skip
    found = credit(tree)
    assert set(found) == {0, 3}
    assert [turn for turn, _ in found[0]] == [1, 2, 4]
    assert [value for _, value in found[0]] == pytest.approx([(1 + 0 + 0.5 + 0.1) / 4, 0.5, 1.0])
    assert [value for _, value in found[3]] == pytest.approx([0.3, 0.5])


def test_tree_advantages_compare_with_the_group_and_with_the_turns_before() -> None:
    tree = [root(0, 1.0, [2]), root(1, 0.0, []), root(2, 0.0, [], Fork(0, 2))]
    found = tree_advantages(tree)
    assert [turn for turn, _ in found[0]] == [2, 4]
    # The group's mean is 1/3; the shared turns have the value 1/2 and two leaves.
    assert [value for _, value in found[0]] == pytest.approx([(1 - 2 / 3) / math.sqrt(2), 2 - 1 / 3 - 1 / 2])
    assert [value for _, value in found[1]] == pytest.approx([-2 / 3])
    assert [value for _, value in found[2]] == pytest.approx([-1 / 3 - 1 / 2])
    assert tree_advantages([root(0, 1.0, []), root(1, 0.0, [])]) == {}


TOOLS = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["terminal", "todo"])
def steps():
    plan = [{"id": "1", "content": "count", "status": "in_progress"}]
    yield Task(id="one", prompt="Count.", files={"a.txt": "x\\n" * 3}, answer="3", solution=%s)

@steps.score
async def correct(task, sandbox):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
"""
COUNT = '"wc -l < a.txt > answer.txt", "cat answer.txt"'


@pytest.mark.parametrize(
    ("solution", "points"),
    [
        (f"[{COUNT}]", [1, 2]),
        (f'["echo x > /tmp/x", {COUNT}, "rm /tmp/x"]', [4]),
        (f'["true", ToolStep("todo", {{"todos": plan}}), {COUNT}]', [1]),
        (f'["(setsid sleep 1000 >/dev/null 2>&1 &)", {COUNT}, "pkill sleep; while pgrep sleep; do :; done"]', [4]),
        (f'["true", ToolStep("terminal", {{"command": "sleep 1000", "background": True}}), {COUNT}]', [1]),
    ],
)
def test_state_outside_of_the_files_is_no_fork_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solution: str, points: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(TOOLS % solution)
    assert main(["run", "my_env.py", "--policy", "oracle", "--group", "5", "--env.branches", "3"]) == 0
    (group,) = recorded(tmp_path)
    assert [each.fork_points for each in group.trajectories] == [points, points, [], [], []]
    assert any(each.parent is not None for each in group.trajectories)
    assert [each.reward for each in group.trajectories] == [1.0] * 5


def recorded(folder: Path) -> list[Group]:
    (journal,) = folder.glob("runs/*/*/journal.jsonl")
    return list(Recording(journal))


RUN = ["run", "my_env.py", "--policy", "oracle", "--group", "5", "--env.branches", "3", "--concurrency", "1"]
LONG = f"[{COUNT}, {COUNT}]"


@pytest.mark.parametrize("index", [0, 2, 4])
@pytest.mark.parametrize("turn", [2, 5])
def test_a_tree_that_was_cut_off_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, turn: int
) -> None:
    """The rest of a root or a branch comes out as it was, with no turn taken twice and the same groups file."""
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(TOOLS % LONG)
    assert main(RUN) == 0
    data = groups_file(tmp_path)
    (journal,) = tmp_path.glob("runs/*/*/journal.jsonl")
    whole, before = data.read_bytes(), recorded(tmp_path)
    events = list(read_journal(journal))
    rollout_id = f"000000-one/{index}"
    cut = next(
        n
        for n, event in enumerate(events, 1)
        if (isinstance(event, TurnTaken) and event.rollout_id == rollout_id and event.turn == turn)
        or (isinstance(event, RolloutResumed) and event.rollout_id == rollout_id and event.turns >= turn)
    )  # fmt: skip
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:cut]))
    assert main([*RUN, "--resume", str(journal.parent)]) == 0
    assert data.read_bytes() == whole
    assert [each.trajectories for each in normal(recorded(tmp_path))] == [each.trajectories for each in normal(before)]
    after = list(read_journal(journal))
    assert not [event for event in after if isinstance(event, AttemptDiscarded)]
    taken = [(event.rollout_id, event.turn) for event in after if isinstance(event, TurnTaken)]
    assert len(taken) == len(set(taken))
    assert len(taken) == sum(
        1 + len(each.turns) - (1 + each.parent.turn if each.parent else 0) for each in everything(before)
    )


def everything(groups: Sequence[Group]) -> list[Trajectory]:
    return [each for group in groups for each in group.trajectories]


def normal(groups: Sequence[Group]) -> list[Group]:
    """Without what differs between runs."""
    return [
        msgspec.structs.replace(
            group, trajectories=[msgspec.structs.replace(each, beside=None) for each in group.trajectories]
        )
        for group in groups
    ]


def test_a_tree_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(TOOLS % LONG)
    assert main(RUN) == 0
    capsys.readouterr()
    assert main(["replay", "last", "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["rollouts"], found["rate"], found["rewards_equal"]) == (5, 1.0, 5)


def test_without_layers_a_branch_runs_the_shared_commands_again(tmp_path: Path) -> None:
    run = roll_out(tmp_path, isolation=Rung.CONFINED.label, tasks=1)
    (group,) = run.groups
    assert branches(group)
    assert len(ran) == 5 * STEPS
    assert all(each.scored for each in group.trajectories)
    verdict = verify_run(run.path / "journal.jsonl")
    assert verdict.trained == sum(each.completion_tokens for each in group.trajectories)


def test_more_branches_than_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"branches 5 .*group_size"):
        roll_out(tmp_path, branches=5)


class PerRollout(HermesAgentBaseEnv):
    """Prepares the workspace of every rollout by itself, through the hook of the contract."""

    name = "per_rollout"

    async def setup(self) -> None:
        self.items = iter(["one"])

    async def get_next_item(self) -> str | None:
        return next(self.items, None)

    def format_prompt(self, item: str) -> str:
        return "Press."

    async def setup_trajectory_workspace(self, item: str, *, trajectory_id: str, exec_tool: Any) -> dict[str, Any]:
        await exec_tool("terminal", {"command": "echo new >> prepared"})
        return {}

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float:
        return float(ctx.terminal("cat prepared")["output"].split() == ["new"])

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def test_a_set_up_of_every_rollout_is_not_done_twice(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"enabled_toolsets": ["terminal"], "branches": 1, "group_size": 3, "tasks": 1}
    run = asyncio.run(
        palaestra.run(
            PerRollout, server=Presser(), folder=str(tmp_path), tool_pool_mode="default",
            ensure_scores_are_not_same=False, **settings,
        )
    )  # fmt: skip
    (group,) = run.groups
    assert [(each.reward, each.fork_points, each.parent) for each in group.trajectories] == [(1.0, [], None)] * 3


@pytest.mark.parametrize("turn", [3, 4])
def test_a_branch_that_was_cut_off_has_the_same_tokens(tmp_path: Path, turn: int) -> None:
    """The rest of a resumed branch is sampled anew, and what was recorded is neither sampled nor trained again."""
    run = roll_out(tmp_path, tasks=1, branches=4)
    journal = run.path / "journal.jsonl"
    events = list(read_journal(journal))
    cut, last = next(
        (place, event)
        for place, event in enumerate(events, 1)
        if isinstance(event, TurnTaken) and event.turn == turn and event.rollout_id.endswith(("/1", "/2", "/3", "/4"))
    )
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:cut]))
    engine = Presser()
    again = roll_out(tmp_path, engine, tasks=1, branches=4, resume=str(run.path))
    (group,) = again.groups
    assert len(branches(group)) >= 3
    verdict = verify_run(journal, again.path / "groups.jsonl")
    assert verdict.ok, verdict.violation
    recorded = sum(
        len(piece.ids) // 4
        for event in events[:cut]
        if isinstance(event, TurnTaken)
        for sampled in event.sampled
        for piece in sampled.pieces
    )
    assert engine.sampled + recorded == verdict.trained == sum(each.completion_tokens for each in group.trajectories)
    assert last.messages[0] in group.trajectories[int(last.rollout_id[-1])].messages
