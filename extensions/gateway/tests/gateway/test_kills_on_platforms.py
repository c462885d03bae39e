"""A gateway that is killed again and again in the middle of its work answers every message of every platform once. An
answer that may have been sent before says so."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import slack_api, telegram_api, whatsapp_api
from gateway.conftest import free_port
from gateway.echo_model import EchoModel
from gateway.kills import killed_again_and_again

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Conversation:
    """A person's chat with the bot, on a stand-in for a platform: the platform's settings, and how the person writes
    and reads. `api` runs the stand-in."""

    api: Any
    settings: Callable[[], dict[str, Any]]
    write: Callable[[str], Awaitable[object]]
    read: Callable[[], list[str]]


def telegram() -> Conversation:
    api = telegram_api.TelegramAPI()

    async def write(text: str) -> None:
        api.write(text=text)

    settings = {"token": telegram_api.TOKEN}
    return Conversation(
        api, lambda: {**settings, "extra": {"api_url": api.url}}, write, lambda: [each["text"] for each in api.sent]
    )


def slack() -> Conversation:
    api = slack_api.SlackAPI()
    settings = {"token": slack_api.TOKEN, "api_key": slack_api.APP_TOKEN}
    return Conversation(
        api,
        lambda: {**settings, "extra": {"api_url": f"{api.url}/api"}},
        lambda text: api.write(text=text),
        lambda: [each["text"] for each in api.sent],
    )


def whatsapp() -> Conversation:
    api, port = whatsapp_api.WhatsAppAPI(), free_port()
    api.webhook = lambda: f"http://127.0.0.1:{port}"
    extra = {"phone_number_id": whatsapp_api.NUMBER, "verify_token": whatsapp_api.VERIFY, "port": port}

    async def write(text: str) -> None:
        api.write(type="text", text={"body": text})

    return Conversation(
        api,
        lambda: {
            "token": whatsapp_api.TOKEN,
            "api_key": whatsapp_api.SECRET,
            "extra": {**extra, "api_url": f"{api.url}/v23.0"},
        },
        write,
        lambda: [each["text"]["body"] for each in api.sent],
    )


@pytest.mark.parametrize("platform", [telegram, slack, whatsapp])
async def test_a_gateway_that_is_killed_again_and_again_answers_every_message_once(
    platform: Callable[[], Conversation], tmp_path: Path
) -> None:
    chat, model = platform(), EchoModel()
    async with chat.api.serving(), model.serving():
        settings = {
            "server": {"base_url": model.url, "model_name": "m"},
            "isolation": "none",
            "keep_sandboxes": False,
            "max_queued": 1000,
            "limits": {"messages_per_hour": 0},
            "platforms": {platform.__name__: {**chat.settings(), "allowed_users": ["*"]}},
        }
        (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
        await killed_again_and_again(lambda: started(tmp_path), chat.write, chat.read)


async def started(home: Path) -> asyncio.subprocess.Process:
    """Start the gateway, and wait until it has said that it serves."""
    command = (sys.executable, "-m", "palaestra", "gateway", "--home", str(home))
    with (home / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60)
    return process
