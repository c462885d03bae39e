from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.answered_once import AnsweredOnce
from gateway.conftest import a_gateway, started, until
from gateway.telegram_api import CHAT, TOKEN, TelegramAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Platform
from palaestra_gateway.platforms.telegram import Telegram
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON


def telegram(url: str, token: str = TOKEN) -> Telegram:
    return Telegram("telegram", PlatformConfig(token=token, extra={"api_url": url}))


class TestTelegram(AnsweredOnce):
    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.api = TelegramAPI()
        async with self.api.serving():
            yield

    async def make_platform(self) -> Platform:
        return telegram(self.api.url)

    async def make_refused(self) -> Platform:
        return telegram(self.api.url, "123456:wrong")

    async def person_sends(self, text: str) -> None:
        self.api.write(text=text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        self.api.disordered(*texts)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        name = self.api.put_file(file.data)
        about = {"file_id": name, "file_unique_id": name, "file_name": file.name, "mime_type": file.media_type}
        self.api.write(document={**about, "file_size": len(file.data)}, caption=text)

    async def person_sees(self) -> list[str]:
        return [each["text"] for each in self.api.sent if "text" in each]

    async def person_sees_files(self) -> list[bytes]:
        return [each.get("photo") or each["document"] for each in self.api.sent if "text" not in each]

    async def break_connection(self) -> None:
        self.api.failing = 502

    async def withdraw_token(self) -> None:
        self.api.token = "another"

    async def limit_rate(self) -> float:
        self.api.failing = 429
        return 3

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "999")


async def test_a_file_that_cannot_be_read_keeps_no_message_waiting():
    api = TelegramAPI()
    async with api.serving(), started(telegram(api.url)) as arrived:
        api.write(document={"file_id": "gone", "file_unique_id": "gone", "file_name": "a.txt"})
        api.write(text="after it")
        await until(lambda: len(arrived) > 1)
    assert "a.txt" in arrived[0].problem
    assert not arrived[0].attachments
    assert arrived[1].text == "after it"


@pytest.mark.parametrize(
    ("unknown", "text"),
    [
        ({"forward_origin": {"type": "hidden_user", "date": 1}, "text": "forwarded"}, "forwarded"),
        ({"poll": {"id": "1"}}, ""),  # it is said that it cannot be read
        ({"photo": [{"file_id": "x"}], "caption": "look"}, "look"),
        ({"chat": {"id": 5, "type": "a new kind"}, "text": "from there"}, None),
        ({"date": "yesterday", "text": "no time"}, None),
    ],
)
async def test_a_message_of_an_unknown_form_blocks_no_other(unknown: dict[str, JSON], text: str | None):
    api = TelegramAPI()
    async with api.serving(), started(telegram(api.url)) as arrived:
        api.write(**unknown)
        api.write(text="after it")
        await until(lambda: any(each.text == "after it" for each in arrived))
    assert [each.text for each in arrived] == ([] if text is None else [text]) + ["after it"]


async def test_a_command_for_another_bot_is_not_for_this_one():
    api = TelegramAPI()
    async with api.serving(), started(telegram(api.url)) as arrived:
        for text in ("/new@other_bot", "/undo@a_bot2 please", "/new@a_bot", "/stop@A_Bot", "mail me@other_bot"):
            api.write(text=text)
        await until(lambda: len(arrived) > 2)
    assert [each.text for each in arrived] == ["/new@a_bot", "/stop@A_Bot", "mail me@other_bot"]


async def test_a_reply_comes_with_what_it_quotes():
    api = TelegramAPI()
    chat = {"id": CHAT, "type": "private"}
    earlier = {"message_id": 3, "date": 1, "chat": chat, "text": "The build failed in step 3"}
    async with api.serving(), started(telegram(api.url)) as arrived:
        api.write(text="why?", reply_to_message=earlier)
        api.write(text="why?", reply_to_message=earlier, quote={"text": "step 3", "position": 20})
        await until(lambda: len(arrived) == 2)
    assert [each.text for each in arrived] == ["why?\n\n> The build failed in step 3", "why?\n\n> step 3"]


async def test_a_photo_and_a_long_reply_go_through_the_gateway(tmp_path):
    api = TelegramAPI()
    config = {"platforms": {"telegram": {"allowed_users": [str(CHAT)]}}}
    async with api.serving(), a_gateway(tmp_path, config, others=[telegram(api.url)]):
        api.write(text="say " + "😀" * 3000)
        await until(lambda: len(api.sent) == 2)
        assert "".join(each["text"] for each in api.sent) == "😀" * 3000
        api.write(sticker={"file_id": "s", "file_unique_id": "s", "type": "regular", "width": 1, "height": 1,
                           "is_animated": False, "is_video": False})  # fmt: skip
        await until(lambda: len(api.sent) == 3)
        assert "not supported" in api.sent[-1]["text"]


async def test_a_token_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"platforms\.telegram\.token"):
        await telegram("http://127.0.0.1:9", "no token").start(None)
