"""Updates and answers of Telegram in the form of its documentation: which the gateway takes, ignores or refuses.

The contents are ours; field names and nesting are those of https://core.telegram.org/bots/api, in the section that each
comment names.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.conftest import started, until
from gateway.telegram_api import CHAT, SUPERGROUP, TOKEN, TelegramAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming
from palaestra_gateway.platforms.telegram import Telegram
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable

# #user and #chat
ANNA = {"id": CHAT, "is_bot": False, "first_name": "Anna", "last_name": "B", "username": "anna", "language_code": "en"}
PRIVATE = {"id": CHAT, "type": "private", "first_name": "Anna", "last_name": "B", "username": "anna"}
GROUP = {"id": -1009, "type": "supergroup", "title": "A group", "is_forum": True}
BASE = {"message_id": 42, "from": ANNA, "chat": PRIVATE, "date": 1_700_000_000}
HERE = ChatAddress("telegram", str(CHAT))


def telegram(url: str) -> Telegram:
    return Telegram("telegram", PlatformConfig(token=TOKEN, extra={"api_url": url}))


async def taken(*updates: dict[str, Any], files: dict[str, bytes] | None = None) -> list[Incoming]:
    """What the platform makes of updates. A last message shows that all of them were read."""
    api = TelegramAPI()
    api.files |= files or {}
    async with api.serving(), started(telegram(api.url)) as arrived:
        for update in updates:
            api.update(**update)
        api.update(message={**BASE, "message_id": 99, "text": "last"})
        await until(lambda: bool(arrived) and arrived[-1].text == "last")
    return arrived[:-1]


TAKEN = {
    # #message
    "a text": ({**BASE, "text": "hello"}, Incoming(HERE, "42", str(CHAT), "hello", user_name="Anna B")),
    # #messageentity
    "a command": (
        {**BASE, "text": "/new", "entities": [{"type": "bot_command", "offset": 0, "length": 4}]},
        Incoming(HERE, "42", str(CHAT), "/new", user_name="Anna B"),
    ),
    # #message, reply_to_message
    "a reply": (
        {**BASE, "text": "and?", "reply_to_message": {**BASE, "message_id": 41, "text": "earlier"}},
        Incoming(HERE, "42", str(CHAT), "and?\n\n> earlier", user_name="Anna B"),
    ),
    # #messageentity, text_link: its address is not in the text; offsets count UTF-16 units
    "a text with links": (
        {**BASE, "text": "👩‍👧 compare this page and https://x.org", "entities": [
            {"type": "text_link", "offset": 14, "length": 9, "url": "https://example.org/a?b=1"},
            {"type": "text_link", "offset": 28, "length": 13, "url": "https://x.org"},
        ]},
        Incoming(
            HERE, "42", str(CHAT), "👩‍👧 compare this page (https://example.org/a?b=1) and https://x.org",
            user_name="Anna B",
        ),
    ),
    "a reply to a text with a link": (
        {**BASE, "text": "open it", "reply_to_message": {
            **BASE, "message_id": 41, "text": "read this",
            "entities": [{"type": "text_link", "offset": 5, "length": 4, "url": "https://x.org"}],
        }},
        Incoming(HERE, "42", str(CHAT), "open it\n\n> read this (https://x.org)", user_name="Anna B"),
    ),
    # #textquote
    "a reply to a part of a message": (
        {**BASE, "text": "why?", "quote": {
            "text": "that", "position": 3, "is_manual": True,
            "entities": [{"type": "text_link", "offset": 0, "length": 4, "url": "https://x.org"}],
        }},
        Incoming(HERE, "42", str(CHAT), "why?\n\n> that (https://x.org)", user_name="Anna B"),
    ),
    # #message, forward_origin and #messageoriginuser
    "a forwarded text": (
        {**BASE, "text": "news", "forward_origin": {"type": "user", "date": 1, "sender_user": {**ANNA, "id": 8}}},
        Incoming(HERE, "42", str(CHAT), "news", user_name="Anna B"),
    ),
    # #message, message_thread_id and is_topic_message
    "a text in a topic": (
        {**BASE, "chat": GROUP, "text": "hi", "message_thread_id": 5, "is_topic_message": True},
        Incoming(ChatAddress("telegram", "-1009", "group", "5"), "42", str(CHAT), "hi", user_name="Anna B"),
    ),
    # without is_topic_message, the id only names a chain of replies
    "a reply in a group": (
        {**BASE, "chat": GROUP, "text": "hi", "message_thread_id": 5},
        Incoming(ChatAddress("telegram", "-1009", "group"), "42", str(CHAT), "hi", user_name="Anna B"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
async def test_texts_are_taken(name):
    message, expected = TAKEN[name]
    assert await taken({"message": message}) == [expected]


FILES = {
    # #voice
    "a voice message": (
        {"voice": {"file_id": "f", "file_unique_id": "u", "duration": 2, "mime_type": "audio/ogg", "file_size": 4}},
        Attachment("u.ogg", "audio/ogg", b"data"),
    ),
    # #audio
    "music": (
        {"audio": {
            "file_id": "f", "file_unique_id": "u", "duration": 60, "performer": "x", "title": "y",
            "file_name": "a.mp3", "mime_type": "audio/mpeg", "file_size": 4,
        }},
        Attachment("a.mp3", "audio/mpeg", b"data"),
    ),
    # #photosize: the last is the largest
    "a photo": (
        {"photo": [
            {"file_id": "small", "file_unique_id": "s", "width": 90, "height": 67, "file_size": 1},
            {"file_id": "f", "file_unique_id": "u", "width": 800, "height": 600, "file_size": 4},
        ]},
        Attachment("u.jpg", "image/jpeg", b"data"),
    ),
    # #document
    "a document": (
        {"document": {
            "file_id": "f", "file_unique_id": "u", "file_name": "a.pdf", "mime_type": "application/pdf",
            "file_size": 4,
        }},
        Attachment("a.pdf", "application/pdf", b"data"),
    ),
    # #animation: for compatibility, document is set too
    "an animation": (
        {
            "animation": {"file_id": "f", "file_unique_id": "u", "width": 1, "height": 1, "duration": 1},
            "document": {"file_id": "f", "file_unique_id": "u", "file_name": "a.mp4", "mime_type": "video/mp4"},
        },
        Attachment("a.mp4", "video/mp4", b"data"),
    ),
    # #videonote: it has neither a name nor a type
    "a video note": (
        {"video_note": {"file_id": "f", "file_unique_id": "u", "length": 1, "duration": 1, "file_size": 4}},
        Attachment("file", "application/octet-stream", b"data"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
async def test_files_are_read(name):
    content, expected = FILES[name]
    update = {"message": {**BASE, **content, "caption": "look"}}
    (message,) = await taken(update, files={"f": b"data"})
    assert (message.text, message.attachments, message.problem) == ("look", (expected,), "")


def photo(number: str, **more: Any) -> dict[str, Any]:
    size = {"file_id": number, "file_unique_id": number, "width": 8, "height": 6, "file_size": 1}
    return {**BASE, "message_id": int(number), "photo": [size], **more}


def test_the_files_of_an_album_are_one_message():
    # #message, media_group_id: each file is a message of its own, the caption is that of one of them
    first, second = {"media_group_id": "g1"}, {"media_group_id": "g2"}
    link = [{"type": "text_link", "offset": 0, "length": 4, "url": "https://x.org"}]
    photos = [
        photo("1", **first, caption="look", caption_entities=link), photo("2", **first), photo("3", **second),
        photo("4", **second, caption="and"), photo("5", caption="alone"), photo("6"),
    ]  # fmt: skip

    async def main() -> list[Incoming]:
        api = TelegramAPI()
        api.files = {str(number): b"%d" % number for number in range(1, 7)}
        async with api.serving(), started(telegram(api.url)) as arrived:
            api.update(message=photos[0])
            await asyncio.sleep(0.2)  # the first file is here before the others
            for each in photos[1:]:
                api.update(message=each)
            await until(lambda: bool(arrived) and arrived[-1].message_id == "6")
        return arrived

    assert [(each.message_id, each.text, [file.data for file in each.attachments]) for each in asyncio.run(main())] == [
        ("1", "look (https://x.org)", [b"1", b"2"]),
        ("3", "and", [b"3", b"4"]),
        ("5", "alone", [b"5"]),
        ("6", "", [b"6"]),
    ]


REFUSED = {
    # #sticker, #location, #contact, #poll, #dice
    "a sticker": {"sticker": {
        "file_id": "f", "file_unique_id": "u", "type": "regular", "width": 1, "height": 1, "is_animated": False,
        "is_video": False,
    }},
    "a location": {"location": {"latitude": 1.5, "longitude": 2.5}},
    "a contact": {"contact": {"phone_number": "+1", "first_name": "C", "user_id": 9}},
    "a die": {"dice": {"emoji": "🎲", "value": 4}},
    "a large file": {"document": {"file_id": "f", "file_unique_id": "u", "file_name": "a", "file_size": 21 << 20}},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_contents_that_cannot_be_read_are_answered_with_the_reason(name):
    (message,) = await taken({"message": {**BASE, **REFUSED[name]}})
    assert "not supported" in message.problem or "at most 20 MB" in message.problem


IGNORED = {
    # #message, service messages: a person caused them, but wrote nothing
    "somebody joins": {"message": {**BASE, "chat": GROUP, "new_chat_members": [{**ANNA, "id": 8}]}},
    "somebody leaves": {"message": {**BASE, "chat": GROUP, "left_chat_member": {**ANNA, "id": 8}}},
    "a pinned message": {"message": {**BASE, "pinned_message": {**BASE, "message_id": 41, "text": "x"}}},
    "a new title": {"message": {**BASE, "chat": GROUP, "new_chat_title": "B"}},
    "a new topic": {"message": {**BASE, "chat": GROUP, "forum_topic_created": {"name": "t", "icon_color": 7322096}}},
    "a migration": {"message": {**BASE, "chat": {**GROUP, "type": "group"}, "migrate_to_chat_id": -1009}},
    # #update: kinds that the gateway does not ask for
    "an edit": {"edited_message": {**BASE, "edit_date": 1_700_000_001, "text": "y"}},
    "a channel post": {"channel_post": {"message_id": 1, "chat": {**GROUP, "type": "channel"}, "date": 1}},
    # #messagereactionupdated
    "a reaction": {"message_reaction": {
        "chat": PRIVATE, "message_id": 1, "user": ANNA, "date": 1, "old_reaction": [],
        "new_reaction": [{"type": "emoji", "emoji": "👍"}],
    }},
    # #user, is_bot
    "a bot's message": {"message": {**BASE, "from": {**ANNA, "is_bot": True}, "text": "x"}},
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
async def test_other_updates_are_ignored(name):
    assert await taken(IGNORED[name]) == []


@pytest.mark.parametrize(
    ("answer", "kind", "wait_s"),
    [
        # #making-requests and #responseparameters
        ({"error_code": 429, "description": "Too Many Requests: retry after 35", "parameters": {"retry_after": 35}},
         PlatformUnavailable, 35.0),
        ({"error_code": 400, "description": "Bad Request: chat not found"}, PlatformRefused, None),
        ({"error_code": 403, "description": "Forbidden: bot was blocked by the user"}, PlatformRefused, None),
        ({"error_code": 401, "description": "Unauthorized"}, PlatformUnavailable, None),
        ({"error_code": 502, "description": "Bad Gateway"}, PlatformUnavailable, None),
    ],
)  # fmt: skip
async def test_refusals_wait_or_are_final(answer, kind, wait_s):
    api = TelegramAPI()
    api.refusing = {"ok": False, **answer}
    async with api.serving(), started(platform := telegram(api.url)):
        with pytest.raises(kind) as raised:
            await platform.send_text(HERE, "text", key="k")
        assert getattr(raised.value, "retry_after_s", None) == wait_s


async def test_a_group_that_became_a_supergroup_gets_its_messages():
    api = TelegramAPI()
    # #responseparameters, migrate_to_chat_id
    description = "Bad Request: group chat was upgraded to a supergroup chat"
    parameters = {"migrate_to_chat_id": SUPERGROUP}
    api.refusing = {"ok": False, "error_code": 400, "description": description, "parameters": parameters}
    async with api.serving(), started(platform := telegram(api.url)):
        await platform.send_text(HERE, "text", key="k1")
        await platform.send_file(HERE, Attachment("a.txt", "text/plain", b"data"), key="k2")
    assert [each.get("text") or each["document"] for each in api.sent] == ["text", b"data"]
