"""Harbor's own trial in our slots: an environment and an agent for Harbor, which only .venv-graders has."""

from __future__ import annotations

import json
import shlex
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from palaestra.rollouts.spec import Phase
from palaestra_slots.core.types import Task
from palaestra_slots.images.as_user import as_user
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot
from palaestra_slots.sandbox.transfer import download_dir, upload_dir
from palaestra_suites.images.pytest_toolchain import working_command
from palaestra_suites.terminal_bench.task_environment import ResolvedTask
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment

PYTEST = """#!/bin/sh
exec {python} -c 'import sys; sys.path += {packages}; import pytest; sys.exit(pytest.console_main())' "$@"
"""


@dataclass(frozen=True)
class Place:
    """Where a trial takes place, and the scripts that its agent runs: one for each step."""

    environment: TerminalBenchEnvironment
    pool: SlotPool
    task: Task
    scripts: tuple[str, ...]


PLACE: ContextVar[Place] = ContextVar("place")


class SlotEnvironment(BaseEnvironment):
    """A slot in which our own environment has prepared the task. The image has pytest."""

    _slot: Slot

    @staticmethod
    def type() -> str:
        return "slot"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._place = place = PLACE.get()
        task = await place.environment.resolve(place.task)
        self._work: ResolvedTask = task.data
        self._slot = await place.pool.acquire(f"harbor:{task.id}", spec=place.environment.slot_spec(task, Phase.AGENT))
        if place.environment.shared_setup(task) is not None:
            await place.environment.prepare_shared(task, self._slot)
        await place.environment.prepare(task, self._slot)
        if self._work.tools.commands:
            command = shlex.join(await working_command(self._slot, self._work.tools))
            text = PYTEST.format(packages=json.dumps(self._work.tools.dependencies), python=command)
            await self._slot.write_text("/usr/local/bin/pytest", text, mode=0o755)
        await self.empty_dirs(["/logs/agent", "/logs/verifier", "/logs/artifacts"])

    async def stop(self, delete: bool) -> None:
        await self._place.pool.release(self._slot)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self._resolve_user(user)
        user = self._work.root.config.user if user is None else str(user)
        done = await self._slot.execute(
            as_user(["bash", "-c", command], user),
            cwd=cwd or self._work.workdir,
            env={**self._work.env, **(self._merge_env(env) or {})},
            timeout_s=timeout_sec or 300,
        )
        return ExecResult(stdout=done.output, stderr="", return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._slot.write_bytes(target_path, Path(source_path).read_bytes())

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await upload_dir(self._slot, Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).write_bytes(await self._slot.read_bytes(source_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await download_dir(self._slot, source_dir, Path(target_dir))


class ScriptAgent(BaseAgent):
    """Runs the scripts of the place, one at each call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scripts = iter(PLACE.get().scripts)

    @staticmethod
    def name() -> str:
        return "script"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: object) -> None:
        await environment.exec(next(self._scripts, "true"))


HERE = __name__


async def rewards_of(place: Place, folder: Path, trials: Path) -> dict[str, float] | str:
    """The rewards of one trial of a task's folder, or the name of the exception that left it without any."""
    token = PLACE.set(place)
    try:
        config = TrialConfig(
            task=TaskConfig(path=folder),
            trials_dir=trials,
            agent=AgentConfig(import_path=f"{HERE}:ScriptAgent"),
            environment=EnvironmentConfig(import_path=f"{HERE}:SlotEnvironment"),
        )
        result = await (await Trial.create(config)).run()
    finally:
        PLACE.reset(token)
    if result.verifier_result is not None:
        return {name: float(value) for name, value in (result.verifier_result.rewards or {}).items()}
    steps = [each.exception_info for each in result.step_results or ()]
    why = next((each for each in (result.exception_info, *steps) if each is not None), None)
    return f"{why.exception_type}: {why.exception_message}" if why else "nothing"
