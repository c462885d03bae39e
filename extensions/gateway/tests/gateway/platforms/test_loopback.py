from collections.abc import Sequence

from palaestra_gateway.platform import Attachment, ChatAddress, Platform
from palaestra_gateway.platform_conformance import PlatformConformance
from palaestra_gateway.platforms.loopback import Loopback


class TestLoopback(PlatformConformance):
    sender_waits = True

    async def make_platform(self) -> Platform:
        self.platform = Loopback()
        return self.platform

    async def person_sends(self, text: str) -> None:
        await self.platform.say(text)

    async def person_sends_disordered(self, texts: Sequence[str]) -> None:
        for text in reversed([*texts, *texts]):
            await self.platform.say(text, message_id=text)

    async def person_sends_file(self, file: Attachment, text: str) -> None:
        await self.platform.say(text, attachments=[file])

    async def person_sees(self) -> list[str]:
        return [each.text for each in self.platform.sent if each.file is None]

    async def person_sees_files(self) -> list[bytes]:
        return [each.file.data for each in self.platform.sent if each.file is not None]

    async def break_connection(self) -> None:
        self.platform.outage = True


async def test_messages_of_two_chats_are_received_apart() -> None:

    platform = Loopback()
    await platform.send_text(ChatAddress("loopback", "a"), "for a", key="1")
    await platform.send_text(ChatAddress("loopback", "b"), "for b", key="2")
    assert (await platform.receive("b")).text == "for b"
    assert (await platform.receive("a")).text == "for a"
