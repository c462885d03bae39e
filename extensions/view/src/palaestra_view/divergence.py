"""Where rollouts part: the first place at which sequences differ, for tokens, calls and tests.

A rollout's tokens are those of its own conversation's first row; its calls are the tool calls of its messages, in
order, with their arguments compared as JSON values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.ledger.records import ITEM_BYTES, SegmentRecord
from palaestra_view.check_evidence import listed_tests, short

MOST = 16
"""The maximum number of rollouts that are compared."""


class Call(NamedTuple):
    """One tool call. `turn` counts the assistant's messages from 1; `arguments` is canonical JSON, or the text itself
    if it is not JSON. `message` and `place` find the call in the messages."""

    turn: int
    name: str
    arguments: str
    message: int
    place: int


def first_difference(one: bytes, other: bytes, size: int = ITEM_BYTES) -> int | None:
    """Return the index of the first item of `size` bytes at which two sequences differ; None if they are equal. If one
    is the beginning of the other, they differ where the shorter one ends."""
    if one == other:
        return None
    low, high = 0, min(len(one), len(other))  # they agree before `low`; if they agree before `high`, one has ended
    if one[:high] == other[:high]:
        return high // size
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low // size


def differing_call(one: Sequence[Call], other: Sequence[Call]) -> int | None:
    """Return the index of the first call with another name or other arguments; None if all calls are equal."""
    for index, (first, second) in enumerate(zip_longest(one, other)):
        if first is None or second is None or first[1:3] != second[1:3]:
            return index
    return None


def calls_of(messages: Sequence[Message]) -> Iterator[Call]:
    """Yield the tool calls of a conversation in order."""
    turn = 0
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        turn += 1
        requests = message.get("tool_calls")
        for place, request in enumerate(requests if isinstance(requests, list) else []):
            function = request.get("function") if isinstance(request, Mapping) else None
            function = function if isinstance(function, Mapping) else {}
            name, arguments = str(function.get("name")), function.get("arguments")
            yield Call(turn, name, _canonical(arguments), number, place)


def siblings(rollouts: Sequence[Trajectory], reference: str = "") -> dict[str, JSON]:
    """Compare 2 to `MOST` rollouts with a reference: the one with this id, or else the first with the highest reward.

    Returns `reference`, and for each rollout its `calls`, the first `token` and the first `call` at which it differs
    from the reference (None if it does not), its tools with counts, and the `tests` and `criteria` that differ. `token`
    has the index, the turn, and the tokens of both around that place with their log-probabilities."""
    chosen = next((each for each in rollouts if each.rollout_id == reference), None) or max(
        rollouts, key=lambda each: -1.0 if each.reward is None else each.reward
    )
    calls = {each.rollout_id: list(calls_of(each.messages)) for each in rollouts}
    known = calls[chosen.rollout_id]
    tests = {each.rollout_id: {test.name: test.status for test in listed_tests(each.detail)} for each in rollouts}
    return {
        "reference": chosen.rollout_id,
        "rollouts": [
            {
                "id": each.rollout_id,
                "calls": [
                    [call.turn, call.name, short(call.arguments), call.message] for call in calls[each.rollout_id]
                ],
                "tools": dict(Counter(call.name for call in calls[each.rollout_id]).most_common()),
                "token": None if each is chosen else _token(chosen, each),
                "call": None if each is chosen else differing_call(known, calls[each.rollout_id]),
                "final": _final(each.messages),
            }
            for each in rollouts
        ],
        "tests": _differing([tests[each.rollout_id] for each in rollouts]),
        "criteria": _differing([each.metrics for each in rollouts]),
    }


def _differing(found: Sequence[Mapping[str, JSON]]) -> dict[str, list[JSON]]:
    """Return the entries that are not equal in all mappings, each with its value in every mapping, or None."""
    names = dict.fromkeys(name for each in found for name in each)
    columns = {name: [each.get(name) for each in found] for name in names}
    return {name: column for name, column in columns.items() if any(value != column[0] for value in column)}


def _token(reference: Trajectory, other: Trajectory) -> dict[str, JSON] | None:
    one, two = own_segment(reference), own_segment(other)
    if one is None or two is None:
        return None
    index = first_difference(one.tokens, two.tokens)
    if index is None:
        return None
    span = next((each for each in two.spans if each.start <= index < each.stop), None)
    return {"index": index, "turn": span.turn if span else None, "kind": span.kind if span else "end"}


def own_segment(trajectory: Trajectory) -> SegmentRecord | None:
    """Return the first segment of the rollout's own conversation, or None if no tokens were recorded."""
    if trajectory.ledger is None:
        return None
    others = trajectory.of_subagents
    return next((each for number, each in enumerate(trajectory.ledger.segments) if number not in others), None)


def _final(messages: Iterable[Message]) -> str:
    text = ""
    for message in messages:
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            text = message["content"] or text
    return text[:2000]


def _canonical(arguments: JSON) -> str:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError, TypeError):
        return str(arguments)
