"""The format `rows`: exact tokens, in one line per segment of a rollout, for trainers that take token ids.

Within a segment the history only grows, so a rollout whose history was rewritten has several segments. Over all
segments, each sampled token has mask 1 exactly once (invariant T3). `docs/training.md` shows how to convert lines for
TRL and Tinker. With a tokenizer, the texts of a rollout without sampled tokens are encoded, as a reference solution for
supervised training. Invariant: a rollout that has only placeholder tokens is exported only if the user allows
placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import IO

import msgspec

from palaestra.rollouts.export.exporter import Encoding, ExportMeta, ExportReport, taught
from palaestra.rollouts.records import PLACEHOLDER, Group, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Label
from palaestra_tokens.ledger import ENCODED, UNTRAINED, SequenceSpan, TokenRow

ROW_SCHEMA = "palaestra.row/1"


WITHOUT_TOKENS = "without tokens"


class ExportedRow(msgspec.Struct, kw_only=True):
    """One line of the file. The fields from `prompt_ids` to `policy_version` are in the order of a trainer's batch row.

    `prompt_ids[P]` are the tokens before the first sampled one; `completion_ids[T]`, `mask[T]` (1 where the model
    sampled, 0 where the environment wrote) and `logprobs[T]` (the engine's own, 0.0 where mask is 0; null if there are
    none) describe the tokens after them. `reward` is the reward of the whole rollout, null if the rollout is unscored.
    `policy_version` is the version that sampled the segment, null if there are several or none is known; `versions` has
    (start, stop, version), where start and stop are positions in the completion. `spans` covers prompt and completion
    without gaps and names the sampled sequence of every token; it is empty for tokens that no engine sampled. `segment`
    counts from 0; `segments` is the rollout's number of lines.

    In runs with tree rollouts, which earlier versions made, `parent` is (rollout id, turn): the rollout continues that
    rollout after that turn.

    A row of a counterfactual rollout has `origin`: (run id, rollout id, turn), the point that the rollout continues.

    `official` is the benchmark's own verdict and `labels` are the signs of reward hacking (`name`, `evidence`,
    `certain`), so that a trainer can weigh them; `annotations` has what people have said about the rollout (`tags`,
    `verdict`, `notes`). Each is omitted if the rollout has none.
    """

    schema: str = ROW_SCHEMA
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    reward: float | None
    group_id: str
    segment: int
    policy_version: str | None
    versions: list[tuple[int, int, str]]
    spans: list[SequenceSpan]
    segments: int
    rollout_id: str
    task_id: str
    index: int
    outcome: str
    reason: str
    finish_reason: str
    source: str
    parent: tuple[str, int] | msgspec.UnsetType = msgspec.UNSET
    origin: tuple[str, str, int] | msgspec.UnsetType = msgspec.UNSET
    official: float | msgspec.UnsetType = msgspec.UNSET
    labels: list[Label] | msgspec.UnsetType = msgspec.UNSET
    annotations: dict[str, JSON] | msgspec.UnsetType = msgspec.UNSET


class RowsExporter:
    """One `ExportedRow` per line. A rollout without sampled tokens is an error unless placeholders are allowed."""

    name = "rows"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines. Raises `ConfigError` for a rollout whose tokens are missing or contradict each other. A
        rollout that ended before the model had replied is left out instead."""
        report = ExportReport()
        encoder = msgspec.json.Encoder()
        for group in groups:
            for trajectory in report.chosen(group, meta):
                # Nothing was sampled, so there is nothing to train on; that is no damage to the export.
                if trajectory.unsaid and not meta.placeholders:
                    report.left_out[WITHOUT_TOKENS] += 1
                    continue
                # A format is used only for rollouts that were played without tokens; recorded tokens are never encoded
                # again.
                made = None
                if meta.encoding is not None and not trajectory.has_tokens:
                    made = _encoded_rows(trajectory, group, meta, meta.encoding, report)
                    if not made:
                        continue
                else:
                    _require_tokens(trajectory, meta)
                rows = exported_rows(trajectory, counterfactual=True, made=made)
                if not rows:
                    report.left_out[WITHOUT_TOKENS] += 1
                    continue
                said = meta.judgements.get(trajectory.rollout_id)
                annotations = msgspec.UNSET if said is None else said.to_dict()
                for row in rows:
                    out.write(encoder.encode(msgspec.structs.replace(row, annotations=annotations)) + b"\n")
                report.wrote(_remarks(rows), records=len(rows))
        if meta.placeholders and not report.records and report.left_out[WITHOUT_TOKENS]:
            raise ConfigError(
                "no rollout has tokens, not even placeholders: the run's model server returned none. Run with a "
                "token-exact server (--openai.server_type sglang, vllm or transformers), or encode the texts for "
                "supervised training by an export with a tokenizer"
            )
        return report


def _encoded_rows(
    trajectory: Trajectory, group: Group, meta: ExportMeta, encoding: Encoding, report: ExportReport
) -> list[TokenRow]:
    """Return the rows of a rollout whose tokens were not sampled. Counts the rollout as left out and returns none if it
    has no work. Raises `ConfigError` if its texts cannot be encoded."""
    from palaestra_tokens.token_exact.demonstrations import demonstration_rows  # imported here: few exports need it

    messages = taught(trajectory, report)
    if not messages:
        return []
    replies = sum(message.get("role") == "assistant" for message in trajectory.messages)
    body = (meta.config.get("env") or {}).get("extra_body") or {}
    try:
        return demonstration_rows(
            encoding.chat_format,
            messages,
            group.tools,
            parser=encoding.parser,
            variables=body.get("chat_template_kwargs"),
            examples=replies - len(trajectory.turns),
            rollout_id=trajectory.rollout_id,
        )
    except ConfigError as error:
        raise ConfigError(f"rollout {trajectory.rollout_id} cannot be encoded: {error}") from error


def exported_rows(
    trajectory: Trajectory, *, counterfactual: bool = False, made: list[TokenRow] | None = None
) -> list[ExportedRow]:
    """Return the training rows of one rollout, from its record or from the rows `made` of its texts. Raises
    `ConfigError` if arrays differ in length, the mask of a trained token is not the token itself, or the reward or a
    log-probability is not finite; also for a rollout that continues a rollout of another run, unless `counterfactual`
    is true."""
    if trajectory.origin is not None and not counterfactual:
        raise ConfigError(
            f"{trajectory.rollout_id} is counterfactual: it continues {trajectory.origin.rollout_id} of the run "
            f"{trajectory.origin.run_id}. To train on it, pass counterfactual=True"
        )
    rows = trajectory.rows if made is None else made
    # A row without trained tokens teaches nothing. A row that the environment made stays as it is.
    if trajectory.row is None or made is not None:
        rows = [row for row in rows if _first_trained(row) < len(row.tokens)]
    elif trajectory.turns:
        rows = [msgspec.structs.replace(trajectory.row, finish_reason=trajectory.turns[-1].finish_reason or "")]
    for row in rows:
        _check_row(row, trajectory)
    exported = [_exported(row, trajectory, len(rows)) for row in rows]
    if trajectory.parent is not None:
        parent = f"{trajectory.group_id}/{trajectory.parent.index}", trajectory.parent.turn
        exported = [msgspec.structs.replace(each, parent=parent) for each in exported]
    if (origin := trajectory.origin) is not None:
        mark = origin.run_id, origin.rollout_id, origin.turn
        exported = [msgspec.structs.replace(each, origin=mark) for each in exported]
    return exported


def _first_trained(row: TokenRow) -> int:
    """Return the index at which the completion begins; the row's length if nothing is trained."""
    return next((place for place, mask in enumerate(row.masks) if mask != UNTRAINED), len(row.tokens))


def _check_row(row: TokenRow, trajectory: Trajectory) -> None:
    where = f"rollout {trajectory.rollout_id}, segment {row.segment}"
    lengths = {len(row.tokens), len(row.masks), *(() if row.logprobs is None else [len(row.logprobs)])}
    if len(lengths) != 1:
        raise ConfigError(f"{where}: tokens, masks and logprobs differ in length: {sorted(lengths)}")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise ConfigError(f"{where}: the reward {trajectory.reward} is not a finite number")
    # Rows that were made from text have no log-probabilities; then only the masks are checked.
    logprobs = row.logprobs or [0.0] * len(row.tokens)
    for place, (token, mask, logprob) in enumerate(zip(row.tokens, row.masks, logprobs, strict=True)):
        if mask == UNTRAINED:
            continue
        if mask != token:
            raise ConfigError(f"{where}, token {place}: the mask is {mask}, neither {UNTRAINED} nor the token {token}")
        if not math.isfinite(logprob):
            raise ConfigError(f"{where}, token {place}: the log-probability {logprob} is not a finite number")


def _exported(row: TokenRow, trajectory: Trajectory, segments: int) -> ExportedRow:
    start = _first_trained(row)
    mask = [int(each != UNTRAINED) for each in row.masks[start:]]
    logprobs = None
    if row.logprobs is not None:
        # Untrained tokens have no log-probability. Trainers multiply by the mask, so the placeholder must be finite.
        logprobs = [each if on else 0.0 for each, on in zip(row.logprobs[start:], mask, strict=True)]
    policies = {version for _, _, version in row.versions}
    return ExportedRow(
        prompt_ids=row.tokens[:start],
        completion_ids=row.tokens[start:],
        mask=mask,
        logprobs=logprobs,
        reward=trajectory.reward,
        group_id=trajectory.group_id,
        segment=row.segment,
        # Only a row that one policy has sampled has one version; `versions` has the others.
        policy_version=policies.pop() or None if len(policies) == 1 else None,
        versions=[(begin - start, stop - start, version) for begin, stop, version in row.versions if stop > begin],
        spans=row.spans,
        segments=segments,
        rollout_id=trajectory.rollout_id,
        task_id=trajectory.task_id,
        index=trajectory.index,
        outcome=trajectory.outcome.value,
        reason=row.reason,
        finish_reason=row.finish_reason,
        source=row.source,
        official=msgspec.UNSET if trajectory.official is None else trajectory.official,
        labels=trajectory.labels or msgspec.UNSET,
    )


def _require_tokens(trajectory: Trajectory, meta: ExportMeta) -> None:
    if not meta.placeholders and not trajectory.has_tokens:
        shape = "" if trajectory.row is None else ", or export with --placeholders; such rows train nothing"
        raise ConfigError(
            f"rollout {trajectory.rollout_id} has no sampled tokens: its model server returned none. Run with a "
            "token-exact server (--openai.server_type sglang, vllm or transformers), encode its texts for supervised "
            f"training by an export with a tokenizer{shape}"
        )


def _remarks(rows: list[ExportedRow]) -> list[str]:
    remarks = []
    if any(row.source == PLACEHOLDER for row in rows):
        remarks.append("has placeholder tokens: nothing to train")
    if any(row.source == ENCODED for row in rows):
        remarks.append("has tokens encoded from text: for supervised training only")
    elif any(row.logprobs is None for row in rows):
        remarks.append("has no log-probabilities")
    if len(rows) > 1:
        remarks.append("has several segments, each with the same reward")
    return remarks
