"""The cost of the agent loop alone: python benchmarks/rollout_floor.py [--quick] [--json FILE]

A rollout has five turns with a tool that runs in this process, against a server that answers immediately. 1, 64 and 512
rollouts run concurrently.

Five cases alternate. `bare` is an aiohttp loop that calls the same server, without limits, validation, retries or
records. `palaestra` is `HermesAgentLoop` with the chat completions engine. `whole` is a group of one rollout, as in a
run: the same loop with the tool registry, outcome, score and a journal on disk. `exact` is `whole` with a server that
continues token ids, and with the ledger of exact tokens (about 600 at the end). `no http` is the loop over a server
object in the same process: the cost of the loop itself.

The server runs in a separate process; CPU and memory are those of the client. Memory is the rise of the resident set
since the rollouts began, divided by the number of rollouts in flight; it includes connections and tasks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import _measure as measure
import aiohttp
from _instant_server import chat_reply, serve

if TYPE_CHECKING:  # the bare case must not import any of this
    from palaestra_tokens.chat_server import ChatServer
    from palaestra_tokens.engine import ChatCompletion

TURNS = 5
PROSE = 19 * "write the number of lines of the file to the answer "
"""Words that the tiny model's tokenizer knows: about four bytes per token, as usual."""
PROMPT = "Add 1 and 2 with the tool, several times. " + PROSE[:960]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ROLLOUTS = {1: 200, 64: 1280, 512: 2048}
QUICK = {1: 40, 64: 128, 512: 512}
CPU_TARGET_MS = 0.5
MEMORY_TARGET_KB = 64.0

OneRollout = Callable[[], Awaitable[int]]
"""Runs one rollout and returns the number of its turns."""


def completion(turn: int) -> bytes:
    """Return the server's answer in a turn (counted from 0): a tool call, or plain text in the last turn."""
    if turn < TURNS - 1:
        return chat_reply(None, [("add", {"a": 1, "b": 2})], turn)
    return chat_reply("The answer is 3.")


def tool_reply(a: int, b: int) -> str:
    """Return the tool's result: the sum and some padding, 200 bytes in all."""
    return json.dumps({"result": a + b, "pad": PROSE[:176]})


async def bare(url: str, work: Callable[[OneRollout], Awaitable[None]]) -> None:
    """Run the floor: the simplest loop that works."""

    async def one() -> int:
        messages: list[dict[str, object]] = [{"role": "user", "content": PROMPT}]
        turns = 0
        while turns < TURNS:
            turns += 1
            body = {"model": "m", "messages": messages, "tools": [ADD], "max_tokens": 256, "temperature": 1.0}
            async with client.post(f"{url}/v1/chat/completions", json=body) as reply:
                message = (await reply.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                text = tool_reply(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return turns

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await work(one)


async def palaestra(url: str, work: Callable[[OneRollout], Awaitable[None]]) -> None:
    """Run the agent loop over the chat completions engine."""
    from palaestra_tokens.chat_server import SessionContext
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.server_group import ServerGroup

    servers = ServerGroup(APIServerConfig(base_url=url, model_name="m", health_check=False))
    await servers.start()
    try:
        await work(_looping(lambda: servers.session(SessionContext())))
    finally:
        await servers.aclose()


async def whole(url: str, work: Callable[[OneRollout], Awaitable[None]]) -> None:
    """Run groups of one through the runner, journalled and committed to disk as in a run."""
    from _toy_environment import Adding, services

    async with services(url) as shared:
        await work(Adding(shared, PROMPT, ADD, tool_reply).roll_out)


async def exact(url: str, work: Callable[[OneRollout], Awaitable[None]]) -> None:
    """Run the same with exact tokens: sampled tokens are recorded with their log-probabilities."""
    from _exact import saved_tokenizer
    from _toy_environment import Adding, services

    with tempfile.TemporaryDirectory() as folder:
        async with services(url, server_type="sglang", tokenizer_name=saved_tokenizer(folder)) as shared:
            await work(Adding(shared, PROMPT, ADD, tool_reply).roll_out)


async def model_server() -> None:
    """Serve the replies as chat completions, and as tokens of the tiny model's tokenizer."""
    from _exact import said, saved_tokenizer, turn_counter

    from palaestra_tokens.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(saved_tokenizer(folder))
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    tokens = said(tokenizer, [call] * (TURNS - 1), "The answer is 3.")
    await serve([completion(turn) for turn in range(TURNS)], tokens, turn_counter(tokenizer))


async def no_http(url: str, work: Callable[[OneRollout], Awaitable[None]]) -> None:
    """Run the agent loop over a server object that decodes the same bytes without a connection."""
    from palaestra_tokens.http.chat_completions import decode_completion
    from palaestra_tokens.http.transport import encode_json

    class InProcess:
        async def chat_completion(self, **request: object) -> ChatCompletion:
            turn = encode_json(request).count(b'"assistant"')
            return decode_completion(completion(turn), turn + 1, "here")

    await work(_looping(InProcess))


def _looping(server: Callable[[], ChatServer]) -> OneRollout:
    from palaestra_contract import HermesAgentLoop

    async def add(name: str, arguments: dict[str, int], task_id: str | None) -> str:
        return tool_reply(**arguments)

    async def one() -> int:
        loop = HermesAgentLoop(server(), [ADD], {"add"}, max_tokens=256, tool_handler=add)
        return (await loop.run([{"role": "user", "content": PROMPT}])).turns_used

    return one


CASES = {"bare": bare, "palaestra": palaestra, "whole": whole, "exact": exact, "no http": no_http}


async def sample(case: str, url: str, concurrency: int, rollouts: int) -> measure.Sample:
    """Run one case in this process, after one rollout to warm up."""
    meter = measure.Meter()

    async def work(one: OneRollout) -> None:
        assert await one() == TURNS
        left = iter(range(rollouts))

        async def worker() -> None:
            for _ in left:
                assert await one() == TURNS

        meter.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        found.update(meter.sample())

    found: dict[str, float] = {}
    await CASES[case](url, work)
    return {
        "cpu_ms": found["cpu_s"] * 1e3 / (rollouts * TURNS),
        "per_s": rollouts / found["wall_s"],
        "kb": found["peak_kb"] / concurrency,
    }


def rows(found: dict[str, dict[str, float]]) -> list[measure.Row]:
    """Return the rows of the table: the cost of each case at each concurrency, relative to the bare loop."""
    table: list[measure.Row] = []
    for key, numbers in found.items():
        case, _, concurrency = key.rpartition(" at ")
        floor = found[f"bare at {concurrency}"]
        cpu = measure.Row(f"{key}: CPU", numbers["cpu_ms"], "ms/turn", numbers["cpu_ms"] / floor["cpu_ms"])
        rate = measure.Row(f"{key}: rate", numbers["per_s"], "rollouts/s", numbers["per_s"] / floor["per_s"])
        memory = measure.Row(f"{key}: memory", numbers["kb"], "KB/rollout", numbers["kb"] / max(floor["kb"], 0.1))
        if case == "no http":
            table.append(cpu)
        elif case == "exact":  # managed_overhead has a target for its turns
            table += [cpu, rate] if concurrency == "1" else [cpu, rate, measure.with_ceiling(memory, MEMORY_TARGET_KB)]
        elif concurrency == "1":  # the interpreter's own allocations hide the memory of a single rollout
            table += [cpu, rate]
        elif case == "bare":
            table += [cpu, rate, memory]
        else:
            table += [measure.with_ceiling(cpu, CPU_TARGET_MS), rate, measure.with_ceiling(memory, MEMORY_TARGET_KB)]
    return table


def main() -> int:
    """Measure all cases in turns and print the table."""
    options = measure.parse_options(__doc__)
    sizes = QUICK if options.quick else ROLLOUTS
    with measure.serving(__file__, "--serve") as url:
        cases = {
            f"{case} at {concurrency}": lambda case=case, concurrency=concurrency: measure.fresh_process(
                __file__, "--sample", case, url, str(concurrency), str(sizes[concurrency])
            )
            for concurrency in sizes
            for case in CASES
        }
        found = measure.interleaved(cases, options.rounds)
    return measure.report(
        f"Rollouts of {TURNS} turns, instant server, median of {options.rounds}", rows(found), options.json
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(model_server())
    elif sys.argv[1:2] == ["--sample"]:
        name, url, concurrency, rollouts = sys.argv[2:]
        print(json.dumps(asyncio.run(sample(name, url, int(concurrency), int(rollouts)))))
    else:
        sys.exit(main())
