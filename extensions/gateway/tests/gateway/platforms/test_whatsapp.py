import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.answered_once import AnsweredOnce
from gateway.conftest import a_gateway, started, until
from gateway.whatsapp_api import ANNA, NUMBER, SECRET, TOKEN, VERIFY, WhatsAppAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming, Platform
from palaestra_gateway.platforms.whatsapp import WhatsApp
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import http_server


def whatsapp(api: WhatsAppAPI, token: str = TOKEN) -> WhatsApp:
    extra = {"phone_number_id": NUMBER, "verify_token": VERIFY, "port": 0, "api_url": f"{api.url}/v23.0"}
    platform = WhatsApp("whatsapp", PlatformConfig(token=token, api_key=SECRET, extra=extra))
    api.webhook = lambda: platform.url
    return platform


class TestWhatsApp(AnsweredOnce):
    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.api = WhatsAppAPI()
        async with self.api.serving():
            yield

    async def make_platform(self) -> Platform:
        return whatsapp(self.api)

    async def make_refused(self) -> Platform:
        return whatsapp(self.api, "wrong")

    async def person_sends(self, text: str) -> None:
        self.api.write(type="text", text={"body": text})

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        messages = [self.api.message(type="text", text={"body": text}) for text in texts]
        for message in reversed([*messages, *messages]):
            self.api.notify(messages=[message])

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        number = self.api.add_media(file.media_type, file.data)
        about = {"id": number, "mime_type": file.media_type, "filename": file.name, "caption": text}
        self.api.write(type="document", document=about)

    async def person_sees(self) -> list[str]:
        return [each["text"]["body"] for each in self.api.sent if each["type"] == "text"]

    async def person_sees_files(self) -> list[bytes]:
        return [self.api.media[each[each["type"]]["id"]][1] for each in self.api.sent if each["type"] != "text"]

    async def break_connection(self) -> None:
        self.api.failing = 500, 131000, {}

    async def withdraw_token(self) -> None:
        self.api.token = "another"

    async def limit_rate(self) -> float:
        self.api.failing = 429, 130429, {"Retry-After": "4"}
        return 4

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "10000000000")


async def test_meta_can_check_the_webhook_and_nobody_else_can_send_to_it():
    api = WhatsAppAPI()
    async with api.serving(), started(platform := whatsapp(api)) as arrived, aiohttp.ClientSession() as client:
        query = {"hub.mode": "subscribe", "hub.challenge": "1158201444", "hub.verify_token": VERIFY}
        async with client.get(f"{platform.url}/webhook", params=query) as reply:
            assert (reply.status, await reply.text()) == (200, "1158201444")
        async with client.get(f"{platform.url}/webhook", params={**query, "hub.verify_token": "x"}) as reply:
            assert reply.status == 403
        for headers in ({}, {"X-Hub-Signature-256": "sha256=" + 64 * "0"}):
            async with client.post(f"{platform.url}/webhook", data=b"{}", headers=headers) as reply:
                assert reply.status == 403
        assert not arrived


async def test_statuses_reactions_and_other_numbers_are_no_messages_and_unknown_kinds_get_a_notice():
    api = WhatsAppAPI()
    async with api.serving(), started(whatsapp(api)) as arrived:
        api.notify(statuses=[{"id": "wamid.x", "status": "read", "recipient_id": ANNA}])
        api.write(type="reaction", reaction={"message_id": "wamid.x", "emoji": "👍"})
        message = {"from": ANNA, "id": "wamid.y", "type": "text", "text": {"body": "not for this number"}}
        api.notify("1", messages=[message])
        api.write(type="location", location={"latitude": 1, "longitude": 2})
        await until(lambda: bool(arrived))
        assert "not supported" in arrived[0].problem
        assert (arrived[0].user_id, arrived[0].user_name) == (ANNA, "Anna")


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        # cloud-api/webhooks/reference/messages: button and interactive
        ({"type": "button", "button": {"payload": "p1", "text": "Stop it"}}, "Stop it"),
        (
            {
                "type": "interactive",
                "interactive": {"type": "button_reply", "button_reply": {"id": "1", "title": "Yes"}},
            },
            "Yes",
        ),
        (
            {
                "type": "interactive",
                "interactive": {
                    "type": "list_reply",
                    "list_reply": {"id": "1", "title": "Berlin", "description": "3 flats"},
                },
            },
            "Berlin",
        ),
        ({"type": "interactive", "interactive": {"type": "nfm_reply", "nfm_reply": {"name": "flow"}}}, ""),
    ],
)
async def test_what_a_person_chose_is_what_the_person_says(sent: dict[str, Any], text: str):
    api = WhatsAppAPI()
    async with api.serving(), started(whatsapp(api)) as arrived:
        api.write(**sent)
        await until(lambda: bool(arrived))
    assert (arrived[0].text, bool(arrived[0].problem)) == (text, not text)


async def test_a_text_after_24_hours_is_refused_and_a_pair_limit_is_not():
    api = WhatsAppAPI()
    async with api.serving(), started(platform := whatsapp(api)):
        kinds = []
        for failing in ((400, 131047, {}), (400, 131056, {})):
            api.failing = failing
            try:
                await platform.send_text(ChatAddress("whatsapp", ANNA), "late", key="k")
            except Exception as error:
                kinds.append(type(error).__name__)
        assert kinds == ["PlatformRefused", "PlatformUnavailable"]


async def test_messages_that_come_twice_or_while_killed_are_answered_once(tmp_path):
    api = WhatsAppAPI()
    settings = {"platforms": {"whatsapp": {"allowed_users": [ANNA]}}}
    async with api.serving():
        async with a_gateway(tmp_path, settings, others=[whatsapp(api)]):
            first = api.write(type="text", text={"body": "one"})
            second = api.write(type="text", text={"body": "two"})
            api.notify(messages=[second, first])
            await until(lambda: len(api.sent) == 2)
        api.write(type="text", text={"body": "three"})
        async with a_gateway(tmp_path, settings, others=[whatsapp(api)]):
            api.notify(messages=[first])
            api.write(type="text", text={"body": "four"})
            await until(lambda: len(api.sent) >= 4)
        texts = [each["text"]["body"] for each in api.sent]
        assert texts == ["echo 1: one", "echo 2: two", "echo 3: three", "echo 4: four"], json.dumps(api.sent)


def test_the_secrets_are_required():
    with pytest.raises(ConfigError, match="verify_token"):
        WhatsApp("whatsapp", PlatformConfig(token="t", api_key="s", extra={"phone_number_id": "1"}))


async def test_a_body_without_end_and_without_a_signature_ends(monkeypatch, caplog):
    monkeypatch.setattr(http_server, "BODY_S", 0.2)

    async def ignore(message: Incoming) -> None: ...

    async def run() -> None:
        api = WhatsAppAPI()
        async with api.serving():
            platform = whatsapp(api)
            await platform.start(ignore)
            host, port = platform.url.removeprefix("http://").split(":")
            head = "POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded; charset=none"
            for length, body, answer in ((100, b"a", b" 408 "), (3, b"\xff&=", b" 403 "), (100, b"a", b"")):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}\r\nContent-Length: {length}\r\n\r\n".encode() + body)
                await writer.drain()
                if answer:
                    assert answer in await asyncio.wait_for(reader.readline(), 5)
                else:
                    await asyncio.sleep(0.05)
                    writer.transport.abort()
                    await asyncio.sleep(0.05)
                writer.close()
            await platform.stop()

    await run()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("contact", "sender", "name"),
    [
        ({"wa_id": ANNA}, {"from": ANNA}, ""),
        ({"wa_id": ANNA, "profile": {}}, {"from": ANNA}, ""),
        ({"wa_id": ANNA, "profile": None}, {"from": ANNA}, ""),
        ({"user_id": "US.1349", "profile": {"name": "Anna", "username": "@anna"}}, {"from_user_id": "US.1349"}, "Anna"),
        ({}, {"from": ANNA}, ""),
    ],
)
async def test_a_message_arrives_without_a_name_or_a_number(contact: dict[str, Any], sender: dict[str, str], name: str):
    api = WhatsAppAPI()
    async with api.serving(), started(whatsapp(api)) as arrived:
        api.notify(contacts=[contact], statuses=[{"id": "wamid.x", "status": "read", "recipient_id": ANNA}])
        message = {**api.message(type="text", text={"body": "hello"}), "from": "", **sender}
        api.notify(contacts=[contact], messages=[message])
        await until(lambda: bool(arrived))
    assert (arrived[0].text, arrived[0].user_id, arrived[0].user_name) == ("hello", *sender.values(), name)


async def test_a_message_of_another_shape_does_not_cost_the_others():
    api = WhatsAppAPI()
    async with api.serving(), started(whatsapp(api)) as arrived:
        shapes = [{"type": "text"}, {"type": "image", "image": None}, {"type": "button", "button": "b"}]
        api.notify(messages=[*(api.message(**each) for each in shapes), api.message(type="text", text={"body": "hi"})])
        await until(lambda: len(arrived) == 4)
    assert [(message.text, bool(message.problem)) for message in arrived] == [*3 * [("", True)], ("hi", False)]


async def test_a_person_who_hides_the_number_gets_the_answer():
    api = WhatsAppAPI()
    async with api.serving(), started(platform := whatsapp(api)):
        await platform.send_text(ChatAddress("whatsapp", "US.1349"), "hello", key="k")
    [sent] = api.sent
    assert (sent["recipient"], "to" in sent) == ("US.1349", False)
