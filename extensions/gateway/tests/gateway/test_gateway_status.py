import asyncio
import json
import sys

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.conftest import OPEN, a_gateway, until
from golden_messages import check_message
from palaestra.cli.main import cli
from palaestra_gateway.observe import gateway_status
from palaestra_gateway.observe.gateway_status import read_status, status_lines
from palaestra_gateway.observe.metrics_page import serving_status
from palaestra_gateway.platforms.loopback import Loopback
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable


class Failing(Loopback):
    """A platform that cannot send."""

    async def send_text(self, *arguments, **options):
        raise PlatformUnavailable(f"{self.name}: the line is cut")


class Refusing(Loopback):
    async def send_text(self, *arguments, **options):
        raise PlatformRefused("no such chat")


async def stored(mailbox, condition):
    async with asyncio.timeout(20):
        while True:
            status = await read_status(mailbox, 2e9)
            if condition(status):
                return status
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(gateway_status, "STORED_EVERY_S", 0.02)


async def test_the_status_has_platforms_queues_and_last_errors(tmp_path):
    cut, picky = Failing("cut"), Refusing("picky")
    platforms = {name: {"allowed_users": ["*"]} for name in ("loopback", "cut", "picky")}
    async with a_gateway(tmp_path, {"platforms": platforms}, others=[cut, picky]) as scene:
        mailbox = scene.gateway.mailbox
        await scene.ask("hello")
        await cut.say("hello")
        await picky.say("hello")
        status = await stored(
            mailbox, lambda it: it.platforms["cut"].error and it.platforms["picky"].error and it.sessions == 3
        )
        assert all(each.connected for each in status.platforms.values())
        assert (status.platforms["cut"].unsent, status.platforms["loopback"].unsent) == (1, 0)
        assert "the line is cut" in status.platforms["cut"].error
        assert "no such chat" in status.platforms["picky"].error
        assert status.platforms["loopback"].error == ""
        lines = "\n".join(status_lines(status, running=True))
        check_message(lines, "cut: connected")
        assert "the line is cut" in lines


async def test_the_page_serves_metrics_and_json(tmp_path):
    async with a_gateway(tmp_path, OPEN) as scene:
        await scene.ask("hello")
        await stored(scene.gateway.mailbox, lambda it: it.sessions == 1 and it.platforms["loopback"].connected)
        async with (
            serving_status(scene.gateway.mailbox, scene.gateway._clock, 0) as url,
            aiohttp.ClientSession() as client,
        ):
            async with client.get(f"{url}/metrics") as reply:
                text = await reply.text()
            assert "palaestra_gateway_sessions 1\n" in text
            assert 'palaestra_gateway_connected{platform="loopback"} 1\n' in text
            async with client.get(f"{url}/status") as reply:
                assert (await reply.json())["platforms"]["loopback"]["connected"] is True


def test_the_command_says_whether_the_gateway_runs(tmp_path):
    token, settings = tmp_path / "token", tmp_path / "gateway.yaml"
    token.write_text("secret\n")
    settings.write_text(
        "server: {base_url: http://127.0.0.1:9/v1, model_name: m}\nisolation: none\nkeep_sandboxes: false\n"
        f"status_port: 0\nplatforms: {{openai: {{token_file: {token}, extra: {{port: 0}}}}}}\n"
    )

    def run(*options):
        return (
            CliRunner()
            .invoke(cli, ["gateway", "--home", str(tmp_path), "status", *options], standalone_mode=False)
            .output
        )

    async def main():
        arguments = [sys.executable, "-m", "palaestra", "gateway", "--home", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        try:
            await asyncio.wait_for(process.stdout.readline(), 30)
            await until(lambda: (tmp_path / "gateway.db").exists())
            await asyncio.sleep(0.3)
            found = json.loads(await asyncio.to_thread(run, "--json"))
            assert (found["running"], found["platforms"]["openai"]["connected"]) == (True, True)
        finally:
            process.kill()
            await process.wait()
        check_message(await asyncio.to_thread(run), "gateway")

    asyncio.run(main())
