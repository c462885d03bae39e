"""A gateway on the loopback platform with a stand-in of a speech server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from doors.gateway.conftest import OPEN, Scene, a_gateway
from palaestra.doors.chat.service import ChatSettings
from palaestra.doors.gateway.platform import Attachment
from palaestra.testing.fake_speech_server import FakeSpeechServer, silent_opus

KEY = "speech-key-of-the-test"


def speech(server: FakeSpeechServer, **more: Any) -> dict[str, Any]:
    models = {"transcription_model": "stt", "speech_model": "tts", "api_key": KEY}
    return {"base_url": server.url, **models, **more}


def recording(seconds: float = 2.0) -> Attachment:
    return Attachment("voice.ogg", "audio/ogg", silent_opus(seconds))


@asynccontextmanager
async def talking(
    home: Path, chat: ChatSettings | None = None, **more: Any
) -> AsyncIterator[tuple[Scene, FakeSpeechServer]]:
    """Both; the settings in `more` are those of `speech`."""
    async with (
        FakeSpeechServer(KEY).serving() as server,
        a_gateway(home, {**OPEN, "speech": speech(server, **more)}, settings=chat) as scene,
    ):
        yield scene, server
