"""OpenEnv's own harness drives a rollout; rewards, dropped rollouts and traces are in its own types."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core.harness", reason="the package openenv is not installed")

from bug_fixing import FIX, Fixer, fix_calc
from openenv.core.harness import MCPHarnessAdapter
from openenv.core.harness.rollout import ModelStepResult
from openenv.core.llm_client import LLMResponse, ToolCall

import palaestra
from palaestra import Label, PrepareError, Score, Task, environment
from palaestra_integrations.openenv import SessionFactory, training_trace

pytestmark = pytest.mark.slots


class Steps:
    """A model step that gives its replies in turn."""

    def __init__(self, *replies: LLMResponse) -> None:
        self._replies = list(replies)

    def __call__(self, messages: Any, tools: Any, sampling: Any = None) -> ModelStepResult:
        return ModelStepResult(response=self._replies.pop(0))


def rewarded(tmp_path: Path, *replies: LLMResponse) -> float | None:
    with SessionFactory(fix_calc, folder=tmp_path) as factory:
        session = factory.create({"task_id": "calc"})
        assert "terminal" in [tool.name for tool in session.list_tools()]
        result = MCPHarnessAdapter().run_white_box(Steps(*replies), session)
        return session.verify(result.messages).env_reward


def test_openenvs_harness_solves_a_task(tmp_path: Path) -> None:
    call = LLMResponse(content="", tool_calls=[ToolCall(id="c1", name="terminal", args={"command": FIX})])
    assert rewarded(tmp_path, call, LLMResponse(content="Fixed.")) == 1.0
    assert rewarded(tmp_path, LLMResponse(content="I did nothing.")) == 0.0


@environment(toolsets=[], label_names=["odd"])
def odd():
    yield Task(id="odd", prompt="x")


@odd.score
def labelled(task):
    return Score(0.5, official=1.0, labels=[Label("odd", "it looks odd")])


def test_a_result_has_the_official_verdict_and_the_labels(tmp_path: Path) -> None:
    with SessionFactory(odd, folder=tmp_path) as factory:
        artifacts = factory.create("odd").verify([]).artifacts
    assert artifacts["official"] == 1.0
    assert artifacts["labels"] == [{"name": "odd", "evidence": "it looks odd", "certain": False}]


@environment
def broken():
    yield Task(id="broken", prompt="x", setup="exit 3")


@broken.score
def zero(task):
    return 0.0


def test_a_workspace_that_fails_has_no_reward(tmp_path: Path) -> None:
    with SessionFactory(broken, folder=tmp_path) as factory:
        session = factory.create("broken")
        assert session.call_tool("terminal", {"command": "ls"}).error
        verdict = session.verify([])
    assert verdict.env_reward is None
    assert verdict.artifacts["blame"] == PrepareError.blame


def test_a_trace_has_every_sampled_token_once(tmp_path: Path) -> None:
    engine = Fixer()
    run = asyncio.run(palaestra.run(fix_calc, server=engine, folder=tmp_path, group_size=1))
    (trajectory,) = run.groups[0].trajectories
    trace = training_trace(trajectory)
    assert [sum(turn.loss_mask) for turn in trace.turns] == [len(turn.completion_token_ids) for turn in trace.turns]
    assert sum(len(turn.completion_token_ids) for turn in trace.turns) == engine.sampled
    assert len({turn.node_id for turn in trace.turns}) == len(trace.turns) == 2
