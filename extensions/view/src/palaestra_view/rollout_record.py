"""A rollout as the viewer's page gets it: everything that its record has, with long texts cut.

A text of more than `LONG_CHARS` characters becomes a mapping with its beginning, its end, its length and its `path`, by
which `text_at` finds the whole text again. So a command's output of 50 MB costs the page nothing until a reader asks
for the next part of it, and nothing is lost.
"""

from __future__ import annotations

import base64
import itertools
import shlex
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from palaestra.rollouts.environment import MISSING
from palaestra.rollouts.events import GroupStarted, TurnTaken
from palaestra.rollouts.observe.verdicts import official_name, official_words
from palaestra.rollouts.records import PLACEHOLDER, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Outcome
from palaestra_tokens.ledger import LedgerRecord, TokenRow
from palaestra_tokens.ledger.records import ITEM_BYTES, packed, unpacked_ids
from palaestra_view.check_evidence import CUT, check_facts, nonzero_exits, short
from palaestra_view.run_index import COMMAND, RunIndex, number_of

if TYPE_CHECKING:
    from palaestra_view.divergence import Call

LONG_CHARS = 20_000
_HEAD_CHARS, _TAIL_CHARS = 12_000, 4_000

_MOST_CHANGES, _CHANGE_CHARS = 100, 300
_ABSENT = object()

_PARTS = (
    "messages", "turns", "tool_errors", "inner_calls", "subagents", "labels", "metrics", "detail", "outcome", "reward",
    "official", "blame", "error", "prompt_tokens", "completion_tokens", "cost", "parent", "fork_points", "origin",
    "tool_calls_attempted", "tool_calls_schema_valid", "extra", "beside", "task_id", "group_id", "index", "state",
)  # fmt: skip

Names = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token."""


def rollout_record(index: RunIndex, rollout_id: str, long_chars: int = LONG_CHARS) -> dict[str, JSON]:
    """Return a rollout as JSON data. A rollout in flight has only its messages and turns so far, and `in_flight` is
    true. Raises `ConfigError` if the run has no such rollout."""
    trajectory = index.trajectory(rollout_id)
    if trajectory is None:
        return _in_flight(index, rollout_id, long_chars)
    plain = _without_tokens(trajectory)
    found = {name: plain[name] for name in _PARTS if name in plain} | {"cost": trajectory.whole_cost}
    before, after = index.neighbours(rollout_id)
    group = index.group(trajectory.group_id)
    config = index.config()
    return {
        **cut_long_texts(found, long_chars),
        "id": rollout_id,
        "in_flight": False,
        "official_name": official_words(official_name(config)),
        "difference": trajectory.difference,
        "contrast": contrast(index, trajectory),
        "check": check_facts(trajectory.detail, trajectory.metrics),
        "exits": _exits(trajectory),
        "most_turns": most_turns(config),
        "group": _group(index, trajectory.group_id, group),
        "tools": cut_long_texts(group.group.tools, long_chars) if group else [],
        "before": before,
        "after": after,
        "attempts": index.attempts(rollout_id),
        "tokens": _token_facts(trajectory),
        "commands": commands(index, trajectory),
        "state_changes": state_changes(index, rollout_id),
    }


def most_turns(config: Mapping[str, JSON]) -> int | None:
    """Return the limit of turns in a run's settings, or None."""
    env = config.get("env")
    found = env.get("max_agent_turns") if isinstance(env, Mapping) else None
    return found if type(found) is int else None


def _exits(one: Trajectory) -> dict[str, JSON]:
    """Return the number of calls that ended with a nonzero exit code (`count`), and the `first` of them."""
    found = list(nonzero_exits(one.messages, [turn.number for turn in one.turns]))
    return {"count": len(found), "first": found[0] if found else None}


def contrast(index: RunIndex, trajectory: Trajectory) -> dict[str, JSON] | None:
    """Return what explains a reward below 1 for which the record has no cause: the first sibling with the highest
    reward (`id` and `reward`), if it is higher, and the first call in which they differ (`call`, with its number, and
    `own` and `other`, each None or a tool's name and arguments). `evidence` is whether the check recorded anything.
    None if the record has a cause."""
    if trajectory.reward is None or trajectory.reward >= 1 or _has_cause(trajectory):
        return None
    _, rows = index.rows([("group", "=", trajectory.group_id), ("reward", ">", trajectory.reward)], limit=1000)
    best = max(rows, key=lambda row: float(row["reward"]), default=None)
    sibling = None if best is None else index.trajectory(str(best["id"]))
    found: dict[str, JSON] = {"evidence": any(name != "category" for name in trajectory.detail)}
    if sibling is None:
        return found
    from palaestra_view.divergence import calls_of, differing_call  # imported here, because few have a better sibling

    own, other = list(calls_of(trajectory.messages)), list(calls_of(sibling.messages))
    place = differing_call(other, own)
    if place is not None:
        pair = {name: _name_and_arguments(calls, place) for name, calls in (("own", own), ("other", other))}
        found["call"] = {"number": place + 1, **pair}
    return found | {"id": sibling.rollout_id, "reward": sibling.reward}


def _has_cause(one: Trajectory) -> bool:
    """Return whether the record has a cause for the reward: a failure, a limit, a label, a test or a call."""
    recorded = one.error, one.difference, one.labels, one.tool_errors, one.detail.get(MISSING)
    facts = check_facts(one.detail, one.metrics)
    return one.outcome is not Outcome.NATURAL or any(recorded) or bool(facts["failed"] or facts["breaks"])


def _name_and_arguments(calls: Sequence[Call], place: int) -> list[str] | None:
    return [calls[place].name, short(calls[place].arguments)] if place < len(calls) else None


def commands(index: RunIndex, trajectory: Trajectory) -> dict[str, str]:
    """Return the commands that continue the work on this rollout, by their purpose."""
    run, task = shlex.quote(str(index.folder)), shlex.quote(trajectory.task_id)
    if index.config().get("command") == COMMAND:
        return {"look at this file": f"palaestra view {run}"}
    rollout, turn = shlex.quote(trajectory.rollout_id), max(0, len(trajectory.turns) - 1)
    return {
        "look at this run": f"palaestra view {run}",
        "export this task's conversations": f"palaestra export {run} --to openai --all --task {task}",
        "replay the run without a model": f"palaestra replay {run}",
        "prove its tokens": f"palaestra verify {run}",
        "continue it from one of its turns": f"palaestra fork {run} {rollout} --turn {turn}",
        "mark it as a hack": f"palaestra annotate {run} {rollout} --verdict hack",
        "grade the kept workspaces again": f"palaestra grade {run}",
    }


def cut_long_texts(value: JSON, long_chars: int = LONG_CHARS) -> JSON:
    """Return the value with every long text replaced by a mapping of `$cut` (its path), `head`, `tail` and `chars`.
    Raises `ConfigError` for a value that is nested too deeply."""
    try:
        return _cut(value, long_chars, None)
    except RecursionError:
        raise ConfigError("this rollout has a value that is nested too deeply to be shown") from None


def _cut(value: JSON, long_chars: int, path: JSON) -> JSON:
    """Do the work of `cut_long_texts`. `path` is the pair of the path above and the last key, because most paths are
    not used."""
    if type(value) is str:
        return value if len(value) <= long_chars else _cut_text(value, long_chars, path)
    if type(value) is dict:
        found = {key: _cut(each, long_chars, (path, key)) for key, each in value.items()}
        if CUT in found:  # the record's own key, which must not stand for a cut text
            found[f"{CUT} (recorded)"] = found.pop(CUT)
        return found
    if type(value) is list:
        return [_cut(each, long_chars, (path, place)) for place, each in enumerate(value)]
    return value


def _cut_text(value: str, long_chars: int, path: JSON) -> dict[str, JSON]:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(_escaped(str(name)))
    head, tail = min(_HEAD_CHARS, long_chars * 3 // 5), min(_TAIL_CHARS, long_chars // 5)
    pointer = "".join(f"/{name}" for name in reversed(names))
    return {CUT: pointer, "head": value[:head], "tail": value[-tail:], "chars": len(value)}


def text_at(index: RunIndex, rollout_id: str, path: str, start: int, chars: int) -> str:
    """Return part of a text that `cut_long_texts` replaced. `path` is a JSON pointer (RFC 6901) into the record. Raises
    `ConfigError` if there is no such text."""
    trajectory = index.trajectory(rollout_id)
    value: JSON = _without_tokens(trajectory) if trajectory else _so_far(index, rollout_id)
    try:
        for part in path.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (LookupError, ValueError, TypeError):
        value = None
    if not isinstance(value, str):
        raise ConfigError(f"rollout {rollout_id} has no text at {path!r}")
    return value[start : start + chars]


def token_record(index: RunIndex, rollout_id: str, row: int, names: Names | None = None) -> dict[str, JSON]:
    """Return the exact tokens of one row (a segment of the ledger, or the environment's own row) of a rollout.

    `ids`, `mask` and `logprobs` are base64 of little-endian int32, uint8 and float32, of equal length; the
    log-probability of a token that was not sampled is 1. `spans` are kind, start, stop, turn, policy version and
    reason. `verdict` is the result of checking the invariants T1 to T4 on the rollout's ledger. `texts` are the texts
    of the distinct ids in ascending order, if `names` is given. `advantage` is the reward minus the mean of the group's
    rewards; None for a group with fewer than two, and in trees. Raises `ConfigError` if there are no such tokens."""
    trajectory = index.trajectory(rollout_id)
    rows = [] if trajectory is None else _token_rows(trajectory)
    if trajectory is None or not 0 <= row < len(rows):
        raise ConfigError(f"rollout {rollout_id} has no recorded tokens in row {row}")
    ids, mask, logprobs, spans, reason = rows[row]
    distinct = sorted(set(unpacked_ids(ids)))
    texts = names(distinct) if names else None
    return {
        "id": rollout_id,
        "row": row,
        "rows": [{"reason": each[4], "tokens": len(each[0]) // ITEM_BYTES, "trained": sum(each[1])} for each in rows],
        "reason": reason,
        "ids": base64.b64encode(ids).decode(),
        "mask": base64.b64encode(mask).decode(),
        "logprobs": base64.b64encode(logprobs).decode() if logprobs else "",
        "spans": spans,
        "stop_ids": trajectory.ledger.stop_ids if trajectory.ledger else [],
        "texts": texts,
        "verdict": _ledger_check(trajectory),
        "advantage": _advantage(index, trajectory),
    }


def _token_rows(trajectory: Trajectory) -> list[tuple[bytes, bytes, bytes, list[JSON], str]]:
    if trajectory.row is not None and trajectory.row.source != PLACEHOLDER:  # nobody sampled those
        own = trajectory.row
        return [(*_own_arrays(own), [["prompt", 0, len(own.tokens), 0, "", ""]], f"made by the {own.source}")]
    record = trajectory.ledger
    segments = record.segments if isinstance(record, LedgerRecord) else []
    return [
        (
            each.tokens,
            each.mask,
            each.logprobs,
            [[one.kind, one.start, one.stop, one.turn, one.version, one.reason] for one in each.spans],
            each.reason,
        )
        for each in segments
    ]


def _own_arrays(row: TokenRow) -> tuple[bytes, bytes, bytes]:
    logprobs = b"" if row.logprobs is None else packed(array("f", row.logprobs))
    return packed(array("i", row.tokens)), bytes(mask != -100 for mask in row.masks), logprobs


def _without_tokens(trajectory: Trajectory) -> dict[str, JSON]:
    plain: dict[str, JSON] = msgspec.to_builtins(msgspec.structs.replace(trajectory, ledger=None, row=None))
    return plain


def _token_facts(trajectory: Trajectory) -> JSON:
    rows = _token_rows(trajectory)
    if not rows:
        return None
    versions = dict.fromkeys(span[4] for row in rows for span in row[3] if span[4])
    return {
        "rows": [{"reason": row[4], "tokens": len(row[0]) // ITEM_BYTES, "trained": sum(row[1])} for row in rows],
        "versions": list(versions),
        "source": trajectory.row.source if trajectory.row and trajectory.row.source != PLACEHOLDER else "engine",
    }


def _ledger_check(trajectory: Trajectory) -> JSON:
    if trajectory.ledger is None:
        return None
    from palaestra_tokens.ledger import verify_ledger  # imported here, because most runs are not token-exact

    found = verify_ledger(trajectory.ledger, forked=trajectory.is_forked)
    return {"ok": found.ok, "violation": str(found.violation or ""), "tokens": found.tokens, "trained": found.trained}


def _advantage(index: RunIndex, trajectory: Trajectory) -> JSON:
    """Return the reward minus the group's mean, which a group-relative trainer gives to every token before scaling."""
    _, rows = index.rows([("group", "=", trajectory.group_id)], limit=1000)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    if trajectory.reward is None or len(rewards) < 2 or any(row["parent"] is not None for row in rows):
        return None
    return trajectory.reward - sum(rewards) / len(rewards)


def _group(index: RunIndex, group_id: str, group: GroupStarted | None) -> dict[str, JSON]:
    _, rows = index.rows([("group", "=", group_id)], limit=1000)
    members = [[row["id"], row["position"], row["reward"], row["outcome"], row["official"]] for row in rows]
    facts = {"id": group_id, "members": members}
    return facts | ({"number": group.group.number, "task": group.group.task_id} if group else {})


def _in_flight(index: RunIndex, rollout_id: str, long_chars: int) -> dict[str, JSON]:
    so_far = _so_far(index, rollout_id)
    group_id, _, position = rollout_id.rpartition("/")
    group = index.group(group_id)
    return {
        **cut_long_texts(so_far, long_chars),
        "id": rollout_id,
        "in_flight": True,
        "group_id": group_id,
        "task_id": group.group.task_id if group else "",
        "index": number_of(position),
        "group": _group(index, group_id, group),
        "tools": cut_long_texts(group.group.tools, long_chars) if group else [],
        "attempts": index.attempts(rollout_id),
        "state": cut_long_texts({"state": last}, long_chars)["state"]
        if (last := _last_state(index, rollout_id))
        else None,
        "state_changes": state_changes(index, rollout_id),
    }


def _last_state(index: RunIndex, rollout_id: str) -> JSON:
    return next((state for _, state in reversed([*index.states(rollout_id)])), None)


def state_changes(index: RunIndex, rollout_id: str) -> dict[str, list[list[str | None]]]:
    """Return what each turn changed in the environment's state, by the turn's number: the path of a value, and the
    value before and after it as short JSON texts, None where there was none. A turn has at most `_MOST_CHANGES`."""
    found: dict[str, list[list[str | None]]] = {}
    before: JSON = None
    for turn, state in index.states(rollout_id):
        if turn:
            changes = itertools.islice(_differences("", before, state), _MOST_CHANGES)
            found[str(turn)] = [[path, *(None if each is _ABSENT else _as_text(each) for each in pair)]
                                for path, *pair in changes]  # fmt: skip
        before = state
    return found


def _differences(path: str, before: JSON, after: JSON) -> Iterator[tuple[str, JSON, JSON]]:
    """Yield the paths at which two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        names: Iterable[JSON] = dict.fromkeys([*before, *after])
        pairs = [(name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        pairs = [(place, *pair) for place, pair in enumerate(itertools.zip_longest(before, after, fillvalue=_ABSENT))]
    else:
        if before is _ABSENT or after is _ABSENT or before != after:
            yield path, before, after
        return
    for name, old, new in pairs:
        yield from _differences(f"{path}.{name}" if path else str(name), old, new)


def _as_text(value: JSON) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _CHANGE_CHARS else f"{text[:_CHANGE_CHARS]}…"


def _so_far(index: RunIndex, rollout_id: str) -> dict[str, JSON]:
    turns: list[TurnTaken] = index.turns_so_far(rollout_id)
    if not turns:
        raise ConfigError(f"the run has no rollout {rollout_id!r}")
    return {
        "messages": [message for turn in turns for message in turn.messages],
        "turns": [
            {"number": turn.turn, "finish_reason": turn.finish_reason, "prompt_tokens": turn.tokens[0],
             "completion_tokens": turn.tokens[1]}
            for turn in turns if turn.turn
        ],
        "beside": {"turn_s": [list(turn.seconds) for turn in turns if turn.turn]},
    }  # fmt: skip


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
