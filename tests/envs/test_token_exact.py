"""Class environments over a token-exact server, from settings to training rows; the server samples no model."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from palaestra.agent.result import AgentResult
from palaestra.envs.config.build import server_settings
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import run
from palaestra.rollouts.journal.verify import verify_run
from palaestra.rollouts.rollout import Rollout
from palaestra_contract import HermesAgentBaseEnv, HermesAgentLoop
from palaestra_contract.tool_context import ToolContext
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.parsers import get_parser
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

CALL = '<tool_call>\n{"name": "list_nothing", "arguments": {}}\n</tool_call>'


class Greeting(HermesAgentBaseEnv):
    """Two items; the reward is how many calls were answered. Its tools are those of the toolsets."""

    name = "greeting"
    seen: ClassVar[list[JSON]] = []

    async def setup(self) -> None:
        self.items = iter(["hello", "goodbye"])

    async def get_next_item(self) -> JSON:
        return next(self.items, None)

    def format_prompt(self, item: JSON) -> str:
        return f"Say {item}."

    async def compute_reward(self, item: JSON, result: AgentResult, ctx: ToolContext) -> float:
        return float(sum(message["role"] == "tool" for message in result.messages))

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        return None


class Chatting(Greeting):
    """Wants no tokens."""

    def _use_managed_server(self) -> bool:
        return False


class Masking(Greeting):
    """Trains less than was sampled."""

    def _build_scored_item(self, item: JSON, result: AgentResult, reward: float) -> dict[str, JSON]:
        built = super()._build_scored_item(item, result, reward)
        return {**built, "masks": [-100] * len(built["masks"]), "overrides": {"lr": 1}}


class OwnLoop(Greeting):
    """Makes its managed server itself, as scripts of the contract do."""

    async def _run_agent_loop(self, rollout: Rollout, messages: list[Message]) -> AgentResult:
        assert self.tokenizer is not None
        async with self.server.managed_server(
            tokenizer=self.tokenizer, tool_call_parser=get_parser("hermes")
        ) as managed:
            tools, names = self._resolve_tools_for_group()
            loop = HermesAgentLoop(
                server=managed,
                tool_schemas=tools,
                valid_tool_names=names,
                max_turns=self.config.max_agent_turns,
                task_id=rollout.rollout_id,
                tool_handler=rollout.tools.handle,
            )
            return await loop.run(messages)


class Renamed(Greeting):
    """Asks for a parser that there is not, in the contract's form of its own loop."""

    async def _run_agent_loop(
        self,
        task_id: str,
        tools: list[JSON],
        valid_names: set[str],
        messages: list[Message],
        tool_handler: JSON = None,
    ) -> AgentResult:
        async with self.server.managed_server(tokenizer=self.tokenizer, tool_call_parser="hermmes") as managed:
            loop = HermesAgentLoop(managed, tools, valid_names, max_turns=4, task_id=task_id)
            return await loop.run(messages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(), out)
    return out


def parsed(env: type[HermesAgentBaseEnv], argv: Sequence[str]) -> Parsed[HermesAgentEnvConfig, APIServerConfig]:
    form = form_of(env)
    line = CommandLine(
        prog="test",
        env_type=form.config_type(),
        server_type=APIServerConfig,
        env_values={},
        server_values=[],
        command="process",
        about="",
    ).parse(argv, {})
    assert isinstance(line, Parsed)
    return line


def lines_of(env: type[HermesAgentBaseEnv], folder: Path, out: Path, *argv: str, kind: str = "vllm") -> list[JSON]:
    """The groups of a run whose model calls a tool that is not there, and then answers."""

    async def scenario() -> None:
        tokenizer = load_tokenizer(str(folder))
        engine = ToyEngine(tokenizer, itertools.cycle([CALL, "Hello."]), rate=0.2)
        async with TokenLoopback(engine, tokenizer) as server:
            flags = {
                "--openai.server_type": kind,
                "--openai.base_url": server.url,
                "--openai.model_name": "toy",
                "--env.data_path_to_save_groups": str(out / "groups.jsonl"),
                "--env.total_steps": "2",
                "--env.group_size": "1",
                "--env.max_num_workers": "1",
                "--env.include_messages": "true",
            }
            line = parsed(env, ["process", *itertools.chain(*flags.items()), *argv])
            with (out / "log").open("w") as stream:
                report = await run(form_of(env), line, root=out / "runs", stream=stream)
            assert report.exit_code == 0, (out / "log").read_text()

    asyncio.run(scenario())
    return [json.loads(line) for line in (out / "groups.jsonl").read_text().splitlines()]


def journal_of(out: Path) -> Path:
    (found,) = out.glob("runs/*/*/journal.jsonl")
    return found


@pytest.mark.slots
def test_a_parser_that_there_is_not_is_hermes(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line, _) = lines_of(Renamed, folder, tmp_path, "--openai.tokenizer_name", str(folder))
    assert "'hermmes'" in caplog.text
    assert [message["role"] for message in line["messages"][0]] == ["user", "assistant", "tool", "assistant"]
    assert line["inference_logprobs"]


@pytest.mark.slots
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_class_environment_trains_what_was_sampled(folder: Path, tmp_path: Path, kind: str) -> None:
    lines = lines_of(Greeting, folder, tmp_path, "--env.tokenizer_name", str(folder), kind=kind)
    assert [line["token_source"] for line in lines] == ["engine", "engine"]
    assert all(len(line["inference_logprobs"][0]) == len(line["tokens"][0]) for line in lines)
    tokenizer = load_tokenizer(str(folder))
    for line in lines:
        trained = [mask for mask in line["masks"][0] if mask != -100]
        assert tokenizer.decode(trained) == f"{CALL}<|im_end|>Hello.<|im_end|>"
        assert [message["role"] for message in line["messages"][0]] == ["user", "assistant", "tool", "assistant"]
        assert line["scores"] == [1.0]
    verdict = verify_run(journal_of(tmp_path), tmp_path / "groups.jsonl")
    assert verdict.ok
    assert (verdict.rollouts, verdict.turns, verdict.rows) == (2, 4, 2)


@pytest.mark.slots
def test_an_environment_that_wants_no_tokens_gets_placeholders(folder: Path, tmp_path: Path) -> None:
    lines = lines_of(Chatting, folder, tmp_path, "--env.tokenizer_name", str(folder))
    assert [line["token_source"] for line in lines] == ["placeholder", "placeholder"]
    assert all(set(line["masks"][0]) <= {-100} for line in lines)
    with pytest.raises(ConfigError, match="no recorded tokens"):
        verify_run(journal_of(tmp_path))


@pytest.mark.slots
def test_a_row_that_the_environment_changed_is_labelled_so(folder: Path, tmp_path: Path) -> None:
    lines = lines_of(Masking, folder, tmp_path, "--openai.tokenizer_name", str(folder))
    assert [line["token_source"] for line in lines] == ["environment", "environment"]
    assert all(set(line["masks"][0]) == {-100} for line in lines)
    assert lines[0]["overrides"] == [{"lr": 1}]
    verdict = verify_run(journal_of(tmp_path))
    assert (verdict.ok, verdict.own_rows) == (True, 2)


@pytest.mark.slots
def test_a_loop_with_a_managed_server_of_its_own(folder: Path, tmp_path: Path) -> None:
    lines = lines_of(OwnLoop, folder, tmp_path, "--openai.tokenizer_name", str(folder))
    assert [line["token_source"] for line in lines] == ["engine", "engine"]
    assert verify_run(journal_of(tmp_path), tmp_path / "groups.jsonl").turns == 4


@pytest.mark.slots
def test_an_unknown_parser_ends_the_run_before_it_begins(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hermess"):
        lines_of(Greeting, folder, tmp_path, "--env.tokenizer_name", str(folder), "--env.tool_call_parser", "hermess")
    assert not (tmp_path / "runs").exists()


def test_what_the_environment_says_reaches_servers_that_do_not_say_it_themselves() -> None:
    servers = [
        APIServerConfig(server_type="vllm", base_url="http://a"),
        APIServerConfig(server_type="vllm", base_url="http://b", tokenizer_name="own", tool_parser="qwen"),
    ]
    told = server_settings(HermesAgentEnvConfig(tokenizer_name="theirs", tool_call_parser="glm45"), servers)
    assert [(server.tokenizer_name, server.tool_parser) for server in told] == [("theirs", "glm45"), ("own", "qwen")]
    untold = server_settings(HermesAgentEnvConfig(), servers)
    assert [(server.tokenizer_name, server.tool_parser) for server in untold] == [("none", "hermes"), ("own", "qwen")]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_text_is_continued_without_a_chat(folder: Path, kind: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    engine = ToyEngine(tokenizer, itertools.cycle(["four", "more words than that"]), rate=0.2)
    async with TokenLoopback(engine, tokenizer) as server:
        config = APIServerConfig(server_type=kind, base_url=server.url, model_name="toy", tokenizer_name=str(folder))
        group = ServerGroup([config])
        try:
            done = await group.completion(prompt="2 + 2 =", n=2, max_tokens=50, temperature=0.5)
        finally:
            await group.aclose()
    assert sorted(choice.text for choice in done.choices) == ["four", "more words than that"]
    assert {choice["finish_reason"] for choice in done.choices} == {"stop"}
    asked = [request.get("prompt") or request["input_ids"] for request in server.seen]
    assert [tokenizer.decode(ids) for ids in asked] == ["2 + 2 ="] * 2
