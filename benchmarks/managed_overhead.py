"""The cost of token-exact chat per turn, next to its peers: python benchmarks/managed_overhead.py [--quick] [--json
FILE]

A conversation of 1, 8, 32 and 128 turns with a tool, against an engine in the same process that answers immediately. It
uses a byte-level BPE trained on modules of the standard library and Qwen3's own template, which is read from the wheel
of `trl` at run time (`--templates PATH` names a wheel or folder instead). The result is the CPU time per turn, averaged
over all turns, so costs that grow with the history show in the long conversations.

Peers run if you name their interpreters, each in a separate virtual environment, on the same conversations
(`_chat_peers`): `--atropos PYTHON` is an interpreter that has atroposlib 0.4.0. Its managed server renders and decodes
the whole conversation every turn. It can show and parse tools only if vLLM is installed, so it is compared without
tools. `--verifiers PYTHON` is an interpreter that has verifiers 0.4; its training client is measured with tools and
with the parser of its renderer.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import _chat_peers as peers
import _measure as measure
import _templates as templates
from _chat_peers import Chat

TEMPLATE = "qwen3"
LENGTHS = (1, 8, 32, 128)
TARGET_MS = 0.5
FLAT = 1.5
"""A turn in a conversation of 128 turns may cost at most this many times as much as a turn in a conversation of 8."""

CHEAPER, CHEAPER_AT = 5.0, 32
"""The factor by which a turn must be cheaper than the peers', and the length of the conversation, in turns."""

PEERS = {"atropos": ("atroposlib 0.4.0", "chat"), "verifiers": ("verifiers 0.4 with tools and parser", "tools")}
"""The peers' names, and the cases of Palaestra with which they are compared."""

PROMPT = "Look through the files and say which of them has the error. " * 20
CALL = 'I look into the next file.\n<tool_call>\n{"name": "read", "arguments": {"path": "src/module.py"}}\n</tool_call>'
RESULT = "def area(width, height):\n    return width + height  # the error\n" * 6
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


async def conversation(chat: Chat, turns: int, tools: bool) -> float:
    """Measure CPU milliseconds per turn. The messages are those that an agent loop writes."""
    messages: list[dict[str, object]] = [{"role": "user", "content": PROMPT}]
    started = time.process_time()
    for _ in range(turns):
        completion = await (chat(messages=messages, tools=[TOOL]) if tools else chat(messages=messages))
        message = completion.choices[0].message  # type: ignore[attr-defined]
        reply: dict[str, object] = {"role": "assistant", "content": message.content or ""}
        if message.tool_calls:
            reply["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in message.tool_calls
            ]
        messages.append(reply)
        role = {"role": "tool", "tool_call_id": message.tool_calls[0].id} if message.tool_calls else {"role": "user"}
        messages.append({**role, "content": RESULT})
    return (time.process_time() - started) * 1e3 / turns


def repeated(start: Callable[[], Chat], turns: int, tools: bool) -> float:
    """Return the median over several conversations, after one conversation to warm up."""

    async def go() -> float:
        count = max(3, 64 // turns)
        await conversation(start(), min(turns, 8), tools)
        samples = sorted([await conversation(start(), turns, tools) for _ in range(count)])
        return samples[len(samples) // 2]

    return asyncio.run(go())


def ours(turns: int, template: str, tools: bool) -> float:
    """Measure Palaestra's managed chat, with tools and a parser or without both."""
    from palaestra_tokens.templates import ChatFormat
    from palaestra_tokens.testing.fake_engine import ToyEngine
    from palaestra_tokens.token_exact.managed_chat import ManagedChat

    tokenizer = make_tokenizer()
    chat_format = ChatFormat(tokenizer, template)

    def start() -> Chat:
        return ManagedChat(
            Instant(ToyEngine(tokenizer, itertools.repeat(CALL))), chat_format, "hermes" if tools else None
        ).chat_completion

    return repeated(start, turns, tools)


class Instant:
    """An engine with one prepared answer."""

    name = "instant"

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._answer: object = None

    async def generate(self, input_ids: object, sampling: object) -> object:
        if self._answer is None:
            self._answer = await self._engine.generate(input_ids, {})  # type: ignore[attr-defined]
        return self._answer


def make_tokenizer():  # type: ignore[no-untyped-def]
    """Return a byte-level BPE with up to 4,096 ids from three modules of the standard library, and ChatML's special
    tokens."""
    from palaestra_tokens.testing.fake_engine import toy_tokenizer

    corpus = [Path(module.__file__).read_text(encoding="utf-8") for module in (asyncio, argparse, subprocess)]
    words = [f"<{end}{word}>" for word in ("think", "tool_call", "tool_response") for end in ("", "/")]
    return toy_tokenizer(corpus, size=4096, plain=words)


def save_tokenizer(folder: Path, template: str) -> None:
    """Write the same tokenizer and template in the form that peers load."""
    tokenizer = make_tokenizer()
    tokenizer.save(folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


def measured(python: str, *case: str) -> measure.Sample:
    """Measure one case in a separate process."""
    done = subprocess.run([python, __file__, "--case", *case], stdout=subprocess.PIPE, text=True, check=True)
    return {"ms": float(done.stdout.splitlines()[-1])}


def cases(pythons: Mapping[str, str], folder: str) -> Iterator[tuple[str, Callable[[], measure.Sample]]]:
    runs = {"tools": sys.executable, "chat": sys.executable, **pythons}
    for turns in LENGTHS:
        for kind, python in runs.items():
            yield f"{kind} {turns}", functools.partial(measured, python, kind, str(turns), folder)


def rows_of(found: dict[str, dict[str, float]]) -> list[measure.Row]:
    rows = []
    for turns in LENGTHS:
        with_tools, chat = found[f"tools {turns}"]["ms"], found[f"chat {turns}"]["ms"]
        row = measure.Row(f"palaestra with tools and parser, {turns} turns", with_tools, "ms CPU")
        rows.append(measure.with_ceiling(row, TARGET_MS))
        rows.append(measure.Row(f"palaestra, {turns} turns", chat, "ms CPU"))
        for kind, (name, case) in PEERS.items():
            if f"{kind} {turns}" in found:
                peer = found[f"{kind} {turns}"]["ms"]
                ratio = peer / found[f"{case} {turns}"]["ms"]
                row = measure.Row(f"{name}, {turns} turns", peer, "ms CPU", ratio=ratio)
                rows.append(measure.judged(row, CHEAPER, ratio >= CHEAPER) if turns == CHEAPER_AT else row)
    growth = found["tools 128"]["ms"] / found["tools 8"]["ms"]
    rows.append(measure.with_ceiling(measure.Row("palaestra, 128 turns against 8", growth, "times"), FLAT))
    return rows


def run_case(kind: str, turns: int, folder: str) -> float:
    """Measure one case in the interpreter that has the packages for it."""
    if kind in peers.PEERS:
        return repeated(peers.PEERS[kind](folder, CALL), turns, tools=PEERS[kind][1] == "tools")
    return ours(turns, (Path(folder) / "chat_template.jinja").read_text(), kind == "tools")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: only checks that the benchmark runs")
    parser.add_argument("--rounds", type=int, default=None, help="how often every case is measured (default 5)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("--atropos", default=None, metavar="PYTHON", help="an interpreter that has atroposlib 0.4.0")
    parser.add_argument("--verifiers", default=None, metavar="PYTHON", help="an interpreter that has verifiers 0.4")
    parser.add_argument("--templates", type=Path, default=None, metavar="PATH", help="a wheel or folder with templates")
    parser.add_argument("--case", nargs="+", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, turns, folder = options.case
        print(run_case(kind, int(turns), folder))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), templates.sources(options.templates)[TEMPLATE])
        pythons = {kind: python for kind in PEERS if (python := getattr(options, kind))}
        found = measure.interleaved(dict(cases(pythons, folder)), options.rounds or (1 if options.quick else 5))
    return measure.report("Managed chat: CPU per turn", rows_of(found), options.json)


if __name__ == "__main__":
    sys.exit(main())
