"""A score that calls the work and does not catch its failure is 0, for that criterion alone."""

import palaestra
from palaestra import Task, environment
from palaestra.grading import run_tests


@environment(toolsets=["terminal"])
def square():
    for kind, code in {"right": "def f(x): return x * x", "raises": "def f(x): return 1 / 0", "ends": "exit()"}.items():
        yield Task(id=kind, prompt="Write f in work.py", solution=f"echo '{code}' > work.py")


@square.score(weight=3)
async def value(sandbox):
    return await sandbox.call("work:f", [3]) == 9


@square.score
async def file(sandbox):
    return await sandbox.stat("work.py") is not None


def test_a_failure_of_the_work_costs_only_the_criterion_that_met_it(tmp_path):
    run = palaestra.run_sync(square, policy="oracle", folder=tmp_path)
    rewards = {each.task_id: each.reward for each in run.trajectories}
    assert rewards == {"right": 1.0, "raises": 0.25, "ends": 0.25}
    failed = {each.task_id: each.detail.get("work_failed", "") for each in run.trajectories}
    assert "ZeroDivisionError" in failed["raises"]


INSTALL = """
folder=$(python3 -m site --user-site) && mkdir -p $folder && echo 'def f(x): return x * x' > $folder/squares.py
echo 'from squares import f' > work.py
"""


@environment(toolsets=["terminal"])
def installed():
    yield Task(
        id="user",
        prompt="Write f in work.py",
        solution=INSTALL,
        answer="from work import f\ndef test(): assert f(3) == 9",
    )


@installed.score
async def called(sandbox):
    return await sandbox.call("work:f", [3]) == 9


@installed.score
async def hidden(task, sandbox):
    return (await run_tests(sandbox, task.answer)).score()


def test_a_check_imports_what_pip_installed_for_the_user(tmp_path):
    run = palaestra.run_sync(installed, policy="oracle", folder=tmp_path)
    assert [each.reward for each in run.trajectories] == [1.0]
