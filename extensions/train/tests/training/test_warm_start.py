"""A warm start: demonstrations are trained before the first rollouts, as rows that rollouts would have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import embedded
from tabular import TabularTrainer, score

import palaestra
from palaestra import ConfigError, Say, Task, environment
from palaestra.rollouts.observe.training_steps import read_steps
from palaestra_slots import TrainerError
from palaestra_train.checkpoints import training_named
from palaestra_train.warm_start import kept_rows


@environment(toolsets=[])
def spoken(n: int = 12, answer: str = "good") -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"word-{i}", prompt=f"Say something, {i}", solution=[Say(answer)])


spoken.score(score)


def train(folder: Path, trainer: TabularTrainer | None = None, env: object = None, **given: Any) -> Any:
    settings = {"steps": 2, "groups": 2, "eval_every": 1, "eval_tasks": 3, "warm_steps": 4, **given}
    progress, trainer = settings.pop("progress", False), trainer or TabularTrainer(rate=2.0)
    extra = {name: str(settings.pop(name)) for name in ("resume", "out") if name in settings}
    return asyncio.run(
        palaestra.train(
            env or spoken(), trainer=trainer, group_size=4, folder=folder, training=settings, progress=progress, **extra
        )
    )


def test_an_evaluation_has_an_interval_and_the_longest_reply_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = train(tmp_path, TabularTrainer(rate=1.0), warm_start="oracle", progress=True)
    shown = capsys.readouterr().err
    found = [line for line in read_steps(report.run.folder) if line["kind"] == "evaluation"]
    assert len(found) == 4
    for line in found:
        low, high = line["reward/low"], line["reward/high"]
        assert 0 <= low <= line["reward"] <= high <= 1
        assert low < high
        assert f"held-out tasks {line['reward']:.3f} ({low:.3f} to {high:.3f}) " in shown
    rows = kept_rows(report.run.folder / "training")
    assert f"(the longest reply has {max(sum(row.mask) for row in rows)})" in shown  # a row has one reply


def test_the_last_training_run_is_resumed_whatever_ran_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert training_named("last") == "last"
    trained = Path("runs/files")
    train(tmp_path, TabularTrainer(rate=1.0), out=trained)
    palaestra.run_sync(spoken(), policy="oracle", group_size=1)
    assert training_named("last") == str(trained)
    assert training_named("runs/other") == "runs/other"


@pytest.mark.parametrize(("least", "advised"), [(2.0, 1), (0.0, 0)])
def test_more_steps_are_suggested_after_a_warm_start_that_taught_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], least: float, advised: int
) -> None:
    monkeypatch.setattr("palaestra_train.training._TOO_FEW", least)
    train(tmp_path, TabularTrainer(rate=1.0), warm_start="oracle", progress=True)
    assert capsys.readouterr().err.count("more than 4 --warm-steps") == advised


def kinds(run: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in read_steps(run)]


def test_the_reference_solutions_are_learned_before_the_first_rollouts(tmp_path: Path) -> None:
    trainer = TabularTrainer(rate=1.0)
    report = train(tmp_path, trainer, warm_start="oracle")
    run = report.run.folder
    warm = [("warm-start", step) for step in range(1, 5)]
    assert kinds(run)[:6] == [("evaluation", 0), *warm, ("evaluation", 4)]
    assert kinds(run)[6:] == [("step", 5), ("evaluation", 5), ("step", 6), ("evaluation", 6)]
    losses = [line["loss"] for line in read_steps(run) if line["kind"] == "warm-start"]
    assert losses == sorted(losses, reverse=True)
    rewards = [line["reward"] for line in read_steps(run) if line["kind"] == "evaluation"]
    assert rewards[1] > rewards[0]
    assert all(name.startswith("demonstration-") for step in trainer.steps[:4] for name in step)
    assert not any(name.startswith("demonstration-") for step in trainer.steps[4:] for name in step)
    shown = embedded(report.run.report)["answers"]["run"]["training"]
    assert [line["loss"] for line in shown if line["kind"] == "warm-start"] == losses
    held_out = {row.task_id for row in kept_rows(run / "training")}
    assert len(held_out) == 8  # 4 steps of 2 of the 9 tasks that are not held out


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run whose rollouts earn rewards, and its export in the format of chat trainers."""
    folder = tmp_path_factory.mktemp("demonstrations")
    done = asyncio.run(palaestra.run(spoken(), policy="oracle", group_size=1, folder=folder))
    line: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something, 99"}], "tools": "[]"}
    line["messages"].append({"role": "assistant", "content": "good"})
    lines = [line | {"id": "one", "reward": 1.0}, line | {"reward": 0.0}, {**line, "tools": []}]
    (folder / "words.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return {"run": done.path, "journal": done.path / "journal.jsonl", "file": folder / "words.jsonl"}


@pytest.mark.parametrize(("kind", "rows"), [("run", 9), ("journal", 9), ("file", 2)])
def test_runs_and_files_are_sources_too(tmp_path: Path, demonstrations: dict[str, Path], kind: str, rows: int) -> None:
    trainer = TabularTrainer(rate=1.0)
    report = train(tmp_path, trainer, warm_start=str(demonstrations[kind]), only="warm-start")
    run = report.run.folder
    assert kinds(run) == [("evaluation", 0), *[("warm-start", step) for step in range(1, 5)], ("evaluation", 4)]
    assert len(kept_rows(run / "training")) == rows  # of a run without the held-out tasks
    assert report.result.after > report.result.before
    assert report.result.last.name == "step-000004"


class Stops(TabularTrainer):
    """Fails in the step after `left` steps."""

    left = 3

    async def step(self, rows: Any, version: str, weigh: Any) -> Any:
        if self.left == 0:
            raise TrainerError("killed")
        self.left -= 1
        return await super().step(rows, version, weigh)


@pytest.mark.parametrize("left", [1, 3, 5])
def test_an_interrupted_warm_start_continues_to_the_same_weights(
    tmp_path: Path, demonstrations: dict[str, Path], left: int
) -> None:
    whole = TabularTrainer(rate=0.2)
    source = tmp_path / "source.jsonl"
    source.write_bytes(demonstrations["file"].read_bytes())
    train(tmp_path / "whole", whole, warm_start=str(source), eval_every=0, keep=9)
    first = Stops(rate=0.2)
    first.left = left
    with pytest.raises(TrainerError, match="killed"):
        train(tmp_path / "cut", first, warm_start=str(source), eval_every=0, keep=9)
    source.unlink()  # the rows are in the run's folder
    (run,) = (tmp_path / "cut").glob("*/*")
    second = TabularTrainer(rate=0.2)
    train(tmp_path / "cut", second, warm_start=str(source), eval_every=0, keep=9, resume=run)
    assert len(first.steps) + len(second.steps) == 6
    assert [*first.steps, *second.steps][:4] == whole.steps[:4]
    weights = json.loads((run / "training" / "checkpoints" / "step-000004" / "weights.json").read_text())
    assert [kind for kind, _ in kinds(run)] == ["warm-start"] * 4 + ["step"] * 2
    assert weights == json.loads(
        next((tmp_path / "whole").glob("*/*/training/checkpoints/step-000004/weights.json")).read_text()
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nothing.jsonl", "there is no file"),
        ("no-such-run", "no-such-run"),
        ("broken.jsonl", "line 1.*messages"),
        ("poor.jsonl", "no demonstration with a reward above 0"),
        ("negative.jsonl", "no demonstration with a reward above 0"),
        ("words.jsonl", "line 1"),
        ("pretty.jsonl", "line 1"),
    ],
)
def test_a_source_without_demonstrations_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"prompt": "x"}\n')
    Path("negative.jsonl").write_text('{"messages": [], "reward": -1.0}\n')
    Path("words.jsonl").write_text('{"messages": [], "reward": "high"}\n')
    Path("pretty.jsonl").write_text(json.dumps({"messages": []}, indent=1))
    Path("poor.jsonl").write_text('{"messages": [], "reward": 0}\n')
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, warm_start=source)


def test_reference_solutions_without_reward_are_not_learned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy oracle"):
        train(tmp_path, env=spoken(answer="bad"), warm_start="oracle")


@pytest.mark.parametrize("ahead", [0, 2])
def test_nothing_is_rolled_out_before_the_warm_start_has_ended(tmp_path: Path, ahead: int) -> None:
    report = train(tmp_path, TabularTrainer(rate=0.2), warm_start="oracle", async_steps=ahead, eval_every=0, steps=3)
    for group in palaestra.Run(report.run.folder):
        for trajectory in group.trajectories:
            assert all(int(version) >= 4 for row in trajectory.rows for _, _, version in row.versions)


def test_only_a_warm_start_can_be_the_whole_training() -> None:
    with pytest.raises(ConfigError, match="warm_start"):
        train(Path(), only="warm-start")
