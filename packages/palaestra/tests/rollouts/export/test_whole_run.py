"""A run over a token engine, exported: what a trainer gets is what the engine sampled, token for token."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from pathlib import Path

import pytest
from toy import Sums, changed, services

from palaestra.rollouts.events import RunStarted
from palaestra.rollouts.export.atif import AtifExporter
from palaestra.rollouts.export.exporter import Exporter
from palaestra.rollouts.export.token_rows import RowsExporter
from palaestra.rollouts.journal.reader import Recording, open_recording
from palaestra.rollouts.runner import Runner
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_logprob, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

pytest.importorskip("tokenizers", reason="needs the extra 'tokens'")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'


class Toys:
    """An engine that opens token-exact sessions, all over one toy, which also breaks requests off."""

    name = "toy"

    def __init__(self) -> None:
        tokenizer = toy_tokenizer([CALL, "the sum is 2"] * 5)
        replies = itertools.cycle([CALL, "the sum is 2"])
        self.toy = ToyEngine(tokenizer, replies, rate=0.2, abort_rate=0.2, seed=3)
        self._format = ChatFormat(tokenizer)

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def session(self, context: SessionContext) -> ManagedChat:
        return ManagedChat(self.toy, self._format, "hermes")


def recorded(folder: Path) -> tuple[Recording, int]:
    """A run of four rollouts, one after the other, and how many tokens were sampled in it."""
    engine = Toys()
    shared = changed(services(folder, group_size=1), engine=engine)

    async def main() -> None:
        shared.events.journal.append(RunStarted(run_id="r", env="sums", model="toy", seed=0))
        await Runner(Sums(4), shared, concurrency=1).run()
        shared.events.journal.close()

    asyncio.run(main())
    return open_recording(folder), engine.toy.sampled


def exported(exporter: Exporter, recording: Recording) -> list[dict[str, JSON]]:
    out = io.BytesIO()
    exporter.export(recording, out, recording.meta)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_rows_and_documents_hold_exactly_what_was_sampled(tmp_path: Path) -> None:
    recording, sampled = recorded(tmp_path)
    rows = exported(RowsExporter(), recording)
    assert len({row["rollout_id"] for row in rows}) == 4
    assert sum(sum(row["mask"]) for row in rows) == sampled > 0
    for row in rows:
        first = len(row["prompt_ids"])
        for place, (token, trained) in enumerate(zip(row["completion_ids"], row["mask"], strict=True)):
            assert row["logprobs"][place] == (toy_logprob(token, first + place) if trained else 0.0)
    metrics = [
        step["metrics"]
        for document in exported(AtifExporter(), recording)
        for step in document["steps"]
        if step["source"] == "agent"
    ]
    told = [token for each in metrics for token in each["completion_token_ids"]]
    assert told == [token for row in rows for token, on in zip(row["completion_ids"], row["mask"], strict=True) if on]
    assert [len(each["logprobs"]) for each in metrics] == [len(each["completion_token_ids"]) for each in metrics]
