"""An `AgentEnv` whose external tools run at a `palaestra serve tools`, which holds things for its rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from palaestra import ToolCall, ToolRegistry, tool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import run
from palaestra.tools.tool import Tool
from palaestra_contract import AgentEnv, AgentEnvConfig, ToolExecutor, ToolExecutorConfig, build_tool_registry
from palaestra_contract.exec_tool import ExecTool
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from sessions.asking import Client

SERVED = """
from pathlib import Path
from palaestra import ToolRun, tool

class Held:
    name = ""
    words = 0

    async def aclose(self):
        with Path(LOG).open("a") as log:
            log.write(f"{self.name} {self.words}\\n")

@tool(external=True)
async def hold(run: ToolRun, word: str) -> str:
    '''Hold a word.'''
    held = run.state(Held)
    held.name, held.words = run.task_id, held.words + 1
    return f"{held.words}: {word}"
"""


@tool(external=True)
async def hold(word: str) -> str:
    """Hold a word."""
    raise AssertionError("it runs at its server")


def holding(word: str) -> str:
    return f'<tool_call>{{"name": "hold", "arguments": {{"word": "{word}"}}}}</tool_call>'


class Holding(AgentEnv[AgentEnvConfig]):
    """Holds words at the server: the agent twice, and the check once more. `held` is what the server says meanwhile."""

    name = "holding"
    held: list[int]

    async def setup_agent_env(self) -> None:
        self.items = iter(["one", "two", "three"])
        self.held = type(self).held = []

    def own_tools(self) -> Sequence[Tool]:
        return [hold]

    async def get_next_item(self) -> JSON:
        return next(self.items, None)

    def build_task(self, item: JSON) -> str:
        return f"Hold {item}."

    async def score_trajectory(self, item: JSON, final_response: str) -> float:
        raise AssertionError("the verification replaces this")

    async def verify_and_score_trajectory(
        self, item: JSON, final_response: str, *, trajectory_id: str, exec_tool: ExecTool, **more: JSON
    ) -> tuple[float, dict[str, JSON]]:
        done = await exec_tool("hold", {"word": "check"})
        if self.config.world != "replay" and self.config.tool_server_token is None:
            async with Client(str(self.config.tool_server_url)) as client:
                self.held.append((await client.get("/health"))[1]["trajectories"])
        return float(done.output.endswith("check")), {"said": done.output}

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        said = [(await self.run_agent(f"Hold {item}."))[0] for item in ("one", "two")]
        await self.evaluate_log({"said": said})


class ByAddress(Holding):
    """Builds its registry from the address alone, as existing environments do."""

    def build_tools(self) -> ToolRegistry:
        url = self.config.tool_server_url
        return build_tool_registry(enabled_toolsets=["default"], tool_server_url=url, extra=[hold])


class ByPosition(Holding):
    def build_tools(self) -> ToolRegistry:
        return build_tool_registry(["default"], None, self.config.tool_server_url, [hold])


class ByMixing(Holding):
    """Adds tools of its own registry to the usual ones."""

    def build_tools(self) -> ToolRegistry:
        served = build_tool_registry(["todo"], tool_server_url=self.config.tool_server_url, extra=[hold])
        tools = [each for each in super().build_tools().tools() if served.get(each.name) is None]
        return ToolRegistry([*tools, *served.tools()])


class ByExecutor(Holding):
    """Replaces the tools once the run has begun."""

    async def setup_agent_env(self) -> None:
        await super().setup_agent_env()
        self.tools = build_tool_registry(["default"], tool_server_url=self.config.tool_server_url, extra=[hold])


class ByExecutorConfig(Holding):
    """Makes an executor with the address alone."""

    async def setup_agent_env(self) -> None:
        await super().setup_agent_env()
        config = ToolExecutorConfig(tool_server_url=self.config.tool_server_url)
        self._tool_executor = ToolExecutor(self._backend, ToolRegistry([hold]), config)
        done = await self._tool_executor.execute("own", ToolCall("hold", {"word": "own"}))
        assert done.output == "1: own", done


@pytest.fixture
def tool_server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The server, which says its address first."""
    path = tmp_path / "served.py"
    path.write_text(SERVED.replace("LOG", repr(str(tmp_path / "released"))))
    command = [sys.executable, "-m", "palaestra", "serve", "tools", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def parsed(argv: Sequence[str], cls: type[Holding]) -> Parsed[AgentEnvConfig, APIServerConfig]:
    form = form_of(cls)
    line = CommandLine(
        prog="test", env_type=form.config_type(), server_type=APIServerConfig, env_values={}, server_values=[],
        command=argv[0], about="",
    ).parse(argv, {})  # fmt: skip
    assert isinstance(line, Parsed)
    return line


def went(
    folder: Path,
    command: str,
    answers: Sequence[FakeAnswer],
    tool_server: str,
    *flags: str,
    cls: type[Holding] = Holding,
) -> list[JSON]:
    """Run a command of the environment; what the model server was asked."""

    async def main() -> list[JSON]:
        async with LoopbackServer(*answers) as server:
            argv = [
                *[command, "--openai.base_url", f"{server.url}/v1", "--env.tool_server_url", tool_server],
                *["--env.group_size", "1", "--env.max_num_workers", "1", "--env.total_steps", "3"],
                *["--env.agent_max_steps", "3", "--env.infra_retries", "0", "--env.use_wandb", "false"],
                *["--env.ensure_scores_are_not_same", "false", "--env.tool_pool_mode", "local"],
                *["--env.data_dir_to_save_evals", str(folder), *flags],
            ]
            with (folder / "log").open("w") as stream:
                await run(form_of(cls), parsed(argv, cls), root=folder / "runs", stream=stream)
            return [each.body for each in server.seen if each.method == "POST"]

    folder.mkdir()
    return asyncio.run(main())


def played(folder: Path, answers: Sequence[FakeAnswer], tool_server: str, *flags: str) -> list[JSON]:
    """The rollouts of a run, in order."""
    saved = str(folder / "groups.jsonl")
    went(folder, "process", answers, tool_server, "--env.data_path_to_save_groups", saved, *flags)
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    return [rollout for group in groups for rollout in group["rollouts"]]


@pytest.mark.slots
@pytest.mark.parametrize("cls", [Holding, ByAddress, ByPosition, ByMixing, ByExecutor, ByExecutorConfig])
def test_the_token_is_sent_however_the_tools_are_made(tmp_path: Path, cls: type[Holding]) -> None:
    served = tmp_path / "served.py"
    served.write_text(SERVED.replace("LOG", repr(str(tmp_path / "released"))))
    command = [sys.executable, "-m", "palaestra", "serve", "tools", str(served), "--port", "0"]
    environ = {**os.environ, "TOOL_SERVER_TOKEN": "sesame"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            answers = [FakeAnswer(completion(text)) for text in (holding("a"), "Held.")]
            flags = ["--env.tool_server_token", "sesame", "--env.total_steps", "1"]
            asked = went(tmp_path / "run", "process", answers, url, *flags, cls=cls)
            assert "1: a" in asked[1]["messages"][-1]["content"]
        finally:
            server.terminate()


def health(url: str) -> JSON:
    async def main() -> JSON:
        async with Client(url) as client:
            return (await client.get("/health"))[1]

    return asyncio.run(main())


@pytest.mark.slots
def test_the_server_lets_go_of_a_rollout_that_has_ended_however_it_did(
    tmp_path: Path, tool_server: subprocess.Popen[str]
) -> None:
    """One ends by itself, one at its step limit, one because its model server failed. Played, the server is gone."""
    assert tool_server.stdout is not None
    url = tool_server.stdout.readline().strip()
    natural, limit = [holding("a"), holding("b"), "Held."], [holding("c")] * 3
    answers = [FakeAnswer(completion(text)) for text in (*natural, *limit, holding("d"), holding("e"))]
    answers.append(FakeAnswer({"error": "no"}, status=400))
    rollouts = played(tmp_path / "first", answers, url)
    outcomes = [each["outcome"] for each in rollouts]
    assert outcomes == ["natural", "max_turns"], (tmp_path / "first/log").read_text()
    assert [each["detail"]["said"] for each in rollouts] == ["1: check"] * 2
    assert Holding.held == [2, 2]  # the agent's and the check's; nothing of the rollouts before
    assert health(url)["trajectories"] == 0
    released = [line.split() for line in (tmp_path / "released").read_text().splitlines()]
    assert sorted(released) == [
        ["000000-item-0/0", "2"], ["000000-item-0/0:grade", "1"],
        ["000001-item-1/0", "3"], ["000001-item-1/0:grade", "1"],
        ["000002-item-2/0", "2"],
    ]  # fmt: skip

    tool_server.terminate()
    tool_server.wait()
    (recording,) = (tmp_path / "first").glob("runs/**/world.jsonl")
    again = played(tmp_path / "again", answers, url, "--env.world", "replay", "--env.world_file", str(recording))
    assert [(each["outcome"], each["reward"], each["detail"]) for each in again] == [
        (each["outcome"], each["reward"], each["detail"]) for each in rollouts
    ]


@pytest.mark.slots
def test_an_agent_outside_of_rollouts_is_recorded_and_played_too(
    tmp_path: Path, tool_server: subprocess.Popen[str]
) -> None:
    assert tool_server.stdout is not None
    url = tool_server.stdout.readline().strip()
    answers = [FakeAnswer(completion(text)) for text in (holding("a"), holding("a"), "Two.", holding("b"), "One.")]
    asked = went(tmp_path / "first", "evaluate", answers, url)
    found = json.loads((tmp_path / "first/metrics.json").read_text())["results"]["all"]
    assert found == {"said": ["Two.", "One."]}
    assert "2: a" in asked[2]["messages"][-1]["content"]
    assert health(url)["trajectories"] == 0
    tool_server.terminate()
    tool_server.wait()
    (recording,) = (tmp_path / "first").glob("runs/**/world.jsonl")
    flags = ["--env.world", "replay", "--env.world_file", str(recording)]
    assert went(tmp_path / "again", "evaluate", answers, url, *flags) == asked
