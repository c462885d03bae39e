import asyncio
import os
from dataclasses import replace

import pytest

from doors.gateway.conftest import OPEN, a_gateway, until
from doors.gateway.voice.conftest import KEY, recording, speech, talking
from palaestra.core.errors import ConfigError
from palaestra.doors.chat.service import ChatSettings
from palaestra.doors.gateway.config import GatewayConfig
from palaestra.doors.gateway.platform import Attachment
from palaestra.doors.gateway.platforms.loopback import LIMITS, Loopback
from palaestra.doors.gateway.voice.speech_client import SpeechClient
from palaestra.doors.gateway.voice.speech_config import SpeechConfig
from palaestra.doors.gateway.voice.voice_notes import speakable
from palaestra.testing.fake_speech_server import FakeSpeechServer

ASKING = ChatSettings(toolsets=["clarify"])
"""The model may ask the person."""
HEARD = "[The user spoke this in a voice message; it was transcribed:]\n\n"


def asked(scene) -> str:
    """The last message that the model got."""
    return scene.model.requests[-1]["messages"][-1]["content"]


def test_a_voice_message_is_answered_in_text_and_in_speech(tmp_path):
    async def main():
        async with talking(tmp_path, language="en", voice="nova") as (scene, server):
            server.texts[recording().data] = "what time is it"
            text = await scene.ask("", attachments=[recording()])
            assert "what time is it" in text
            spoken = await scene.platform.receive()
            assert (spoken.file.media_type, spoken.file.voice) == ("audio/ogg", True)
            assert (spoken.answers.last, spoken.text) == (True, "")
            assert HEARD + "what time is it" in asked(scene)
            assert "[The user sent the file uploads/voice.ogg (audio/ogg," in asked(scene)
            assert server.forms == [{"model": "stt", "response_format": "json", "language": "en"}]
            said = {"model": "tts", "voice": "nova", "response_format": "opus"}
            assert server.said == [{**said, "input": speakable(text)}]
            # the file is in the sandbox, and a text gets only a text
            assert "voice.ogg" in await scene.ask("run ls uploads")
            assert len(scene.platform.sent) == 3

    asyncio.run(main())


def test_a_person_chooses_when_answers_are_spoken(tmp_path):
    async def main():
        async with talking(tmp_path) as (scene, server):
            assert await scene.ask("/voice") == "Voice is auto. The answer to a voice message is also spoken."
            assert await scene.ask("/voice on") == "Voice is on. Every answer is also spoken."
            assert await scene.ask("say yes") == "yes"
            assert (await scene.platform.receive()).file.voice
            assert "Nothing was changed" in await scene.ask("/voice loud")
            await scene.ask("/new")
            assert "Voice is on" in await scene.ask("/voice")  # outlives a new session
            assert "Voice is off" in await scene.ask("/voice off")
            await scene.ask("", attachments=[recording()])
            assert [each["input"] for each in server.said] == ["yes"]
            assert "Voice is auto" in await scene.ask("/voice", "anna")  # another chat

    asyncio.run(main())


def test_without_the_setting_audio_is_only_a_file(tmp_path):
    async def main():
        async with a_gateway(tmp_path) as scene:
            assert await scene.ask("", attachments=[recording()]) == f"echo 1: {asked(scene)}"
            assert asked(scene).startswith("[The user sent the file uploads/voice.ogg (audio/ogg")
            assert "speech.speech_model" in await scene.ask("/voice on")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        ([400], "rejected this request (HTTP 400)"),
        ([401], "check speech.api_key"),
        ([500] * 3, "tried 3 times"),
    ],
)
def test_a_failure_of_the_transcription_loses_no_message(tmp_path, failing, why):
    async def main():
        async with talking(tmp_path, replies="off") as (scene, server):
            server.failing.extend(failing)
            text = await scene.ask("caption", attachments=[recording()])
            assert text.startswith("(Your voice message could not be transcribed: the speech server")
            assert why in text
            assert KEY not in text
            assert asked(scene).startswith("caption\n[The user sent a voice message. It could not be transcribed: ")
            assert "uploads/voice.ogg" in asked(scene)
            assert not server.failing

    asyncio.run(main())


def test_a_server_that_cannot_be_reached_loses_no_message(tmp_path):
    async def main():
        config = {**OPEN, "speech": {"base_url": "http://127.0.0.1:9", "transcription_model": "m", "speech_model": "m"}}
        async with a_gateway(tmp_path, config) as scene:
            assert "cannot be reached" in await scene.ask("", attachments=[recording()])
            assert "(This answer could not be spoken: the speech server" in (await scene.platform.receive()).text

    asyncio.run(main())


def test_a_transient_failure_is_tried_again(tmp_path):
    async def main():
        async with talking(tmp_path) as (scene, server):
            server.failing.extend([503])
            assert "hello" in await scene.ask("", attachments=[recording()])
            await scene.platform.receive()
            server.failing.extend([429])
            await scene.ask("/voice on")
            await scene.ask("say yes")
            assert (await scene.platform.receive()).file.voice

    asyncio.run(main())


def test_an_answer_that_cannot_be_spoken_is_sent_as_text_with_the_reason(tmp_path):
    async def main():
        async with talking(tmp_path, replies="on") as (scene, server):
            server.failing.extend([400])
            assert await scene.ask("say first") == "first"
            assert "could not be spoken: the speech server rejected" in (await scene.platform.receive()).text
            assert await scene.ask("say second") == "second"
            assert (await scene.platform.receive()).file.voice

    asyncio.run(main())


def test_long_audio_is_not_transcribed(tmp_path):
    async def main():
        async with talking(tmp_path, max_seconds=3, max_bytes=5000, replies="off") as (scene, server):
            assert "it lasts 4 s; at most 3 s" in await scene.ask("", attachments=[recording(4)])
            both = [recording(2), replace(recording(2), name="b.ogg")]
            assert "it lasts 4 s" in await scene.ask("", attachments=both)  # the audio of one message together
            large = Attachment("a.mp3", "audio/mpeg", bytes(5001))
            assert "at most 0.0 MB are transcribed" in await scene.ask("", attachments=[large])
            assert not server.heard
            assert "hello" in await scene.ask("", attachments=[recording(2)])
            assert len(server.heard) == 1

    asyncio.run(main())


def test_nothing_of_a_message_becomes_an_option_or_a_command(tmp_path):
    async def main():
        async with talking(tmp_path, replies="off") as (scene, server):
            server.texts[recording().data] = "/new"
            hostile = 'audio/ogg"\r\nX-Evil: 1\r\n\r\n'
            name = '../../x"; filename="y\r\nContent-Type: text/html'
            file = replace(recording(), name=name, media_type=hostile)
            assert "/new" in await scene.ask("", attachments=[file])
            assert "/new" in asked(scene)  # a turn, and no new session
            assert set(server.forms[0]) == {"model", "response_format"}
            assert server.heard == [recording().data]

    asyncio.run(main())


def test_a_voice_message_answers_a_question_of_the_model(tmp_path):
    async def main():
        async with talking(tmp_path, ASKING, replies="off") as (scene, server):
            server.texts[recording().data] = "blue"
            assert await scene.ask("ask which colour?") == "which colour?"
            answer = await scene.ask("", attachments=[recording()])
            assert answer.startswith("done: ")
            assert "transcribed:]" in answer
            assert "blue" in answer
            assert await scene.ask("say next") == "next"  # the voice message was no message of its own
            assert len(scene.platform.sent) == 3

            server.failing.extend([400])
            assert await scene.ask("ask which size?") == "which size?"
            await scene.platform.say("", attachments=[recording(3.0)])
            await until(lambda: not server.failing)
            assert (await scene.ask("small")).startswith("done: ")
            assert "transcribed:]" in (await scene.platform.receive()).text  # it waited for the end of the turn

    asyncio.run(main())


def test_two_voice_messages_that_answer_one_question_are_both_heard(tmp_path):
    async def main():
        async with talking(tmp_path, ASKING, replies="off") as (scene, server):
            server.gate = asyncio.Event()
            server.texts |= {recording(1.0).data: "blue", recording(3.0).data: "green"}
            assert await scene.ask("ask which colour?") == "which colour?"
            for seconds in (1.0, 3.0):
                await scene.platform.say("", attachments=[recording(seconds)])
            await until(lambda: server.waiting == 2)
            server.gate.set()
            texts = [(await scene.platform.receive()).text for _ in range(2)]
            assert texts[0].startswith("done: ")
            assert {"blue" in texts[0], "blue" in texts[1]} == {"red" in texts[0], "red" in texts[1]} == {True, False}

    asyncio.run(main())


def test_a_voice_message_with_another_file_is_no_answer_to_a_question(tmp_path):
    """The file would be lost."""

    async def main():
        async with talking(tmp_path, ASKING, replies="off") as (scene, _):
            assert await scene.ask("ask which colour?") == "which colour?"
            await scene.platform.say("", attachments=[recording(), Attachment("a.txt", "text/plain", b"a")])
            assert '"user_response": "blue"' in await scene.ask("blue")
            await scene.platform.receive()
            assert "uploads/a.txt" in asked(scene)

    asyncio.run(main())


def test_a_speech_server_that_hangs_does_not_hold_back_the_chat(tmp_path):
    async def main():
        async with talking(tmp_path, replies="on", timeout_s=0.5) as (scene, server):
            server.gate = asyncio.Event()
            assert await scene.ask("say one") == "one"
            assert "took more than 0.5 s" in (await scene.platform.receive()).text
            assert await scene.ask("say two") == "two"

    asyncio.run(main())


def test_a_voice_message_allows_no_command(tmp_path):
    async def main():
        async with talking(tmp_path, replies="off") as (scene, server):
            question = await scene.ask("run rm -rf build")
            code = question.split("/approve ")[1][:3]
            server.texts[recording().data] = f"/approve {code}"
            await scene.platform.say("", attachments=[recording()])
            await asyncio.sleep(0.3)
            assert len(scene.model.requests) == 1
            assert "Not allowed" in await scene.ask("/deny")

    asyncio.run(main())


def test_a_strangers_voice_message_is_not_transcribed(tmp_path):
    async def main():
        async with FakeSpeechServer(KEY).serving() as server:
            config = {"platforms": {"loopback": {"allowed_users": ["me"]}}, "speech": speech(server)}
            async with a_gateway(tmp_path, config) as scene:
                assert "I do not know you" in await scene.ask("", "eve", attachments=[recording()])
                assert server.waiting == 0

    asyncio.run(main())


def test_the_same_recording_is_transcribed_once_also_after_a_restart(tmp_path):
    async def main():
        loopback = Loopback()
        async with FakeSpeechServer(KEY).serving() as server:
            config = {**OPEN, "speech": speech(server, replies="off")}
            for model in ("stt", "stt", "better"):
                config["speech"]["transcription_model"] = model
                async with a_gateway(tmp_path, config, platform=loopback) as scene:
                    await loopback.say("", attachments=[recording()])
                    await until(lambda scene=scene: bool(scene.model.requests))
                    assert HEARD + "hello" in asked(scene)
            assert [each["model"] for each in server.forms] == ["stt", "better"]

    asyncio.run(main())


def test_a_recording_that_arrives_twice_at_the_same_time_is_transcribed_once(tmp_path):
    async def main():
        async with talking(tmp_path, replies="off") as (scene, server):
            server.gate = asyncio.Event()
            for chat in ("a", "b"):
                await scene.platform.say("", chat_id=chat, user_id=chat, attachments=[recording()])
            await until(lambda: server.waiting == 1)
            await asyncio.sleep(0.1)
            server.gate.set()
            for chat in ("a", "b"):
                assert "hello" in (await scene.platform.receive(chat)).text
            assert server.waiting == 1

    asyncio.run(main())


def test_a_recording_is_made_once_while_the_platform_is_down(tmp_path):
    async def main():
        async with talking(tmp_path, replies="on") as (scene, server):
            assert await scene.ask("say ready") == "ready"
            await scene.platform.receive()
            server.gate = asyncio.Event()
            assert await scene.ask("say again") == "again"  # the text does not wait for the recording
            await until(lambda: server.waiting == 2)
            scene.platform.outage = True
            server.gate.set()
            await asyncio.sleep(1.5)
            scene.platform.outage = False
            assert (await scene.platform.receive()).file.voice
            assert len(server.said) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    "limits",
    [replace(LIMITS, max_file_bytes=0), replace(LIMITS, requests=True, streams=False)],
    ids=["files", "requests"],
)
def test_a_platform_that_cannot_send_recordings_gets_only_text(tmp_path, limits):
    async def main():
        async with FakeSpeechServer(KEY).serving() as server:
            config, loopback = {**OPEN, "speech": speech(server, replies="on")}, Loopback(limits=limits)
            async with a_gateway(tmp_path, config, platform=loopback) as scene:
                await scene.ask("say one")
                await scene.ask("say two")
                assert [each.text for each in loopback.sent] == ["one", "two"]
                assert not server.said

    asyncio.run(main())


def test_a_recording_in_another_format_is_sent_as_a_file(tmp_path):
    async def main():
        async with talking(tmp_path, replies="on", speech_format="mp3", max_spoken_chars=100) as (scene, server):
            await scene.ask("say " + 25 * "word ")
            file = (await scene.platform.receive()).file
            assert (file.name, file.media_type, file.voice) == ("answer.mp3", "audio/mpeg", False)
            assert 10 < server.said[0]["input"].count("word") < 25

    asyncio.run(main())


def test_the_key_reaches_neither_a_sandbox_nor_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEECH_KEY", KEY)
    config = SpeechConfig(base_url="http://127.0.0.1:9", api_key_variable="SPEECH_KEY", speech_model="m")
    assert config.with_variable(os.environ).api_key == KEY

    async def main():
        async with talking(tmp_path, replies="off") as (scene, server):
            server.texts[recording().data] = "run env; cat /proc/*/environ /proc/*/cmdline; grep -r speech-key . /tmp"
            scene.model.requests.clear()
            await scene.ask("run env; cat /proc/*/environ /proc/*/cmdline; grep -rs speech-key . /tmp")
            await scene.ask("", attachments=[recording()])
            assert KEY not in str(scene.model.requests)

    asyncio.run(main())


def test_settings_that_cannot_work_are_refused():
    for wrong, why in [
        ({"base_url": "127.0.0.1", "speech_model": "m"}, "base_url"),
        ({"base_url": "http://", "speech_model": "m"}, "base_url"),
        ({"base_url": "http://h"}, "transcription_model"),
        ({"base_url": "http://h", "speech_model": "m", "api_key": "a\nb"}, "control character"),
        ({"base_url": "http://u:p@h", "speech_model": "m"}, "password"),
    ]:
        with pytest.raises(ConfigError, match=why):
            SpeechClient(SpeechConfig(**wrong))
    for wrong in [
        {"language": "en\r\n"},
        {"replies": "loud"},
        {"mode": "on"},
        {"max_bytes": 0},
        {"max_spoken_chars": 5},
    ]:
        with pytest.raises(ConfigError) as caught:
            GatewayConfig.from_dict({"speech": {**wrong, "api_key": KEY}})
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="SPEECH_KEY is not set"):
        SpeechConfig(api_key_variable="SPEECH_KEY").with_variable({})
    with pytest.raises(ConfigError, match="both"):
        SpeechConfig(api_key="a", api_key_variable="SPEECH_KEY").with_variable({"SPEECH_KEY": "b"})


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("# Title\n\nSome **bold** and `code`.", "Title\n\nSome bold and code."),
        ("Look:\n```sh\nrm -rf /\n```\nDone.", "Look:\n\nDone."),
        ("- a [page](https://example.org/x)\n- 2 * 3 = 6", "a page\n2 * 3 = 6"),
        ("```\nan open block", ""),
        ("2*3*4 and a_b_c, but *so* and [![a](b)](c)", "2*3*4 and a_b_c, but so and a"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_markdown_is_read_aloud_without_its_marks(text, spoken):
    assert speakable(text) == spoken


def test_audio_is_recognised_by_its_type():
    types = {"audio/ogg; codecs=opus": True, "audio/mpeg": True, "application/ogg": True, "video/mp4": False}
    assert {each: Attachment("a", each, b"").is_audio for each in types} == types
