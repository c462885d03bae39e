import asyncio
import json

import pytest
from click.testing import CliRunner

from palaestra.cli.main import cli
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platforms.devices import KnownDevice, known_devices, remember
from palaestra_slots.core.errors import ConfigError

ANNA = KnownDevice("@anna:hs", "PHONE", "abcdefghij", name="Anna's phone")


@pytest.fixture
def home(tmp_path):
    async def main():
        mailbox = Mailbox(tmp_path / "gateway.db")
        await mailbox.notes("discord").write("seen", "1")
        await remember(mailbox.notes("matrix"), KnownDevice("@bot:hs", "BOT", "own", "own"))
        await remember(mailbox.notes("matrix"), ANNA)
        await mailbox.aclose()

    asyncio.run(main())
    return tmp_path


def run(home, *arguments):
    return CliRunner().invoke(cli, ["gateway", "--home", str(home), *arguments], standalone_mode=False)


def test_the_owner_sees_devices_with_their_fingerprints_and_decides(home):
    assert "matrix\t@anna:hs\tPHONE\tseen\tabcd efgh ij\tAnna's phone" in run(home, "devices").output.splitlines()
    assert "verified: abcd efgh ij" in run(home, "verify", "matrix", "@anna:hs", "PHONE").output
    blocked = json.loads(run(home, "verify", "matrix", "@anna:hs", "PHONE", "--block", "--json").output)
    assert (blocked["state"], blocked["fingerprint"]) == ("blocked", ANNA.fingerprint)
    states = {
        row["device_id"]: row["state"] for row in map(json.loads, run(home, "devices", "--json").output.splitlines())
    }
    assert states == {"BOT": "own", "PHONE": "blocked"}


@pytest.mark.parametrize(("user", "device"), [("@anna:hs", "LAPTOP"), ("@bot:hs", "BOT")])
def test_only_a_known_device_of_a_person_can_be_verified(home, user, device):
    result = run(home, "verify", "matrix", user, device)
    assert isinstance(result.exception, ConfigError)
    assert "gateway devices" in str(result.exception)

    async def stored():
        mailbox = Mailbox(home / "gateway.db")
        try:
            return {each.state for each in (await known_devices(mailbox.notes("matrix"))).values()}
        finally:
            await mailbox.aclose()

    assert asyncio.run(stored()) == {"own", "seen"}
