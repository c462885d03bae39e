"""What goes wrong around a gateway: nothing is lost, and every failure is bounded and says what to do."""

import asyncio

import pytest

from gateway.conftest import OPEN, MovedClock, a_gateway, until
from gateway.echo_model import EchoModel
from golden_messages import check_message
from palaestra_gateway.assembly import assembled
from palaestra_gateway.config import GatewayConfig
from palaestra_gateway.platform import Attachment
from palaestra_gateway.platforms.loopback import Loopback
from palaestra_slots.core.errors import ConfigError, PlatformUnavailable


class FastClock(MovedClock):
    """A clock on which waiting takes a thousandth of the time."""

    async def sleep(self, seconds):
        await asyncio.sleep(seconds / 1000)
        self.moved_s += seconds


class Down(Loopback):
    """A platform that is down until `down` is cleared, also when it starts. `tries` counts what it refused."""

    down, tries = True, 0

    async def start(self, deliver):
        self.check()
        await super().start(deliver)

    async def send_text(self, address, text, *, key, answers=None):
        self.check()
        return await super().send_text(address, text, key=key, answers=answers)

    def check(self):
        if self.down:
            self.tries += 1
            raise PlatformUnavailable("it is down")


async def test_a_platform_that_is_down_for_ten_minutes_is_asked_seldom_and_loses_nothing(tmp_path):
    clock, platform = FastClock(), Down()
    async with a_gateway(tmp_path, platform=platform, clock=clock) as scene:
        began = clock.moved_s
        await until(lambda: clock.moved_s - began > 600)
        assert 8 <= platform.tries <= 30  # at most every minute, after the first few
        platform.down = False
        await until(lambda: platform._deliver is not None)
        platform.down, platform.tries, began = True, 0, clock.moved_s
        for number in range(5):
            await platform.say(f"say {number}", message_id=f"m{number}")
        await until(lambda: clock.moved_s - began > 600)
        assert platform.tries <= 30
        assert platform.sent == []
        platform.down = False
        assert [(await platform.receive()).text for _ in range(5)] == [str(number) for number in range(5)]
        assert len(platform.sent) == 5
        assert len(scene.model.requests) == 5


async def test_two_gateways_with_one_token_on_one_machine_are_refused(tmp_path):
    def config(url):
        openai = {"token": f"token of {tmp_path}", "extra": {"port": 0}}
        return GatewayConfig.from_dict(
            {
                "server": {"base_url": url, "model_name": "m"},
                "toolsets": [],
                "keep_sandboxes": False,
                "platforms": {"openai": openai},
            }
        )

    async with EchoModel().serving() as model, assembled(config(model.url), tmp_path / "a"):
        with pytest.raises(ConfigError, match=r"token of platforms\.openai"):
            async with assembled(config(model.url), tmp_path / "b"):
                pass
    async with EchoModel().serving() as model, assembled(config(model.url), tmp_path / "b"):
        pass  # the first one has ended


@pytest.mark.parametrize("command", ["hello", "/new", "/retry"])
async def test_a_session_whose_conversation_is_gone_begins_anew(tmp_path, command):
    async with a_gateway(tmp_path) as scene:
        assert await scene.ask("one", message_id="a") == "echo 1: one"
    for file in tmp_path.glob("conversations.db*"):
        if file.is_file():
            file.unlink()
    async with a_gateway(tmp_path) as scene:
        answer = await scene.ask(command, message_id="b")
        check_message(answer, "longer")
        assert "could not be answered" not in answer
        assert (await scene.ask("two", message_id="c")).startswith("echo")
        assert "not stored" not in await scene.ask("three", message_id="d")


async def test_a_binary_file_of_any_bytes_and_name_reaches_the_chat_unchanged(tmp_path):
    data = bytes(range(256)) * 4000
    async with a_gateway(tmp_path, OPEN) as scene:
        await scene.ask("look", attachments=[Attachment("a\0b/../\u202e$(id).bin", "application/x-odd", data)])
        said = scene.model.requests[-1]["messages"][-1]["content"]
        path = said.split("sent the file ")[1].split(" (")[0]
        assert "1024000 bytes" in said
        await scene.platform.say(f"say here\nMEDIA:{path}")
        await scene.platform.receive()
        assert (await scene.platform.receive()).file.data == data
