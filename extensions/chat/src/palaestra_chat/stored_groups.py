"""Converts stored conversations to the groups that exporters write, for `palaestra export --from sessions`.

Only conversations of users who have consented are read, and secrets in their text are replaced. Invariant: tokens are
exported only if all their text is stored and contains no secret, because tokens cannot be redacted. The text of
sub-agents is not stored.

A conversation becomes a group of one rollout without a reward. With a token-exact server, a conversation has one token
record for each session with the server (each process and each model begins a new one). Token formats get one rollout
for each token record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from palaestra.rollouts.records import Group, Trajectory, TurnRecord
from palaestra_chat.store import ConversationRecord, ConversationStore
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_tokens.ledger import LedgerRecord, SegmentReason

NO_CONSENT = "its user has not consented (palaestra chat --consent yes)"
SECRET = "tokens of a conversation with a secret"  # noqa: S105 - a reason, not a secret
UNREAD = "tokens of a conversation with sub-agents, whose text is not stored and may contain secrets"


@contextmanager
def stored_groups(names: Sequence[str], left_out: Counter[str], *, tokens: bool) -> Iterator[Iterator[Group]]:
    """Open the store of this user, and yield the iterator that `session_groups` returns."""
    with ConversationStore() as store:
        yield session_groups(store, names, left_out, tokens=tokens)


def session_groups(
    store: ConversationStore, names: Sequence[str], left_out: Counter[str], *, tokens: bool
) -> Iterator[Group]:
    """Yield the groups of the named conversations in the order of `names`. If `names` is empty, yield those of all
    conversations, oldest first. With `tokens`, each token record is a rollout. `left_out` counts the excluded
    conversations and token records by reason. Raises `ConfigError` for an unknown name."""
    chosen = [store.find(name) for name in names] or store.conversations(limit=-1)[::-1]
    number = 0
    for record in chosen:
        if not store.users.consent(record.user):
            left_out[NO_CONSENT] += 1
            continue
        trajectories = _trajectories(store, record, left_out, tokens=tokens)
        if not trajectories:
            left_out["no finished turns"] += 1
            continue
        tools = record.settings.get("tools") or []
        yield Group(
            group_id=record.id,
            number=number,
            task_id=record.id,
            toolsets=tuple(record.settings.get("toolsets") or ()),
            tools=tools,
            trajectories=trajectories,
        )
        number += 1


def _trajectories(
    store: ConversationStore, record: ConversationRecord, left_out: Counter[str], *, tokens: bool
) -> list[Trajectory]:
    turns = [turn for turn in store.turns.of(record.id) if turn.state == "done"]
    if not turns:
        return []
    whole = store.history(record.id)
    clean = [redact(message) for message in whole]
    last = turns[-1]
    outcome = Outcome(last.outcome) if last.outcome in [each.value for each in Outcome] else Outcome.CANCELLED
    trajectory = Trajectory(
        rollout_id=f"{record.id}/0",
        group_id=record.id,
        task_id=record.id,
        index=0,
        messages=clean,
        outcome=outcome,
        reward=None,
        error=redacted(last.error),
        prompt_tokens=sum(int(turn.report.get("prompt_tokens", 0)) for turn in turns),
        completion_tokens=sum(int(turn.report.get("completion_tokens", 0)) for turn in turns),
        turns=_turn_records(clean),
        tool_calls_attempted=sum(len(message.get("tool_calls") or ()) for message in clean),
    )
    if not tokens:
        return [trajectory]
    said = store.turns.said(record.id)  # the tokens include text that was undone or summarized
    if clean != whole or redact(said) != said:
        left_out[SECRET] += 1
        return []
    found = []
    for index, (_, _, last_turn, raw) in enumerate(store.ledgers.of(record.id)):
        messages = store.history(record.id, until=last_turn)
        ledger = msgspec.msgpack.decode(raw, type=LedgerRecord)
        if any(segment.reason == SegmentReason.SUBAGENT for segment in ledger.segments):
            left_out[UNREAD] += 1
            continue
        found.append(
            msgspec.structs.replace(
                trajectory,
                rollout_id=f"{record.id}/{index}",
                index=index,
                messages=messages,
                ledger=ledger,
                turns=_turn_records(messages),
            )
        )
    return found


def _turn_records(messages: Sequence[Message]) -> list[TurnRecord]:
    """Return one record for each model call, without token counts, which the store has only for whole turns."""
    replies = [message for message in messages if message.get("role") == "assistant"]
    return [
        TurnRecord(
            number=number,
            finish_reason="tool_calls" if reply.get("tool_calls") else "stop",
            tools=tuple(call["function"]["name"] for call in reply.get("tool_calls") or ()),
        )
        for number, reply in enumerate(replies, 1)
    ]


def redact(value: JSON) -> JSON:
    """Return the value with the secrets in its texts replaced. Images stay as they are."""
    if isinstance(value, str):
        return value if value.startswith("data:image/") else redacted(value)
    if isinstance(value, dict):
        return {key: redact(part) for key, part in value.items()}
    if isinstance(value, list):
        return [redact(part) for part in value]
    return value
