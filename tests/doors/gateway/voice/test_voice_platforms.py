"""Voice messages in and out through the stand-ins of the platforms, in the form that each service documents."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from doors.gateway.conftest import a_gateway, started, until
from doors.gateway.discord_api import IS_VOICE_MESSAGE, DiscordAPI
from doors.gateway.mattermost_api import TOKEN as MATTERMOST_TOKEN
from doors.gateway.mattermost_api import MattermostAPI
from doors.gateway.signal_daemon import SignalDaemon
from doors.gateway.slack_api import APP_TOKEN, SlackAPI
from doors.gateway.slack_api import TOKEN as SLACK_TOKEN
from doors.gateway.telegram_api import TOKEN as TELEGRAM_TOKEN
from doors.gateway.telegram_api import TelegramAPI
from doors.gateway.voice.conftest import KEY, speech
from doors.gateway.whatsapp_api import NUMBER, SECRET, VERIFY, WhatsAppAPI
from doors.gateway.whatsapp_api import TOKEN as WHATSAPP_TOKEN
from palaestra.core.io.http_server import listening
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.platform import Attachment, ChatAddress, Platform
from palaestra.doors.gateway.platforms.discord import Discord
from palaestra.doors.gateway.platforms.matrix import Matrix
from palaestra.doors.gateway.platforms.mattermost import Mattermost
from palaestra.doors.gateway.platforms.signal_cli import SignalCli
from palaestra.doors.gateway.platforms.slack import Slack
from palaestra.doors.gateway.platforms.telegram import Telegram
from palaestra.doors.gateway.platforms.whatsapp import WhatsApp
from palaestra.testing.fake_speech_server import FakeSpeechServer, silent_opus

VOICE = silent_opus(1.5)


async def answered_by_voice(
    home: Any, platform: Platform, api: Any, write: Callable[[], Awaitable[None]], voices: Callable[[], list[Any]]
) -> FakeSpeechServer:
    """A person sends `VOICE`; wait until the platform has the spoken answer of `voices`."""
    async with FakeSpeechServer(KEY).serving() as server:
        server.texts[VOICE] = "what I said"
        config = {"platforms": {platform.name: {"allowed_users": ["*"]}}, "speech": speech(server)}
        async with a_gateway(home, config, others=[platform]) as scene:
            await write()
            await until(lambda: bool(voices()))
            (request,) = scene.model.requests
            assert "transcribed:]\n\nwhat I said" in request["messages"][-1]["content"]
            assert "The user sent the file uploads/" in request["messages"][-1]["content"]
        assert (server.heard, len(server.said)) == ([VOICE], 1)
        return server


def test_telegram(tmp_path):
    async def main():
        api = TelegramAPI()
        async with api.serving():
            platform = Telegram("telegram", PlatformConfig(token=TELEGRAM_TOKEN, extra={"api_url": api.url}))

            async def write():
                name = api.put_file(VOICE)
                size = len(VOICE)
                voice = {"file_id": name, "file_unique_id": "u1", "duration": 2, "mime_type": "audio/ogg"}
                api.write(voice={**voice, "file_size": size})

            await answered_by_voice(tmp_path, platform, api, write, lambda: [x for x in api.sent if "voice" in x])
            assert ["text" in each for each in api.sent] == [True, False]  # the text goes first

    asyncio.run(main())


def test_discord(tmp_path):
    async def main():
        api = DiscordAPI()
        async with api.serving():
            platform = Discord("discord", PlatformConfig(token=api.token), connector=api.connector)

            async def write():
                about = {
                    **api.put_file("voice-message.ogg", VOICE, "audio/ogg"),
                    "duration_secs": 1.5,
                    "waveform": "YA==",
                }
                await api.write(attachments=[about], flags=IS_VOICE_MESSAGE)

            def voices():
                return [each for each in api.sent if each["flags"] == IS_VOICE_MESSAGE]

            await answered_by_voice(tmp_path, platform, api, write, voices)
            assert [each["flags"] for each in api.sent] == [0, IS_VOICE_MESSAGE]

    asyncio.run(main())


def test_whatsapp(tmp_path):
    async def main():
        api = WhatsAppAPI()
        async with api.serving():
            extra = {"phone_number_id": NUMBER, "verify_token": VERIFY, "port": 0, "api_url": f"{api.url}/v23.0"}
            platform = WhatsApp("whatsapp", PlatformConfig(token=WHATSAPP_TOKEN, api_key=SECRET, extra=extra))
            api.webhook = lambda: platform.url

            async def write():
                kind = "audio/ogg; codecs=opus"
                about = {"id": api.add_media(kind, VOICE), "mime_type": kind, "sha256": "x", "voice": True}
                api.write(type="audio", audio=about)

            def voices():
                return [each for each in api.sent if each["type"] == "audio"]

            await answered_by_voice(tmp_path, platform, api, write, voices)
            assert [each["type"] for each in api.sent] == ["text", "audio"]

    asyncio.run(main())


def test_signal(tmp_path):
    async def main():
        api = SignalDaemon()
        async with api.serving():
            platform = SignalCli("signal", PlatformConfig(extra={"url": api.url}))

            async def write():
                api.attachments["a1"] = VOICE
                about = {"contentType": "audio/ogg", "filename": None, "id": "a1", "size": len(VOICE)}
                await api.write(None, attachments=[about])

            await answered_by_voice(tmp_path, platform, api, write, lambda: [1] * api.voice_notes)
            assert len(api.sent) == 1

    asyncio.run(main())


def test_slack_gets_an_audio_file(tmp_path):
    async def main():
        api = SlackAPI()
        async with api.serving():
            extra = {"api_url": f"{api.url}/api"}
            platform = Slack("slack", PlatformConfig(token=SLACK_TOKEN, api_key=APP_TOKEN, extra=extra))

            async def write():
                api.files["F0"] = VOICE
                about = {
                    "name": "audio_message.ogg",
                    "mimetype": "audio/ogg",
                    "subtype": "slack_audio",
                    "duration_ms": 1500,
                }
                url = f"{api.url}/files/F0"
                shared = {**about, "size": len(VOICE), "url_private_download": url}
                await api.write(text="", subtype="file_share", files=[shared])

            await answered_by_voice(tmp_path, platform, api, write, lambda: [x for x in api.sent if "file" in x])

    asyncio.run(main())


def test_mattermost_gets_an_audio_file(tmp_path):
    async def main():
        api = MattermostAPI()
        async with api.serving():
            platform = Mattermost("mattermost", PlatformConfig(token=MATTERMOST_TOKEN, extra={"url": api.url}))

            async def write():
                await api.write("", file_ids=[api.add_file("v.ogg", "audio/ogg", VOICE)])

            def voices():
                return [each for each in api.posts[1:] if each["file_ids"]]

            await answered_by_voice(tmp_path, platform, api, write, voices)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_matrix_gets_an_audio_message_with_the_fields_of_msc3245():
    sent: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        path = request.path
        if path.endswith("/whoami"):
            return web.json_response({"user_id": "@bot:hs", "device_id": "D"})
        if path.endswith("/sync"):
            await asyncio.sleep(30 if "since" in request.query else 0)
            return web.json_response(
                {
                    "next_batch": "s1", "rooms": {"join": {}, "invite": {}, "leave": {}}, "device_lists": {},
                    "device_one_time_keys_count": {}, "to_device": {"events": []}, "presence": {"events": []},
                }
            )  # fmt: skip
        if path.endswith("/upload"):
            assert (request.content_type, await request.read()) == ("audio/ogg", VOICE)
            return web.json_response({"content_uri": "mxc://hs/abc"})
        if "/send/m.room.message/" in path:
            sent.append(json.loads(await request.read()))
            return web.json_response({"event_id": "$1"})
        return web.json_response({}, status=404 if request.method == "GET" else 200)

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url:
            platform = Matrix("matrix", PlatformConfig(token="t", extra={"homeserver": url}))
            async with started(platform):
                file = Attachment("answer.ogg", "audio/ogg", VOICE, voice=True)
                await platform.send_file(ChatAddress("matrix", "!r:hs"), file, key="k")
        about = {"msgtype": "m.audio", "body": "answer.ogg", "filename": "answer.ogg", "url": "mxc://hs/abc"}
        info = {"mimetype": "audio/ogg", "size": len(VOICE), "duration": 1500}
        voice = {"org.matrix.msc1767.audio": {"duration": 1500}, "org.matrix.msc3245.voice": {}}
        assert sent == [{**about, "info": info, **voice}]

    asyncio.run(main())
