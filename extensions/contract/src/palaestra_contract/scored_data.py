"""Training rows as class environments write them: `ScoredDataItem` for one rollout, `ScoredDataGroup` for a group."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from palaestra.rollouts.export.chat_messages import chat_messages
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, Message, number

Row = Mapping[str, JSON]

PER_ROLLOUT = (
    *("advantages", "ref_logprobs", "inference_logprobs", "overrides", "messages", "images"),
    *("distill_token_ids", "distill_logprobs"),
)
"""Keys of a group that may hold one value per rollout, in addition to tokens, masks and scores."""

ROW_KEYS = frozenset({"tokens", "masks", "scores", "messages", "token_source", "inference_logprobs"})
"""The keys of a training row that are fields of a trajectory."""


class ScoredDataItem(TypedDict, total=False):
    """The training row of one rollout. `tokens[T]`, `masks[T]` (-100 if not trained) and `scores` are required."""

    tokens: list[int]
    masks: list[int]
    scores: float
    messages: list[Message] | None
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    inference_logprobs: list[float] | None
    overrides: dict[str, JSON] | None
    images: JSON
    token_source: str


class ScoredDataGroup(TypedDict, total=False):
    """The rows of a group, each list in the order of its rollouts."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[list[Message]] | None
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    generation_params: dict[str, JSON] | None
    group_overrides: dict[str, JSON] | None
    overrides: list[dict[str, JSON]] | None
    images: JSON


_UNPACK = dis.opmap["UNPACK_SEQUENCE"]

PLACEHOLDER = "placeholder"
"""The token source of rows whose server returns no tokens."""


def placeholder_tokens(messages: Sequence[Message], tokenizer: JSON = None) -> list[int]:
    """Return tokens for a rollout whose server returned none, so that its row is complete: those of the conversation's
    text or, without a tokenizer, numbers."""
    if tokenizer is not None:
        text = "\n".join(str(message["content"]) for message in messages if message.get("content"))
        return [*tokenizer.encode(text)]
    length = sum(len(str(message.get("content") or "")) for message in messages)
    return list(range(min(length // 4, 128)))


class ScoredRow(dict[str, JSON]):
    """A training row that also unpacks into `(row, [])`, because some scripts expect a row and others a pair from the
    hook that builds it. Every other iteration yields the row's keys."""

    def __iter__(self) -> Iterator[JSON]:
        # Only the caller's current instruction distinguishes `row, backlog = …` from a loop over the keys.
        caller = sys._getframe(1)
        code = caller.f_code.co_code
        unpacks = code[caller.f_lasti : caller.f_lasti + 2] == bytes((_UNPACK, 2))
        return iter((self, [])) if unpacks else super().__iter__()


def grouped(rows: Sequence[ScoredDataItem]) -> ScoredDataGroup | None:
    """Return one group of these rows; None if there are none. A key that some rows lack gets an empty list."""
    names = [name for name in ScoredDataItem.__annotations__ if name in ScoredDataGroup.__annotations__]
    lists = {name: [row.get(name) for row in rows] for name in names}
    group: JSON = {name: [] if any(value is None for value in values) else values for name, values in lists.items()}
    return group if rows else None


def checked_row(row: object, task_id: str) -> Row:
    """Return the row if it can be recorded; a group of one row stands for the row. Otherwise, raises `TaskError` with
    the problem."""
    if isinstance(row, Mapping) and isinstance(row.get("scores"), list) and len(row["scores"]) == 1:
        (row,) = rows_of(row, task_id)
    if not isinstance(row, Mapping):
        raise TaskError(f"{task_id}: a row is {type(row).__name__}, not a ScoredDataItem")
    for key in ("tokens", "masks", "scores"):
        if row.get(key) is None:
            raise TaskError(f"{task_id}: a row lacks {key}")
    if number(row["scores"]) is None:
        raise TaskError(f"{task_id}: the value of scores in a row is {type(row['scores']).__name__}, not a number")
    lengths = {key: len(row[key]) for key in ("tokens", "masks", "inference_logprobs") if row.get(key)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{count} {key}" for key, count in lengths.items())
        raise TaskError(f"{task_id}: a row has {told}; all must have one entry per token")
    return row


def rows_of(group: object, task_id: str) -> list[Row]:
    """Return the rows of a group, of a list of groups, or of a list of rows. Raises `TaskError` for anything else, and
    for a row that cannot be recorded."""
    if isinstance(group, Sequence) and not isinstance(group, (str, bytes)):
        given = [each for each in group if each is not None]
        if given and all(isinstance(each, Mapping) and isinstance(each.get("scores"), list) for each in given):
            return [row for each in given for row in rows_of(each, task_id)]
        return [checked_row(row, task_id) for row in given]
    if not isinstance(group, Mapping) or not isinstance(group.get("tokens"), Sequence):
        raise TaskError(f"{task_id}: a group is {type(group).__name__}, not a ScoredDataGroup or a list of rows")
    count = len(group["tokens"])
    lists = {key: group[key] for key in ("tokens", "masks", "scores", *PER_ROLLOUT) if group.get(key)}
    for key, values in lists.items():
        if len(values) != count:
            raise TaskError(f"{task_id}: a group has {count} rows of tokens, but {len(values)} of {key}")
    shared = {key: value for key, value in group.items() if key not in lists and value is not None}
    rows = [{**shared, **{key: values[index] for key, values in lists.items()}} for index in range(count)]
    return [checked_row(row, task_id) for row in rows]


MOST_RESULT = 500
"""The maximum number of characters of a tool's result in a shown rollout."""


def format_trajectory(messages: Sequence[Message]) -> str:
    """Return a conversation as readable text: the speakers, their messages, the calls and the beginnings of the
    results."""
    parts = []
    for said in chat_messages(messages):
        if said.role == "tool":
            parts.append(f"[TOOL RESULT] {said.text[:MOST_RESULT]}{'...' if len(said.text) > MOST_RESULT else ''}")
            continue
        parts += [f"[REASONING] {said.reasoning}"] if said.reasoning else []
        parts += [f"[{said.role.upper()}]\n{said.text}"] if said.text else []
        parts += [f"[TOOL CALL] {call.name}({call.arguments})" for call in said.calls]
    return "\n\n".join(parts)


def row_and_backlog(answer: JSON) -> tuple[JSON, list[JSON]]:
    """Split the answer of a `collect_` method into the row and the backlog. Raises `TaskError` unless it is a pair or a
    `ScoredRow`."""
    if isinstance(answer, ScoredRow):
        return answer, []
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TaskError(f"it must return a pair (row, items to draw next), but returned {answer!r:.100}")
    return answer[0], list(answer[1] or ())


def is_of(row: Row, given: Row) -> bool:
    """Return whether `row` holds the same list object of tokens or of messages as the row `given`; everything else may
    differ."""
    return any(row.get(key) is given.get(key) for key in ("tokens", "messages") if given.get(key))
