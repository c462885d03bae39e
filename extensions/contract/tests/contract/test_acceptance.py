"""The names that existing users of Atropos and Hermes depend on, each imported by its old path, and what they do here.
One test per component."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from golden_messages import check_message, raises
from palaestra.envs.discovery import CONTRACT_ROOTS, load_environment
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.parsers import registry

TERMINAL = "tools.terminal_tool"


@pytest.fixture(scope="module", autouse=True)
def old_modules() -> Iterator[None]:
    """Let this module's tests import the old modules, and no others. They would find the folders of this repository,
    which have some of the same names."""
    path, here = sys.path[:], Path(__file__).parents[4]
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in CONTRACT_ROOTS}
    sys.path[:] = [each for each in path if Path(each).absolute() not in (here, here / "tests")]
    compat = import_module("palaestra_contract.old_modules")
    compat.install()
    for name in known:
        del sys.modules[name]
    yield
    sys.meta_path.remove(compat._FINDER)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] in CONTRACT_ROOTS]:
        del sys.modules[name]
    sys.modules.update(known)


def old(module: str, name: str) -> Any:
    """What `from MODULE import NAME` gives an existing script."""
    return getattr(import_module(module), name)


@pytest.fixture
def task() -> Iterator[str]:
    """A task whose slot ends with the test."""
    yield "acceptance"
    old(TERMINAL, "cleanup_vm")("acceptance")


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Answers:
    """A server that calls tools once, with objects or dicts as the calls, and then answers."""

    def __init__(self, *calls: object) -> None:
        self.calls, self.asked = list(calls), 0

    async def chat_completion(self, **request: JSON) -> object:
        self.asked += 1
        message: dict[str, object] = {"role": "assistant", "content": "done", "reasoning_content": "I add."}
        if self.asked == 1:
            message |= {"content": None, "tool_calls": self.calls}
        finish = "tool_calls" if self.asked == 1 else "stop"
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": None}


def a_call(name: str, arguments: str) -> dict[str, JSON]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_agent_loop() -> None:
    """`HermesAgentLoop`, its parameters, the `tool_handler` and the fields of `AgentResult` and `ToolError`."""
    loop_type = old("environments.agent_loop", "HermesAgentLoop")
    as_object = SimpleNamespace(
        id="id-object", type="function", function=SimpleNamespace(name="add", arguments='{"a": 1}')
    )
    server = Answers(as_object, a_call("fly", "{}"), a_call("add", "[1]"), a_call("memory", "{}"))
    ran: list[tuple[str, JSON, str | None]] = []

    async def handle(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
        ran.append((name, dict(arguments), task_id))
        return '{"sum": 1}'

    budget = old("environments.hermes_base_env", "HermesAgentEnvConfig")(turn_budget_chars=7).build_budget_config()
    assert (budget.turn_budget, budget.default_result_size, budget.tool_overrides) == (7, 100_000, {})
    loop = loop_type(
        server=server,
        tool_schemas=[ADD],
        valid_tool_names={"add", "memory"},
        max_turns=5,
        task_id="t",
        temperature=0.5,
        max_tokens=9,
        extra_body={"x": 1},
        tool_handler=handle,
        max_context_tokens=1000,
        budget_config=budget,
    )
    messages = [{"role": "user", "content": "Add."}]
    result = await loop.run(messages)
    assert isinstance(result, old("environments.agent_loop", "AgentResult"))
    assert result.messages is messages  # changed in place
    assert ran == [("add", {"a": 1}, "t")]
    told = [json.loads(each["content"]) for each in messages if each["role"] == "tool"]
    assert told[0] == {"sum": 1}
    assert told[1]["error"].startswith("Unknown tool 'fly'. Available tools: ['add', 'memory']")
    assert "error" in told[2]  # arguments that are no object are never run
    check_message(told[3]["error"], "RL")
    assert messages[1]["reasoning_content"] == "I add."
    assert (result.turns_used, result.finished_naturally, result.managed_state) == (2, True, None)
    assert result.reasoning_per_turn == ["I add.", "I add."]
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid) == (4, 2)
    assert {each.tool_name for each in result.tool_errors} >= {"fly", "add"}
    assert {"turn", "tool_name", "arguments", "error", "tool_result"} <= vars(result.tool_errors[0]).keys()
    old("environments.agent_loop", "resize_tool_pool")(128)
    old("environments.agent_loop", "_tool_executor").shutdown(wait=False, cancel_futures=True)
    old("environments.patches", "apply_patches")()


async def test_tools_and_toolsets() -> None:
    """`model_tools`, `toolsets`, `toolset_distributions` and the wire types of `atropos.tools`."""
    defined = old("model_tools", "get_tool_definitions")(["terminal_tools", "file"], ["file"], quiet_mode=True)
    assert [each["function"]["name"] for each in defined] == ["terminal", "process"]
    assert old("model_tools", "TOOL_TO_TOOLSET_MAP")["read_file"] == "file"
    assert old("model_tools", "get_toolset_for_tool")("patch") == "file"
    assert "web" in old("model_tools", "TOOLSET_REQUIREMENTS")
    assert "terminal" in old("model_tools", "get_all_tool_names")()
    assert old("model_tools", "check_toolset_requirements")()["terminal"] is True
    assert old("toolsets", "resolve_toolset")("terminal") == ["terminal", "process"]
    assert "rl" in old("toolsets", "TOOLSETS")
    drawn = old("toolset_distributions", "sample_toolsets_from_distribution")("terminal_only")
    assert sorted(drawn) == ["file", "terminal"]
    assert len(old("toolset_distributions", "list_distributions")()) == 17
    call_type, result_type = old("atropos.tools", "ToolCall"), old("atropos.tools", "ToolResult")
    (call,) = call_type.parse_from_text('<tool_call>{"name": "add", "arguments": {"a": 1}}')
    assert (call.name, call.arguments) == ("add", {"a": 1})
    xml = result_type(True, "3", uniq_id=call.uniq_id).to_xml()
    assert xml.startswith("<tool_response>")
    assert result_type(False, error="no").to_dict()["error"] == "no"
    schema = old("atropos.tools.base", "ToolSchema")("add", "Add.", {"a": {"type": "integer"}}, ["a"])
    assert schema.to_dict()["function"]["name"] == "add"
    assert "add" in schema.to_prompt_description()

    class Add(old("atropos.tools.base", "Tool")):  # type: ignore[misc]
        @property
        def schema(self) -> Any:
            return schema

        async def execute(self, a: int = 0) -> Any:
            return result_type(True, str(a + 1))

    registry = old("atropos.tools", "ToolRegistry")()
    registry.register(Add())
    assert registry.list_tools() == ["add"]
    assert (await registry.execute(call)).output == "2"
    assert Add().is_available() == (True, None)
    assert old("atropos.tools", "build_tool_registry")(["terminal"], None, tool_server_url=None).get("terminal")


NAMES = """hermes longcat mistral llama3_json llama4_json qwen qwen3_coder deepseek_v3 deepseek_v3_1 deepseek_v31
    kimi_k2 glm45 glm47"""


def test_tool_call_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_parser(NAME).parse(TEXT)` for all eleven formats, and parsers that users register."""
    get, register = (old("environments.tool_call_parsers", name) for name in ("get_parser", "register_parser"))
    assert set(NAMES.split()) <= set(old("environments.tool_call_parsers", "list_parsers")()) | {"deepseek_v31"}
    for name in NAMES.split():
        assert tuple(get(name).parse("plain text")) == ("plain text", None)
    assert isinstance(get("hermes"), old("environments.tool_call_parsers", "ToolCallParser"))
    assert isinstance(get("hermes").parse(""), old("environments.tool_call_parsers", "ParseResult"))
    content, calls = get("hermes").parse('Now. <tool_call>{"name": "add", "arguments": {"a": 1}}')
    assert content.strip() == "Now."
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("add", {"a": 1})

    monkeypatch.setattr(registry, "_registered", {})

    @register("acceptance")
    class Shouting(old("environments.tool_call_parsers", "ToolCallParser")):  # type: ignore[misc]
        def parse(self, text: str) -> tuple[str | None, list[JSON] | None]:
            return text.upper(), None

    assert get("acceptance").parse("a") == ("A", None)


def test_token_exact_server() -> None:
    """`self.server.managed_server(...)` with the parser parameters of both versions, and its `get_state()`."""
    from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer

    manager = old("atroposlib.envs.server_handling.server_manager", "ServerManager")
    config = old("atroposlib.envs.base", "APIServerConfig")
    tokenizer = toy_tokenizer(["Hello there."])
    samples = ToyEngine(tokenizer, itertools.repeat("Hello."))
    engine = old("palaestra", "FunctionEngine")(samples.generate, model="toy")
    for options in ({"tool_call_parser": "hermes"}, {"tool_parser": "hermes"}, {"preserve_think_blocks": True}):

        async def play(options: dict[str, JSON] = options) -> None:
            async with engine.managed_server(tokenizer=tokenizer, engine=samples, **options) as managed:
                await managed.chat_completion(messages=[{"role": "user", "content": "Hello there."}])
                node = managed.get_state()["nodes"][-1]
            assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
            assert "Hello." in node.full_text

        asyncio.run(play())

    async def through_the_adapter() -> None:
        async with engine.managed_server(tokenizer=tokenizer, engine=samples) as managed:
            client = old("atroposlib.envs.server_handling.managed_server", "ManagedServerAdapter")(
                managed, "http://x/v1"
            )
            reply = await client.chat.completions.create(messages=[{"role": "user", "content": "Hello there."}])
            assert reply.choices[0].message.content == "Hello."
            await client.completions.create(prompt="Hello there.")
            assert len(managed.get_state()["nodes"]) == 2
            with pytest.raises(NotImplementedError, match="no endpoint /tokenize"):
                await client.post("/tokenize", {}, dict)

    asyncio.run(through_the_adapter())
    group = manager([config(model_name="m", server_type="openai", base_url="http://127.0.0.1:9/v1")])
    with raises(NotImplementedError):
        group.managed_server(tokenizer=None)
    assert isinstance(group.servers[0], old("atroposlib.envs.server_handling.openai_server", "OpenAIServer"))


@pytest.mark.slots
def test_tool_context(task: str, tmp_path: Path) -> None:
    """`ToolContext(TASK)` with all its methods, also outside an event loop."""
    context = old("environments.tool_context", "ToolContext")(task)
    assert context.write_file("a b.txt", "one\n")["bytes_written"] == 4
    assert context.terminal("cat 'a b.txt'", timeout=9) == {"exit_code": 0, "output": "one\n", "error": None}
    assert context.read_file("a b.txt")["content"] == "one\n"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x.bin").write_bytes(b"\0\1")
    assert context.upload_file(str(tmp_path / "there" / "x.bin"), "x.bin")["success"]
    assert [each["exit_code"] for each in context.upload_dir(str(tmp_path / "there"), "folder")] == [0]
    downloaded = context.download_file("x.bin", str(tmp_path / "y.bin"))
    assert (downloaded["success"], downloaded["bytes"]) == (True, 2)
    assert [each["success"] for each in context.download_dir("folder", str(tmp_path / "back"))] == [True]
    assert (tmp_path / "back" / "x.bin").read_bytes() == b"\0\1"
    assert "a b.txt" in json.dumps(context.search("one"))
    assert "one" in context.call_tool("read_file", {"path": "a b.txt"})
    for name in ("web_search", "web_extract", "browser_navigate", "browser_snapshot", "cleanup"):
        assert callable(getattr(context, name))


def test_hermes_base_env() -> None:
    """`HermesAgentBaseEnv`: settings with their defaults, the five required methods, hooks and methods to override."""
    base, config = (old("environments.hermes_base_env", f"HermesAgent{name}") for name in ("BaseEnv", "EnvConfig"))
    abstract = {"setup", "get_next_item", "format_prompt", "compute_reward", "evaluate"}
    assert base.__abstractmethods__ == abstract
    hooks = """setup_trajectory_workspace verify_and_score_trajectory _run_agent_loop _build_scored_item
        _resolve_tools_for_group _use_managed_server _use_sandbox_backend _collect_trajectory_local wandb_log
        _collect_trajectory_sandbox _format_trajectory_for_display add_rollouts_for_wandb collect_trajectory
        collect_trajectories _start_tool_backend _stop_tool_backend config_init cli create_rollout_table
        env_manager process_manager"""
    assert [name for name in hooks.split() if not callable(getattr(base, name, None))] == []
    expected = {
        "enabled_toolsets": None, "disabled_toolsets": None, "distribution": None, "max_agent_turns": 30,
        "system_prompt": None, "agent_temperature": 1.0, "terminal_backend": "local", "terminal_timeout": 120,
        "terminal_lifetime": 3600, "dataset_name": None, "dataset_split": "train", "prompt_field": "prompt",
        "tool_pool_size": 128, "tool_call_parser": "hermes", "extra_body": None, "tool_pool_mode": "default",
        "allow_network": True, "require_sandbox": False, "purge_job_on_start": False, "purge_job_on_shutdown": True,
        "acquire_timeout_s": 30, "nomad_address": "http://localhost:4646", "sandbox_job_id": "atropos-sandbox",
        "sandbox_image": "atropos-sandbox:local", "slots_per_container": 10, "min_containers": 1,
        "max_containers": 10, "privileged": False, "driver": "docker", "singularity_image": None,
        "modal_app_name": "atropos-sandbox", "modal_image": "python:3.11", "modal_gpu": None, "modal_cpu": 1.0,
        "modal_memory": 2048, "modal_slots_per_sandbox": 10, "modal_min_sandboxes": 1, "modal_max_sandboxes": 5,
        "modal_idle_timeout": 120, "modal_max_lifetime": 3600, "modal_acquire_timeout": 60,
        "modal_execution_timeout": 30, "modal_secrets": "", "modal_env_vars": "", "modal_workspace_base": "/data",
        "default_result_size_chars": 100_000, "turn_budget_chars": 200_000, "preview_size_chars": 1_500,
        "tool_result_overrides": None, "batch_size": -1, "group_size": 4, "steps_per_eval": 100, "total_steps": 1000,
        "max_token_length": 2048, "worker_timeout": 600, "ensure_scores_are_not_same": True, "use_wandb": True,
        "rollout_server_url": "http://localhost:8000", "include_messages": False, "data_path_to_save_groups": None,
    }  # fmt: skip
    assert {name: getattr(config(), name) for name in expected} == expected


def test_agent_env() -> None:
    """`AgentEnv`: settings with their defaults, and the methods that subclasses define and call."""
    base, config = old("atropos.envs.agent_env", "AgentEnv"), old("atropos.envs.agent_env", "AgentEnvConfig")()
    expected = {
        "allow_network": True, "require_sandbox": False, "require_stateful_sandbox": False,
        "tool_batch_window_ms": 20, "tool_max_batch_size": 200, "sandbox_job_id": "atropos-sandbox-agent-env",
        "agent_max_steps": 50, "agent_temperature": 0.7, "agent_max_tokens": None, "agent_tool_delay_s": 0.0,
        "enabled_toolsets": ["default"], "disabled_toolsets": [], "tool_server_url": None, "tool_server_token": None,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.tool_pool_mode == "default"  # there, `nomad`: sandboxes on this machine need no cluster
    required = {"build_task", "score_trajectory", "setup_agent_env", "get_next_item"}
    assert base.__abstractmethods__ == required
    hooks = """setup_trajectory_workspace verify_and_score_trajectory build_tools build_agent_config run_agent setup
        collect_trajectory collect_trajectories shutdown_tool_backend _start_tool_backend env_manager"""
    assert [name for name in hooks.split() if not callable(getattr(base, name, None))] == []
    agent = old("atropos.agent", "AgentConfig")()
    assert (agent.temperature, agent.max_tokens, agent.max_steps, agent.tool_delay_s) == (0.7, 4096, 50, 0.0)
    assert old("atropos.agent", "AtroposAgent").run


@pytest.mark.slots
async def test_slot_pool_and_executor() -> None:
    """`SlotPool`, `Slot`, `ExecutionResult`, `SandboxExecutor` and `ToolExecutor`."""
    pool_type, executor_type = old("atropos.slots", "SlotPool"), old("atropos.tools.tool_executor", "ToolExecutor")
    tools = old("atropos.tools", "build_tool_registry")(["terminal", "file"])
    call_type = old("atropos.tools", "ToolCall")
    pool = pool_type(old("atropos.slots", "SlotPoolConfig")(acquire_timeout=9))
    await pool.start()
    try:
        slot = await pool.acquire("t1")
        described = slot.to_dict()
        assert (described["trajectory_id"], described["state"], slot.alloc_id) == ("t1", "acquired", "")
        assert slot.state == old("atropos.slots.slot", "SlotState").ACQUIRED
        with pytest.raises(AttributeError, match=r"SlotPool\.execute"):
            _ = slot.container_addr
        with pytest.raises(ConfigError, match=r"SlotPool\.acquire"):
            Slot.from_dict(described)
        async with old("atropos.slots.executor", "SandboxExecutor")(timeout=9, max_retries=3) as by_name:
            made, read = await by_name.execute_batch(
                [(slot, "write_file", {"path": "a", "content": "x"}), (slot, "nothing", {})]
            )
            assert (made.success, read.success) == (True, False)
            done = await by_name.execute(slot, "bash_stateful", {"command": "cd /tmp; exit 3"})
            assert done.metadata["returncode"] == done.metadata["exit_code"] == 3
        assert isinstance(done, old("atropos.slots", "ExecutionResult"))
        await pool.release(slot, reset_workspace=True)
        pool.register_image("t2", "/nowhere")
        with raises(ConfigError, "/nowhere"):
            await pool.acquire("t2")
        stats = pool.get_stats()
        assert {"total_slots", "available_slots", "acquired_slots", "containers", "slots_by_state"} <= stats.keys()
        executor = executor_type(pool=pool, tools=tools)
        await executor.start()
        args = {"command": "echo $((1+1))", "allow_network": True}
        assert (await executor.execute("t3", call_type("bash", args))).output == "2\n"
        assert (await executor.execute("t3", call_type("fly", {}))).error == "Unknown tool: fly"
        assert (executor.stats.total_requests, executor.stats.total_errors, executor.queue_size()) == (2, 1, 0)
        await executor.release_trajectory("t3", reset_workspace=True)
        await executor.close()
    finally:
        await pool.stop(purge_job=True)
    executor_config = old("atropos.tools.tool_executor", "ToolExecutorConfig")()
    assert (executor_config.batch_window_ms, executor_config.max_batch_size) == (20, 200)
    assert executor_type(backend=pool_type(), config=executor_config).config is executor_config


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("atropos_agent.sandbox_server", "SandboxServer", "palaestra serve executor"),
        ("atropos.api.tool_server", "app", "tool_server_url='inprocess'"),
        ("batch_runner", "BatchRunner", "palaestra batch FILE"),
        ("run_agent", "AIAgent", "use Agent from palaestra"),
    ],
)
def test_a_program_that_is_a_command_here(module: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=instead):
        old(module, name)


async def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nomad, Modal and docker: classes, settings from dicts, variables and profiles, and `create_tool_backend`."""
    modal = old("atropos.backends.modal_backend", "ModalSandboxConfig")
    assert modal.from_dict("gpu", {"image": "x", "gpu": "T4"}).gpu == "T4"
    assert modal.from_env("default", {"ATROPOS_MODAL_IMAGE": "y"}).image == "y"
    assert "default" in modal.load_profiles(environ={})
    config = old("environments.hermes_base_env", "HermesAgentEnvConfig")(tool_pool_mode="modal", modal_image="z")
    assert modal.from_agent_env_config(config).image == "z"
    assert old("atropos.backends.modal_backend", "ModalToolBackend").with_profiles
    assert old("atropos.backends.nomad_backend", "NomadBackendConfig").from_agent_env_config(config).driver == "docker"
    backend = old("atropos.backends", "create_tool_backend")(type(config)(tool_pool_mode="local"))
    assert isinstance(backend, old("atropos.backends.base", "ToolBackend"))
    names = """start stop acquire release execute_batch read_artifact list_artifacts archive_artifacts get_status
        register_image default_timeout_s"""
    for kind in ("DockerDirectBackend", "NomadToolBackend", "ModalToolBackend"):
        assert [name for name in names.split() if not hasattr(old("atropos.backends", kind), name)] == []
    direct = old("atropos.backends", "create_tool_backend")(type(config)(tool_pool_mode="docker_direct"))
    assert isinstance(direct, old("atropos.backends.docker_direct_backend", "DockerDirectBackend"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    assert old("atropos.backends.docker_direct_backend", "docker_image_exists")("mine:1") is False
    building = old("atropos.backends.docker_direct_backend", "build_docker_image")("/nowhere", "mine:1", timeout_s=9)
    assert await building is False


@pytest.mark.slots
def test_processes(task: str) -> None:
    """`process_registry` and its limits."""
    processes = old("tools.process_registry", "process_registry")
    limits = [old("tools.process_registry", f"{name}") for name in ("MAX_OUTPUT_CHARS", "MAX_PROCESSES")]
    assert (*limits, old("tools.process_registry", "FINISHED_TTL_SECONDS")) == (200_000, 64, 1800)
    talking = processes.spawn_local("echo ready; read line; echo $line", cwd="/tmp", task_id=task)
    running = processes.spawn_local("sleep 99", task_id=task)
    assert running.id.startswith("proc_")
    assert processes.poll(running.id)["status"] == "running"
    assert processes.submit_stdin(talking.id, "more")["status"] == "ok"
    ended = processes.wait(talking.id)
    assert (ended["status"], ended["exit_code"]) == ("exited", 0)
    assert processes.read_log(talking.id)["output"].splitlines() == ["ready", "more"]
    assert {each["session_id"] for each in processes.list_sessions(task)} == {talking.id, running.id}
    assert processes.has_active_processes(task)
    assert processes.kill_all(task) == 1
    assert processes.poll(running.id)["status"] == "exited"


@pytest.mark.slots
def test_terminal_and_file_tools(task: str) -> None:
    """`terminal_tool(...)`, overrides for a task, and the replies of the file tools."""
    terminal, call = old(TERMINAL, "terminal_tool"), old("model_tools", "handle_function_call")
    done = json.loads(terminal("echo out; exit 3", task_id=task, force=True))
    assert (done["output"], done["exit_code"]) == ("out\n", 3)
    assert json.loads(terminal("pwd", workdir="/tmp", timeout=9, task_id=task))["output"] == "/tmp\n"
    assert json.loads(terminal("sleep 9", background=True, task_id=task))["session_id"].startswith("proc_")
    old(TERMINAL, "register_task_env_overrides")(task, {"cwd": "/usr"})
    assert json.loads(terminal("pwd", task_id=task))["output"] == "/usr\n"
    old(TERMINAL, "clear_task_env_overrides")(task)
    assert task in old(TERMINAL, "get_active_environments_info")()["task_ids"]
    assert "error" not in json.loads(call("write_file", {"path": "f.txt", "content": "one\ntwo\n"}, task_id=task))
    assert "1|one" in call("read_file", {"path": "f.txt", "offset": 1, "limit": 1}, task_id=task)
    patch = {"mode": "replace", "path": "f.txt", "old_string": "two", "new_string": "three"}
    assert json.loads(call("patch", patch, task_id=task))["success"] is True
    assert "f.txt" in call("search_files", {"pattern": "three", "target": "content"}, task_id=task)


def test_suites() -> None:
    """The SWE-smith, Terminal-Bench 2 and endless-terminals environments, and their settings."""
    swe = old("atropos.envs.swe_smith_oracle_env", "SweSmithOracleEnvConfig")()
    assert (swe.dataset_name, swe.prompt_mode, swe.install_timeout_s) == (
        "built-in",  # there, a data set of the hub: nothing is fetched that nobody named
        "problem_statement",
        600,
    )
    bench = old("environments.benchmarks.terminalbench_2.terminalbench2_env", "TerminalBench2EvalConfig")()
    assert (bench.dataset_name, bench.test_timeout, bench.task_filter) == ("NousResearch/terminal-bench-2", 180, None)
    for module, name in (
        ("atropos.envs.swe_smith_oracle_env", "SweSmithOracleEnv"),
        ("environments.benchmarks.terminalbench_2.terminalbench2_env", "TerminalBench2EvalEnv"),
        ("environments.endless_terminals.endless_terminals_env", "EndlessTerminalsEnv"),
        ("environments.hermes_swe_env.hermes_swe_env", "HermesSweEnv"),
        ("environments.terminal_test_env.terminal_test_env", "TerminalTestEnv"),
    ):
        assert issubclass(old(module, name), old("atroposlib.envs.base", "BaseEnv"))


def test_gateway() -> None:
    """The gateway's reset policy and configuration."""
    policy = old("gateway.config", "SessionResetPolicy")()
    assert (policy.mode, policy.at_hour, policy.idle_minutes) == ("both", 4, 1440)
    config = old("gateway.config", "GatewayConfig").from_dict({})
    assert config.platforms == {}


def test_training_tools() -> None:
    """The ten `rl_*` functions, which report how to configure them."""
    names = """rl_list_environments rl_get_current_config rl_start_training rl_list_runs rl_test_inference
        rl_select_environment rl_edit_config rl_check_status rl_stop_training rl_get_results"""
    functions = [old("tools.rl_training_tool", name) for name in names.split()]
    assert all(map(inspect.iscoroutinefunction, functions))
    assert "set rl_dir" in asyncio.run(functions[0]())
    assert "set rl_dir" in asyncio.run(functions[-1]("run-1"))
    assert old("tools.rl_training_tool", "get_missing_keys")() == ["rl_dir", "rl_model"]
    assert not old("tools.rl_training_tool", "check_rl_api_keys")()
    data = old("atroposlib.envs.base", "ScoredDataGroup")
    assert {"tokens", "masks", "scores", "inference_logprobs", "advantages", "group_overrides"} <= set(
        data.__annotations__
    )


SMOKE = """
import os
from dotenv import load_dotenv
from ..agent import AgentConfig
from ..backends.docker_direct_backend import DockerDirectBackend
from .agent_env import AgentEnv, AgentEnvConfig
from .words import WORD
from environments.benchmarks.terminalbench_2.terminalbench2_env import TerminalBench2EvalEnv

load_dotenv(os.path.join(os.path.dirname(__file__), ".env"))

class SmokeEnv(AgentEnv[AgentEnvConfig]):
    async def setup_agent_env(self): ...
    async def get_next_item(self): ...
    def build_task(self, item): ...
    async def score_trajectory(self, item, final_response): ...
"""


def test_a_script_in_the_original_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative imports find ours in place of the original modules, and the repository's other modules."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SMOKE_WORD", "before")  # so that it is restored
    monkeypatch.delenv("SMOKE_WORD")
    monkeypatch.delitem(sys.modules, "dotenv", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] in CONTRACT_ROOTS]:
        monkeypatch.delitem(sys.modules, name)
    files = {
        "atropos/__init__.py": "",
        "atropos/agent/__init__.py": "raise RuntimeError('the original')",
        "atropos/envs/__init__.py": "from .agent_env import AgentEnv",
        "atropos/envs/agent_env.py": "raise RuntimeError('the original')",
        "atropos/envs/words.py": "WORD = 'own'",
        "atropos/envs/.env": "SMOKE_WORD=read",
        "atropos/envs/smoke_env.py": SMOKE,
        "tools/__init__.py": "LIMIT = 7",
        "tools/own_tool.py": "RATE = 3",
        "tools/terminal_tool.py": "raise RuntimeError('the original')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    form = load_environment(str(tmp_path / "atropos/envs/smoke_env.py"), tmp_path)
    assert form.reference.endswith("smoke_env.py:SmokeEnv")  # not the environment that it imports
    module = sys.modules["palaestra_environment_smoke_env"]
    assert (module.WORD, module.os.environ["SMOKE_WORD"]) == ("own", "read")
    assert module.AgentConfig is old("palaestra", "AgentConfig")
    assert old(TERMINAL, "cleanup_vm") is old("palaestra", "cleanup_vm")
    assert (old("tools.own_tool", "RATE"), old("tools", "LIMIT")) == (3, 7)
    assert old("tools", "own_tool").RATE == 3
