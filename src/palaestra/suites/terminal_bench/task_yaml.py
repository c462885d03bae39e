"""Reads a task directory of Terminal-Bench 1.

    task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  solution.sh or solution.yaml  tests/

Format: terminal-bench 0.2.18. A verdict is what pytest says of each test; all must pass. A `solution.yaml` is used
where its steps are plain commands; one that types into a running program is not a script, and the task then has no
solution here.
"""

from __future__ import annotations

from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.literals import read_yaml
from palaestra.core.types import Limits
from palaestra.suites.images.image_spec import ImageRecipe, Unsupported
from palaestra.suites.terminal_bench.compose import single_service
from palaestra.suites.terminal_bench.terminal_task import (
    LOGS_DIR,
    TESTS_DIR,
    Format,
    Solution,
    TerminalTask,
    Verifier,
)
from palaestra.suites.terminal_bench.typed_sections import Section

CONFIG_NAME = "task.yaml"

VARIABLES = {
    "TEST_DIR": TESTS_DIR,
    "T_BENCH_TEST_DIR": TESTS_DIR,
    "T_BENCH_CONTAINER_LOGS_PATH": LOGS_DIR,
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": f"{LOGS_DIR}/agent",
}
"""What the format's own compose file sets, with the paths that hold here."""


def is_task(folder: Path) -> bool:
    """Whether the folder is meant as a Terminal-Bench 1 task."""
    return (folder / CONFIG_NAME).is_file()


def read_task(folder: Path) -> TerminalTask:
    """The task of a folder. Raises `TaskError` (`Unsupported` for what slots cannot do) with one clear message."""
    config = _config(folder / CONFIG_NAME)
    parser = config.text("parser_name") or "pytest"
    if parser != "pytest":
        raise Unsupported(f"parser_name {parser!r}: only pytest's results are read")
    service = single_service(folder / "docker-compose.yaml")
    instruction = config.text("instruction")
    if instruction is None or not instruction.strip():
        raise TaskError("task.yaml has no instruction")
    if not (folder / "Dockerfile").is_file():
        raise TaskError("Dockerfile is missing")
    return TerminalTask(
        name=folder.name,
        format=Format.TERMINAL_BENCH_1,
        path=folder,
        instruction=instruction,
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


def _config(path: Path) -> Section:
    try:
        return Section(read_yaml(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise TaskError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise TaskError(f"{path.name} cannot be read: {error.strerror}") from None


def _verifier(folder: Path, config: Section) -> Verifier:
    for name in ("run-tests.sh", "tests"):
        if not (folder / name).exists():
            raise TaskError(f"{name} is missing")
    return Verifier(
        folder=folder / "tests",
        script="../run-tests.sh",
        timeout_s=config.number("max_test_timeout_sec"),
        env=VARIABLES,
    )


def _solution(folder: Path) -> Solution | None:
    if (folder / "solution.sh").is_file():
        return Solution(folder, "solution.sh")
    if (folder / "solution.yaml").is_file() and commands(folder / "solution.yaml"):
        return Solution(folder, "solution.yaml")
    return None


def commands(path: Path) -> list[str]:
    """The commands of a `solution.yaml`; none where it types something that is no command line of its own."""
    try:
        steps = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path.name} is not YAML: {error}") from None
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
