"""Training with rollouts on the workers of a cluster, and the model in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tabular
from tabular import TabularTrainer

import palaestra
from cluster.on_loop import on_loop
from cluster.ray_nodes import processes_with, ray_cluster
from golden_messages import raises
from palaestra.rollouts.finished_run import Run
from palaestra.rollouts.journal.verify import verify_run
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import NoopPolicy, ScriptedEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer
from palaestra_train.step_groups import verify_steps
from palaestra_train.train_run import _address_for


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a tokenizer, which the workers load."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_tokenizer(train_tokenizer(), folder)
    return str(folder)


async def trained(trainer: Any, model: str, folder: Path, on: str, **training: Any) -> Any:
    return await palaestra.train(
        f"{tabular.__file__}:words",
        trainer=trainer,
        model=model,
        folder=folder,
        group_size=8,
        on=on,
        training={"steps": 4, "groups": 4, "eval_every": 0, **training},
    )


def versions(run: Run) -> list[set[str]]:
    """The versions of the weights that sampled each group, in the order of the groups."""
    found = []
    for group in run.groups:
        rows = [row for each in group.trajectories for row in palaestra.training_rows(each)]
        found.append({version for row in rows for _, _, version in row.versions})
    return found


@on_loop
async def test_workers_sample_with_the_weights_of_each_step(tmp_path: Path, model: str) -> None:
    trainer = TabularTrainer(rate=2.0, tokenizer=load_tokenizer(model))
    report = await trained(trainer, model, tmp_path / "runs", "processes:2")
    assert (report.result.reason, len(trainer.steps)) == ("done", 4)
    assert trainer.weights[2] > max(trainer.weights[:2])
    assert report.result.difference < 1e-5
    found = versions(Run(report.run.folder))
    assert [sorted(each) for each in found] == sorted([sorted(each) for each in found])
    assert {version for each in found for version in each} == {"0", "1", "2", "3"}
    verdict = verify_run(report.run.journal, report.run.groups, None)
    assert (verdict.violation, verdict.without_tokens) == ("", 0)
    assert not verify_steps(report.run.folder).violation


@on_loop
async def test_a_killed_worker_costs_no_step(tmp_path: Path, model: str) -> None:
    trainer = TabularTrainer(sampling_s=0.02, tokenizer=load_tokenizer(model))
    training = asyncio.ensure_future(trained(trainer, model, tmp_path / "runs", "processes:2", async_steps=1))
    while not trainer.steps:  # noqa: ASYNC110 - a trainer has no event for a step
        await asyncio.sleep(0.01)
    os.kill(min(processes_with(b"palaestra_cloud.cluster.worker")), signal.SIGKILL)
    report = await training
    assert (report.result.reason, len(trainer.steps)) == ("done", 4)
    assert all(row.startswith("0") for step in trainer.steps for row in step)
    assert len({row for step in trainer.steps for row in step}) == sum(map(len, trainer.steps))


@on_loop
async def test_an_engine_without_token_exact_chat_is_refused(tmp_path: Path, model: str) -> None:
    trainer = TabularTrainer(tokenizer=load_tokenizer(model))
    trainer.engine = ScriptedEngine(APIServerConfig(model_name="table"), NoopPolicy())  # type: ignore[assignment]
    with raises(ConfigError, "tabular", "--on"):
        await trained(trainer, model, tmp_path / "runs", "processes:1")


def test_the_model_listens_where_the_nodes_are() -> None:
    assert _address_for("processes:2") == "127.0.0.1"
    assert _address_for("ray:127.0.0.1:6379") == "127.0.0.1"
    assert not _address_for("ray").startswith("0")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
async def test_nodes_of_a_ray_cluster_sample_from_the_model_here(tmp_path: Path, model: str) -> None:
    with ray_cluster() as cluster:
        trainer = TabularTrainer(rate=2.0, tokenizer=load_tokenizer(model))
        report = await trained(trainer, model, tmp_path / "runs", f"ray:{cluster.address}", steps=2)
    assert (report.result.reason, len(trainer.steps)) == ("done", 2)
    assert {version for each in versions(Run(report.run.folder)) for version in each} == {"0", "1"}
