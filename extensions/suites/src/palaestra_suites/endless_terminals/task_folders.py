"""Read task folders in the format of the Endless Terminals paper, prepare their workspaces, and grade with the folders'
own tests.

    native   task.json {description, truth, name}, container.def, test_initial_state.py, test_final_state.py
    Harbor   instruction.md, environment/{Dockerfile, task.json, test_initial_state.py}, tests/test_final_state.py,
             solution/solve.sh

The recipe: "Endless Terminals: Scaling RL Environments for Terminal Agents", arXiv 2601.16443. A container definition
names a base image and a `%post` script. Here the script runs as a set-up over the local root (or `image`), and the
tests of the initial state show whether that is sufficient. A Dockerfile is built by `suites/images`. A prebuilt root
file system, `ROOTS/<name of the folder>`, takes precedence over both. `truth` is not read.

The final tests also run once when the workspace is prepared. pytest must find tests then, and they must not all pass.
Each of these tests must pass when the agent's work is graded. Tests are written only into `/tmp` of the slot that runs
them, which no saved file system contains, so no agent sees them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import ConfigError, GraderError, PrepareError, TaskError
from palaestra_slots.core.types import Score
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_files import TypedFields, check_links, read_task_text
from palaestra_slots.sandbox.slot import Rung, Slot
from palaestra_suites.grading.copied_answers import copied_answers, python_files, python_texts
from palaestra_suites.grading.falsified import Controlled, control
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.grading.repository_tests import run_files
from palaestra_suites.task_paths import TaskScope, scope_of
from palaestra_suites.toolchain.toolchain import Toolchain

_INSTALLERS = re.compile(
    r"(DEBIAN_FRONTEND=\w+\s+)?(sudo\s+)?"
    r"(apt-get|apt|apk|dnf|yum|pip3?|python3? -m pip|rm -rf /var/lib/apt)\b"
)
_ROOT_ENDINGS = ("", ".tar", ".tar.gz")

HOME = "/home/user"
"""The working directory of the recipe's tasks."""

TESTS_DIR = "/tmp/palaestra-tests"  # noqa: S108  in the slot
_TEST_FILE = "test_state.py"
_SETUP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class FolderTask:
    """One task of a folder. If `image` is None, the root file system is the one that `recipe` builds, or the default
    one if `recipe` is None too. `setup` is empty if no set-up is needed."""

    id: str
    prompt: str
    setup: str
    initial_tests: str
    final_tests: str
    image: str | None = None
    solution: str | None = None
    recipe: ImageRecipe | None = None


def read_folder(
    root: Path, roots: Path | None = None, build_timeout_s: float = 600.0
) -> Iterator[FolderTask | TaskError]:
    """Yield the tasks below `root` in the order of their folders' names, with an error in place of each task that
    cannot be used here. `root` may itself be a task.

    Raises `ConfigError` if `root` is not a folder or contains no task.
    """
    if not root.is_dir():
        raise ConfigError(f"the folder of tasks {root} does not exist")
    places = [root] if _is_task(root) else sorted(path for path in root.iterdir() if path.is_dir() and _is_task(path))
    if not places:
        raise ConfigError(f"{root} contains no task: no folder with task.json or instruction.md")
    for place in places:
        try:
            yield read_task(place, roots, build_timeout_s)
        except TaskError as error:
            yield error


def _is_task(place: Path) -> bool:
    return (place / "task.json").is_file() or (place / "instruction.md").is_file()


def read_task(place: Path, roots: Path | None = None, build_timeout_s: float = 600.0) -> FolderTask:
    """Return the task of one folder. Raises `TaskError`."""
    check_links(place)
    image = _ready_root(place.name, roots)
    harbor = (place / "instruction.md").is_file()
    prompt = read_task_text(place / "instruction.md") if harbor else _description(place / "task.json")
    environment, tests = (place / "environment", place / "tests") if harbor else (place, place)
    solution = place / "solution" / "solve.sh"
    dockerfile = environment / "Dockerfile"
    built = image is None and dockerfile.is_file() and not (environment / "container.def").is_file()
    recipe = ImageRecipe(environment, dockerfile, build_timeout_s=build_timeout_s) if built else None
    return FolderTask(
        id=place.name,
        prompt=prompt.strip(),
        setup="" if image or recipe else _setup(place, environment),
        initial_tests=_optional(environment / "test_initial_state.py"),
        final_tests=read_task_text(tests / "test_final_state.py"),
        image=image,
        solution=read_task_text(solution) if solution.is_file() else None,
        recipe=recipe,
    )


def _ready_root(name: str, roots: Path | None) -> str | None:
    """Return the path of the prebuilt root file system of a task, or None if there is none."""
    found = [roots / f"{name}{ending}" for ending in _ROOT_ENDINGS if roots is not None]
    return next((str(path.absolute()) for path in found if path.exists()), None)


def _setup(place: Path, environment: Path) -> str:
    definition = environment / "container.def"
    if definition.is_file():
        return post_script(read_task_text(definition), place.name)
    raise TaskError(
        f"{place.name}: it has neither a container.def nor a Dockerfile, and --env.roots has no root file system for it"
    )


def post_script(definition: str, name: str) -> str:
    """Return the `%post` section as a script, without commands that install packages. Raises `TaskError`.

    Packages cannot be installed without a network; the tests of the initial state show whether they are needed.
    """
    sections = re.split(r"^%(\w+).*$", definition, flags=re.MULTILINE)
    named = dict(zip(sections[1::2], sections[2::2], strict=True))
    if "files" in named and named["files"].strip():
        raise TaskError(f"{name}: its container definition copies files from the machine that builds it (%files)")
    body = re.sub(r"\\\n\s*", "", named.get("post", ""))
    lines = (_without_installers(line) for line in body.splitlines())
    return "".join(f"{line}\n" for line in lines if line is not None)


def _without_installers(line: str) -> str | None:
    """Return a command line without the parts that install packages, or None if nothing is left."""
    if not _INSTALLERS.match(line.strip()):
        return line
    kept = [part for part in line.strip().split("&&") if not _INSTALLERS.match(part.strip())]
    return "&&".join(kept).strip() or None


def _description(path: Path) -> str:
    try:
        return TypedFields(json.loads(read_task_text(path)), path.name).required("description")
    except (ValueError, RecursionError) as error:  # TaskError is a ValueError
        raise TaskError(f"{path.parent.name}: {error}") from None


def _optional(path: Path) -> str:
    return read_task_text(path) if path.is_file() else ""


async def prepare_folder(task: FolderTask, slot: Slot, toolchain: Toolchain, timeout_s: float) -> frozenset[str]:
    """Make and check the initial state, and return the names of the tests that decide the grade.

    Raises `PrepareError` or `TaskError` for a task that cannot be used.
    """
    await slot.execute(["mkdir", "-p", HOME], cwd="/")
    if task.setup:
        argv, problem = ["bash", "-e", "-c", task.setup], f"{task.id}: its %post script fails"
        await check_execute(slot, argv, problem, timeout_s=_SETUP_TIMEOUT_S, shown=1000)
    if task.initial_tests:
        first = await _run_tests(task.initial_tests, slot, toolchain, timeout_s)
        if bad := _not_passed(first):
            raise PrepareError(
                f"{task.id}: its initial state is wrong; {bad[0]} does not pass:\n{first.output[-1000:]}"
            )
    last = await _run_tests(task.final_tests, slot, toolchain, timeout_s)
    if not last.statuses or last.collect_errors:
        raise PrepareError(f"{task.id}: its tests of the final state cannot run:\n{last.output[-1000:]}")
    if not _not_passed(last):
        raise TaskError(f"{task.id}: its tests pass before any work is done")
    return frozenset(last.statuses)


def folder_scope(task: FolderTask) -> TaskScope:
    """Return the paths and words that the texts of a task name."""
    return scope_of([task.prompt, task.final_tests, task.solution or ""], HOME)


async def score_folder(
    task: FolderTask, names: frozenset[str], slot: Slot, toolchain: Toolchain, timeout_s: float
) -> Score:
    """Return the score: 1.0 if all of these tests pass, else 0.0, with labels for what the falsified tests
    (`grading/falsified.py`) and the harness show.

    Raises `GraderError` if the tests did not run.
    """
    run = await _run_tests(task.final_tests, slot, toolchain, timeout_s)
    run.check_ended(task.id)
    if run.collect_errors and not run.statuses:
        raise GraderError(f"{task.id}: its tests were not found:\n{run.output[-1000:]}")
    passed = run.passed(names)
    resolved = run.complete and passed == len(names)
    controls = Controlled(uncontrolled=tuple(sorted(names)))
    if resolved:
        controls = await _control(task, names, slot, toolchain, timeout_s)
    bad = {name: run.statuses.get(name, Status.MISSING).value for name in sorted(names)}
    return Score(
        float(resolved),
        {"passed": passed, "tests": len(names)},
        {
            "not_passed": {name: status for name, status in bad.items() if status != Status.PASSED.value},
            "uncontrolled": list(controls.uncontrolled[:50]) if resolved else [],
        },
        labels=(*controls.labels, *run.labels),
    )


async def _control(
    task: FolderTask, names: frozenset[str], slot: Slot, toolchain: Toolchain, timeout_s: float
) -> Controlled:
    """Run falsified tests over work that passes. At isolation levels that cannot fork slots, nothing is run."""
    if slot.rung < Rung.USERNS:
        return Controlled(uncontrolled=tuple(sorted(names)))

    async def falsified(texts: Mapping[str, str]) -> TestRun:
        async with slot.fork() as fork:
            return await _run_tests(texts[_TEST_FILE], fork, toolchain, timeout_s)

    tests, earning = {_TEST_FILE: task.final_tests}, sorted(names)
    work = await python_texts(slot, await python_files(slot, HOME))
    copied = await copied_answers(tests, earning, work, [task.prompt, task.solution or ""])
    controls = await control(tests, earning, falsified)
    return Controlled((*copied, *controls.labels), controls.uncontrolled)


async def _run_tests(tests: str, slot: Slot, toolchain: Toolchain, timeout_s: float) -> TestRun:
    await slot.remove(TESTS_DIR)
    await slot.write_text(f"{TESTS_DIR}/{_TEST_FILE}", tests)
    await slot.write_text(f"{TESTS_DIR}/pytest.ini", "[pytest]\n")
    try:
        return await run_files(slot, toolchain, TESTS_DIR, [_TEST_FILE], timeout_s=timeout_s)
    finally:
        await slot.remove(TESTS_DIR)


def _not_passed(run: TestRun) -> list[str]:
    bad = [name for name, status in run.statuses.items() if status is not Status.PASSED]
    return [*run.collect_errors, *bad] or ([] if run.complete and run.statuses else ["the test session"])
