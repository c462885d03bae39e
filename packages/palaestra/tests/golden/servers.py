"""The fake servers of the golden runs: the only file here that imports modules of the package.

Each server runs in a thread of its own, so that a command can run in this process or in another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

from crash.by_prompt import TURN, ByPrompt
from pages.site import Site, searxng
from palaestra_tokens.engine import Sampled
from palaestra_tokens.serving.model_server import ModelServer
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

__all__ = [
    "MCP_SERVER",
    "SCRIPTS",
    "ChatServer",
    "Site",
    "TokenServer",
    "rows_server",
    "save_model",
    "searxng",
    "serving",
]

MCP_SERVER = Path(__file__).parents[1] / "tools/mcp/mcp_server.py"

Server = TypeVar("Server")


def _call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _with_thinking(thinking: str, reply: str) -> str:
    return f"<think>\n{thinking}\n</think>\n\n{reply}"


_MALFORMED_CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": }\n</tool_call>'
_PROGRAM = """
from palaestra_tools import terminal
for word in ("one", "two", "none"):
    print(word, terminal(command=f"grep -c {word} a.txt")["exit_code"])
"""
_COUNT, _COPY = "Count the lines of a.txt into lines.txt", "Copy a.txt to b.txt"

REPLIES: Mapping[str, Sequence[str]] = {
    f"user\n{_COUNT}": [
        _call_text("terminal", command="wc -l < a.txt > lines.txt"),
        _with_thinking("Done.", "There are 3."),
    ],
    f"user\n{_COPY}": [
        _call_text("terminal", command="cp a.txt b.txt"),
        _call_text("terminal", command="wc b.txt"),
        "It is copied.",
    ],
    "user\nHave a.txt counted and copied.": [
        _call_text("terminal", command="ls"),
        _with_thinking("Two parts.", _call_text("delegate_task", tasks=[{"goal": _COUNT}, {"goal": _COPY}])),
        _call_text("terminal", command="cat lines.txt b.txt"),
        _call_text("delegate_task", goal=_COPY, context="Once more.", toolsets=["terminal"], max_iterations=2),
        _call_text("terminal", command="cp lines.txt answer.txt"),
        "Both are done.",
    ],
    "user\nCount the lines of a.txt.": [
        _with_thinking("I should look first.", _call_text("terminal", command="cat a.txt")),
        f"Two calls.\n{_MALFORMED_CALL}\n{_call_text('terminal', command='wc -l < a.txt > answer.txt')}",
        _call_text("look_around", where="here"),
        _call_text("execute_code", code=_PROGRAM),
        _with_thinking("That is all.", "There are 3 lines."),
    ],
    "user\nLook around": [_call_text("terminal", command="pwd"), "The folder is empty."],
    "user\nSummary: The folder is empty.": [_call_text("terminal", command="echo yes > seen.txt"), "I wrote it down."],
}
"""The replies of the token server, in turn, for prompts that contain the key. The first key found counts."""


class _Engine(ByPrompt):
    """Counts the prompts by the CRC-32 of their ids, as journals do.

    With `stalls`, it never answers the second request of a conversation about copying; `stalled` counts these requests.
    """

    def __init__(self, model: Path, *, stalls: bool) -> None:
        super().__init__(load_tokenizer(str(model)), REPLIES, Path(os.devnull))
        self.prompts: Counter[int] = Counter()
        self.stalled = 0
        self._stalls = stalls

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, Any]) -> Sampled:
        prompt = array("i", input_ids)
        self.prompts[zlib.crc32(prompt.tobytes())] += 1
        text = self.tokenizer.decode(prompt)
        if self._stalls and f"user\n{_COPY}" in text and text.count(TURN) == 2:
            self.stalled += 1
            await asyncio.Event().wait()
        return await super().generate(input_ids, sampling)


class TokenServer(ModelServer):
    """Samples `REPLIES`, some with non-canonical tokens and some in several pieces, and serves them over all wires."""

    def __init__(self, model: Path, *, stalls: bool = False) -> None:
        self.engine = _Engine(model, stalls=stalls)
        super().__init__(self.engine)


def save_model(folder: Path) -> None:
    """Write the tokenizer and chat template of the token server to a new folder."""
    folder.mkdir()
    save_tokenizer(train_tokenizer(), folder)


def _calls(*calls: tuple[str, Mapping[str, Any] | str], content: str | None = None, **message: Any) -> FakeAnswer:
    """A completion with tool calls. Arguments that are text are sent unchanged."""
    tool_calls = [
        {
            "id": f"c{index}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for index, (name, given) in enumerate(calls)
    ]
    return FakeAnswer(completion(content, finish="tool_calls", tool_calls=tool_calls, **message))


def _command(command: str) -> FakeAnswer:
    return _calls(("terminal", {"command": command}))


_NOTHING = FakeAnswer(completion("I have done nothing."))
_DONE = FakeAnswer(completion("Done."))

_ERRORS = (
    _calls(
        ("terminal", {"command": "cat a.txt"}),
        ("terminal", '{"command": '),
        content="I look.",
        reasoning_content="First I should look,\nthen count.",
    ),
    _calls(("look_around", {"where": "here"}), ("look_up", {"word": "nothing"}), ("look_up", {"word": "heron"})),
    _calls(("terminal", {"command": 7}), ("terminal", {"command": "echo yes | tee done.txt; exit 3"})),
    FakeAnswer(completion([{"type": "text", "text": "There are 3 lines. <b>&amp; ½ 🐦</b>"}])),
)
_BEFORE_REPORT = (
    *_ERRORS,
    *(_command("echo yes > done.txt"), _DONE) * 2,  # the first grading attempt of "flaky" fails
    *(_NOTHING, _NOTHING),  # both grading attempts of "ungraded" fail
    _calls(("ask_outside", {"question": "Who is there?"}), reasoning="Somebody will answer."),
    _command("cat a.txt"),  # "delegates" begins
    _calls(("delegate_task", {"goal": "Count the lines of a.txt.", "context": "Into done.txt."})),
    _command("wc -l < a.txt > done.txt"),  # the sub-agent
)
_FROM_REPORT = (
    FakeAnswer(completion("There are 3.", reasoning_content="It was easy.")),  # the sub-agent's report
    *(_command("cat done.txt"), FakeAnswer(completion("They are counted."))),
    *(_command(f"echo {turn}") for turn in range(4)),  # "endless"
    FakeAnswer(completion("There are so many lines that", finish="length")),  # "short"
)

_COUNTS = (_command("wc -l < a.txt > answer.txt"), _DONE)
_REFUSED = FakeAnswer({"error": {"message": "no such model", "type": "invalid_request_error"}}, status=400)
_BACKGROUND = _calls(("terminal", {"command": "sleep 1000", "background": True}))

SCRIPTS: Mapping[str, tuple[Sequence[FakeAnswer], int]] = {
    "endings": ((*_BEFORE_REPORT, *_FROM_REPORT), len(_BEFORE_REPORT)),
    "interrupted": ((*_COUNTS, _REFUSED, _command("cat seed.txt"), *_COUNTS, *_COUNTS), 4),
    "restarted": ((_BACKGROUND, _BACKGROUND, *_COUNTS), 1),
}
"""The answers of the chat server in the order of requests, and after how many of them a run is cut off.

The server refuses the second task of `interrupted`, which asks again after the resume. `restarted` has a background
process, so its rollout starts again after the resume.
"""


class ChatServer(LoopbackServer):
    """Plays one of `SCRIPTS`: the whole script, or what comes `before` the run is cut off (then it does not answer), or
    `after`."""

    def __init__(self, script: str, part: Literal["whole", "before", "after"] = "whole") -> None:
        answers, cut = SCRIPTS[script]
        parts = {"whole": answers, "before": [*answers[:cut], FakeAnswer(hang=True)], "after": answers[cut:]}
        super().__init__(*parts[part])

    @property
    def conversations(self) -> list[Any]:
        """The messages of each request so far."""
        return [seen.body["messages"] for seen in self.seen if seen.method == "POST"]


def rows_server() -> LoopbackServer:
    """A chat server with the same answer to every request."""
    return LoopbackServer(FakeAnswer(completion("4")))


@contextlib.contextmanager
def serving(server: AbstractAsyncContextManager[Server]) -> Iterator[Server]:
    """Run a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def stop() -> None:
        await server.__aexit__(None, None, None)
        unanswered = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    try:
        running = asyncio.run_coroutine_threadsafe(_start(server), loop).result(10)
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(server: AbstractAsyncContextManager[Server]) -> Server:
    return await server.__aenter__()
