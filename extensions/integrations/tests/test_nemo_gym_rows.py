"""Rows of NeMo Gym in our runner, with rewards equal to those of its own agent on the same replies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import palaestra
import tiny_model_runs
from palaestra import ConfigError, TaskError
from palaestra.envs.discovery import load_environment
from palaestra_integrations.nemo_gym_rows import nemo_gym_form
from palaestra_slots.core.io.http_server import listening
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

Reply = tuple[str, dict[str, Any]] | str
"""What the model says: a call of a tool with its arguments, or a text."""
Replies = list[Reply] | list[Mapping[str, Any]]
"""Replies, or those of a rollout in OpenAI's format."""


def function(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": "", "strict": True, "parameters": parameters | required}


COUNT = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Add 1, add 2, then get the count."}],
        "tools": [function("increment_counter", count="integer"), function("get_counter_value")],
    },
    "initial_count": 3,
    "expected_count": 6,
}
PLAIN = {"responses_create_params": {"input": "Say hello."}, "initial_count": 1, "expected_count": 1}
ADDS: list[Reply] = [
    ("increment_counter", {"count": 1}),
    ("increment_counter", {"count": 2}),
    ("get_counter_value", {}),
    "The count is 6.",
]


class Counters:
    """A resources server with a counter for each session, as users write them."""

    def __init__(self, **verdict: Any) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self._verdict = verdict

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        for name in ("seed_session", "increment_counter", "get_counter_value", "long_answer", "verify"):
            app.router.add_post(f"/{name}", getattr(self, name))
        async with listening(app, "127.0.0.1", 0, shutdown_s=0.01) as url:
            yield url

    async def seed_session(self, request: web.Request) -> web.Response:
        assert "session" not in request.cookies
        name = f"s{len(self.counts)}"
        self.counts[name] = (await request.json())["initial_count"]
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def increment_counter(self, request: web.Request) -> web.Response:
        self.counts[request.cookies["session"]] += (await request.json())["count"]
        return web.json_response({"success": True})

    async def get_counter_value(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.counts[request.cookies["session"]]})

    async def long_answer(self, request: web.Request) -> web.Response:
        return web.Response(text="x" * (1 << 18))

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        reward = float(self.counts[request.cookies["session"]] == body["expected_count"])
        return web.json_response(body | {"reward": reward, "close": True} | self._verdict)


def chat(replies: Sequence[Reply]) -> list[FakeAnswer]:
    """The replies of a chat completions server."""
    answers = []
    for number, reply in enumerate(replies):
        if isinstance(reply, str):
            answers.append(FakeAnswer({**completion(reply), "created": 1}))
        else:
            named = {"name": reply[0], "arguments": json.dumps(reply[1])}
            calls = [{"id": f"c{number}", "type": "function", "function": named}]
            answers.append(FakeAnswer({**completion(None, "tool_calls", tool_calls=calls), "created": 1}))
    return answers


def file_of(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


async def played(file: Path, url: str, replies: Sequence[Reply], **settings: Any) -> Any:
    async with LoopbackServer(*chat(replies)) as server:
        form = load_environment(f"nemo-gym:{file}", file.parent)
        given = {"resources": url, "base_url": f"{server.url}/v1", "model": "m", "health_check": False}
        run = await palaestra.run(form.reference, folder=file.parent / "run", infra_retries=0, **given, **settings)
        return run, server.seen


@pytest.mark.parametrize(("replies", "reward"), [(ADDS, 1.0), ([ADDS[0], "Done."], 0.0)], ids=["right", "wrong"])
async def test_tools_share_the_session_and_the_server_gives_the_reward(
    tmp_path: Path, replies: list[Reply], reward: float
) -> None:
    counters = Counters()
    async with counters.serving() as url:
        run, _ = await played(file_of(tmp_path, COUNT), url, replies)
    (rollout,) = run.trajectories
    assert not rollout.error, rollout.error
    assert (rollout.reward, rollout.metrics["close"]) == (reward, 1.0)
    (body,) = counters.verified
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * (len(replies) - 1) + ["message"]
    assert json.loads(body["response"]["output"][1]["output"]) == {"success": True}


async def test_a_long_answer_arrives_whole(tmp_path: Path) -> None:
    counters = Counters()
    row = {**PLAIN, "responses_create_params": {"input": "Ask.", "tools": [function("long_answer")]}}
    async with counters.serving() as url:
        await played(file_of(tmp_path, row), url, [("long_answer", {}), "done"])
    answer = counters.verified[0]["response"]["output"][1]["output"]
    assert len(answer) == 1 << 18


async def test_each_row_offers_its_own_tools(tmp_path: Path) -> None:
    counters = Counters()
    async with counters.serving() as url:
        _, requests = await played(file_of(tmp_path, PLAIN, COUNT), url, ["hello", "nothing"])
    offered = [[tool["function"]["name"] for tool in request.body.get("tools", ())] for request in requests]
    assert offered == [[], ["increment_counter", "get_counter_value"]]
    assert [body["reward"] if "reward" in body else body["expected_count"] for body in counters.verified] == [1, 6]


@pytest.mark.parametrize(
    ("verdict", "named"),
    [
        ({"mask_sample": True, "failure_reason": "the judge is down"}, "the judge is down"),
        ({"reward": None}, "no reward"),
    ],
)
async def test_a_rollout_that_the_server_does_not_score_has_no_reward(
    tmp_path: Path, verdict: dict[str, Any], named: str
) -> None:
    async with Counters(**verdict).serving() as url:
        run, _ = await played(file_of(tmp_path, PLAIN), url, ["hello"])
    (rollout,) = run.trajectories
    assert rollout.reward is None
    assert named in rollout.error


async def test_without_a_server_the_rollout_has_no_reward_and_says_so(tmp_path: Path) -> None:
    run, _ = await played(file_of(tmp_path, PLAIN), "http://127.0.0.1:1", ["hello"])
    assert run.trajectories[0].reward is None
    assert "--env.resources" in run.trajectories[0].error


async def test_a_run_that_is_killed_resumes_with_a_new_session(tmp_path: Path) -> None:
    file_of(tmp_path, COUNT, COUNT)
    counters = Counters()
    async with counters.serving() as url, LoopbackServer(*chat([*ADDS, *ADDS])) as server:
        words = [sys.executable, "-m", "palaestra", "run", "nemo-gym:rows.jsonl", "--concurrency", "1"]
        words += ["--base-url", f"{server.url}/v1", "--model", "m", "--openai.health_check", "false"]
        server.gate = asyncio.Event()
        child = await asyncio.create_subprocess_exec(
            *words, "--env.resources", url, cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        await server.under_way(1)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        server.gate.set()
        (run,) = [path.parent for path in (tmp_path / "runs").glob("*/*/journal.jsonl")]
        again = [sys.executable, "-m", "palaestra", "resume", str(run)]
        child = await asyncio.create_subprocess_exec(*again, cwd=tmp_path, stdout=subprocess.PIPE)
        assert await child.wait() == 0
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    assert len(groups) == 2


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"input": "x", "tools": [function("verify")]}, "not the name of a function"),
        ({"input": "x", "tools": [function("a/../verify")]}, "not the name of a function"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "cannot be read|type 'web_search'"),
        ({"input": "x", "tool_choice": "required"}, "forces a tool"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "form of output"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "more than messages with text"),
        ({}, "is not a row of NeMo Gym"),
    ],
)
async def test_what_cannot_be_carried_over_is_named(tmp_path: Path, asked: dict[str, Any], named: str) -> None:
    file = file_of(tmp_path, {"responses_create_params": asked})
    with pytest.raises((ConfigError, TaskError), match=named):
        await palaestra.run(f"nemo-gym:{file}", policy="noop", resources="http://127.0.0.1:1", folder=tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        nemo_gym_form(str(tmp_path / "none.jsonl"))


# Beside NeMo Gym itself: two of its sets, played by its own agent and by ours


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[int]:
    """Serve an app in a thread, and yield its port."""
    import uvicorn

    taken = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield taken.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def output_items(reply: Reply | Mapping[str, Any]) -> list[dict[str, Any]]:
    """A reply as the Responses API has it."""
    if isinstance(reply, Mapping):
        text, calls = reply.get("content") or "", [each["function"] for each in reply.get("tool_calls") or ()]
    elif isinstance(reply, str):
        text, calls = reply, []
    else:
        text, calls = "", [{"name": reply[0], "arguments": json.dumps(reply[1])}]
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    called = [{"type": "function_call", "call_id": f"c{number}", **each} for number, each in enumerate(calls)]
    return [*([message] if text or not called else ()), *called]


def responses_app(replies: Replies) -> Any:
    """A model server with the Responses API that says these replies, and forgets them."""
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/v1/responses")
    async def responses() -> dict[str, Any]:
        about = {"id": "r", "created_at": 1.0, "model": "m", "object": "response", "parallel_tool_calls": True}
        return {**about, "tool_choice": "auto", "tools": [], "output": output_items(replies.pop(0))}

    return app


@contextmanager
def their_agent(resources: int, replies: Replies) -> Iterator[str]:
    """Serve NeMo Gym's own agent, and yield the address of its `/run`."""
    from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf
    from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

    known = {"agent": {"responses_api_agents": {"a": {"host": "127.0.0.1", "port": 0}}}}
    with served(responses_app(replies)) as model, free_port() as own:
        known["agent"]["responses_api_agents"]["a"]["port"] = own
        known["policy_model"] = {"responses_api_models": {"m": {"host": "127.0.0.1", "port": model}}}
        known["resources"] = {"resources_servers": {"r": {"host": "127.0.0.1", "port": resources}}}
        head = BaseServerConfig(host="127.0.0.1", port=1)
        agent = SimpleAgent(
            config=SimpleAgentConfig(
                host="127.0.0.1",
                port=own,
                entrypoint="app.py",
                name="agent",
                resources_server=ResourcesServerRef(type="resources_servers", name="resources"),
                model_server=ModelServerRef(type="responses_api_models", name="policy_model"),
            ),
            server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(known)),
        )
        with served(agent.setup_webserver(), own) as port:
            yield f"http://127.0.0.1:{port}/run"


@contextmanager
def free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    yield port


def their_set(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A resources server of the package and its example rows."""
    from importlib import import_module
    from unittest.mock import MagicMock

    from nemo_gym.server_utils import ServerClient

    module = import_module(f"resources_servers.{name}.app")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    config = next(kind for kind in kinds if kind.__name__.endswith("ResourcesServerConfig"))
    server = next(kind for kind in kinds if kind.__name__.endswith("ResourcesServer"))
    settings = config(host="127.0.0.1", port=1, entrypoint="app.py", name=name)
    app = server(config=settings, server_client=MagicMock(spec=ServerClient)).setup_webserver()
    text = Path(str(module.__file__)).with_name("data").joinpath("example.jsonl").read_text()
    return app, [json.loads(line) for line in text.splitlines()]


def synonyms(row: dict[str, Any], wrong: bool) -> list[Reply]:
    values = [sum(map(ord, word)) for word in row["expected_synonyms"]]
    asked: list[Reply] = [("get_synonym_value", {"synonym": word}) for word in row["expected_synonyms"]]
    return [*asked, ("extract_synonym_values", {"synonym_values": values[::-1] if wrong else values}), "done"]


def sums(row: dict[str, Any], wrong: bool) -> list[Reply]:
    left = row["expected_count"] - row["initial_count"] + wrong
    return [("increment_counter", {"count": left - 1}), ("increment_counter", {"count": 1}), "done"]


@pytest.mark.parametrize(("name", "replies"), [("example_multi_step", synonyms), ("example_session_state_mgmt", sums)])
def test_rewards_are_those_of_nemo_gym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replies: Any
) -> None:
    server_utils = pytest.importorskip("nemo_gym.server_utils", reason="nemo-gym is not installed (make faces)")
    import httpx

    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "{}")
    monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)  # it belongs to the event loop of an agent
    app, rows = their_set(name)
    theirs: list[Reply] = []
    with served(app) as port, their_agent(port, theirs) as address:
        for number, row in enumerate(rows[:3]):
            for wrong in (False, True):
                said, folder = replies(row, wrong), tmp_path / f"{number}-{wrong}"
                folder.mkdir()
                theirs[:] = said
                expected = httpx.post(address, json=row, timeout=60).raise_for_status().json()
                run, _ = asyncio.run(played(file_of(folder, row), f"http://127.0.0.1:{port}", said))
                (rollout,) = run.trajectories
                assert not rollout.error, rollout.error
                assert rollout.reward == expected["reward"] == float(not wrong)
                figures = {key: expected[key] for key in rollout.metrics if key in expected}
                assert {key: rollout.metrics[key] for key in figures} == figures


TINY_SETS = ("example_multi_step", "example_session_state_mgmt")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny_model_runs.TinyModel]:
    pytest.importorskip("nemo_gym.server_utils", reason="nemo-gym is not installed (make faces)")
    (words, *_), (counter, *_) = (their_set(name)[1] for name in TINY_SETS)
    add = "increment_counter", {"count": counter["expected_count"] - counter["initial_count"]}
    called = [tiny_model_runs.call(name, **arguments) for name, arguments in [synonyms(words, False)[-2], add]]
    said = [*called[:1] * 5, *called[1:] * 2, "Done.", "Ready."]
    with tiny_model_runs.served(tmp_path_factory.mktemp("model"), said) as model:
        yield model


@pytest.mark.parametrize("name", TINY_SETS)
def test_a_tiny_model_gets_the_rewards_of_nemo_gym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tiny_model_runs.TinyModel, name: str
) -> None:
    """Exact tokens in a run that is killed and resumed; its replies in the agent of NeMo Gym."""
    import httpx
    from nemo_gym import server_utils

    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "{}")
    monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)  # it belongs to the event loop of an agent
    app, rows = their_set(name)
    theirs: list[Mapping[str, Any]] = []
    rewards = []
    with served(app) as port, their_agent(port, theirs) as address:
        rows = rows[:1] * 2
        file = file_of(tmp_path, *rows)
        resources = "--env.resources", f"http://127.0.0.1:{port}"
        run = tiny_model_runs.killed_and_resumed(f"nemo-gym:{file}", tmp_path / "ours", tiny, *resources)
        for rollout in run.trajectories:
            theirs[:] = tiny_model_runs.played(rollout)
            answered = httpx.post(address, json=rows[int(rollout.task_id)], timeout=60).raise_for_status().json()
            assert not theirs
            assert rollout.reward == answered["reward"]
            figures = {key: answered[key] for key in rollout.metrics if key in answered}
            assert {key: rollout.metrics[key] for key in figures} == figures
            rewards.append(rollout.reward)
    tiny_model_runs.report(f"nemo-gym {name}", run, rewards)
