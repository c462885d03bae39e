"""Names that scripts of the class contract read, and the tools, slots and fields behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import palaestra
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.discovery import load_environment
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group
from palaestra_contract import ToolContext, cleanup_vm, handle_function_call_async
from palaestra_contract.tools import function_calls
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.sync_bridge import bridged

pytestmark = pytest.mark.slots


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, *flags: str) -> tuple[int, list[Group]]:
    Path("named_env.py").write_text(script)
    line = ["run", "named_env.py", "--policy", "oracle", "--group", "1"]
    code = main([*line, "--env.ensure_scores_are_not_same", "false", *flags])
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    return code, list(Recording(journal))


async def test_a_context_by_name_has_the_slot_of_the_tasks_tools() -> None:
    async def scenario() -> None:
        await handle_function_call_async("terminal", {"command": "echo one > a.txt; echo two > /tmp/b.txt"}, "by-name")
        context = ToolContext("by-name")
        assert context.terminal("cat a.txt /tmp/b.txt") == {"exit_code": 0, "output": "one\ntwo\n", "error": None}
        assert context.write_file("c.txt", "three")["bytes_written"] == 5
        assert (await context.read_file_async("c.txt"))["content"] == "three"
        assert "one" in context.call_tool("read_file", {"path": "a.txt"})
        context.cleanup()

    try:
        await bridged(scenario())
        assert ToolContext("by-name").terminal("ls")["output"] == ""  # also without an event loop
    finally:
        cleanup_vm("by-name")


OWN_BODY = """
import uuid
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, HermesAgentLoop, ToolContext

class NamedEnv(HermesAgentBaseEnv):
    name = "named"

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.at_first = self.server

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], total_steps=1)
        return config, [APIServerConfig(model_name="m")]

    async def _start_tool_backend(self):
        self.started = True

    async def _stop_tool_backend(self):
        open("stopped.txt", "w").close()

    async def setup(self):
        assert self.at_first is self.server and self.started
        assert self._tool_error_buffer == [] and self._current_group_tools is None and self.max_token_len == -1
        slot = await self._backend.acquire("setup")
        self.seen = (await slot.execute("echo prepared")).output
        await self._backend.release(slot)
        self.left = 1

    async def get_next_item(self):
        self.left -= 1
        return {"id": "one", "solution": "echo x > x.txt"} if self.left >= 0 else None

    def format_prompt(self, item):
        return "Write x.txt"

    async def collect_trajectory(self, item):
        task_id = str(uuid.uuid4())
        tools, valid_names = self._current_group_tools
        messages = [{"role": "user", "content": self.format_prompt(item)}]
        agent = HermesAgentLoop(
            server=self.server, tool_schemas=tools, valid_tool_names=valid_names, max_turns=5, task_id=task_id
        )
        result = await agent.run(messages)
        ctx = ToolContext(task_id)
        try:
            reward = await self.compute_reward(item, result, ctx)
        finally:
            ctx.cleanup()
        scored, backlog = self._build_scored_item(item, result, reward)
        return scored, backlog

    async def compute_reward(self, item, result, ctx):
        assert self.seen.strip() == "prepared"
        return 0.5 * (ctx.terminal("cat x.txt")["output"].strip() == "x")

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.mark.usefixtures("here")
def test_the_body_of_the_contracts_own_collect_trajectory_works() -> None:
    code, (group,) = run(OWN_BODY)
    assert code == 0, group.trajectories[0].error
    assert [each.reward for each in group.trajectories] == [0.5]
    assert Path("stopped.txt").exists()


LOCAL_BODY = """
import asyncio, json
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext, handle_function_call

class NamedEnv(HermesAgentBaseEnv):
    name = "named"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], total_steps=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self):
        self.iter += 1
        return {"id": f"i{self.iter}", "solution": "echo x > x.txt"}

    def format_prompt(self, item):
        return "Write x.txt"

    def _use_sandbox_backend(self):
        return False

    async def _collect_trajectory_local(self, item, task_id, tools, valid_names, messages):
        result = await self._run_agent_loop(task_id, tools, valid_names, messages, tool_handler=None)
        only = all(m.get("role") in ("system", "user") for m in result.messages)
        if result.turns_used == 0 or only:
            reward = 0.0
        else:
            ctx = ToolContext(task_id)
            try:
                reward = await self.compute_reward(item, result, ctx)
            finally:
                ctx.cleanup()
        return self._build_scored_item(item, result, reward)

    async def compute_reward(self, item, result, ctx):
        return 0.75 * (ctx.terminal("cat x.txt")["output"].strip() == "x")

    async def _eval_one(self, n):
        task_id = f"eval-{n}"
        ctx = ToolContext(task_id)
        ctx.write_file("a.txt", str(n))
        out = json.loads(handle_function_call("terminal", {"command": "cat a.txt"}, task_id=task_id))["output"]
        ctx.cleanup()
        return float(out.strip() == str(n))

    async def evaluate(self, *args, **kwargs):
        done = await asyncio.gather(*(self._eval_one(n) for n in range(3)))
        await self.evaluate_log({"eval/right": sum(done)})
"""


@pytest.mark.usefixtures("here")
def test_the_body_of_the_contracts_own_local_path_works_in_the_rollouts_slot() -> None:
    code, (group,) = run(LOCAL_BODY)
    assert code == 0, group.trajectories[0].error
    (trajectory,) = group.trajectories
    assert (trajectory.reward, len(trajectory.turns)) == (0.75, 2)
    assert trajectory.beside.sandbox


@pytest.mark.usefixtures("here")
def test_contexts_of_an_evaluation_may_be_used_from_any_task() -> None:
    Path("named_env.py").write_text(LOCAL_BODY)
    assert main(["eval", "named_env.py", "--policy", "oracle"]) == 0
    (metrics,) = Path().glob("runs/*/*/evaluation/metrics.json")
    assert '"eval/right": 3.0' in metrics.read_text()


EXECUTOR = """
from palaestra import AgentEnv, AgentEnvConfig, APIServerConfig, ToolCall

class NamedEnv(AgentEnv):
    name = "named"

    @classmethod
    def config_init(cls):
        return AgentEnvConfig(total_steps=1, sandbox_image="mine:1"), [APIServerConfig(model_name="m")]

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self._pool = self._tool_executor = None

    async def setup_agent_env(self):
        assert not self._tool_server_inprocess
        done = await self._tool_executor.execute("probe", ToolCall("bash", {"command": "echo from setup"}))
        await self._tool_executor.release_trajectory("probe", reset_workspace=True)
        self.word = done.output.split()[-1] if done.success else done.error
        self.left = 1

    async def get_next_item(self):
        self.left -= 1
        return {"id": "one", "solution": "true"} if self.left >= 0 else None

    def build_task(self, item):
        return "Do nothing."

    async def score_trajectory(self, item, final_response):
        again = await self._tool_executor.execute("score", ToolCall("bash", {"command": "echo again"}))
        return float(self.word == "setup" and again.output.strip().endswith("again"))
"""


@pytest.mark.usefixtures("here")
def test_the_tool_executor_is_there_from_the_set_up_on(caplog: pytest.LogCaptureFixture) -> None:
    code, (group,) = run(EXECUTOR)
    assert code == 0
    check_message(caplog.messages, "NamedEnv", "sandbox_image")
    assert [each.reward for each in group.trajectories] == [1.0], group.trajectories[0].error


ERRORS = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolStep

class NamedEnv(HermesAgentBaseEnv):
    name = "named"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], total_steps=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = 1

    async def get_next_item(self):
        self.left -= 1
        steps = [ToolStep("levitate", {"height": 3})]
        return {"id": "one", "solution": steps} if self.left >= 0 else None

    def format_prompt(self, item):
        return "Fly."

    async def compute_reward(self, item, result, ctx):
        return 1.0

    async def evaluate(self, *args, **kwargs):
        return {}
"""


def test_the_errors_of_tools_are_metrics(here: Path) -> None:
    code, _ = run(ERRORS)
    assert code == 0
    (metrics,) = here.glob("runs/*/*/metrics.jsonl")
    assert '"train/tool_errors_count":1' in metrics.read_text()
    assert "[turn 1] levitate(" in metrics.read_text()


LIVE = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class NamedEnv(HermesAgentBaseEnv):
    name = "named"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], total_steps=1, GRADING)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = 1

    async def get_next_item(self):
        self.left -= 1
        return {"id": "one", "solution": "nohup sleep 321 > /dev/null 2>&1 &"} if self.left >= 0 else None

    def format_prompt(self, item):
        return "Start a service."

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("pgrep -f '[s]leep 321'")["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("grading", "flags", "reward"),
    [
        ('grading="sealed"', (), 0.0),
        ('grading="live"', (), 1.0),
        ("live=True", (), 1.0),
        ('grading="sealed"', ("--env.grading", "live"), 1.0),
    ],
)
def test_a_class_chooses_how_it_is_graded(grading: str, flags: tuple[str, ...], reward: float) -> None:
    _, (group,) = run(LIVE.replace("GRADING", grading), *flags)
    assert [each.reward for each in group.trajectories] == [reward]


def test_two_settings_of_grading_must_agree() -> None:
    assert HermesAgentEnvConfig(live=True).grading == "live"
    with pytest.raises(ConfigError, match="contradicts grading sealed"):
        HermesAgentEnvConfig(live=True, grading="sealed")


@pytest.mark.parametrize("name", ["AGENT_SYSTEM_PROMPT", "SequenceData", "ToolContext", "AgentStep", "ServerManager"])
def test_a_name_of_the_contract_can_be_imported(name: str) -> None:
    assert getattr(palaestra, name) is not None


REFUSED = """
from palaestra import (
    APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext, register_task_env_overrides,
)

class NamedEnv(HermesAgentBaseEnv):
    name = "named"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(total_steps=2)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["two", "one"]

    async def get_next_item(self):
        return {"id": self.left.pop()} if self.left else None

    def format_prompt(self, item):
        return "Write x.txt"

    def play(self):
        register_task_env_overrides("own", {"modal_image": "ubuntu:22.04"})
        try:
            return float(ToolContext("own").terminal("true")["exit_code"] == 0)
        except Exception:
            return 0.0

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        self._backend.register_image(trajectory_id, "/nowhere")
        await exec_tool("bash", {"command": "true"})

    async def collect_trajectory(self, item):
        if item["id"] == "two":
            return await super().collect_trajectory(item)
        return {"tokens": [1], "masks": [1], "scores": self.play()}, []

    async def compute_reward(self, item, result, ctx):
        return 0.0

    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"eval/right": self.play()})
"""


@pytest.mark.usefixtures("here")
def test_a_script_that_catches_the_error_of_an_unusable_image_gives_no_score(caplog: pytest.LogCaptureFixture) -> None:
    code, groups = run(REFUSED)
    trajectory, by_hook = sorted((group.trajectories[0] for group in groups), key=lambda each: each.task_id)
    assert (code, trajectory.reward, by_hook.reward) == (3, None, None)
    check_message(by_hook.error, "'/nowhere'")
    assert "every tool that works here: terminal, process" in caplog.text
    assert trajectory.error.startswith("TaskError: no slot can be created for the task own: 'ubuntu:22.04' is the name")
    assert main(["eval", "named_env.py", "--policy", "noop"]) == 3
    check_message(caplog.messages, "1 of the evaluation's tasks")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("backend", ["docker", "daytona"])
async def test_tasks_that_a_class_names_itself_have_slots_of_the_runs_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    for name, value in (("_own", None), ("_chosen", False)):  # another test may have chosen a session
        monkeypatch.setattr(function_calls, name, value)
    Path("named_env.py").write_text(REFUSED)
    config = HermesAgentEnvConfig(terminal_backend=backend, enabled_toolsets=["terminal"])
    servers = [palaestra.APIServerConfig(model_name="m")]
    environment = load_environment("named_env.py", Path()).build(config, servers, None)
    await environment.open()
    with pytest.raises(ConfigError, match=backend):
        await handle_function_call_async("terminal", {"command": "true"}, "elsewhere")
    await environment.aclose()
    assert json.loads(await handle_function_call_async("terminal", {"command": "true"}, "elsewhere"))["exit_code"] == 0
    cleanup_vm("elsewhere")


DUMMY = """
from palaestra import APIServerConfig, BaseEnv, BaseEnvConfig

class DummyEnv(BaseEnv):
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(total_steps=1), [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["one"]

    async def get_next_item(self):
        return self.left.pop() if self.left else None

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[{"role": "user", "content": "Say something long."}])
            node = managed.get_state()["nodes"][-1]
        assert node.full_text.startswith("Say something long.")
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": 1.0}, []

    async def evaluate(self, *args, **kwargs): ...
"""


@pytest.mark.usefixtures("here")
def test_a_chat_server_makes_placeholder_tokens_if_the_variable_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code, (group,) = run(DUMMY, "--policy", "noop")
    assert code == 3
    assert "do not return tokens" in group.trajectories[0].error
    shutil.rmtree("runs")
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    code, (group,) = run(DUMMY, "--policy", "noop")
    assert (code, group.trajectories[0].reward) == (0, 1.0)
