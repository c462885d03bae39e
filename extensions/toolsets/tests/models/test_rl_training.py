"""The rl_* tools with a real training, whose model is three numbers, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import palaestra
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.echo_chat_server import EchoChatServer
from palaestra_toolsets.tools.rl_training import rl_tools
from palaestra_toolsets.training_process import TrainingProcess, trainings

PROGRAM = Path(__file__).parents[4] / "extensions/train/tests/training/tabular.py"
SLOW = "--sampling-s=0.05"
"""Makes a training of twelve steps last until it is stopped."""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Desk:
    """The tools of one conversation."""

    def __init__(self, folder: Path, *words: str, task: str = "t", **settings: JSON) -> None:
        given = {"rl_model": "table", "rl_locked": {"learning_rate": 0.5, "max_num_workers": None}, **settings}
        command = (sys.executable, str(PROGRAM), *words)
        registry = ToolRegistry(rl_tools(ToolSettings(rl_dir=str(folder / "rl"), **given), command))
        self.folder = folder / "rl"
        self.tools = ToolRuntime(registry, None, task)

    async def __call__(self, name: str, /, **arguments: JSON) -> JSON:
        return json.loads(await self.tools.handle(f"rl_{name}", arguments))

    async def started(self, **edits: JSON) -> JSON:
        await self("select_environment", name="count_lines")
        for field, value in edits.items():
            assert "error" not in await self("edit_config", field=field, value=value)
        return await self("start_training")


def at(desk: Desk, scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with desk.tools:
            await scenario(desk)

    asyncio.run(all_of_it())


async def until(desk: Desk, run_id: str, *statuses: str) -> JSON:
    """The status of a training once it is one of these."""
    training = TrainingProcess(desk.folder / run_id)
    async with asyncio.timeout(60):
        while training.status() not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return await desk("check_status", run_id=run_id)


@pytest.mark.slow
def test_an_environment_is_chosen_and_configured(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        assert "rl_select_environment" in (await desk("get_current_config"))["error"]
        listed = await desk("list_environments")
        assert "count_lines" in [each["name"] for each in listed["environments"]]
        assert listed["count"] == len(listed["environments"])
        assert "count_lines" in (await desk("select_environment", name="nothing"))["available"]
        assert (await desk("select_environment", name="count_lines"))["environment"] == "count_lines"
        config = await desk("get_current_config")
        fields = {each["name"]: each for each in config["configurable_fields"]}
        assert fields["n"]["default"] == 100
        assert fields["steps"]["type"] == "int"
        locked = {each["name"]: each["locked_value"] for each in config["locked_fields"]}
        assert locked == {"learning_rate": 0.5, "max_num_workers": -1, "model": "table", "trainer": "trl"}
        assert (await desk("edit_config", field="learning_rate", value=1.0))["locked_value"] == 0.5
        assert "locked" in (await desk("edit_config", field="model", value="other"))["error"]
        assert "steps" in (await desk("edit_config", field="mcp_servers", value={}))["available_fields"]
        assert "int" in (await desk("edit_config", field="steps", value="many"))["error"]
        edited = await desk("edit_config", field="steps", value=3)
        assert (edited["field"], edited["value"], edited["config"]) == ("steps", 3, {"steps": 3})

    at(Desk(tmp_path), scenario)


@pytest.mark.slots
@pytest.mark.slow
def test_a_training_runs_to_its_end_and_starts_once(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        started = await desk.started(steps=4)
        assert started["status"] == "started", started
        assert started["config"] == {"steps": 4, "learning_rate": 0.5, "max_num_workers": -1}
        again = await desk("start_training")
        assert again == started
        run_id = started["run_id"]
        status = await until(desk, run_id, "completed", "failed")
        assert status["status"] == "completed", status
        assert status["metrics"]["step"] == 4
        results = await desk("get_results", run_id=run_id)
        assert [each["step"] for each in results["history"]] == [1, 2, 3, 4]
        assert [each["step"] for each in results["evaluations"]] == [0, 4]
        assert results["final_metrics"]["loss"] == 0.5
        assert Path(results["result"]["last"]).is_dir()
        assert await desk("start_training") == started
        listed = await desk("list_runs")
        assert listed == {"runs": [{"run_id": run_id, "environment": "count_lines", "status": "completed"}], "count": 1}
        assert (await desk("stop_training", run_id=run_id))["status"] == "completed"
        assert run_id in (await desk("check_status", run_id="rl_0"))["known_runs"]

    at(Desk(tmp_path), scenario)


@pytest.mark.slots
@pytest.mark.slow
def test_a_stopped_training_continues_with_the_same_settings(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        run_id = (await desk.started())["run_id"]
        training = TrainingProcess(desk.folder / run_id)
        async with asyncio.timeout(60):
            while not training.lines():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        looked = await desk("check_status", run_id=run_id)
        assert looked["status"] == "running"
        early = await desk("check_status", run_id=run_id)
        assert early["rate_limited"]
        assert 0 < early["next_check_in_seconds"] <= 1800
        await desk("edit_config", field="steps", value=5)
        assert (await desk("start_training"))["active_runs"] == [run_id]
        stopped = await desk("stop_training", run_id=run_id)
        assert stopped["status"] == "stopped"
        assert await desk("stop_training", run_id=run_id) == stopped
        await desk("select_environment", name="count_lines")
        assert (await desk("start_training"))["run_id"] == run_id
        assert (await until(desk, run_id, "completed", "failed"))["metrics"]["step"] == 12
        assert [each["step"] for each in training.lines() if each["kind"] == "step"] == list(range(1, 13))

    at(Desk(tmp_path, SLOW), scenario)


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize("outlive", [False, True])
def test_a_training_ends_with_its_conversation_unless_it_may_outlive_it(tmp_path: Path, outlive: bool) -> None:
    found = []

    async def scenario(desk: Desk) -> None:
        found.append(TrainingProcess(desk.folder / (await desk.started())["run_id"]))

    at(Desk(tmp_path, SLOW, rl_outlive=outlive), scenario)
    (training,) = found
    assert training.alive() == outlive
    if outlive:  # another conversation stops it
        at(Desk(tmp_path, SLOW, task="u"), lambda desk: desk("stop_training", run_id=training.id))
    assert training.status() == ("stopped" if outlive else "interrupted")


@pytest.mark.slots
@pytest.mark.slow
def test_a_training_survives_the_kill_of_its_agent_and_is_found_again(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_rl_training import Desk\n"
        "async def agent():\n"
        "    desk = Desk(Path('.'), '--sampling-s=1')\n"
        "    print((await desk.started())['run_id'], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(agent())\n"
    )

    async def scenario(desk: Desk) -> None:
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(Path(__file__).parent), stdout=asyncio.subprocess.PIPE
        )
        assert agent.stdout is not None
        run_id = (await agent.stdout.readline()).decode().strip()
        agent.kill()
        await agent.wait()
        training = TrainingProcess(tmp_path / "rl" / run_id)
        assert training.status() == "running"
        started = time.time()
        assert (await desk.started())["run_id"] == run_id  # the resumed rollout makes the same call again
        assert training.request().started < started
        assert len(trainings(tmp_path / "rl")) == 1
        os.killpg(training.request().pid, signal.SIGKILL)
        while training.alive():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for tool in ("check_status", "get_results"):
            reply = await desk(tool, run_id=run_id)
            assert reply["status"] == "failed"
            assert reply["message"].removeprefix("The training run failed: ")

    at(Desk(tmp_path, "--sampling-s=1"), scenario)


@pytest.mark.slow
def test_a_training_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk("select_environment", name="count_lines")
        await desk("edit_config", field="groups", value=0)
        reply = await desk("start_training")
        assert "groups" in reply["error"]
        for tool in ("check_status", "get_results"):
            ended = await desk(tool, run_id=reply["run_id"])
            assert ended["status"] == "failed"
            assert "groups" in ended["message"]

    settings = ToolSettings(rl_dir=str(tmp_path / "rl"), rl_model="/nowhere")
    desk = Desk(tmp_path)
    desk.tools = ToolRuntime(ToolRegistry(rl_tools(settings)), None, "t")  # `palaestra train` itself
    at(desk, scenario)


def test_without_a_folder_the_tools_are_missing() -> None:
    registry = build_tool_registry(["rl"], settings=ToolSettings())
    assert len(registry.missing) == 10
    assert all("rl_dir" in reason for reason in registry.missing.values())


@pytest.mark.slots
@pytest.mark.slow
async def test_a_model_is_tried_without_training(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk("select_environment", name="count_lines")
        assert "available" in await desk("test_inference", models=["other"])
        tried = await desk("test_inference", num_steps=2, group_size=2)
        assert tried["test_config"]["total_rollouts"] == 4
        (model,) = tried["models_tested"]
        assert model["total_completions"] == 4, model
        assert [each["completions"] for each in model["steps"]] == [2, 2]
        assert tried["summary"]["environment_working"]

    async def served() -> None:
        async with EchoChatServer() as server:
            desk = Desk(tmp_path, rl_test_url=f"{server.url}/v1", rl_test_models=["m"])
            async with desk.tools:
                await scenario(desk)

    await served()


@pytest.mark.slots
@pytest.mark.slow
def test_a_replayed_conversation_starts_no_training(tmp_path: Path) -> None:
    """And makes the same replies, without the environments and the folder."""
    conversation = (
        ("list_environments", {}),
        ("select_environment", {"name": "count_lines"}),
        ("edit_config", {"field": "steps", "value": 2}),
        ("start_training", {}),
        ("list_runs", {}),
    )

    async def replies(mode: str) -> list[JSON]:
        desk, world = Desk(tmp_path), palaestra.open_world(mode, tmp_path / "world.jsonl")
        desk.tools = ToolRuntime(desk.tools.registry, None, "t", middleware=[world.rollout("t")])
        try:
            async with desk.tools:
                return [await desk(name, **arguments) for name, arguments in conversation]
        finally:
            world.close()

    recorded = asyncio.run(replies("record"))
    assert recorded[-1]["count"] == 1
    shutil.rmtree(tmp_path / "rl")
    assert asyncio.run(replies("replay")) == recorded
    assert not (tmp_path / "rl").exists()
