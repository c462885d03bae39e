"""The command `palaestra gateway` is killed while it transcribes, answers and speaks a voice message from Telegram."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from doors.gateway.echo_model import EchoModel
from doors.gateway.telegram_api import CHAT, TOKEN, TelegramAPI
from doors.gateway.test_restarts import Service
from doors.gateway.voice.conftest import KEY, speech
from palaestra.testing.fake_speech_server import FakeSpeechServer, silent_opus

pytestmark = [pytest.mark.slow, pytest.mark.slots, pytest.mark.timeout(300)]

VOICE = silent_opus(1.5)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the command, whose start takes seconds on a busy machine."""
    async with asyncio.timeout(90):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_voice_message_is_transcribed_and_answered_once_although_the_gateway_is_killed_in_each_step(tmp_path):
    async def main():
        api, model, server = TelegramAPI(), EchoModel(), FakeSpeechServer(KEY)
        server.texts[VOICE] = "slowly " + "word " * 60  # 3 s
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(api.serving())
            await stack.enter_async_context(model.serving())
            await stack.enter_async_context(server.serving())
            telegram = {"token": TOKEN, "allowed_users": [str(CHAT)], "extra": {"api_url": api.url}}
            service = Service(tmp_path / "home", model.url, {"telegram": telegram}, speech=speech(server))
            stack.push_async_callback(service.end)
            server.gate = asyncio.Event()
            await service.start()
            about = {"file_id": api.put_file(VOICE), "file_unique_id": "u1", "duration": 2, "mime_type": "audio/ogg"}
            api.write(voice=about)

            await until(lambda: server.waiting == 1)  # while it is transcribed
            assert await service.kill() == -signal.SIGKILL
            server.gate.set()
            await service.start()

            await until(lambda: len(model.requests) == 1)  # while it is answered
            server.gate.clear()
            assert await service.kill() == -signal.SIGKILL
            heard, requests = len(server.heard), server.waiting
            await service.start()
            await until(lambda: len(api.sent) == 1)

            await until(lambda: server.waiting == requests + 1)  # while the answer is spoken
            assert await service.kill() == -signal.SIGKILL
            server.gate.set()
            await service.start()
            await until(lambda: any("voice" in each for each in api.sent))
            assert await service.kill(signal.SIGTERM) == 0

            assert ["voice" in each for each in api.sent] == [False, True]
            assert "word word" in api.sent[0]["text"]
            # a request that a kill interrupted may have reached the server; a transcript that arrived is not repeated
            assert heard == len(server.heard) <= 2
            for request in model.requests:
                assert "transcribed:]\n\nslowly word" in request["messages"][-1]["content"]
            assert "Traceback" not in service.log
            assert KEY not in service.log

    asyncio.run(main())
