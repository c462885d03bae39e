"""Write or fix small programs, checked by hidden tests.

A task is a prompt, some files, and tests that are neither in the prompt nor in the agent's slot. When the agent has
finished, the tests run over its work in a separate slot, with an interpreter that the agent cannot change. The reward
is 1.0 if every test passes, else 0.0. Signs of reward hacking become labels (`grading/falsified.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import PurePosixPath

import yaml
from pydantic import Field

from palaestra.envs import cache_key
from palaestra.envs.api.listed_environment import ListedEnvironment
from palaestra.envs.config.fields import ListedEnvConfig
from palaestra.envs.datasets import Row, read_rows
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase
from palaestra_slots.core.errors import PrepareError, TaskError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Label, Score, Task, ToolStep
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSpec, View
from palaestra_suites.grading.copied_answers import copied_answers, python_texts
from palaestra_suites.grading.falsified import Controlled, control
from palaestra_suites.grading.harness import TestRun
from palaestra_suites.grading.hidden_tests import errors_of, run_suite
from palaestra_suites.hermes_swe.programming_task import ProgrammingTask, parse_row
from palaestra_suites.toolchain.toolchain import interpreter

BUILT_IN = "built-in"
"""The name of the built-in dataset."""

SYSTEM_PROMPT = (
    "You are a software engineer who works in a terminal. Your commands start in the working directory. Look at what "
    "is there, write the program, try it out, and say briefly what you did when it works. Hidden tests check it."
)


class HermesSweEnvConfig(ListedEnvConfig):
    """Settings of the environment."""

    dataset_name: str | None = Field(
        default=BUILT_IN,
        description=f"A JSONL, CSV or Parquet file, a folder of them, a Hub dataset, or {BUILT_IN}.",
    )
    dataset_split: str = Field(default="test", description="The split of a Hub dataset.")
    max_items: int = Field(default=0, ge=0, description="Maximum number of tasks from the dataset; 0 means all.")
    test_timeout_s: float = Field(default=60, gt=0, description="Time limit in seconds of a task's tests.")
    controls: bool = Field(
        default=True,
        description="Run falsified tests, which must fail, over work that passes its tests, and watch the test run.",
    )
    enabled_toolsets: list[str] | None = Field(default=["terminal", "file"], description="The agent's toolsets.")
    system_prompt: str | None = Field(default=SYSTEM_PROMPT, description="The system message.")
    total_steps: int = Field(default=-1, ge=-1, description="Maximum number of groups; -1 means one for every task.")
    allow_network: bool = Field(default=False, description="Whether the agent's commands reach the network.")


class HermesSweEnvironment(ListedEnvironment):
    """Write or fix small programs, checked by hidden tests.

    The default dataset is a few built-in tasks. They do not use the network.
    """

    name = "hermes_swe"
    official_name = "resolved"
    config_class = HermesSweEnvConfig
    config: HermesSweEnvConfig

    def __init__(self, config: HermesSweEnvConfig) -> None:
        super().__init__(config)
        self._python, self._mounts = interpreter()

    async def load(self) -> Iterable[JSON | TaskError]:
        found: list[ProgrammingTask | TaskError] = []
        good = 0
        for item in self._tasks():
            found.append(item)
            good += isinstance(item, ProgrammingTask)
            if 0 < self.config.max_items == good:
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

    def item_id(self, item: JSON) -> str:
        return str(item.id)

    def prompt(self, item: JSON) -> str:
        return str(item.prompt)

    def solution(self, item: JSON) -> JSON:
        if item.solution is None:
            return None
        steps: Mapping[str, str] = item.solution
        return [
            ToolStep("write_file", {"path": str(PurePosixPath(WORKSPACE, path)), "content": text})
            for path, text in steps.items()
        ]

    def task(self, item: JSON) -> Task:
        return replace(super().task(item), files=item.files)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        return replace(super().slot_spec(task, phase), mounts=self._mounts)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        """Check the task in a fork. At least one test must fail at first, and all tests must pass on the reference
        solution, if there is one.

        Grading also needs forks, so an isolation level without forks fails here, before any model call.
        """
        item: ProgrammingTask = task.data
        async with sandbox.fork() as fork:
            before = await self._run_suite(fork, item.suite.text)
            if not errors_of(before, item.suite.names):
                raise TaskError(f"{task.id}: its tests pass before any work is done")
            if item.solution is not None:
                for path, text in item.solution.items():
                    await fork.write_text(path, text)
                after = await self._run_suite(fork, item.suite.text)
                for name, error in errors_of(after, item.suite.names).items():
                    raise PrepareError(
                        f"{task.id}: its reference solution does not pass {name}:\n{without_middle(error, 1000)}"
                    )

    def recipe(self, task: Task) -> JSON:
        """Return the cache key of the preparation, which depends only on the task and the time limit. Return None if a
        subclass overrides `prepare`."""
        if type(self).prepare is not HermesSweEnvironment.prepare:
            return None
        return [cache_key.of_data(task.data, task.id), self.config.test_timeout_s]

    async def _run_suite(self, slot: Slot, text: str) -> TestRun:
        return await self._run_in_time(slot, text, self.config.test_timeout_s)

    async def _run_in_time(self, slot: Slot, text: str, timeout_s: float) -> TestRun:
        watching = self.config.controls
        command = [self._python, "-I", "-S", "-B"]
        return await run_suite(slot, command, WORKSPACE, text, timeout_s=timeout_s, watching=watching)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        item: ProgrammingTask = rollout.task.data
        slot = await grading.slot(View(only=(WORKSPACE,)))
        started, limit_s = time.monotonic(), grading.limit_s(self.config.test_timeout_s)
        async with slot.fork() as fork:
            run = await self._run_in_time(fork, item.suite.text, limit_s)
        grading.took(time.monotonic() - started)
        run.check_ended(f"{item.id}, within {limit_s:g} s")
        errors = errors_of(run, item.suite.names)
        controls, copied = Controlled(), list[Label]()
        if not errors and self.config.controls:
            controls = await self._control(slot, item)
            work = await python_texts(slot, (change.path for change in await grading.changes()))
            copied = await copied_answers({"": item.suite.text}, item.suite.names, work, item.known_texts())
        detail: dict[str, JSON] = {
            "not_passed": dict(islice(errors.items(), 20)),
            "output": run.output,
            "uncontrolled": list(controls.uncontrolled[:50]),
        }
        passed = len(item.suite.names) - len(errors)
        official = float(not errors)
        metrics = {"tests_passed": float(passed), "tests_total": float(len(item.suite.names)), "resolved": official}
        labels = (*controls.labels, *copied, *run.labels)
        return Score(official, metrics, detail, official=official, labels=labels)

    async def _control(self, slot: Slot, item: ProgrammingTask) -> Controlled:
        """Run the falsified tests over work that passes its tests."""

        async def on_work(texts: Mapping[str, str]) -> TestRun:
            async with slot.fork() as fork:
                return await self._run_suite(fork, texts[""])

        async def on_reference(texts: Mapping[str, str]) -> TestRun:
            return await self._run_over({**item.files, **(item.solution or {})}, slot, texts[""])

        reference = None if item.solution is None else on_reference
        return await control({"": item.suite.text}, item.suite.names, on_work, reference)

    async def _run_over(self, files: Mapping[str, str], slot: Slot, text: str) -> TestRun:
        """Run the tests over these files in place of the work."""
        async with slot.fork() as fork:
            for entry in await fork.list_dir(WORKSPACE):
                await fork.remove(entry.path)
            for path, content in files.items():
                await fork.write_text(str(PurePosixPath(WORKSPACE, path)), content)
            return await self._run_suite(fork, text)
