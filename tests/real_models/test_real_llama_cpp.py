"""A real llama.cpp server and a trained model of 135M weights, which llama.cpp's own converter has converted: commands,
full windows, agents of other makers, and a server that is killed. `make llama` runs these tests. The server's chat
completions return no tokens, so nothing is compared with the model's own log-probabilities."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import palaestra as library
from palaestra.agent.known_programs import PROGRAMS
from palaestra.agent.programs import NpmProgram, PipProgram
from palaestra_slots.core.types import Outcome
from palaestra_tokens.config import APIServerConfig
from real_models.doors import (
    FILES_ENV,
    ONE_CALL,
    palaestra,
    replies_of,
    talk_until_compacted,
)
from real_models.servers import LLAMA_MODEL, LLAMA_SERVER, NAME, WINDOW, LlamaServer, run_past_a_killed_server

pytestmark = [
    pytest.mark.real_llama,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        # The tests run beside those of the other servers, with the environment that has converted the model.
        importlib.util.find_spec("torch") is None or not (LLAMA_SERVER.exists() and LLAMA_MODEL.exists()),
        reason="needs torch and llama.cpp: make llama",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    started = LlamaServer(LLAMA_MODEL, tmp_path_factory.mktemp("llama") / "log")
    try:
        started.start()
        yield started
    finally:
        started.kill()


def client(server: LlamaServer) -> tuple[str, ...]:
    """Return the flags for the server."""
    return ("--openai.server_type", "openai", "--base-url", server.url, "--model", NAME)


def server_config(server: LlamaServer) -> APIServerConfig:
    return APIServerConfig(server_type="openai", base_url=server.url, model_name=NAME)


def chat_end(folder: Path, server: LlamaServer, question: str, *words: str, code: int = 0) -> dict[str, object]:
    """Return the last event of a chat of one message."""
    printed = palaestra(folder, "chat", "-p", question, *client(server), "--toolsets", "--json", *words, code=code)
    end: dict[str, object] = json.loads(printed.splitlines()[-1])
    return end


def test_doctor_names_the_server(server: LlamaServer, tmp_path: Path) -> None:
    found = json.loads(palaestra(tmp_path, "doctor", server.url, "--model", NAME, "--json"))
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert (found["server"], states["reachable"], states["chat with tools"]) == ("llama.cpp", "ok", "ok")
    assert set(states.values()) == {"ok", "not applicable"}


@pytest.mark.parametrize("limit", [(), ("--env.max_token_length", "100000")], ids=["no limit", "above the window"])
def test_a_chat_has_whole_answers(server: LlamaServer, tmp_path: Path, limit: tuple[str, ...]) -> None:
    end = chat_end(tmp_path, server, "Write two sentences about the sea.", "--env.agent_temperature", "0", *limit)
    assert end["type"] == "end"
    assert (end["outcome"], end["model_calls"]) == ("natural", 1)


def test_a_reply_that_fills_the_window_ends_the_turn_with_its_cause(server: LlamaServer, tmp_path: Path) -> None:
    endless = ("--env.extra_body", '{"ignore_eos": true}')
    end = chat_end(tmp_path, server, "word " * 3900, *endless, code=1)
    assert (end["outcome"], end["model_calls"], end["context_tokens"]) == ("length", 1, WINDOW)
    assert str(end["error"]).startswith(f"the reply filled the window of model {NAME}")


def test_a_chat_that_outgrows_the_window_is_compacted(server: LlamaServer, tmp_path: Path) -> None:
    talk_until_compacted(tmp_path, server_config(server), "The ship left the harbour at dawn. " * 90, WINDOW)


@pytest.mark.slots
def test_sixty_four_rollouts_at_once(server: LlamaServer, tmp_path: Path) -> None:
    """The replies of a group differ: the server's own settings, such as its top_k of 40, do not apply."""
    words = ("--tasks", "16", "--group", "4", "--concurrency", "16", *ONE_CALL)
    palaestra(tmp_path, "run", FILES_ENV, *client(server), *words)
    palaestra(tmp_path, "verify", "last", code=2)  # there are no tokens to verify
    assert [len(group) for group in replies_of(tmp_path)] == [4] * 16


@pytest.mark.slots
def test_an_evaluation_has_a_score_for_each_rollout(server: LlamaServer, tmp_path: Path) -> None:
    words = ("--samples", "2", "--tasks", "3", "--json", *ONE_CALL)
    report = json.loads(palaestra(tmp_path, "eval", FILES_ENV, *client(server), *words))
    assert (report["groups"], report["rollouts"], report["scored"]) == (3, 6, 6)


def test_a_batch_of_a_hundred_prompts(server: LlamaServer, tmp_path: Path) -> None:
    prompts = "".join(f"{json.dumps({'prompt': f'What is {n} plus {n}?'})}\n" for n in range(100))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    words = ("--toolsets", "--max-turns", "1", "--max-tokens", "16", "--run-name", "sums")
    palaestra(tmp_path, "batch", "prompts.jsonl", *client(server), *words)
    assert len((tmp_path / "data/sums/trajectories.jsonl").read_text().splitlines()) == 100


@pytest.mark.slots
@pytest.mark.network
@pytest.mark.parametrize("name", ["pi", "mini-swe-agent"])
def test_an_agent_of_others_works_through_the_recording_endpoint(
    server: LlamaServer, tmp_path: Path, name: str
) -> None:
    from bug_fixing import fix_calc
    from test_installed_agents import installable

    program = PROGRAMS[name]
    assert isinstance(program, NpmProgram | PipProgram)
    if why := installable(program):
        pytest.skip(why)
    run = asyncio.run(
        library.run(
            fix_calc, server=server_config(server), agent=name, folder=tmp_path, group_size=2, max_agent_turns=3,
            max_token_length=64, worker_timeout=400.0,
        )
    )  # fmt: skip
    assert {each.outcome for each in run.trajectories} <= {Outcome.NATURAL, Outcome.MAX_TURNS, Outcome.LENGTH}
    assert all(each.turns for each in run.trajectories)


@pytest.mark.slots
def test_a_run_survives_a_killed_server(server: LlamaServer, tmp_path: Path) -> None:
    run_past_a_killed_server(tmp_path, server, *client(server))
    assert [len(group) for group in replies_of(tmp_path)] == [4] * 12
