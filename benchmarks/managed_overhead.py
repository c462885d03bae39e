"""What token-exact chat costs per turn beside its peers: python benchmarks/managed_overhead.py [--quick] [--json FILE]

A conversation of 1, 8, 32 and 128 turns with a tool, against an engine in the same process that answers at once, with a
byte-level BPE trained on the standard library and Qwen3's own template, which comes from the wheel of `trl` at run time
(`--templates PATH` names a wheel or folder instead). CPU time per turn, over all turns: what grows with history shows
in the long ones.

Peers run where they are given, each in a virtual environment of its own, on the same conversations:
`--atropos PYTHON` is an interpreter that has atroposlib 0.4.0. Its managed server renders and decodes the whole
conversation every turn. It can show and parse tools only where vLLM is installed, so it is compared without.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import _measure as measure
import _templates as templates

TEMPLATE = "qwen3"
LENGTHS = (1, 8, 32, 128)
TARGET_MS = 0.5
FLAT = 1.5
"""A turn of 128 may cost so many times what one of 8 does."""

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
Chat = Callable[..., Awaitable[object]]


async def conversation(chat: Chat, turns: int, tools: bool) -> float:
    """CPU milliseconds per turn. The messages are written as an agent loop writes them."""
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
    """The median over several conversations, after one to warm up."""

    async def go() -> float:
        count = max(3, 64 // turns)
        await conversation(start(), min(turns, 8), tools)
        samples = sorted([await conversation(start(), turns, tools) for _ in range(count)])
        return samples[len(samples) // 2]

    return asyncio.run(go())


def ours(turns: int, template: str, tools: bool) -> float:
    """Managed chat of this project, with tools and a parser or without either."""
    from palaestra.inference.managed import ManagedChat
    from palaestra.inference.templates import ChatFormat
    from palaestra.inference.toy import ToyEngine

    tokenizer = make_tokenizer()
    chat_format = ChatFormat(tokenizer, template)

    def start() -> Chat:
        return ManagedChat(
            Instant(ToyEngine(tokenizer, itertools.repeat(CALL))), chat_format, "hermes" if tools else None
        ).chat_completion

    return repeated(start, turns, tools)


class Instant:
    """An engine that has its one answer ready."""

    name = "instant"

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._answer: object = None

    async def generate(self, input_ids: object, sampling: object) -> object:
        if self._answer is None:
            self._answer = await self._engine.generate(input_ids, {})  # type: ignore[attr-defined]
        return self._answer


def make_tokenizer():  # type: ignore[no-untyped-def]
    """A byte-level BPE of 4,096 ids trained on the standard library, with ChatML's special tokens."""
    from palaestra.inference.toy import toy_tokenizer

    corpus = [Path(module.__file__).read_text(encoding="utf-8") for module in (asyncio, argparse, subprocess)]
    return toy_tokenizer(corpus, size=4096)


def atropos(folder: str, turns: int) -> float:
    """The managed server of atroposlib 0.4.0 over a server object that answers at once. Runs in its environment."""
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [*tokenizer.encode(CALL), tokenizer.eos_token_id]

    class Server:
        config = SimpleNamespace(model_name="instant")

        async def tokens_and_logprobs_completion(self, **request: object) -> object:
            prompt = request.get("input_ids") or tokenizer.encode(request["prompt"])
            return prompt, [ids], [[-0.5] * len(ids)], ["stop"]

    return repeated(lambda: ManagedServer(Server(), tokenizer=tokenizer).chat_completion, turns, tools=False)


def save_tokenizer(folder: Path, template: str) -> None:
    """The same tokenizer and template in the form that peers load."""
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
    """One case in a process of its own."""
    done = subprocess.run([python, __file__, "--case", *case], stdout=subprocess.PIPE, text=True, check=True)
    return {"ms": float(done.stdout.splitlines()[-1])}


def cases(atropos_python: str | None, folder: Path) -> Iterator[tuple[str, Callable[[], measure.Sample]]]:
    for turns in LENGTHS:
        for kind in ("tools", "chat"):
            yield (
                f"{kind} {turns}",
                lambda kind=kind, turns=turns: measured(sys.executable, kind, str(turns), str(folder)),
            )
        if atropos_python:
            yield f"atropos {turns}", lambda turns=turns: measured(atropos_python, "atropos", str(turns), str(folder))


def rows_of(found: dict[str, dict[str, float]]) -> list[measure.Row]:
    rows = []
    for turns in LENGTHS:
        with_tools, chat = found[f"tools {turns}"]["ms"], found[f"chat {turns}"]["ms"]
        row = measure.Row(f"palaestra with tools and parser, {turns} turns", with_tools, "ms CPU")
        rows.append(measure.with_ceiling(row, TARGET_MS))
        rows.append(measure.Row(f"palaestra, {turns} turns", chat, "ms CPU"))
        if f"atropos {turns}" in found:
            peer = found[f"atropos {turns}"]["ms"]
            rows.append(measure.Row(f"atroposlib 0.4.0, {turns} turns", peer, "ms CPU", ratio=peer / chat))
    growth = found["tools 128"]["ms"] / found["tools 8"]["ms"]
    rows.append(measure.with_ceiling(measure.Row("palaestra, 128 turns against 8", growth, "times"), FLAT))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: shows that it runs, proves no number")
    parser.add_argument("--rounds", type=int, default=None, help="how often every case is measured (default 5)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("--atropos", default=None, metavar="PYTHON", help="an interpreter that has atroposlib 0.4.0")
    parser.add_argument("--templates", type=Path, default=None, metavar="PATH", help="a wheel or folder with templates")
    parser.add_argument("--case", nargs="+", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, turns, *rest = options.case
        template = (Path(rest[0]) / "chat_template.jinja").read_text()
        ms = atropos(rest[0], int(turns)) if kind == "atropos" else ours(int(turns), template, kind == "tools")
        print(ms)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), templates.sources(options.templates)[TEMPLATE])
        found = measure.interleaved(
            dict(cases(options.atropos, Path(folder))), options.rounds or (1 if options.quick else 5)
        )
    return measure.report("Managed chat: CPU per turn", rows_of(found), options.json)


if __name__ == "__main__":
    sys.exit(main())
