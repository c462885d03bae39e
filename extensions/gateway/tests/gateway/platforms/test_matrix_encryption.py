"""Encrypted rooms of a real Synapse, with a person whose client encrypts."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import vodozemac

from gateway.conftest import a_gateway, until
from gateway.echo_model import EchoModel
from gateway.matrix_person import MatrixPerson
from gateway.synapse import Account, needed, synapse
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming, Platform
from palaestra_gateway.platform_conformance import PlatformConformance
from palaestra_gateway.platforms import matrix_encryption
from palaestra_gateway.platforms.devices import decide, known_devices
from palaestra_gateway.platforms.matrix import Matrix
from palaestra_slots.core.errors import PlatformRefused

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def homeserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    needed()
    with synapse(tmp_path_factory.mktemp("synapse")) as url:
        yield url


class Scene:
    """Anna in an encrypted room with a bot, whose gateway can start again and again."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.room = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        number = next(NUMBERS)
        anna = await asyncio.to_thread(Account, self.url, f"anne{number}")
        self.bot = await asyncio.to_thread(Account, self.url, f"robot{number}")
        self.mailbox = Mailbox(self.folder / f"{number}" / "gateway.db")
        self.anna = MatrixPerson(anna, self.folder / f"anna{number}")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.mailbox.aclose)
            await stack.enter_async_context(self.anna.online())
            yield

    def platform(self, **extra: Any) -> Matrix:
        platform = Matrix("matrix", PlatformConfig(token=self.bot.token, extra={"homeserver": self.url, **extra}))
        platform.notes, platform.folder = self.mailbox.notes("matrix"), self.mailbox.path.parent / "matrix"
        return platform

    @asynccontextmanager
    async def started(self, **extra: Any) -> AsyncIterator[list[Incoming]]:
        arrived: list[Incoming] = []

        async def deliver(message: Incoming) -> None:
            if message.message_id not in {each.message_id for each in arrived}:
                arrived.append(message)

        self.running = self.platform(**extra)
        await self.running.start(deliver)
        try:
            yield arrived
        finally:
            await self.running.stop()

    async def in_room(self) -> str:
        if not self.room:
            account = self.anna.account
            self.room = await asyncio.to_thread(account.make_room, self.bot.user_id, encrypted=True)
            await asyncio.to_thread(account.wait_for_member, self.room, self.bot.user_id)
            await self.anna.read()
        return self.room

    async def say(self, text: str, **more: Any) -> str:
        return await self.anna.say(await self.in_room(), text, **more)


@pytest.fixture
def scene(homeserver: str, tmp_path: Path) -> Scene:
    return Scene(homeserver, tmp_path)


class TestEncryptedMatrix(PlatformConformance):
    @pytest.fixture(autouse=True)
    def _scene(self, homeserver: str, tmp_path: Path) -> None:
        self.url, self.folder = homeserver, tmp_path

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        self.scene = Scene(self.url, self.folder)
        async with self.scene.open():
            yield

    async def make_platform(self) -> Platform:
        return self.scene.platform()

    async def make_refused(self) -> Platform:
        return Matrix("matrix", PlatformConfig(token="wrong", extra={"homeserver": self.url}))

    async def person_sends(self, text: str) -> None:
        await self.scene.say(text)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        await self.scene.anna.send_file(await self.scene.in_room(), file, text)

    async def _seen(self) -> list[Any]:
        await self.scene.anna.read()
        assert not self.scene.anna.undecrypted
        return list(self.scene.anna.messages.values())

    async def person_sees(self) -> list[str]:
        return [each["body"] for each in await self._seen() if each["msgtype"] == "m.text"]

    async def person_sees_files(self) -> list[bytes]:
        found = [each for each in await self._seen() if each["msgtype"] in ("m.image", "m.file")]
        return [await self.scene.anna.file(each) for each in found]

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        return ChatAddress(address.platform, "!nothing:test")


async def test_the_homeserver_sees_neither_text_nor_file_and_the_store_is_the_owners(scene):
    async with scene.open(), scene.started() as arrived:
        await scene.say("a secret")
        await until(lambda: bool(arrived))
        await scene.running.send_text(arrived[0].address, "another secret", key="a")
        await scene.running.send_file(arrived[0].address, Attachment("s.txt", "text/plain", b"a file"), key="b")
        seen = await scene.anna.wait_for(2)
        assert all(each["encrypted"] for each in seen)
        stored = await asyncio.to_thread(scene.anna.account.download, seen[1]["file"]["url"])
        assert b"a file" not in stored
        assert await asyncio.to_thread(scene.anna.account.messages, scene.room, scene.bot.user_id) == []
        folder = scene.running.folder
        assert [oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())][:2] == ["0o700", "0o600"]


async def test_a_hundred_messages_while_down_arrive_once_and_in_order_over_key_rotations(scene):
    async with scene.open():
        async with scene.started() as arrived:
            await scene.say("hello")
            await until(lambda: bool(arrived))
        texts = [f"message {number}" for number in range(100)]
        for number, text in enumerate(texts):
            if number % 30 == 15:
                scene.anna.client.invalidate_outbound_session(scene.room)  # a new key
            await scene.say(text)
        async with scene.started() as arrived:
            await until(lambda: len(arrived) >= 100)
            await scene.say("and now")
            await until(lambda: arrived[-1].text == "and now")
        assert [each.text for each in arrived if each.text != "hello"] == [*texts, "and now"]
        assert not any(each.problem for each in arrived)


async def test_the_bots_key_is_rotated_after_a_hundred_messages(scene):
    async with scene.open(), scene.started() as arrived:
        await scene.say("hello")
        await until(lambda: bool(arrived))
        for number in range(105):
            await scene.running.send_text(arrived[0].address, f"{number}", key=f"k{number}")
            if number == 50:
                await scene.anna.read()
        seen = await scene.anna.wait_for(105)
        assert [each["body"] for each in seen] == [f"{number}" for number in range(105)]
        assert not scene.anna.undecrypted


async def test_a_message_without_its_key_gets_a_notice_and_is_read_when_the_key_comes(scene, monkeypatch):
    monkeypatch.setattr(matrix_encryption, "KEY_PATIENCE_S", 0.5)
    async with scene.open(), scene.started() as arrived:
        await scene.say("hello")
        await until(lambda: bool(arrived))
        client = scene.anna.client
        client.invalidate_outbound_session(scene.room)
        client.olm.create_outbound_group_session(scene.room)
        session = client.olm.outbound_group_sessions[scene.room]
        key = session.session_key
        session.shared = True  # but nobody got it
        event = await scene.say("first lost, then found")
        await until(lambda: len(arrived) == 2)
        assert arrived[1].problem == matrix_encryption.UNREADABLE
        assert arrived[1].message_id != event
        await scene.running.stop()
        platform = scene.running = scene.platform()  # what waits for a key survives a restart

        async def deliver(message: Incoming) -> None:
            if message.message_id not in {each.message_id for each in arrived}:
                arrived.append(message)

        await platform.start(deliver)
        device = client.device_store[scene.bot.user_id][platform._server.client.device_id]
        content = {
            "algorithm": "m.megolm.v1.aes-sha2", "room_id": scene.room, "session_id": session.id,
            "session_key": key,
        }  # fmt: skip
        olm = client.olm._olm_encrypt(client.olm.session_store.get(device.curve25519), device, "m.room_key", content)
        body = {"messages": {scene.bot.user_id: {device.id: olm}}}
        await asyncio.to_thread(scene.anna.account.call, "PUT", "/sendToDevice/m.room.encrypted/late", body)
        await until(lambda: len(arrived) == 3)
        assert (arrived[2].text, arrived[2].message_id) == ("first lost, then found", event)


async def test_the_account_signs_the_bots_device_once(scene):
    async with scene.open():
        seen = []
        for _ in range(2):
            async with scene.started():
                body = {"device_keys": {scene.bot.user_id: []}}
                call = scene.anna.account.call
                seen.append(await asyncio.to_thread(call, "POST", "/keys/query", body))
        assert seen[0] == seen[1]
        (device,) = seen[0]["device_keys"][scene.bot.user_id].values()
        own = seen[0]["self_signing_keys"][scene.bot.user_id]
        (master,) = seen[0]["master_keys"][scene.bot.user_id]["keys"].values()
        (signing,) = own["keys"].values()
        for signed, key in ((device, signing), (own, master)):
            signature = signed["signatures"][scene.bot.user_id][f"ed25519:{key}"]
            plain = {name: value for name, value in signed.items() if name not in ("signatures", "unsigned")}
            message = json.dumps(plain, separators=(",", ":"), sort_keys=True).encode()
            vodozemac.Ed25519PublicKey.from_base64(key).verify_signature(
                message, vodozemac.Ed25519Signature.from_base64(signature)
            )


async def test_with_the_policy_verified_a_device_needs_the_owners_word_and_may_lose_it(scene):
    async with scene.open(), scene.started(device_trust="verified") as arrived:
        await scene.say("may I?")
        await until(lambda: bool(arrived))
        anna = scene.anna.client
        assert f"palaestra gateway verify matrix {anna.user_id} {anna.device_id}" in arrived[0].problem
        await scene.running.send_text(arrived[0].address, "not for you", key="a")
        await scene.anna.read()
        assert len(scene.anna.undecrypted) == 1
        known = await known_devices(scene.running.notes)
        assert known[anna.user_id, anna.device_id].fingerprint == scene.anna.fingerprint
        await decide(scene.running.notes, anna.user_id, anna.device_id, "verified")
        await scene.say("and now?")
        await until(lambda: len(arrived) == 2)
        assert (arrived[1].text, arrived[1].problem) == ("and now?", "")
        await scene.running.send_text(arrived[0].address, "for you", key="b")
        assert (await scene.anna.wait_for(1))[0]["body"] == "for you"
        await decide(scene.running.notes, anna.user_id, anna.device_id, "blocked")
        await scene.say("still?")
        await until(lambda: len(arrived) == 3)
        assert "not trusted" in arrived[2].problem


async def test_a_message_in_the_clear_is_not_accepted_in_an_encrypted_room(scene):
    async with scene.open(), scene.started() as arrived:
        room = await scene.in_room()
        await asyncio.to_thread(scene.anna.account.say, room, "as if from anna")
        await until(lambda: bool(arrived))
        assert (arrived[0].text, arrived[0].problem) == ("", matrix_encryption.NOT_ENCRYPTED)


async def test_a_device_whose_keys_are_lost_is_refused_with_the_way_out(scene):
    async with scene.open():
        async with scene.started():
            pass
        for path in scene.running.folder.iterdir():
            path.unlink()
        with pytest.raises(PlatformRefused, match="log in again"):
            async with scene.started():
                pass


@pytest.mark.slots
async def test_a_conversation_in_an_encrypted_thread(scene, tmp_path):
    async with scene.open():
        settings = {"platforms": {"matrix": {"allowed_users": ["*"]}}}
        async with a_gateway(tmp_path / "home", settings, others=[scene.platform()]):
            root = await scene.say("run echo $((6 * 7))")
            assert "42" in (await scene.anna.wait_for(1))[0]["body"]
            relation = {"rel_type": "m.thread", "event_id": root}
            await scene.say("two", **{"m.relates_to": relation})
            answer = (await scene.anna.wait_for(2))[1]
            assert answer["body"] == "echo 1: two"
            assert answer["m.relates_to"] == relation


@pytest.mark.slots
async def test_a_gateway_that_is_killed_again_and_again_answers_each_message_once(scene, tmp_path):
    """100 messages, many of them written while no gateway runs, with new keys in between, to a gateway that dies five
    times by SIGKILL."""
    model = EchoModel()
    async with scene.open(), model.serving():
        home = tmp_path / "home"
        home.mkdir()
        (home / "gateway.yaml").write_text(
            f"server: {{base_url: {model.url}, model_name: m}}\nisolation: none\nmax_queued: 1000\n"
            "keep_sandboxes: false\nlimits: {messages_per_hour: 0}\nplatforms:\n"
            f"  matrix: {{token: {scene.bot.token}, allowed_users: ['*'], extra: {{homeserver: '{scene.url}'}}}}\n"
        )
        command = [sys.executable, "-m", "palaestra", "gateway", "--home", str(home)]

        @asynccontextmanager
        async def process():
            with (tmp_path / "log").open("ab") as log:
                started = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
            try:
                await asyncio.wait_for(started.stdout.readline(), 30)
                yield
            finally:
                started.kill()
                await started.wait()

        async with process():
            await scene.say("hello")
            await scene.anna.wait_for(1)
        number = 0
        for life in range(6):
            for _ in range(10 if life < 5 else 25):
                number += 1
                if number % 7 == 0:
                    scene.anna.client.invalidate_outbound_session(scene.room)
                await scene.say(f"message {number}")
            async with process():
                for _ in range(5):
                    number += 1
                    await scene.say(f"message {number}")
                    await scene.anna.read()
                if life == 5:
                    await scene.anna.wait_for(1 + number)
                    await asyncio.sleep(1)
                    await scene.anna.read()
        asked = [text.partition(": ")[2] for text in (each["body"] for each in scene.anna.messages.values())]
        assert asked == ["hello", *(f"message {each}" for each in range(1, number + 1))]
        assert number >= 100
        assert not scene.anna.undecrypted
