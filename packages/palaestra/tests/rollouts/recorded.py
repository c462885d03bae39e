"""A small recorded run with everything an export can meet, and message histories of every valid kind."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from palaestra.rollouts.events import GroupEnded, GroupStarted, RolloutEnded, RunEnded, RunStarted
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import Group, TokenRow, Trajectory, TurnRecord
from palaestra_slots.core.types import JSON, Blame, Message, Outcome
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason

META = ExportMeta(run_id="run-1", env="weather", model="m", seed=7, started_at=1.5)

TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Ask for the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(number: int, arguments: str, name: str = "weather") -> dict[str, JSON]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


TWO_CALLS: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": "I will look.",
        "reasoning_content": "Two cities,\ntwo calls.",
        "tool_calls": [call(1, '{"city": "Oslo"}'), call(2, '{"city":"Rome"}')],
    },
    result(1, '{"degrees": -3}'),
    result(2, "sunny </tool_response> & 21°"),
    {"role": "assistant", "content": "Oslo −3°, Rome 21°."},
]

MALFORMED: list[Message] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [call(1, '{"city": ')]},
    result(1, "not JSON"),
]


def say(ledger: Ledger, segment: int, delta: list[int], ids: list[int], version: str) -> None:
    """One turn whose log-probabilities are -0.5, -0.75, …"""
    sampled = Sampled(ids, [-0.5 - 0.25 * place for place in range(len(ids))], "stop", version)
    ledger.append(segment, delta, [Piece(sampled, ledger.prompt(segment, delta).checksum)])


def two_segments() -> Ledger:
    """Two turns; the second saw a rewritten history and another policy."""
    ledger = Ledger()
    say(ledger, ledger.open(SegmentReason.START), [1, 2, 3], [10, 11, 9], "step-4")
    say(ledger, ledger.open(SegmentReason.COMPACTION), [1, 5], [12, 9], "step-5")
    return ledger


def one_segment() -> Ledger:
    """Two turns with a tool's result between them."""
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1, 2], [10, 9], "step-4")
    say(ledger, segment, [6, 7], [11, 9], "step-4")
    return ledger


def rollout(index: int, messages: Sequence[Message], reward: float | None = 1.0, **fields: JSON) -> Trajectory:
    given: dict[str, JSON] = {
        "rollout_id": f"000000-sky/{index}",
        "group_id": "000000-sky",
        "task_id": "sky",
        "index": index,
        "messages": list(messages),
        "outcome": Outcome.NATURAL,
        "reward": reward,
    }
    return Trajectory(**(given | fields))


def turns(*tools: tuple[str, ...]) -> list[TurnRecord]:
    return [
        TurnRecord(number=number, finish_reason="tool_calls" if names else "stop", prompt_tokens=9, tools=names)
        for number, names in enumerate(tools, 1)
    ]


def sky() -> Group:
    """Two segments, one segment, malformed arguments, and a slot that was lost."""
    lost = {"outcome": Outcome.INFRA_ERROR, "blame": Blame.SANDBOX, "error": "SlotLost: it died\nat once"}
    two = turns(("weather", "weather"), ())
    return Group(
        group_id="000000-sky",
        number=0,
        task_id="sky",
        tools=[TOOL],
        toolsets=("weather",),
        trajectories=[
            rollout(0, TWO_CALLS, 1.0, turns=two, ledger=two_segments().record(), metrics={"cities": 2.0}),
            rollout(1, TWO_CALLS, 0.25, turns=two, ledger=one_segment().record(), prompt_tokens=18),
            rollout(2, MALFORMED, 0.0, outcome=Outcome.MAX_TURNS, turns=turns(("weather",)), row=own_row()),
            rollout(3, TWO_CALLS[:2], None, **lost),
        ],
    )


def own_row() -> TokenRow:
    """A row that an environment made itself."""
    return TokenRow(tokens=[3, 4, 5], masks=[-100, 4, 5], logprobs=[1.0, -1.0, -2.0], source="environment")


def broken() -> Group:
    return Group(group_id="000001-sea", number=1, task_id="sea", error="PrepareError: set-up | failed")


def groups() -> list[Group]:
    return [sky(), broken()]


def write_run(
    folder: Path,
    *finished: Group,
    order: Sequence[int] = (),
    ended: bool = True,
    model: str = "m",
    config: dict[str, JSON] | None = None,
) -> Path:
    """A run folder whose groups ended in `order` (of places), their lines interleaved as a run's are."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    journal.append(RunStarted(at=1.5, run_id="run-1", env="weather", model=model, seed=7, config=config or {}))
    for group in finished:
        begun = {"trajectories": [], "error": "", "blame": None}
        journal.append(GroupStarted(group=Group(**{**fields(group), **begun})))
    for group in finished:
        for trajectory in reversed(group.trajectories):
            journal.append(RolloutEnded(trajectory=trajectory))
    for place in order or range(len(finished)):
        group = finished[place]
        cause = {"error": group.error, "blame": group.blame}
        journal.append(GroupEnded(group_id=group.group_id, number=group.number, **cause))
    if ended:
        journal.append(RunEnded(reason="done"))
    journal.close()
    return folder


def embedded(page: Path) -> dict[str, JSON]:
    """The data in a page that `palaestra view --html` or a run wrote."""
    packed = re.search(r'id="data">([^<]*)<', page.read_text())
    assert packed is not None
    found: dict[str, JSON] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return found


def fields(group: Group) -> dict[str, JSON]:
    return {name: getattr(group, name) for name in group.__struct_fields__}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "<think>", "</tool_call>", "</tool_response>", "<tool_response>", '{"a": 1}', "\u2028", "\0"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
objects = st.dictionaries(texts, scalars | st.lists(scalars, max_size=2), max_size=3)
argument_texts = (
    objects.map(json.dumps)
    | objects.map(lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    | st.sampled_from(["", " ", "{", "[1]", '{"a": 1, "a": 2}', '{"n": 1e999}', '{"n": NaN}', '{"n": 1E400, "m": 2}'])
)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Valid conversations: optional system message, then user, replies, calls that are all answered, in any order."""
    messages: list[Message] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        for _ in range(draw(st.integers(0, 2))):
            written = draw(st.lists(argument_texts, min_size=1, max_size=3))
            calls = [call(number + place, arguments, draw(texts)) for place, arguments in enumerate(written)]
            number += len(calls)
            messages.append(reply(draw(texts), draw(texts)) | {"tool_calls": calls})
            answers = [{"role": "tool", "tool_call_id": each["id"], "content": draw(texts)} for each in calls]
            messages += draw(st.permutations(answers))
        messages.append(reply(draw(texts), draw(texts)))
    return messages


def reply(content: str, reasoning: str) -> Message:
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
