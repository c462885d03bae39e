"""Where theirs is wrong, shown by running theirs and ours: `process`, from the command line to its files."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from recorded import embedded

from interop.answering import Gauge, answering
from interop.peer import DEADLINE_S, SUMS, Ended, ended, flags, kill, lines, running, until
from interop.sides import SIDES, groups_file, process, process_stock, processed
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer

pytestmark = pytest.mark.slots

SILENT_S = 15.0
"""How long theirs is watched saying nothing. It goes on for ever; ours takes a second or two for everything."""


def each_side(folder: Path, tokenizer: Tokenizer, out: Path, *argv: str, **how: JSON) -> tuple[Ended, Ended]:
    """The ends of ours and of theirs."""

    async def scenario() -> list[Ended]:
        return [await process(side, folder, tokenizer, out, *argv, **how) for side in SIDES]

    ours, theirs = asyncio.run(scenario())
    return ours, theirs


def test_theirs_doubles_the_end_of_a_turn(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The engine gives its end token, and the chat template writes it once more: a prompt that no model has seen."""
    ours, theirs = asyncio.run(processed(folder, tokenizer, tmp_path, "twice"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["messages"] == other["messages"]
        for tokens in mine["tokens"]:
            assert tokenizer.decode(tokens).count("<|im_end|>") == 4
        for tokens in other["tokens"]:
            assert "<|im_end|><|im_end|>" in tokenizer.decode(tokens)


def test_theirs_loses_log_probabilities(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its rollouts return them, and the default `collect_trajectories` leaves them out."""
    ours, theirs = asyncio.run(processed(folder, tokenizer, tmp_path, "once"))
    assert not any(group.get("inference_logprobs") for group in theirs)
    for group in ours:
        assert [len(row) for row in group["inference_logprobs"]] == [len(row) for row in group["tokens"]]


def test_theirs_waits_for_ever_for_a_server_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    async def scenario(url: str) -> Ended:
        argv = [*flags(url, folder, style="tools", total_steps=1), "--openai.health_check", "true"]
        (tmp_path / "theirs").mkdir()
        async with running([SIDES["theirs"], SUMS, "process", *argv], tmp_path / "theirs") as waiting:
            ours = await ended([SIDES["ours"], SUMS, "process", *argv], tmp_path / "ours")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SILENT_S):
                    await waiting.wait()
        return ours

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        ours = asyncio.run(scenario(url))
    assert ours.code == 4
    assert url in ours.said
    theirs = (tmp_path / "theirs/said").read_text()
    assert not any(word in theirs.lower() for word in ("refused", "unreachable", "connection error", "not healthy"))


def test_theirs_reads_minus_one_as_one(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    argv = ("--env.group_size", "1", "--env.total_steps", "3", "--env.max_items", "-1")
    ours, theirs = each_side(folder, tokenizer, tmp_path, *argv)
    assert ours.code == theirs.code == 0
    assert [len(lines(groups_file(tmp_path, side))) for side in SIDES] == [3, 1]


def test_theirs_answers_a_wrong_value_with_a_traceback(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours, theirs = each_side(folder, tokenizer, tmp_path, "--env.total_steps", "some")
    assert (ours.code, theirs.code) == (2, 1)
    assert "Traceback" in theirs.said
    assert "Traceback" not in ours.said
    assert "total_steps" in ours.said


def test_theirs_loses_finished_groups_to_a_kill(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario(side: str) -> None:
        out = tmp_path / side
        out.mkdir()
        async with answering(tokenizer) as (model, url):
            await model.up_to(1)
            argv = flags(url, folder, group_size=2, total_steps=4, max_num_workers=1)
            async with running([SIDES[side], SUMS, "process", *argv], out) as process:

                async def third() -> bool:
                    return model.asked == 6

                await until(third, "the third group is asked for")
                await kill(process)

    for side in SIDES:
        asyncio.run(scenario(side))
    assert groups_file(tmp_path, "theirs").stat().st_size == 0
    assert len(lines(groups_file(tmp_path, "ours"))) == 2


def test_theirs_rolls_out_one_group_at_a_time(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def most_at_once(side: str, patience_s: float) -> int:
        gauge = Gauge(crowd=8, patience_s=patience_s)
        argv = ("--env.group_size", "2", "--env.total_steps", "4", "--env.max_items", "4", "--env.max_num_workers", "4")
        done = await process(side, folder, tokenizer, tmp_path, *argv, gauge=gauge)
        assert done.code == 0, done.said
        return gauge.most

    assert asyncio.run(most_at_once("theirs", 3.0)) == 2
    assert asyncio.run(most_at_once("ours", DEADLINE_S)) == 8


@pytest.mark.parametrize("what", ["nothing", "raises"])
def test_theirs_ends_when_one_rollout_fails(what: str, folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario() -> list[Ended]:
        argv = ("--env.group_size", "2", "--env.total_steps", "3", f"--env.{what}", "2")
        return [await process_stock(side, folder, tokenizer, tmp_path, *argv) for side in SIDES]

    ours, theirs = asyncio.run(scenario())
    assert (ours.code, theirs.code) == (3, 1)
    assert "Traceback" in theirs.said
    assert [len(lines(groups_file(tmp_path, side, "stock"))) for side in SIDES] == [2, 1]


def test_theirs_puts_what_a_model_writes_into_html_as_it_is(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = "<script>fetch('//evil')</script>"
    argv = ("--env.group_size", "1", "--env.total_steps", "1")
    each_side(folder, tokenizer, tmp_path, *argv, more=script)
    assert script in (tmp_path / "theirs/data/sums.html").read_text()
    (report,) = (tmp_path / "ours").rglob("*.html")
    assert script not in report.read_text()
    assert script in str(embedded(report)["answers"])
