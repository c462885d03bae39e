"""A task of several steps: one conversation, one workspace, and a verdict after every step.

The order is Harbor's `MultiStepTrial` (0.25): a step's files are put into the task's directory and its `setup.sh` runs,
then the agent is told, then the verifier. A reward below `min_reward` ends the rollout there. The rewards of the steps
that were verified become one: the mean of each by its name (one that a step lacks counts 0), or those of the last.

Each step is sealed and graded as a task of one step is, and the agent goes on in a fork of what the grader saw: what
could speak for a verifier is as the image had it, no process is left, and no test was ever in its slot. A task that is
graded live keeps its one slot; between steps the verifier's files are removed from it.

Here a conversation goes on from step to step, which Harbor calls resuming; each step has the turns and the time of a
rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from palaestra.agent.result import AgentResult
from palaestra.core.errors import PrepareError
from palaestra.core.types import JSON, Outcome, Score
from palaestra.envs.adapters.class_adapter import numbers
from palaestra.rollouts.environment import Phase
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.slot import Slot
from palaestra.sandbox.transfer import upload_dir
from palaestra.suites.terminal_bench.group_state import Part, Work
from palaestra.suites.terminal_bench.rewards import single
from palaestra.suites.terminal_bench.terminal_task import FINAL, TESTS_DIR, VERIFIER_LOGS, TerminalTask
from palaestra.suites.terminal_bench.verifier_files import HARNESS_DIR

if TYPE_CHECKING:
    from palaestra.suites.terminal_bench.environment import TerminalBenchEnvironment

_SETUP_S = 600.0


class Stepwise:
    """One rollout through the steps of its task. `scores` are those of the steps that were verified."""

    def __init__(self, environment: TerminalBenchEnvironment, rollout: Rollout) -> None:
        self._environment = environment
        self._rollout = rollout
        self._gradings: list[Grading] = []
        self.scores: list[Score] = []

    async def run(self) -> AgentResult:
        """Let the agent work step by step. A step that ended at a limit is verified, and the next may follow."""
        rollout, work = self._rollout, self._rollout.task.data
        try:
            for number, part in enumerate(work.parts):
                await self._begin(work, part)
                result = await self._environment.converse(rollout, part, goes_on=number > 0)
                if not result.outcome.scored:
                    return result
                self.scores.append(await self._verified(part))
                if result.outcome is Outcome.LENGTH or falls_short(part, self.scores[-1]):
                    break
            return result
        finally:
            await asyncio.shield(self._close())

    async def _begin(self, work: Work, part: Part) -> None:
        """What the step brings along, in the agent's slot."""
        step, rollout = part.step, self._rollout
        if self._gradings:
            slot = await rollout.sandbox()
            if self._gradings[-1].live:
                await _clear(slot)
            else:
                await self._environment.bring_back(slot)
        if step is None or step.workdir is None:
            return
        slot = await self._environment.agent_slot(rollout)
        await upload_dir(slot, step.workdir, work.workdir)
        if (step.workdir / "setup.sh").is_file():
            done = await slot.execute(["bash", f"{work.workdir}/setup.sh"], cwd=work.workdir, timeout_s=_SETUP_S)
            if not done.success:
                raise PrepareError(f"the setup.sh of step {step.name} failed ({done.error}):\n{done.output[-2000:]}")

    async def _verified(self, part: Part) -> Score:
        rollout = self._rollout
        grading = Grading(rollout, self._environment.slot_spec(rollout.task, Phase.GRADE))
        self._gradings.append(grading)
        with rollout.stage("grade"):
            score = await self._environment.verified(rollout, grading, part)
            await grading.hand_back()
        return score

    async def _close(self) -> None:
        """The agent's slot first: it stands on the layers of the gradings."""
        if self._gradings and not self._gradings[-1].live:
            await self._rollout.aclose()
        for grading in reversed(self._gradings):
            await grading.aclose()


async def _clear(slot: Slot) -> None:
    """Remove what a verifier has left in the agent's own slot."""
    command = f"rm -rf {HARNESS_DIR} {TESTS_DIR} && find {VERIFIER_LOGS} -mindepth 1 -delete"
    await slot.execute(["/bin/sh", "-c", command], cwd="/", timeout_s=60)


def rewards_of(score: Score) -> Mapping[str, float]:
    """The rewards of a step by name; all 0 where its verdict was not believed."""
    rewards: Mapping[str, float] = score.detail["rewards"]
    return dict.fromkeys(rewards, 0.0) if score.detail.get("tampering") else rewards


def falls_short(part: Part, score: Score) -> bool:
    """Whether a reward is below what the next step asks for. One that is not there is."""
    rewards = rewards_of(score)
    least = part.step.min_reward if part.step is not None else {}
    return any(rewards.get(name, float("-inf")) < wanted for name, wanted in least.items())


def combined(task: TerminalTask, scores: Sequence[Score]) -> Score:
    """The score of a rollout from those of its steps."""
    found = [rewards_of(score) for score in scores]
    if task.reward_strategy == FINAL:
        rewards = dict(found[-1])
    else:
        names = {name: None for each in found for name in each}
        rewards = {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in names}
    steps = [
        {"name": step.name, "reward": score.reward, **score.detail}
        for step, score in zip(task.steps, scores, strict=False)
    ]
    detail: dict[str, JSON] = {
        "rewards": rewards,
        "steps": steps,
        "output": scores[-1].detail.get("output", ""),
        "tampering": next((score.detail["tampering"] for score in scores if score.detail.get("tampering")), None),
        "category": task.category,
    }
    figures = {"steps_verified": float(len(scores)), "steps_total": float(len(task.steps)), **rewards}
    return Score(single(rewards), {**numbers(detail), **figures}, detail)
