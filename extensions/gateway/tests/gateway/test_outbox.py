"""The outbox: what may have been sent before says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.test_bad_input import FastClock
from palaestra_gateway.mailbox import Mailbox, Outgoing
from palaestra_gateway.outbox import SENT_AGAIN, Outbox
from palaestra_gateway.platform import ChatAddress
from palaestra_gateway.platforms.loopback import LIMITS, Loopback
from palaestra_slots.core.errors import PlatformUnavailable

CHAT = ChatAddress("loopback", "me")


class Failing(Loopback):
    """A platform without keys that does not answer the first tries."""

    def __init__(self, failures: int, *, idempotent: bool) -> None:
        super().__init__(limits=replace(LIMITS, idempotent=idempotent))
        self.failures, self.failed = failures, asyncio.Event()

    def _check_outage(self) -> None:
        self.failures -= 1
        if self.failures == 0:
            self.failed.set()
        if self.failures >= 0:
            raise PlatformUnavailable("it does not answer")


@pytest.mark.parametrize("failures", [0, 1, 2, 7])
@pytest.mark.parametrize("lives", [0, 1, 2])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_message_that_an_earlier_gateway_may_have_sent_says_so(
    tmp_path: Path, failures: int, lives: int, idempotent: bool
) -> None:
    running: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[None, None, None], name: str) -> None:
        running.add(asyncio.create_task(work, name=name))

    async def refused(message: Outgoing, reason: str) -> None:
        raise AssertionError(reason)

    platform = Failing(failures, idempotent=idempotent)
    mailbox = Mailbox(tmp_path / "gateway.db")
    await mailbox.post([Outgoing("key-0", CHAT, "hello"), Outgoing("key-1", CHAT, "more")], 0.0)
    for _ in range(lives):  # each is killed while it sends the first message, after an outage
        first = await mailbox.next_unsent(CHAT)
        assert first is not None
        if not idempotent:
            await mailbox.begin_send(first.id)
        await mailbox.aclose()
        mailbox = Mailbox(tmp_path / "gateway.db")
    outbox = Outbox(mailbox, {"loopback": platform}, refused, start, FastClock())
    await outbox.begin("loopback")
    assert [(await platform.receive()).text for _ in range(2)] == [
        f"{SENT_AGAIN}hello" if lives and not idempotent else "hello",
        "more",
    ]
    await asyncio.gather(*running)
    assert await mailbox.chats_to_send_to() == []
    await mailbox.aclose()


@pytest.mark.parametrize("failures", [1, 3])
async def test_an_outage_does_not_hide_that_a_message_may_have_been_sent(tmp_path: Path, failures: int) -> None:
    """The gateway after a kill only meets an outage and is killed too; the next one sends the message."""
    mailbox = Mailbox(tmp_path / "gateway.db")
    await mailbox.post([Outgoing("key-0", CHAT, "hello")], 0.0)
    first = await mailbox.next_unsent(CHAT)
    assert first is not None
    await mailbox.begin_send(first.id)
    for platform in (Failing(failures, idempotent=False), Failing(0, idempotent=False)):
        tasks: list[asyncio.Task[None]] = []
        outbox = Outbox(
            mailbox,
            {"loopback": platform},
            lambda *_: pytest.fail("refused"),
            lambda work, name, tasks=tasks: tasks.append(asyncio.create_task(work, name=name)),
            FastClock(),
        )
        await outbox.begin("loopback")
        if platform.failures:
            await platform.failed.wait()
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        else:
            assert (await platform.receive()).text == f"{SENT_AGAIN}hello"
            await asyncio.gather(*tasks)
    await mailbox.aclose()
