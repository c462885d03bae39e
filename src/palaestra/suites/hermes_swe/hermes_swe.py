"""Write or fix small programs, checked by hidden tests.

A task is a prompt, some files, and tests that are neither in the prompt nor in a slot of the agent. They run over the
sealed work with an interpreter that the agent cannot change. The reward is 1.0 if every test passes, else 0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import islice
from pathlib import PurePosixPath
from random import SystemRandom
from typing import ClassVar

import yaml
from pydantic import Field

from palaestra.agent.result import AgentResult
from palaestra.core.errors import PrepareError, TaskError
from palaestra.core.types import JSON, Score, Task, ToolStep
from palaestra.envs import cache_key
from palaestra.envs.api.base_env import Item
from palaestra.envs.api.dataset_env import ListedEnv, ListedEnvConfig
from palaestra.envs.api.hermes_env import ContractEnvironment
from palaestra.envs.datasets import Row, read_rows
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase
from palaestra.sandbox.slot import WORKSPACE, Slot, SlotSpec, View
from palaestra.suites.grading.controls import TAMPERED, failing_copy, mixed_copies, watching_copy
from palaestra.suites.grading.harness import run_harness
from palaestra.suites.grading.toolchain import interpreter
from palaestra.suites.hermes_swe.programming_task import HiddenTests, ProgrammingTask, parse_row

BUILT_IN = "built-in"
"""The built-in dataset."""

SYSTEM_PROMPT = (
    "You are a software engineer who works in a terminal. Your commands start in the working directory. Look at what "
    "is there, write the program, try it out, and say briefly what you did when it works. Hidden tests check it."
)

HARNESS_DIR = "/tmp/.palaestra-tests"  # noqa: S108  in the slot, where no layer keeps it


class HermesSweEnvConfig(ListedEnvConfig):
    """Settings of the environment."""

    dataset_name: str | None = Field(
        default=BUILT_IN,
        description=f"A JSONL, CSV or Parquet file, a folder of them, a hub name, or {BUILT_IN}.",
    )
    dataset_split: str = Field(default="test", description="The split of a hub dataset.")
    max_items: int = Field(default=0, ge=0, description="Tasks to take from the dataset, at most; 0 means all.")
    test_timeout_s: float = Field(default=60, gt=0, description="Time limit in seconds of a task's tests.")
    controls: bool = Field(
        default=True,
        description="Run passing work against copies of its tests that must fail.",
    )
    enabled_toolsets: list[str] | None = Field(default=["terminal", "file"], description="The agent's toolsets.")
    system_prompt: str | None = Field(default=SYSTEM_PROMPT, description="The system message.")
    total_steps: int = Field(default=-1, ge=-1, description="Groups to process, at most; -1 means every task once.")
    allow_network: bool = Field(default=False, description="Whether the agent's commands reach the network.")


class HermesSweEnvironment(ContractEnvironment):
    """Prepares and grades the tasks."""

    def __init__(self, inner: HermesSweEnv) -> None:
        super().__init__(inner)
        self.settings = inner.config
        self._python, self._mounts = interpreter()

    def task(self, item: Item, number: int) -> Task:
        return replace(super().task(item, number), files=item.files)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        return replace(super().slot_spec(task, phase), mounts=self._mounts)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        """Check the task in a fork: its tests fail at first and pass on the reference solution.

        Grading needs forks, too, so an isolation level without forks fails here, before any model call.
        """
        item: ProgrammingTask = task.data
        async with sandbox.fork() as fork:
            before = await self._run(fork, WORKSPACE, item)
            if before.good:
                raise TaskError(f"{task.id}: its tests pass before anything was done")
            if item.solution is not None:
                for path, text in item.solution.items():
                    await fork.write_text(path, text)
                after = await self._run(fork, WORKSPACE, item)
                for name, error in after.errors.items():
                    raise PrepareError(f"{task.id}: its reference solution does not pass {name}:\n{error[-1000:]}")

    def recipe(self, task: Task) -> JSON:
        """The task and the time limit: the preparation depends on nothing else."""
        if type(self).prepare is not HermesSweEnvironment.prepare:
            return None
        return [cache_key.of_data(task.data, task.id), self.settings.test_timeout_s]

    async def _run(self, slot: Slot, root: str, item: ProgrammingTask) -> TestOutcome:
        return await run_suite(slot, self._python, root, item.suite, timeout_s=self.settings.test_timeout_s)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        item: ProgrammingTask = rollout.task.data
        slot = await grading.slot(View(only=(WORKSPACE,)))
        async with slot.fork() as fork:
            run = await self._run(fork, WORKSPACE, item)
        problem = None
        if run.good and self.settings.controls:
            timeout_s = self.settings.test_timeout_s
            problem = await find_tampering(slot, self._python, WORKSPACE, item.suite, timeout_s=timeout_s)
        detail: dict[str, JSON] = {
            "not_passed": dict(islice(run.errors.items(), 20)),
            "output": run.output,
            "tampering": problem,
        }
        metrics = {"tests_passed": float(run.passed), "tests_total": float(len(item.suite.names))}
        return Score(float(run.good and problem is None), metrics, detail)


class HermesSweEnv(ListedEnv):
    """Write or fix small programs, checked by hidden tests.

    Without a dataset it has a few built-in tasks. Nothing uses the network.
    """

    name: ClassVar[str | None] = "hermes_swe"
    env_config_cls: ClassVar[type[ListedEnvConfig]] = HermesSweEnvConfig
    config: HermesSweEnvConfig

    def as_environment(self) -> HermesSweEnvironment:
        return HermesSweEnvironment(self)

    async def load(self) -> Iterable[Item | TaskError]:
        found: list[ProgrammingTask | TaskError] = []
        good = 0
        for item in self._tasks():
            found.append(item)
            good += isinstance(item, ProgrammingTask)
            if good == self.config.max_items:
                break
        return found

    def _tasks(self) -> Iterator[ProgrammingTask | TaskError]:
        for number, row in self._rows():
            try:
                if isinstance(row, TaskError):
                    raise TaskError(f"row {number}: {row}")
                yield parse_row(row, number, self.config.prompt_field)
            except TaskError as error:
                yield error

    def _rows(self) -> Iterator[tuple[int, Row | TaskError]]:
        source = self.config.dataset_name or BUILT_IN
        if source == BUILT_IN:
            text = resources.files(__package__).joinpath("builtin.yaml").read_text(encoding="utf-8")
            return enumerate(yaml.safe_load(text), 1)
        return read_rows(source, split=self.config.dataset_split, fields=self.config.dataset_fields)

    def item_id(self, item: Item, number: int) -> str:
        return str(item.id)

    def format_prompt(self, item: Item) -> str:
        return str(item.prompt)

    def reference_solution(self, item: Item) -> JSON:
        if item.solution is None:
            return None
        steps: Mapping[str, str] = item.solution
        return [
            ToolStep("write_file", {"path": str(PurePosixPath(WORKSPACE, path)), "content": text})
            for path, text in steps.items()
        ]

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        raise NotImplementedError("rollouts of this environment are graded by HermesSweEnvironment.score")


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One run of the tests. `errors` maps each test that did not pass to its traceback."""

    __test__ = False  # pytest: not a test class

    passed: int
    errors: Mapping[str, str]
    output: str

    @property
    def good(self) -> bool:
        """Whether every test passed."""
        return not self.errors


async def run_suite(slot: Slot, python: str, root: str, suite: HiddenTests, *, timeout_s: float) -> TestOutcome:
    """Run the tests over the files in `root`. Raises `GraderError` if the harness did not start."""
    records, done = await run_harness(
        slot,
        [python, "-I", "-S", "-B"],
        "python_test_runner.py",
        {"root": root, "tests": suite.text, "names": suite.names},
        folder=HARNESS_DIR,
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
        timeout_s=timeout_s,
    )
    ended = any(record["kind"] == "finish" for record in records)
    reported = {str(record["name"]): record for record in records if record["kind"] == "test"}
    missing = "the test run timed out" if done.metadata.get("timeout") else "the test run ended before this test"
    errors = {}
    for name in suite.names:
        record = reported.get(name)
        if record is None or not ended:
            errors[name] = missing
        elif not record["passed"]:
            errors[name] = str(record["error"])
    return TestOutcome(len(suite.names) - len(errors), errors, done.output[-4000:])


async def find_tampering(slot: Slot, python: str, root: str, suite: HiddenTests, *, timeout_s: float) -> str | None:
    """How the workspace subverts tests that all passed, or None. No test may have run in this slot before."""

    async def run(text: str) -> TestOutcome:
        async with slot.fork() as fork:
            return await run_suite(fork, python, root, HiddenTests(text, suite.names), timeout_s=timeout_s)

    drawn = mixed_copies({"": suite.text}, suite.names, SystemRandom())
    for mixed in drawn:
        done = await run(mixed.texts[""])
        if problem := mixed.subverted_by([name for name in suite.names if name not in done.errors]):
            return problem
    if not drawn and (copy := failing_copy(suite.text)) is not None:
        done = await run(copy.text)
        if done.passed:
            return f"{done.passed} of {len(suite.names)} tests pass whatever they assert"
    if (copy := watching_copy(suite.text)) is not None:
        for name, error in (await run(copy.text)).errors.items():
            if TAMPERED in error:
                return f"{name} compares an object that equals everything"
    return None
