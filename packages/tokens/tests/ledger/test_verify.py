"""The verifier finds every kind of corruption, and names the place."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_messages import check_message
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import Ledger, LedgerRecord, Piece, SegmentReason, TokenSpan, verify_ledger
from palaestra_tokens.ledger.verify import RepeatedReplies

STOP = 9
Spoil = Callable[[LedgerRecord], None]


def say(ledger: Ledger, segment: int, delta: list[int], *parts: list[int], finish: str = "stop") -> None:
    prompt, pieces = ledger.prompt(segment, delta), []
    for number, ids in enumerate(parts):
        reason = finish if number == len(parts) - 1 else "abort"
        pieces.append(Piece(Sampled(ids, [-0.5] * len(ids), reason, f"v{number}"), prompt.checksum))
        prompt.grow(array("i", ids))
    ledger.append(segment, delta, pieces)


def sound() -> LedgerRecord:
    """Three segments; the first has two turns, of which the second was aborted once, and one cut by length."""
    ledger = Ledger(stop_ids=[STOP])
    first = ledger.open(SegmentReason.START)
    say(ledger, first, [1, 2, 3], [4, 5, STOP])
    say(ledger, first, [6, 7], [8, 10], [11, STOP])
    second = ledger.open(SegmentReason.TEMPLATE_REWRITE)
    say(ledger, second, [1, 2, 6, 7], [12, 13], finish="length")
    third = ledger.open(SegmentReason.COMPACTION)
    say(ledger, third, [1, 20], [14, STOP])
    return ledger.record()


def respan(record: LedgerRecord, segment: int, number: int, **changes: object) -> None:
    spans = record.segments[segment].spans
    spans[number] = msgspec.structs.replace(spans[number], **changes)


def poke(raw: bytes, at: int, value: int | float, kind: str = "i") -> bytes:
    values = array(kind, raw)
    values[at] = value
    return values.tobytes()


def tokens(record: LedgerRecord, at: int, value: int) -> None:
    record.segments[0].tokens = poke(record.segments[0].tokens, at, value)


def logprob(record: LedgerRecord, at: int, value: float) -> None:
    record.segments[0].logprobs = poke(record.segments[0].logprobs, at, value, "f")


def mask(record: LedgerRecord, change: Callable[[bytearray], None]) -> None:
    changed = bytearray(record.segments[0].mask)
    change(changed)
    record.segments[0].mask = bytes(changed)


def shift(values: bytearray) -> None:
    values[:] = values[-1:] + values[:-1]


def train(at: int, value: int) -> Spoil:
    return lambda record: mask(record, lambda values: values.__setitem__(at, value))


def replace_bytes(name: str, cut: Callable[[bytes], bytes]) -> Spoil:
    return lambda record: setattr(record.segments[0], name, cut(getattr(record.segments[0], name)))


def insert_token(record: LedgerRecord, at: int, value: int) -> None:
    """One more prompt token, with everything around it made to fit: as a bug in a writer would."""
    segment = record.segments[0]
    segment.tokens = segment.tokens[: at * 4] + array("i", [value]).tobytes() + segment.tokens[at * 4 :]
    segment.logprobs = segment.logprobs[: at * 4] + array("f", [1.0]).tobytes() + segment.logprobs[at * 4 :]
    segment.mask = segment.mask[:at] + b"\0" + segment.mask[at:]
    segment.spans = [
        msgspec.structs.replace(
            span, start=span.start + (span.start > at), stop=span.stop + (span.stop >= at and span.stop != 6)
        )
        for span in segment.spans
    ]
    record.turns[1] = msgspec.structs.replace(record.turns[1], prompt_tokens=record.turns[1].prompt_tokens + 1)


def duplicate_turn(record: LedgerRecord) -> None:
    record.segments.append(msgspec.structs.replace(record.segments[2], reason="history_edit"))


def swap_spans(record: LedgerRecord) -> None:
    spans = record.segments[0].spans
    spans[0], spans[1] = spans[1], spans[0]


CORRUPTIONS: dict[str, tuple[str, Spoil]] = {
    "schema of another version": ("T1", lambda r: setattr(r, "schema", "palaestra.ledger/9")),
    "shifted mask": ("T3", lambda r: mask(r, shift)),
    "sampled token not trained": ("T3", train(4, 0)),
    "prompt token trained": ("T3", train(1, 1)),
    "end token not trained": ("T3", train(5, 0)),
    "mask that is no mask": ("T3", train(4, 2)),
    "mask too short": ("T3", replace_bytes("mask", lambda raw: raw[:-1])),
    "dropped log-probability": ("T3", replace_bytes("logprobs", lambda raw: raw[:-4])),
    "log-probability cut in two": ("T3", replace_bytes("logprobs", lambda raw: raw[:-2])),
    "dropped token": ("T3", replace_bytes("tokens", lambda raw: raw[:-4])),
    "shifted log-probabilities": ("T4", replace_bytes("logprobs", lambda raw: raw[-4:] + raw[:-4])),
    "log-probability missing": ("T4", lambda r: logprob(r, 4, 1.0)),
    "log-probability not a number": ("T4", lambda r: logprob(r, 4, float("nan"))),
    "log-probability infinite": ("T4", lambda r: logprob(r, 4, float("-inf"))),
    "log-probability on a prompt": ("T4", lambda r: logprob(r, 1, -0.5)),
    "log-probability changed": ("T1", lambda r: logprob(r, 4, -0.25)),
    "re-encoded sample": ("T1", lambda r: tokens(r, 4, 15)),
    "changed prompt": ("T1", lambda r: tokens(r, 1, 15)),
    "changed delta": ("T1", lambda r: tokens(r, 7, 15)),
    "negative token": ("T1", lambda r: tokens(r, 1, -100)),
    "doubled end token": ("T1", lambda r: insert_token(r, 6, STOP)),
    "token inserted": ("T1", lambda r: insert_token(r, 6, 15)),
    "policy version changed": ("T1", lambda r: respan(r, 0, 1, version="other")),
    "engine given something else": ("T1", lambda r: respan(r, 0, 3, sent=1)),
    "digest changed": ("T1", lambda r: respan(r, 0, 1, digest="0" * 16)),
    "abort not declared": ("T2", lambda r: respan(r, 0, 4, reason="")),
    "abort declared where there is none": ("T2", lambda r: respan(r, 0, 1, reason="abort_resume")),
    "segment without reason": ("T2", lambda r: setattr(r.segments[1], "reason", "")),
    "segment with an unknown reason": ("T2", lambda r: setattr(r.segments[1], "reason", "because")),
    "second segment that claims to be the start": ("T2", lambda r: setattr(r.segments[1], "reason", "start")),
    "first segment lost": ("T2", lambda r: r.segments.pop(0)),
    "last segment lost": ("T3", lambda r: r.segments.pop()),
    "turn trained twice": ("T3", duplicate_turn),
    "turn left out of the list": ("T3", lambda r: r.turns.pop(1)),
    "turn with another length": (
        "T3",
        lambda r: r.turns.__setitem__(0, msgspec.structs.replace(r.turns[0], sampled_tokens=2)),
    ),
    "turn that was aborted and not resumed": (
        "T2",
        lambda r: r.turns.__setitem__(2, msgspec.structs.replace(r.turns[2], finish_reason="abort")),
    ),
    "gap between spans": ("T3", lambda r: respan(r, 0, 1, start=4)),
    "span too long": ("T3", lambda r: respan(r, 0, 4, stop=99)),
    "span lost": ("T3", lambda r: r.segments[0].spans.pop()),
    "spans swapped": ("T3", swap_spans),
    "spans of one turn in another": ("T3", lambda r: respan(r, 0, 3, turn=1)),
    "prompt called sampled": ("T3", lambda r: respan(r, 0, 2, kind="sampled")),
    "sampled called prompt": ("T3", lambda r: respan(r, 0, 1, kind="prompt")),
}


def test_the_sound_one_is_sound() -> None:
    verdict = verify_ledger(sound())
    assert verdict.ok, verdict.violation
    assert (verdict.segments, verdict.turns, verdict.tokens, verdict.trained) == (3, 4, 22, 11)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_found(name: str) -> None:
    invariant, spoil = CORRUPTIONS[name]
    record = sound()
    spoil(record)
    verdict = verify_ledger(record)
    assert not verdict.ok
    assert verdict.violation is not None
    assert verdict.violation.invariant == invariant, verdict.violation


def test_the_place_is_named() -> None:
    record = sound()
    record.segments[1].mask = b"\0\0\0\0\1\0"
    verdict = verify_ledger(record)
    check_message(str(verdict.violation), "segment", "turn")


@settings(deadline=None)
@given(st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject) -> None:
    record = sound()
    segment = record.segments[data.draw(st.integers(0, 2), label="segment")]
    name = data.draw(st.sampled_from(["tokens", "logprobs", "mask"]), label="array")
    raw = bytearray(getattr(segment, name))
    raw[data.draw(st.integers(0, len(raw) - 1), label="byte")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    setattr(segment, name, bytes(raw))
    assert not verify_ledger(record).ok


@settings(deadline=None)
@given(st.data())
def test_no_changed_span_goes_unseen(data: st.DataObject) -> None:
    record = sound()
    spans = record.segments[data.draw(st.integers(0, 2), label="segment")].spans
    number = data.draw(st.integers(0, len(spans) - 1), label="span")
    name = data.draw(st.sampled_from(["start", "stop", "turn", "sent"]), label="field")
    change = data.draw(st.integers(-3, 3).filter(bool), label="change")
    if name == "sent" and spans[number].kind == "prompt":
        return  # nothing is sent before a prompt: the field means nothing there
    changed: TokenSpan = msgspec.structs.replace(spans[number], **{name: getattr(spans[number], name) + change})
    spans[number] = changed
    assert not verify_ledger(record).ok


def first_reply(prompt: list[int], reply: list[int], logprob: float) -> LedgerRecord:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    sent = ledger.prompt(None, array("i", prompt))
    piece = Piece(Sampled(reply, [logprob] * len(reply), "stop"), sent.checksum)
    ledger.append(segment, array("i", prompt), [piece])
    return ledger.record()


@pytest.mark.parametrize(
    ("replies", "noticed"),
    [
        ([([1, 2], [5, 6, 7], -1.5)] * 8, True),
        ([([1, 2], [5, 6, 7], -1.5)] * 4 + [([3], [8, 9], -2.0)] * 4, True),
        ([([1, 2], [5, 6, 7], -0.01)] * 8, False),  # the model is nearly certain
        ([([1, 2], [5, 6, 7], -1.5)] * 7 + [([1, 2], [5, 6, 8], -1.5)], False),
        ([([number], [5, 6, 7], -9.0) for number in range(8)], False),  # every prompt once
        ([], False),
    ],
)
def test_replies_that_never_differ_are_noticed(
    replies: list[tuple[list[int], list[int], float]], noticed: bool
) -> None:
    found = RepeatedReplies()
    for each in replies:
        found.add(first_reply(*each))
    assert ("identical" in found.notice) is noticed
