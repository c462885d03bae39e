"""A real vLLM server and a trained model of 135M weights: commands, both server types, streams, full windows, new
weights in flight, agents of other makers, and a server that is killed. `make vllm` runs these tests.

The model's `generation_config.json` asks for the likeliest token. Palaestra must override it, or the replies of a group
are equal and the recorded log-probabilities are not those of the distribution that was sampled from.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import palaestra as library
from model_logprobs import logprobs_by
from palaestra.agent.known_programs import PROGRAMS
from palaestra.agent.programs import NpmProgram, PipProgram
from palaestra_slots.core.errors import ContextExceeded
from palaestra_slots.core.types import JSON, Outcome
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import VLLMEngine
from palaestra_tokens.ledger import record_rows, verify_ledger
from real_models.doors import (
    FILES_ENV,
    MODEL,
    MOST_MEAN_NATS,
    ONE_CALL,
    chat_rows,
    check_rows,
    exported_rows,
    palaestra,
    replies_of,
    varied_model,
)
from real_models.servers import DTYPE, NAME, PYTHON, WINDOW, VLLMServer, run_past_a_killed_server

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or not (MODEL.is_dir() and PYTHON.exists()),
        reason="needs torch, smollm2 and vLLM: make vllm",
    ),
]

GREEDY = {"do_sample": True, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.2}
MOST = MOST_MEAN_NATS if DTYPE == "float32" else 0.1
STORY = "Tell me a very long story about a ship."
CAPITAL = "What is the capital of France? Answer with one word."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    folder = tmp_path_factory.mktemp("vllm")
    started = VLLMServer(varied_model(folder / "model", generation_config=GREEDY), folder / "log")
    try:
        started.start()
        yield started
    finally:
        started.kill()


def client(server: VLLMServer, kind: str = "vllm") -> tuple[str, ...]:
    """Return the flags for the server."""
    tokenizer = ("--openai.tokenizer_name", str(MODEL)) if kind == "vllm" else ()
    return ("--openai.server_type", kind, "--base-url", server.url, "--model", NAME, *tokenizer)


def config(server: VLLMServer) -> APIServerConfig:
    return APIServerConfig(server_type="vllm", base_url=server.url, model_name=NAME, tokenizer_name=str(MODEL))


def prompt_ids(engine: VLLMEngine, text: str) -> list[int]:
    written = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(engine.tokenizer.encode(written))


def play(scene: Any, server: VLLMServer) -> None:
    """Run a scene with a client of the server."""

    async def go() -> None:
        engine = VLLMEngine(config(server))
        await engine.start()
        try:
            async with asyncio.timeout(600):
                await scene(engine)
        finally:
            await engine.aclose()

    asyncio.run(go())


def test_doctor_sees_the_servers_own_settings(server: VLLMServer, tmp_path: Path) -> None:
    words = ("doctor", server.url, "--model", NAME, "--tokenizer", str(MODEL), "--json")
    found = json.loads(palaestra(tmp_path, *words))
    states = {check["name"]: (check["state"], check["found"]) for check in found["checks"]}
    assert {state for state, _ in states.values()} <= {"ok", "not applicable"}, states
    assert found["server"] == "vllm"
    assert "generation_config.json" in states["sampling settings"][1]


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.parametrize("limit", [(), ("--env.max_token_length", "100000")], ids=["no limit", "above the window"])
def test_a_chat_streams_whole_answers(server: VLLMServer, tmp_path: Path, kind: str, limit: tuple[str, ...]) -> None:
    """Without a limit, vLLM ends a reply after 16 tokens; it refuses a limit above its window."""
    question = "Write two sentences about the sea."  # the likeliest reply has an end, unlike that to many others
    words = (*client(server, kind), "--env.agent_temperature", "0", "--toolsets", "--json", *limit)
    events = [json.loads(line) for line in palaestra(tmp_path, "chat", "-p", question, *words).splitlines()]
    assert sum(event["type"] == "text" for event in events) > 1
    assert events[-1]["type"] == "end"
    assert events[-1]["outcome"] == "natural"
    assert events[-1]["completion_tokens"] > 16
    if kind == "vllm":
        check_rows(chat_rows(tmp_path), most=MOST)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_a_reply_that_fills_the_window_ends_the_turn_with_its_cause(
    server: VLLMServer, tmp_path: Path, kind: str
) -> None:
    endless = ("--env.extra_body", '{"ignore_eos": true}', "--toolsets", "--json")
    printed = palaestra(tmp_path, "chat", "-p", "word " * 3900, *client(server, kind), *endless, code=1)
    end = json.loads(printed.splitlines()[-1])
    assert (end["outcome"], end["model_calls"], end["context_tokens"]) == ("length", 1, WINDOW)
    assert end["error"].startswith(f"the reply filled the window of model {NAME}")


@pytest.mark.slots
def test_sixty_four_rollouts_at_once(server: VLLMServer, tmp_path: Path) -> None:
    words = ("--tasks", "16", "--group", "4", "--concurrency", "16", *ONE_CALL)
    palaestra(tmp_path, "run", FILES_ENV, *client(server), *words)
    assert "T1 to T4 hold" in palaestra(tmp_path, "verify", "last")
    assert [len(group) for group in replies_of(tmp_path)] == [4] * 16
    rows = exported_rows(tmp_path, "last")
    assert len(rows) == 64
    check_rows(rows, most=MOST)


@pytest.mark.slots
def test_chat_completions_sample_from_the_models_own_distribution(server: VLLMServer, tmp_path: Path) -> None:
    words = ("--tasks", "2", "--group", "4", "--openai.stream", "true", *ONE_CALL)
    palaestra(tmp_path, "run", FILES_ENV, *client(server, "openai"), *words)
    assert [len(group) for group in replies_of(tmp_path)] == [4, 4]


@pytest.mark.slots
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_an_evaluation_has_a_score_for_each_rollout(server: VLLMServer, tmp_path: Path, kind: str) -> None:
    words = ("--samples", "2", "--tasks", "3", "--json", *ONE_CALL)
    report = json.loads(palaestra(tmp_path, "eval", FILES_ENV, *client(server, kind), *words))
    assert (report["groups"], report["rollouts"], report["scored"]) == (3, 6, 6)


def test_a_batch_of_a_hundred_prompts(server: VLLMServer, tmp_path: Path) -> None:
    prompts = "".join(f"{json.dumps({'prompt': f'What is {n} plus {n}?'})}\n" for n in range(100))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    words = ("--toolsets", "--max-turns", "1", "--max-tokens", "16", "--run-name", "sums")
    palaestra(tmp_path, "batch", "prompts.jsonl", *client(server, "openai"), *words)
    lines = (tmp_path / "data/sums/trajectories.jsonl").read_text().splitlines()
    assert len(lines) == 100


def test_a_full_window(server: VLLMServer) -> None:
    async def scene(engine: VLLMEngine) -> None:
        assert engine.window_tokens == WINDOW
        ids = [*prompt_ids(engine, STORY), *[504] * WINDOW]
        for length in (WINDOW, WINDOW + 1):
            with pytest.raises(ContextExceeded, match=str(WINDOW)):
                await engine.generate(ids[:length], {})
        last = await engine.generate(ids[: WINDOW - 2], {"max_tokens": 100, "ignore_eos": True})
        assert (len(last.ids), last.finish_reason) == (2, "length")

    play(scene, server)


def test_a_stream_has_the_tokens_of_the_reply(server: VLLMServer) -> None:
    async def scene(engine: VLLMEngine) -> None:
        pieces: list[Sequence[int] | None] = []
        settings: dict[str, JSON] = {"max_tokens": 40, "seed": 5, "ignore_eos": True}
        streamed = await engine.generate(prompt_ids(engine, STORY), {**settings, "on_ids": pieces.append})
        whole = await engine.generate(prompt_ids(engine, STORY), settings)
        assert len(pieces) > 10
        assert [token for piece in pieces for token in piece or ()] == list(streamed.ids) == list(whole.ids)
        assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-3)

    play(scene, server)


def test_cached_prefixes_change_nothing(server: VLLMServer) -> None:
    async def scene(engine: VLLMEngine) -> None:
        before = server.metric("vllm:prefix_cache_hits_total")
        ids = prompt_ids(engine, f"{STORY} " * 60)
        settings = {"max_tokens": 16, "seed": 3, "ignore_eos": True}
        first, second = [await engine.generate(ids, settings) for _ in range(2)]
        assert server.metric("vllm:prefix_cache_hits_total") - before > len(ids) / 2
        assert list(first.ids) == list(second.ids)
        assert first.logprobs == pytest.approx(second.logprobs, abs=1e-3)

    play(scene, server)


@pytest.mark.slots
@pytest.mark.network
@pytest.mark.parametrize("name", ["pi", "mini-swe-agent"])
def test_every_token_of_an_agent_of_others_is_recorded(server: VLLMServer, tmp_path: Path, name: str) -> None:
    from bug_fixing import fix_calc
    from test_installed_agents import installable

    program = PROGRAMS[name]
    assert isinstance(program, NpmProgram | PipProgram)
    if why := installable(program):
        pytest.skip(why)
    run = asyncio.run(
        library.run(
            fix_calc, server=config(server), agent=name, folder=tmp_path, group_size=2, max_agent_turns=3,
            max_token_length=64, worker_timeout=400.0,
        )
    )  # fmt: skip
    assert {each.outcome for each in run.trajectories} <= {Outcome.NATURAL, Outcome.MAX_TURNS, Outcome.LENGTH}
    assert "T1 to T4 hold" in palaestra(tmp_path, "verify", str(run.path))
    check_rows(exported_rows(tmp_path, str(run.path)), most=MOST)


def new_weights(folder: Path) -> Any:
    """Write the model with other weights, and return it. The embeddings stay: vLLM on a CPU keeps the old ones as the
    output layer (`test_weight_updates_are_checked.py` has that)."""
    import torch

    from palaestra_tokens.engines.torch_decoder import load_model

    model = load_model(str(MODEL), "cpu", "float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2 and "embed" not in name:
                noise = torch.randn(weights.shape, generator=generator)
                weights.add_(noise * 0.02 * weights.std())
    varied_model(folder)
    (folder / "model.safetensors").unlink()  # the link to the old ones
    model.save_pretrained(folder)
    return model


def test_new_weights_arrive_while_requests_run(server: VLLMServer, tmp_path: Path) -> None:
    from palaestra_tokens.engines.torch_decoder import load_model

    updated = tmp_path / "updated"
    models = {"": load_model(str(MODEL), "cpu", "float32"), "1": new_weights(updated)}
    found: dict[str, list[float]] = {"": [], "1": []}

    async def scene(engine: VLLMEngine) -> None:
        sessions = [engine.managed_server(name=f"story-{number}") for number in range(6)]
        arrived, many = itertools.count(), asyncio.Event()

        def count(text: Any) -> None:
            if next(arrived) == 40:
                many.set()

        asked: dict[str, JSON] = {"max_tokens": 120, "temperature": 1.0, "on_delta": count}
        message = {"role": "user", "content": STORY}
        replies = [asyncio.create_task(each.chat_completion(messages=[message], **asked)) for each in sessions]
        await many.wait()
        began = time.monotonic()
        await engine.load_weights(str(updated), "1")
        print(f"the update took {time.monotonic() - began:.1f} s")
        await asyncio.gather(*replies)
        for session in sessions:
            record = session.ledger.record()
            assert verify_ledger(record).ok
            for row in record_rows(record):
                for start, stop, version in row.versions:
                    own = logprobs_by(models[version], row.tokens, range(start, stop))
                    recorded = row.logprobs[start:stop]
                    found[version] += [abs(mine - theirs) for mine, theirs in zip(own, recorded, strict=True)]
        await engine.load_weights(str(MODEL), "2")

    play(scene, server)
    assert min(len(each) for each in found.values()) > 40, "requests ran before and after the update"
    for version, each in found.items():
        print(f"version {version or 'at the start'}: {len(each)} tokens differ by {statistics.fmean(each):.1e}")
        assert statistics.fmean(each) <= MOST


@pytest.mark.slots
def test_a_run_survives_a_killed_server(server: VLLMServer, tmp_path: Path) -> None:
    run_past_a_killed_server(tmp_path, server, *client(server))
    assert "T1 to T4 hold" in palaestra(tmp_path, "verify", "last")
    assert len(exported_rows(tmp_path, "last")) == 48
