"""Where theirs is wrong, shown by running theirs and ours: the trajectory server, and what `serve` does with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from talking import Talk, group, trainer

from interop.answering import Answering, answering
from interop.batches import begin
from interop.peer import (
    DEADLINE_S,
    SCRIPTS,
    STOCK,
    THEIRS,
    PalaestraApi,
    RunApi,
    Server,
    ended,
    flags,
    running,
    until,
)
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer

Conversation = Callable[[Talk, Server], Awaitable[JSON]]


def each_server(out: Path, conversation: Conversation) -> tuple[JSON, JSON]:
    """What comes of the conversation with ours, and with theirs."""

    async def scenario(server: Server) -> JSON:
        async with server, Talk(server.url) as api:
            return await conversation(api, server)

    return asyncio.run(scenario(PalaestraApi(out))), asyncio.run(scenario(RunApi(out)))


def marks(batch: list[JSON]) -> list[int]:
    """Which groups a batch has."""
    return [each["tokens"][0][0] for each in batch]


def test_theirs_takes_rows_of_different_lengths(tmp_path: Path) -> None:
    bad: dict[str, dict[str, JSON]] = {
        "a short mask": {"masks": [[-100, 2], [-100, 2, 1]]},
        "a score too many": {"scores": [0.0, 1.0, 2.0]},
        "short log-probabilities": {"inference_logprobs": [[1.0, -0.5], [1.0, -0.5, -0.25]]},
    }

    async def send(api: Talk, server: Server) -> list[int]:
        await api.both()
        return [(await api.say("POST", "/scored_data", group(env_id=0, **changed)))[0] for changed in bad.values()]

    ours, theirs = each_server(tmp_path, send)
    assert theirs == [200, 200, 200]
    assert ours == [422, 422, 422]


def test_theirs_never_recovers_from_a_group_before_its_trainer(tmp_path: Path) -> None:
    """As it comes from any environment that did not notice a restart."""

    async def send_first(api: Talk, server: Server) -> tuple[int, JSON]:
        status, _ = await api.say("POST", "/scored_data", group())
        await api.say("POST", "/register", trainer())
        return status, await api.get("/batch")

    ours, theirs = each_server(tmp_path, send_first)
    assert ours == (503, {"batch": None})
    assert theirs[0] == 200
    assert theirs[1]["status"] == "error"
    assert "Trainer not registered" in theirs[1]["message"]


def test_theirs_forgets_everything_when_it_is_restarted(tmp_path: Path) -> None:
    async def restart(api: Talk, server: Server) -> JSON:
        await api.both()
        for number in range(2):
            await api.post("/scored_data", group(first=number, env_id=0))
        await server.kill()
        await server.start()
        await api.say("POST", "/register", trainer())
        batch = (await api.get("/batch"))["batch"]
        return batch and marks(batch)

    ours, theirs = each_server(tmp_path, restart)
    assert ours == [0, 1]
    assert theirs is None


def test_theirs_hands_out_the_last_batch_first(tmp_path: Path) -> None:
    """And says that the others were taken, while they wait where no status shows them."""

    async def wait_and_take(api: Talk, server: Server) -> JSON:
        await api.both(starting_step=0)
        for number in range(6):
            await api.post("/scored_data", group(first=number, env_id=0))
        first = marks((await api.get("/batch"))["batch"])
        return first, await api.get("/status")

    ours, theirs = each_server(tmp_path, wait_and_take)
    assert ours == ([0, 1], {"current_step": 1, "queue_size": 4})
    assert theirs == ([4, 5], {"current_step": 3, "queue_size": 0})


def test_theirs_drops_groups_of_one(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """All scores of a group of one are the same. Ours of one are in test_feeding."""

    async def scenario() -> None:
        async with RunApi(tmp_path) as server, Talk(server.url) as api, answering(tokenizer) as (model, url):
            await begin(api, 1)
            argv = flags(url, folder, group_size=1, rollout_server_url=server.url)
            async with running([THEIRS, STOCK, "serve", *argv], tmp_path):
                await until(_asked(model, 40), "forty rollouts")
            assert await api.get("/status") == {"current_step": 0, "queue_size": 0}

    asyncio.run(scenario())
    assert (tmp_path / "said").read_text().count("Scores are the same in a group, skipping") > 30


def test_theirs_gives_its_own_trainer_nothing_to_train_on(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Without log-probabilities, which its environments do not send unless they put groups together themselves, the
    example trainer's batch loop fails. Ours are trained on in test_feeding."""

    async def scenario() -> tuple[int, str]:
        async with RunApi(tmp_path) as server, answering(tokenizer) as (_, url):
            argv = flags(url, folder, group_size=4, rollout_server_url=server.url)
            training = [THEIRS, SCRIPTS / "train.py", server.url, "8", "1", tmp_path / "rows.json"]
            async with running([THEIRS, STOCK, "serve", *argv], tmp_path):
                done = await ended(training, tmp_path / "trainer")
            return done.code, done.said

    code, said = asyncio.run(scenario())
    assert code == 1
    assert "TypeError: object of type 'NoneType' has no len()" in said


def test_theirs_ends_when_its_server_is_away(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It asks three times. Ours waits for the server to come back: see test_feeding."""

    async def scenario() -> int:
        async with RunApi(tmp_path) as server, Talk(server.url) as api, answering(tokenizer) as (model, url):
            await begin(api, 8)
            argv = flags(url, folder, group_size=4, rollout_server_url=server.url)
            async with running([THEIRS, STOCK, "serve", *argv], tmp_path) as process:
                await until(_asked(model, 1), "a rollout")
                await server.kill()
                async with asyncio.timeout(DEADLINE_S):
                    return await process.wait()

    assert asyncio.run(scenario()) == 1
    assert "RetryError" in (tmp_path / "said").read_text()


def _asked(model: Answering, times: int) -> Callable[[], Awaitable[bool]]:
    async def enough() -> bool:
        return model.asked >= times

    return enough
