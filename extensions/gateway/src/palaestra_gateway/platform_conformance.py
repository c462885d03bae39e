"""The tests that every chat platform of the gateway must pass. Needs pytest.

Subclass `PlatformConformance` and implement a person's use of the platform; pytest finds the tests in the subclass:

    class TestMine(PlatformConformance):
        async def make_platform(self) -> Platform: ...
        async def person_sends(self, text: str) -> None: ...
        async def person_sees(self) -> list[str]: ...

Each test has its own platform and event loop, inside the block of `server`, and is named after the behaviour that it
checks.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from palaestra_gateway.long_replies import platform_length
from palaestra_gateway.platform import Attachment, ChatAddress, Incoming, Platform
from palaestra_slots.core.errors import PlatformRefused, PlatformUnavailable

PATIENCE_S = 20.0
MANY = 120
"""The number of messages in a backlog or a burst: more than one page of the services' APIs (at most 100)."""

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
"""An image of one pixel."""


class PlatformConformance(ABC):
    """Tests the behaviour of a platform."""

    sender_waits = False
    """Whether a sender waits until the gateway has the message. Then no messages wait for the platform: while the
    gateway is stopped, the sender gets an error and keeps the message."""

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        """Run the platform's server while the block runs. The default does nothing, for a server that is already
        running."""
        yield

    @abstractmethod
    async def make_platform(self) -> Platform:
        """Return a platform that is not started yet, for one bot."""

    @abstractmethod
    async def person_sends(self, text: str) -> None:
        """Send a text to the bot as a person. The messages and the bot's answers form one chat."""

    @abstractmethod
    async def person_sees(self) -> list[str]:
        """Return the bot's texts that the person sees in that chat, in order, and edited texts in their current
        form."""

    async def person_sends_all(self, texts: Sequence[str]) -> None:
        """Send texts to the bot as a person, one after another. The default calls `person_sends`."""
        for text in texts:
            await self.person_sends(text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        """Send texts as a person, so that the platform's server delivers the last one first and every one twice, as
        servers may do after a lost acknowledgement or over several connections."""
        pytest.skip("the platform's tests do not implement person_sends_disordered")

    async def person_sees_files(self) -> list[bytes]:
        """Return the bot's files that the person sees."""
        pytest.skip("the platform's tests do not implement person_sees_files")

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        """Send a file as a person, with a text if the platform supports one."""
        pytest.skip("the platform's tests do not implement person_sends_file")

    async def break_connection(self) -> None:
        """Make the platform's server unreachable."""
        pytest.skip("the platform's tests do not implement break_connection")

    async def withdraw_token(self) -> None:
        """Make the platform's server refuse the token from now on."""
        pytest.skip("the platform's tests do not implement withdraw_token")

    async def limit_rate(self) -> float:
        """Make the platform's server reject messages because there are too many; return how many seconds the server
        asks the client to wait."""
        pytest.skip("the platform's tests do not implement limit_rate")

    def unknown_chat(self, address: ChatAddress) -> ChatAddress:
        """Return the address of a chat that does not exist."""
        pytest.skip("the platform has no unknown chats")

    async def make_refused(self) -> Platform:
        """Return a platform with a wrong token."""
        pytest.skip("the platform has no token")

    def run(self, body: Callable[[Platform, list[Incoming]], Awaitable[None]]) -> None:
        """Run `body` with a started platform and the messages that it delivers."""

        async def main() -> None:
            async with self.server():
                platform = await self.make_platform()
                arrived: list[Incoming] = []

                async def deliver(message: Incoming) -> None:
                    arrived.append(message)

                await platform.start(deliver)
                try:
                    await body(platform, arrived)
                finally:
                    await platform.stop()

        asyncio.run(main())

    async def chat(self, arrived: list[Incoming], text: str = "hello") -> ChatAddress:
        """Return the chat that a person's message starts."""
        before = len(arrived)
        await self.person_sends(text)
        await _until(lambda: _true(len(arrived) > before), "the person's message is delivered")
        return arrived[-1].address

    def test_a_message_arrives_with_its_text_sender_and_id(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            await self.chat(arrived, "first, with ünïcode 語 😀")
            await self.chat(arrived, "second\nline")
            first, second = arrived
            assert first.text.strip() == "first, with ünïcode 語 😀"
            assert second.text.strip().replace("\r\n", "\n") == "second\nline"
            assert first.address == second.address
            assert first.address.platform == platform.name
            assert first.message_id != second.message_id
            assert first.user_id == second.user_id != ""

        self.run(body)

    def test_a_text_is_seen_by_the_person(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address = await self.chat(arrived)
            await platform.send_text(address, "an answer", key="k1")
            await platform.send_text(address, "with ünïcode 語 😀 and <b>&amp; *signs_ [x](y", key="k2")
            await self._sees(lambda seen: len(seen) == 2)
            seen = await self.person_sees()
            assert seen[0].strip() == "an answer"
            assert "ünïcode 語 😀" in seen[1]
            assert "signs" in seen[1]

        self.run(body)

    def test_the_longest_text_is_taken(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address, limits = await self.chat(arrived), platform.limits
            most = min(limits.max_text, 200_000)
            text = "語" * (most // 3) if limits.unit == "utf8" else "x" * most
            text += "y" * (most - platform_length(text, limits))
            await platform.send_text(address, text, key="long")
            await self._sees(lambda seen: len(seen) == 1)
            assert (await self.person_sees())[0].strip() == text

        self.run(body)

    def test_a_text_that_is_sent_twice_with_one_key_is_seen_once(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            if not platform.limits.idempotent:
                pytest.skip("the platform does not support keys")
            address = await self.chat(arrived)
            await platform.send_text(address, "once", key="same")
            await platform.send_text(address, "once", key="same")
            await platform.send_text(address, "twice", key="other")
            await self._sees(lambda seen: "twice" in [each.strip() for each in seen])
            assert [each.strip() for each in await self.person_sees()] == ["once", "twice"]

        self.run(body)

    def test_a_text_is_edited(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            if not platform.limits.edits:
                pytest.skip("the platform does not support edits")
            address = await self.chat(arrived)
            message_id = await platform.send_text(address, "draft", key="k")
            await platform.edit_text(address, message_id, "final")
            await self._sees(lambda seen: [each.strip() for each in seen] == ["final"])

        self.run(body)

    def test_files_and_images_are_seen_with_their_bytes(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            if not platform.limits.max_file_bytes:
                pytest.skip("the platform cannot send files")
            address = await self.chat(arrived)
            data = bytes(range(256)) * 40
            await platform.send_file(address, Attachment("all bytes.bin", "application/octet-stream", data), key="f1")
            await platform.send_file(address, Attachment("dot.png", "image/png", PNG), key="f2")
            await _until(lambda: self._has_files([data, PNG]), "the person sees both files")

        self.run(body)

    def test_files_of_the_person_arrive_with_their_bytes(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            await self.person_sends_file(Attachment("dot.png", "image/png", PNG), "look")
            await _until(lambda: _true(any(each.attachments for each in arrived)), "the file is delivered")
            file = next(each for message in arrived for each in message.attachments)
            assert (file.name, file.data, file.is_image) == ("dot.png", PNG, True)

        self.run(body)

    def test_an_unreachable_server_is_tried_again(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address = await self.chat(arrived)
            await self.break_connection()
            with pytest.raises(PlatformUnavailable):
                await platform.send_text(address, "lost?", key="k")

        self.run(body)

    def test_after_the_token_is_withdrawn_messages_wait(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address = await self.chat(arrived)
            await self.withdraw_token()
            with pytest.raises(PlatformUnavailable):
                await platform.send_text(address, "later", key="k")

        self.run(body)

    def test_a_rate_limit_says_when_to_try_again(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address, wait_s = await self.chat(arrived), await self.limit_rate()
            with pytest.raises(PlatformUnavailable) as caught:
                await platform.send_text(address, "too many", key="k")
            assert caught.value.retry_after_s == wait_s

        self.run(body)

    def test_an_unknown_chat_is_refused(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            address = self.unknown_chat(await self.chat(arrived))
            with pytest.raises(PlatformRefused):
                await platform.send_text(address, "nobody", key="k")

        self.run(body)

    def test_a_wrong_token_is_refused_at_the_start(self) -> None:
        async def fail_on_delivery(message: Incoming) -> None:
            raise AssertionError("nothing is delivered")

        async def main() -> None:
            async with self.server():
                platform = await self.make_refused()
                try:
                    with pytest.raises(PlatformRefused):
                        await platform.start(fail_on_delivery)
                finally:
                    await platform.stop()

        asyncio.run(main())

    def test_a_message_that_was_not_taken_comes_again(self) -> None:
        async def main() -> None:
            arrived: list[Incoming] = []
            failed = asyncio.Event()

            async def fail(message: Incoming) -> None:
                failed.set()
                raise OSError("the disk is full")

            async def deliver(message: Incoming) -> None:
                arrived.append(message)

            async with self.server():
                platform = await self.make_platform()
                await platform.start(fail)
                try:
                    await self.person_sends("keep me")
                except OSError:
                    pytest.skip("the sender gets the error, and sends again")
                await asyncio.wait_for(failed.wait(), PATIENCE_S)
                await platform.stop()
                again = await self.make_platform()
                await again.start(deliver)
                try:
                    await _until(lambda: _true(bool(arrived)), "the message comes again")
                finally:
                    await again.stop()
                assert arrived[0].text.strip() == "keep me"

        asyncio.run(main())

    def test_a_long_backlog_arrives_completely_and_in_order(self) -> None:
        """The messages are sent while the platform is stopped."""

        if self.sender_waits:
            pytest.skip("the sender keeps the messages")

        async def main() -> None:
            async with self.server():
                arrived: list[Incoming] = []

                async def deliver(message: Incoming) -> None:
                    arrived.append(message)

                platform = await self.make_platform()
                await platform.start(deliver)
                await self.chat(arrived)
                await platform.stop()
                texts = [f"message {number}" for number in range(MANY)]
                await self.person_sends_all(texts)
                again = await self.make_platform()
                await again.start(deliver)
                try:
                    await self._arrives(arrived, ["hello", *texts])
                finally:
                    await again.stop()

        asyncio.run(main())

    def test_a_burst_arrives_completely_and_in_order(self) -> None:
        """The messages are sent while the gateway is busy with the first one, so that they wait together."""
        if self.sender_waits:
            pytest.skip("the sender waits for each message")

        async def main() -> None:
            async with self.server():
                arrived: list[Incoming] = []
                busy, free = asyncio.Event(), asyncio.Event()

                async def deliver_when_free(message: Incoming) -> None:
                    busy.set()
                    await free.wait()
                    arrived.append(message)

                platform = await self.make_platform()
                await platform.start(deliver_when_free)
                try:
                    texts = [f"message {number}" for number in range(MANY)]
                    await self.person_sends("first")
                    await asyncio.wait_for(busy.wait(), PATIENCE_S)
                    await self.person_sends_all(texts)
                    free.set()
                    await self._arrives(arrived, ["first", *texts])
                finally:
                    free.set()
                    await platform.stop()

        asyncio.run(main())

    def test_messages_that_come_twice_and_out_of_order_have_one_id_each(self) -> None:
        """The gateway accepts a message once, by its chat and id."""

        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            await self.chat(arrived)
            await self.person_sends_disordered(["one", "two", "three"])

            def came(*texts: str) -> Awaitable[bool]:
                return _true(set(texts) <= {each.text.strip() for each in arrived})

            await _until(lambda: came("one", "two", "three"), "all three messages are delivered")
            await self.person_sends("last")
            await _until(lambda: came("last"), "the message after them is delivered")
            ids = {(each.address, each.message_id): each.text.strip() for each in arrived}
            assert sorted(ids.values()) == ["hello", "last", "one", "three", "two"]

        self.run(body)

    def test_stopping_twice_is_harmless(self) -> None:
        async def body(platform: Platform, arrived: list[Incoming]) -> None:
            await platform.stop()
            await platform.stop()

        self.run(body)

    async def _arrives(self, arrived: list[Incoming], texts: Sequence[str]) -> None:
        """Wait for messages with these texts, in this order; a message that arrives twice counts once."""

        def taken() -> list[str]:
            once: dict[str, str] = {}
            for each in arrived:
                once.setdefault(each.message_id, each.text.strip())
            return list(once.values())

        await _until(lambda: _true(len(taken()) >= len(texts)), f"all {len(texts)} messages are delivered")
        assert taken() == list(texts)

    async def _sees(self, condition: Callable[[list[str]], bool]) -> None:
        async def seen() -> bool:
            return condition(await self.person_sees())

        await _until(seen, "the person sees the messages")

    async def _has_files(self, expected: list[bytes]) -> bool:
        return await self.person_sees_files() == expected


async def _true(value: bool) -> bool:
    return value


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition. Fails after `PATIENCE_S` seconds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():  # noqa: ASYNC110 (the condition requests a server)
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {PATIENCE_S:g} s: {what}")
