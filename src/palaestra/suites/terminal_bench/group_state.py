"""A terminal task with what its group has found out about it, before any slot is leased."""

from __future__ import annotations

from dataclasses import dataclass, replace

from palaestra.core.errors import TaskError
from palaestra.suites.images.pytest_toolchain import TestTools
from palaestra.suites.images.task_root import Root
from palaestra.suites.terminal_bench.scripts import Script, offline, with_others
from palaestra.suites.terminal_bench.terminal_task import Step, TerminalTask


@dataclass(frozen=True, slots=True)
class Part:
    """What is asked and checked at once: a task, or one step of it as a task of its own, with its test script."""

    task: TerminalTask
    script: Script
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A task with its root, its parts in order, and what their tests run with."""

    task: TerminalTask
    root: Root
    parts: tuple[Part, ...]
    tools: TestTools

    @property
    def workdir(self) -> str:
        """Where commands start."""
        return self.task.workdir or self.root.config.workdir

    @property
    def user(self) -> str:
        """Whose commands are an agent's."""
        return self.task.agent_user or self.root.config.user

    @property
    def env(self) -> dict[str, str]:
        """The variables of every command."""
        return {**self.root.config.env, **self.task.env}


def parts_of(task: TerminalTask) -> tuple[Part, ...]:
    """The parts of a task. Raises `TaskError` for a test script that cannot be read."""
    if not task.steps:
        return (Part(task, _script(task)),)
    return tuple(Part(each, _script(each), step) for step in task.steps for each in [task.of_step(step)])


def _script(task: TerminalTask) -> Script:
    name, files = task.verifier.script, task.verifier.files()
    path = files.pop(name, task.verifier.folder / name)  # Terminal-Bench 1 keeps it beside the folder
    try:
        text = path.read_text(encoding="utf-8")
        others = {each: found.read_text(encoding="utf-8") for each, found in files.items() if each.endswith(".sh")}
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from None
    script = with_others(offline(text), others)
    # Terminal-Bench 1 has no verdict but pytest's, however the script comes to start it.
    return replace(script, pytest=script.pytest or task.format is task.format.TERMINAL_BENCH_1)
