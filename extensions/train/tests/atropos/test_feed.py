"""The environment's side of the trajectory API against our server: restarts, lost answers, limits, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import pytest
from aiohttp import web
from feeds import Said, fed, marks
from talking import Talk, environment, group, trainer

from palaestra_slots.core.errors import TrainerRefused, TrainerUnavailable
from palaestra_train.atropos.connection import FeedSettings
from palaestra_train.atropos.exchange import Exchange
from palaestra_train.atropos.trajectory_server import TrajectoryServer, serving

IMPATIENT = FeedSettings(name="words", group_size=2, max_token_length=32, poll_s=0.01, patience_s=0.05)


class Restartable:
    """A server that can go and come back at the same address."""

    def __init__(self, store: Path | None) -> None:
        self._store = store
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.url = await self._stack.enter_async_context(serving(port=port, store=self._store))

    async def stop(self) -> None:
        await self._stack.aclose()


async def test_it_waits_for_the_trainer_and_is_known_by_its_name(tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api, asyncio.TaskGroup() as tasks:
        said = Said()

        async def feed_one() -> None:
            async with fed(tmp_path, url, said) as feed:
                assert await feed.admit()
                feed.offer("run/0", group(first=7))

        tasks.create_task(feed_one())
        await said.until("waiting for the trainer")
        await api.post("/register", trainer(batch_size=2))
        assert await api.get("/batch") == {"batch": None}
        await said.until("words_0")
    waiting, registered = said.notes
    assert waiting == "waiting for the trainer to start"
    assert registered == f"registered with {url} as words_0, batches of 2 sequences"
    assert json.loads((tmp_path / "deliveries.jsonl").read_text().splitlines()[1]) == {"delivery_id": "run/0"}


@pytest.mark.parametrize("durable", [True, False])
async def test_groups_go_on_arriving_when_the_server_comes_back(tmp_path: Path, durable: bool) -> None:
    said = Said()
    async with Restartable(tmp_path / "store" if durable else None) as server, Talk(server.url) as api:
        await api.both()
        async with fed(tmp_path, server.url, said) as feed:
            feed.offer("run/0", group(first=0))
            await feed.drained()
            assert (await api.get("/status"))["queue_size"] == 1
            await server.stop()
            feed.offer("run/1", group(first=1))
            feed.offer("run/2", group(first=2))
            await server.start()
            if not durable:
                await said.until("registering again")
                await api.post("/register", trainer())
                await api.get("/batch")
            await feed.drained()
        batch = (await api.get("/batch"))["batch"]
        rest = (await api.get("/status"))["queue_size"]
        if durable:
            assert marks(batch)[0] == 0
            assert rest == 1
            assert "registering again" not in " ".join(said.notes)
        else:
            assert sorted(marks(batch)) == [1, 2]
            assert rest == 0


class Forgetful(TrajectoryServer):
    """Takes a group and breaks the connection instead of saying so, the first `losses` times."""

    def __init__(self, losses: int, *, original: bool) -> None:
        super().__init__(Exchange())
        self.losses = losses
        self.original = original
        self.app.middlewares.append(self._lose)

    @web.middleware
    async def _lose(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        answer = await handler(request)
        if request.path == "/scored_data" and self.losses:
            self.losses -= 1
            if self.original:
                self.exchange._deliveries.clear()  # the original knows no delivery ids
            assert request.transport is not None
            request.transport.abort()
        return answer


@pytest.mark.parametrize("original", [True, False])
async def test_a_lost_answer_does_not_double_a_group(tmp_path: Path, original: bool) -> None:
    runner = web.AppRunner(Forgetful(2, original=original).app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Talk(url) as api:
            await api.both()
            async with fed(tmp_path, url, Said()) as feed:
                feed.offer("run/0", group(first=0))
                await feed.drained()
            assert (await api.get("/status"))["queue_size"] == 1
    finally:
        await runner.cleanup()


async def test_no_more_groups_begin_than_the_trainer_may_be_behind(tmp_path: Path) -> None:
    """Batches of two groups, three batches off policy: six groups, then none until a batch is taken."""
    async with serving() as url, Talk(url) as api:
        await api.both()
        await api.post("/disconnect-env", {"env_id": 0})
        async with fed(tmp_path, url, Said()) as feed:
            for number in range(6):
                assert await feed.admit()
                feed.offer(f"run/{number}", group(first=number))
            await feed.drained()
            seventh = asyncio.ensure_future(feed.admit())
            await asyncio.sleep(0)
            assert not seventh.done()
            assert marks((await api.get("/batch"))["batch"])
            assert await seventh
            feed.offer("run/6", None)


async def test_groups_that_make_up_no_batch_hold_nothing_up(tmp_path: Path) -> None:
    """Batches of four, and groups that came out with three rows: twelve rows are three batches, and none of four."""

    async def scenario() -> list[int]:
        said = Said()
        async with serving() as url, Talk(url) as api:
            await api.both()
            await api.post("/disconnect-env", {"env_id": 0})
            async with fed(tmp_path, url, said) as feed:
                for number in range(4):
                    assert await feed.admit()
                    feed.offer(f"run/{number}", group(3, first=number))
                await feed.drained()
                await said.until("makes up a batch of 4 sequences")
                assert await feed.admit()
                feed.offer("run/4", group(4, first=9))
            return marks((await api.get("/batch"))["batch"])

    assert await asyncio.wait_for(scenario(), 30) == [9]


async def test_the_trainer_that_has_enough_ends_the_run(tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.both(starting_step=0, num_steps=1)
        async with fed(tmp_path, url, Said()) as feed:
            for number in range(2):
                assert await feed.admit()
                feed.offer(f"run/{number}", group(first=number))
            await feed.drained()
            assert (await api.get("/batch"))["batch"]
            while await feed.admit():
                feed.offer("more", None)
            assert feed.connection.finished


async def test_a_refused_group_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    said = Said()
    async with serving() as url, Talk(url) as api:
        await api.both()
        with pytest.RaisesGroup(
            pytest.RaisesExc(TrainerRefused, match=r"refused 1 group; the last refusal: run/0: HTTP 422: masks")
        ):
            async with fed(tmp_path, url, said) as feed:
                feed.offer("run/0", group(masks=[[1], [1]]))
                feed.offer("run/1", group())
        assert (await api.get("/status"))["queue_size"] == 1
    assert "refused the group run/0" in said.notes[-1]


async def test_a_delivered_group_is_not_sent_again_by_the_next_process(tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.both()
        for _ in range(2):
            async with fed(tmp_path, url, Said()) as feed:
                feed.offer("run/0", group(env_id=None))
        assert (await api.get("/status"))["queue_size"] == 1
        assert (await api.say("POST", "/register-env", environment()))[1]["wandb_name"] == "words_3"


async def test_a_server_that_is_never_there_ends_the_patience(tmp_path: Path) -> None:
    async with Restartable(None) as server:
        await server.stop()
        with pytest.RaisesGroup(pytest.RaisesExc(TrainerUnavailable, match="does not answer /register-env")):
            async with fed(tmp_path, server.url, Said(), IMPATIENT):
                pass


@asynccontextmanager
async def answering(*answers: tuple[int, str]) -> AsyncIterator[str]:
    """A server that gives these answers to a registration, the last one again and again, and nothing else."""
    left = list(answers)

    async def answer(request: web.Request) -> web.Response:
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_post("/register-env", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, '{"detail": "Not Found"}', "is not a trajectory server.*HTTP 404: Not Found.*rollout_server_url"),
        (401, '{"detail": "no key"}', "is not a trajectory server.*HTTP 401: no key"),
        (200, "<html>hello</html>", "register-env does not answer like a trajectory server.*hello"),
        (200, "null", "got `null`"),
        (200, '{"status": "success", "env_id": "zero"}', "env_id"),
    ],
)
async def test_what_is_no_trajectory_server_is_said_at_once(tmp_path: Path, status: int, body: str, told: str) -> None:
    async with answering((status, body)) as url:
        with pytest.RaisesGroup(pytest.RaisesExc(TrainerRefused, match=told)):
            async with fed(tmp_path, url, Said()):
                pass


async def test_a_server_in_trouble_is_waited_for_and_its_trouble_said(tmp_path: Path) -> None:
    said = Said()
    trouble, none_yet = (503, "upstream is away"), (200, '{"status": "wait for trainer to start"}')
    async with answering(trouble, none_yet, (404, "gone")) as url:
        with pytest.RaisesGroup(pytest.RaisesExc(TrainerRefused, match="HTTP 404: gone")):
            async with fed(tmp_path, url, said):
                pass
    assert said.notes == [
        f"waiting: {url}/register-env answers HTTP 503: upstream is away",
        "waiting for the trainer to start",
    ]


async def test_an_interrupted_environment_says_goodbye(tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.both()
        await api.post("/disconnect-env", {"env_id": 0})
        said = Said()

        async def endless() -> None:
            async with fed(tmp_path, url, said):
                await asyncio.Event().wait()

        running = asyncio.ensure_future(endless())
        await said.until("registered")
        assert (await api.get("/status-env", {"env_id": 0}))["env_weight"] == 1.0
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gone = (await api.get("/status-env", {"env_id": 1}))["env_weight"]
        assert gone == 0.01
