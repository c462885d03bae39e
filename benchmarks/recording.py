"""The cost of the recording endpoint: CPU and latency of a call, compared with the same engine called directly.

The engine returns fixed replies immediately, so that only the other costs are measured. One client sends the same
conversations, with tools and growing histories, to both sides; both record the exact tokens in a ledger. Each side is a
process that waits for the next call, as an engine does between the calls of an agent. For the endpoint, the CPU time of
the whole process counts; for the engine called directly, only that of `chat_completion`. The sides alternate after
every conversation, and the medians over all conversations are reported.

Also measured: the delay of the first streamed piece after the engine's reply, and 256 concurrent agents whose engine
takes 50 ms for a reply.

`--peers` instead compares the endpoint with the recording proxies of OpenEnv, verifiers and Agent-Lightning: the same
calls, without streaming, go to one model server that answers immediately. The endpoint renders the prompts and requests
tokens (SGLang); the peers request chat completions with token ids (vLLM). Needs `make faces`.

    python benchmarks/recording.py [--quick] [--peers] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))

import _instant_server
from _measure import Row, interleaved, options_parser, quantile, report, serving, with_ceiling

from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import SGLangEngine
from palaestra_tokens.recording import Conversations, RecordingEndpoint, RolloutAddress
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

T = TypeVar("T")
TURNS, ROLLOUTS = 12, 100
"""The number of calls in a conversation, and of conversations in a round."""
RESULT = "total 12\ndrwxr-xr-x 2 root root 4096 README.md src tests\n" * 8
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la src"}}\n</tool_call>'
TOOLS: JSON = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it. " * 20,
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    for name in ("bash", "edit", "read", "write", "grep", "glob")
]
TOKENIZER = toy_tokenizer([RESULT, CALL, json.dumps(TOOLS)])
FORMAT = ChatFormat(TOKENIZER)
REPLY = [*TOKENIZER.encode(CALL), TOKENIZER.stop_ids[0]]


class Instant:
    """An engine whose replies are always the same."""

    name = "instant"

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        len(input_ids)
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        return Sampled(REPLY, [-0.1] * len(REPLY), "stop", "v1")


def chat(wait_s: float = 0.0) -> ManagedChat:
    return ManagedChat(Instant(wait_s), FORMAT, "hermes")


def opening() -> list[JSON]:
    return [{"role": "system", "content": "You fix bugs. " * 100}, {"role": "user", "content": "Fix the bug."}]


def extend(messages: list[JSON], message: JSON) -> None:
    messages.append({name: value for name, value in message.items() if value is not None})
    for call in message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})


async def serve_direct() -> None:
    """Answer chat completions with the engine itself. `GET /spent` returns the CPU and wall seconds of its calls."""
    spent: list[tuple[float, float]] = []
    managed = chat()

    async def answer(request: web.Request) -> web.Response:
        nonlocal managed
        if request.method == "GET":
            return web.json_response(spent)
        messages = (await request.json())["messages"]
        if len(messages) == len(opening()):
            managed = chat()
            spent.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        completion = await managed.chat_completion(messages=messages, tools=TOOLS, temperature=1.0)
        spent.append((time.process_time() - began_cpu, time.perf_counter() - began))
        return web.json_response({"choices": [{"message": completion.choices[0].message.model_dump()}]})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with listening(app, "127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def serve(rollouts: int, wait_s: float) -> None:
    """Print the addresses of this many rollouts and serve them until standard input ends."""
    async with RecordingEndpoint() as endpoint:
        opened = [endpoint.open(Conversations(chat(wait_s))) for _ in range(rollouts)]
        addresses: list[RolloutAddress] = [each.__enter__() for each in opened]
        print(json.dumps([os.getpid(), *([each.openai_url, each.key] for each in addresses)]), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of another process. Source of the clock's number: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


async def conversation(
    session: aiohttp.ClientSession, url: str, key: str, turns: int, *, stream: bool, seconds: list[float]
) -> None:
    """Make one rollout's calls; `seconds` gets the time until the first piece of each reply, or until the whole
    reply."""
    messages = opening()
    for _ in range(turns):
        body = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 1.0, "stream": stream}
        began = time.perf_counter()
        async with session.post(
            f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            assert response.status == 200, (url, await response.text())
            if not stream:
                message = (await response.json())["choices"][0]["message"]
                seconds.append(time.perf_counter() - began)
            else:
                chunks = [chunk async for chunk in _chunks(response, began, seconds)]
                message = {"role": "assistant", "content": ""}
                for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
                    message["content"] += delta.get("content") or ""
                    for call in delta.get("tool_calls", ()):
                        call.pop("index")
                        message.setdefault("tool_calls", []).append(call)
        extend(messages, message)


async def _chunks(response: aiohttp.ClientResponse, began: float, seconds: list[float]) -> Iterator[JSON]:
    seen = False
    async for line in response.content:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if not seen and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                seconds.append(time.perf_counter() - began)
                seen = True
            yield chunk


Sample = dict[str, float]


async def through_endpoint(session: aiohttp.ClientSession, pid: int, address: JSON, *, stream: bool) -> Sample:
    """Hold one conversation."""
    seconds: list[float] = []
    began = cpu_s(pid)
    await conversation(session, *address, TURNS, stream=stream, seconds=seconds)
    return {"cpu_ms": 1e3 * (cpu_s(pid) - began) / TURNS, "reply_ms": 1e3 * quantile(seconds, 0.5)}


async def direct(session: aiohttp.ClientSession, url: str) -> Sample:
    """Hold the same conversation without the endpoint."""
    await conversation(session, url, "k", TURNS, stream=False, seconds=[])
    async with session.get(f"{url}/spent") as response:
        cpu, seconds = zip(*await response.json(), strict=True)
    return {"cpu_ms": 1e3 * sum(cpu) / TURNS, "reply_ms": 1e3 * quantile(seconds, 0.5)}


async def at_once(addresses: list[JSON], wait_s: float, turns: int) -> Sample:
    """Run many concurrent agents: returns the calls per second, and the time that slow calls take beyond the
    engine's."""
    seconds: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.perf_counter()
        await asyncio.gather(
            *(conversation(session, url, key, turns, stream=False, seconds=seconds) for url, key in addresses)
        )
        wall_s = time.perf_counter() - began
    return {"calls_per_s": len(seconds) / wall_s, "p99_ms": 1e3 * (quantile(seconds, 0.99) - wait_s)}


PEERS = {"openenv": ".venv-faces-openenv", "verifiers": ".venv-faces", "agent_lightning": ".venv-faces"}
PROMPT_TOKENS = 1500
"""The number of prompt ids that the model server sends to the peers: as many as in the middle of these
conversations."""


async def upstream() -> None:
    """Run the model server of all sides: chat completions with token ids, as from vLLM, and SGLang's `/generate`."""
    logprobs = [{"token": "t", "logprob": -0.1, "bytes": None, "top_logprobs": []} for _ in REPLY]
    replies = []
    for turn in range(TURNS):
        reply = json.loads(_instant_server.chat_reply("I look.", [("bash", {"command": "ls -la src"})], turn))
        reply["prompt_token_ids"] = list(range(PROMPT_TOKENS))
        reply["choices"][0] |= {"token_ids": REPLY, "logprobs": {"content": logprobs}}
        replies.append(json.dumps(reply).encode())
    await _instant_server.serve(replies, [_instant_server.token_reply(REPLY)])


async def serve_before(url: str, rollouts: int) -> None:
    """Serve rollouts as `serve` does, in front of the shared model server."""
    config = APIServerConfig(server_type="sglang", base_url=url, model_name="m", tool_parser="hermes")
    engine = SGLangEngine(config, tokenizer=TOKENIZER)
    async with RecordingEndpoint() as endpoint:
        sessions = [engine.session(SessionContext(rollout_id=str(number))) for number in range(rollouts)]
        opened = [endpoint.open(Conversations(each)) for each in sessions]
        addresses: list[RolloutAddress] = [each.__enter__() for each in opened]
        print(json.dumps([os.getpid(), *([each.openai_url, each.key] for each in addresses)]), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await engine.aclose()


@contextmanager
def peer_serving(name: str, url: str, rollouts: int) -> Iterator[str]:
    """Run a peer's proxy in its own interpreter."""
    here = Path(__file__).parent
    command = [here.parent / PEERS[name] / "bin" / "python", "-W", "ignore", here / "_recording_peers.py", name, url]
    with subprocess.Popen(
        [*command, str(rollouts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline()
        finally:
            server.stdin.close()


def proxied(name: str, rollouts: int) -> Sample:
    """Make the calls through one proxy, or directly to the model server (`direct`)."""
    with serving(__file__, "upstream") as url:
        if name == "direct":
            return one_by_one([[f"{url}/v1", "k"]] * rollouts, os.getpid())
        ours = serving(__file__, "serve_before", url, str(rollouts))
        with ours if name == "palaestra" else peer_serving(name, url, rollouts) as line:
            pid, *addresses = json.loads(line)
            return one_by_one(addresses, pid)


def one_by_one(addresses: Sequence[JSON], pid: int) -> Sample:
    """Return the medians over one conversation for each address."""
    with client() as (run, session):
        left = iter(addresses)
        case = {"": lambda: run(through_endpoint(session, pid, next(left), stream=False))}
        return interleaved(case, len(addresses))[""]


@contextmanager
def client() -> Iterator[tuple[Callable[[Coroutine[None, None, T]], T], aiohttp.ClientSession]]:
    """Yield a client's session, and a function that runs coroutines in the session's event loop."""

    async def opened() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    with asyncio.Runner() as runner:
        session = runner.run(opened())
        try:
            yield runner.run, session
        finally:
            runner.run(session.close())


def against_direct(rollouts: int) -> dict[str, dict[str, float]]:
    """Return the medians of calls that go directly to the engine, through the endpoint, and through it as a stream."""
    serve = serving(__file__, "serve", str(2 * rollouts), "0")
    with serve as line, serving(__file__, "direct") as url, client() as (run, session):
        pid, *addresses = json.loads(line)
        left = iter(addresses)
        cases = {
            "direct": lambda: run(direct(session, url)),
            "whole": lambda: run(through_endpoint(session, pid, next(left), stream=False)),
            "streamed": lambda: run(through_endpoint(session, pid, next(left), stream=True)),
        }
        return interleaved(cases, rollouts)


def many(turns: int) -> Sample:
    with serving(__file__, "serve", "256", "0.05") as line:
        _, *addresses = json.loads(line)
        return asyncio.run(at_once(addresses, 0.05, turns))


def compare_peers(rollouts: int, rounds: int, json_file: Path | None) -> int:
    """Print the table with the CPU time per call and the added time. Return the exit code."""
    missing = [folder for folder in PEERS.values() if not Path(__file__).parents[1].joinpath(folder).is_dir()]
    if missing:
        print(f"{missing[0]} does not exist: run `make faces` first.", file=sys.stderr)
        return 2
    names = ("direct", "palaestra", *PEERS)
    found = interleaved({name: (lambda name=name: proxied(name, rollouts)) for name in names}, rounds)
    base, ours = found["direct"]["reply_ms"], found["palaestra"]
    rows = [Row("the model server directly: reply after", base, "ms")]
    for name in names[1:]:
        each = found[name]
        rows.append(Row(f"{name}: CPU of the proxy per call", each["cpu_ms"], "ms", each["cpu_ms"] / ours["cpu_ms"]))
        rows.append(Row(f"{name}: reply later than the model server's", each["reply_ms"] - base, "ms"))
    return report("Recording proxies in front of one model server", rows, json_file)


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "direct":
        asyncio.run(serve_direct())
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2]), float(sys.argv[3])))
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "upstream":
        asyncio.run(upstream())
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "serve_before":
        asyncio.run(serve_before(sys.argv[2], int(sys.argv[3])))
        return 0
    parser = options_parser(__doc__)
    parser.add_argument("--peers", action="store_true", help="compare with the proxies of other packages (make faces)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.peers:
        return compare_peers(10 if options.quick else 20, options.rounds, options.json)
    found = against_direct(ROLLOUTS * options.rounds)
    found |= interleaved({"many": lambda: many(2 if options.quick else 6)}, options.rounds)
    base = found["direct"]
    later_ms = found["streamed"]["reply_ms"] - base["reply_ms"]
    rows = [
        Row("a call directly: CPU", base["cpu_ms"], "ms"),
        Row(
            "a call through the endpoint: CPU",
            found["whole"]["cpu_ms"],
            "ms",
            found["whole"]["cpu_ms"] / base["cpu_ms"],
        ),
        with_ceiling(Row("added CPU per call", found["whole"]["cpu_ms"] - base["cpu_ms"], "ms"), 0.6),
        with_ceiling(Row("added CPU per streamed call", found["streamed"]["cpu_ms"] - base["cpu_ms"], "ms"), 0.6),
        Row("a call directly: reply after", base["reply_ms"], "ms"),
        with_ceiling(Row("first streamed piece, later than the reply", later_ms, "ms"), 5.0),
        Row("256 agents: calls per second", found["many"]["calls_per_s"], "1/s"),
        Row("256 agents: slowest 1 % later than the engine", found["many"]["p99_ms"], "ms"),
    ]
    return report("The recording endpoint", rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
