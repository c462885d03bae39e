"""Tasksets of verifiers in our runner, with rewards equal to those of verifiers itself on the same replies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed (make faces)")

import aiohttp
import verifiers.v1 as vf
from mcp import Client
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment as load_theirs
from verifiers.v1.utils.loaders import resolve_env_config

import palaestra
import tiny_model_runs
from palaestra import ConfigError
from palaestra.envs.discovery import load_environment
from palaestra_integrations.verifiers_tasks import verifiers_form
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots

CAPITALS = '''
import verifiers.v1 as vf
__all__ = ["Capitals"]

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    number: int = 2

class Capital(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.assistant_messages) == 1 and len(trace.last_reply) < 12)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns

class Capitals(vf.Taskset[Capital, Config]):
    """Capitals of countries."""
    def load(self):
        for country, answer in [("France", "Paris"), ("Peru", "Lima"), ("Fiji", "Suva")][: self.config.number]:
            data = Data(id=country, prompt=f"{country}?", system_prompt="One word.", answer=answer)
            yield Capital(data, self.config.task)
'''
SHOP = '''
import verifiers.v1 as vf
from pydantic import BaseModel
__all__ = ["Shop"]

class Basket(vf.State):
    total: int = 0

class Tools(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = "shop"
    async def setup_task(self, task):
        self.price = len(task.prompt)

    @vf.tool
    async def buy(self, count: int) -> str:
        """Buy so many pieces."""
        self.state.total += count * self.price
        return f"total {self.state.total}"

class Buying(vf.Task[vf.TaskData, Basket]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

    @vf.reward
    async def bought(self, trace) -> float:
        return trace.state.total / 100

class Shop(vf.Taskset[Buying, vf.TasksetConfig]):
    def load(self):
        yield Buying(vf.TaskData(prompt="Buy five."), self.config.task)

if __name__ == "__main__":
    Tools.run()
'''
FILES = """
import verifiers.v1 as vf
__all__ = ["Files"]

class Sorting(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("names.txt", b"b\\na\\n")

    async def finalize(self, trace, runtime):
        done = await runtime.run(["sh", "-c", "test -e sorted.txt; echo $? > code.txt"], {})
        assert done.exit_code == 0

    @vf.reward
    async def sorted_names(self, runtime) -> float:
        if (await runtime.read("code.txt")).strip() != b"0":
            return 0.0
        return float(await runtime.read("sorted.txt") == b"a\\nb\\n")

class Files(vf.Taskset[Sorting, vf.TasksetConfig]):
    def load(self):
        yield Sorting(vf.TaskData(prompt="Sort names.txt to sorted.txt."), self.config.task)
"""


def call(name: str, **arguments: Any) -> FakeAnswer:
    asked = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return FakeAnswer({**completion(None, "tool_calls", tool_calls=[asked]), "created": 1})


def said(text: str) -> FakeAnswer:
    return FakeAnswer({**completion(text), "created": 1})


class Loop(vf.Harness[vf.HarnessConfig]):
    """A harness in this process, with the tools of the task and a terminal: it plays what the server says."""

    SUPPORTS_MCP = True
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:  # fmt: skip
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session:
            while True:
                async with session.post(
                    f"{endpoint}/chat/completions", json={"model": "m", "messages": messages}
                ) as got:
                    message = (await got.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for each in message["tool_calls"]:
                    name, written = each["function"]["name"], each["function"]["arguments"]
                    try:
                        arguments = json.loads(written)
                    except ValueError:
                        name = ""
                    if name == "terminal":
                        text = (await runtime.run(["sh", "-c", arguments["command"]], {})).stdout
                    elif (server := next((key for key in mcp_urls if name.startswith(f"{key}_")), None)) is None:
                        text = f"unknown tool {name}"
                    else:
                        async with Client(mcp_urls[server]) as client:
                            done = await client.call_tool(name.removeprefix(f"{server}_"), arguments)
                            text = done.content[0].text
                    messages.append({"role": "tool", "tool_call_id": each["id"], "content": text})


def theirs(monkeypatch: pytest.MonkeyPatch, package: str, answers: Sequence[FakeAnswer], number: int = 0) -> Any:
    """The trace of verifiers' own run of one task."""
    module = ModuleType("loop_harness")
    module.__all__, module.Loop, module.__spec__ = ["Loop"], Loop, sys.modules[__name__].__spec__  # type: ignore
    monkeypatch.setitem(sys.modules, "loop_harness", module)

    async def main() -> Any:
        async with LoopbackServer(*answers) as server:
            config: EnvConfig = resolve_env_config(
                {
                    "taskset": {"id": package},
                    "agent": {
                        "harness": {"id": "loop_harness"},
                        "runtime": {"type": "subprocess"},
                        "retries": {"max_retries": 0},
                    },
                }
            )
            env = load_theirs(config)
            task = list(env.taskset)[number]
            async with env.serving():
                client = vf.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY")
                episode = await env.run_episode(
                    task, vf.ModelContext(model="m", client=client, sampling=vf.SamplingConfig())
                )
            assert not episode.errors, episode.errors
            (trace,) = episode.traces
            assert not trace.errors, trace.errors
            return trace

    return asyncio.run(main())


def ours(file: Path, folder: Path, answers: Sequence[FakeAnswer]) -> Any:
    """The rollout of our own run of the first task."""

    async def main() -> Any:
        async with LoopbackServer(*answers) as server:
            form = load_environment(f"verifiers:{file}", folder)
            return await palaestra.run(
                form.reference, tasks=1, base_url=f"{server.url}/v1", model="m", folder=folder, health_check=False
            )

    (rollout,) = asyncio.run(main()).trajectories
    return rollout


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("capitals_right", CAPITALS, [said("Paris")]),
        ("capitals_wrong", CAPITALS, [said("Lima")]),
        ("shop_buys", SHOP, [call("shop_buy", count=2), call("shop_buy", count=3), said("done")]),
        ("files_sorted", FILES, [call("terminal", command="sort names.txt > sorted.txt"), said("done")]),
        ("files_missing", FILES, [said("done")]),
    ],
)
def test_rewards_are_those_of_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, answers: list[FakeAnswer]
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the tool servers of verifiers
    trace = theirs(monkeypatch, name, answers)
    rollout = ours(tmp_path / f"{name}.py", tmp_path, answers)
    assert not rollout.error, rollout.error
    assert rollout.reward == pytest.approx(trace.reward)
    expected = {each: value.score for each, value in trace.rewards.items()} | trace.metrics
    assert {each: rollout.metrics[each] for each in expected} == expected


def as_answer(message: Mapping[str, Any]) -> FakeAnswer:
    calls = message.get("tool_calls")
    if not calls:
        return said(message.get("content") or "")
    return FakeAnswer({**completion(message.get("content"), "tool_calls", tool_calls=calls), "created": 1})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny_model_runs.TinyModel]:
    buys = [tiny_model_runs.call("shop_buy", count=each) for each in (1, 2, 3)]
    commands = ["sort names.txt > sorted.txt", "cat names.txt > sorted.txt"]
    called = [*buys, *(tiny_model_runs.call("terminal", command=each) for each in commands)]
    with tiny_model_runs.served(
        tmp_path_factory.mktemp("model"), ["Paris", "Lima", "Suva", "It is Paris.", "Done.", *called]
    ) as model:
        yield model


@pytest.mark.parametrize(("name", "text"), [("capitals", CAPITALS), ("shop", SHOP), ("files", FILES)])
def test_a_tiny_model_gets_the_rewards_of_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tiny_model_runs.TinyModel, name: str, text: str
) -> None:
    """Exact tokens in a run that is killed and resumed; its replies in verifiers' own runner."""
    file = tmp_path / f"{name}_tiny.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the tool servers of verifiers
    run = tiny_model_runs.killed_and_resumed(f"verifiers:{file}", tmp_path / "ours", tiny)
    rewards = []
    for number, group in enumerate(run.groups):
        for rollout in group.trajectories:
            trace = theirs(monkeypatch, file.stem, list(map(as_answer, tiny_model_runs.played(rollout))), number)
            assert rollout.reward == pytest.approx(trace.reward)
            expected = {each: value.score for each, value in trace.rewards.items()} | trace.metrics
            assert {each: rollout.metrics[each] for each in expected} == expected
            rewards.append(rollout.reward)
    tiny_model_runs.report(f"verifiers {name}", run, rewards)


NOTES = """
import verifiers.v1 as vf

__all__ = ["Notes"]


class Note(vf.Task[vf.TaskData]):
    @vf.reward
    async def written(self, trace, runtime) -> float:
        return float(await runtime.read("note.txt") == b"hello")


class Notes(vf.Taskset[Note]):
    def load(self):
        yield Note(vf.TaskData(idx=0, prompt="Write hello into note.txt"), self.config.task)
"""


def test_a_file_that_the_agent_did_not_leave_is_the_agents_fault(tmp_path: Path) -> None:
    """An agent that writes nothing must not get out of its score."""
    (tmp_path / "notes.py").write_text(NOTES)
    run = asyncio.run(palaestra.run(f"verifiers:{tmp_path / 'notes.py'}", policy="noop", folder=tmp_path))
    assert [each.reward for group in run.groups for each in group.trajectories] == [0.0]
    (tmp_path / "other.py").write_text(NOTES.replace('await runtime.read("note.txt")', 'open("/no/such", "rb").read()'))
    run = asyncio.run(palaestra.run(f"verifiers:{tmp_path / 'other.py'}", policy="noop", folder=tmp_path))
    assert [each.reward for group in run.groups for each in group.trajectories] == [None]


def test_a_run_that_is_killed_resumes(tmp_path: Path) -> None:
    (tmp_path / "capitals.py").write_text(CAPITALS.replace("number: int = 2", "number: int = 3"))

    async def main() -> None:
        gate = asyncio.Event()
        async with LoopbackServer(said("Paris"), said("Lima"), said("Suva")) as server:
            server.gate = gate
            words = [sys.executable, "-m", "palaestra", "run", "verifiers:capitals.py", "--concurrency", "1"]
            words += ["--base-url", f"{server.url}/v1", "--model", "m", "--openai.health_check", "false"]
            child = await asyncio.create_subprocess_exec(*words, cwd=tmp_path, stderr=subprocess.DEVNULL)
            await server.under_way(1)
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
            gate.set()
            (run,) = [path.parent for path in (tmp_path / "runs").glob("*/*/journal.jsonl")]
            again = [sys.executable, "-m", "palaestra", "resume", str(run)]
            child = await asyncio.create_subprocess_exec(*again, cwd=tmp_path, stdout=subprocess.PIPE)
            assert await child.wait() == 0
        groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
        assert len(groups) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("answer=answer)", "answer=answer, agent_user='me')", "agent_user"),
        ("answer=answer)", "answer=answer, image='x')", "set `image` to a root file system"),
        ("    @vf.metric\n", "    @vf.stop\n", "stop hook"),
        ('__all__ = ["Capitals"]', '__all__ = ["Capital"]', "exactly one Taskset in __all__"),
    ],
)
def test_what_cannot_be_carried_over_is_named(tmp_path: Path, before: str, after: str, named: str) -> None:
    assert before in CAPITALS
    file = tmp_path / f"wrong_{abs(hash(after))}.py"
    file.write_text(CAPITALS.replace(before, after, 1))
    with pytest.raises((ConfigError, palaestra.TaskError), match=named):
        asyncio.run(palaestra.run(f"verifiers:{file}", policy="noop", folder=tmp_path))


def test_an_unknown_taskset_is_named() -> None:
    with pytest.raises(ConfigError, match="verifiers finds no taskset 'no_such_set'"):
        verifiers_form("no_such_set")
