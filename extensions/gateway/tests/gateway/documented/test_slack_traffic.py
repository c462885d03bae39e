"""Events and answers of Slack in the form of its documentation: which the gateway takes, ignores or refuses.

The contents are ours; field names and nesting are those of the pages that the comments name (docs.slack.dev/…).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import started, until
from gateway.slack_api import APP_TOKEN, TOKEN, SlackAPI
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import ChatAddress, Incoming
from palaestra_gateway.platforms.slack import Slack
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable
from palaestra_slots.core.io.http_server import listening

DM = {"type": "message", "channel": "D1", "user": "U1", "channel_type": "im"}


def slack(url: str) -> Slack:
    return Slack("slack", PlatformConfig(token=TOKEN, api_key=APP_TOKEN, extra={"api_url": f"{url}/api"}))


def wrapped(event: dict[str, Any]) -> dict[str, Any]:
    # apis/events-api#callback-field
    authorization = {"enterprise_id": None, "team_id": "T1", "user_id": "UBOT", "is_bot": True}
    return {
        "token": "verification", "team_id": "T1", "api_app_id": "A1", "event": event, "type": "event_callback",
        "event_id": "Ev1", "event_time": 1_700_000_000, "is_ext_shared_channel": False, "event_context": "4-x",
        "authorizations": [{**authorization, "is_enterprise_install": False}],
    }  # fmt: skip


async def taken(*events: dict[str, Any], api: SlackAPI | None = None) -> list[Incoming]:
    """What the platform makes of events; all of them must be acknowledged."""
    api = api or SlackAPI()
    async with api.serving(), started(slack(api.url)) as arrived:
        for event in events:
            text = json.dumps(wrapped(event)).replace("http://SERVER", api.url)
            await api.deliver(json.loads(text))
        await until(lambda: not api.unacknowledged)
    return arrived


SHARED = {
    "id": 1, "is_share": True, "is_msg_unfurl": True, "author_id": "U2", "channel_id": "C1", "ts": "0.9",
    "text": "The build\nof <http://main.py|main.py> failed", "fallback": "[1] U2: The build failed",
    "from_url": "https://t.slack.com/archives/C1/p09",
}  # fmt: skip
FORWARDED = "Forwarded message:\nThe build\nof main.py failed"
TAKEN = {
    # reference/events/message.im
    "a direct message": (
        {**DM, "text": "Hello", "ts": "1355517523.000005", "event_ts": "1355517523.000005"},
        Incoming(ChatAddress("slack", "D1"), "1355517523.000005", "U1", "Hello", user_name="U1"),
    ),
    # reference/events/message, with the fields of messages that a person edits in the client's editor
    "a message with blocks": (
        {
            **DM, "client_msg_id": "c1", "team": "T1", "text": "a &amp; b", "ts": "2.1", "event_ts": "2.1",
            "blocks": [{"type": "rich_text", "block_id": "b", "elements": []}],
        },
        Incoming(ChatAddress("slack", "D1"), "2.1", "U1", "a & b", user_name="U1"),
    ),
    # messaging/formatting-message-text#retrieving-messages; file names become links too
    "a message with links and mentions": (
        {
            **DM, "ts": "2.2", "event_ts": "2.2",
            "text": "<@U2> in <#C2|general> and <!here>: <http://main.py|main.py>, <https://x.org/?a=1&amp;b=2> and "
            "<https://x.org/c|this page> by <mailto:a@x.org|a@x.org>, <!date^1^{date}|1 January> &lt;@U3&gt;",
        },
        Incoming(
            ChatAddress("slack", "D1"), "2.2", "U1",
            "@U2 in #general and @here: main.py, https://x.org/?a=1&b=2 and this page (https://x.org/c) by a@x.org, "
            "1 January <@U3>", user_name="U1",
        ),
    ),
    # the text of a message that has only files or attachments may be null
    "a message without a text": (
        {**DM, "text": None, "ts": "2.3", "event_ts": "2.3"},
        Incoming(ChatAddress("slack", "D1"), "2.3", "U1", user_name="U1"),
    ),
    # reference/messaging/attachments, is_share: a message that was forwarded
    "a forwarded message": (
        {**DM, "text": "", "ts": "2.4", "event_ts": "2.4", "attachments": [SHARED]},
        Incoming(ChatAddress("slack", "D1"), "2.4", "U1", FORWARDED, user_name="U1"),
    ),
    "a forwarded message with a comment": (
        {**DM, "text": "why?", "ts": "2.5", "event_ts": "2.5", "attachments": [SHARED]},
        Incoming(ChatAddress("slack", "D1"), "2.5", "U1", f"why?\n\n{FORWARDED}", user_name="U1"),
    ),
    # the preview of a link shows nothing that the person wrote
    "a message with a preview": (
        {
            **DM, "text": "<https://x.org>", "ts": "2.6", "event_ts": "2.6",
            "attachments": [{"from_url": "https://x.org", "title": "X", "text": "about x", "id": 1}],
        },
        Incoming(ChatAddress("slack", "D1"), "2.6", "U1", "https://x.org", user_name="U1"),
    ),
    # reference/events/message#thread_replies
    "a reply in a thread": (
        {**DM, "text": "more", "ts": "3.2", "event_ts": "3.2", "thread_ts": "3.1", "parent_user_id": "U1"},
        Incoming(ChatAddress("slack", "D1", "dm", "3.1"), "3.2", "U1", "more", user_name="U1"),
    ),
    # reference/events/message/thread_broadcast
    "a reply that is also sent to the chat": (
        {
            **DM, "subtype": "thread_broadcast", "text": "all", "ts": "4.2", "event_ts": "4.2", "thread_ts": "4.1",
            "root": {"type": "message", "text": "x", "ts": "4.1", "thread_ts": "4.1"},
        },
        Incoming(ChatAddress("slack", "D1", "dm", "4.1"), "4.2", "U1", "all", user_name="U1"),
    ),
    # reference/events/message.mpim
    "a direct message to several": (
        {**DM, "channel": "G1", "channel_type": "mpim", "text": "we", "ts": "5.1", "event_ts": "5.1"},
        Incoming(ChatAddress("slack", "G1", "group"), "5.1", "U1", "we", user_name="U1"),
    ),
    # reference/events/app_mention: it has no channel_type
    "a mention": (
        {"type": "app_mention", "user": "U1", "text": "<@UBOT> what?", "ts": "6.1", "channel": "C1", "event_ts": "61"},
        Incoming(ChatAddress("slack", "C1", "group", "6.1"), "6.1", "U1", "what?", user_name="U1"),
    ),
    "a mention in a thread": (
        {
            "type": "app_mention", "user": "U1", "text": "and <@UBOT>?", "ts": "7.2", "channel": "C1",
            "event_ts": "7.2", "thread_ts": "7.1",
        },
        Incoming(ChatAddress("slack", "C1", "group", "7.1"), "7.2", "U1", "and ?", user_name="U1"),
    ),
    "a mention with a name": (
        {"type": "app_mention", "user": "U1", "text": "<@UBOT|bot> /status", "ts": "8.1", "channel": "C1"},
        Incoming(ChatAddress("slack", "C1", "group", "8.1"), "8.1", "U1", "/status", user_name="U1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
async def test_messages_to_the_bot_are_taken(name):
    event, expected = TAKEN[name]
    assert await taken(event) == [expected]


IGNORED = {
    # reference/events/message.channels
    "a message in a channel": {**DM, "channel": "C1", "channel_type": "channel", "text": "x", "ts": "1.1"},
    # reference/events/message/message_changed
    "an edit": {
        "type": "message", "subtype": "message_changed", "hidden": True, "channel": "D1", "ts": "1.2",
        "channel_type": "im",
        "message": {"type": "message", "user": "U1", "text": "y", "ts": "1.1", "edited": {"user": "U1", "ts": "1.2"}},
    },
    # reference/events/message/message_deleted
    "a deletion": {
        "type": "message", "subtype": "message_deleted", "hidden": True, "channel": "D1", "ts": "1.3",
        "deleted_ts": "1.1", "channel_type": "im",
    },
    # reference/events/message/bot_message
    "a message of a bot": {
        "type": "message", "subtype": "bot_message", "ts": "1.4", "text": "x", "bot_id": "B2", "username": "robot",
        "icons": {}, "channel": "D1", "channel_type": "im",
    },
    # reference/events/message#bots: messages of chat.postMessage have a user and a bot_id
    "the bot's own message": {**DM, "user": "UBOT", "bot_id": "B1", "app_id": "A1", "text": "x", "ts": "1.5"},
    "the bot's own message without bot_id": {**DM, "user": "UBOT", "text": "x", "ts": "1.6"},
    # reference/events/message/channel_join
    "somebody joins": {
        "type": "message", "subtype": "channel_join", "ts": "1.7", "user": "U1", "text": "<@U1> has joined",
        "channel": "G1", "channel_type": "mpim",
    },
    # reference/events/reaction_added
    "a reaction": {
        "type": "reaction_added", "user": "U1", "reaction": "thumbsup", "item_user": "UBOT", "event_ts": "1.8",
        "item": {"type": "message", "channel": "D1", "ts": "1.1"},
    },
    # reference/events/file_shared
    "a file": {
        "type": "file_shared", "channel_id": "D1", "file_id": "F1", "user_id": "U1", "file": {"id": "F1"},
        "event_ts": "1.9",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
async def test_other_events_are_acknowledged_and_ignored(name):
    assert await taken(IGNORED[name]) == []


def file_share(*files: dict[str, Any]) -> dict[str, Any]:
    # reference/events/message/file_share
    more = {"text": "look", "ts": "9.1", "event_ts": "9.1", "upload": True, "display_as_bot": False}
    return {**DM, "subtype": "file_share", **more, "files": list(files)}


def file_object(number: str = "F1", **more: Any) -> dict[str, Any]:
    # reference/objects/file-object
    return {
        "id": number, "created": 1, "timestamp": 1, "name": "a.txt", "title": "a.txt", "mimetype": "text/plain",
        "filetype": "text", "pretty_type": "Plain Text", "user": "U1", "editable": True, "size": 4, "mode": "snippet",
        "is_external": False, "external_type": "", "is_public": False, "public_url_shared": False, "username": "",
        "url_private": f"http://SERVER/files/{number}", "url_private_download": f"http://SERVER/files/{number}",
        "has_rich_preview": False, **more,
    }  # fmt: skip


async def test_a_file_and_an_audio_clip_are_read():
    api = SlackAPI()
    api.files = {"F1": b"text", "F2": b"OggS"}
    # an audio clip is a file with the subtype slack_audio (@slack/types, FilesInfoResponse)
    clip = file_object("F2", name="audio.webm", mimetype="audio/webm", subtype="slack_audio", duration_ms=1200)
    (message,) = await taken(file_share(file_object(), clip), api=api)
    assert (message.text, message.problem) == ("look", "")
    assert [(each.name, each.media_type, each.data) for each in message.attachments] == [
        ("a.txt", "text/plain", b"text"),
        ("audio.webm", "audio/webm", b"OggS"),
    ]
    assert [each.is_audio for each in message.attachments] == [False, True]


async def test_a_file_of_a_forwarded_message_is_read():
    api = SlackAPI()
    api.files = {"F1": b"text"}
    shared = {**DM, "text": "", "ts": "9.2", "attachments": [{**SHARED, "files": [file_object()]}]}
    (message,) = await taken(shared, api=api)
    assert [(each.name, each.data) for each in message.attachments] == [("a.txt", b"text")]


def test_a_file_of_slack_connect_is_looked_up():
    # reference/events/message/file_share#slack-connect-files
    connect = {"id": "F1", "mode": "file_access", "file_access": "check_file_info", "created": 0, "user": ""}
    api = SlackAPI()
    api.files["F1"] = b"text"

    async def main(known: bool) -> Incoming:
        async with api.serving(), started(slack(api.url)) as arrived:
            if known:
                api.shared["F1"] = {**file_object(), "url_private_download": f"{api.url}/files/F1"}
            await api.deliver(wrapped(file_share(connect)))
            await until(lambda: bool(arrived))
        return arrived[0]

    unknown = asyncio.run(main(False))
    assert (unknown.attachments, unknown.problem) == ((), "slack: Slack answers file_not_found")
    assert asyncio.run(main(True)).attachments[0].data == b"text"


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        # reference/objects/file-object: deleted, and hidden by the limit of a free workspace
        ({"id": "F1", "mode": "tombstone"}, "A file is not available any more (tombstone)."),
        (
            {"id": "F1", "name": "a.txt", "mode": "hidden_by_limit"},
            "a.txt is not available any more (hidden_by_limit).",
        ),
        (file_object(size=30 << 20), "a.txt is too large; at most 20 MB are accepted."),
        (file_object("gone"), "a.txt could not be read (HTTP 404)."),
        (file_object("login"), "a.txt could not be read: the app needs the scope files:read."),
    ],
    ids=["deleted", "hidden", "large", "gone", "login"],
)
async def test_a_file_that_cannot_be_read_is_a_problem_and_is_not_sent_again(file, problem):
    api = SlackAPI()
    (message,) = await taken(file_share(file), api=api)
    assert (message.attachments, message.problem) == ((), problem)


@pytest.mark.parametrize(
    ("status", "headers", "error", "kind", "wait_s"),
    [
        # apis/web-api/rate-limits#responding-to-rate-limiting-conditions
        (429, {"Retry-After": "30"}, "ratelimited", PlatformUnavailable, 30.0),
        # reference/methods/chat.postMessage#errors
        (200, {}, "channel_not_found", PlatformRefused, None),
        (200, {}, "is_archived", PlatformRefused, None),
        (200, {}, "msg_too_long", PlatformRefused, None),
        (200, {}, "not_in_channel", PlatformRefused, None),
        (200, {}, "fatal_error", PlatformUnavailable, None),
        (200, {}, "internal_error", PlatformUnavailable, None),
        (200, {}, "service_unavailable", PlatformUnavailable, None),
        (200, {}, "token_revoked", PlatformUnavailable, None),
        (200, {}, "account_inactive", PlatformUnavailable, None),
        (503, {}, "", PlatformUnavailable, None),
    ],
)
async def test_refusals_wait_or_are_final(status, headers, error, kind, wait_s):
    async def post(request: web.Request) -> web.Response:
        return web.json_response({"ok": False, "error": error}, status=status, headers=headers)

    api, app = SlackAPI(), web.Application()
    app.router.add_post("/api/chat.postMessage", post)
    async with api.serving(), listening(app, "127.0.0.1", 0) as url, started(platform := slack(api.url)):
        platform._web.base_url = f"{url}/api/"
        with pytest.raises(kind) as raised:
            await platform.send_text(ChatAddress("slack", "D1"), "text", key="k")
        assert getattr(raised.value, "retry_after_s", None) == wait_s
