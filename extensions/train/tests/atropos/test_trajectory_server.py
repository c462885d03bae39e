"""The trajectory server over HTTP on the loopback: routes, refusals, batches, restarts."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from talking import Talk, environment, group, trainer

from golden_messages import raises
from manual_clock import ManualClock
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_train.atropos.exchange import SILENT_S
from palaestra_train.atropos.trajectory_server import serving


def talk(scenario: Callable[[Talk], Awaitable[None]], **settings: JSON) -> None:
    async def run() -> None:
        async with serving(**settings) as url, Talk(url) as talking:
            await scenario(talking)

    asyncio.run(run())


def test_the_flow_of_a_training_run() -> None:
    async def scenario(api: Talk) -> None:
        assert await api.get("/info") == {"batch_size": -1, "max_token_len": -1}
        assert await api.get("/status") == {"current_step": 0, "queue_size": 0}
        assert await api.post("/register-env", environment()) == {"status": "wait for trainer to start"}
        assert (await api.post("/register", trainer()))["uuid"] > 0
        assert await api.post("/register-env", environment()) == {"status": "wait for trainer to start"}
        assert await api.get("/batch") == {"batch": None}
        assert await api.post("/register-env", environment()) == {
            "status": "success",
            "env_id": 0,
            "wandb_name": "words_0",
            "checkpoint_dir": "/checkpoints",
            "starting_step": 3,
            "checkpoint_interval": 10,
            "num_steps": 100,
        }
        assert (await api.post("/register-env", environment()))["wandb_name"] == "words_1"
        assert await api.get("/info") == {"batch_size": 4, "max_token_len": 64}
        assert await api.get("/wandb_info") == {"group": "g", "project": "p"}
        assert await api.post("/scored_data", group(first=1, env_id=0)) == {"status": "received"}
        assert await api.get("/batch") == {"batch": None}
        assert await api.get("/status") == {"current_step": 3, "queue_size": 1}
        two = [group(first=2, env_id=1), group(first=3)]
        assert await api.post("/scored_data_list", two) == {"status": "received", "groups_processed": 2}
        assert (await api.get("/latest_example"))["tokens"][0][0] == 3
        batch = (await api.get("/batch"))["batch"]
        assert [each["tokens"][0][0] for each in batch] == [1, 2]
        assert batch[0]["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 2
        assert (batch[0]["env_id"], batch[0]["advantages"]) == (0, None)
        assert await api.get("/status") == {"current_step": 4, "queue_size": 1}
        assert await api.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}
        assert (await api.post("/disconnect-env", {"env_id": 9}))["status"] == "failure"
        assert await api.get("/reset_data") == "Reset successful"
        assert await api.get("/info") == {"batch_size": -1, "max_token_len": -1}

    talk(scenario)


def test_short_groups_wait_until_they_make_up_a_whole_one() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        assert await api.post("/scored_data", group(1, first=1, env_id=0)) == {"status": "buffered", "buffer_size": 1}
        assert (await api.get("/status"))["queue_size"] == 0
        assert await api.post("/scored_data", group(1, first=2, env_id=0)) == {"status": "buffered", "buffer_size": 0}
        assert (await api.get("/status"))["queue_size"] == 2
        await api.post("/scored_data", group(2, first=3, env_id=0))
        batch = (await api.get("/batch"))["batch"]
        assert [each["tokens"][0][0] for each in batch] == [1, 2, 3]

    talk(scenario)


def test_short_groups_of_an_environment_that_was_started_again_go_with_those_of_its_former_life(tmp_path: Path) -> None:
    """Its id is another one. What waits is put together in the same way when the server is started again."""

    async def before(api: Talk) -> None:
        await api.both()
        assert (await api.post("/scored_data", group(1, first=5, env_id=0)))["status"] == "buffered"
        await api.post("/register-env", environment())
        assert (await api.post("/scored_data", group(1, first=6, env_id=1)))["buffer_size"] == 0
        await api.post("/scored_data", group(1, first=7, env_id=1))

    async def after(api: Talk) -> None:
        await api.post("/register-env", environment())
        await api.post("/scored_data", group(1, first=8, env_id=2))
        assert [each["tokens"][0][0] for each in (await api.get("/batch"))["batch"]] == [5, 6, 7, 8]

    talk(before, store=tmp_path / "groups")
    talk(after, store=tmp_path / "groups")


def test_a_group_larger_than_the_registered_size_is_not_stuck() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        assert await api.post("/scored_data", group(3, env_id=0)) == {"status": "received"}
        assert await api.post("/scored_data", group(1, env_id=0)) == {"status": "buffered", "buffer_size": 1}
        assert await api.post("/scored_data", group(3, env_id=0)) == {"status": "received"}

    talk(scenario)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"masks": [[1], [2]]}, "masks[0]"),
        ({"masks": [[1, 2, 3]]}, "masks"),
        ({"scores": [1.0]}, "scores"),
        ({"scores": [1.0, "much"]}, "scores[1]"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [[1, -2, 3], list(range(64))]}, "tokens[0][1]"),
        ({"tokens": [[1, 2, 3], list(range(65))], "masks": [[1, 2, 3], list(range(65))]}, "inference_logprobs[1]"),
        ({"inference_logprobs": [[0.0] * 3, [0.0] * 2]}, "inference_logprobs[1]"),
        ({"ref_logprobs": [[0.0] * 3]}, "ref_logprobs"),
        ({"advantages": [[0.5], [0.5, 0.5]]}, "advantages[1]"),
        ({"messages": [[{"role": "user"}], []]}, "messages[0]"),
        ({"env_id": 5}, "env_id"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_field(changed: dict[str, JSON], field: str) -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        status, answer = await api.say("POST", "/scored_data", group(**changed))
        assert (status, answer["field"]) == (404 if field == "env_id" else 422, field), answer
        assert answer["detail"]
        assert (await api.get("/status"))["queue_size"] == 0

    talk(scenario)


def test_a_list_is_taken_whole_or_not_at_all() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        status, answer = await api.say("POST", "/scored_data_list", [group(), group(scores=[])])
        assert (status, answer["field"]) == (422, "[1].scores")
        status, answer = await api.say("POST", "/scored_data_list", [group(), group(env_id=7)])
        assert (status, answer["field"]) == (404, "env_id")
        assert (await api.get("/status"))["queue_size"] == 0

    talk(scenario)


def test_a_body_that_is_not_json_or_lacks_a_key() -> None:
    async def scenario(api: Talk) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{api.url}/register", data=b"{", headers={"Content-Type": "application/json"}) as reply,
        ):
            assert reply.status == 422
        status, answer = await api.say("POST", "/register", {"batch_size": 4})
        assert (status, answer["field"]) == (422, "max_token_len")
        status, answer = await api.say("POST", "/register", trainer(batch_size="many"))
        assert (status, answer["field"]) == (422, "batch_size")

    talk(scenario)


def test_gzip_bodies_are_unpacked() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        packed = gzip.compress(json.dumps(group(env_id=0)).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{api.url}/scored_data", data=packed, headers=headers) as reply:
                assert await reply.json() == {"status": "received"}
            async with session.post(f"{api.url}/scored_data", data=b"no gzip", headers=headers) as reply:
                assert reply.status == 400
        assert (await api.get("/status"))["queue_size"] == 1

    talk(scenario)


def test_beyond_the_bound_a_group_has_to_wait() -> None:
    async def scenario(api: Talk) -> None:
        status, answer = await api.say("POST", "/scored_data", group())
        assert (status, "no trainer" in answer["detail"]) == (503, True)
        await api.both()
        for number in range(2):
            await api.post("/scored_data", group(first=number))
        status, answer = await api.say("POST", "/scored_data", group())
        assert status == 429
        assert "2 groups" in answer["detail"]
        assert (await api.get("/batch"))["batch"] is not None
        await api.post("/scored_data", group())

    talk(scenario, most_groups=2)


def test_the_same_delivery_counts_once() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        assert await api.post("/scored_data", group(delivery_id="run/1")) == {"status": "received"}
        assert await api.post("/scored_data", group(delivery_id="run/1")) == {"status": "received", "duplicate": True}
        assert (await api.get("/status"))["queue_size"] == 1
        await api.post("/scored_data", group(delivery_id="run/2"))
        batch = (await api.get("/batch"))["batch"]
        assert len(batch) == 2
        assert "delivery_id" not in json.dumps(batch)

    talk(scenario)


def test_a_trainer_of_other_batches_is_refused_and_one_more_process_is_not() -> None:
    async def scenario(api: Talk) -> None:
        await api.both()
        await api.post("/register", trainer(wandb_group="other"))
        assert (await api.get("/wandb_info"))["group"] == "g"
        status, answer = await api.say("POST", "/register", trainer(batch_size=8))
        assert (status, answer["field"]) == (409, "batch_size")

    talk(scenario)


def test_a_trainer_that_is_started_again_counts_from_its_own_step(tmp_path: Path) -> None:
    """It had taken three batches when it died, and goes on from what it had saved after the first."""

    async def before(api: Talk) -> None:
        env_id = await api.both(num_steps=6)
        for number in range(3):
            await api.post("/scored_data", group(4, first=number, env_id=env_id))
            assert (await api.get("/batch"))["batch"]
        await api.post("/register", trainer(num_steps=6))
        assert (await api.get("/status"))["current_step"] == 6, "one more process of the same"
        await api.post("/register", trainer(starting_step=4, num_steps=8))

    async def after(api: Talk) -> None:
        assert (await api.get("/status"))["current_step"] == 4
        registered = await api.post("/register-env", environment())
        assert (registered["starting_step"], registered["num_steps"]) == (4, 8)

    talk(before, store=tmp_path / "groups")
    talk(after, store=tmp_path / "groups")


def test_least_shares_of_a_batch() -> None:
    clock = ManualClock()

    async def scenario(api: Talk) -> None:
        await api.both()
        await api.post("/register-env", environment(desired_name="rare", min_batch_allocation=0.5))
        status, answer = await api.say("POST", "/register-env", environment(min_batch_allocation=1.5))
        assert (status, answer["field"]) == (422, "min_batch_allocation")
        status, answer = await api.say("POST", "/register-env", environment(min_batch_allocation=0.75))
        assert (status, answer["field"]) == (503, "min_batch_allocation")
        assert "0.500 is left while rare_0 hold" in answer["detail"]
        for number in range(3):
            await api.post("/scored_data", group(first=number, env_id=0))
        assert await api.get("/batch") == {"batch": None}
        await api.post("/scored_data", group(first=9, env_id=1))
        batch = (await api.get("/batch"))["batch"]
        assert [each["tokens"][0][0] for each in batch] == [0, 9]
        status = await api.get("/status-env", {"env_id": 1})
        assert (status["queue_size"], status["self_queue_size"], status["unallocated_fraction"]) == (2, 0, 0.5)
        assert status["env_weight"] == 0.5
        assert await api.get("/batch") == {"batch": None}
        clock.now += SILENT_S
        assert (await api.get("/batch"))["batch"] is not None
        assert (await api.get("/status-env", {"env_id": 0}))["env_weight"] == 1.0

    talk(scenario, clock=clock)


def test_the_share_of_an_environment_that_was_killed_is_free_again() -> None:
    """Another registration of the same share waits for as long as the first may still live, and is not turned away."""
    clock = ManualClock()

    async def scenario(api: Talk) -> None:
        await api.both()
        wanted = environment(desired_name="rare", min_batch_allocation=0.75)
        await api.post("/register-env", wanted)
        assert (await api.say("POST", "/register-env", wanted))[0] == 503
        clock.now += SILENT_S
        assert (await api.post("/register-env", wanted))["status"] == "success"

    talk(scenario, clock=clock)


def test_least_shares_that_groups_do_not_fill_exactly_hold_nothing_up() -> None:
    """Three of four would be two groups of two, and one of four a third, for which there is no room."""

    async def scenario(api: Talk) -> None:
        await api.post("/register", trainer())
        await api.get("/batch")
        for share in (0.75, 0.25):
            await api.post("/register-env", environment(min_batch_allocation=share))
        for number in range(4):
            await api.post("/scored_data", group(first=number, env_id=number % 2))
        assert [each["tokens"][0][0] for each in (await api.get("/batch"))["batch"]] == [0, 1]

    talk(scenario)


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    store = tmp_path / "kept" / "groups.jsonl"

    async def before(api: Talk) -> None:
        await api.both()
        for number in range(3):
            await api.post("/scored_data", group(first=number, env_id=0, delivery_id=str(number)))
        await api.post("/scored_data", group(1, first=7, env_id=0))
        assert (await api.get("/batch"))["batch"] is not None

    async def after(api: Talk) -> None:
        assert await api.get("/status") == {"current_step": 4, "queue_size": 1}
        assert (await api.post("/scored_data", group(first=0, env_id=0, delivery_id="0")))["duplicate"] is True
        answer = await api.post("/scored_data", group(1, first=8, env_id=0))
        assert answer == {"status": "buffered", "buffer_size": 0}
        batch = (await api.get("/batch"))["batch"]
        assert [each["tokens"][0][0] for each in batch] == [2, 7, 8]

    talk(before, store=store)
    with store.open("ab") as torn:
        torn.write(b'{"event":"gro')
    talk(after, store=store)
    assert store.read_bytes().endswith(b"\n")


def test_a_store_belongs_to_one_server_and_to_this_program(tmp_path: Path) -> None:
    async def second(api: Talk) -> None:
        with raises(ConfigError, tmp_path / "s"):
            async with serving(store=tmp_path / "s"):
                pass

    talk(second, store=tmp_path / "s")
    (tmp_path / "other").write_text('{"schema": "something/1"}\n')
    with pytest.raises(ConfigError, match="something/1"):
        talk(second, store=tmp_path / "other")
    (tmp_path / "file").touch()
    with raises(ConfigError, tmp_path / "file/s"):
        talk(second, store=tmp_path / "file" / "s")
    with (tmp_path / "s").open("ab") as file:
        file.write(b"damage\n")
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        talk(second, store=tmp_path / "s")


def test_a_store_is_made_of_nothing_but_an_empty_file_or_its_own(tmp_path: Path) -> None:
    async def nothing(api: Talk) -> None: ...

    os.mkfifo(tmp_path / "fifo")
    for special in (Path("/dev/full"), Path("/dev/null"), tmp_path / "fifo"):
        with raises(ConfigError, special):
            talk(nothing, store=special)
    foreign = tmp_path / "notes"
    foreign.write_text("one line of somebody's")
    with pytest.raises(ConfigError, match="notes has schema None"):
        talk(nothing, store=foreign)
    assert foreign.read_text() == "one line of somebody's"
    for torn in ("", '{"schema":"pal'):
        (tmp_path / "torn").write_text(torn)
        talk(nothing, store=tmp_path / "torn")
        assert (tmp_path / "torn").read_text().endswith('/1"}\n')
