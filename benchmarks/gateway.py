"""The latency that the gateway adds, with 200 sessions: python benchmarks/gateway.py [--quick] [--json FILE]

200 people on the loopback platform each write a message every `PAUSE_S` seconds, at random moments. The model server,
in a separate process, answers after `MODEL_S` seconds. The added latency is the time from the person's message to the
answer, minus the model server's time. For comparison, the same run measures the same conversations without a gateway
(`palaestra_chat` alone).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path

import _instant_server as instant
import _measure as measure

SESSIONS, PAUSE_S, MODEL_S = 200, 4.0, 0.1
TARGET_MS = 50.0

Say = Callable[[int, int], Awaitable[None]]
"""Sends message `number` of a person, and returns when the answer has arrived."""


async def people(say: Say, messages: int) -> list[float]:
    """Measure the added latency of every message, in milliseconds."""
    rng, added = random.Random(1), list[float]()

    async def person(which: int, first_s: float) -> None:
        await asyncio.sleep(first_s)
        for number in range(messages):
            started = time.perf_counter()
            await say(which, number)
            took_s = time.perf_counter() - started
            if number or messages == 1:  # the first message opens the session
                added.append((took_s - MODEL_S) * 1e3)
            await asyncio.sleep(rng.uniform(0.5, 1.5) * PAUSE_S - took_s)

    await asyncio.gather(*(person(which, rng.uniform(0, PAUSE_S)) for which in range(SESSIONS)))
    return added


async def with_gateway(url: str, home: Path, messages: int) -> dict[str, float]:
    from palaestra_chat.service import ChatService, ChatSettings
    from palaestra_chat.store import ConversationStore
    from palaestra_gateway.config import GatewayConfig
    from palaestra_gateway.mailbox import Mailbox
    from palaestra_gateway.platforms.loopback import Loopback
    from palaestra_gateway.service import Gateway
    from palaestra_tokens.config import APIServerConfig

    allowed = {"loopback": {"allowed_users": ["*"]}}
    config = GatewayConfig.from_dict({"platforms": allowed, "limits": {"messages_per_hour": 0}})
    platform, mailbox = Loopback(), Mailbox(home / "gateway.db")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(mailbox.aclose)
        store = stack.enter_context(closing(ConversationStore(home / "conversations.db")))
        server = APIServerConfig(base_url=f"{url}/v1", model_name="m")
        chat = await stack.enter_async_context(ChatService(server, store, ChatSettings()))
        await stack.enter_async_context(Gateway(config, [platform], mailbox, chat).running())

        async def say(which: int, number: int) -> None:
            await platform.say("hello", chat_id=str(which), user_id=str(which), message_id=str(number))
            await platform.receive(str(which))

        return await measured(say, messages)


async def without_gateway(url: str, home: Path, messages: int) -> dict[str, float]:
    from palaestra_chat.conversation import Conversation
    from palaestra_chat.service import ChatService, ChatSettings
    from palaestra_chat.store import ConversationStore
    from palaestra_tokens.config import APIServerConfig

    with closing(ConversationStore(home / "conversations.db")) as store:
        server = APIServerConfig(base_url=f"{url}/v1", model_name="m")
        async with ChatService(server, store, ChatSettings()) as chat:
            conversations = [Conversation.begin(chat) for _ in range(SESSIONS)]

            async def say(which: int, number: int) -> None:
                async with aclosing(conversations[which].send("hello", message_id=str(number))) as events:
                    async for _ in events:
                        pass

            return await measured(say, messages)


async def measured(say: Say, messages: int) -> dict[str, float]:
    meter = measure.Meter()
    meter.start()
    added = await people(say, messages)
    used = meter.sample()
    return {
        "p50_ms": measure.quantile(added, 0.5),
        "p99_ms": measure.quantile(added, 0.99),
        "cpu_ms": used["cpu_s"] * 1e3 / (SESSIONS * messages),
        "peak_mb": used["peak_kb"] / 1024,
    }


CASES = {"gateway": with_gateway, "conversations alone": without_gateway}


def main() -> int:
    options = measure.options_parser(__doc__)
    options.add_argument("--case", help="for this script itself")
    options.add_argument("--url")
    options.add_argument("--messages", type=int, default=0)
    given = options.parse_args()
    if given.case:
        with tempfile.TemporaryDirectory() as folder:
            sample = asyncio.run(CASES[given.case](given.url, Path(folder), given.messages))
        print(json.dumps(sample))
        return 0
    messages = given.messages or (2 if given.quick else 4)
    rounds = given.rounds or (1 if given.quick else 3)
    with measure.serving(__file__, "--case-server") as url:
        script = __file__
        medians = measure.interleaved(
            {
                name: lambda name=name: measure.fresh_process(  # type: ignore[misc]
                    script, "--case", name, "--url", url, "--messages", str(messages)
                )
                for name in CASES
            },
            rounds,
        )
    ours, alone = medians["gateway"], medians["conversations alone"]
    rows = [
        measure.with_ceiling(measure.Row("added latency, p99", ours["p99_ms"], "ms"), TARGET_MS),
        measure.Row("added latency, p50", ours["p50_ms"], "ms", ours["p50_ms"] / alone["p50_ms"]),
        measure.Row("conversations alone, p99", alone["p99_ms"], "ms"),
        measure.Row("conversations alone, p50", alone["p50_ms"], "ms"),
        measure.Row("CPU per message", ours["cpu_ms"], "ms", ours["cpu_ms"] / alone["cpu_ms"]),
        measure.Row("growth of memory", ours["peak_mb"], "MB", ours["peak_mb"] / alone["peak_mb"]),
    ]
    rate = SESSIONS / PAUSE_S
    title = f"Gateway: {SESSIONS} sessions on the loopback platform, {rate:g} messages/s, {messages} each"
    return measure.report(title, rows, given.json)


if __name__ == "__main__":
    if sys.argv[1:] == ["--case-server"]:
        asyncio.run(instant.serve([instant.chat_reply("Hello.")], delay_s=MODEL_S))
        sys.exit()
    sys.exit(main())
