import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from doors.gateway.answered_once import AnsweredOnce
from doors.gateway.conftest import a_gateway, started, until
from doors.gateway.twilio_api import ACCOUNT, ANNA, NUMBER, PUBLIC, TOKEN, TwilioAPI
from palaestra.core.errors import ConfigError
from palaestra.core.io import http_server
from palaestra.doors.gateway.config import PlatformConfig
from palaestra.doors.gateway.mailbox import Mailbox
from palaestra.doors.gateway.platform import ChatAddress, Incoming, Platform
from palaestra.doors.gateway.platform_conformance import PNG
from palaestra.doors.gateway.platforms.sms import Sms, signature_of


def sms(api: TwilioAPI, token: str = TOKEN) -> Sms:
    extra = {"account_sid": ACCOUNT, "number": NUMBER, "url": PUBLIC, "port": 0, "api_url": api.url}
    platform = Sms("sms", PlatformConfig(token=token, extra=extra))
    api.webhook = lambda: platform.url
    return platform


class TestSms(AnsweredOnce):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.api = TwilioAPI()
        self.mailbox = Mailbox(self.folder / "gateway.db")
        try:
            async with self.api.serving():
                yield
        finally:
            await self.mailbox.aclose()

    async def make_platform(self) -> Platform:
        platform = sms(self.api)
        platform.notes = self.mailbox.notes("sms")
        return platform

    async def make_refused(self) -> Platform:
        return sms(self.api, "wrong")

    async def person_sends(self, text: str) -> None:
        await self.api.write(text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        forms = [await self.api.write(text) for text in reversed(texts)]
        for form in reversed(forms):
            await self.api.call(form)

    async def person_sees(self) -> list[str]:
        return self.api.sent()

    async def break_connection(self) -> None:
        self.api.failing = 503, {}

    async def withdraw_token(self) -> None:
        self.api.token = "another"

    async def limit_rate(self) -> float:
        self.api.failing = 429, {"Retry-After": "4"}
        return 4

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "+10000000000")


def test_only_twilio_can_call_the_webhook():
    async def main():
        api = TwilioAPI()
        async with api.serving(), started(sms(api)) as arrived:
            form = await api.write("hello")
            await until(lambda: bool(arrived))
            assert await api.call(form) == 200
            assert await api.call(form, "another token") == 403
            assert await api.call({**form, "Body": "forged"}, "") == 403

    asyncio.run(main())


def test_the_signature_is_that_of_the_documentation():
    """The example of https://www.twilio.com/docs/usage/security."""
    form = {
        "CallSid": "CA1234567890ABCDE", "Caller": "+14158675309", "Digits": "1234", "From": "+14158675309",
        "To": "+18005551212",
    }  # fmt: skip
    assert signature_of("12345", "https://mycompany.com/myapp.php?foo=1&bar=2", form) == "RSOYDt4T1cUTdK1PDd93/VVr8B8="


def test_pictures_of_a_message_are_read():
    async def main():
        api = TwilioAPI()
        async with api.serving(), started(sms(api)) as arrived:
            await api.write("look", ("image/png", PNG))
            await until(lambda: bool(arrived))
            (file,) = arrived[0].attachments
            assert (file.name, file.data, file.is_image) == ("file1.png", PNG, True)

    asyncio.run(main())


def test_messages_that_come_twice_or_while_killed_are_answered_once(tmp_path):
    async def main():
        api = TwilioAPI()
        settings = {"platforms": {"sms": {"allowed_users": [ANNA]}}}
        async with api.serving():
            async with a_gateway(tmp_path, settings, others=[sms(api)]):
                first = await api.write("one")
                await api.call(first)
                await until(lambda: len(api.sent()) == 1)
            await api.write("two")
            async with a_gateway(tmp_path, settings, others=[sms(api)]):
                await api.call(first)
                await until(lambda: len(api.sent()) >= 2)
                await api.write("three")
                await until(lambda: len(api.sent()) >= 3)
            assert api.sent() == ["echo 1: one", "echo 2: two", "echo 3: three"]

    asyncio.run(main())


def test_the_webhooks_public_address_is_required():
    with pytest.raises(ConfigError, match=r"extra\.url"):
        Sms("sms", PlatformConfig(token="t", extra={"account_sid": "AC1", "number": "+1"}))


def test_a_body_without_end_and_without_a_signature_ends(monkeypatch, caplog):
    monkeypatch.setattr(http_server, "BODY_S", 0.2)

    async def ignore(message: Incoming) -> None: ...

    async def run() -> None:
        api = TwilioAPI()
        async with api.serving():
            platform = sms(api)
            await platform.start(ignore)
            host, port = platform.url.removeprefix("http://").split(":")
            head = "POST /sms HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded; charset=none"
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

    asyncio.run(run())
    assert not [record for record in caplog.records if record.exc_info]
