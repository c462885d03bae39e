"""Palaestra's commands as processes with a real model, and their rows beside the model's own log-probabilities."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import palaestra as library
from chat.chat_process import environment
from model_logprobs import row_differences
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import Notice, TurnEnded
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.tokenizers import named_folder

ROOT = Path(__file__).parents[2]
MODEL = named_folder("smollm2")
"""The folder of `palaestra model get smollm2`."""
FILES_ENV = str(ROOT / "benchmarks" / "files_env.py")
ONE_CALL = ("--env.max_agent_turns", "1", "--env.max_token_length", "48")
MOST_MEAN_NATS = 5e-5
"""The largest mean difference of recorded log-probabilities from those of transformers in float32."""


def palaestra(folder: Path, *words: str, code: int = 0, patience_s: float = 400, stdin: str = "") -> str:
    """Run a command in the folder, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "palaestra", *words], cwd=folder, env=environment(folder), input=stdin,
        capture_output=True, text=True, check=False, timeout=patience_s,
    )  # fmt: skip
    assert done.returncode == code, f"palaestra {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def replies_of(folder: Path) -> list[set[str]]:
    """Return the different replies of each group of the last run, whatever the server type."""
    newest = max((folder / "runs").glob("*/*/journal.jsonl"), key=lambda each: each.stat().st_mtime)
    run = library.open_run(newest.parent)
    return [{json.dumps(each.messages[-1], sort_keys=True) for each in group.trajectories} for group in run.groups]


def exported_rows(folder: Path, *of: str) -> list[dict[str, JSON]]:
    file = folder / "rows.jsonl"
    palaestra(folder, "export", *of, "--to", "rows", "--out", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return rows


def chat_rows(folder: Path) -> list[dict[str, JSON]]:
    """Return the rows of all conversations whose store is below the folder."""
    palaestra(folder, "chat", "--consent", "yes")
    return exported_rows(folder, "all", "--from", "sessions")


def talk_until_compacted(folder: Path, server: APIServerConfig, sentences: str, window: int) -> None:
    """Hold a chat of ten turns that does not fit the window."""
    settings = ChatSettings(toolsets=(), system_prompt="Answer in one sentence.", max_tokens=16)
    notices: list[Notice] = []

    async def talk() -> list[TurnEnded]:
        (folder / "state").mkdir()
        with ConversationStore(folder / "state" / "conversations.sqlite") as store:
            async with ChatService(server, store, settings) as service:
                conversation = Conversation.begin(service, People(notice=notices.append))
                ends: list[TurnEnded] = []
                for number in range(10):
                    events = [event async for event in conversation.send(f"{sentences}What happened on day {number}?")]
                    assert isinstance(events[-1], TurnEnded)
                    ends.append(events[-1])
                await conversation.close()
                return ends

    ends = asyncio.run(talk())
    assert {end.outcome for end in ends} <= {"natural", "length"}
    assert all(0 < end.context_tokens <= window for end in ends)
    assert any(end.text for end in ends)
    assert any("summary" in notice.text for notice in notices)


def check_rows(rows: Sequence[dict[str, JSON]], model: Path = MODEL, most: float = MOST_MEAN_NATS) -> None:
    """Compare every sampled token, and print the figures (`pytest -s` or `-rP` shows them)."""
    found = row_differences(model, rows)
    mean = statistics.fmean(found)
    print(f"{len(rows)} rows, {len(found)} tokens: recorded differs by {mean:.1e} on average, {max(found):.1e} at most")
    assert mean <= most


def varied_model(folder: Path, **changes: dict[str, JSON]) -> Path:
    """Return a folder with the model's files, in which these JSON files (without `.json`) have other values."""
    folder.mkdir(parents=True)
    for file in MODEL.iterdir():
        if file.stem in changes:
            values = {**json.loads(file.read_text()), **changes[file.stem]}
            (folder / file.name).write_text(json.dumps(values))
        elif file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    return folder
