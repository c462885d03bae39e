"""Do rollouts record the model's own log-probabilities? A tiny real model plays 200 tool rollouts with each engine.

    python benchmarks/logprobs.py            # needs the extra 'train'; `make test-torch` sets up an environment with it
    python benchmarks/logprobs.py --quick

The model has practised until it writes tool calls, and plays the agent loop through token-exact chat: in this process,
and behind loopback servers that implement SGLang's and vLLM's APIs. In this process, its weights are reloaded several
times during the rollouts, so that requests are aborted and resumed. Then every ledger is verified, and the model
processes every row again in one forward pass (float32). The result is the largest difference from the recorded
log-probabilities. Target: at most 1e-3.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from _measure import Row, parse_options, report, with_ceiling, with_floor

from palaestra_contract import HermesAgentLoop
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.transformers import TransformersEngine
from palaestra_tokens.ledger import LedgerRecord, record_rows, verify_ledger
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.tiny_model import make_tiny

ROLLOUTS, AT_ONCE, MOST_TURNS, MOST_TOKENS = 200, 16, 6, 80
PRACTICE_STEPS = 100
RELOAD_EVERY = 40
TARGET = 1e-3

TOOLS: list[dict[str, JSON]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {argument}.",
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, argument in (("terminal", "command"), ("read_file", "path"))
]


async def answer(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
    """Answer a tool call without a sandbox. The reply differs from call to call, and half of it is hard to tokenise."""
    return json.dumps({"output": f"{task_id} {name} {dict(arguments)} ½ naïve 東京\n\t{'=' * (len(str(task_id)) % 7)}"})


@asynccontextmanager
async def servers(
    kind: str, engine: TransformersEngine, folder: Path
) -> AsyncIterator[ServerGroup | TransformersEngine]:
    """Yield the engine itself, or a client of a loopback server that samples with the engine."""
    if kind == "transformers":
        yield engine
        return
    async with TokenLoopback(engine, engine.tokenizer, kind=kind) as served:
        config = APIServerConfig(
            server_type=kind, base_url=served.url, model_name=str(folder), tokenizer_name=str(folder)
        )
        group = ServerGroup(config)
        await group.start()
        try:
            yield group
        finally:
            await group.aclose()


async def roll_out(kind: str, engine: TransformersEngine, folder: Path, rollouts: int) -> list[LedgerRecord]:
    """Return the ledgers of this many rollouts."""
    numbers, versions = iter(range(rollouts)), itertools.count(1)
    records: list[LedgerRecord] = []

    async def work(group: ServerGroup | TransformersEngine) -> None:
        for number in numbers:
            managed = group.managed_server(name=f"r{number}")
            loop = HermesAgentLoop(
                managed,
                TOOLS,
                {"terminal", "read_file"},
                max_turns=MOST_TURNS,
                task_id=f"r{number}",
                max_tokens=MOST_TOKENS,
                temperature=(1.0, 0.7)[number % 2],
                tool_handler=answer,
            )
            await loop.run([{"role": "user", "content": f"Look around, number {number}."}])
            records.append(managed.ledger.record())
            if kind == "transformers" and number % RELOAD_EVERY == RELOAD_EVERY - 1:
                await engine.load_weights(str(folder), str(next(versions)))

    async with servers(kind, engine, folder) as group, asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(work(group))
    return records


def largest_difference(engine: TransformersEngine, record: LedgerRecord) -> float:
    """Return the largest difference between recorded log-probabilities and those of one forward pass over each row."""
    import torch

    worst = 0.0
    for row in record_rows(record):
        ids = torch.tensor([row.tokens], device=engine.model.device)
        with torch.inference_mode():
            again = torch.log_softmax(engine.model(input_ids=ids).logits[0].float(), dim=-1)
        chosen = again[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        recorded = torch.tensor(row.logprobs[1:], device=chosen.device)
        sampled = torch.tensor([mask >= 0 for mask in row.masks[1:]], device=chosen.device)
        worst = max(worst, float((chosen - recorded)[sampled].abs().max()))
    return worst


async def measure(folder: Path, rollouts: int) -> list[Row]:
    """Measure the table's rows for all engines, with one model."""
    engine = TransformersEngine(APIServerConfig(server_type="transformers", model_name=str(folder)), seed=0)
    await engine.start()
    rows: list[Row] = []
    try:
        for kind in ("transformers", "sglang", "vllm"):
            started = time.perf_counter()
            records = await roll_out(kind, engine, folder, rollouts)
            seconds = time.perf_counter() - started
            verdicts = [verify_ledger(record) for record in records]
            turns, trained = sum(v.turns for v in verdicts), sum(v.trained for v in verdicts)
            resumed = sum(bool(s.reason) for r in records for part in r.segments for s in part.spans)
            rows += [
                Row(f"{kind}: turns per rollout", turns / len(records), "turns"),
                Row(f"{kind}: tokens sampled", trained, "tokens"),
                Row(f"{kind}: sampled per second, the loop included", trained / seconds, "tokens/s"),
                Row(f"{kind}: requests aborted and resumed", resumed, "requests"),
                with_floor(Row(f"{kind}: rollouts", len(records), "rollouts"), rollouts),
                with_ceiling(Row(f"{kind}: violations", sum(not v.ok for v in verdicts), "rollouts"), 0),
                with_ceiling(
                    Row(
                        f"{kind}: largest difference",
                        1e6 * max(largest_difference(engine, record) for record in records),
                        "1e-6 nats",
                    ),
                    1e6 * TARGET,
                ),
            ]
    finally:
        await engine.aclose()
    return rows


def main() -> int:
    """Make the model, measure, print."""
    options = parse_options(__doc__)
    import torch

    torch.set_num_threads(1)  # several threads would spin on a busy machine, and the model is tiny
    with tempfile.TemporaryDirectory() as folder:
        made = make_tiny(Path(folder), force=True, practice=30 if options.quick else PRACTICE_STEPS)
        title = f"Recorded log-probabilities against one forward pass ({made.parameters:,} parameters, float32)"
        rows = asyncio.run(measure(Path(folder), 20 if options.quick else ROLLOUTS))
    return report(title, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
