"""Groups as JSON lines in the Atropos group shape, for trainers and `jq`. A run writes them to its groups file as its
groups finish, and the format `atropos` makes the same lines from the journal.

One line per group holds the scored trajectories, in index order. A rollout without a reward cannot be trained on, so it
appears only under Palaestra's own key `rollouts`, with its outcome and its blame. The file is derived from the journal,
which is the record.

Invariants: lines are in the order of the groups' numbers; `add` returns once its line is on disk, unless the line waits
for an earlier group; an existing file is replaced only with `again`. Source of the format: `ScoredData` of atroposlib
0.4, where every message has `role` and `content` and absent lists are empty.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from palaestra.rollouts.records import Group, Trajectory, verdict_fields
from palaestra_slots.core.io.durable_files import writing
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.ledger import TokenRow

if TYPE_CHECKING:
    from palaestra.rollouts.export.exporter import ExportMeta, ExportReport

GROUP_LINE_SCHEMA = "palaestra.atropos_group/1"

_NO_TOKENS = TokenRow(tokens=[], masks=[])
_ROW_KEYS = ("advantages", "ref_logprobs", "overrides", "images")
_DISTILLED = ("distill_token_ids", "distill_logprobs")
"""Keys of an Atropos item that an environment may put into `Trajectory.extra`, one value per rollout."""


def group_line(group: Group, *, env: str, model: str, messages: bool = True) -> dict[str, JSON] | None:
    """Return the group as one JSON object, or None if none of its rollouts was scored.

    It has `tokens[G][T]`, `masks[G][T]` (-100 for untrained tokens), `scores[G]`, `inference_logprobs[G][T]` if every
    row has them, and `spans[G]`, the `SequenceSpan`s of each row. If the model server names its weights, it has
    `versions[G]`, the (start, stop, policy version) of each row's sampled spans. If `messages` is False, the list
    `messages` is empty.
    A rollout whose history was rewritten has several rows, each with its score and messages; `rows` in `rollouts`
    counts them. Raises `ValueError` if a row's lists differ in length, a score is not finite, a message has no role or
    `group_overrides` is not a mapping.
    """
    trajectories = sorted(group.trajectories, key=lambda trajectory: trajectory.index)
    scored = [trajectory for trajectory in trajectories if trajectory.scored]
    if not scored:
        return None
    owners, rows = list[Trajectory](), list[TokenRow]()
    for trajectory in scored:
        checked = _checked_rows(trajectory)
        owners += [trajectory] * len(checked)
        rows += checked

    def column(name: str) -> list[JSON]:
        return [getattr(row, name) for row in rows]

    # A trainer of Atropos waits for `group_size` rows. A rewritten history has several rows, an unscored rollout has
    # none.
    overrides = dict(_overrides(scored[0]))
    if len(rows) != len(trajectories):
        overrides["group_size"] = len(rows)
    line: dict[str, JSON] = {
        "tokens": column("tokens"),
        "masks": column("masks"),
        "scores": [_checked_score(trajectory) for trajectory in owners],
        "messages": [line_messages(trajectory) for trajectory in owners] if messages else [],
        **{key: _from_extra(owners, key) for key in _ROW_KEYS},
        "group_overrides": overrides,
        "generation_params": scored[0].extra.get("generation_params"),
        **{key: _from_extra(owners, key) or None for key in _DISTILLED},
    }
    if None not in (logprobs := column("logprobs")):
        line["inference_logprobs"] = logprobs
    return line | {
        "schema": GROUP_LINE_SCHEMA,
        "env": env,
        "model": model,
        "group_id": group.group_id,
        "task_id": group.task_id,
        "toolsets": list(group.toolsets),
        "tools_hash": group.tools_hash,
        "token_source": _token_source(rows),
        "spans": column("spans"),
        **({"versions": versions} if any(versions := column("versions")) else {}),
        "rollouts": [line_rollout(trajectory) for trajectory in trajectories],
    }


def counterfactual(group: Group) -> list[Trajectory]:
    """Return the rollouts of a group that continue a rollout of another run."""
    return [each for each in group.trajectories if each.origin is not None]


def check_own(trajectory: Trajectory) -> None:
    """Raise `ValueError` if a line cannot hold the values that an environment put into a trajectory."""
    if trajectory.row is not None:
        _check_row(trajectory.row, trajectory)
    line_messages(trajectory)
    _overrides(trajectory)


def _checked_rows(trajectory: Trajectory) -> list[TokenRow]:
    rows = trajectory.rows or [_NO_TOKENS]
    for row in rows:
        _check_row(row, trajectory)
    return rows


def _check_row(row: TokenRow, trajectory: Trajectory) -> None:
    lengths = {len(row.tokens), len(row.masks), *(() if row.logprobs is None else [len(row.logprobs)])}
    if len(lengths) != 1:
        raise ValueError(f"rollout {trajectory.rollout_id}: tokens, masks and logprobs differ in length: {lengths}")


def _overrides(trajectory: Trajectory) -> Mapping[str, JSON]:
    found = trajectory.extra.get("group_overrides") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"rollout {trajectory.rollout_id}: group_overrides is {type(found).__name__}, not a mapping")
    return found


def _checked_score(trajectory: Trajectory) -> float:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise ValueError(f"rollout {trajectory.rollout_id}: reward {trajectory.reward} is not a finite number")
    return trajectory.reward


def line_messages(trajectory: Trajectory) -> list[Message]:
    """Return the messages of a rollout as a line has them. Raises `ValueError` if one has no role."""
    return [_with_content(message, trajectory) for message in trajectory.messages]


def _with_content(message: Message, trajectory: Trajectory) -> Message:
    """Return the message, with `content` set to None if it is missing: the API server requires the key, but some
    clients omit it next to tool calls. Raises `ValueError` if the message has no role."""
    if not message.get("role"):
        raise ValueError(f"rollout {trajectory.rollout_id}: a message has no role: {str(message)[:200]}")
    return message if "content" in message else {**message, "content": None}


def _from_extra(scored: list[Trajectory], key: str) -> list[JSON]:
    """Return one value per row, or the empty list if a row has none, since a gap would misalign the rows."""
    values = [trajectory.extra.get(key) for trajectory in scored]
    return [] if any(value is None for value in values) else values


def _token_source(rows: list[TokenRow]) -> str:
    sources = {row.source for row in rows}
    return sources.pop() if len(sources) == 1 else "mixed"


def line_rollout(trajectory: Trajectory) -> dict[str, JSON]:
    """Return what the key `rollouts` of a line has for a rollout."""
    return {
        "rollout_id": trajectory.rollout_id,
        "index": trajectory.index,
        **({} if trajectory.origin is None else {"origin": msgspec.to_builtins(trajectory.origin)}),
        **outcome_fields(trajectory),
        "prompt_tokens": trajectory.prompt_tokens,
        "completion_tokens": trajectory.completion_tokens,
        "turns": len(trajectory.turns),
        "rows": (len(trajectory.row_sizes) or 1) if trajectory.scored else 0,
        "tool_errors": len(trajectory.tool_errors),
    }


def outcome_fields(trajectory: Trajectory) -> dict[str, JSON]:
    """Return the fields of Palaestra's record that report how a rollout ended."""
    return {
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        **verdict_fields(trajectory),
        "blame": trajectory.blame.value if trajectory.blame else None,
        "error": trajectory.error,
        "metrics": trajectory.metrics,
        "detail": trajectory.detail,
    }


def encode_line(line: JSON) -> bytes:
    """Return the value as UTF-8 JSON with a newline. A lone surrogate, which UTF-8 cannot hold, is escaped."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"


def claim_path(path: Path) -> Path:
    """Create an empty file at `path`, or at the first free one of `path_1`, `path_2`, …, for the caller alone.

    Two concurrent processes get two files. Parent directories are created. Raises `OSError`, for example if `path` is a
    directory.
    """
    # `touch` would only report that it exists, and the run would then write to a new file next to the directory.
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory, so name a file in it", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, count = path, 0
    while True:
        try:
            candidate.touch(mode=0o600, exist_ok=False)
            return candidate
        except FileExistsError:
            count += 1
            candidate = path.with_name(f"{path.stem}_{count}{path.suffix}")


class GroupsFile:
    """The growing JSONL file of a run. Groups arrive as they finish and are written in the order of their numbers.

    `path` is the claimed file. With `again`, it is the given file. Its content is replaced when the first group is
    written, so a resumed run that adds no group leaves the file unchanged. `add` and `skip` block until the data is
    written and synced, may be called from worker threads, and raise `DiskError`. A line that waits for an earlier group
    is kept in an unnamed temporary file in the same folder, so the wait for one long task costs no memory.
    """

    def __init__(self, path: Path, *, env: str, model: str, messages: bool = True, again: bool = False) -> None:
        with writing(path):
            self.path = path if again else claim_path(path)
            # Unbuffered, because `_fetch` reads with `pread`, which does not see what is still in a buffer.
            self._aside = tempfile.TemporaryFile(dir=self.path.parent, buffering=0)  # noqa: SIM115 - closed in `close`
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file: IO[bytes] | None = os.fdopen(fd, "wb")
        self._replaced = False
        self._env = env
        self._model = model
        self._messages = messages
        self._next = 0
        self._waiting: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> GroupsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, group: Group) -> None:
        """Add a finished group. A group without any score has its place in the order but gets no line. Neither has a
        group with counterfactual rollouts, because trainers read this file."""
        line = None
        if not counterfactual(group):
            line = group_line(group, env=self._env, model=self._model, messages=self._messages)
        self._take_line(group.number, b"" if line is None else encode_line(line))

    def skip(self, number: int) -> None:
        """Stop waiting for the group with this number."""
        self._take_line(number, b"")

    def close(self) -> None:
        """Write the lines that still wait for a missing group, in the order of the groups' numbers, and close the file.
        Idempotent.

        Raises `DiskError`, after closing.
        """
        with self._lock:
            if self._file is None:
                return
            try:
                for number in sorted(self._waiting):
                    self._write_lines(self._fetch(number))
            finally:
                self._waiting.clear()
                self._aside.close()
                file, self._file = self._file, None
                with writing(self.path):  # the file is buffered, so data of a failed write may remain
                    file.close()

    def _take_line(self, number: int, line: bytes) -> None:
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path} is already closed, so group {number} cannot be added")
            if number < self._next or number in self._waiting:
                raise ValueError(f"group {number} was already added to {self.path}")
            self._replace()
            if number > self._next:
                self._put_aside(number, line)
                return
            ready = bytearray(line)
            self._next += 1
            while self._next in self._waiting:
                ready += self._fetch(self._next)
                self._next += 1
            self._write_lines(bytes(ready))
            if not self._waiting:
                self._aside.truncate(0)

    def _replace(self) -> None:
        """Empty the file that an earlier part of the run wrote, once, before the first group is added."""
        assert self._file is not None
        if not self._replaced and os.fstat(self._file.fileno()).st_size:
            with writing(self.path):
                os.ftruncate(self._file.fileno(), 0)
        self._replaced = True

    def _put_aside(self, number: int, line: bytes) -> None:
        place = self._aside.seek(0, os.SEEK_END)
        self._waiting[number] = place, len(line)
        written = 0
        with writing(self.path):
            # An unbuffered file may write a part of the data, as the system call does.
            while written < len(line):
                written += self._aside.write(line[written:])

    def _fetch(self, number: int) -> bytes:
        place, size = self._waiting.pop(number)
        return os.pread(self._aside.fileno(), size, place)

    def _write_lines(self, lines: bytes) -> None:
        if lines:
            assert self._file is not None
            with writing(self.path):
                self._file.write(lines)
                self._file.flush()
                os.fsync(self._file.fileno())


class AtroposExporter:
    """One line per group. Whatever the options, unscored rollouts appear only under the line's key `rollouts`.

    The run's own settings decide whether lines have messages, and whether groups of equal scores, from which a policy
    gradient learns nothing, are left out. If the export includes everything, these groups are written too.
    """

    name = "atropos"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines."""
        # imported here: most runs make no exports
        from palaestra.rollouts.export.exporter import COUNTERFACTUAL, UNSCORED, ExportReport

        report = ExportReport()
        settings = meta.config.get("env")
        settings = settings if isinstance(settings, Mapping) else {}
        differing = settings.get("ensure_scores_are_not_same", False) and not meta.everything
        for group in groups:
            if not meta.counterfactual and (continued := counterfactual(group)):
                report.left_out[COUNTERFACTUAL] += len(continued)
                group.trajectories = [each for each in group.trajectories if each.origin is None]
            scored = group.scored
            report.left_out.update({UNSCORED: len(group.trajectories) - len(scored)})
            if differing and group.same_scores:
                report.left_out["in a group of equal scores"] += len(scored)
                continue
            line = group_line(group, env=meta.env, model=meta.model, messages=settings.get("include_messages", True))
            if line is not None:
                for entry in line["rollouts"] if meta.judgements else ():
                    if (said := meta.judgements.get(entry["rollout_id"])) is not None:
                        entry["annotations"] = said.to_dict()
                out.write(encode_line(line))
                report.records += 1
                report.rollouts += len(scored)
                report.remarks["has no tokens: its model server returned none, so a trainer has nothing to train"] += (
                    sum(not each.has_tokens for each in scored)
                )
        return report
