"""Proves from the files of a run that training uses exactly the sampled tokens (invariants T1 to T4), or finds the
first violation.

Checks the ledgers in the journal and, if they are given, the lines of the groups file and the exported rows. The tokens
that the model server reported are trusted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from palaestra.rollouts.events import (
    AnyJournalEvent,
    AttemptDiscarded,
    GroupEnded,
    GroupStarted,
    RolloutEnded,
    RunEnded,
    RunResumed,
    RunStarted,
    TurnTaken,
)
from palaestra.rollouts.export.atropos import encode_line, group_line, line_messages, line_rollout
from palaestra.rollouts.export.token_rows import ExportedRow, exported_rows
from palaestra.rollouts.journal.journal import checksum, read_journal
from palaestra.rollouts.records import CUT_OFF, Group, Trajectory, have_same_scores
from palaestra.rollouts.regraded import Grade, read_grades, with_grade
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE
from palaestra_slots.core.types import JSON
from palaestra_tokens.ledger import (
    LedgerRecord,
    SegmentReason,
    record_rows,
    verify_ledger,
)
from palaestra_tokens.ledger.records import ITEM_BYTES, SampledTurn
from palaestra_tokens.ledger.verify import RepeatedReplies

TRAINED_KEYS = (
    "tokens", "masks", "scores", "inference_logprobs", "spans", "versions", "advantages", "ref_logprobs",
    "overrides", "images", "group_overrides", "generation_params", "distill_token_ids", "distill_logprobs",
)  # fmt: skip
"""The keys of a group's line that a trainer reads, besides the messages."""


@dataclass(slots=True)
class RunVerdict:
    """Counts of the checked parts, the first violation, and a notice that does not break an invariant. `rows` and
    `lines` count the rows and lines of the groups file, `exported` the lines of the file of exported rows."""

    rollouts: int = 0
    without_tokens: int = 0
    own_rows: int = 0
    turns: int = 0
    segments: int = 0
    tokens: int = 0
    trained: int = 0
    lines: int = 0
    rows: int = 0
    exported: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    violation: str = ""
    notice: str = ""

    @property
    def ok(self) -> bool:
        """Whether no violation was found."""
        return not self.violation


def verify_run(journal: Path, groups: Path | None = None, exported: Path | None = None) -> RunVerdict:
    """Check every rollout in the journal, discarded attempts too, and then the lines of the groups file and of the file
    of exported rows.

    Rollouts may have their recorded scores or those that `palaestra grade` gave. Each file is read once. Raises
    `ConfigError` when a file is damaged, no rollout has ended or no rollout has recorded tokens.
    """
    verdict = RunVerdict()
    run = _JournalledRun(grades := read_grades(journal.parent))
    for event in read_journal(journal):
        run.take(event, verdict)
        if not verdict.ok:
            return verdict
    verdict.notice = run.first_replies.notice
    if not verdict.rollouts:
        raise ConfigError(f"{journal} has no finished rollout, so there is nothing to prove")
    if verdict.rollouts == verdict.without_tokens:
        raise ConfigError(
            f"{journal} has no recorded tokens, so there is nothing to prove: the model server returned none. Run with "
            "--openai.server_type sglang, vllm or transformers."
        )
    if groups is not None:
        # a killed run has not written all of its lines
        due = run.due() if run.over else set()
        verdict.violation = next(_line_violations(groups, run.ends, run.written, due, grades, verdict), "")
    if exported is not None and verdict.ok:
        verdict.violation = next(_exported(exported, run.ends, grades, verdict), "")
    return verdict


@dataclass(slots=True)
class _JournalledRun:
    """What the journal of a run has recorded so far: `ends` are the records of its rollouts without conversations, and
    `written` what must be in the lines of the groups file. `results` and `sampled` are those of unfinished rollouts."""

    grades: Mapping[str, Grade]
    ends: dict[str, Trajectory] = field(default_factory=dict)
    written: dict[str, _Written] = field(default_factory=dict)
    results: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    sampled: dict[str, dict[int, SampledTurn]] = field(default_factory=dict)
    ended_groups: set[str] = field(default_factory=set)
    config: Mapping[str, JSON] = field(default_factory=dict)
    first_replies: RepeatedReplies = field(default_factory=RepeatedReplies)
    over: bool = False

    def take(self, event: AnyJournalEvent, verdict: RunVerdict) -> None:
        self.over = isinstance(event, RunEnded)
        match event:
            case RunStarted() | RunResumed():
                self.config = event.config or self.config
            case GroupStarted():  # the resumed group gets its line when it ends again
                self.ended_groups.discard(event.group.group_id)
            case GroupEnded():
                self.ended_groups.add(event.group_id)
            case TurnTaken():
                self._take_turn(event)
            case AttemptDiscarded():
                verdict.violation = self._violation(event.trajectory, verdict)
            case RolloutEnded():
                violation = self._violation(event.trajectory, verdict)
                verdict.violation = self._take_end(event.trajectory) or violation

    def _take_turn(self, event: TurnTaken) -> None:
        _keep_results(event, self.results.setdefault(event.rollout_id, {}))
        if event.sampled and self.config.get("fork"):
            self.sampled.setdefault(event.rollout_id, {})[event.turn] = event.sampled[-1]

    def _violation(self, trajectory: Trajectory, verdict: RunVerdict) -> str:
        return (
            _rollout(trajectory, verdict)
            or _shared(trajectory, self.ends)
            or _branch_violation(trajectory, self.sampled.pop(trajectory.rollout_id, {}))
            or _changed_result(trajectory, self.results.pop(trajectory.rollout_id, {}))
        )

    def _take_end(self, trajectory: Trajectory) -> str:
        """Keep what later checks need, and return the violation of a rollout that ends a second time."""
        before = self.ends.get(trajectory.rollout_id)
        # The conversations of a long run would not fit in memory.
        self.ends[trajectory.rollout_id] = msgspec.structs.replace(trajectory, messages=[], detail={})
        self.written[trajectory.rollout_id] = _Written.of(trajectory, self.grades)
        # At other temperatures, the log-probabilities do not say how likely equal first replies are.
        if trajectory.ledger is not None and not trajectory.is_forked and _temperature(self.config) == 1.0:
            self.first_replies.add(trajectory.ledger)
        # A resumed run rolls those out again that were cut off.
        twice = before is not None and before.blame not in CUT_OFF
        return f"{trajectory.rollout_id}: T3: it ends twice in the journal" if twice else ""

    def due(self) -> set[str]:
        """Return the ids of the rollouts that must be in the groups file: the scored rollouts of ended groups, except
        those of groups that the settings leave out."""
        by_group: dict[str, list[Trajectory]] = {}
        for one in self.ends.values():
            if one.scored and one.origin is None and one.group_id in self.ended_groups:
                by_group.setdefault(one.group_id, []).append(one)
        settings = self.config.get("env")
        # By the settings of the recorded run: a file that it wrote lacks these groups on purpose.
        if isinstance(settings, Mapping) and settings.get("ensure_scores_are_not_same"):
            by_group = {name: all_ for name, all_ in by_group.items() if not have_same_scores(all_)}
        return {one.rollout_id for group in by_group.values() for one in group}


def _temperature(config: Mapping[str, JSON]) -> float | None:
    settings = config.get("env")
    found = settings.get("agent_temperature") if isinstance(settings, Mapping) else None
    return found if isinstance(found, int | float) else None


def _rollout(trajectory: Trajectory, verdict: RunVerdict) -> str:
    """Return the first violation in one rollout, or the empty string."""
    verdict.rollouts += 1
    if trajectory.ledger is None:
        verdict.without_tokens += 1
        claimed = trajectory.row is not None and trajectory.row.source == "engine"
        return f"{trajectory.rollout_id}: T1: its row claims the engine's tokens without a ledger" if claimed else ""
    found = verify_ledger(trajectory.ledger, forked=trajectory.is_forked)
    if found.violation is not None:
        return f"{trajectory.rollout_id}: {found.violation}"
    verdict.turns += found.turns
    verdict.segments += found.segments
    verdict.tokens += found.tokens
    verdict.trained += found.trained
    for segment in trajectory.ledger.segments[1:]:
        verdict.reasons[segment.reason] = verdict.reasons.get(segment.reason, 0) + 1
    return _lost_turn(trajectory, trajectory.ledger) or _own_row(trajectory, trajectory.ledger, verdict)


def _shared(trajectory: Trajectory, ends: Mapping[str, Trajectory]) -> str:
    """Return the first violation in the turns that a branch shares with its parent, or the empty string. The branch's
    first prompt must begin with the parent's tokens, which are trained on only in the parent."""
    fork, ledger = trajectory.parent, trajectory.ledger
    if fork is None:
        return ""
    parent = ends.get(f"{trajectory.group_id}/{fork.index}")
    if parent is None or fork.turn not in parent.fork_points:
        return (
            f"{trajectory.rollout_id}: T3: it continues rollout {fork.index} after turn {fork.turn}, "
            "which is not a fork point"
        )
    if ledger is None or parent.ledger is None or ledger.segments[0].reason != SegmentReason.BRANCH:
        return ""  # a rewritten history has its own prompt
    known = next(turn for turn in parent.ledger.turns if turn.number == fork.turn)
    segment = parent.ledger.segments[known.segment]
    end = ITEM_BYTES * max(span.stop for span in segment.spans if span.turn <= fork.turn)
    first = ledger.segments[0].spans[0]
    prompt = ledger.segments[0].tokens[: ITEM_BYTES * first.stop]
    if prompt[:end] != segment.tokens[:end]:
        return f"{trajectory.rollout_id}: T1: its prompt does not begin with the tokens of rollout {fork.index}"
    return ""


def _branch_violation(trajectory: Trajectory, sampled: Mapping[int, SampledTurn]) -> str:
    """Return the first violation in the turns that a counterfactual rollout shares with a rollout of another run, or
    the empty string. Its first prompt must have the tokens of the latest shared turn, after exactly the tokens that the
    engine received for that turn."""
    origin, ledger = trajectory.origin, trajectory.ledger
    if origin is None or ledger is None or ledger.segments[0].reason != SegmentReason.BRANCH:
        return ""  # a rewritten history has its own prompt
    latest = max((turn for turn in sampled if turn <= origin.turn), default=0)
    if not latest:
        return f"{trajectory.rollout_id}: T1: the tokens of the turns before its own are not recorded"
    prompt = ledger.segments[0].tokens[: ITEM_BYTES * ledger.segments[0].spans[0].stop]
    piece = sampled[latest].pieces[-1]
    sent, at = 0, 0
    # The checksum of a prompt covers its tokens but not their number, so the length is found by trying each.
    while sent != piece.sent and at < len(prompt):
        sent, at = zlib.crc32(prompt[at : at + ITEM_BYTES], sent), at + ITEM_BYTES
    if sent != piece.sent or prompt[at : at + len(piece.ids)] != piece.ids:
        return (
            f"{trajectory.rollout_id}: T1: its prompt does not begin with the tokens of the rollout that it continues"
        )
    return ""


def _lost_turn(trajectory: Trajectory, ledger: LedgerRecord) -> str:
    """Return the first model call that is not in the ledger, or the empty string. Every model call of a conversation
    must be in the conversation's segments of the ledger, in order.

    A sub-agent's record lists its segments; all other segments are the rollout's own.
    """
    owners: dict[int, int] = {}
    subagents = list(trajectory.every_subagent())
    for each in subagents:
        for segment in each.segments:
            if owners.setdefault(segment, each.number) != each.number:
                return f"{trajectory.rollout_id}: T3: segment {segment} is recorded for two sub-agents"
    for number, turns in ((0, trajectory.turns), *((each.number, each.turns) for each in subagents)):
        owned = (turn for turn in ledger.turns if owners.get(turn.segment, 0) == number)
        # `in` advances the iterator, so the calls must be there in this order; the ledger may have others between them.
        recorded = iter([(turn.prompt_tokens, turn.sampled_tokens) for turn in owned])
        shared = 0 if number else trajectory.shared_turns
        for turn in turns[shared:]:
            if (turn.prompt_tokens, turn.completion_tokens) not in recorded:
                what = f"{turn.prompt_tokens} tokens in, {turn.completion_tokens} out"
                whose = f" of sub-agent {number}" if number else ""
                return f"{trajectory.rollout_id}: T3: turn {turn.number}{whose} ({what}) is not in the ledger"
    return ""


def _keep_results(event: TurnTaken, results: dict[str, set[str]]) -> None:
    """Keep a checksum of each tool result of a turn, by the id of its call; a model may use an id twice."""
    for message in event.messages:
        if message.get("role") == "tool" and isinstance(call := message.get("tool_call_id"), str):
            results.setdefault(call, set()).add(checksum([message]))


def _changed_result(trajectory: Trajectory, results: Mapping[str, set[str]]) -> str:
    """Return the first tool result that differs from the one that its turn recorded, or the empty string. A rewritten
    history, which has several segments, may have shortened results."""
    if trajectory.ledger is None or len(trajectory.ledger.segments) != 1:
        return ""
    for message in trajectory.messages:
        call = str(message.get("tool_call_id"))
        if call in results and checksum([message]) not in results[call]:
            return f"{trajectory.rollout_id}: T3: the result of the tool call {call} is not that of its turn"
    return ""


def _own_row(trajectory: Trajectory, ledger: LedgerRecord, verdict: RunVerdict) -> str:
    """Count the environment's own row, if there is one. Such a row is not verified, but if it claims the engine's
    tokens, it must be in the ledger. Returns the violation, or the empty string."""
    row = trajectory.row
    if row is None:
        return ""
    verdict.own_rows += 1
    known = any(row.tokens == each.tokens and row.masks == each.masks for each in record_rows(ledger))
    if row.source == "engine" and not known:
        return f"{trajectory.rollout_id}: T3: its row claims the engine's tokens, but is not in the ledger"
    return ""


class _Rollout(msgspec.Struct):
    rollout_id: str


class _Line(msgspec.Struct):
    """The fields of a group's line that name its rollouts."""

    rollouts: list[_Rollout]


@dataclass(slots=True)
class _Written:
    """What a rollout's line must have, although its trajectory is kept without it: checksums of its messages and of
    its entry in `rollouts`, with the recorded score or the new one."""

    messages: str
    entries: frozenset[str]

    @classmethod
    def of(cls, trajectory: Trajectory, grades: Mapping[str, Grade]) -> _Written:
        entries = (checksum([line_rollout(each)]) for each in (trajectory, with_grade(trajectory, grades)))
        return cls(checksum(line_messages(trajectory)), frozenset(entries))


def _line_violations(
    groups: Path,
    ends: dict[str, Trajectory],
    written: Mapping[str, _Written],
    due: set[str],
    grades: Mapping[str, Grade],
    verdict: RunVerdict,
) -> Iterator[str]:
    """Yield the violations in the groups file. Each line must have every row of its rollouts exactly once, complete,
    and with the scores, advantages and messages of the journal; every rollout in `due` must be in a line."""
    decoder = msgspec.json.Decoder(_Line)
    seen: set[str] = set()
    with groups.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = decoder.decode(raw)
            except UNREADABLE as error:
                raise ConfigError(f"{groups}: line {number} is damaged: {error}") from None
            place = f"{groups.name}, line {number}"
            listed = [each.rollout_id for each in line.rollouts]
            for each in listed:
                if each not in ends or each in seen:
                    yield f"{place}: T3: rollout {each} is {'listed twice' if each in seen else 'not in the journal'}"
                    return
                seen.add(each)
            verdict.lines += 1
            found = msgspec.json.decode(raw)
            verdict.rows += len(found["tokens"]) if isinstance(found.get("tokens"), list) else 0
            problems = _problems(found, [ends[each] for each in listed], written, grades)
            yield from (f"{place}: T3: {problem}" for problem in problems)
    if lost := sorted(due - seen):
        yield f"{groups.name}: T3: rollout {lost[0]} has a score but no line; {len(lost)} lines are missing"


def _problems(
    found: Mapping[str, JSON],
    recorded: list[Trajectory],
    written: Mapping[str, _Written],
    grades: Mapping[str, Grade],
) -> list[str]:
    """Return how a line differs from the journal. A line that was written after `palaestra grade` has the new
    scores."""
    problems = _line_problems(found, recorded, written)
    if problems and any(each.rollout_id in grades for each in recorded):
        regraded = [with_grade(each, grades) for each in recorded]
        return _line_problems(found, regraded, written) and problems
    return problems


def _line_problems(found: Mapping[str, JSON], rollouts: list[Trajectory], written: Mapping[str, _Written]) -> list[str]:
    """Return how a line differs from the one that is made of these rollouts. Its messages are compared by checksum:
    they are not kept in memory."""
    group = Group(group_id="", number=0, task_id="", trajectories=rollouts)
    due_line = group_line(group, env="", model="", messages=False)
    if due_line is None:
        return ["none of its rollouts has a score"]
    return [*_compared(found, due_line), *_compared_messages(found, rollouts, written)]


def _compared(found: Mapping[str, JSON], due: Mapping[str, JSON]) -> Iterator[str]:
    """Yield how a line differs from `due`, the line that the journal gives, in what a trainer reads."""
    # Through JSON and back, because the numbers in the file have gone that way too.
    due = msgspec.json.decode(encode_line({key: due.get(key) for key in TRAINED_KEYS}))
    for key in TRAINED_KEYS:
        given, wanted = found.get(key), due[key]
        if given == wanted or (
            key in ("spans", "versions") and key not in found  # lines of an earlier version have none
        ):
            continue
        if not isinstance(given, list) or not isinstance(wanted, list):
            yield f"{key} is {_short_json(given)}; the journal has {_short_json(wanted)}"
        elif len(given) != len(wanted):
            yield f"{len(given)} rows of {key}; the journal has {len(wanted)}"
        else:
            number = next(place for place, (a, b) in enumerate(zip(given, wanted, strict=True)) if a != b)
            yield f"row {number}: {key} differ from the journal"


def _compared_messages(
    found: Mapping[str, JSON], rollouts: Sequence[Trajectory], written: Mapping[str, _Written]
) -> Iterator[str]:
    """Yield how a line's messages, or its entries in `rollouts`, differ from the journal."""
    # Rollouts without tokens have one row of messages, and rollouts with segments have one per segment.
    owners = [each.rollout_id for each in rollouts if each.scored for _ in range(len(each.rows) or 1)]
    messages = found.get("messages") or []
    if messages and len(messages) != len(owners):
        yield f"{len(messages)} rows of messages; the journal has {len(owners)}"
    for number, (rollout_id, given) in enumerate(zip(owners, messages, strict=False)):
        if not isinstance(given, list) or checksum(given) != written[rollout_id].messages:
            yield f"row {number}: messages differ from the journal"
    for each, entry in zip(rollouts, found["rollouts"], strict=True):
        if checksum([entry]) not in written[each.rollout_id].entries:
            yield f"the entry of rollout {each.rollout_id} differs from the journal"


def _short_json(value: JSON) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _rows_by_segment(trajectory: Trajectory) -> dict[int, ExportedRow]:
    return {each.segment: each for each in exported_rows(trajectory, counterfactual=True)}


def _exported(
    path: Path, ends: dict[str, Trajectory], grades: Mapping[str, Grade], verdict: RunVerdict
) -> Iterator[str]:
    """Yield the violations in a file of exported rows. Each line must be a row of the journal, and no row may appear
    twice. An export may leave out rollouts, but a rollout that appears must have all its rows."""
    decoder = msgspec.json.Decoder(ExportedRow)
    due: dict[str, dict[int, ExportedRow]] = {}
    new: dict[str, dict[int, ExportedRow]] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                row = decoder.decode(raw)
            except UNREADABLE as error:
                raise ConfigError(f"{path}: line {number} is not an exported row: {error}") from None
            verdict.exported += 1
            place = f"{path.name}, line {number}: T3: rollout {row.rollout_id}"
            if row.rollout_id not in ends:
                yield f"{place} is not in the journal"
                return
            if row.rollout_id not in due:
                due[row.rollout_id] = _rows_by_segment(ends[row.rollout_id])
                new[row.rollout_id] = _rows_by_segment(with_grade(ends[row.rollout_id], grades))
            recorded, regraded = (each[row.rollout_id].pop(row.segment, None) for each in (due, new))
            if recorded is None:
                yield f"{place}, segment {row.segment} is a duplicate, or not in the journal"
            elif (row := msgspec.structs.replace(row, annotations=msgspec.UNSET)) not in (recorded, regraded):
                differing = [each for each in row.__struct_fields__ if getattr(row, each) != getattr(recorded, each)]
                yield f"{place}, segment {row.segment} differs from the journal in {', '.join(differing)}"
    for rollout_id, missing in due.items():
        if missing:
            yield f"{path.name}: T3: rollout {rollout_id} lacks segment {min(missing)}"
