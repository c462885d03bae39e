"""`palaestra chat` in a real pseudo-terminal with a transformers model: text and tool calls stream, Ctrl-C stops the
model, a killed chat continues, and the tokens that a token-exact server sampled are exported as they were."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chat.chat_process import environment
from chat.test_terminal import CTRL_C, PROMPT, finish, messages, seen, terminal
from model_logprobs import own_logprobs
from palaestra_chat.store import ConversationStore
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.tiny_model import make_tiny
from palaestra_tokens.tokenizers import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"),
]

SYSTEM = "Help."
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo hello"}}\n</tool_call>'
ANSWER = "The answer is hello."


def teach(folder: Path, tools: list[JSON], steps: int) -> None:
    """Train the model to call the terminal after a question, and to answer after the result."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Look around."}]
    result = json.dumps({"output": "hello\n", "exit_code": 0, "error": None})
    looked = [{"role": "assistant", "content": CALL}, {"role": "tool", "content": result}]
    rows = []
    for conversation, reply in ((question, CALL), (question + looked, ANSWER)):
        prompt = tokenizer.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, tokenize=False)
        start = tokenizer(prompt, add_special_tokens=False).input_ids
        end = tokenizer(f"{reply}<|im_end|>", add_special_tokens=False).input_ids
        rows.append((torch.tensor([start + end]), torch.tensor([[-100] * len(start) + end])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        ids, labels = rows[step % 2]
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@contextmanager
def model_server(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "palaestra", "serve", "model", str(folder), "--port", "0", "--seed", "3", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def wait_for_turns(folder: Path, *states: str) -> None:
    """Wait until the conversation's turns have these states."""
    until = time.monotonic() + 60
    found: list[str] = []
    while time.monotonic() < until:
        with ConversationStore(folder / "state" / "conversations.sqlite") as store:
            for conversation in store.conversations():
                found = [turn.state for turn in store.turns.of(conversation.id)]
        if found == list(states):
            return
        time.sleep(0.1)
    raise AssertionError(f"the turns are {found}, not {states}")


def palaestra(folder: Path, *words: str) -> str:
    done = subprocess.run(["palaestra", *words], env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_streams_a_tool_call_and_its_tokens_are_exported(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    make_tiny(tmp_path / "model", hidden=64, layers=2)
    listed = json.loads(palaestra(tmp_path, "tools", "--json"))["tools"]
    tools = [
        {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
        for tool in listed
        if tool["toolset"] == "terminal"
    ]
    teach(tmp_path / "model", tools, steps=160)
    exact = ("--openai.server_type", "vllm", "--toolsets", "terminal", "--system", SYSTEM)
    with model_server(tmp_path / "model") as url, terminal(tmp_path, url, *exact, model=model) as child:
        seen(child, PROMPT)
        child.send("Look around.\r")
        seen(child, "● terminal")
        seen(child, "hello")
        seen(child, "The answer is")
        wait_for_turns(tmp_path, "done")
        finish(child)
    assert [message["role"] for message in messages(tmp_path)] == ["system", "user", "assistant", "tool", "assistant"]
    palaestra(tmp_path, "chat", "--consent", "yes")
    palaestra(tmp_path, "export", "all", "--from", "sessions", "--to", "rows", "--out", str(tmp_path / "rows.jsonl"))
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    tokens = row["prompt_ids"] + row["completion_ids"]
    sampled = [place for place, mask in enumerate(row["mask"]) if mask]
    places = [len(row["prompt_ids"]) + place for place in sampled]
    assert CALL in load_tokenizer(str(tmp_path / "model")).decode([tokens[place] for place in places])
    recorded = [row["logprobs"][place] for place in sampled]
    assert own_logprobs(tmp_path / "model", tokens, places) == pytest.approx(recorded, abs=1e-3)


def test_ctrl_c_stops_a_long_answer_and_a_killed_chat_continues(tmp_path: Path) -> None:
    """Without training the model writes random text to its limit."""
    model = str(tmp_path / "model")
    make_tiny(tmp_path / "model", hidden=64, layers=2)
    with model_server(tmp_path / "model") as url:
        with terminal(tmp_path, url, model=model) as child:
            seen(child, PROMPT)
            child.send("tell me a story\r")
            wait_for_turns(tmp_path, "open")
            time.sleep(0.3)  # the model writes
            child.send(CTRL_C)
            seen(child, "interrupted")
            seen(child, PROMPT)
            child.send("and another\r")
            wait_for_turns(tmp_path, "done", "open")
            child.kill(9)
            child.wait()
        with terminal(tmp_path, url, "-c", "--env.max_token_length", "8", model=model) as child:
            wait_for_turns(tmp_path, "done", "done")
            finish(child)
    asked = [message["content"] for message in messages(tmp_path) if message["role"] == "user"]
    assert asked == ["tell me a story", "and another"]
