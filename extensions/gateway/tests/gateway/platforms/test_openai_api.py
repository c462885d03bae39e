import asyncio
import base64
import hashlib
import json

import aiohttp
import openai
import pytest

from gateway.conftest import OPEN, a_gateway, until
from gateway.echo_model import EchoModel
from golden_messages import check_message
from palaestra_chat.service import ChatSettings
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform_conformance import PNG
from palaestra_gateway.platforms.openai_api import SESSION, OpenAIServer


def server(token="secret"):
    return OpenAIServer("openai", PlatformConfig(token=token, extra={"port": 0}))


def client(platform):
    return openai.AsyncOpenAI(base_url=platform.url, api_key="secret", max_retries=0)


def said(text):
    return [{"role": "user", "content": text}]


async def test_a_chat_program_continues_its_conversation(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        assert [each.id async for each in program.models.list()] == ["palaestra"]
        messages = said("one")
        answers = []
        for text in ("two", "three", None):
            reply = await program.chat.completions.create(model="palaestra", messages=messages, user="anna")
            answers.append(reply.choices[0].message.content)
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": text}]
        assert answers == ["echo 1: one", "echo 2: two", "echo 3: three"]
        other = await program.chat.completions.create(model="palaestra", messages=said("one"), user="anna")
        assert other.choices[0].message.content == "echo 1: one"


ANNA = hashlib.sha256(b'["anna",[],""]').hexdigest()[:16]
GUESSED = {"extra_headers": {SESSION: f"{ANNA}-mine"}}


@pytest.mark.slots
@pytest.mark.parametrize("second", [{}, {"user": "ben"}, {"user": "ben", "extra_headers": {SESSION: "mine"}}, GUESSED])
async def test_nobody_joins_the_session_of_a_person_who_said_the_same(tmp_path, second):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        create = program.chat.completions.create
        write = said("run echo private > file.txt; echo ok")
        headers = {SESSION: "mine"} if "extra_headers" in second else {}
        first = await create(model="m", messages=write, user="anna", extra_headers=headers)
        history = [*write, {"role": "assistant", "content": first.choices[0].message.content}]
        read = [*history, *said("run cat file.txt")]
        other = await create(model="m", messages=read, **second)
        assert '"output": "private' not in other.choices[0].message.content
        own = await create(model="m", messages=read, user="anna", extra_headers=headers)
        assert '"output": "private' in own.choices[0].message.content


async def test_two_conversations_of_a_person_with_the_same_messages_stay_apart(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        sessions = set()
        for _ in range(2):
            reply = await program.chat.completions.with_raw_response.create(model="m", messages=said("hi"), user="anna")
            sessions.add(reply.headers[SESSION])
        history = [*said("hi"), {"role": "assistant", "content": "echo 1: hi"}, *said("more")]
        reply = await program.chat.completions.with_raw_response.create(model="m", messages=history, user="anna")
        sessions.add(reply.headers[SESSION])
        assert len(sessions) == 3


async def test_the_same_key_of_two_persons_is_answered_twice(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        for options in ({"user": "anna"}, {"user": "ben"}, {"user": "ben", "extra_body": {"seed": 1}}):
            headers = {"Idempotency-Key": "1"}
            await program.chat.completions.create(model="m", messages=said("hi"), extra_headers=headers, **options)
        assert len(scene.model.requests) == 2
        with pytest.raises(openai.BadRequestError, match="16 characters"):
            await program.chat.completions.create(model="m", messages=said("hi"), extra_headers=headers)


async def test_usage_has_the_tokens_of_the_turn(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        whole = await program.chat.completions.create(model="m", messages=said("hi"))
        stream = await program.chat.completions.create(
            model="m", messages=said("hi"), stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]
        assert last.choices == []
        for usage in (whole.usage, last.usage):
            assert usage.prompt_tokens > 0
            assert usage.completion_tokens > 0
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_the_answer_is_streamed_and_not_repeated_at_the_end(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        stream = await program.chat.completions.create(model="m", messages=said("slowly a b c d"), stream=True)
        parts = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(part or "" for part in parts) == "a b c d "
        assert len([part for part in parts if part]) == 4


async def test_a_session_is_named_by_its_header_and_survives_a_restart(tmp_path):
    for number in (1, 2):
        platform = server()
        async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
            reply = await program.chat.completions.with_raw_response.create(
                model="m", messages=said("hi"), extra_headers={SESSION: "mine"}
            )
            assert reply.headers[SESSION] == "mine"
            assert reply.parse().choices[0].message.content == f"echo {number}: hi"


async def test_messages_before_an_unknown_session_are_given_as_a_transcript(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        earlier = [
            {"role": "system", "content": "Be brief."},
            *said("old"),
            {"role": "assistant", "content": "yes"},
        ]
        await program.chat.completions.create(model="m", messages=[*earlier, *said("new")])
        content = scene.model.requests[-1]["messages"][-1]["content"]
        assert content.index("Be brief.") < content.index("old") < content.index("yes") < content.index("new")


@pytest.mark.slots
async def test_an_image_reaches_the_sandbox(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
        await program.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        assert "uploads/image-1.png" in scene.model.requests[-1]["messages"][-1]["content"]


async def test_commands_and_refusals_are_answers(tmp_path):
    platform = server()
    config = {**OPEN, "limits": {"messages_per_hour": 3}}
    async with a_gateway(tmp_path, config, others=[platform]), client(platform) as program:

        async def ask(text, **options):
            reply = await program.chat.completions.create(
                model="m", messages=said(text), extra_headers={SESSION: "s"}, timeout=10, **options
            )
            if not options:
                return reply.choices[0].message.content
            return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

        assert "/approve" in await ask("/help")
        check_message(await ask("/status", stream=True), "running")
        assert await ask("hi") == "echo 1: hi"
        assert "limit" in await ask("more")


async def test_a_question_is_answered_in_another_request(tmp_path):
    platform, settings = server(), ChatSettings(toolsets=["clarify"])
    async with a_gateway(tmp_path, settings=settings, others=[platform]), client(platform) as program:

        async def ask(text):
            return await program.chat.completions.create(
                model="m", messages=said(text), extra_headers={SESSION: "s"}, stream=True, timeout=10
            )

        first = await ask("ask which colour?")
        assert [await anext(first) for _ in range(2)][1].choices[0].delta.content.startswith("which colour?")
        assert "".join([each.choices[0].delta.content or "" async for each in await ask("blue")]) == "Answered."
        assert "blue" in "".join([each.choices[0].delta.content or "" async for each in first])


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_program_that_hangs_up_is_not_an_error_of_the_gateway(tmp_path, caplog, streamed, after):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": said(f"slowly {'a ' * 60}"), "stream": streamed}
        headers = {"Authorization": "Bearer secret", SESSION: "s"}
        asking = asyncio.create_task(http.post(f"{platform.url}/chat/completions", json=body, headers=headers))
        await until(lambda: len(scene.model.requests) == 1)
        if streamed:
            reply = await asking
            for _ in range(after):
                await reply.content.readline()
            assert reply.connection is not None
            reply.connection.transport.abort()  # as a program that is killed
        else:
            asking.cancel()
        async with client(platform) as program:
            second = await program.chat.completions.create(
                model="m", messages=said("next"), extra_headers={SESSION: "s"}
            )
        assert second.choices[0].message.content == "echo 2: next"
    assert [record.getMessage() for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


async def test_a_program_that_disconnects_leaves_the_session_usable(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        headers = {SESSION: "s"}
        stream = await program.chat.completions.create(
            model="m", messages=said("slowly a b c d e f"), stream=True, extra_headers=headers
        )
        await stream.close()
        await until(lambda: len(scene.model.requests) == 1)
        reply = await program.chat.completions.create(model="m", messages=said("next"), extra_headers=headers)
        assert reply.choices[0].message.content == "echo 2: next"


KEY = "0b0e9c4c-4b53-4e0c-9b0e-0c6f0f3d1f11"


@pytest.mark.parametrize("headers", [{SESSION: "s"}, {}])
async def test_a_request_that_comes_again_gets_the_answer_of_the_first(tmp_path, headers):
    model = EchoModel()
    for _ in range(2):  # also after a restart
        platform = server()
        async with a_gateway(tmp_path, others=[platform], model=model), client(platform) as program:
            for stream in (False, True):
                reply = await program.chat.completions.create(
                    model="m", messages=said("hi"), stream=stream, timeout=10,
                    extra_headers={**headers, "Idempotency-Key": KEY},
                )  # fmt: skip
                if stream:
                    answer = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
                else:
                    answer = reply.choices[0].message.content
                assert answer == "echo 1: hi"
    assert len(model.requests) == 1


async def test_a_request_that_comes_again_while_its_turn_runs_waits_for_the_answer(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        headers = {SESSION: "s", "Idempotency-Key": "k1"}
        stream = await program.chat.completions.create(
            model="m", messages=said("slowly a b c d e f"), stream=True, extra_headers=headers
        )
        await stream.close()
        await until(lambda: not platform._waiting)
        reply = await program.chat.completions.create(
            model="m", messages=said("slowly a b c d e f"), extra_headers=headers, timeout=10
        )
        assert reply.choices[0].message.content.strip() == "a b c d e f"
        assert len(scene.model.requests) == 1


async def test_a_command_that_comes_again_is_not_run_again(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        for expected in ("Nothing is running", "answered before"):
            reply = await program.chat.completions.create(
                model="m", messages=said("/stop"), timeout=10,
                extra_headers={SESSION: "s", "Idempotency-Key": "k1"},
            )  # fmt: skip
            assert expected in reply.choices[0].message.content


ADDRESS = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        ("wrong", {"messages": said("x")}, 401),
        ("secret", {"messages": []}, 400),
        ("secret", {"messages": [{"role": "assistant", "content": "x"}]}, 400),
        ("secret", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400),
        ("secret", {"messages": [{"role": "user", "content": [ADDRESS]}]}, 400),
        ("secret", [], 400),
    ],
)  # fmt: skip
async def test_a_request_that_is_no_chat_is_refused(tmp_path, token, body, status):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{platform.url}/chat/completions"
        async with session.post(url, data=json.dumps(body), headers=headers) as reply:
            assert reply.status == status


@pytest.mark.parametrize(
    ("key", "path", "status", "kind", "code"),
    [
        ("wrong", "chat/completions", 401, "authentication_error", "invalid_api_key"),
        ("secret", "embeddings", 404, "invalid_request_error", None),
    ],
)
async def test_errors_have_the_shape_of_the_api(tmp_path, key, path, status, kind, code):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]):
        async with openai.AsyncOpenAI(base_url=platform.url, api_key=key, max_retries=0) as program:
            with pytest.raises(openai.APIStatusError) as raised:
                await program.post(f"/{path}", cast_to=object, body={"messages": said("x")})
        assert raised.value.status_code == status
        assert (raised.value.type, raised.value.code) == (kind, code)
        assert raised.value.body["message"]


async def test_an_allow_list_does_not_keep_out_who_has_the_token(tmp_path):
    platform = server()
    config = {"platforms": {**OPEN["platforms"], "openai": {"allowed_users": []}}}
    async with a_gateway(tmp_path, config, others=[platform]), client(platform) as program:
        reply = await program.chat.completions.create(model="m", messages=said("x"))
        assert reply.choices[0].message.content == "echo 1: x"


@pytest.mark.parametrize("header", ["Idempotency-Key", SESSION])
async def test_headers_that_are_no_text_are_refused(tmp_path, header):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]):
        host, port = platform.url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": said("hi")}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{header}: a"
        writer.write(head.encode() + b"\xff\xfe\r\nAuthorization: Bearer secret\r\n\r\n" + body)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


async def test_a_turn_that_failed_is_an_error_and_not_an_answer(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]) as scene, client(platform) as program:
        scene.model.failing = True
        with pytest.raises(openai.InternalServerError) as whole:
            await program.chat.completions.create(model="m", messages=said("hi"), user="anna")
        assert (whole.value.status_code, whole.value.code) == (502, "api_error")
        stream = await program.chat.completions.create(model="m", messages=said("hi"), user="anna", stream=True)
        with pytest.raises(openai.APIError) as streamed:
            [chunk async for chunk in stream]
        assert streamed.value.code == "api_error"
        scene.model.failing = False
        again = await program.chat.completions.create(model="m", messages=said("hi"), user="anna")
        assert again.choices[0].finish_reason == "stop"


@pytest.mark.slots
async def test_a_stream_around_a_tool_call_has_separate_texts_and_one_session(tmp_path):
    platform = server()
    async with a_gateway(tmp_path, others=[platform]), client(platform) as program:
        text, messages = "", said("aloud run echo kept > file.txt")
        stream = await program.chat.completions.create(model="m", messages=messages, user="anna", stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text.startswith("I run it.\n\ndone: ")
        history = [*messages, {"role": "assistant", "content": text}, *said("run cat file.txt")]
        read = await program.chat.completions.create(model="m", messages=history, user="anna")
        assert '"output": "kept' in read.choices[0].message.content
