"""A score that calls the work and does not catch its failure is 0, for that criterion alone."""

import palaestra
from palaestra import Task, environment


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
