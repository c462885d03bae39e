"""Runs that a Python program starts: `run`, `run_sync`, `stream`, and what they give back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import palaestra
from golden_messages import raises
from palaestra import ConfigError, Group, Run, Slot, Task, environment
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion


@environment(toolsets=["terminal"])
def squares(n: int, first: int = 1) -> Iterator[Task]:
    for i in range(first, first + n):
        yield Task(
            id=f"square-{i}", prompt=f"Write {i} squared to answer.txt", solution=f"echo $(({i}*{i})) > answer.txt"
        )


@squares.score
async def right(task: Task, sandbox: Slot) -> bool:
    number = int(task.id.partition("-")[2])
    return (await sandbox.read_text("answer.txt", missing="")).strip() == str(number**2)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_gives_its_trajectories_and_keeps_everything_in_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = palaestra.run_sync(squares(n=2), group_size=2, policy="oracle")
    assert [t.reward for t in run.trajectories] == [1.0] * 4
    assert run.mean_reward == 1.0
    assert [group.task_id for group in run.groups] == ["square-1", "square-2"]
    assert run.metrics["rollouts"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert (run.path / "groups.jsonl").is_file()
    assert capfd.readouterr() == ("", "")
    assert palaestra.open_run("last").metrics == run.metrics


def test_the_arguments_of_a_call_are_the_functions() -> None:
    run = palaestra.run_sync(squares(1, first=7), policy="noop")
    assert [(group.task_id, group.trajectories[0].reward) for group in run.groups] == [("square-7", 0.0)]
    with pytest.raises(ConfigError, match="unexpected keyword argument 'm'"):
        squares(n=1, m=2)
    with pytest.raises(ConfigError, match="n 'many'"):
        squares(n="many")


def test_settings_are_arguments_too() -> None:
    run = palaestra.run_sync(squares, n=3, tasks=2, policy="oracle", seed=5)
    assert (len(run.groups), run.recording.meta.seed) == (2, 5)
    assert run.recording.meta.config["sources"]["env.n"] == "argument"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"group_sise": 2}, "Did you mean group_size"),
        ({"group_size": "two", "policy": "oracle"}, "group_size 'two'"),
        ({"policy": "oracle", "model": "m"}, "policy and model are mutually exclusive"),
        ({}, "Set base_url"),
    ],
)
def test_an_error_names_arguments_and_no_flags(arguments: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        palaestra.run_sync(squares(n=1), **arguments)
    assert "--" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_run_without_tokens_and_an_agent_without_a_server_name_arguments() -> None:
    run = palaestra.run_sync(squares(n=1), policy="noop")
    with pytest.raises(ConfigError, match="server_type") as error:
        run.to_rows()
    assert "--" not in str(error.value)
    with pytest.raises(ConfigError, match="base_url=") as error:
        palaestra.Agent("m")
    assert "policy" not in str(error.value)
    with pytest.raises(ConfigError, match="tasks is 0"):
        palaestra.run_sync(squares(n=1), policy="oracle", tasks=0)


async def test_a_run_inside_a_running_loop() -> None:
    """As in a notebook, whose cells run on a loop."""
    assert palaestra.run_sync(squares(n=1), policy="oracle").mean_reward == 1.0


@environment(toolsets=[])
def keyed() -> Iterator[Task]:
    yield Task(id="k", prompt="p")


@keyed.score
def reads_the_variable() -> bool:
    return os.environ.get("STORED_KEY") == "stored" and os.environ.get("SHELL_KEY") == "shell"


def test_the_code_of_an_environment_reads_the_variables_of_dotenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL_KEY", "shell")
    (tmp_path / ".env").write_text("STORED_KEY=stored\nSHELL_KEY=file\nPALAESTRA_ENV_SEED=5\n")
    run = palaestra.run_sync(keyed, policy="noop")
    assert (run.mean_reward, run.recording.meta.config["sources"]["env.seed"]) == (1.0, "default")

    async def streamed() -> list[float | None]:
        return [group.trajectories[0].reward async for group in palaestra.stream(keyed, policy="noop")]

    async def both() -> list[Run]:
        return await asyncio.gather(*(palaestra.run(keyed, policy="noop", group_size=n) for n in (1, 20)))

    assert asyncio.run(streamed()) == [1.0]
    assert [each.mean_reward for each in asyncio.run(both())] == [1.0, 1.0]
    assert "STORED_KEY" not in os.environ


async def test_groups_come_while_the_run_goes_on() -> None:
    result = [group.task_id async for group in palaestra.stream(squares(n=3), policy="oracle", concurrency=1)]
    assert result == ["square-1", "square-2", "square-3"]


async def test_a_run_waits_for_a_slow_reader_and_ends_with_it() -> None:
    async def go() -> Group:
        async for group in (groups := palaestra.stream(squares(n=300), policy="noop", isolation="none")):
            while len(palaestra.open_run().groups) < 64:  # noqa: ASYNC110 - only the folder tells
                await asyncio.sleep(0.2)
            await asyncio.sleep(1)  # a run that did not wait would finish further groups
            await groups.aclose()
            return group
        raise AssertionError("no group")

    assert (await go()).trajectories[0].reward == 0.0
    run = palaestra.open_run()
    assert 64 <= len(run.groups) < 100
    assert run.status.state != "running"


async def test_a_stream_raises_what_its_run_raises() -> None:
    async def go() -> None:
        async for _ in palaestra.stream(squares(n=1), model="m", base_url="http://127.0.0.1:1/v1", timeout=2):
            pass

    with pytest.raises(palaestra.EngineUnavailable, match="Check base_url"):
        await go()


async def test_the_callers_own_handler_of_sigterm_stays() -> None:
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, heard.set)
    await palaestra.run(squares(n=1), policy="oracle")
    assert loop.remove_signal_handler(signal.SIGTERM)


def test_a_run_of_a_program_is_found_again_by_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import palaestra\n"
        "@palaestra.environment(toolsets=[])\n"
        "def words(n: int = 1):\n"
        "    yield palaestra.Task(id='w', prompt='p')\n"
        "@words.score\n"
        "def fine(): return 1\n"
        "palaestra.run_sync(words(n=2), policy='noop')\n"
    )
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path)
    config = palaestra.open_run().recording.meta.config
    assert config["environment"] == f"{script}:words"
    done = subprocess.run(
        [sys.executable, "-m", "palaestra.cli.main", "run", "program.py", "--policy", "noop"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "__main__" in done.stderr


def test_rows_records_and_frames(tmp_path: Path) -> None:
    run = palaestra.run_sync(squares(n=2), policy="oracle")
    assert [(each["task_id"], each["reward"]) for each in run.to_records()] == [("square-1", 1.0), ("square-2", 1.0)]
    with pytest.raises(ConfigError, match="token"):
        run.to_rows()
    (groups,) = [json.loads(line) for line in (run.path / "groups.jsonl").read_text().splitlines()][:1]
    assert groups["scores"] == [1.0]


def test_a_run_with_a_chosen_folder_is_listed_too(tmp_path: Path) -> None:
    palaestra.run_sync(squares(n=1), policy="oracle").path.rename("runs/mine")
    other = palaestra.run_sync(squares(n=1), policy="noop")
    assert {path.name for path in palaestra.list_runs()} == {other.path.name, "mine"}
    assert palaestra.open_run("mine").path == Path("runs/mine").resolve()


def test_runs_are_found_by_short_names(tmp_path: Path) -> None:
    first = palaestra.run_sync(squares(n=1), policy="oracle")
    second = palaestra.run_sync(squares(n=1), policy="noop")
    assert [path.name for path in palaestra.list_runs()] == [second.path.name, first.path.name]
    assert palaestra.open_run("last:2").path == first.path
    assert palaestra.open_run(second.path.name[-4:]).path == second.path
    assert palaestra.open_run("squares--oracle/").path == first.path
    assert palaestra.open_run(first.path / "journal.jsonl").path == first.path
    with pytest.raises(ConfigError, match="matches 2 runs"):
        palaestra.open_run("squares")
    with raises(ConfigError, "nothing"):
        palaestra.open_run("nothing")
    with raises(ConfigError, "'last:3'"):
        palaestra.open_run("last:3")


@pytest.mark.parametrize("usage", [{}, {"usage": {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}}])
async def test_an_error_of_a_filter_does_not_pause_a_run_with_a_cost_limit(usage: dict[str, object]) -> None:
    """It often has no token counts, which says nothing about the replies of the server."""
    withheld = FakeAnswer({"error": {"code": "content_filter", "message": "filtered"}, **usage}, status=400)
    async with LoopbackServer(withheld, FakeAnswer(completion("It will not."))) as server:
        prices = {"prompt_price": 1.0, "completion_price": 1.0, "max_cost": 100.0, "max_infra_rate": 1.0}
        found = await palaestra.run(
            squares(n=3), base_url=server.url, model="m", max_num_workers=1, infra_retries=0, **prices
        )
    assert sorted(each.outcome for each in found.trajectories) == ["api_error", "natural", "natural"]


@pytest.mark.slow
def test_a_resumed_run_keeps_what_a_filter_ended_and_repeats_what_the_server_failed(tmp_path: Path) -> None:
    withheld = FakeAnswer({"error": {"code": "content_filter", "message": "filtered"}}, status=400)
    refused = FakeAnswer({"error": {"message": "a broken request"}}, status=400)

    async def play(*answers: FakeAnswer, resume: Path | None = None) -> tuple[Run, int]:
        async with LoopbackServer(*answers) as server:
            settings = {"base_url": server.url, "model": "m", "max_num_workers": 1, "group_size": 1, "resume": resume}
            return await palaestra.run(squares(n=3), **settings), len(server.seen)

    first, _ = asyncio.run(play(withheld, refused, FakeAnswer(completion("It will not."))))
    assert [each.blame for each in first.trajectories] == ["filter", "engine", None]
    again, asked = asyncio.run(play(FakeAnswer(completion("It will not.")), resume=first.path))
    assert [each.blame for each in again.trajectories] == ["filter", None, None]
    assert (again.status.filtered, again.status.asked_again) == (1, 1)
    assert asked <= 2, "one for the rollout, one for the check of the server"
