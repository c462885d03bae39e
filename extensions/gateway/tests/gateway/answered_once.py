"""What every platform's tests check beside the conformance suite: a whole gateway on the platform."""

from __future__ import annotations

from pathlib import Path

from gateway.conftest import a_gateway
from palaestra_gateway.platform_conformance import PlatformConformance


class AnsweredOnce(PlatformConformance):
    """The platform's tests, and a gateway that answers every message once."""

    async def test_a_gateway_answers_messages_that_come_twice_and_out_of_order_once(self, tmp_path: Path) -> None:
        written: list[str] = []

        async def answered() -> None:
            await self._sees(lambda seen: len(seen) >= len(written))

        async def talk(start: str) -> None:
            """Write to a gateway that starts now, with the folder of the one before it."""
            platform = await self.make_platform()
            settings = {"platforms": {platform.name: {"allowed_users": ["*"]}}}
            async with a_gateway(tmp_path / "home", settings, others=[platform]):
                texts = [f"{start} {each}" for each in ("one", "two", "three")]
                await self.person_sends_disordered(texts)
                written.extend(texts)
                await answered()
                await self.person_sends(f"{start} last")
                written.append(f"{start} last")
                await answered()

        async with self.server():
            await talk("first")
            await talk("second")
            answers = [each.strip().partition(": ")[2] for each in await self.person_sees()]
            assert sorted(answers) == sorted(written)
