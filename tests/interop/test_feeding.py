"""Ours to theirs: an environment of ours feeds the original server, and the original trainer trains on what it gets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from talking import Talk

from interop.answering import answering
from interop.batches import Row, begin, delivered, take
from interop.peer import DEADLINE_S, OURS, SCRIPTS, SUMS, THEIRS, RunApi, ended, flags, running, until
from palaestra.rollouts.resume.state import read_finished
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer


def journalled(folder: Path) -> list[list[Row]]:
    """What the journal of the one run in `folder` holds, in the order of its groups."""
    (journal,) = folder.glob("runs/*/*/journal.jsonl")
    work = read_finished(journal)
    return [
        [(row.tokens, row.masks, row.logprobs or [], each.reward or 0.0) for each in group.scored for row in each.rows]
        for group in map(work.whole, sorted(work.ended))
    ]


@pytest.mark.slots
@pytest.mark.parametrize("size", [1, 4, 16])
def test_each_group_comes_once_with_its_logprobs(size: int, folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario() -> list[JSON]:
        async with RunApi(tmp_path) as server, Talk(server.url) as api, answering(tokenizer) as (_, url):
            await begin(api, 2 * size)
            argv = flags(url, folder, group_size=size, max_items=8, rollout_server_url=server.url)
            async with running([OURS, SUMS, "serve", *argv], tmp_path) as process:
                groups = [group for _ in range(4) for group in await take(api)]
                async with asyncio.timeout(DEADLINE_S):
                    assert await process.wait() == 0
            assert (await api.get("/status"))["queue_size"] == 0
            return groups

    groups = delivered(asyncio.run(scenario()))
    assert [len(group) for group in groups] == [size] * 8
    assert sorted(groups) == sorted(journalled(tmp_path))
    for _, masks, logprobs, _ in (row for group in groups for row in group):
        assert all((mask == -100) == (logprob > 0) for mask, logprob in zip(masks, logprobs, strict=True))


@pytest.mark.slots
@pytest.mark.parametrize("size", [1, 4, 16])
def test_each_group_comes_once_although_the_server_is_killed(
    size: int, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Killed with half a batch, with a whole one that the trainer has not taken, and after it has taken one."""

    async def scenario() -> list[JSON]:
        async with RunApi(tmp_path) as server, Talk(server.url) as api, answering(tokenizer) as (model, url):

            async def restarted(waiting: int) -> None:
                """Once so many groups wait and the environment has heard so, the server is killed and comes back."""

                async def wait() -> bool:
                    return bool((await api.get("/status"))["queue_size"] == waiting)

                await until(wait, f"{waiting} groups wait")
                asked = server.requests("/status-env") + 2

                async def heard() -> bool:
                    return server.requests("/status-env") >= asked

                await until(heard, "the environment hears of it")
                await server.kill()
                await server.start()
                await begin(api, 2 * size)

            await begin(api, 2 * size)
            argv = flags(url, folder, group_size=size, max_items=8, rollout_server_url=server.url)
            await model.up_to(0)
            async with running([OURS, SUMS, "serve", *argv], tmp_path) as process:
                await restarted(waiting=1)
                await model.up_to(3)
                await restarted(waiting=2)
                groups = await take(api)
                await restarted(waiting=2)
                groups += await take(api)
                await restarted(waiting=0)
                await model.up_to(7)
                groups += await take(api) + await take(api)
                async with asyncio.timeout(DEADLINE_S):
                    assert await process.wait() == 0
            assert (await api.get("/status"))["queue_size"] == 0
            return groups

    groups = delivered(asyncio.run(scenario()))
    assert len(groups) == 8
    assert sorted(groups) == sorted(journalled(tmp_path))
    said = (tmp_path / "said").read_text()
    assert said.count("because the trainer's server lost them") == 3
    assert "not sending groups again" not in said


@pytest.mark.slots
def test_their_trainer_takes_our_batches(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The example trainer's own loop: tensors of tokens, labels one further on, log-probabilities beside the labels."""

    async def scenario() -> list[JSON]:
        async with RunApi(tmp_path) as server, answering(tokenizer) as (_, url):
            argv = flags(url, folder, group_size=4, max_items=4, rollout_server_url=server.url)
            training = [THEIRS, SCRIPTS / "train.py", server.url, "8", "2", tmp_path / "rows.json"]
            async with running([OURS, SUMS, "serve", *argv], tmp_path):
                trained = await ended(training, tmp_path / "trainer")
            assert trained.code == 0, trained.said
        return list(json.loads((tmp_path / "rows.json").read_text()))

    trained = asyncio.run(scenario())
    (width,) = {len(row["tokens"]) for row in trained}
    expected = []
    for tokens, masks, logprobs, score in (row for group in journalled(tmp_path) for row in group):
        padding = width + 1 - len(tokens)
        expected.append(
            {
                "tokens": [*tokens, *[0] * padding][:-1],
                "labels": [*masks[1:], *[-100] * padding],
                "logprobs": [*logprobs[1:], *[1.0] * padding],
                "advantage": 1.0 if score == 1.0 else -1.0,
            }
        )
    assert sorted(trained, key=str) == sorted(expected, key=str)
    assert len(trained) == 16
