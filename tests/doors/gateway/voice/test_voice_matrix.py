"""A voice message in a room of a real Synapse is answered with one."""

import asyncio

import pytest

from doors.gateway.conftest import a_gateway
from doors.gateway.synapse import Account, needed, synapse
from doors.gateway.voice.conftest import KEY, speech
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platforms.matrix import Matrix
from palaestra.testing.fake_speech_server import FakeSpeechServer, silent_opus

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

VOICE = silent_opus(1.5)


def test_a_voice_message_is_answered_with_a_voice_message(tmp_path):
    needed()

    async def main(url: str) -> None:
        anna, bot = await asyncio.to_thread(Account, url, "anna"), await asyncio.to_thread(Account, url, "bot")
        matrix = Matrix("matrix", PlatformConfig(token=bot.token, extra={"homeserver": url}))
        async with FakeSpeechServer(KEY).serving() as server:
            server.texts[VOICE] = "what I said"
            config = {"platforms": {"matrix": {"allowed_users": [anna.user_id]}}, "speech": speech(server)}
            async with a_gateway(tmp_path / "home", config, others=[matrix]) as scene:
                room = await asyncio.to_thread(anna.make_room, bot.user_id)
                await asyncio.to_thread(anna.wait_for_member, room, bot.user_id)
                uri = await asyncio.to_thread(anna.upload, "voice.ogg", VOICE)
                # the form of Element's voice messages
                content = {
                    "msgtype": "m.audio", "body": "Voice message", "url": uri,
                    "info": {"duration": 1500, "mimetype": "audio/ogg", "size": len(VOICE)},
                    "org.matrix.msc1767.text": "Voice message",
                    "org.matrix.msc1767.audio": {"duration": 1500, "waveform": [0, 512, 0]},
                    "org.matrix.msc3245.voice": {},
                }  # fmt: skip
                await asyncio.to_thread(anna.send, room, content)
                text, voice = await asyncio.to_thread(anna.wait_for_messages, room, bot.user_id, 2)
                assert "transcribed:]\n\nwhat I said" in scene.model.requests[0]["messages"][-1]["content"]
                assert (text["msgtype"], voice["msgtype"]) == ("m.text", "m.audio")
                assert voice["org.matrix.msc3245.voice"] == {}
                data = await asyncio.to_thread(anna.download, voice["url"])
                assert data == silent_opus(len(server.said[0]["input"]) / 20)

    (tmp_path / "home").mkdir()
    with synapse(tmp_path) as url:
        asyncio.run(main(url))
