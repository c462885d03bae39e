"""How fast `palaestra chat` starts and shows text: python benchmarks/chat.py [--quick] [--json FILE]

The command runs in a pseudo-terminal against a streaming server in a separate process. `start to prompt` is the wall
time from the start of the process until the prompt is on the screen; the table also shows the processor time. Each
answer begins with the time at which the server writes it, and then pauses: `first character` is the time from then
until the terminal shows the answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _measure as measure
from aiohttp import web

START_S, FIRST_MS = 0.5, 30.0
PAUSE_S = 0.3
PATIENCE_S = 60.0
PROMPT, WHERE_IS_THE_CURSOR = "›".encode(), b"\x1b[6n"


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.execvpe(command[0], command, variables)
        self._shown = b""

    def wait_for(self, pattern: bytes) -> tuple[re.Match[bytes], float]:
        """Wait for the next match on the screen, and return it with its time. Everything before the match is
        dropped."""
        at = time.monotonic()
        until = at + PATIENCE_S
        while (found := re.search(pattern, self._shown)) is None:
            if not select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"{pattern!r} is not shown; shown is {self._shown[-500:]!r}")
            data = os.read(self._terminal, 65_536)
            at = time.monotonic()
            if WHERE_IS_THE_CURSOR in data:  # as a real terminal answers
                self.type(b"\x1b[1;1R")
            self._shown += data
        self._shown = self._shown[found.end() :]
        return found, at

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def kill(self) -> float:
        """Kill the command, and return its processor time in seconds."""
        os.kill(self.pid, signal.SIGKILL)
        used = os.wait4(self.pid, 0)[2]
        os.close(self._terminal)
        return used.ru_utime + used.ru_stime


@contextmanager
def chat(url: str) -> Iterator[tuple[Terminal, float]]:
    """Start the command, and return it with the time of its start."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"PALAESTRA_STATE": folder, "XDG_CONFIG_HOME": folder, "TERM": "xterm-256color"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PALAESTRA"))}
        command = [sys.executable, "-m", "palaestra", "chat", "--base-url", f"{url}/v1", "--model", "m"]
        started = time.monotonic()
        terminal = Terminal(command, {**kept, **own})
        try:
            yield terminal, started
        finally:
            terminal.kill()


def start(url: str) -> measure.Sample:
    with chat(url) as (terminal, started):
        _, at = terminal.wait_for(PROMPT)
        wall_s = at - started
        clock = Path(f"/proc/{terminal.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(clock[11]) + int(clock[12])) / os.sysconf("SC_CLK_TCK")
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def stream(url: str, answers: int) -> measure.Sample:
    """Measure the delay of every answer but the first, which opens the connection."""
    late_ms: list[float] = []
    with chat(url) as (terminal, _):
        for number in range(answers + 1):
            terminal.wait_for(PROMPT)
            terminal.type(f"message {number}\r".encode())
            found, at = terminal.wait_for(rb"@(\d+)@")
            late_ms.append((at - int(found[1]) / 1e9) * 1e3)
            terminal.wait_for(rb"the rest")
    return {"p50_ms": measure.quantile(late_ms[1:], 0.5), "p95_ms": measure.quantile(late_ms[1:], 0.95)}


async def serve() -> None:
    """Print the address, and answer until standard input ends."""

    async def complete(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)

        async def send(delta: dict[str, str], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())

        await send({"role": "assistant", "content": f"@{time.monotonic_ns()}@ and"})
        await asyncio.sleep(PAUSE_S)
        await send({"content": " then the rest.\n"})
        await send({}, "stop")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def main() -> int:
    given = measure.parse_options(__doc__)
    answers = 3 if given.quick else 20
    with measure.serving(__file__, "--serve") as url:
        cases = {"start": lambda: start(url), "stream": lambda: stream(url, answers)}
        found = measure.interleaved(cases, given.rounds)
    started, streamed = found["start"], found["stream"]
    rows = [
        measure.with_ceiling(measure.Row("start to prompt", started["wall_s"], "s"), START_S),
        measure.Row("start to prompt, CPU", started["cpu_s"], "s"),
        measure.with_ceiling(measure.Row("first character, median", streamed["p50_ms"], "ms"), FIRST_MS),
        measure.Row("first character, p95", streamed["p95_ms"], "ms"),
    ]
    return measure.report(f"palaestra chat in a pseudo-terminal, {answers} answers", rows, given.json)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        asyncio.run(serve())
        sys.exit()
    sys.exit(main())
