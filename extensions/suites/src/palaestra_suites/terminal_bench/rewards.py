"""Parse the reward files of a verifier, and combine the scores of a task's steps. Does no I/O.

The rules are those of Harbor 0.25 (verifier/verifier.py, `MultiStepTrial`): `reward.json` takes precedence over
`reward.txt`; the text is one finite number, and the JSON an object of finite numbers. Anything else is the grader's
failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from palaestra_slots.core.errors import GraderError
from palaestra_slots.core.types import JSON, Score, number, numeric_values
from palaestra_suites.terminal_bench.terminal_task import FINAL, TaskStep, TerminalTask

REWARD = "reward"


def read_rewards(json_file: bytes | None, text_file: bytes | None) -> Mapping[str, float]:
    """Return the rewards by name. None stands for a missing file. Raises `GraderError` if both files are missing, or if
    the one that counts is not valid."""
    if json_file is not None:
        return _from_json(_reward_text(json_file, "reward.json"))
    if text_file is not None:
        return {REWARD: _from_text(_reward_text(text_file, "reward.txt"))}
    raise GraderError("the verifier wrote neither reward.json nor reward.txt")


def single(rewards: Mapping[str, float]) -> float:
    """Return the reward to train on: the reward called `reward` or, if there is none, the mean of all rewards."""
    return rewards[REWARD] if REWARD in rewards else sum(rewards.values()) / len(rewards)


def step_rewards(score: Score) -> Mapping[str, float]:
    """Return the rewards of a step by name. If a label is certain, all rewards are 0. A step that the work broke,
    or that did not begin, has only one reward, which is 0."""
    rewards: Mapping[str, float] = score.detail.get("rewards", {REWARD: score.reward})
    return dict.fromkeys(rewards, 0.0) if any(label.certain for label in score.labels) else rewards


def official_rewards(score: Score) -> Mapping[str, float]:
    """Return the rewards of a step by the benchmark's protocol, by name. They are empty if it did not begin."""
    rewards: Mapping[str, float] = score.detail.get("official_rewards", score.detail.get("rewards"))
    return {REWARD: score.reward} if rewards is None else rewards


def falls_short(step: TaskStep, rewards: Mapping[str, float]) -> bool:
    """Return whether an official reward for which the step sets a minimum is missing or below this minimum."""
    return any(rewards.get(name, float("-inf")) < minimum for name, minimum in step.min_reward.items())


def _combined(task: TerminalTask, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if task.reward_strategy == FINAL:
        return dict(found[-1]) or {REWARD: 0.0}
    found = [each for each in found if each]
    names = {name: None for each in found for name in each}
    return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in names}


def combine_scores(task: TerminalTask, scores: Sequence[Score]) -> Score:
    """Return the score of a rollout from the scores of the steps that were verified.

    The result contains the rewards of the last step, or the mean of each reward over the steps, by name. A reward that
    a step lacks counts as 0.
    """
    rewards = _combined(task, [step_rewards(score) for score in scores])
    official = _combined(task, [official_rewards(score) for score in scores])
    steps = [
        {"name": step.name, "reward": single(step_rewards(score)), **score.detail}
        for step, score in zip(task.steps, scores, strict=False)
    ]
    detail: dict[str, JSON] = {
        "rewards": rewards,
        "steps": steps,
        "output": scores[-1].detail.get("output", ""),
        "exit_status": scores[-1].detail.get("exit_status"),
        "official_rewards": official,
        "category": task.metadata.category,
    }
    metrics = {"steps_verified": float(len(scores)), "steps_total": float(len(task.steps)), **rewards}
    labels = [
        replace(label, evidence=f"step {step.name}: {label.evidence}", certain=False)  # the step's reward is 0 already
        for step, score in zip(task.steps, scores, strict=False)
        for label in score.labels
    ]
    return Score(single(rewards), {**numeric_values(detail), **metrics}, detail, single(official), labels)


def _reward_text(data: bytes, name: str) -> str:
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise GraderError(f"the verifier's {name} is empty")
    return text


def _from_text(text: str) -> float:
    try:
        return _finite(float(text), "reward.txt")
    except ValueError:
        raise GraderError(f"the verifier's reward.txt is not a number: {text[:80]!r}") from None


def _from_json(text: str) -> Mapping[str, float]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraderError(f"the verifier's reward.json is not JSON: {error}") from None
    if not isinstance(values, dict) or not values:
        raise GraderError("the verifier's reward.json must be an object of numbers")
    rewards = {}
    for name, value in values.items():
        if (found := number(value)) is None:
            raise GraderError(f"the verifier's reward.json: {name} is not a number: {value!r:.100}")
        rewards[name] = _finite(found, "reward.json")
    return rewards


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise GraderError(f"the verifier's {name} holds {value}, which is not a reward")
    return value
