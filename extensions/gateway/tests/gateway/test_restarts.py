"""The command `palaestra gateway` is killed and started again: no message is lost or answered twice, and background
processes are found again. Messages go through the webhook, where the person sends again what was not taken, or through
a real Matrix homeserver."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from gateway.conftest import until
from gateway.echo_model import EchoModel
from gateway.synapse import Account, needed, synapse
from palaestra_gateway.assembly import service_name
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.sandbox.service import service_client

pytestmark = [pytest.mark.slow, pytest.mark.slots, pytest.mark.timeout(600)]

KILLS = int(os.environ.get("PALAESTRA_KILLS", "8"))


class Person:
    """Sends messages through the webhook until they are taken, and gets the answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/messages"
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.notices: list[str] = []
        self.posts: Counter[str] = Counter()
        self.came = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/", self._take)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url, aiohttp.ClientSession() as self.client:
            yield url

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.posts[body["key"]] += 1
        if self.posts[body["key"]] == 1:  # as every receiver of keys does
            if body["answers"] is None:
                self.notices.append(body["text"])
            else:
                self.answers.setdefault(body["answers"], []).append(body)
        self.came.set()
        return web.Response()

    async def say(self, text: str, message_id: str, chat_id: str = "c") -> None:
        body = {"message_id": message_id, "chat_id": chat_id, "user_id": "anna", "text": text}
        while True:
            try:
                async with self.client.post(self.url, json=body) as reply:
                    if reply.status == 202:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)

    async def answer(self, message_id: str) -> str:
        async with asyncio.timeout(120):
            while message_id not in self.answers or not self.answers[message_id][-1]["last"]:
                self.came.clear()
                await self.came.wait()
        return "".join(each["text"] for each in self.answers[message_id])


class Service:
    """The command, started and killed."""

    def __init__(self, home: Path, model_url: str, platforms: dict[str, Any], **more: Any) -> None:
        self.home = home
        settings = {
            "server": {"base_url": model_url, "model_name": "m"},
            "toolsets": ["terminal", "cronjob"],
            "limits": {"messages_per_hour": 0},
            "max_queued": 1000,
            "platforms": platforms,
            **more,
        }
        home.mkdir()
        (home / "gateway.yaml").write_text(yaml.safe_dump(settings))
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "palaestra", "gateway", "--home", str(self.home)]
        with (self.home / "stderr").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

    async def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    async def end(self) -> None:
        """Kill it, and end its sandboxes."""
        await self.kill()
        await service_client.end(service_client.socket_path(service_name(self.home)))

    @property
    def log(self) -> str:
        return (self.home / "stderr").read_text()


@asynccontextmanager
async def scene(tmp_path: Path) -> AsyncIterator[tuple[Service, Person, EchoModel]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    person, model = Person(port), EchoModel()
    async with AsyncExitStack() as stack:
        reply_url = await stack.enter_async_context(person.listening())
        await stack.enter_async_context(model.serving())
        webhook = {"allowed_users": ["*"], "extra": {"reply_url": reply_url, "port": port}}
        service = Service(tmp_path / "home", model.url, {"webhook": webhook})
        stack.push_async_callback(service.end)
        yield service, person, model


async def test_no_message_or_process_is_lost_when_the_gateway_is_killed_at_random_moments(tmp_path):
    rng = random.Random(7)
    async with scene(tmp_path) as (service, person, _):
        await service.start()

        processes = []
        for number in range(3):
            command = "watch while [ ! -e end ]; do echo tick; sleep 1; done; echo ended"
            await person.say(command, f"p{number}-1", f"p{number}")
            answer = await person.answer(f"p{number}-1")
            processes.append(json.loads(answer.removeprefix("done: "))["session_id"])

        async def talk(chat: str) -> None:
            for number in range(KILLS * 2):
                text = f"slowly {chat} {number} done" if number % 3 else f"say {chat} {number} done"
                await person.say(text, f"{chat}-{number}", chat)
                await person.answer(f"{chat}-{number}")

        async def kill() -> None:
            for _ in range(KILLS):
                await asyncio.sleep(rng.uniform(0.05, 2.0) + 1.0)
                await service.kill()
                await service.start()

        chats = ["a", "b", "c"]
        await asyncio.gather(kill(), *(talk(chat) for chat in chats))
        for chat in chats:
            for number in range(KILLS * 2):
                pieces = person.answers[f"{chat}-{number}"]
                assert len(pieces) == 1, pieces
                assert pieces[0]["text"] == f"{chat} {number} done"
        before = len(person.notices)
        async with asyncio.timeout(60):  # the watchers report every 30 s
            while not all(
                any(each in text and "tick" in text for text in person.notices[before:]) for each in processes
            ):
                person.came.clear()
                await person.came.wait()
        for number in range(3):
            await person.say("run touch end && ls", f"p{number}-2", f"p{number}")
            assert "end" in await person.answer(f"p{number}-2")
        await _notices(person, "ended with exit code 0", 3)
        assert "Traceback" not in service.log


async def test_no_matrix_message_is_lost_when_the_gateway_is_killed_with_a_backlog(tmp_path):
    needed()
    rng = random.Random(11)
    async with AsyncExitStack() as stack:
        url = stack.enter_context(synapse(tmp_path))
        anna, bot = await asyncio.to_thread(Account, url, "anna"), await asyncio.to_thread(Account, url, "bot")
        model = await stack.enter_async_context(EchoModel().serving())
        matrix = {"token": bot.token, "allowed_users": ["*"], "extra": {"homeserver": url}}
        service = Service(tmp_path / "home", model.url, {"matrix": matrix})
        stack.push_async_callback(service.end)
        await service.start()
        rooms = [await asyncio.to_thread(anna.make_room, bot.user_id) for _ in range(2)]
        for room in rooms:
            await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
        said = 0

        async def say(count: int) -> None:
            nonlocal said
            for number in range(said, said + count):
                for room in rooms:
                    await asyncio.to_thread(anna.say, room, f"slowly {number} done")
            said += count

        await service.kill()
        for kill in range(KILLS):
            await say(100 if kill == KILLS // 2 else 3)  # while it is stopped
            await service.start()
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            await say(1)
            assert await service.kill() == -signal.SIGKILL, service.log
        await service.start()
        for room in rooms:
            answers = await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, said, 600)
            assert [each["body"].strip() for each in answers] == [f"{number} done" for number in range(said)]
        assert "Traceback" not in service.log


async def test_scheduled_jobs_run_once_each_when_the_gateway_is_killed_at_random_moments(tmp_path):
    rng = random.Random(11)
    jobs = range(12)
    async with scene(tmp_path) as (service, person, _):
        await service.start()
        for number in jobs:
            wanted = {"action": "create", "schedule": f"{8 + number}s", "prompt": f"say <{number}> ran"}
            await person.say(f"call cronjob {json.dumps(wanted)}", f"m{number}")
            assert '"success": true' in await person.answer(f"m{number}")
        for _ in range(KILLS // 2):
            await asyncio.sleep(rng.uniform(0.5, 3.5))
            await service.kill()
            await service.start()
        await _notices(person, "ran", len(jobs))
        await asyncio.sleep(2.0)  # for one that comes twice
        said = Counter(text.splitlines()[-1] for text in person.notices)
        assert said == {f"<{number}> ran": 1 for number in jobs}
        assert "Traceback" not in service.log


async def test_background_processes_are_found_again_after_a_kill_and_their_reports_reach_the_chats(tmp_path):
    async with scene(tmp_path) as (service, person, _):
        await service.start()
        for chat in ("a", "b", "c"):
            command = f"while [ ! -e end ]; do sleep 0.2; done; echo {chat} ended"
            await person.say(f"start {command}", f"{chat}-1", chat)
            assert "session_id" in await person.answer(f"{chat}-1")
        await service.kill()
        await service.start()
        for chat in ("a", "b", "c"):
            await person.say("/status", f"{chat}-2", chat)
            assert "running" in await person.answer(f"{chat}-2")
        for chat in ("a", "b", "c"):
            await person.say("run touch end && ls", f"{chat}-3", chat)
            assert "end" in await person.answer(f"{chat}-3")
        await _notices(person, "ended with exit code 0", 3)


async def test_a_command_that_ran_during_the_kill_is_not_repeated(tmp_path):
    async with scene(tmp_path) as (service, person, model):
        await service.start()
        await person.say("run echo x >> count; sleep 3", "m1")
        await until(lambda: len(model.requests) > 0)
        await asyncio.sleep(1.5)
        await service.kill()
        await service.start()
        assert "unknown" in (await person.answer("m1")).lower()
        await person.say("run wc -l < count", "m2")
        assert json.loads((await person.answer("m2")).removeprefix("done: "))["output"].strip() == "1"


async def test_a_second_gateway_in_the_folder_is_refused_and_a_stop_is_clean(tmp_path):
    async with scene(tmp_path) as (service, person, _):
        await service.start()
        await person.say("say hello", "m1")
        assert await person.answer("m1") == "hello"
        first = service.process
        await service.start()
        assert await service.process.wait() == 2
        assert "stop it first" in service.log
        service.process = first
        assert await service.kill(signal.SIGTERM) == 0
        assert "Traceback" not in service.log


async def _notices(person: Person, text: str, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(text in each for each in person.notices) < count:
            person.came.clear()
            await person.came.wait()
