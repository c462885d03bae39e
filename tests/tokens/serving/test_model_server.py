"""The model server's chat: the same model as its token wires, with tools, streamed or whole, and clear refusals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path

import aiohttp
import pytest

from golden_messages import raises
from manual_clock import ManualClock
from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineRefused, EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.engines.token_engine import SGLangEngine, TokenChat, TokenServer, VLLMEngine
from palaestra_tokens.server_checks import LOGPROBS, TOKENS, CheckState, Target, diagnose
from palaestra_tokens.serving.model_server import ModelServer
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import make_tiny, save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"
)

TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


class Toy(TokenChat):
    """Says given texts in tokens."""

    def __init__(self, folder: Path, texts: Iterable[str]) -> None:
        tokenizer = load_tokenizer(str(folder))
        super().__init__(APIServerConfig(server_type="transformers", model_name="toy"), tokenizer=tokenizer)
        self.toy = ToyEngine(tokenizer, texts, rate=0.2)
        self.asked: list[Mapping[str, JSON]] = []
        self.loaded: list[tuple[str, str]] = []

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        self.asked.append(dict(sampling))
        return await self.toy.generate(input_ids, sampling)

    async def load_weights(self, folder: str, version: str) -> None:
        if not any(Path(folder).iterdir()):
            raise ConfigError(f"No model could be loaded from '{folder}'")
        self.loaded.append((folder, version))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(), out)
    return out


def with_server(engine: Toy, scenario: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ModelServer(engine, load=engine.load_weights) as server:
            await scenario(server.url)

    asyncio.run(main())


def test_a_chat_with_tools_through_our_own_client(folder: Path) -> None:
    engine = Toy(folder, itertools.cycle([CALL, "It is there."]))

    async def scenario(url: str) -> None:
        client = OpenAIEngine(APIServerConfig(base_url=url, model_name="toy"))
        await client.start()
        messages: list[JSON] = [{"role": "user", "content": "Where?"}]
        asked = await client.chat_completion(messages=messages, tools=[TOOL], temperature=0.5, max_tokens=99)
        (choice,) = asked.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "it"})
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "here"}]
        told = await client.chat_completion(messages=messages, tools=[TOOL])
        assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("It is there.", "stop")
        assert told.usage is not None
        assert told.usage.completion_tokens > 0
        await client.aclose()

    with_server(engine, scenario)
    assert (engine.asked[0]["temperature"], engine.asked[0]["max_tokens"]) == (0.5, 99)


def test_weights_are_reloaded_on_request(folder: Path, tmp_path: Path) -> None:
    engine = Toy(folder, itertools.repeat("hi"))

    async def update(url: str, **body: JSON) -> tuple[int, JSON]:
        address = f"{url}/update_weights_from_disk"
        async with aiohttp.ClientSession() as session, session.post(address, json=body) as reply:
            return reply.status, await reply.json()

    async def scenario(url: str) -> None:
        status, said = await update(url, model_path=str(folder), load_format="auto")
        assert (status, said["success"], said["weight_version"]) == (200, True, "1")
        assert (await update(url, model_path=str(folder), weight_version="step-7"))[1]["weight_version"] == "step-7"
        for wrong, why in ((tmp_path / "absent", "is not a folder"), (tmp_path, "No model could be loaded")):
            status, said = await update(url, model_path=str(wrong))
            assert (status, said["success"]) == (400, False)
            assert why in said["message"]
        assert (await update(url))[0] == 400

    with_server(engine, scenario)
    assert engine.loaded == [(str(folder), "1"), (str(folder), "step-7")]


@pytest.mark.torch
@needs_torch
def test_a_served_model_samples_with_the_weights_that_it_was_sent(tmp_path: Path) -> None:
    """The real command and real weights: after the reload the log-probabilities are those of the other model."""
    folders = [str(make_tiny(tmp_path / f"tiny-{seed}", seed=seed).path) for seed in (0, 1)]
    greedy = {"temperature": 0.0, "max_tokens": 4}

    async def sample(url: str) -> Sampled:
        async with contextlib.aclosing(SGLangEngine(APIServerConfig(base_url=url, model_name=folders[0]))) as engine:
            await engine.start()
            return await engine.generate([5, 6, 7], greedy)

    async def update(url: str) -> JSON:
        body = {"model_path": folders[1], "weight_version": "step-1"}
        address = f"{url}/update_weights_from_disk"
        async with aiohttp.ClientSession() as session, session.post(address, json=body) as reply:
            return await reply.json()

    def served(folder: str, scenario: Callable[[str], Coroutine[None, None, list[Sampled]]]) -> list[Sampled]:
        command = [sys.executable, "-m", "palaestra", "serve", "model", folder, "--port", "0", "--device", "cpu"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                return asyncio.run(scenario(server.stdout.readline().strip()))
            finally:
                server.terminate()

    async def before_and_after(url: str) -> list[Sampled]:
        before = await sample(url)
        assert (await update(url))["success"]
        return [before, await sample(url)]

    async def once(url: str) -> list[Sampled]:
        return [await sample(url)]

    before, after = served(folders[0], before_and_after)
    (fresh,) = served(folders[1], once)
    assert list(after.ids) == list(fresh.ids)
    assert after.logprobs == pytest.approx(fresh.logprobs)
    assert after.logprobs != pytest.approx(before.logprobs)
    assert after.policy_version == "step-1"


def test_a_streamed_reply_adds_up_to_the_whole_one(folder: Path) -> None:
    async def scenario(url: str) -> None:
        body = {"model": "toy", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "stream": True}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as reply:
            lines = (await reply.text()).strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        first, end, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
        assert first["choices"][0]["delta"]["content"] == "I look."
        assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert (end["choices"][0]["finish_reason"], usage["choices"]) == ("tool_calls", [])

    with_server(Toy(folder, itertools.repeat(CALL)), scenario)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "toy"}, "messages"),
        ([], "cannot be read"),
        (5, "cannot be read"),
        ({"messages": [{"role": "user", "content": "?"}], "tools": 5}, "cannot be read"),
        (b'{"messages": "\xff"}', "cannot be read"),
    ],
)
def test_what_cannot_be_answered_is_refused(folder: Path, body: JSON, said: str) -> None:
    async def scenario(url: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", data=data) as reply:
            assert reply.status == 400
            assert said in (await reply.json())["error"]["message"]

    with_server(Toy(folder, ["x"]), scenario)


def test_a_text_is_continued_through_our_own_client(folder: Path) -> None:
    engine = Toy(folder, itertools.repeat("and so on"))

    async def scenario(url: str) -> None:
        client = OpenAIEngine(APIServerConfig(base_url=url, model_name="toy"))
        told = await client.completion(prompt="One, two", max_tokens=99)
        assert (told.choices[0].text, told.choices[0].finish_reason) == ("and so on", "stop")
        assert told.usage is not None
        assert told.usage.prompt_tokens == len(engine.tokenizer.encode("One, two"))
        await client.aclose()

    with_server(engine, scenario)


def test_what_the_engine_refuses_reaches_the_client(folder: Path) -> None:
    class Refusing(Toy):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            raise EngineRefused("too warm")

    async def scenario(url: str) -> None:
        client = OpenAIEngine(APIServerConfig(base_url=url, model_name="toy", health_check=False))
        with pytest.raises(EngineRefused, match="too warm"):
            await client.chat_completion(messages=[{"role": "user", "content": "?"}])
        await client.aclose()

    with_server(Refusing(folder, ["x"]), scenario)


@pytest.mark.parametrize("wire", [OpenAIEngine, VLLMEngine, SGLangEngine])
def test_what_trying_again_may_change_and_a_full_window_are_told_apart(
    folder: Path, wire: Callable[..., OpenAIEngine | TokenServer]
) -> None:
    """The engine's own errors arrive as what they are on every wire."""
    failures = [EngineUnavailable("out of memory"), ContextExceeded("Model 'toy' has a window of 8 tokens.")]

    class Failing(Toy):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            raise failures.pop(0)

    engine = Failing(folder, [])

    async def scenario(url: str) -> None:
        client = wire(APIServerConfig(base_url=url, model_name="toy", tokenizer_name=str(folder)), clock=ManualClock())
        with raises(ContextExceeded):
            await client.chat_completion(messages=[{"role": "user", "content": "?"}])
        assert client.transport.retries == 1
        await client.aclose()

    with_server(engine, scenario)
    assert failures == []


def test_a_client_that_hangs_up_takes_its_request_back(folder: Path) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    class Slow(Toy):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    async def scenario(url: str) -> None:
        client = OpenAIEngine(APIServerConfig(base_url=url, model_name="toy"))
        asked = asyncio.create_task(client.chat_completion(messages=[{"role": "user", "content": "?"}]))
        await begun.wait()
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.wait_for(cancelled.wait(), 10)
        await client.aclose()

    with_server(Slow(folder, []), scenario)


def test_an_address_that_is_taken_is_one_clear_error(folder: Path) -> None:
    async def scenario(url: str) -> None:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            await ModelServer(Toy(folder, ["x"]), port=port).__aenter__()

    with_server(Toy(folder, ["x"]), scenario)


def test_doctor_checks_it_as_a_token_server(folder: Path) -> None:
    async def scenario(url: str) -> None:
        found = await diagnose(Target(url, model="toy", tokenizer=str(folder)))
        states = {check.name: check.state for check in found.checks}
        assert found.server == "vllm"
        assert states[TOKENS] == states[LOGPROBS] == CheckState.OK

    with_server(Toy(folder, itertools.repeat("word")), scenario)
