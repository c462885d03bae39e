"""One model, one task: chat, batch and RL make the same requests, and record the same messages and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest

import palaestra
from palaestra import Run, Task, environment
from palaestra.envs.run.command import command_line
from palaestra.envs.run.run import run
from palaestra_chat.batch.prompts import batch
from palaestra_chat.conversation import Conversation
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import SGLangEngine
from palaestra_tokens.ledger import LedgerRecord, TokenRow, record_rows
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.echo_chat_server import EchoChatServer
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer

pytestmark = pytest.mark.slots

SYSTEM = "You are terse."
TOOLSETS = ["terminal", "file"]
TRANSCRIPT = "\n".join(
    [
        'call write_file {"path": "a.txt", "content": "one\\ntwo\\n"}',
        'both terminal {"command": "wc -l < a.txt"} ;; read_file {"path": "a.txt"}',
        'call terminal {"command": "cat missing.txt"}',
        'call terminal {"comand": "ls"}',
        "call no_such_tool {}",
        "think it over",
        "say It has two lines.",
    ]
)
COMMON: dict[str, JSON] = {
    "enabled_toolsets": TOOLSETS, "system_prompt": SYSTEM, "allow_network": False, "agent_temperature": 1.0,
}  # fmt: skip


@environment(toolsets=TOOLSETS)
def tasks(prompt: str) -> Iterator[Task]:
    yield Task(id="t", prompt=prompt)


@tasks.score
async def score(task: Task, sandbox: object) -> float:
    return 1.0


async def talked(folder: Path, server: object, prompt: str) -> tuple[list[JSON], list[bytes]]:
    """The messages of a conversation with one message, and its token records."""
    settings = ChatSettings(system_prompt=SYSTEM, toolsets=TOOLSETS)
    with ConversationStore(folder / "c.sqlite") as store:
        async with ChatService(server, store, settings) as chat:
            conversation = Conversation.begin(chat)
            async for _ in conversation.send(prompt):
                pass
            return conversation.history.messages, [record for *_, record in store.ledgers.of(conversation.id)]


async def batched(folder: Path, server: object, prompt: str) -> Run:
    """The run of `palaestra batch` with one row; `server` is settings or an engine."""
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n")
    settings = {**COMMON, "dataset_name": str(file), "base_url": "http://127.0.0.1:1", "model": "echo"}
    engines = []
    if isinstance(server, APIServerConfig):
        settings["base_url"] = server.base_url
    else:
        engines = [server]
    parsed = command_line(batch, "batch", "process").take("process", settings)
    await run(batch, parsed, folder=folder / "batch", stream=StringIO(), engines=engines)
    return palaestra.open_run(folder / "batch")


async def rolled_out(server: object, prompt: str) -> Run:
    return await palaestra.run(tasks(prompt=prompt), server=server, group_size=1, **COMMON)


async def test_requests_and_messages_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    requests, messages = [], []
    for door in (talked, batched, rolled_out):
        async with EchoChatServer() as model:
            server = APIServerConfig(base_url=model.url, model_name="echo", timeout=60)
            if door is rolled_out:
                messages.append((await rolled_out(server, TRANSCRIPT)).trajectories[0].messages)
            elif door is batched:
                messages.append((await batched(tmp_path, server, TRANSCRIPT)).trajectories[0].messages)
            else:
                messages.append((await talked(tmp_path, server, TRANSCRIPT))[0])
        # what probes a server before a run has no tools or no conversation
        requests.append([[each["messages"], each["tools"]] for each in model.asked if len(each["messages"]) > 1])
    assert requests[0] == requests[1] == requests[2]
    assert messages[0] == messages[1] == messages[2]
    assert [each["role"] for each in messages[0]].count("tool") == 6
    assert json.loads(messages[0][5]["content"])["output"] == "2\n"


def tokens(row: TokenRow) -> tuple[list[int], int]:
    """The tokens of a row, and how many of them the model sampled."""
    return list(row.tokens), sum(mask != -100 for mask in row.masks)


async def test_tokens_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = f'<tool_call>\n{{"name": "terminal", "arguments": {json.dumps({"command": "echo hi"})}}}\n</tool_call>'
    tokenizer = toy_tokenizer([call])
    rows = []
    for door in (talked, batched, rolled_out):
        engine = ToyEngine(tokenizer, iter([call, "It says hi."]))
        async with TokenLoopback(engine, tokenizer, kind="sglang") as model:
            config = APIServerConfig(base_url=model.url, model_name="toy", server_type="sglang")
            server = SGLangEngine(config, tokenizer=tokenizer)
            if door is talked:
                [record] = (await talked(tmp_path, server, "hello"))[1]
                ledger = msgspec.msgpack.decode(record, type=LedgerRecord)
                rows.append([tokens(row) for row in record_rows(ledger)])
            else:
                played = rolled_out(server, "hello") if door is rolled_out else batched(tmp_path, server, "hello")
                found = palaestra.training_rows((await played).trajectories[0])
                rows.append([([*row.prompt_ids, *row.completion_ids], sum(row.mask)) for row in found])
    assert rows[0] == rows[1] == rows[2]
    [(_, sampled)] = rows[0]
    assert sampled == len(tokenizer.encode(call)) + len(tokenizer.encode("It says hi.")) + 2  # with their ends
