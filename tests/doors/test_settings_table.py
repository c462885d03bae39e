"""Every setting at every door: it works there, or one line refuses it (F5 of the design).

The rows come from the classes of the settings. A new setting fails the first test until the table has a row for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import aiohttp
import modal
import pytest
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.conftest import free_port
from gateway.echo_model import EchoModel
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.fields import BaseEnvConfig, HeldOutConfig
from palaestra.tools.settings import ToolSettings
from palaestra_chat.batch.prompts import BatchConfig
from palaestra_chat.config import OF_RUNS, ChatConfig, ChatOptions, chat_service, read_options
from palaestra_chat.store import ConversationStore
from palaestra_contract import AgentEnv, AgentEnvConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from palaestra_contract.contract_environment import OF_ROLLOUTS, plays_none
from palaestra_gateway.assembly import assembled
from palaestra_gateway.config import GatewayConfig
from palaestra_slots.core import config as core
from palaestra_slots.core.config import COMMAND_LINE, all_settings
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.registry import BUILTIN, is_of_backends
from palaestra_tokens import APIServerConfig
from sandbox.containers import docker
from sandbox.python_image import make_python_root
from sandbox.ssh_server import sshd
from stand_ins.fake_kubernetes import fake_kubernetes
from stand_ins.fake_modal import FakeModal
from stand_ins.fake_nomad import fake_nomad

CLASSES = (BaseEnvConfig, HermesAgentEnvConfig, AgentEnvConfig, HeldOutConfig, ToolSettings, ChatConfig, BatchConfig)
SETTINGS: Mapping[str, FieldInfo] = {name: field for cls in CLASSES for name, field in all_settings(cls).items()}
BACKENDS = tuple(name for name in BUILTIN if name != "docker_direct")

# What reads a setting, for the doors that play rollouts, and for conversations.
OF_TOOLS = frozenset(all_settings(ToolSettings)) - {"sessions_dir"}
OF_BACKENDS = frozenset(name for name in SETTINGS if is_of_backends(name)) - OF_RUNS
OF_CONVERSATIONS = frozenset({
    "acquire_timeout_s", "agent_temperature", "allow_network", "completion_price", "custom_thinking_prompt",
    "disabled_toolsets", "enabled_toolsets", "extra_body", "host_ports", "isolation", "max_agent_turns",
    "max_reasoning_tokens", "max_rollout_completion_tokens", "max_rollout_cost", "max_rollout_output_bytes",
    "max_rollout_tokens", "max_token_length", "mcp_servers", "prompt_price", "reasoning_effort", "require_sandbox",
    "slots", "strict_tools", "system_prompt", "terminal_backend", "terminal_timeout", "thinking_mode",
    "tokenizer_name", "tool_call_parser", "tool_pool_mode", "tool_pool_size",
})  # fmt: skip
OF_ENVIRONMENTS = frozenset(SETTINGS) - frozenset(all_settings(ChatConfig))
"""Settings of some classes of environments, which conversations do not know at all."""
ROWS = OF_TOOLS | OF_BACKENDS | OF_CONVERSATIONS | OF_RUNS | OF_ENVIRONMENTS | (
    frozenset(ChatConfig.model_fields) - frozenset(HermesAgentEnvConfig.model_fields)
)  # fmt: skip


def test_every_setting_has_one_row() -> None:
    assert frozenset(SETTINGS) - ROWS == set(), "say in the table what reads these settings"
    assert set() == (OF_TOOLS | OF_BACKENDS | OF_CONVERSATIONS) & OF_RUNS
    assert frozenset(all_settings(HermesAgentEnvConfig)) >= OF_RUNS
    assert frozenset(HermesAgentEnvConfig.model_fields) >= OF_ROLLOUTS


SPECIAL: Mapping[str, tuple[str, ...]] = {
    "agent": ("codex",),
    "backend_options": ('{"a": 1}',),
    "data_path_to_save_groups": ("groups.jsonl",),
    "distribution": ("default",),
    "eval_handling": ("NONE",),
    "graded_paths": ("/opt",),
    "idle_limits": ('{"setup": 5}',),
    "isolation": ("none",),
    "max_cost": ("1", "--env.prompt_price", "1", "--env.completion_price", "1"),
    "metrics_token": ("secret",),
    "on": ("processes:1",),
    "otel_endpoint": ("http://127.0.0.1:9",),
    "rollout_server_url": ("http://127.0.0.1:9",),
    "strict_labels": ("x", "--env.reward", "strict"),
    "world": ("live",),
}


def flag(name: str) -> list[str]:
    """A flag that gives the setting a value other than its default."""
    if name in SPECIAL:
        return [f"--env.{name}", *SPECIAL[name]]
    default, kinds = SETTINGS[name].default, _kinds(SETTINGS[name].annotation)
    if default is PydanticUndefined and SETTINGS[name].default_factory is not None:
        default = SETTINGS[name].get_default(call_default_factory=True)
    for kind in kinds:
        match kind:
            case _ if kind is bool:
                return [f"--env.{name}", str(default is not True).lower()]
            case _ if kind is int:
                return [f"--env.{name}", str(int(default or 0) + 1)]
            case _ if kind is float:
                return [f"--env.{name}", str(default / 2 if default else 1)]
            case str():
                if kind != default:
                    return [f"--env.{name}", kind]
            case _ if get_origin(kind) is list:
                return [f"--env.{name}", "1" if get_args(kind)[0] is int else "x"]
            case _ if get_origin(kind) is dict:
                return [f"--env.{name}", '{"local": 1}']
    return [f"--env.{name}", "x"]


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (list, dict):
        yield annotation
    elif hasattr(annotation, "__members__"):
        yield from annotation.__members__
    elif args := get_args(annotation):
        for each in args:
            yield from _kinds(each)
    elif annotation is not type(None):
        yield annotation


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("TERMINAL_ENV", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.mark.parametrize("name", sorted(OF_RUNS))
@pytest.mark.parametrize("program", ["palaestra chat", "palaestra acp"])
def test_conversations_refuse_the_settings_of_runs(name: str, program: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(flag(name), program)
    assert ("reward" if name == "strict_labels" else name) in str(refused.value)
    assert "\n" not in str(refused.value)


class Watched(ChatConfig):
    """Notes which settings are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in SETTINGS:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


@pytest.mark.slots
async def test_conversations_read_all_other_settings(tmp_path: Path) -> None:
    config = Watched(max_token_length=9, prompt_price=1, completion_price=1)
    READ.clear()
    servers = [APIServerConfig(server_type="scripted", model_name="noop")]
    with ConversationStore(tmp_path / "store.db") as store:
        async with chat_service(ChatOptions(config, servers), store) as service:
            service.registry(["terminal"])
    # `read_options` passes these two on to the servers, and only remote backends read the others
    elsewhere = {"tokenizer_name", "tool_call_parser", "tool_pool_size"} | OF_TOOLS | OF_BACKENDS
    assert OF_CONVERSATIONS - READ - elsewhere == set()
    # the functions that it shares with runs read these two, which change nothing there
    assert not READ & OF_RUNS - {"worker_timeout", "world"}, "a conversation reads a setting that it refuses"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cls", [HermesAgentEnvConfig, AgentEnvConfig, ChatConfig, BatchConfig, HeldOutConfig])
def test_every_door_checks_the_settings_of_its_backend(cls: type[HermesAgentEnvConfig], backend: str) -> None:
    other = "modal_gpu" if backend != "modal" else "docker_runtime"
    config = cls.model_validate({"tool_pool_mode": backend, "dataset_name": "prompts.jsonl", other: "x"})
    with pytest.raises(ConfigError, match=other):
        config.check_runnable({f"env.{other}": COMMAND_LINE})
    config.check_runnable({f"env.{other}": "a file"})  # a file may have the settings of several backends


class Own(HermesAgentBaseEnv):
    """Collects its rollouts itself."""

    async def setup(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return None

    def format_prompt(self, item: JSON) -> str:
        return ""

    async def compute_reward(self, item: JSON, result: JSON, ctx: JSON) -> float:
        return 0.0

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        return await self.collect_trajectory({})

    async def collect_trajectory(self, item: JSON) -> Any:
        return None, []


class OwnGroups(Own):
    async def collect_trajectories(self, item: JSON) -> Any:
        return [await self.collect_trajectory(item)], []


class Super(Own):
    async def collect_trajectory(self, item: JSON) -> Any:
        return await HermesAgentBaseEnv.collect_trajectory(self, item)


class Helped(Own):
    async def collect_trajectory(self, item: JSON) -> Any:
        return await self.helper(item)

    async def helper(self, item: JSON) -> Any:
        async def inner() -> Any:
            return await super(Own, self).collect_trajectory(item)

        return await inner()


class Histories(HermesAgentBaseEnv):
    async def postprocess_histories(self, trajectories: JSON) -> JSON:
        return trajectories


class Plain(AgentEnv[AgentEnvConfig]):
    pass


@pytest.mark.parametrize(
    ("cls", "none"),
    [(Own, True), (OwnGroups, True), (Super, False), (Helped, False), (Histories, False), (Plain, False)],
)
def test_what_a_class_plays_is_seen_in_its_code(cls: type[HermesAgentBaseEnv], none: bool) -> None:
    assert plays_none(cls) is none


@pytest.mark.parametrize("name", sorted(OF_ROLLOUTS))
@pytest.mark.parametrize("cls", [Own, OwnGroups])
def test_a_flow_of_its_own_refuses_the_settings_of_rollouts(name: str, cls: type[Own]) -> None:
    given: dict[str, JSON] = {"agent": "codex", "grading": "sealed", "graded_paths": ["/opt"], "graded_programs": ["x"]}
    config = HermesAgentEnvConfig.model_validate({"enabled_toolsets": ["terminal"], name: given.get(name, True)})
    environment = cls(config, [APIServerConfig()]).as_environment()
    with pytest.raises(ConfigError) as refused:
        asyncio.run(environment.open())
    assert cls.__name__ in str(refused.value)
    assert any(each in str(refused.value) for each in (name, "grading"))
    asyncio.run(environment.aclose())


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - set(GatewayConfig.model_fields)))
def test_a_gateway_refuses_the_settings_of_other_doors(name: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=name):
        GatewayConfig.model_validate({name: 1})


PLAIN = [
    "json.loads(handle_function_call('terminal', {'command': 'echo at $((6 * 7))'}, 't'))['output']",
    "json.loads(terminal_tool('echo at $((6 * 7))', task_id='t'))['output']",
    "ToolContext('t').terminal('echo at $((6 * 7))')['output']",
]


@pytest.mark.slots
@pytest.mark.parametrize("backend", ["docker", "ssh"])
def test_plain_python_has_its_slots_where_the_variables_say(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import palaestra_contract.tools.function_calls as calls
    from palaestra_contract import ToolContext, handle_function_call, process_registry
    from palaestra_contract.helpers.tool_functions import terminal_tool

    names = {
        "handle_function_call": handle_function_call,
        "json": json,
        "terminal_tool": terminal_tool,
        "ToolContext": ToolContext,
    }
    monkeypatch.setattr(calls, "_own", None)
    monkeypatch.setattr(calls, "_chosen", False)
    with place(backend, tmp_path, monkeypatch) as flags:
        monkeypatch.setenv("TERMINAL_ENV", backend)
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            monkeypatch.setenv(f"PALAESTRA_ENV_{name.removeprefix('--env.').upper()}", value)
        session = calls.default_session()
        try:
            assert {eval(way, names) for way in PLAIN} == {"at 42\n"}
            assert process_registry.list_sessions("t") == []
            assert backend in type(session._tasks.slots.backend).__name__.lower()
        finally:
            session.close()


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"TERMINAL_ENV": "dokcer"}, "'dokcer' is unknown"),
        ({"TERMINAL_TIMEOUT": "soon"}, "TERMINAL_TIMEOUT"),
        ({"PALAESTRA_ENV_TERMINAL_BACKEN": "docker"}, "PALAESTRA_ENV_TERMINAL_BACKEN sets nothing"),
        ({"PALAESTRA_ENV_ISOLATION": "none", "PALAESTRA_ENV_REQUIRE_SANDBOX": "true", "TERMINAL_TIMEOUT": "9"}, "none"),
    ],
)
def test_plain_python_refuses_variables_as_a_run_does(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import palaestra_contract.tools.function_calls as calls
    from palaestra_contract import handle_function_call

    monkeypatch.setattr(calls, "_own", None)
    monkeypatch.setattr(calls, "_chosen", False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PalaestraError, match=problem):
        handle_function_call("terminal", {"command": "true"})


@pytest.mark.parametrize(
    ("variable", "setting"), [("TERMINAL_LIFETIME_SECONDS", "terminal_lifetime"), ("TERMINAL_CWD", "terminal_cwd")]
)
@pytest.mark.parametrize("door", ["run", "eval", "batch", "chat"])
def test_a_variable_without_effect_is_reported(
    door: str, variable: str, setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "_WARNED", set())
    monkeypatch.setenv(variable, "1")
    Path("env.py").write_text(ENVIRONMENT)
    Path("prompts.jsonl").write_text('{"prompt": "go"}\n')
    main([*DOORS[door], "--policy", "noop", "--show-config"])
    (warning,) = [message for message in caplog.messages if setting in message]
    check_message(warning, setting)


@pytest.mark.slots
def test_plain_python_reads_the_time_limit_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import palaestra_contract.tools.function_calls as calls

    monkeypatch.setattr(calls, "_own", None)
    monkeypatch.setattr(calls, "_chosen", False)
    monkeypatch.setenv("TERMINAL_TIMEOUT", "1")
    session = calls.default_session()
    try:
        reply = json.loads(session.handle("terminal", {"command": "sleep 5; echo no"}))
        assert (reply["exit_code"], reply["output"]) == (124, "")
    finally:
        session.close()


def test_a_gateway_refuses_variables_that_choose_a_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERMINAL_ENV", "docker")
    assert main(["gateway", "--home", "home"]) == 2
    check_message(capsys.readouterr().err, "TERMINAL_ENV", "docker", "gateway.yaml")


# Settings that only some commands read, or that only change what another setting does.

UNREAD: Mapping[str, tuple[str, ...]] = {
    "run": (
        "data_dir_to_save_evals", "dataset_name", "dataset_split", "eval_handling", "eval_limit_ratio", "grading",
        "inference_weight", "live", "max_batches_offpolicy", "max_eval_workers",
        "metrics_host", "metrics_token", "min_batch_allocation", "otel_content", "prompt_field", "rollout_server_token",
        "rollout_server_url", "share_setup", "slot_prices", "tracker_project", "wandb_mode", "world_file", "world_miss",
    ),
    "eval": (
        "dataset_name", "dataset_split", "eval_handling", "eval_limit_ratio", "grading", "inference_weight", "live",
        "max_batches_offpolicy", "metrics_host", "metrics_token", "min_batch_allocation",
        "otel_content", "prompt_field", "rollout_server_token", "rollout_server_url", "share_setup", "slot_prices",
        "steps_per_eval", "timings_from", "tracker_project", "wandb_mode", "world_file", "world_miss",
    ),
    "batch": (
        "data_dir_to_save_evals", "eval_handling", "eval_limit_ratio", "graded_paths", "graded_programs", "grading",
        "inference_weight", "live", "max_batches_offpolicy", "max_eval_workers",
        "metrics_host", "metrics_token", "min_batch_allocation", "otel_content", "rollout_server_token",
        "rollout_server_url", "share_setup", "slot_prices", "steps_per_eval", "tracker_project", "wandb_mode",
        "world_file", "world_miss",
    ),
}  # fmt: skip
NEVER_READ = {"allow_placeholder_tokens", "num_rollouts_per_group_for_logging", "num_rollouts_to_keep", "wandb_name"}
"""Settings that code of environment classes, `feed` and trackers read."""


@pytest.mark.parametrize(("door", "name"), [(door, name) for door, names in UNREAD.items() for name in names])
def test_a_door_refuses_in_one_line_what_it_does_not_read(
    door: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("env.py").write_text(ENVIRONMENT)
    Path("prompts.jsonl").write_text('{"prompt": "go"}\n')
    assert main([*DOORS[door], "--policy", "noop", *flag(name)]) == 2
    *warnings, refusal = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"error: {name} (has|is) .+", refusal)
    assert all("on the command line" in line for line in warnings), "a secret there has a warning of its own"
    assert not Path("runs").exists()


@pytest.mark.slots
@pytest.mark.parametrize("door", UNREAD)
def test_a_door_reads_everything_else(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("env.py").write_text(ENVIRONMENT)
    Path("prompts.jsonl").write_text('{"prompt": "go"}\n')
    read: set[str] = set()
    found = BaseEnvConfig.__getattribute__

    def noted(self: Any, name: str) -> Any:
        if name in SETTINGS and sys._getframe(1).f_globals["__name__"].split(".")[0] != "pydantic":
            read.add(name)
        return found(self, name)

    monkeypatch.setattr(BaseEnvConfig, "__getattribute__", noted)
    given = ["--env.prompt_price", "1", "--env.completion_price", "1"]  # these two are read together
    given += ["--env.max_num_workers_per_node", "1"]  # read if it is set, as is the next one
    given += ["--env.max_eval_workers", "1"] if door == "eval" else []
    assert main([*DOORS[door], "--policy", "noop", *given]) == 0
    # The last two are of a named pool, in scripts, and of a tool, whose package is not loaded to read what nobody set.
    others = OF_BACKENDS | OF_TOOLS | OF_ENVIRONMENTS | NEVER_READ | {"tool_pool_size", "sessions_dir"}
    assert (OF_RUNS | OF_CONVERSATIONS) - read - others - set(UNREAD[door]) == set()


# What each setting does, played through every door and backend that runs here, against a model over HTTP.

DOORS: Mapping[str, tuple[str, ...]] = {
    "run": ("run", "env.py"),
    "eval": ("eval", "env.py"),
    "batch": ("batch", "prompts.jsonl"),
    "chat": ("chat", "-p", "go", "--yes"),
}
ENVIRONMENT = """
from palaestra import Task, environment

@environment
def played():
    yield Task(id="t", prompt="go")

@played.score
async def right(task, sandbox):
    return 1.0
"""
COMMANDS = ("cat /proc/net/dev; (exec 3<>/dev/tcp/127.0.0.1/9) 2>&1; true", "sleep 30", "seq 400 4000")


@dataclass
class Play:
    """A conversation: the exit code, the errors, and the requests that the model got."""

    rc: int
    err: str
    requests: list[JSON]

    @property
    def first(self) -> JSON:
        return self.requests[0]

    @property
    def tools(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.first.get("tools", ())}

    @property
    def system(self) -> str:
        return "".join(message["content"] for message in self.first["messages"] if message["role"] == "system")

    def reply(self, number: int) -> JSON:
        texts = [message["content"] for message in self.requests[1]["messages"] if message["role"] == "tool"]
        return json.loads(texts[number])


class Model(ThreadingHTTPServer):
    """A model server that calls the tool three times in its first reply, and then again and again until it is told to
    end. It reports 100 tokens of the prompt and 10 of the reply."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.requests: list[JSON] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Answers(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        ours = any(message["role"] == "user" and message["content"] == "go" for message in asked["messages"])
        if ours:
            self.server.requests.append(asked)
        calls = [
            {"id": f"c{turn}{n}", "type": "function", "function": {"name": "terminal", "arguments": json.dumps(a)}}
            for n, a in enumerate({"command": each} for each in (COMMANDS if turn == 0 else COMMANDS[:1]))
        ]
        message: JSON = {"role": "assistant", "content": None, "tool_calls": calls}
        if turn == 3 or not asked.get("tools") or not ours:  # doors try the server before they begin
            message = {"role": "assistant", "content": "done"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if not asked.get("stream"):
            self._send({"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage})
            return
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        chunks = [
            {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage},
        ]
        lines = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks)
        self._send(f"{lines}data: [DONE]\n\n".encode(), "text/event-stream")

    def _send(self, body: JSON, kind: str = "application/json") -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def play(door: str, *flags: str) -> Play:
    Path("env.py").write_text(ENVIRONMENT)
    Path("prompts.jsonl").write_text('{"prompt": "go"}\n')
    model, err = Model(), io.StringIO()
    threading.Thread(target=model.serve_forever, daemon=True).start()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            rc = main([*DOORS[door], "--openai.base_url", model.url, "--openai.model_name", "m", *flags])
    finally:
        model.shutdown()
        model.server_close()
    return Play(rc, err.getvalue(), model.requests)


SERVER = {
    "command": sys.executable,
    "args": [str(Path(__file__).parents[2] / "packages/palaestra/tests/tools/mcp/wrong_server.py"), "[]", "{}"],
}


def online(play: Play) -> bool:
    """Whether the first command saw a network. Levels without namespaces refuse sockets instead of hiding devices."""
    output = play.reply(0)["output"]
    return re.search(r"^ *(?!lo:)\w+:", output, re.M) is not None and "not supported" not in output


TOGETHER: Mapping[str, tuple[tuple[str, ...], Callable[[Play], object]]] = {
    "agent_temperature": (("0.25",), lambda play: play.first["temperature"] == 0.25),
    "allow_network": (("false",), lambda play: not online(play)),
    "custom_thinking_prompt": (("THINK FIRST",), lambda play: play.system.startswith("THINK FIRST")),
    "disabled_toolsets": (("file",), lambda play: "read_file" not in play.tools),
    "enabled_toolsets": (("terminal", "file"), lambda play: "terminal" in play.tools and "todo" not in play.tools),
    "extra_body": (('{"top_a": 0.5}',), lambda play: play.first["top_a"] == 0.5),
    "max_agent_turns": (("2",), lambda play: len(play.requests) == 2),
    "max_reasoning_tokens": (("33",), lambda play: play.first["reasoning"] == {"max_tokens": 33}),
    "max_token_length": (("77",), lambda play: 77 in play.first.values()),
    "mcp_servers": ((json.dumps({"w": SERVER}),), lambda play: "mcp_w_good" in play.tools),
    "reasoning_effort": (("low",), lambda play: play.first["reasoning_effort"] == "low"),
    "system_prompt": (("BE BRIEF",), lambda play: "BE BRIEF" in play.system),
    "terminal_timeout": (("1",), lambda play: play.reply(1)["exit_code"] == 124),
}  # fmt: skip
"""What can be seen in one conversation: values, and how they are seen in it."""

ALONE: Mapping[str, tuple[tuple[str, ...], Callable[[Play], object]]] = {
    "max_rollout_completion_tokens": (("15",), lambda play: len(play.requests) == 2),
    "max_rollout_cost": (
        ("0.0003", "--env.prompt_price", "1", "--env.completion_price", "10"),
        lambda play: len(play.requests) == 2,
    ),
    "max_rollout_output_bytes": (("5000",), lambda play: len(play.requests) == 1),
    "max_rollout_tokens": (("150",), lambda play: len(play.requests) == 2),
    "require_sandbox": (("true", "--env.isolation", "none"), lambda play: "or better is required" in play.err),
    "strict_tools": (("true", "--env.enabled_toolsets", "image_gen"), lambda play: "image_gen" in play.err),
    "thinking_mode": (("true",), lambda play: "<think>" in play.system),
}  # fmt: skip
ELSEWHERE: Mapping[str, str] = {
    "acquire_timeout_s": "test_pool.py",
    "completion_price": "max_rollout_cost",
    "host_ports": "test_port_forward.py, and refused by other backends",
    "isolation": "the parameter `backend`, and require_sandbox",
    "prompt_price": "max_rollout_cost",
    "slots": "test_pool.py",
    "terminal_backend": "the parameter `backend`",
    "tokenizer_name": "servers that continue token ids",
    "tool_call_parser": "servers that continue token ids",
    "tool_pool_mode": "the parameter `backend`",
    "tool_pool_size": "test_pool.py",
}


def test_what_each_setting_of_agents_does_is_played() -> None:
    assert set(TOGETHER) | set(ALONE) | set(ELSEWHERE) == OF_CONVERSATIONS


@contextlib.contextmanager
def place(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The settings that choose a backend of this machine."""
    if backend == "docker":
        with docker() as daemon:
            daemon.load(make_python_root(folder / "root"), "python:here")
            yield ["--env.docker_hosts", daemon.address, "--env.docker_image", "python:here"]
    elif backend == "ssh":
        with sshd(folder) as (options, _):
            program = folder / "bin" / "ssh"  # the real client, which need not know the host
            program.parent.mkdir()
            program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(options)} "$@"\n')
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
            yield ["--env.ssh_hosts", "127.0.0.1"]
    elif backend == "singularity":
        if shutil.which("apptainer") is None or os.geteuid() != 0:
            pytest.skip("needs root and apptainer")
        yield ["--env.singularity_image", str(make_python_root(folder / "root"))]
    elif backend == "nomad":
        with fake_nomad() as nomad:
            yield ["--env.nomad_address", nomad.url, "--env.driver", "raw_exec"]
    elif backend == "kubernetes":
        with fake_kubernetes() as cluster:
            monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig)
            yield ["--env.kubernetes_image", "python:3.11"]
    elif backend == "modal":
        with FakeModal() as fake:
            monkeypatch.setenv("MODAL_CONFIG_PATH", os.devnull)
            for name, value in fake.variables.items():
                monkeypatch.setenv(name, value)
            yield []
            modal.Client.from_env().close()  # the client is one for the process, and keeps the address
    elif backend != "local":
        yield ["--env.isolation", backend]
    else:
        yield []


@pytest.mark.slots
@pytest.mark.parametrize("backend", [*(each for each in BACKENDS if each != "slurm"), "userns", "confined", "none"])
def test_settings_do_the_same_in_every_door_and_backend(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_here = {name: seen for name, (_, seen) in TOGETHER.items()}
    together = [word for name, (words, _) in TOGETHER.items() for word in (f"--env.{name}", *words)]
    with place(backend, tmp_path, monkeypatch) as flags:
        for door in DOORS:
            if backend == "none":
                assert "allow_network false" in play(door, *flags, "--env.allow_network", "false").err
                together = [*together, "--env.allow_network", "true"]
                seen_here["allow_network"] = online
            name = backend if backend in BACKENDS else "local"
            played = play(door, "--env.tool_pool_mode", name, *flags, *together)
            wrong = [name for name, seen in seen_here.items() if not _seen(seen, played)]
            assert not wrong, f"{backend}, {door}: {wrong}: {played.err[-600:]}"


@pytest.mark.slots
@pytest.mark.parametrize("backend", ["docker", "ssh"])
async def test_a_gateways_sandboxes_are_where_it_says(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(settings: dict[str, JSON]) -> str:
        platforms = {"openai": {"token": "k", "extra": {"port": (port := free_port())}}}
        async with EchoModel().serving() as model, aiohttp.ClientSession() as client:
            server = {"base_url": model.url, "model_name": "m"}
            config = {"server": server, "platforms": platforms, "backend": backend, "backend_settings": settings}
            async with assembled(GatewayConfig.from_dict(config), tmp_path / "home") as gateway:
                assert backend in type(gateway.chat.pool.backend).__name__.lower()
                asked = {"model": "m", "messages": [{"role": "user", "content": "run echo $((6 * 7)) in $PWD"}]}
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with client.post(url, json=asked, headers={"Authorization": "Bearer k"}) as reply:
                    return str((await reply.json())["choices"][0]["message"]["content"])

    with place(backend, tmp_path, monkeypatch) as flags:
        words = [word.removeprefix("--env.") for word in flags]
        named = zip(words[::2], words[1::2], strict=True)
        settings = {name: [value] if name.endswith("_hosts") else value for name, value in named}
        assert "42 in /" in await answer(settings)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"backend": "dokcer"}, "unknown backend"),
        ({"backend_settings": {"docker_image": "x"}}, "set backend"),
        ({"backend": "docker", "backend_settings": {"docker_imag": "x"}}, "no setting docker_imag"),
        ({"backend": "docker", "backend_settings": {"ssh_hosts": ["x"]}}, "ssh_hosts"),
        ({"backend": "docker", "keep_sandboxes": True}, "keep_sandboxes"),
        ({"backend": "docker", "backend_settings": {"isolation": "none"}}, "no setting isolation"),
        ({"backend": "docker", "backend_settings": {"slots": 1}}, "no setting slots"),
        ({"backend": "docker", "backend_settings": {"workspace_store": "x"}}, "workspace_store"),
        ({"backend": "docker", "backend_settings": {"drain_file": "x"}}, "drain_file has no effect"),
        (
            {"backend": "kubernetes", "backend_settings": {"kubernetes_container": "x", "kubernetes_image": "a"}},
            "kubernetes_container has no effect",
        ),
        ({"isolation": "none", "network": "off"}, "network off has no effect"),
    ],
)
async def test_a_gateway_refuses_settings_of_other_backends(
    config: dict[str, JSON], problem: str, tmp_path: Path
) -> None:
    base = {
        "server": {"base_url": "http://127.0.0.1:9/v1"},
        # A token of its own, because a gateway refuses that of another one, which a test beside this may have started.
        "platforms": {"openai": {"token": str(tmp_path), "extra": {"port": 0}}},
    }
    with pytest.raises(ConfigError, match=problem):
        async with assembled(GatewayConfig.from_dict(base | config), tmp_path):
            pass


@pytest.mark.slots
@pytest.mark.parametrize("name", sorted(ALONE))
@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_setting_does_the_same_in_every_door(name: str, door: str) -> None:
    words, seen = ALONE[name]
    tools = () if name == "strict_tools" else ("--env.enabled_toolsets", "terminal", "--env.terminal_timeout", "1")
    played = play(door, *tools, f"--env.{name}", *words)
    assert _seen(seen, played), f"{len(played.requests)} requests: {played.err[-600:]}"


def _seen(seen: Callable[[Play], object], played: Play) -> bool:
    try:
        return bool(seen(played))
    except (IndexError, KeyError):
        return False
