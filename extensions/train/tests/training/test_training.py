"""The training loop with a trainer that is a table: what is sampled, trained, refused, saved and resumed."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tabular
from recorded import embedded
from tabular import REPLIES, REWARDS, TabularTrainer, words

import palaestra
from golden_messages import check_message, raises
from palaestra import ConfigError, Rollout, Task, environment
from palaestra.cli.resume import resume_run
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_slots import DiskError, TrainerError
from palaestra_train import TrainingReport
from palaestra_train.checkpoints import StepGroups, read_step_groups
from palaestra_train.step_groups import verify_steps
from palaestra_train.trainer import TrainedRow, Weigh

pytestmark = pytest.mark.slots


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(trainer: TabularTrainer, env: Any = None, *, resume: Path | None = None, **settings: Any) -> TrainingReport:
    training = {"steps": 6, "groups": 2, "eval_every": 3, "eval_tasks": 4, **settings}
    return asyncio.run(palaestra.train(env or words(), trainer=trainer, group_size=8, resume=resume, training=training))


def steps(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [line for line in read_steps(run) if line["kind"] == kind]


def only_run() -> Path:
    (found,) = Path("runs").glob("*/*")
    return found


def test_the_held_out_reward_rises() -> None:
    report = train(TabularTrainer(rate=0.2), steps=20, groups=4, eval_samples=8)
    result = report.result
    assert (result.steps, result.reason) == (20, "done")
    assert result.before is not None
    assert result.after is not None
    assert result.best is not None
    assert result.after > result.before + 0.2
    assert result.difference < 1e-6  # 32-bit
    assert [line["step"] for line in steps(report.run.folder)] == list(range(1, 21))
    assert [line["step"] for line in steps(report.run.folder, "evaluation")] == [0, 3, 6, 9, 12, 15, 18, 20]
    assert json.loads((result.best / "state.json").read_text())["best"] >= result.after
    metrics = (report.run.folder / "metrics.jsonl").read_text()
    assert '"training/step":20' in metrics
    assert '"training/eval/reward":' in metrics


def test_a_held_out_task_is_never_trained() -> None:
    trainer = TabularTrainer()
    report = train(trainer, steps=8)
    run = palaestra.open_run(report.run.folder)
    tasks = {group.group_id: group.task_id for group in run.groups}
    trained = {tasks[rollout.rpartition("/")[0]] for step in trainer.steps for rollout in step}
    counted = [group.task_id for group in run.groups if len(group.trajectories) == 1]
    assert len(set(counted)) == 4
    assert trained
    assert not trained & set(counted)
    assert len(run.groups) == len({group.number for group in run.groups})


def test_weights_sample_as_the_version_of_their_step() -> None:
    trainer = TabularTrainer()
    report = train(trainer, steps=3, eval_every=0)
    rows = {row["rollout_id"]: row["policy_version"] for row in palaestra.open_run(report.run.folder).to_rows()}
    assert [{rows[each] for each in step} for step in trainer.steps] == [{"0"}, {"1"}, {"2"}]


def test_a_group_of_equal_scores_is_replaced_by_another_task() -> None:
    trainer = TabularTrainer()
    trainer.weights = [0.0, 0.0, 4.0]
    report = train(trainer, steps=2, groups=3, most_draws=20, eval_every=0)
    assert [line["groups"] for line in steps(report.run.folder)] == [3, 3]
    assert sum(line.get("equal_groups", 0) for line in steps(report.run.folder)) > 0


def test_as_many_groups_are_drawn_at_once_as_the_last_steps_needed() -> None:
    trainer = TabularTrainer(rate=0.0)
    trainer.weights = [0.0, 0.0, 4.0]
    report = train(trainer, steps=6, groups=3, most_draws=20, eval_every=0)
    known = list(read_step_groups(report.run.folder).values())
    for step in known[1:]:
        before = known[max(0, step.step - 5) : step.step - 1]
        needed = [each.taken.index(each.trained[-1]) + 1 for each in before]
        assert len(step.taken) >= math.ceil(statistics.fmean(needed)) > 3
        assert len(step.trained) == 3
        assert step.needed(3) <= len(step.taken)


@pytest.mark.parametrize(
    ("trained", "needed"), [([4, 5], 2), ([5, 7], 4), ([4, 5, 8], 5), ([4], 6), ([9], 6)]
)  # fmt: skip
def test_a_step_needed_the_groups_up_to_the_last_trained_or_all(trained: list[int], needed: int) -> None:
    step = StepGroups(step=1, version=0, most_behind=0, taken=[4, 5, 6, 7, 8, 9], trained=trained)
    assert step.needed(2) == needed


def test_tasks_that_all_teach_nothing_end_the_training() -> None:
    trainer = TabularTrainer()
    trainer.weights = [0.0, 0.0, 50.0]
    with pytest.raises(TrainerError, match="equal_groups"):
        train(trainer, eval_every=0)


class SettledTrainer(TabularTrainer):
    """A trainer that always gives the same reply after its third step."""

    def __init__(self, reply: str) -> None:
        super().__init__()
        self._reply = REPLIES.index(reply)

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        numbers = await super().step(rows, version, weigh)
        if version == "3":
            self.weights = [50.0 * (place == self._reply) for place in range(len(REPLIES))]
        return numbers


@pytest.mark.parametrize(("async_steps", "last"), [(0, 3), (1, 4)])
def test_a_training_that_has_learned_everything_ends_with_an_evaluation(async_steps: int, last: int) -> None:
    trainer = SettledTrainer("good")
    report = train(trainer, steps=9, eval_every=5, async_steps=async_steps, max_difference=100)
    assert (report.result.steps, report.result.after) == (last, 1.0)
    check_message([report.result.reason], "equal rewards")
    assert [line["step"] for line in steps(report.run.folder, "evaluation")] == [0, last]
    assert report.result.last.name.endswith(str(last))
    assert verify_steps(report.run.folder).violation == ""


def test_a_training_after_whose_steps_nothing_earns_any_more_has_failed() -> None:
    with pytest.raises(TrainerError, match="18 equal_groups"):
        train(SettledTrainer("bad"), steps=9, eval_every=0)


@environment(toolsets=[])
def half_decided(n: int = 4) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"word-{i}", prompt=f"Say something, {i}", answer=i % 2)


@half_decided.score
async def said(rollout: Rollout, task: Task) -> float:
    assert rollout.result is not None
    return 1.0 if task.answer else REWARDS[str(rollout.result.messages[-1]["content"])]


def test_a_step_in_which_all_groups_are_equal_by_chance_draws_more() -> None:
    report = train(TabularTrainer(rate=0.0), half_decided(), steps=12, groups=1, most_draws=2, eval_every=0)
    taken = [len(step.taken) for step in read_step_groups(report.run.folder).values()]
    assert len(taken) == 12
    assert 2 < max(taken) <= 6


@environment(toolsets=[])
def broken(n: int = 4) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"broken-{i}", prompt="Say something")


@broken.score
async def never(rollout: Rollout) -> float:
    raise palaestra.GraderError("the check broke")


def test_unscored_rollouts_train_nothing() -> None:
    trainer = TabularTrainer()
    training = {"steps": 2, "groups": 2, "eval_every": 0}
    with pytest.raises(TrainerError, match="unscored_rollouts"):
        asyncio.run(palaestra.train(broken(), trainer=trainer, group_size=4, training=training, max_infra_rate=1.0))
    assert trainer.steps == []
    with pytest.raises(RunStopped):  # with the run's own limit
        train(TabularTrainer(), broken(), eval_every=0)


def test_rows_that_the_trainer_disagrees_with_are_refused() -> None:
    trainer = TabularTrainer(error=-5.0)
    with pytest.raises(TrainerError, match="max_difference"):
        train(trainer, eval_every=0)
    assert trainer.steps == []


def test_a_loss_that_is_no_number_ends_the_training_and_saves_nothing() -> None:
    train(TabularTrainer(), steps=1, eval_every=0)
    with pytest.raises(TrainerError, match="nan"):
        train(TabularTrainer(loss=math.nan), steps=3, eval_every=0, resume=only_run())
    report = train(TabularTrainer(), steps=3, eval_every=0, resume=only_run())
    assert [line["step"] for line in steps(report.run.folder)] == [1, 2, 3]


def test_a_trainer_that_is_gone_ends_the_training_which_can_resume() -> None:
    trainer = TabularTrainer()
    trainer.gone = True
    with pytest.raises(TrainerError, match="gone"):
        train(trainer)
    report = train(TabularTrainer(), resume=only_run())
    assert report.result.steps == 6


def test_a_checkpoint_of_another_model_is_refused() -> None:
    train(TabularTrainer(), steps=1, eval_every=0)
    with pytest.raises(ConfigError, match="table"):
        train(TabularTrainer(model="other"), steps=2, eval_every=0, resume=only_run())


def test_a_damaged_checkpoint_is_named() -> None:
    report = train(TabularTrainer(), steps=1, eval_every=0)
    (report.result.last / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="state"):
        train(TabularTrainer(), steps=2, eval_every=0, resume=only_run())


def test_a_full_disk_ends_the_training_which_can_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TabularTrainer()

    async def full(folder: Path) -> None:
        (folder / "weights.json").write_text("[")
        raise DiskError(f"cannot write {folder}: No space left on device")

    trainer.save = full  # type: ignore[method-assign]
    with pytest.raises(DiskError, match="No space"):
        train(trainer, steps=2, eval_every=0)
    report = train(TabularTrainer(), steps=2, eval_every=0, resume=only_run())
    assert [each.name for each in (only_run() / "training/checkpoints").iterdir()] == ["step-000001", "step-000002"]
    assert report.result.steps == 2


def test_a_task_with_a_temperature_of_its_own_is_refused() -> None:
    @environment(toolsets=[])
    def mixed() -> Iterator[Task]:
        yield Task(id="warm", prompt="Say something", temperature=1.0)
        yield Task(id="cold", prompt="Say something", temperature=0.3)

    @mixed.score
    async def one(rollout: Rollout) -> float:
        return 1.0

    with raises(ConfigError, "cold", "0.3"):
        train(TabularTrainer(), mixed(), steps=1, eval_every=0)


def test_few_tasks_cannot_be_held_out() -> None:
    with pytest.raises(ConfigError, match="eval_tasks"):
        train(TabularTrainer(), words(n=4))


def test_patience_and_target_end_the_training_early() -> None:
    trainer = TabularTrainer()
    trainer.rate = 0.0
    report = train(trainer, steps=50, eval_every=1, patience=2)
    assert report.result.steps < 50
    assert "was better" in report.result.reason
    report = train(TabularTrainer(), steps=200, eval_every=1, eval_samples=4, target=0.6)
    assert report.result.steps < 200
    assert report.result.after is not None
    assert report.result.after >= 0.6


def test_old_checkpoints_are_removed_but_for_the_best() -> None:
    report = train(TabularTrainer(), steps=9, eval_every=3, eval_samples=2, keep=2)
    kept = {int(each.name[5:]) for each in (report.run.folder / "training/checkpoints").iterdir()}
    assert {8, 9} <= kept <= {8, 9, int(str(report.result.best)[-6:])}


def test_the_whole_training_again_from_the_record_gives_the_same_weights() -> None:
    trainer = TabularTrainer()
    report = train(trainer)
    shutil.rmtree(report.run.folder / "training/checkpoints")
    again = TabularTrainer()
    train(again, resume=report.run.folder)
    assert again.engine.requests == 0
    assert again.steps == trainer.steps
    assert again.weights == trainer.weights
    assert [line["step"] for line in steps(report.run.folder)] == list(range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_training_killed_at_random_points_repeats_and_loses_no_step(tmp_path: Path, seed: int) -> None:
    rng, kills = random.Random(seed), 0
    command = [sys.executable, tabular.__file__, str(tmp_path / "runs")]
    while True:
        runs = list((tmp_path / "runs").glob("*/*"))
        if runs and not (runs[0] / "journal.jsonl").read_bytes():  # killed before its first record
            shutil.rmtree(runs.pop())
        enough = records(tmp_path) + rng.randrange(1, 120)
        child = subprocess.Popen(command + (["--resume", str(runs[0])] if runs else []))
        while child.poll() is None and records(tmp_path) < enough:
            time.sleep(0.005)
        child.kill()
        code = child.wait()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
    assert kills >= 1
    run = only_run()
    assert [line["step"] for line in steps(run)] == list(range(1, 13))
    last = json.loads((run / "training/checkpoints/step-000012/weights.json").read_text())
    shutil.rmtree(run / "training/checkpoints")
    again = TabularTrainer(rate=0.15)
    asyncio.run(
        palaestra.train(
            words(),
            trainer=again,
            group_size=4,
            resume=run,
            training={"steps": 12, "groups": 3, "eval_every": 4, "eval_tasks": 4, "save_every": 3},
        )
    )
    assert again.engine.requests == 0
    assert again.weights == last


def records(folder: Path) -> int:
    """The number of records that the runs below a folder have written."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/*/journal.jsonl"))


def test_the_report_has_the_curves() -> None:
    report = train(TabularTrainer(), steps=3)
    lines = embedded(report.run.report)["answers"]["run"]["training"]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3]
    assert all(0 <= line["reward"] <= 1 for line in lines if line["kind"] == "evaluation")
    assert {"loss", "rollout_s", "train_s"} <= lines[-1].keys() | lines[-2].keys()


def test_the_run_of_a_training_is_not_resumed_as_another_run() -> None:
    report = train(TabularTrainer(), steps=1, eval_every=0)
    with pytest.raises(ConfigError, match="train --resume"):
        resume_run(str(report.run.folder), [], "palaestra resume")


def test_rollouts_ahead_are_trained_once_with_their_versions() -> None:
    trainer = TabularTrainer(sampling_s=0.002)
    report = train(trainer, steps=8, async_steps=2, eval_every=0)
    trained = [each for step in trainer.steps for each in step]
    assert len(trained) == len(set(trained))
    lines = steps(report.run.folder)
    assert [line["groups"] for line in lines] == [2] * 8
    assert 1 <= max(line["most_staleness"] for line in lines) <= 2
    verdict = verify_steps(report.run.folder)
    assert (verdict.steps, verdict.groups, verdict.violation) == (8, 16, "")


def test_a_training_that_was_ahead_repeats_the_same_steps() -> None:
    trainer = TabularTrainer(sampling_s=0.002)
    report = train(trainer, steps=6, async_steps=2, save_every=3)
    folder = report.run.folder
    shutil.rmtree(folder / "training/checkpoints/step-000006")
    again = TabularTrainer()
    train(again, steps=6, async_steps=2, save_every=3, resume=folder)
    assert again.steps == trainer.steps[3:]
    assert again.weights == trainer.weights
    assert verify_steps(folder).violation == ""


def test_groups_that_no_step_took_stay_in_the_file_of_a_resumed_training() -> None:
    report = train(TabularTrainer(sampling_s=0.002), steps=4, async_steps=2, save_every=1)
    groups = report.run.folder / "groups.jsonl"
    before = {json.loads(line)["group_id"] for line in groups.read_text().splitlines()}
    again = TabularTrainer()
    train(again, steps=4, async_steps=2, save_every=1, resume=report.run.folder)
    assert again.steps == []
    assert {json.loads(line)["group_id"] for line in groups.read_text().splitlines()} == before


def test_a_step_that_trains_a_group_again_or_on_new_weights_is_a_violation() -> None:
    folder = train(TabularTrainer(), steps=3, eval_every=0).run.folder
    path = folder / "training/groups.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def violation() -> str:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return verify_steps(folder).violation

    assert violation() == ""
    lines[2]["version"] = 1
    assert "version 2 sampled it" in violation()
    lines[2]["version"] = 3
    assert "more than 0 before 3" in violation()
    lines[2]["trained"] = lines[1]["trained"]
    assert "again in step 3" in violation()


def test_a_trainer_that_cannot_overlap_is_refused() -> None:
    trainer = TabularTrainer()
    trainer.overlaps = False
    with pytest.raises(ConfigError, match="async_steps"):
        train(trainer, async_steps=1)


@environment(toolsets=["terminal"])
def unearnable(n: int = 8) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"task-{i}", prompt="Say something", solution="true")


@unearnable.score
async def nothing(rollout: Rollout) -> float:
    return 0.0


def test_a_training_warns_if_neither_the_reference_nor_a_rollout_earns(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainerError, match="equal_groups"):
        train(TabularTrainer(), unearnable())
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    check_message(warned, "reference solution")
    assert any("no rollout has earned" in text for text in warned), warned
