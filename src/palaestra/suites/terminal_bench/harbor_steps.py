"""Reads the steps of a Harbor task that has several: `[[steps]]` in task.toml, and a folder for each.

    steps/NAME/instruction.md  tests/test.sh  solution/solve.sh  workdir/  workdir/setup.sh

The task's own `tests/` are below those of every step, which go before them file by file; a step without a `test.sh` or
without a solution has the task's. Format: `StepConfig` and `MultiStepTrial` of Harbor 0.25.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.suites.images.image_spec import Unsupported
from palaestra.suites.terminal_bench.terminal_task import FINAL, MEAN, Solution, Step, Verifier
from palaestra.suites.terminal_bench.typed_sections import Section

_NAME = re.compile(r"[^\x00-\x1f/\\<>:\"|?*]+")

ReadText = Callable[[Path], str]
ReadVerifier = Callable[[Path, Section, Path | None], Verifier]
ReadSolution = Callable[[Path, Section], Solution | None]


def read_steps(
    config: Section, folder: Path, text: ReadText, verifier: ReadVerifier, solution: ReadSolution
) -> tuple[Step, ...]:
    """The steps in order; none for a task of one. The readers are those of a task of one step. Raises `TaskError`."""
    steps: dict[str, Step] = {}
    for section in config.sections("steps"):
        name = section.text("name") or ""
        if not _NAME.fullmatch(name) or name != name.strip(" .") or name.casefold() in map(str.casefold, steps):
            raise TaskError(f"{section.key('name')} must be the name of a folder, and of no other step, not {name!r}")
        _check_supported(section)
        place = folder / "steps" / name
        own, task = section.section("verifier"), config.section("verifier")
        merged = Section({**task.values, **own.values}, section.key("verifier"))
        try:
            steps[name] = Step(
                name=name,
                instruction=text(place / "instruction.md"),
                verifier=verifier(place / "tests", merged, folder / "tests"),
                solution=solution(place / "solution", config.section("solution"))
                or solution(folder / "solution", config.section("solution")),
                min_reward=_min_reward(section),
                workdir=place / "workdir" if (place / "workdir").is_dir() else None,
                agent_timeout_s=section.section("agent").number("timeout_sec"),
            )
        except Unsupported:
            raise
        except TaskError as error:
            raise TaskError(f"step {name}: {error}") from None
    if not steps and (folder / "steps").is_dir():
        raise TaskError("it has a folder of steps, and task.toml names none ([[steps]])")
    return tuple(steps.values())


def read_strategy(config: Section) -> str:
    """How the rewards of steps become one."""
    strategy = config.text("multi_step_reward_strategy") or MEAN
    if strategy not in (MEAN, FINAL):
        raise TaskError(f"multi_step_reward_strategy must be {MEAN} or {FINAL}, not {strategy!r}")
    return strategy


def _check_supported(section: Section) -> None:
    if section.section("healthcheck").values:
        raise Unsupported(
            f"it waits for a service that its image starts ({section.key('healthcheck')}), and slots start none"
        )
    if section.section("verifier").text("environment_mode") == "separate":
        raise Unsupported(f"a verifier of it has an environment of its own ({section.key('verifier')})")
    for name in ("user", "network_mode"):
        if section.section("agent").values.get(name) is not None:
            raise Unsupported(f"its steps differ in {section.key('agent')}.{name}, and a rollout has one slot")


def _min_reward(section: Section) -> Mapping[str, float]:
    """What each reward must be for the next step to begin; a plain number is for `reward`."""
    value = section.values.get("min_reward")
    values = {} if value is None else value if isinstance(value, Mapping) else {"reward": value}
    for name, least in values.items():
        if isinstance(least, bool) or not isinstance(least, int | float):
            raise TaskError(f"{section.key('min_reward')} must be a number, or numbers by name, not {value!r} ({name})")
    return {str(name): float(least) for name, least in values.items()}
