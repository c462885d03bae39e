"""Counterfactual runs: a recorded rollout is continued from one of its turns, and nobody trains on it by accident."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tree_journals import unpacked

import palaestra
from envs.agent_script import WITH_META
from golden_messages import check_message, raises
from palaestra import ConfigError, Rollout, Slot, Task, environment
from palaestra.cli.main import main
from palaestra.envs.run.library import assembled
from palaestra.rollouts.counterfactual import FORK_NAME, fork_of, read_fork, resumed_fork
from palaestra.rollouts.events import RolloutEnded, TurnTaken
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import verify_run
from palaestra.rollouts.records import Origin, Trajectory
from palaestra_slots.core.types import JSON, Blame, Outcome
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    Sampled,
    ToolCallMessage,
)  # fmt: skip
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_train.advantages import COUNTERFACTUAL, Batch

pytestmark = pytest.mark.slots

STEPS = 4
CALL = '<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'
ran: list[int] = []
answers: list[str] = []
"""What `press` answers in addition to its count; each call takes one."""


@environment(toolsets=[])
def lock(n: int = 2) -> Iterator[Task]:
    for number in range(n):
        yield Task(id=f"lock-{number}", prompt=f"Open lock {number}.", files={"before": "prepared\n"})


@lock.tool
async def press(key: int, sandbox: Slot) -> str:
    """Press a key."""
    ran.append(key)
    done = await sandbox.execute(f"echo {key} >> keys; rm -f before; wc -l < keys")
    return done.output.strip() + (answers.pop(0) if answers else "")


@lock.score
async def right(rollout: Rollout, sandbox: Slot) -> float:
    """Full if the last key is 3. The sandbox has the keys of the conversation, those of another run included."""
    keys = (await sandbox.read_text("keys", missing="")).split()
    assert keys == pressed(rollout.messages), (keys, rollout.messages)
    assert (await sandbox.stat("before") is None) == bool(keys)
    return float(keys[-1:] == ["3"])


def pressed(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    found = [re.fullmatch(r'\{"key": (\d)\}', call["arguments"]) for call in calls]
    return [each[1] for each in found if each is not None]


class Presser(TokenChat):
    """Presses `STEPS` random keys and says so; every second last key is right. `sampled` counts the tokens."""

    def __init__(self, seed: int = 3, name: str = "presser") -> None:
        self.toy = toy_tokenizer([CALL.format(key=key) for key in range(4)] * 20, plain=("<tool_call>", "</tool_call>"))
        super().__init__(APIServerConfig(model_name=name), tokenizer=self.toy)
        self.rng = random.Random(seed)
        self.lasts = itertools.count()
        self.sampled = 0

    async def aclose(self) -> None: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        turn = self.toy.decode(list(input_ids), skip_special_tokens=False).count("<|im_start|>assistant")
        key = self.rng.randrange(4) if turn < STEPS else 3 * (next(self.lasts) % 2)
        text = CALL.format(key=key) if turn <= STEPS else "Open."
        ids = [*self.toy.encode(text), self.toy.stop_ids[0]]
        self.sampled += len(ids)
        return Sampled(ids, [-1.0 / turn] * len(ids), "stop", "7")


class Talker(ServerEngine):
    """Presses the same keys without any tokens."""

    def __init__(self) -> None:
        self.config = APIServerConfig(model_name="presser")

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def chat_completion(self, *, messages: Sequence[Mapping[str, Any]], **_: JSON) -> ChatCompletion:
        said = sum(message["role"] == "assistant" for message in messages)
        function = FunctionCall(name="press", arguments=json.dumps({"key": said % 4}))
        message = AssistantMessage(content=None, tool_calls=[ToolCallMessage(id=f"c{said}", function=function)])
        if said == STEPS:
            message = AssistantMessage(content="Open.")
        usage = CompletionUsage(prompt_tokens=10, completion_tokens=5, total_tokens=15)
        return ChatCompletion(choices=[ChatChoice(message=message, finish_reason="stop")], usage=usage)


@pytest.fixture(autouse=True)
def fresh() -> None:
    ran.clear()
    answers.clear()


def original(folder: Path, **settings: Any) -> palaestra.Run:
    given = {"group_size": 2, "tasks": 1, "folder": str(folder), "server": settings.pop("server", None) or Presser()}
    return asyncio.run(palaestra.run(lock(), **{**given, **settings}))


def continued(
    run: palaestra.Run, turn: int, times: int = 3, server: object = None, **settings: Any
) -> tuple[palaestra.Run, list[Trajectory]]:
    """Continue the first rollout of a run, with an engine of this process."""
    begins = fork_of(run.path / "journal.jsonl", "000000-lock-0/0", turn, "seed")
    begins = msgspec.structs.replace(begins, workspace=settings.pop("workspace", begins.workspace))
    ran.clear()
    line = {"group_size": times, "folder": str(run.path.parent.parent), "server": server or Presser(9), **settings}
    report = asyncio.run(assembled(lock(), "process", {}, **line)(begins=begins))
    fork = palaestra.open_run(report.folder)
    return fork, fork.trajectories


def test_a_fork_shares_the_turns_and_pays_for_its_own(tmp_path: Path) -> None:
    run, engine = original(tmp_path), Presser(9)
    first = run.trajectories[0]
    fork, found = continued(run, 2, 4, engine)
    assert [(each.outcome, each.error) for each in found] == [(Outcome.NATURAL, "")] * 4
    assert [each.rollout_id for each in found] == [f"000000-lock-0/{n}" for n in range(4)]
    for each in found:
        assert each.messages[:5] == first.messages[:5]
        assert each.origin == Origin(run_id=run.path.name, rollout_id=first.rollout_id, turn=2, state="rebuilt")
        assert each.reward == float(pressed(each.messages)[-1] == "3")
        assert [turn.number for turn in each.turns] == [1, 2, 3, 4, 5]
    assert len({tuple(pressed(each.messages)) for each in found}) > 1
    assert len(ran) == 4 * STEPS  # the shared calls too, in each fresh sandbox
    assert engine.sampled == sum(each.completion_tokens for each in found)
    assert engine.sampled == sum(trained for each in found for _, trained in each.row_sizes)
    verdict = verify_run(fork.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == engine.sampled
    assert fork.status.completion_tokens == engine.sampled
    assert first.ledger is not None
    spans = [span for span in first.ledger.segments[0].spans if span.turn <= 2]
    for each in found:  # the tokens of the shared turns are the recorded ones, in the prompt
        assert each.ledger is not None
        shared = first.ledger.segments[0].tokens[: 4 * spans[-1].stop]
        assert each.ledger.segments[0].tokens.startswith(shared)
        assert not any(each.ledger.segments[0].mask[: spans[-1].stop])


def test_a_prompt_without_the_recorded_tokens_is_found(tmp_path: Path) -> None:
    fork, _ = continued(original(tmp_path), 2, 1)
    journal = fork.path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    place = next(n for n, event in enumerate(read_journal(journal)) if isinstance(event, TurnTaken) and event.turn == 2)
    turn = msgspec.json.decode(lines[place], type=TurnTaken)
    pieces = [msgspec.structs.replace(piece, ids=piece.ids[::-1]) for piece in turn.sampled[0].pieces]
    other = msgspec.structs.replace(turn, sampled=[msgspec.structs.replace(turn.sampled[0], pieces=pieces)])
    journal.write_bytes(b"".join([*lines[:place], msgspec.json.encode(other) + b"\n", *lines[place + 1 :]]))
    check_message(verify_run(journal).violation, "T1")


def test_results_that_differ_are_named_and_the_model_sees_the_recorded_ones(tmp_path: Path) -> None:
    answers[:] = ["", "", " at noon", *[""] * 20]
    run = original(tmp_path, group_size=1)
    answers[:] = ["", "", " at dusk", *[""] * 20]
    fork, found = continued(run, 3, 1)
    origin = found[0].origin
    assert origin is not None
    assert origin.difference.startswith('turn 3: press {"key":')
    assert "at noon" in origin.difference
    assert "at dusk" in origin.difference
    assert "at noon" in str(found[0].messages)
    assert "at dusk" not in str(found[0].messages)
    assert found[0].scored
    assert verify_run(fork.path / "journal.jsonl").ok


def test_a_kept_workspace_needs_no_call(tmp_path: Path) -> None:
    run = original(tmp_path, group_size=1, save_workspaces=True)
    fork, found = continued(run, STEPS, 2)
    assert ran == []
    assert [each.origin and each.origin.state for each in found] == ["kept", "kept"]
    assert [each.reward for each in found] == [run.trajectories[0].reward] * 2
    assert verify_run(fork.path / "journal.jsonl").ok
    _, earlier = continued(run, STEPS - 1, 1)
    assert earlier[0].origin is not None
    assert earlier[0].origin.state == "rebuilt"  # a call follows that turn, so the workspace is not its state
    _, rebuilt = continued(run, STEPS, 1, workspace="")
    assert len(ran) == STEPS
    assert rebuilt[0].scored
    fork, lost = continued(run, STEPS, 1, workspace=str(tmp_path / "gone"))
    assert lost[0].origin is not None
    assert lost[0].origin.state == "rebuilt"


def test_turn_0_is_the_prompt(tmp_path: Path) -> None:
    fork, found = continued(original(tmp_path), 0, 2)
    assert all(each.origin is not None and each.scored for each in found)
    assert verify_run(fork.path / "journal.jsonl").ok


def test_servers_with_and_without_tokens_continue_each_other(tmp_path: Path) -> None:
    text = original(tmp_path / "text", server=Talker())
    fork, found = continued(text, 2, 2)
    assert [each.scored for each in found] == [True, True]
    assert all(each.ledger is not None and each.ledger.segments[0].reason == "start" for each in found)
    verdict = verify_run(fork.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == sum(each.completion_tokens for each in found)
    exact = original(tmp_path / "exact")
    _, plain = continued(exact, 2, 2, Talker())
    assert [each.scored for each in plain] == [True, True]
    assert all(each.ledger is None for each in plain)


def test_another_model_gets_the_turns_as_messages(tmp_path: Path) -> None:
    run = original(tmp_path)
    fork, found = continued(run, 2, 2, Presser(9, name="other"))
    assert [each.scored for each in found] == [True, True]
    assert all(each.messages[:5] == run.trajectories[0].messages[:5] for each in found)
    assert all(each.ledger is not None and len(each.ledger.turns) == STEPS + 1 - 2 for each in found)
    verdict = verify_run(fork.path / "journal.jsonl")
    assert verdict.ok, verdict.violation
    assert verdict.trained == sum(each.completion_tokens for each in found)


@pytest.mark.parametrize("after", [1, 3, 8, 14])
def test_a_killed_fork_is_resumed_without_the_earlier_run(tmp_path: Path, after: int) -> None:
    """The journal ends after some turns: within the shared ones, or after turns of its own."""
    run = original(tmp_path)
    fork, whole = continued(run, 2, 2)
    journal = fork.path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    turns = [n for n, event in enumerate(read_journal(journal)) if isinstance(event, TurnTaken)]
    journal.write_bytes(b"".join(lines[: turns[min(after, len(turns) - 1)]]))
    (run.path / "journal.jsonl").unlink()
    resumed = asyncio.run(palaestra.run(lock(), server=Presser(9), group_size=2, resume=fork.path))
    assert [each.rollout_id for each in resumed.trajectories] == [each.rollout_id for each in whole]
    for each in resumed.trajectories:
        assert each.origin is not None
        assert each.scored
        assert each.messages[:5] == whole[0].messages[:5]
    verdict = verify_run(journal)
    assert verdict.ok, verdict.violation
    assert not (fork.path / "groups.jsonl").exists()


def test_nobody_trains_on_a_fork_by_accident(tmp_path: Path) -> None:
    run, times = original(tmp_path), 12  # enough that not all have one reward by chance
    fork, found = continued(run, 1, times)
    assert len({each.reward for each in found}) == 2
    assert (run.path / "groups.jsonl").stat().st_size
    assert not (fork.path / "groups.jsonl").exists()
    assert fork.to_rows() == []
    assert len(fork.to_rows(counterfactual=True)) == times
    with pytest.raises(ConfigError, match="counterfactual"):
        palaestra.training_rows(found[0])
    batch = Batch()
    assert not batch.add(fork.groups[0], version=7, most_behind=0)
    assert (batch.rows, batch.refused[COUNTERFACTUAL], batch.rewards) == ([], times, [])
    assert batch.add(fork.groups[0], version=7, most_behind=0, counterfactual=True)
    assert sum(row.sampled for row in batch.rows) == sum(each.completion_tokens for each in found)
    for name in ("rows", "openai", "sharegpt", "batch", "atif", "atropos"):
        out = tmp_path / f"{name}.jsonl"
        assert main(["export", str(fork.path), "--to", name, "--out", str(out)]) == 0
        assert out.read_bytes() == b""
    out = tmp_path / "all.jsonl"
    assert main(["export", str(fork.path), "--to", "rows", "--counterfactual", "--out", str(out)]) == 0
    rows = [msgspec.json.decode(line, type=ExportedRow) for line in out.read_bytes().splitlines()]
    assert {row.origin for row in rows} == {(run.path.name, "000000-lock-0/0", 1)}
    assert verify_run(fork.path / "journal.jsonl", exported=out).exported == times


def test_an_export_reports_the_rollouts_that_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fork, _ = continued(original(tmp_path), 1, 2)
    capsys.readouterr()
    main(["export", str(fork.path), "--to", "openai", "--out", "-"])
    told = capsys.readouterr().err
    assert "counterfactual" in told
    assert "--counterfactual" in told
    main(["export", str(fork.path), "--to", "openai", "--out", "-", "--counterfactual"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["origin"]["turn"] for line in lines] == [1, 1]


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    run = original(tmp_path)
    journal = run.path / "journal.jsonl"
    for rollout, turn, problem in (
        ("000000-lock-0/7", 1, "has no rollout"),
        ("000000-lock-0", 1, "names 2 rollouts"),
        ("000000-lock-0/0", 5, "after the turns 0 to 4, because its last reply ended it"),
        ("000000-lock-0/0", 9, "after the turns 0 to 4"),
    ):
        with pytest.raises(ConfigError, match=problem):
            fork_of(journal, rollout, turn, "")
    begins = fork_of(journal, "000000-lock-0/1", 1, "")
    wrong = msgspec.structs.replace(begins, tools_hash="other")
    report = asyncio.run(assembled(lock(), "process", {}, server=Presser(), folder=str(tmp_path))(begins=wrong))
    group = palaestra.open_run(report.folder).groups[0]
    assert "task lock-0 have changed" in group.error
    assert group.blame is Blame.TASK  # the journal keeps what the console printed
    prompt = msgspec.structs.replace(begins.turns[0], messages=[{"role": "user", "content": "Open another lock."}])
    wrong = msgspec.structs.replace(begins, turns=[prompt, *begins.turns[1:]])
    report = asyncio.run(assembled(lock(), "process", {}, server=Presser(), folder=str(tmp_path))(begins=wrong))
    lost = palaestra.open_run(report.folder).trajectories[0]
    assert lost.reward is None
    late = fork_of(journal, "000000-lock-0/1", 4, "")
    line = {"server": Presser(), "folder": str(tmp_path), "max_agent_turns": 4}
    report = asyncio.run(assembled(lock(), "process", {}, **line)(begins=late))
    assert "nothing can follow turn 4" in palaestra.open_run(report.folder).groups[0].error
    assert "its prompt has changed" in lost.error


def test_a_fork_of_a_fork_and_of_a_branch(tmp_path: Path) -> None:
    run = original(tmp_path)
    fork, found = continued(run, 1, 2)
    again, second = continued(fork, 3, 2)
    assert all(each.origin is not None and each.origin.run_id == fork.path.name for each in second)
    assert all(each.messages[:7] == found[0].messages[:7] for each in second)
    assert verify_run(again.path / "journal.jsonl").ok
    journal = unpacked(tmp_path / "tree", "exact")
    branch = next(each for group in Recording(journal) for each in group.trajectories if each.parent is not None)
    begins = fork_of(journal, branch.rollout_id, 3, "")
    assert [message for event in begins.turns for message in event.messages] == branch.messages[:7]


SCRIPT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def two_files():
    yield Task(id="two", prompt="Write a and b.", solution=["echo 1 > a", "echo 2 > b"])

@two_files.score
async def both(sandbox):
    return float([await sandbox.read_text(name, missing="") for name in "ab"] == ["1\\n", "2\\n"])
"""


def test_the_command_continues_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(SCRIPT)
    assert main(["run", "my_env.py", "--policy", "oracle"]) == 0
    before = capsys.readouterr().out.strip()
    assert main(["fork", "last", "000000-two/0", "--turn", "1", "--times", "3"]) == 0
    told = capsys.readouterr()
    first = palaestra.open_run(told.out.strip())
    check_message(told.err, "1 recorded call")
    assert [each.reward for each in first.trajectories] == [1.0] * 3
    assert main(["fork", before, "two/0", "--turn", "1", "--times", "2", "--policy", "noop"]) == 0
    second = palaestra.open_run(capsys.readouterr().out.strip())
    assert [each.reward for each in second.trajectories] == [0.0] * 2
    assert len(second.trajectories[0].turns) == 2
    assert main(["resume", str(first.path), "--group", "4"]) == 0
    more = palaestra.open_run(first.path)
    assert [each.reward for each in more.trajectories] == [1.0] * 4
    assert all(each.origin is not None for each in more.trajectories)
    assert main(["verify", str(first.path)]) == 2  # a scripted policy has no tokens
    (first.path / FORK_NAME).unlink()
    assert main(["resume", str(first.path), "--group", "5"]) == 2
    assert main(["fork", before, "two/0", "--turn", "3"]) == 2
    assert main(["fork", before, "two/0", "--turn", "1", "--resume", "last"]) == 2


def test_another_file_in_the_place_of_the_forks_is_refused(tmp_path: Path) -> None:
    fork, _ = continued(original(tmp_path), 1, 1)
    begins = read_fork(fork.path)
    assert begins is not None
    other = msgspec.structs.replace(begins, origin=Origin(run_id="x", rollout_id="y", turn=1))
    (fork.path / FORK_NAME).write_bytes(msgspec.json.encode(other))
    with raises(ConfigError, FORK_NAME):
        asyncio.run(palaestra.run(lock(), server=Presser(9), resume=fork.path))


def test_a_resumed_fork_loads_no_folder_but_a_kept_workspace(tmp_path: Path) -> None:
    fork, _ = continued(original(tmp_path), 1, 1)
    begins = read_fork(fork.path)
    assert begins is not None
    place = fork.path.parent / "other" / "workspaces" / "000000-lock-0" / "0"
    outside = tmp_path.parent / "workspaces" / "000000-lock-0" / "0"
    for workspace, used in ((place, True), (Path("/etc"), False), (outside, False), (fork.path, False)):
        named = msgspec.structs.replace(begins, workspace=str(workspace))
        (fork.path / FORK_NAME).write_bytes(msgspec.json.encode(named))
        found = resumed_fork(fork.path, {"fork": begins.facts})
        assert found is not None
        assert bool(found.workspace) == used, workspace


def test_the_cost_of_the_earlier_run_is_not_counted_again(tmp_path: Path) -> None:
    run = original(tmp_path)
    limits = {"prompt_price": 1.0, "completion_price": 1.0}
    fork, found = continued(run, 3, 2, **limits)
    own = sum(each.prompt_tokens + each.completion_tokens for each in found) / 1e6
    assert sum(each.cost or 0.0 for each in found) == pytest.approx(own)
    assert fork.status.cost == pytest.approx(own)
    ended = [event for event in read_journal(fork.path / "journal.jsonl") if isinstance(event, RolloutEnded)]
    assert len(ended) == 2


def test_a_kept_workspace_is_not_used_if_each_rollout_sets_up_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent environment of the contract, whose set-up would run over the kept files, and whose calls are text."""
    monkeypatch.chdir(tmp_path)
    Path("word_env.py").write_text(WITH_META)
    line = ["--policy", "oracle", "--keep-workspaces", "--env.tool_pool_mode", "local", "--tasks", "1"]
    assert main(["run", "word_env.py", *line]) == 0
    before = capsys.readouterr().out.strip()
    assert main(["fork", before, "000000-alpha/0", "--turn", "1", "--times", "3"]) == 0
    told = capsys.readouterr()
    found = palaestra.open_run(told.out.strip()).trajectories
    assert "from the kept workspace" in told.err
    assert [(each.reward, each.origin and each.origin.state) for each in found] == [(1.0, "rebuilt")] * 3
    assert [each.messages for each in found] == [palaestra.open_run(before).trajectories[0].messages] * 3
