"""The stand-in of a speech server accepts the requests of OpenAI's own client and refuses others."""

import asyncio

import aiohttp
import openai
import pytest

from palaestra.testing.fake_speech_server import FakeSpeechServer, silent_opus


def test_the_official_client_is_understood():
    async def main():
        async with FakeSpeechServer("key").serving() as server:
            client = openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0)
            audio = silent_opus(1.0)
            server.texts[audio] = "a text"
            file = ("voice.ogg", audio, "audio/ogg")
            heard = await client.audio.transcriptions.create(
                file=file, model="m", language="en", response_format="json"
            )
            assert (heard.text, server.heard) == ("a text", [audio])
            said = await client.audio.speech.create(input="some text", model="m", voice="alloy", response_format="opus")
            assert said.content.startswith(b"OggS")
            assert server.said[0]["input"] == "some text"
            with pytest.raises(openai.BadRequestError, match="Invalid file format"):
                await client.audio.transcriptions.create(file=("voice.exe", audio, "audio/ogg"), model="m")
            with pytest.raises(openai.BadRequestError, match="nonsense"):
                await client.audio.speech.create(input="a", model="m", voice="alloy", extra_body={"nonsense": 1})
            with pytest.raises(openai.BadRequestError, match="Invalid value"):
                await client.audio.speech.create(input="a" * 4097, model="m", voice="alloy")
            server.failing.append(500)
            with pytest.raises(openai.InternalServerError):
                await client.audio.speech.create(input="a", model="m", voice="alloy")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="x").audio.speech.create(input="a", model="m", voice="alloy")
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields", [{}, {"model": ""}, {"model": "m", "mode": "x"}, {"model": "m", "language": "english"}]
)
def test_a_form_with_other_fields_is_refused(fields):
    async def main():
        form = aiohttp.FormData()
        for name, value in fields.items():
            form.add_field(name, value)
        form.add_field("file", silent_opus(0.1), filename="a.ogg", content_type="audio/ogg")
        async with FakeSpeechServer().serving() as server, aiohttp.ClientSession() as client:
            async with client.post(f"{server.url}/audio/transcriptions", data=form) as reply:
                assert reply.status == 400
            async with client.post(f"{server.url}/audio/transcriptions", data=b"x") as reply:
                assert reply.status == 415
            assert not server.heard

    asyncio.run(main())
