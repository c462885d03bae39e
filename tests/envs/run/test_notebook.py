"""Runs in a real Jupyter kernel, whose loop is running, and runs as data frames."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest

import palaestra
from notebooks import notebook
from palaestra import ConfigError, Score, Task, environment
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

CELLS = [
    """
import palaestra
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def squares(n: int = 2):
    for i in range(n):
        yield Task(id=f"s{i}", prompt="p", solution=f"echo {i * i} > answer.txt", answer=i * i)

@squares.score
async def right(task, sandbox):
    return await sandbox.read_text("answer.txt", missing="") == f"{task.answer}\\n"
""",
    """
run = palaestra.run_sync(squares(n=2), policy="oracle", group_size=2)
assert [t.reward for t in run.trajectories] == [1.0] * 4
run.to_frame()[["task_id", "reward"]]
""",
    """
run = await palaestra.run(squares, policy="noop", progress=True)
assert run.mean_reward == 0.0
""",
    """
seen = []
async for group in palaestra.stream(squares(n=3), policy="oracle"):
    seen.append(group.task_id)
assert sorted(seen) == ["s0", "s1", "s2"]
""",
    """
with palaestra.Sandbox() as box:
    print(box.execute("echo from the sandbox").output)
""",
    """
try:
    palaestra.run_sync(squares, policy="orcale")
except palaestra.ConfigError as error:
    print(error)
""",
]


@pytest.mark.slots
async def test_cells_of_a_notebook(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with notebook(tmp_path) as execute:
            return [await execute(cell) for cell in CELLS]

    _, table, progress, _, sandbox, error = await run()
    assert "task_id" in table
    assert "1.0" in table
    assert "squares with noop" in progress
    assert "report.html" in progress
    assert "from the sandbox" in sandbox
    assert "Did you mean oracle?" in error


@environment(toolsets=[])
def words(n: int = 3) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p")


@words.score
def length(task: Task) -> Score:
    return Score(float(task.id == "w1"), metrics={"letters": 2})


def test_a_run_is_a_data_frame(tmp_path: Path) -> None:
    run = palaestra.run_sync(words(n=3), policy="noop", group_size=2, folder=tmp_path)
    frame = run.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.shape[0] == 6
    assert frame.groupby("task_id")["reward"].mean().to_dict() == {"w0": 0.0, "w1": 1.0, "w2": 0.0}
    assert set(frame["letters"]) == {2}
    assert frame["blame"].isna().all()
    assert frame["completion_tokens"].dtype.kind == "i"


def test_a_frame_without_pandas_names_the_extra(tmp_path: Path) -> None:
    run = palaestra.run_sync(words(n=1), policy="noop", folder=tmp_path)
    code = (
        f"import sys; sys.modules['pandas'] = None; import palaestra; palaestra.open_run({str(run.path)!r}).to_frame()"
    )
    done = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "[frame]'" in done.stderr


async def test_several_servers_share_a_run_and_its_second_part(tmp_path: Path) -> None:
    answer = FakeAnswer(completion("Done."))
    async with LoopbackServer(answer) as first, LoopbackServer(answer) as second:
        servers = [palaestra.APIServerConfig(base_url=each.url, model_name="m") for each in (first, second)]
        groups = palaestra.stream(words(n=20), server=servers, folder=tmp_path, concurrency=2, group_size=2)
        async for _ in groups:
            break
        await groups.aclose()
        stopped = palaestra.open_run(root=tmp_path)
        kept = len(stopped.groups)
        run = await palaestra.run(
            words(n=20), server=servers, resume=stopped.path, concurrency=2, group_size=2, folder=tmp_path
        )
        run, kept, first, second = (
            run,
            kept,
            *(sum(each.method == "POST" for each in server.seen) for server in (first, second)),
        )
    assert len(run.trajectories) == 40
    assert len(palaestra.list_runs(tmp_path)) == 1
    assert 1 <= kept < 20
    assert min(first, second) >= 10
    assert first + second <= 40 + 4  # only calls in flight are made again
    with pytest.raises(ConfigError, match="model"):
        palaestra.run_sync(words(n=20), policy="noop", resume=run.path)
