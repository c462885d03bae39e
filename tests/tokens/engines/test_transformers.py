"""The transformers engine over a real tiny model: its numbers against one forward pass, alone and in company."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaestra_contract.agent_loop import HermesAgentLoop
from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineRefused, EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.engines.transformers import TransformersEngine
from palaestra_tokens.ledger import SegmentReason, record_rows, verify_ledger
from palaestra_tokens.server_checks import CheckState, Target, diagnose
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"),
]

TOLERANCE = 1e-3
PATIENCE_S = 60.0
TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one small model."""
    out = tmp_path_factory.mktemp("models")
    make_tiny(out / "a", seed=1, hidden=64, layers=2)
    make_tiny(out / "b", seed=2, hidden=64, layers=2)
    return out


@asynccontextmanager
async def started(folder: Path, **options: JSON) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(config(folder), **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def config(folder: Path, **settings: JSON) -> APIServerConfig:
    return APIServerConfig(server_type="transformers", model_name=str(folder / "a"), **settings)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(bounded())


def again(engine: TransformersEngine, ids: list[int]) -> JSON:
    """`logprobs[T, V]` of one forward pass."""
    import torch

    with torch.inference_mode():
        return torch.log_softmax(engine.model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randrange(1, 150))] for _ in range(count)]


def check(engine: TransformersEngine, prompt: list[int], sampled: Sampled) -> None:
    expected = again(engine, [*prompt, *sampled.ids])
    for place, (token, logprob) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True), len(prompt) - 1):
        assert abs(expected[place, token].item() - logprob) < TOLERANCE


def test_logprobs_are_the_models_own_whatever_the_settings(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            asked = [
                {"max_tokens": 20, "seed": number, "temperature": (1.0, 0.3, 0)[number % 3], "top_p": 0.9, "top_k": 50}
                for number in range(12)
            ]
            answers = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts(12), asked, strict=True)))
            assert engine.batcher.most_at_once > 1
            for prompt, sampled in zip(prompts(12), answers, strict=True):
                check(engine, prompt, sampled)

    run(scenario)


def test_company_changes_nothing(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:

            async def one(number: int) -> list[int]:
                return list((await engine.generate(prompts(8)[number], {"max_tokens": 5 + number, "seed": 7})).ids)

            together = await asyncio.gather(*map(one, range(8)))
            assert together == [await one(number) for number in range(8)]

    run(scenario)


def test_without_seeds_the_engines_own_decides(folder: Path) -> None:
    async def replies(seed: int) -> list[list[int]]:
        async with started(folder, seed=seed) as engine:
            return [list((await engine.generate([1, 2], {"max_tokens": 8})).ids) for _ in range(3)]

    async def scenario() -> None:
        first = await replies(1)
        assert first == await replies(1) != await replies(2)
        assert first[0] != first[1]

    run(scenario)


def test_temperature_zero_takes_the_likeliest(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            sampled = await engine.generate([5, 6, 7], {"max_tokens": 6, "temperature": 0, "ignore_eos": True})
            expected = again(engine, [5, 6, 7, *sampled.ids])
            assert list(sampled.ids) == [int(expected[place].argmax()) for place in range(2, 8)]

    run(scenario)


def test_stop_ids_length_and_window(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            drawn = {"seed": 3, "ignore_eos": True}
            first, second, *_ = (await engine.generate([5, 6, 7], {**drawn, "max_tokens": 4})).ids
            assert first != second
            stopped = await engine.generate([5, 6, 7], {**drawn, "max_tokens": 4, "stop_token_ids": [second]})
            assert list(stopped.ids) == [first, second]
            assert stopped.finish_reason == "stop"
            cut = await engine.generate([5, 6, 7], {**drawn, "max_tokens": 1})
            assert (list(cut.ids), cut.finish_reason, cut.policy_version) == ([first], "length", "0")
            window = engine.model.config.max_position_embeddings
            last = await engine.generate([5] * (window - 2), {"ignore_eos": True})
            assert (len(last.ids), last.finish_reason) == (2, "length")
            with pytest.raises(ContextExceeded, match=f"window of {window} tokens; the prompt has {window}"):
                await engine.generate([5] * window, {})

    run(scenario)


@pytest.mark.parametrize("ids", [[], [-1], [5, 1_000_000], [1.5]])
def test_ids_that_the_model_does_not_have_are_refused(folder: Path, ids: list[float]) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            with pytest.raises(EngineRefused, match="are 0 to 1032"):
                await engine.generate(ids, {})
            with pytest.raises(EngineRefused, match="no sampling setting"):
                await engine.generate([1], {"min_tokens": 3})

    run(scenario)


def test_drawn_from_what_top_k_and_top_p_leave() -> None:
    import torch

    from palaestra_tokens.engines.torch_decoder import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(6, 1)
    ways = [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(top_p=0.51), Sampling(top_k=1), Sampling(), Sampling()]
    chances = [0.99, 0.99, 0.99, 0.99, 0.99, 0.6]
    ids, logprobs = sample(logits, ways, chances)
    assert ids.tolist() == [1, 0, 1, 0, 3, 1]
    assert torch.allclose(logprobs, logits[0, ids]), "the model's own"
    processed = [Sampling(top_k=2, processed_logprobs=True), Sampling(temperature=0, processed_logprobs=True)]
    ids, logprobs = sample(logits[:2], processed, [0.0, 0.9])
    assert logprobs.tolist() == pytest.approx([torch.log(torch.tensor(0.625)).item(), 0.0])


def test_draws_follow_the_probabilities() -> None:
    import torch

    from palaestra_tokens.engines.torch_decoder import sample

    probabilities = torch.tensor([0.0, 0.6, 0.0, 0.3, 0.1, 0.0])
    steps = [(number + 0.5) / 1000 for number in range(1000)]
    ids, _ = sample(probabilities.log()[None, :].repeat(1000, 1), [Sampling()] * 1000, steps)
    assert torch.bincount(ids, minlength=6).tolist() == pytest.approx([0, 600, 0, 300, 100, 0], abs=1)
    edge, _ = sample(probabilities.log()[None, :].repeat(2, 1), [Sampling()] * 2, [0.0, 1 - 2**-53])
    assert edge.tolist() == [1, 4], "never a token without probability"


def test_a_cancelled_request_leaves_and_the_engine_goes_on(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            endless = asyncio.create_task(engine.generate([1], {"ignore_eos": True, "max_tokens": 10_000}))
            await engine.generate([2], {"max_tokens": 3})  # by now it is under way
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            assert len((await engine.generate([2], {"max_tokens": 3, "ignore_eos": True})).ids) == 3

    run(scenario)


def test_the_model_lives_in_a_thread_that_ends(folder: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "transformers-engine" for thread in threading.enumerate())

    async def scenario() -> None:
        async with started(folder) as engine:
            assert threads() == 1
            waiting = asyncio.create_task(engine.generate([1], {"ignore_eos": True, "max_tokens": 10_000}))
            await engine.generate([2], {"max_tokens": 1})
            await engine.aclose()
            with pytest.raises(EngineUnavailable, match="closed"):
                await waiting
        assert threads() == 0

    run(scenario)


def test_new_weights_resume_a_turn_and_the_ledger_says_so(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as engine:
            managed = engine.managed_server()
            hello = [{"role": "user", "content": "Hello"}]
            turn = asyncio.create_task(managed.chat_completion(messages=hello, max_tokens=400, ignore_eos=True))
            await engine.generate([2], {"max_tokens": 1})
            await engine.load_weights(str(folder / "b"), "b")
            await turn
            record = managed.ledger.record()
            assert verify_ledger(record).ok
            (row,) = record_rows(record)
            assert {version for _, _, version in row.versions} <= {"0", "b"}
            assert [span.reason for span in record.segments[0].spans[1:]] == ["", SegmentReason.ABORT_RESUME]
            start, stop, version = row.versions[-1]
            assert version == "b"
            expected = again(engine, row.tokens)
            for place in range(start, stop):
                assert abs(expected[place - 1, row.tokens[place]].item() - row.logprobs[place]) < TOLERANCE

    run(scenario)


@pytest.mark.parametrize("kind", ["transformers", "sglang", "vllm"])
def test_what_a_rollout_records_is_what_the_model_says(folder: Path, kind: str) -> None:
    async def answer(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        return '{"output": "½ 東京"}'

    async def scenario() -> None:
        async with started(folder) as engine, TokenLoopback(engine, engine.tokenizer) as served:
            server = ServerGroup(
                APIServerConfig(
                    server_type=kind,
                    model_name=str(folder / "a"),
                    tokenizer_name=str(folder / "a"),
                    base_url=None if kind == "transformers" else served.url,
                )
            )
            await server.start()
            managed = server.managed_server()
            messages: list[dict[str, JSON]] = [{"role": "user", "content": "Hello"}]
            for _ in range(3):  # an unpractised model calls no tools, so somebody else keeps the conversation going
                loop = HermesAgentLoop(managed, [TOOL], {"terminal"}, max_tokens=20, tool_handler=answer)
                await loop.run(messages)
                messages.append({"role": "user", "content": "And now?"})
            await server.aclose()
            record = managed.ledger.record()
            assert verify_ledger(record).ok
            assert len(record.turns) == 3
            (row,) = record_rows(record)
            expected = again(engine, row.tokens)
            for place, mask in enumerate(row.masks):
                if mask >= 0:
                    assert abs(expected[place - 1, row.tokens[place]].item() - row.logprobs[place]) < TOLERANCE

    run(scenario)


def test_the_examination_of_a_folder(folder: Path) -> None:
    async def scenario() -> None:
        found = await diagnose(Target(str(folder / "a")))
        assert found.server == "transformers"
        assert [check.name for check in found.checks if check.state is CheckState.FAILED] == []
        assert sum(check.state is CheckState.OK for check in found.checks) == 7

    run(scenario)


def test_what_is_no_model_is_a_mistake_of_settings(folder: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "tokenizer.json").write_bytes((folder / "a" / "tokenizer.json").read_bytes())
        (tmp_path / "chat_template.jinja").write_bytes((folder / "a" / "chat_template.jinja").read_bytes())
        (tmp_path / "config.json").write_text("{}")
        engine = TransformersEngine(APIServerConfig(server_type="transformers", model_name=str(tmp_path)))
        with pytest.raises(ConfigError, match="No model could be loaded from"):
            await engine.start()
        await engine.aclose()

    run(scenario)


async def until(lines: asyncio.StreamReader, part: bytes) -> AsyncIterator[bytes]:
    """The lines up to the first one with this part."""
    async for line in lines:
        yield line
        if part in line:
            return


def test_one_served_model_for_every_client(folder: Path) -> None:
    """`palaestra serve model` samples the same for chat, vLLM's wire and SGLang's."""

    async def scenario() -> None:
        command = [sys.executable, "-m", "palaestra", "serve", "model", str(folder / "a"), "--port", "0"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = (await process.stdout.readline()).decode().strip()
            notes = [line.decode() async for line in until(process.stderr, b"--base-url")]
            assert f"--base-url {url}/v1 --model {folder / 'a'}\n" in notes[-1]
            said = []
            for kind in ("openai", "vllm", "sglang"):
                told = {} if kind == "openai" else {"tokenizer_name": str(folder / "a")}
                servers = ServerGroup(
                    APIServerConfig(server_type=kind, base_url=url, model_name=str(folder / "a"), **told)
                )
                await servers.start()
                messages = [{"role": "user", "content": "Say something."}]
                reply = await servers.session(SessionContext()).chat_completion(
                    messages=messages, tools=[TOOL], temperature=1.0, max_tokens=12, seed=7
                )
                message, used = reply.choices[0].message, reply.usage
                assert used is not None
                assert used.completion_tokens > 1
                said.append((message.content, message.reasoning_content, used.prompt_tokens, used.completion_tokens))
                await servers.aclose()
            assert said == [said[0]] * 3
            assert any(said[0][:2])
        finally:
            process.terminate()
            assert await process.wait() == 0

    run(scenario)
