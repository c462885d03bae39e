"""Events and answers of Discord in the form of its documentation: which the gateway takes, ignores or refuses.

The contents are ours; field names and nesting are those of the pages of https://docs.discord.com/developers that the
comments name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import started, until
from gateway.discord_api import ANNA, BOT, DM, GENERAL, IS_VOICE_MESSAGE, SERVER, DiscordAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming
from palaestra_gateway.platforms.discord import Discord
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable

VOICE = b"OggS"
# resources/user#user-object
USER = {"id": ANNA, "username": "anna", "discriminator": "0", "global_name": "Anna", "avatar": None}
ME = {"id": BOT, "username": "bot", "discriminator": "0001", "global_name": None, "avatar": None, "bot": True}
# resources/message#message-object-example-message
BASE: dict[str, Any] = {
    "id": "334385199974967042", "channel_id": DM, "author": USER, "content": "Supper's hot", "mention_everyone": False,
    "timestamp": "2017-07-11T17:27:07.299000+00:00", "edited_timestamp": None, "tts": False, "mentions": [],
    "mention_roles": [], "attachments": [], "embeds": [], "pinned": False, "type": 0, "flags": 0, "components": [],
    "channel_type": 1,
}  # fmt: skip
# events/gateway-events#message-create-message-create-extra-fields
SHARED = {
    "channel_id": GENERAL, "guild_id": SERVER, "channel_type": 0,
    "member": {"roles": [], "joined_at": "2017-07-11T17:27:07+00:00", "deaf": False, "mute": False, "flags": 0},
}  # fmt: skip


def discord(api: DiscordAPI) -> Discord:
    return Discord("discord", PlatformConfig(token=api.token), connector=api.connector)


async def taken(name: str, event: dict[str, Any]) -> list[Incoming]:
    """What the platform makes of an event. A last message shows that it was read."""
    api = DiscordAPI()
    async with api.serving(), started(discord(api)) as arrived:
        for about in event.get("attachments") or ():
            api.files[about["url"].partition("/attachments/")[2]] = VOICE
        await api.dispatch(name, event)
        await api.dispatch("MESSAGE_CREATE", {**BASE, "id": "334385199974967099", "content": "last"})
        await until(lambda: bool(arrived) and arrived[-1].text == "last")
    return arrived[:-1]


def incoming(text: str, channel: str = DM, **more: Any) -> Incoming:
    kind = "dm" if channel == DM else "group"
    address = ChatAddress("discord", channel, kind)
    return Incoming(address, BASE["id"], ANNA, text, user_name="Anna", **more)


EMBEDS = [
    {"type": "rich", "title": "Build 7", "url": "https://ci.example/7", "description": "It failed",
     "fields": [{"name": "branch", "value": "main", "inline": True}]},
    {"type": "article", "title": "A preview", "url": "https://x.org"},
]  # fmt: skip
TAKEN = {
    "a direct message": (BASE, incoming("Supper's hot")),
    # resources/message#message-reference-content-attribution-replies: type 19
    "a reply to the bot": (
        {
            **BASE, **SHARED, "type": 19, "content": "and?", "mentions": [{**ME, "member": SHARED["member"]}],
            "message_reference": {"type": 0, "message_id": "1", "channel_id": GENERAL, "guild_id": SERVER},
            "referenced_message": {**BASE, "id": "1", "channel_id": GENERAL, "author": ME, "content": "earlier"},
        },
        incoming("and?\n\n> earlier", GENERAL),
    ),
    # reference#message-formatting
    "a mention": (
        {**BASE, **SHARED, "content": f"<@{BOT}> what is <#1>?", "mentions": [{**ME, "member": SHARED["member"]}]},
        incoming("what is <#1>?", GENERAL),
    ),
    # topics/threads: a thread is a channel
    "a mention in a thread": (
        {**BASE, **SHARED, "channel_id": "777", "channel_type": 11, "content": f"<@!{BOT}> hi", "mentions": [ME],
         "position": 3},
        incoming("hi", "777"),
    ),
    # resources/message#message-object-voice-messages and #attachment-object
    "a voice message": (
        {
            **BASE, "content": "", "flags": IS_VOICE_MESSAGE,
            "attachments": [{
                "id": "11", "filename": "voice-message.ogg", "size": len(VOICE), "content_type": "audio/ogg",
                "url": "https://cdn.discordapp.com/attachments/11/voice-message.ogg", "duration_secs": 1.0,
                "proxy_url": "https://media.discordapp.net/attachments/11/voice-message.ogg", "waveform": "YA==",
            }],
        },
        incoming("", attachments=(Attachment("voice-message.ogg", "audio/ogg", VOICE),)),
    ),
    # resources/message#message-reference-types: a forwarded message has no content of its own
    "a forwarded message": (
        {
            **BASE, "content": "", "flags": 1 << 14,
            "message_reference": {"type": 1, "message_id": "1", "channel_id": "2"},
            "message_snapshots": [{"message": {
                "type": 0, "content": "far away", "embeds": [], "attachments": [], "flags": 0, "mentions": [],
                "mention_roles": [], "timestamp": BASE["timestamp"], "edited_timestamp": None, "components": [],
            }}],
        },
        incoming("Forwarded message:\nfar away"),
    ),
    # resources/message#embed-object: a program's message may have nothing else
    "a reply to a message with embeds": (
        {
            **BASE, "type": 19, "content": "why?",
            "message_reference": {"type": 0, "message_id": "1", "channel_id": DM},
            "referenced_message": {**BASE, "id": "1", "author": ME, "content": "", "embeds": EMBEDS},
        },
        incoming("why?\n\n> Build 7\n> https://ci.example/7\n> It failed\n> branch: main"),
    ),
    "a forwarded message with embeds": (
        {
            **BASE, "content": "", "flags": 1 << 14,
            "message_reference": {"type": 1, "message_id": "1", "channel_id": "2"},
            "message_snapshots": [{"message": {
                "type": 0, "content": "look", "embeds": EMBEDS, "attachments": [], "flags": 0, "mentions": [],
                "mention_roles": [], "timestamp": BASE["timestamp"], "edited_timestamp": None, "components": [],
            }}],
        },
        incoming("Forwarded message:\nlook\nBuild 7\nhttps://ci.example/7\nIt failed\nbranch: main"),
    ),
    # a message that was deleted, or that Discord did not look up
    "a reply to a message that is gone": (
        {
            **BASE, "type": 19, "content": "why?", "referenced_message": None,
            "message_reference": {"type": 0, "message_id": "1", "channel_id": DM},
        },
        incoming("why?"),
    ),
    # resources/sticker#sticker-item-object
    "a sticker": (
        {**BASE, "content": "", "sticker_items": [{"id": "5", "name": "Wave", "format_type": 1}]},
        incoming("", problem="Messages of this kind are not supported. Send text, an image or a file."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
async def test_messages_to_the_bot_are_taken(name):
    event, expected = TAKEN[name]
    assert await taken("MESSAGE_CREATE", event) == [expected]


IGNORED = {
    # without the privileged intent, its content is empty
    "a message in a channel": ("MESSAGE_CREATE", {**BASE, **SHARED, "content": ""}),
    # events/gateway-events#message-update
    "an edit": ("MESSAGE_UPDATE", {**BASE, "content": "y", "edited_timestamp": "2017-07-11T17:28:07.299000+00:00"}),
    # events/gateway-events#message-delete
    "a deletion": ("MESSAGE_DELETE", {"id": BASE["id"], "channel_id": DM}),
    # events/gateway-events#message-reaction-add
    "a reaction": ("MESSAGE_REACTION_ADD", {
        "user_id": ANNA, "channel_id": DM, "message_id": BASE["id"], "emoji": {"id": None, "name": "🔥"},
        "message_author_id": BOT, "burst": False, "type": 0,
    }),
    # events/gateway-events#typing-start
    "somebody types": ("TYPING_START", {"channel_id": DM, "user_id": ANNA, "timestamp": 1_700_000_000}),
    "the bot's own message": ("MESSAGE_CREATE", {**BASE, "author": ME}),
    "a bot's message": ("MESSAGE_CREATE", {**BASE, "author": {**USER, "id": "8", "bot": True}}),
    # resources/message#message-object-message-structure, note 1
    "a webhook's message": ("MESSAGE_CREATE", {
        **BASE, **SHARED, "webhook_id": "9", "content": f"<@{BOT}>", "mentions": [ME],
        "author": {"id": "9", "username": "hook", "avatar": None, "discriminator": "0000"},
    }),
    # resources/message#message-object-message-types: CHANNEL_PINNED_MESSAGE, THREAD_STARTER_MESSAGE, POLL_RESULT
    "a pinned message": ("MESSAGE_CREATE", {
        **BASE, "content": "", "type": 6, "message_reference": {"type": 0, "message_id": "1", "channel_id": DM},
    }),
    "the start of a thread": ("MESSAGE_CREATE", {
        **BASE, **SHARED, "content": "", "type": 21, "mentions": [ME],
        "message_reference": {"type": 0, "message_id": "1", "channel_id": GENERAL, "guild_id": SERVER},
    }),
    "the result of a poll": ("MESSAGE_CREATE", {
        **BASE, "content": "", "type": 46, "message_reference": {"type": 0, "message_id": "1", "channel_id": DM},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
async def test_other_events_are_ignored(name):
    assert await taken(*IGNORED[name]) == []


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "wait_s"),
    [
        # topics/rate-limits#exceeding-a-rate-limit
        (429, {"message": "You are being rate limited.", "retry_after": 64.57, "global": False},
         {"Retry-After": "65", "X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "0", "X-RateLimit-Bucket": "abcd",
          "X-RateLimit-Reset": "1470173023.123", "X-RateLimit-Reset-After": "64.57", "X-RateLimit-Scope": "user"},
         PlatformUnavailable, 64.57),
        (429, {"message": "The resource is being rate limited.", "retry_after": 1336.57, "global": False},
         {"Retry-After": "1337", "X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "9", "X-RateLimit-Scope": "shared",
          "X-RateLimit-Reset": "1470173023.123", "X-RateLimit-Reset-After": "64.57", "X-RateLimit-Bucket": "abcd"},
         PlatformUnavailable, 1336.57),
        (429, {"message": "You are being rate limited.", "retry_after": 64.57, "global": True},
         {"Retry-After": "65", "X-RateLimit-Global": "true", "X-RateLimit-Scope": "global"},
         PlatformUnavailable, 64.57),
        # topics/rate-limits#invalid-request-limit-aka-cloudflare-bans: from the proxy, which answers without JSON
        (429, "error code: 1015", {"Retry-After": "600", "Content-Type": "text/plain"}, PlatformUnavailable, 600.0),
        # topics/opcodes-and-status-codes#json
        (404, {"message": "Unknown Channel", "code": 10003}, {}, PlatformRefused, None),
        (403, {"message": "Missing Access", "code": 50001}, {}, PlatformRefused, None),
        (403, {"message": "Cannot send messages to this user", "code": 50007}, {}, PlatformRefused, None),
        # reference#error-messages
        (400, {"code": 50035, "message": "Invalid Form Body", "errors": {"content": {"_errors": [
            {"code": "BASE_TYPE_MAX_LENGTH", "message": "Must be 2000 or fewer in length."}]}}},
         {}, PlatformRefused, None),
        (401, {"message": "401: Unauthorized", "code": 0}, {}, PlatformUnavailable, None),
        (503, {"message": "503: Service Unavailable", "code": 0}, {}, PlatformUnavailable, None),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)  # fmt: skip
async def test_refusals_wait_or_are_final(status, body, headers, kind, wait_s):
    class Refusing(DiscordAPI):
        async def _route(self, request: web.Request) -> web.Response:
            if request.method == "POST" and request.path.endswith("/messages"):
                data = json.dumps(body).encode()  # Discord's content type names no charset
                about = {"Via": "1.1 google", "Content-Type": "application/json", **headers}
                return web.Response(body=data, status=status, headers=about)
            return await super()._route(request)

    api = Refusing()
    async with api.serving(), started(platform := discord(api)):
        with pytest.raises(kind) as raised:
            await platform.send_text(ChatAddress("discord", DM), "text", key="k")
        assert getattr(raised.value, "retry_after_s", None) == wait_s
