"""A whole run with exact tokens, proved from its files; and every way of spoiling these files, found."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from toy import Sums, changed, services

from golden_messages import check_message
from manual_clock import ManualClock
from palaestra.agent.result import AgentResult
from palaestra.cli.main import main
from palaestra.rollouts.events import GroupStarted, RolloutEnded, RunEnded, RunResumed
from palaestra.rollouts.export.atropos import GroupsFile
from palaestra.rollouts.finished_run import Run
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import RunVerdict, verify_run
from palaestra.rollouts.records import TokenRow, Trajectory
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import Projection
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Blame, Outcome
from palaestra_tokens.chat_server import ChatServer, Engine, SessionContext
from palaestra_tokens.ledger import LedgerRecord, record_rows
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

TOKENIZER = toy_tokenizer(
    ['What is 1 + 1? <tool_call> {"name": "add", "arguments": {"a": 1, "b": 1}} The sum is 2'] * 5
)
FORMAT = ChatFormat(TOKENIZER)


class Exact:
    """An engine whose rollouts call the tool and answer, in tokens that are not always the tokenizer's choice."""

    name = "exact"

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ChatServer:
        number = int(context.rollout_id.split("-")[-1].split("/")[0])
        engine = ToyEngine(TOKENIZER, self.replies(number), rate=0.3, abort_rate=0.2, seed=context.index)
        return ManagedChat(engine, FORMAT, "hermes", clock=ManualClock())

    def replies(self, number: int) -> Iterator[str]:
        call = json.dumps({"name": "add", "arguments": {"a": number, "b": 1}})
        return iter([f"<tool_call>\n{call}\n</tool_call>", f"The sum is {number + 1}"])


class WithRows(Sums):
    """An environment that makes rows of its own."""

    def __init__(self, row: Callable[[Rollout], TokenRow]) -> None:
        super().__init__(tasks=1)
        self._row = row

    def project(self, rollout: Rollout, score: JSON) -> Projection:
        return Projection(self._row(rollout))


class Twice(Sums):
    """An environment whose agent works twice."""

    async def act(self, rollout: Rollout) -> AgentResult:
        await rollout.run_agent([{"role": "user", "content": "first"}])
        return await rollout.run_agent([{"role": "user", "content": "again"}])


class Talkative(Exact):
    """Answers without a call."""

    def replies(self, number: int) -> Iterator[str]:
        return iter(["one", "two"])


def roll_out(folder: Path, env: Sums | None = None, engine: Engine | None = None) -> list[Trajectory]:
    """Run into `folder`: journal.jsonl and groups.jsonl."""

    async def scenario() -> None:
        shared = changed(services(folder), engine=engine or Exact())
        with GroupsFile(folder / "groups.jsonl", env="sums", model="exact") as groups:
            await Runner(env or Sums(), shared, on_group=groups.add).run()
        shared.events.journal.close()

    asyncio.run(scenario())
    return [one for group in Recording(folder / "journal.jsonl") for one in group.trajectories]


def verified(folder: Path) -> RunVerdict:
    return verify_run(folder / "journal.jsonl", folder / "groups.jsonl")


def rewrite_journal(folder: Path, change: Callable[[Trajectory], None]) -> None:
    """Change the record of rollout `000001-sum-1/0`."""
    encoded = []
    for event in read_journal(folder / "journal.jsonl"):
        if isinstance(event, RolloutEnded) and event.trajectory.rollout_id == "000001-sum-1/0":
            change(event.trajectory)
        encoded.append(msgspec.json.encode(event))
    (folder / "journal.jsonl").write_bytes(b"\n".join(encoded) + b"\n")


def end_run(folder: Path, reason: str) -> None:
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(msgspec.json.encode(RunEnded(reason=reason)) + b"\n")


def rewrite_groups(folder: Path, change: Callable[[list[dict[str, JSON]]], None]) -> None:
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_with_exact_tokens(tmp_path: Path) -> None:
    trajectories = roll_out(tmp_path)
    verdict = verified(tmp_path)
    assert verdict.ok
    assert (verdict.rollouts, verdict.without_tokens, verdict.turns, verdict.segments) == (6, 0, 12, 6)
    assert (verdict.lines, verdict.rows) == (3, 6)
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        assert sum(span.length for span in row.spans) == len(row.tokens)
    assert all(trajectory.row is None and trajectory.ledger is not None for trajectory in trajectories)
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert {line["token_source"] for line in lines} == {"engine"}
    for line, (one, other) in zip(lines, zip(trajectories[::2], trajectories[1::2], strict=True), strict=True):
        assert line["tokens"] == [one.rows[0].tokens, other.rows[0].tokens]
        assert line["inference_logprobs"] == [one.rows[0].logprobs, other.rows[0].logprobs]
        assert [rollout["rows"] for rollout in line["rollouts"]] == [1, 1]
        for tokens, masks in zip(line["tokens"], line["masks"], strict=True):
            said = TOKENIZER.decode([token for token, mask in zip(tokens, masks, strict=True) if mask != -100])
            assert said.count("<|im_end|>") == 2, "both turns are trained, to their ends"
            assert said.startswith("<tool_call>")


def test_a_rewritten_history_becomes_a_row_of_its_own(tmp_path: Path) -> None:
    trajectories = roll_out(tmp_path, Twice(1), Talkative())
    assert [len(trajectory.rows) for trajectory in trajectories] == [2, 2]
    verdict = verified(tmp_path)
    assert verdict.ok
    assert verdict.reasons == {"history_edit": 2}
    (line,) = (json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines())
    assert (len(line["tokens"]), len(line["scores"]), len(line["messages"])) == (4, 4, 4)
    assert line["group_overrides"] == {"group_size": 4}
    assert [rollout["rows"] for rollout in line["rollouts"]] == [2, 2]


def spoil_mask(trajectory: Trajectory) -> None:
    segment = _ledger(trajectory).segments[0]
    segment.mask = segment.mask[1:] + b"\0"


def spoil_token(trajectory: Trajectory) -> None:
    segment = _ledger(trajectory).segments[0]
    segment.tokens = bytes([segment.tokens[0] ^ 1]) + segment.tokens[1:]


def drop_logprob(trajectory: Trajectory) -> None:
    segment = _ledger(trajectory).segments[0]
    segment.logprobs = segment.logprobs[:-4]


def forget_reason(trajectory: Trajectory) -> None:
    _ledger(trajectory).segments[0].reason = ""


def drop_turn(trajectory: Trajectory) -> None:
    del _ledger(trajectory).turns[-1]


def lose_a_turn(trajectory: Trajectory) -> None:
    """So that the ledger alone looks whole."""
    turn = trajectory.turns[-1]
    trajectory.turns.append(msgspec.structs.replace(turn, number=turn.number + 1))


def claim_other_tokens(trajectory: Trajectory) -> None:
    row = record_rows(_ledger(trajectory))[0]
    trajectory.row = msgspec.structs.replace(row, tokens=[*row.tokens[:-1], 5])


def claim_without_ledger(trajectory: Trajectory) -> None:
    trajectory.row, trajectory.ledger = TokenRow(tokens=[1], masks=[1], source="engine"), None


def _ledger(trajectory: Trajectory) -> LedgerRecord:
    assert trajectory.ledger is not None
    return trajectory.ledger


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (spoil_mask, "T3"),
        (spoil_token, "T1"),
        (drop_logprob, "T3"),
        (forget_reason, "T2"),
        (drop_turn, "T3"),
        (lose_a_turn, "T3"),
        (claim_other_tokens, "T3"),
        (claim_without_ledger, "T1"),
    ],
)
def test_a_spoilt_journal_is_found_with_its_place(
    tmp_path: Path, change: Callable[[Trajectory], None], invariant: str
) -> None:
    roll_out(tmp_path)
    rewrite_journal(tmp_path, change)
    verdict = verified(tmp_path)
    assert verdict.violation.startswith(f"000001-sum-1/0: {invariant} ") or verdict.violation.startswith(
        f"000001-sum-1/0: {invariant}:"
    )


def train_the_prompt(lines: list[dict[str, JSON]]) -> None:
    lines[1]["masks"][0][0] = lines[1]["tokens"][0][0]


def reencode(lines: list[dict[str, JSON]]) -> None:
    tokens = lines[1]["tokens"][1]
    tokens[:] = TOKENIZER.encode(TOKENIZER.decode(tokens))


def round_logprobs(lines: list[dict[str, JSON]]) -> None:
    row = lines[1]["inference_logprobs"][0]
    row[:] = [round(value) - 0.001 for value in row]


def drop_row(lines: list[dict[str, JSON]]) -> None:
    for key in ("tokens", "masks", "inference_logprobs"):
        del lines[1][key][1]


def drop_masks(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["masks"][1]


def drop_row_of_logprobs(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["inference_logprobs"][1]


def repeat_line(lines: list[dict[str, JSON]]) -> None:
    lines[1] = lines[0]


def drop_logprobs(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["inference_logprobs"]


def invent_rollout(lines: list[dict[str, JSON]]) -> None:
    lines[1]["rollouts"][0]["rollout_id"] = "made up"


def rename_sequence(lines: list[dict[str, JSON]]) -> None:
    lines[1]["spans"][0][1][1] += "0"


def drop_row_of_spans(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["spans"][0]


def invert_scores(lines: list[dict[str, JSON]]) -> None:
    lines[1]["scores"] = [1 - score for score in lines[1]["scores"]]


def replace_score(lines: list[dict[str, JSON]]) -> None:
    lines[1]["scores"][0] = 0.25


def drop_scores(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["scores"]


def invent_advantages(lines: list[dict[str, JSON]]) -> None:
    lines[1]["advantages"] = [[1.0] * len(row) for row in lines[1]["tokens"]]


def override_settings(lines: list[dict[str, JSON]]) -> None:
    lines[1]["group_overrides"] = {"advantages": [1.0]}


def change_reward_of_entry(lines: list[dict[str, JSON]]) -> None:
    lines[1]["rollouts"][0]["reward"] = 0.25


def change_message(lines: list[dict[str, JSON]]) -> None:
    lines[1]["messages"][0][-1]["content"] += " "


def drop_messages_of_row(lines: list[dict[str, JSON]]) -> None:
    del lines[1]["messages"][0]


@pytest.mark.parametrize(
    "change",
    [
        invert_scores,
        replace_score,
        drop_scores,
        invent_advantages,
        override_settings,
        change_reward_of_entry,
        change_message,
        drop_messages_of_row,
        rename_sequence,
        drop_row_of_spans,
        train_the_prompt,
        reencode,
        round_logprobs,
        drop_row,
        drop_masks,
        drop_row_of_logprobs,
        drop_logprobs,
        repeat_line,
        invent_rollout,
    ],
)
def test_a_groups_file_that_says_something_else_is_found(
    tmp_path: Path, change: Callable[[list[dict[str, JSON]]], None]
) -> None:
    roll_out(tmp_path)
    rewrite_groups(tmp_path, change)
    assert verified(tmp_path).violation.startswith("groups.jsonl, line 2: T3: ")


def test_a_groups_file_may_have_no_messages(tmp_path: Path) -> None:
    roll_out(tmp_path)
    rewrite_groups(tmp_path, lambda lines: [line["messages"].clear() for line in lines])
    assert verified(tmp_path).ok


def test_a_changed_result_of_a_tool_is_found(tmp_path: Path) -> None:
    def change(trajectory: Trajectory) -> None:
        result = next(each for each in trajectory.messages if each["role"] == "tool")
        result["content"] = "3"

    roll_out(tmp_path)
    rewrite_journal(tmp_path, change)
    check_message(verify_run(tmp_path / "journal.jsonl").violation, "000001-sum-1/0")


def test_a_groups_file_of_an_earlier_version_has_no_spans(tmp_path: Path) -> None:
    roll_out(tmp_path)
    rewrite_groups(tmp_path, lambda lines: [line.pop("spans") for line in lines])
    assert verified(tmp_path).ok


def export_rows(folder: Path, change: Callable[[list[dict[str, JSON]]], None]) -> Path:
    """Export the run's rows to a file, changed."""
    rows = Run(folder).to_rows()
    change(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def keep_some(rows: list[dict[str, JSON]]) -> None:
    del rows[2:4]


@pytest.mark.parametrize("change", [list.copy, keep_some])
def test_exported_rows_are_those_of_the_journal(
    tmp_path: Path, change: Callable[[list[dict[str, JSON]]], None]
) -> None:
    roll_out(tmp_path)
    rows = export_rows(tmp_path, change)
    verdict = verify_run(tmp_path / "journal.jsonl", exported=rows)
    assert (verdict.violation, verdict.exported) == ("", len(rows.read_text().splitlines()))


def move_span(rows: list[dict[str, JSON]]) -> None:
    rows[2]["spans"][1][2] += 1


def forget_spans(rows: list[dict[str, JSON]]) -> None:
    rows[2]["spans"] = []


def train_more(rows: list[dict[str, JSON]]) -> None:
    rows[2]["mask"] = [1] * len(rows[2]["mask"])


def repeat_row(rows: list[dict[str, JSON]]) -> None:
    rows[2] = rows[1]


def invent_row(rows: list[dict[str, JSON]]) -> None:
    rows[2]["rollout_id"] = "made up"


@pytest.mark.parametrize("change", [move_span, forget_spans, train_more, repeat_row, invent_row])
def test_exported_rows_that_say_something_else_are_found(
    tmp_path: Path, change: Callable[[list[dict[str, JSON]]], None]
) -> None:
    roll_out(tmp_path)
    rows = export_rows(tmp_path, change)
    assert verify_run(tmp_path / "journal.jsonl", exported=rows).violation.startswith("rows.jsonl, line 3: T3: rollout")


def test_a_rollout_that_lacks_a_segment_is_found(tmp_path: Path) -> None:
    roll_out(tmp_path, Twice(1), Talkative())
    rows = export_rows(tmp_path, lambda rows: rows.pop(0))
    assert verify_run(tmp_path / "journal.jsonl", exported=rows).violation.endswith("000000-sum-0/0 lacks segment 0")


def drop_line(lines: list[dict[str, JSON]]) -> None:
    del lines[1]


def drop_rollout(lines: list[dict[str, JSON]]) -> None:
    for key in ("tokens", "masks", "scores", "messages", "inference_logprobs", "spans", "versions", "rollouts"):
        del lines[1][key][0]


@pytest.mark.parametrize("change", [drop_line, drop_rollout, list.clear])
def test_rows_that_are_left_out_are_missed(tmp_path: Path, change: Callable[[list[dict[str, JSON]]], None]) -> None:
    roll_out(tmp_path)
    end_run(tmp_path, "done")
    rewrite_groups(tmp_path, change)
    assert re.match(r"groups\.jsonl: T3: rollout 00000[01]-sum-[01]/0 has a score but no", verified(tmp_path).violation)


def test_a_killed_run_has_not_written_all_of_its_lines(tmp_path: Path) -> None:
    roll_out(tmp_path)
    rewrite_groups(tmp_path, drop_line)
    assert verified(tmp_path).ok


def test_a_group_that_was_taken_up_again_and_not_ended_has_no_line(tmp_path: Path) -> None:
    roll_out(tmp_path)
    path = tmp_path / "journal.jsonl"
    again = next(event for event in read_journal(path) if isinstance(event, GroupStarted) and event.group.number == 1)
    path.write_bytes(path.read_bytes() + msgspec.json.encode(again) + b"\n")
    end_run(tmp_path, "interrupted")
    rewrite_groups(tmp_path, drop_line)
    assert verified(tmp_path).ok


def test_a_rollout_that_ends_twice_is_found(tmp_path: Path) -> None:
    roll_out(tmp_path)
    journal = tmp_path / "journal.jsonl"
    (end,) = (line for line in journal.read_bytes().splitlines() if b'"event":"rollout"' in line and b"sum-1/0" in line)
    journal.write_bytes(journal.read_bytes() + end + b"\n")
    check_message(verified(tmp_path).violation, "000001-sum-1/0")


def test_a_rollout_that_was_cut_off_ends_again_when_its_run_goes_on(tmp_path: Path) -> None:
    roll_out(tmp_path)
    path = tmp_path / "journal.jsonl"
    events = list(read_journal(path))
    ends = [place for place, event in enumerate(events) if isinstance(event, RolloutEnded)]
    whole = events[ends[0]]
    assert isinstance(whole, RolloutEnded)
    cut = msgspec.structs.replace(whole.trajectory, reward=None, outcome=Outcome.CANCELLED, blame=Blame.RUN)
    events[ends[0] : ends[0] + 1] = [RolloutEnded(trajectory=cut), RunResumed(), whole]
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert verified(tmp_path).ok


def test_rows_of_the_environments_own_are_counted_and_not_believed(tmp_path: Path) -> None:
    roll_out(tmp_path, WithRows(lambda rollout: TokenRow(tokens=[1, 2], masks=[-100, 2], source="environment")))
    verdict = verified(tmp_path)
    assert verdict.ok
    assert verdict.own_rows == 2
    line = json.loads((tmp_path / "groups.jsonl").read_text())
    assert (line["token_source"], line["tokens"]) == ("environment", [[1, 2], [1, 2]])


def test_nothing_is_proved_by_a_run_that_only_chatted(tmp_path: Path) -> None:
    roll_out(tmp_path, engine=services(tmp_path / "scripted").engine)
    with pytest.raises(ConfigError, match="no recorded tokens"):
        verified(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    roll_out(tmp_path)
    (tmp_path / "groups.jsonl").write_text('{"tokens": [[1]], "masks": "x"}\n')
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        verified(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verify(*argv: str) -> int:
        return main(["verify", *argv])

    roll_out(tmp_path)
    assert verify(str(tmp_path)) == 0
    check_message(capsys.readouterr().out, "hold")
    assert verify(str(tmp_path / "journal.jsonl"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 6
    rewrite_groups(tmp_path, train_the_prompt)
    assert verify(str(tmp_path)) == 1
    assert "line 2: T3" in capsys.readouterr().err
    assert verify(str(tmp_path / "nothing")) == 2
    rows = export_rows(tmp_path, list.copy)
    (tmp_path / "groups.jsonl").unlink()
    assert verify(str(tmp_path), "--rows", str(rows)) == 0
    assert re.search(r"^rows +6$", capsys.readouterr().out, re.MULTILINE)
