"""Read a task directory of Terminal-Bench 1.

    task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  solution.sh or solution.yaml  tests/

Format: terminal-bench 0.2.18. Every test that pytest reports must pass. A `solution.yaml` counts as a solution only if
all its steps are commands, and none of them types into a running program.
"""

from __future__ import annotations

from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.types import Limits
from palaestra.suites.images.dockerfile import ImageRecipe
from palaestra.suites.task_files import TypedFields, Unsupported, read_yaml_file
from palaestra.suites.terminal_bench.compose import single_service
from palaestra.suites.terminal_bench.terminal_task import (
    LOGS_DIR,
    TESTS_DIR,
    Format,
    SolutionScript,
    TerminalTask,
    Verifier,
)

CONFIG_NAME = "task.yaml"

VARIABLES = {
    "TEST_DIR": TESTS_DIR,
    "T_BENCH_TEST_DIR": TESTS_DIR,
    "T_BENCH_CONTAINER_LOGS_PATH": LOGS_DIR,
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": f"{LOGS_DIR}/agent",
}
"""The variables that the format's compose file sets, with the paths that slots have."""


def is_task(folder: Path) -> bool:
    """Return whether the folder is a Terminal-Bench 1 task."""
    return (folder / CONFIG_NAME).is_file()


def read_task(folder: Path) -> TerminalTask:
    """Return the task of a folder. Raises `TaskError`, and `Unsupported` for a task that slots cannot run."""
    config = TypedFields(read_yaml_file(folder / CONFIG_NAME))
    parser = config.text("parser_name") or "pytest"
    if parser != "pytest":
        raise Unsupported(f"parser_name {parser!r} is not supported; only pytest's results are read")
    service = single_service(folder / "docker-compose.yaml")
    if not (folder / "Dockerfile").is_file():
        raise TaskError("Dockerfile is missing")
    return TerminalTask(
        name=folder.name,
        format=Format.TERMINAL_BENCH_1,
        path=folder,
        instruction=config.required("instruction"),
        recipe=ImageRecipe(folder=folder, dockerfile=folder / "Dockerfile"),
        verifier=_verifier(folder, config),
        solution=_solution(folder),
        category=config.text("category") or "uncategorized",
        difficulty=config.text("difficulty") or "unknown",
        tags=config.texts("tags"),
        workdir=service.get("working_dir") if isinstance(service.get("working_dir"), str) else None,
        agent_timeout_s=config.number("max_agent_timeout_sec"),
        limits=Limits(),
    )


def _verifier(folder: Path, config: TypedFields) -> Verifier:
    for name in ("run-tests.sh", "tests"):
        if not (folder / name).exists():
            raise TaskError(f"{name} is missing")
    return Verifier(
        folder=folder / "tests",
        script="../run-tests.sh",
        timeout_s=config.number("max_test_timeout_sec"),
        env=VARIABLES,
    )


def _solution(folder: Path) -> SolutionScript | None:
    if (folder / "solution.sh").is_file():
        return SolutionScript(folder, "solution.sh")
    if (folder / "solution.yaml").is_file() and commands(folder / "solution.yaml"):
        return SolutionScript(folder, "solution.yaml")
    return None


def commands(path: Path) -> list[str]:
    """Return the commands of a `solution.yaml`. If a step is not a command or types into a running program, the list is
    empty. Raises `TaskError`."""
    steps = read_yaml_file(path)
    if not isinstance(steps, list):
        return []
    lines = []
    for step in steps:
        if not isinstance(step, dict) or not isinstance(step.get("command"), str):
            return []
        if step.get("append_enter") is False or not step.get("block", True):
            return []
        lines.append(step["command"])
    return lines
