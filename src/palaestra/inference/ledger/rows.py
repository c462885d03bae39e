"""From a stored ledger back to training rows. What `Ledger.rows` gives while it lives, this gives from its record."""

from __future__ import annotations

from typing import cast

from palaestra.inference.ledger.base import UNTRAINED, LedgerRecord, Row, unpacked


def record_rows(record: LedgerRecord) -> list[Row]:
    """One row for each segment in which anything was sampled, in the order they began.

    Raises `ValueError` where the stored bytes are not arrays of one length; `verify_ledger` says more.
    """
    finished = {turn.segment: turn.finish_reason for turn in record.turns}
    rows = []
    for number, segment in enumerate(record.segments):
        tokens = cast("list[int]", unpacked("i", segment.tokens).tolist())
        sampled = [span for span in segment.spans if span.kind == "sampled"]
        if not sampled:
            continue
        rows.append(
            Row(
                segment=number,
                reason=segment.reason,
                tokens=tokens,
                masks=[token if mask else UNTRAINED for token, mask in zip(tokens, segment.mask, strict=True)],
                logprobs=cast("list[float]", unpacked("f", segment.logprobs).tolist()),
                versions=[(span.start, span.stop, span.version) for span in sampled],
                finish_reason=finished.get(number, ""),
            )
        )
    return rows
