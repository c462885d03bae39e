"""A tiny model plays tasks of others in a run that is killed and resumed. The tests let the peer's own runner play its
replies again, and compare the scores.

The model is a real one with exact tokens. A Python with torch serves it: the one that runs the tests, or that of
`.venv-torch` (`scripts/torch_env`), because the peers' environments have no torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import palaestra

GROUP = 6
MAKE = """
import json, sys
from pathlib import Path
from palaestra_tokens.testing import make_tiny
make_tiny(Path(sys.argv[1]), hidden=64, layers=2, practice=600, replies=json.loads(sys.argv[2]))
Path(sys.argv[1], "chat_template.jinja").write_text(sys.argv[3])
"""
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}
{{- tool.function.name + ' ' + tool.function.parameters.properties | join(' ') + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '')[:100] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A chat template that leaves out most of a prompt, because the model has practised only short ones."""

DEADLINE_S = 300.0


@dataclass(frozen=True)
class TinyModel:
    """A served model: its folder, which has its tokenizer, and its address."""

    folder: Path
    url: str


def call(name: str, **arguments: Any) -> str:
    """A call of a tool, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def served(folder: Path, replies: Sequence[str]) -> Iterator[TinyModel]:
    """Make a model that has practised these replies, and serve it. Skips the test if no Python has torch."""
    python = _python_with_torch()
    made = [python, "-c", MAKE, str(folder / "tiny"), json.dumps(replies), TEMPLATE]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    serve = [python, "-m", "palaestra", "serve", "model", str(folder / "tiny"), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        [*serve, "--seed", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield TinyModel(folder / "tiny", server.stdout.readline().strip())
        finally:
            server.terminate()


def killed_and_resumed(reference: str, folder: Path, model: TinyModel, *settings: str) -> palaestra.Run:
    """Start a run of the command line, kill it after two rollouts, resume it, verify its tokens, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "palaestra"]
    asked = ["--base-url", model.url, "--openai.server_type", "vllm", "--model", str(model.folder)]
    asked += ["--group", str(GROUP), "--concurrency", "1", "--env.max_token_length", "64"]
    log = folder / "first.log"
    with log.open("wb") as output:
        child = subprocess.Popen([*words, "run", reference, *asked, *settings], cwd=folder, stderr=output)
    deadline = time.monotonic() + DEADLINE_S
    while _ended_rollouts(folder) < 2:
        assert child.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = _ended_rollouts(folder)
    (path,) = [each.parent for each in (folder / "runs").glob("*/*/journal.jsonl")]
    for command in ("resume", "verify"):
        done = subprocess.run(
            [*words, command, str(path)], cwd="/", capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = palaestra.open_run(path)
    assert 2 <= before < len(run.trajectories)
    assert all(each.scored for each in run.trajectories), [each.error for each in run.trajectories]
    assert all(each.completion_tokens == _sampled(each) > 0 for each in run.trajectories)
    return run


def played(trajectory: palaestra.Trajectory) -> list[Mapping[str, Any]]:
    """The replies of the model, in OpenAI's format. A call that was cut off is not one."""
    replies = [dict(message) for message in trajectory.messages if message["role"] == "assistant"]
    if trajectory.outcome.value == "length":
        replies[-1].pop("tool_calls", None)
    return replies


def report(peer: str, run: palaestra.Run, rewards: Sequence[float]) -> None:
    """Print what was compared: `pytest -s` shows it."""
    rollouts = run.trajectories
    tokens, calls = sum(map(_sampled, rollouts)), sum(each.tool_calls_attempted for each in rollouts)
    turns = sum(len(each.turns) for each in rollouts)
    distinct = {round(each, 6) for each in rewards}
    print(
        f"{peer}: {len(rollouts)} rollouts, {turns} turns, {calls} calls, {tokens} verified tokens, "
        f"{len(distinct)} different rewards with the mean {sum(rewards) / len(rewards):.3f}"
    )


def _sampled(trajectory: palaestra.Trajectory) -> int:
    return sum(mask != -100 for row in trajectory.rows for mask in row.masks)


def _ended_rollouts(folder: Path) -> int:
    journals = list((folder / "runs").glob("*/*/journal.jsonl"))
    lines = journals[0].read_bytes().splitlines() if journals else []
    return sum(b'"event":"rollout"' in line[:200] for line in lines)


def _python_with_torch() -> str:
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    other = Path(__file__).parents[3] / ".venv-torch/bin/python"
    if not other.exists():
        pytest.skip("no Python has torch (scripts/torch_env)")
    return str(other)
