"""A model server whose replies follow from the conversation alone, so that a batch that is killed can be compared.

A prompt with a number N is answered by N % 3 calls of `terminal` and then a text; every fourth reply has reasoning. A
prompt with JSON in it is answered by an object the third time that it comes. As a judge, the server accepts answers to
even numbers. It counts the requests for each conversation, and runs in a process of its own: `python answering.py LOG`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

_ASKED_FOR_JSON = Counter[str]()


def reply(messages: list[dict[str, object]]) -> dict[str, object]:
    prompt = next(str(each["content"]) for each in messages if each["role"] == "user")
    if str(messages[0]["content"]).startswith("You judge"):
        said = "Answer" in json.loads(prompt)[-1]["content"] and int(re.findall(r"\d+", prompt)[0]) % 2 == 0
        return {
            "role": "assistant",
            "content": f'Let me see: {{"reason": "even {{or not}}", "meets": {str(said).lower()}}}',
        }
    if prompt.startswith("JSON"):
        _ASKED_FOR_JSON[prompt] += 1
        texts = ('{"n": "one"}', "No.", '```json\n{"n": 1}\n```')
        return {"role": "assistant", "content": texts[min(_ASKED_FOR_JSON[prompt], 3) - 1]}
    number = int((re.search(r"\d+", prompt) or ["0"])[0])
    turn = sum(each["role"] == "assistant" for each in messages)
    message: dict[str, object] = {"role": "assistant", "content": f"Answer {number}."}
    if turn < number % 3:
        arguments = json.dumps({"command": f"echo {number} {turn}"})
        call = {"id": f"call_{number}_{turn}", "type": "function"}
        call["function"] = {"name": "terminal" if number % 10 != 5 else "no_such_tool", "arguments": arguments}
        message |= {"content": None, "tool_calls": [call]}
    if number % 4 == 0:
        message["reasoning_content"] = f"Thinking of {number}."
    return message


async def serve(log: Path) -> None:
    asked = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        message = reply(body["messages"])
        turn = sum(each["role"] == "assistant" for each in body["messages"])
        prompt = next(str(each["content"]) for each in body["messages"] if each["role"] == "user")
        os.write(asked, json.dumps([prompt, turn, body]).encode() + b"\n")
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
        )

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


@contextlib.contextmanager
def answering(log: Path) -> Iterator[str]:
    """The address of the server, for as long as the block runs."""
    command = [sys.executable, __file__, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def asked(log: Path) -> Counter[tuple[str, int]]:
    """How often each turn of each prompt was asked for, without the request that a run sends before its first."""
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter((prompt, turn) for prompt, turn, _ in map(json.loads, lines) if prompt.startswith("Do "))


def bodies(log: Path) -> list[dict[str, object]]:
    """The requests, without that one."""
    return [body for prompt, _, body in map(json.loads, log.read_text().splitlines()) if prompt.startswith("Do ")]


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
