"""Is every trained token the token that was sampled? python benchmarks/token_exactness.py [--quick] [--json FILE]

The benchmark uses real chat templates of many model families, which it reads from a published package. For each
template, a sampler writes the right text, but in place of 0.05% or 5% of the tokens writes tokens that the tokenizer
would not have chosen. Conversations are plain, with tools, with thinking, compacted, aborted and resumed, or cut off by
a length limit.

A violation is any error that the verifier finds in a stored ledger, a log-probability that belongs to a different token
or position, or a sampled token that is not trained exactly once. A rollout is lost if it raises an exception or
produces no row. For comparison, the table shows how many rollouts would change if they were decoded and encoded again.

The templates come from the wheel of `trl`, which `pip` downloads from the configured index; `--templates PATH` names a
wheel or a folder instead. Those of Mistral and Kimi, which the wheel lacks, are in `templates/`. The two rates are
assumptions; the first has the order of magnitude that users of other libraries report.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import _measure as measure
import _templates as templates
import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Message
from palaestra_tokens.ledger import LedgerRecord, TokenRow, verify_ledger
from palaestra_tokens.templates import ChatFormat, TurnRenderer
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_logprob, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import HistoryMode, ManagedChat
from palaestra_tokens.tokenizers import FastTokenizer

TURNS = 100_000
QUICK_TURNS = 3_000
TURNS_PER_ROLLOUT = 16
RATES = {"0.05 %": 0.0005, "5 %": 0.05}
KINDS = ("plain", "tools", "thinking", "compaction", "aborts", "cut")
VOCABULARY = 4096

SPECIAL = re.compile(
    r"<\|[^|<>\n]{1,30}\|>|<｜[^｜\n]{1,30}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|</?s>|<bos>|<eos>|\[/?[A-Z_]{4,}\]"
)
"""The special tokens of the families."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "what"}}},
        },
    }
    for name in ("terminal", "search_files")
]
WORDS = (
    "the",
    "of",
    "file",
    "a",
    "test",
    "error",
    "naïve",
    "東京",
    "🙂",
    "def",
    "return",
    "\n ",
    "self.value",
    "0x1F;",
    "½",
)


NO_TOOLS: set[str] = set()
"""Families whose template does not show tools. With tools they are refused; their conversations have no tools."""


@dataclass
class Family:
    """One template with its own tokenizer."""

    name: str
    tokenizer: FastTokenizer
    format: ChatFormat


@dataclass
class Tally:
    """The counts of the benchmark."""

    turns: int = 0
    rollouts: int = 0
    tokens: int = 0
    trained: int = 0
    segments: Counter[str] = field(default_factory=Counter)
    drifted: Counter[str] = field(default_factory=Counter)
    rollouts_at: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    families: set[str] = field(default_factory=set)


def families(sources: Mapping[str, str]) -> Iterator[Family]:
    """Yield each template with a byte-level BPE tokenizer that has the template's special tokens, trained on three
    modules of the standard library."""
    corpus = [
        Path(json_file).read_text(encoding="utf-8") for json_file in (asyncio.__file__, re.__file__, argparse.__file__)
    ]
    for name, source in sources.items():
        special = sorted({*SPECIAL.findall(source), "<eos>", "<bos>"})
        tokenizer = toy_tokenizer(corpus, special, end="<eos>", size=VOCABULARY, chat_template=source)
        tokenizer.special["bos_token"] = "<bos>"
        yield Family(name, tokenizer, ChatFormat(tokenizer))


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most)))


def replies(rng: random.Random, kind: str, opened: bool) -> Iterator[str]:
    """Yield the model's replies; `opened` is true if the prompt has already opened the thinking."""
    while True:
        thought = ("" if opened else "<think>\n") + words(rng, 30).strip() + "\n</think>\n\n"
        begin = thought if opened or (kind == "thinking" and rng.random() < 0.8) else ""
        text = words(rng, 40)
        if kind in ("tools", "thinking", "aborts", "cut") and rng.random() < 0.7:
            call = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": {"command": words(rng, 12)}}
            text += f"\n<tool_call>\n{msgspec.json.encode(call).decode()}\n</tool_call>"
        yield begin + text


def end_of(renderer: TurnRenderer, reply: str) -> int:
    """Return the token with which this family's model ends a reply. It differs for calls, and GLM's token opens the
    next message."""
    ends = renderer.traits.openers or renderer.traits.stop_ids[1:] or renderer.stop_ids
    return ends[-1] if "<tool_call>" in reply and len(ends) > 1 else ends[0]


async def rollout(
    family: Family, kind: str, rate: float, seed: int, history: HistoryMode
) -> tuple[ManagedChat, ToyEngine]:
    """Hold one conversation of `TURNS_PER_ROLLOUT` turns."""
    rng = random.Random(seed)
    tools = TOOLS if kind in ("tools", "thinking", "aborts", "cut") and family.name not in NO_TOOLS else []
    renderer = family.format.renderer(tools)
    messages: list[Message] = [{"role": "user", "content": words(rng, 60)}]
    said = replies(
        rng, kind if tools or kind != "tools" else "plain", renderer.thinks_at_once(renderer.opening(messages).ids)
    )
    engine = ToyEngine(
        family.tokenizer,
        said,
        rate=rate,
        end=lambda reply: end_of(renderer, reply),
        ends=rng.random() < 0.7,
        abort_rate=0.3 if kind == "aborts" else 0.0,
        seed=seed,
    )
    chat = ManagedChat(engine, family.format, "hermes", history=history)
    for turn in range(TURNS_PER_ROLLOUT):
        most = rng.randrange(1, 60) if kind == "cut" and rng.random() < 0.5 else 4096
        completion = await chat.chat_completion(messages=messages, tools=tools or None, max_tokens=most)
        reply = {k: v for k, v in completion.choices[0].message.model_dump().items() if v is not None}
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            result = msgspec.json.encode({"output": words(rng, 40)}).decode()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": words(rng, 20)})
        if kind == "compaction" and turn % 5 == 4:
            messages = [{"role": "user", "content": words(rng, 80)}]
            chat.declare("compaction")
    return chat, engine


def judge(tally: Tally, chat: ManagedChat, engine: ToyEngine, family: Family, place: str, rate: str) -> None:
    """Check all conditions that one rollout must meet, with the ledger as it would be read from disk."""
    stored = msgspec.json.decode(msgspec.json.encode(chat.ledger.record()), type=LedgerRecord)
    verdict = verify_ledger(stored)
    rows = chat.ledger.rows()
    if not verdict.ok:
        tally.violations.append(f"{place}: {verdict.violation}")
    if verdict.trained != engine.sampled:
        tally.violations.append(f"{place}: {engine.sampled} tokens sampled, {verdict.trained} trained")
    if wrong := sum(_wrong_logprobs(row) for row in rows):
        tally.violations.append(f"{place}: {wrong} log-probabilities belong to a different token or position")
    if verdict.turns != TURNS_PER_ROLLOUT or not rows:
        tally.lost.append(f"{place}: {verdict.turns} turns")
    tally.turns += verdict.turns
    tally.tokens += verdict.tokens
    tally.trained += verdict.trained
    tally.rollouts += 1
    tally.rollouts_at[rate] += 1
    tally.segments.update(str(row.reason) for row in rows)
    tally.drifted[rate] += any(_drifts(row, family.tokenizer) for row in rows)


def _wrong_logprobs(row: TokenRow) -> int:
    return sum(
        row.masks[at] != row.tokens[at] or row.logprobs[at] != toy_logprob(row.tokens[at], at)
        for start, stop, _ in row.versions
        for at in range(start, stop)
    )


def _drifts(row: TokenRow, tokenizer: FastTokenizer) -> bool:
    return tokenizer.encode(tokenizer.decode(row.tokens)) != row.tokens


def run(sources: Mapping[str, str], turns: int) -> Tally:
    tally, ready = Tally(), []
    for family in families(sources):
        try:
            family.format.renderer([])
        except ConfigError as error:
            tally.refused[f"{family.name}: {error}"] += 1
            continue
        try:
            family.format.renderer(TOOLS)
        except ConfigError:
            NO_TOOLS.add(family.name)
        ready.append(family)
    plan = [(f, kind, rate, mode) for f in ready for kind in KINDS for rate in RATES for mode in ("template", "append")]
    for seed in range(-(-turns // (len(plan) * TURNS_PER_ROLLOUT))):
        for number, (family, kind, rate, mode) in enumerate(plan):
            place = f"{family.name}, {kind}, {rate}, history {mode}, seed {seed}"
            try:
                chat, engine = asyncio.run(rollout(family, kind, RATES[rate], seed * len(plan) + number, mode))
            except Exception as error:
                tally.lost.append(f"{place}: {type(error).__name__}: {error}")
                continue
            tally.families.add(family.name)
            judge(tally, chat, engine, family, place, rate)
    return tally


def rows_of(tally: Tally, turns: int) -> list[measure.Row]:
    rows = [
        measure.with_floor(measure.Row("template families", len(tally.families), "families"), 12),
        measure.Row("of these without tools (refused with them)", len(NO_TOOLS), "families"),
        measure.with_floor(measure.Row("turns", tally.turns, "turns"), turns),
        measure.Row("rollouts", tally.rollouts, "rollouts"),
        measure.with_ceiling(measure.Row("violations", len(tally.violations), "rollouts"), 0),
        measure.with_ceiling(measure.Row("rollouts lost", len(tally.lost), "rollouts"), 0),
        measure.Row("tokens in rows", tally.tokens, "tokens"),
        measure.Row("tokens trained, each once", tally.trained, "tokens"),
    ]
    rows += [measure.Row(f"rows: {reason}", count, "rows") for reason, count in sorted(tally.segments.items())]
    rows += [
        measure.Row(f"rollouts that decode-and-re-encode changes at {rate}", 100 * tally.drifted[rate] / count, "%")
        for rate, count in tally.rollouts_at.items()
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few thousand turns: only checks that it runs")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--templates", type=Path, default=None, metavar="PATH", help="a wheel or folder with templates")
    options = parser.parse_args()
    turns = QUICK_TURNS if options.quick else TURNS
    tally = run(templates.training_left_out(templates.sources(options.templates) | templates.own()), turns)
    for line in [*tally.violations[:10], *tally.lost[:10], *tally.refused]:
        print(line, file=sys.stderr)
    return measure.report("Token exactness", rows_of(tally, turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
