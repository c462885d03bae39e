"""The same script and command line under both runtimes."""

from __future__ import annotations

import shutil
from pathlib import Path

from interop.answering import answering
from interop.peer import OURS, STOCK, SUMS, THEIRS, Ended, ended, flags, lines
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer

SIDES = {"ours": OURS, "theirs": THEIRS}


async def process(
    side: str, folder: Path, tokenizer: Tokenizer, out: Path, *argv: str, script: Path = SUMS, **how: JSON
) -> Ended:
    """One run of `process` to its end, in `out`/`side`. `how` is how the model answers, `argv` comes last."""
    async with answering(tokenizer, **how) as (_, url):
        style = {"style": "tools"} if how.get("chat") else {}
        return await ended([SIDES[side], script, "process", *flags(url, folder, **style), *argv], out / side)


async def process_stock(side: str, folder: Path, tokenizer: Tokenizer, out: Path, *argv: str) -> Ended:
    """The same for `STOCK`, whose imports `palaestra env port` rewrites for ours."""
    script = STOCK
    if side == "ours":
        script = Path(shutil.copy(STOCK, out))
        port = await ended([OURS, "-m", "palaestra", "env", "port", script, "--write"], out / "port")
        assert port.code == 0, port.said
    return await process(side, folder, tokenizer, out, *argv, script=script)


async def processed(
    folder: Path, tokenizer: Tokenizer, out: Path, style: str, **how: JSON
) -> tuple[list[JSON], list[JSON]]:
    """The groups of ours and of theirs, three of four rollouts each."""
    said = ("--env.style", style, "--env.group_size", "4", "--env.total_steps", "3", "--env.max_items", "5")
    for side in SIDES:
        done = await process(side, folder, tokenizer, out, *said, **how)
        assert done.code == 0, done.said
    return lines(groups_file(out, "ours")), lines(groups_file(out, "theirs"))


def groups_file(out: Path, side: str, name: str = "sums") -> Path:
    """Where `process` writes its groups."""
    if side == "theirs":
        return out / side / "data" / f"{name}.jsonl"
    (path,) = (out / side).glob(f"runs/{name}--*/*/groups.jsonl")
    return path
