"""One script under both runtimes, the same model: where theirs is right, the groups are equal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from interop.peer import lines
from interop.sides import SIDES, groups_file, process_stock, processed
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer

TOKENS = ("tokens", "masks", "scores", "messages")


def rows(group: JSON, names: tuple[str, ...]) -> list[list[JSON]]:
    """The rows of a group, in an order that does not depend on which of them was answered first."""
    return sorted(([group[name][number] for name in names] for number in range(len(group["scores"]))), key=str)


@pytest.mark.slots
@pytest.mark.parametrize(
    ("style", "how", "names"),
    [
        pytest.param("once", {}, TOKENS, id="one turn of tokens"),
        pytest.param(
            "twice", {"ends": False}, TOKENS, id="two turns of tokens, from a server that keeps its end tokens"
        ),
        pytest.param("tools", {"chat": True}, ("scores", "messages"), id="plain chat with a tool"),
    ],
)
def test_equal_groups(
    style: str, how: dict[str, JSON], names: tuple[str, ...], folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours, theirs = asyncio.run(processed(folder, tokenizer, tmp_path, style, **how))
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert rows(mine, names) == rows(other, names)
        assert set(mine["scores"]) == {1.0, 0.25}
        assert [mine[key] for key in other if key not in TOKENS] == [other[key] for key in other if key not in TOKENS]


@pytest.mark.slots
def test_a_ported_script_gives_equal_groups(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Log-probabilities too: this script puts its groups together itself."""

    async def scenario() -> None:
        argv = ("--env.group_size", "4", "--env.total_steps", "3", "--env.logprobs", "true")
        for side in SIDES:
            done = await process_stock(side, folder, tokenizer, tmp_path, *argv)
            assert done.code == 0, done.said

    asyncio.run(scenario())
    ours, theirs = (lines(groups_file(tmp_path, side, "stock")) for side in SIDES)
    names = ("tokens", "masks", "inference_logprobs", "scores")
    assert [rows(group, names) for group in ours] == [rows(group, names) for group in theirs]
    assert len(ours) == 3
