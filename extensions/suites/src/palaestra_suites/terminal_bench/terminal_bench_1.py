"""Read a task directory of Terminal-Bench 1.

    task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  solution.sh or solution.yaml  tests/

Format: terminal-bench 0.2.18. Every test that pytest reports must pass. A `solution.yaml` counts as a solution only if
all its steps are commands, and none of them types into a running program. The agent works in the service `client` of
the compose file.
"""

from __future__ import annotations

from pathlib import Path

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import Limits
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.task_files import TypedFields, Unsupported, read_yaml_file
from palaestra_suites.terminal_bench.compose import COMPOSE_NAME, OWN_IMAGE, read_services, single_service
from palaestra_suites.terminal_bench.service import MAIN, Service
from palaestra_suites.terminal_bench.terminal_task import (
    LOGS_DIR,
    TESTS_DIR,
    Format,
    SolutionScript,
    TaskAgent,
    TaskMetadata,
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

_CLIENT = "client"  # the service in which the agent works
_COMPOSE_VARIABLES = {
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": OWN_IMAGE,
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": _CLIENT,
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": "task",
}


def is_task(folder: Path) -> bool:
    """Return whether the folder is a Terminal-Bench 1 task."""
    return (folder / CONFIG_NAME).is_file()


def read_task(folder: Path) -> TerminalTask:
    """Return the task of a folder. Raises `TaskError`, and `Unsupported` for a task that slots cannot run."""
    config = TypedFields(read_yaml_file(folder / CONFIG_NAME))
    parser = config.text("parser_name") or "pytest"
    if parser != "pytest":
        raise Unsupported(f"parser_name {parser!r} is not supported; only pytest's results are read")
    services = _services(folder)
    main = services.get(MAIN)
    if main is None and not (folder / "Dockerfile").is_file():
        raise TaskError("Dockerfile is missing")
    workdir = main.workdir if main is not None else single_service(folder / COMPOSE_NAME).get("working_dir")
    return TerminalTask(
        name=folder.name,
        format=Format.TERMINAL_BENCH_1,
        path=folder,
        instruction=config.required("instruction"),
        recipe=ImageRecipe(folder=folder, dockerfile=folder / "Dockerfile") if main is None else main.recipe,
        verifier=_verifier(folder, config),
        solution=_solution_script(folder),
        metadata=TaskMetadata(
            config.text("category") or "uncategorized", config.text("difficulty") or "unknown", config.texts("tags")
        ),
        agent=TaskAgent(None if main is None else main.user, config.number("max_agent_timeout_sec")),
        env={} if main is None else main.env,
        workdir=workdir if isinstance(workdir, str) else None,
        limits=Limits() if main is None else main.limits,
        services=tuple(services.values()),
    )


def _services(folder: Path) -> dict[str, Service]:
    """Return the services of a compose file that has several; empty for a single one, which is the agent's."""
    path = folder / COMPOSE_NAME
    content = read_yaml_file(path) if path.is_file() else None
    listed = content.get("services") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or len(listed) < 2:
        return {}
    dockerfile = folder / "Dockerfile"
    own = ImageRecipe(folder=folder, dockerfile=dockerfile) if dockerfile.is_file() else None
    return read_services(folder, _COMPOSE_VARIABLES | VARIABLES, own, Limits(), task=folder, agents=_CLIENT)


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


def _solution_script(folder: Path) -> SolutionScript | None:
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
