"""Count what of public task folders can be read and built without a container tool.

    .venv/bin/python benchmarks/public_tasks.py FOLDER...       # each folder is a set of tasks, such as a checkout
    .venv/bin/python benchmarks/public_tasks.py --compose FOLDER...
    .venv/bin/python benchmarks/public_tasks.py --play --root python:3.12=PATH --root ubuntu:24.04=PATH FOLDER...

For each set: the tasks, those that load, the share of the Dockerfiles' build steps that a build in a slot carries, and
the compose files of services that are carried or refused by the name of a key. Nothing is started. A step counts as
carried if it and all steps before it are; files of the context must be there. `--show` prints the reasons.

`--play` plays the reference solution and doing nothing on every task. `--root NAME=PATH` says which root file system
(of `palaestra images make`) stands for the images whose names begin with NAME. A task with another image is only named.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import Limits
from palaestra_slots.images.dockerfile import ImageRecipe, parse_recipe
from palaestra_slots.images.slot_build import build_in_slot
from palaestra_slots.images.task_files import Unsupported
from palaestra_slots.sandbox.slot import ExecutionResult, Slot
from palaestra_suites.terminal_bench import harbor_task, terminal_bench_1
from palaestra_suites.terminal_bench.compose import read_services
from palaestra_suites.terminal_bench.find_tasks import read_folder
from palaestra_suites.terminal_bench.import_tasks import TriedTask, import_tasks
from palaestra_suites.terminal_bench.terminal_task import TerminalTask

_LINE = re.compile(r"line (\d+)")
_SERVICE = re.compile(r"[\w./-]*: services\.[\w-]+\.")


class ReadingSlot:
    """Takes the commands of a build and runs none of them. Forks for other stages are the slot itself."""

    async def execute(self, *_: object, **__: object) -> ExecutionResult:
        return ExecutionResult(True)

    @asynccontextmanager
    async def fork(self) -> AsyncIterator[ReadingSlot]:
        yield self

    async def read_text(self, *_: object, **__: object) -> str:
        return ""

    async def download(self, *_: object) -> int:
        return 0

    async def upload(self, *_: object) -> None:
        pass

    async def remove(self, *_: object) -> None:
        pass


@dataclass
class Found:
    """The counts of one set of tasks."""

    tasks: int = 0
    loaded: int = 0
    steps: int = 0
    carried: int = 0
    composed: int = 0
    services: int = 0
    features: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def task_folders(place: Path) -> Iterator[Path]:
    """Yield the task folders at a place and below it."""
    if harbor_task.is_task(place) or terminal_bench_1.is_task(place):
        yield place
        return
    for entry in sorted(place.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and entry.name != ".git":
            yield from task_folders(entry)


def features_of(task: TerminalTask) -> Iterator[str]:
    """Yield the features of today's task form that a task uses."""
    verifiers = [step.verifier for step in task.steps] or [task.verifier]
    yield from ["separate verifier"] * any(each.environment is not None for each in verifiers)
    yield from ["collect"] * any(each.collect for each in verifiers)
    yield from ["services"] * (len(task.services) > 1)
    yield from ["health check"] * any(each.health is not None for each in (*task.services, *task.steps))
    yield from ["steps"] * bool(task.steps)
    yield from ["MCP or skills"] * bool(task.agent.servers or task.agent.skills_dir)


def recipes_of(task: TerminalTask) -> Iterator[ImageRecipe]:
    """Yield the Dockerfiles of a task, each once."""
    verifiers = [step.verifier for step in task.steps] or [task.verifier]
    own = [each.environment.recipe for each in verifiers if each.environment is not None]
    seen = set()
    for recipe in (task.recipe, *(each.recipe for each in task.services), *own):
        if recipe.dockerfile is not None and recipe.dockerfile not in seen:
            seen.add(recipe.dockerfile)
            yield recipe


def steps_of(recipe: ImageRecipe, found: Found) -> None:
    """Count the steps of a Dockerfile, and those that a build in a slot carries."""
    try:
        lines = sorted({each.line for stage in parse_recipe(recipe) for each in stage.instructions})
    except TaskError as error:
        found.steps += 1
        found.reasons[f"Dockerfile: {str(error)[:90]}"] += 1
        return
    found.steps += len(lines)
    try:
        asyncio.run(build_in_slot(cast("Slot", ReadingSlot()), recipe))
        found.carried += len(lines)
    except TaskError as error:
        at = _LINE.search(str(error))
        found.carried += sum(line < int(at[1]) for line in lines) if at else 0
        found.reasons[f"Dockerfile: {re.sub(_LINE, 'line N', str(error))[:90]}"] += 1


def read_set(place: Path, most: int | None) -> Found:
    """Read the tasks of one set, at most `most`."""
    found = Found()
    for number, folder in enumerate(task_folders(place)):
        if most is not None and number >= most:
            break
        found.tasks += 1
        composed = any((folder / each).is_file() for each in ("docker-compose.yaml", "environment/docker-compose.yaml"))
        found.composed += composed
        try:
            task = read_folder(folder)
        except TaskError as error:
            kind = "refused" if isinstance(error, Unsupported) else "error"
            found.reasons[f"{kind}: {re.sub(r'[0-9]+', 'N', str(error))[:110]}"] += 1
            continue
        found.loaded += 1
        found.services += composed
        found.features.update(features_of(task))
        for recipe in recipes_of(task):
            steps_of(recipe, found)
    return found


def read_compose(place: Path, known: Mapping[str, str]) -> Counter[str]:
    """Count the compose files below a place by what becomes of them. `known` are the variables that they have."""
    found: Counter[str] = Counter()
    for path in sorted(place.rglob("*compose*.y*ml")):
        try:
            main = ImageRecipe(path.parent, docker_image="debian")  # few of the files have a task around them
            services = read_services(path.parent, known, main, Limits(), task=place, file=path.name)
            found["carried: several services" if len(services) > 2 else "carried: one service beside main"] += 1
        except Unsupported as error:
            found[f"refused: {re.sub(_SERVICE, 'services.NAME.', str(error))[:100]}"] += 1
        except TaskError as error:
            found[f"error: {re.sub(_SERVICE, 'services.NAME.', str(error))[:100]}"] += 1
    return found


def root_for(task: TerminalTask, roots: Mapping[str, str]) -> tuple[str, str]:
    """Return the root file system that stands for the images of a task, and the images for which there is none."""
    found = {}
    for recipe in recipes_of(task):
        stages = parse_recipe(recipe)
        froms = {each.arguments.split()[0] for stage in stages for each in stage.instructions if each.name == "FROM"}
        for image in froms - {stage.name for stage in stages}:
            name = image.removeprefix("public.ecr.aws/docker/library/").removeprefix("docker.io/library/")
            found[image] = next((roots[each] for each in roots if name.startswith(each)), "")
    missing = sorted(image for image, root in found.items() if not root)
    return next(iter(found.values()), next(iter(roots.values()))), ", ".join(missing)


def play_set(place: Path, given: argparse.Namespace) -> int:
    """Play the tasks of one set, and print a row for each. Returns how many are good."""
    roots, words = (dict(each.split("=", 1) for each in given.root), given.only)
    known = dict(each.split("=", 1) for each in given.variable)
    settings = [*given.set, *(f"--env.task_env_vars={each}" for each in given.variable)]
    groups: dict[tuple[Path, str], list[str]] = {}
    features: dict[str, str] = {}
    good = 0
    for folder in task_folders(place):
        if words and not any(word in folder.name for word in words):
            continue
        try:
            task = read_folder(folder, known)
            root, missing = root_for(task, roots)
        except TaskError as error:
            print(_cells(place.name, folder.name, "", "-", "-", str(error)), flush=True)
            continue
        features[folder.name] = ", ".join(features_of(task))
        if missing:
            reason = f"no root file system for {missing}"
            print(_cells(place.name, folder.name, features[folder.name], "-", "-", reason), flush=True)
            continue
        groups.setdefault((folder if folder == place else folder.parent, root), []).append(folder.name)

    def show(line: TriedTask) -> None:
        if line.name not in features:
            return  # a task that the run left out, or that this set names elsewhere
        reason = f"{line.finding.value}: {line.reason}" if line.reason else line.finding.value
        print(_cells(place.name, line.name, features[line.name], line.solution, line.noop, reason), flush=True)

    for (parent, root), names in groups.items():
        chosen = [] if parent == place and len(names) == 1 else ["--env.task_filter", ",".join(names)]
        report = import_tasks(str(parent), ["--env.base_image", root, *chosen, *settings], progress=show)
        good += len(report.lines) - len(report.bad)
    return good


def _cells(*cells: object) -> str:
    shown = (" ".join(str("-" if each is None else each).split()).replace("|", "/")[:400] for each in cells)
    return f"| {' | '.join(shown)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--most", type=int, help="the maximum number of tasks of each set (default: all)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="show the N most frequent reasons of each set")
    parser.add_argument("--compose", action="store_true", help="read the compose files below each folder instead")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE", help="for tasks")
    parser.add_argument("--play", action="store_true", help="play every task over the roots of --root")
    parser.add_argument("--root", action="append", default=[], metavar="NAME=PATH", help="the root of an image")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only tasks whose names contain a word")
    parser.add_argument("--set", action="append", default=[], metavar="--env.FIELD=VALUE", help="a further setting")
    given = parser.parse_args()
    if given.play:
        print("| set | task | features | oracle | noop | result |\n|---|---|---|---:|---:|---|")
        good = sum(play_set(place, given) for place in given.sets)
        print(f"{good} tasks are good")
        return 0
    if given.compose:
        known = dict(each.split("=", 1) for each in given.variable)
        counts = sum((read_compose(place, known) for place in given.sets), Counter[str]())
        print("| compose files | |\n|---|---:|")
        for reason, count in [*counts.most_common(), ("all", counts.total())]:
            print(f"| {reason} | {count} |")
        return 0
    total = Found()
    print("| set | tasks | load | build steps | carried | compose files | carried | features |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for place in given.sets:
        found = read_set(place, given.most)
        shown = ", ".join(f"{count} {name}" for name, count in found.features.most_common())
        print(_row(place.name, found, shown))
        for reason, count in found.reasons.most_common(given.show):
            print(f"    {count} × {reason}", file=sys.stderr)
        for name in ("tasks", "loaded", "steps", "carried", "composed", "services"):
            setattr(total, name, getattr(total, name) + getattr(found, name))
        total.features.update(found.features)
    print(_row("all", total, ", ".join(f"{count} {name}" for name, count in total.features.most_common())))
    return 0


def _row(name: str, found: Found, features: str) -> str:
    share = 100 * found.carried / found.steps if found.steps else 100.0
    cells = [name, found.tasks, found.loaded, found.steps, f"{share:.1f} %", found.composed, found.services, features]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
