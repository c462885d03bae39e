"""Build verified bug-fixing tasks from real packages.

For a package that the manifest pins, each pinned bug is injected, its tests run once, and the row is written. Other
packages are searched for bugs first. Rows alternate between packages, so that the first rows of a file are varied.

Invariant: a row is written only if at least one test fails with the bug and passes without it on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import json
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.errors import ConfigError, GraderError, InfraError, TaskError
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.types import JSON
from palaestra_slots.images.build_once import build_once
from palaestra_slots.sandbox.slot import SlotSource
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.swe.authoring import problem_statement
from palaestra_suites.swe.authoring.build_rows import BASE_TIMEOUT_S, Repository, flips, make_row
from palaestra_suites.swe.authoring.layout import python_path, source_files, test_files
from palaestra_suites.swe.authoring.manifest import (
    Manifest,
    PinnedMutation,
    PinnedPackage,
    dump_manifest,
    load_manifest,
)
from palaestra_suites.swe.authoring.mutations import Mutation, apply_mutation, find_mutations
from palaestra_suites.swe.authoring.package_trial import PackageTrial, open_trial
from palaestra_suites.swe.authoring.sdist import cached_bytes, make_repository, open_index, read_sdist
from palaestra_suites.toolchain.toolchain import DependencyCache, Install

logger = logging.getLogger(__name__)

TASKS_FILE = "tasks.jsonl"
_BUILTIN_TIMEOUT_S = 1800.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")

MAX_FAIL_TO_PASS = 20
MIN_PASS_TO_PASS = 5
_MAX_PER_KIND = 2
_EXTRA_TEST_FILES = 1
_SLOWEST_TEST_S = 2.0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build. `parallel` is the number of concurrent test runs, and `per_package` the number of bugs to
    find in a package that is not pinned.

    `cache` holds downloads and installed requirements. `limit` 0 means all; `select` names packages or bugs.
    """

    out: Path
    cache: Path
    limit: int = 0
    select: tuple[str, ...] = ()
    index_url: str | None = None
    parallel: int = 2
    per_package: int = 5
    requirements: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SweBuild:
    """The rows in order, the reasons why other bugs or packages gave no row, and a manifest that pins the packages with
    their bugs."""

    rows: tuple[Mapping[str, JSON], ...]
    problems: tuple[str, ...]
    manifest: Manifest


async def build(
    packages: Sequence[str],
    manifest: Path | None,
    slots: SlotSource,
    options: BuildOptions,
    progress: Callable[[str], None] = lambda line: None,
) -> SweBuild:
    """Build rows for these packages (`name==version`; by default all packages of the manifest) and write them to
    `options.out`.

    Raises `ConfigError` for a bad name, and the first problem if no row could be built.
    """
    pinned = load_manifest(manifest)
    wanted = pick(_chosen_packages(packages, pinned, options), options.limit, options.select)
    builder = _Builder(pinned.requirements, slots, options, progress)
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(builder.package(package)) for package in wanted]
    done = [job.result() for job in jobs]
    rows = tuple(row for round_ in zip_longest(*(rows for _, rows in done)) for row in round_ if row is not None)
    if builder.failures and not rows:
        raise builder.failures[0]
    _write_rows(options.out, rows)
    return SweBuild(rows, tuple(builder.problems), Manifest(pinned.requirements, tuple(found for found, _ in done)))


def pick(packages: Sequence[PinnedPackage], limit: int = 0, select: Sequence[str] = ()) -> list[PinnedPackage]:
    """Return the packages with only the selected bugs, at most `limit`, alternating between packages.

    Raises `ConfigError` for a name in `select` that is neither a package nor a bug.
    """
    known = {package.name for package in packages} | {bug.id for package in packages for bug in package.mutations}
    if unknown := set(select) - known:
        raise ConfigError(f"no package or bug in the manifest is called {', '.join(sorted(unknown))}")
    chosen = [
        [bug for bug in package.mutations if not select or {package.name, bug.id} & set(select)] for package in packages
    ]
    rounds = [(place, bug) for bugs in zip_longest(*chosen) for place, bug in enumerate(bugs) if bug is not None]
    kept = rounds[:limit] if limit else rounds
    with_bugs = [
        replace(package, mutations=tuple(bug for at, bug in kept if at == place))
        for place, package in enumerate(packages)
    ]
    return [part for part, whole in zip(with_bugs, packages, strict=True) if part.mutations or not whole.mutations]


def _chosen_packages(packages: Sequence[str], pinned: Manifest, options: BuildOptions) -> list[PinnedPackage]:
    """Return the named packages, by default all packages of the manifest. A package that is not in the manifest has no
    bugs yet, so it must be searched for them."""
    if not packages:
        return list(pinned.packages)
    known = {(package.name, package.version): package for package in pinned.packages}
    found = []
    for text in packages:
        match = _REQUIREMENT.fullmatch(text)
        if not match:
            raise ConfigError(f"a package must be given as NAME==VERSION, not {text!r}")
        name, version = match[1], match[2]
        bare = PinnedPackage(name, version, sha256="", python_path=(), requirements=options.requirements)
        found.append(known.get((name, version), bare))
    return found


class _Builder:
    """The state that the packages of one build share."""

    def __init__(
        self, requirements: Sequence[str], slots: SlotSource, options: BuildOptions, progress: Callable[[str], None]
    ) -> None:
        self._requirements = tuple(requirements)
        self._slots = slots
        self._options = options
        self._progress = progress
        self._running = asyncio.Semaphore(options.parallel)
        self._dependencies = DependencyCache(options.cache / "dependencies")
        self.problems: list[str] = []
        self.failures: list[Exception] = []

    async def package(self, package: PinnedPackage) -> tuple[PinnedPackage, list[Mapping[str, JSON]]]:
        """Return the package with its bugs pinned, and a row for each bug that could be built."""
        try:
            repository = await self._repository(package)
            toolchain = await self._dependencies.toolchain(repository.install)
            async with open_trial(self._slots, package.name, repository.files, toolchain) as trial:
                if not package.mutations:
                    repository = await self._searched(trial, repository)
                return repository.package, await self._rows(trial, repository)
        except (InfraError, ConfigError) as problem:
            self._note_problem(f"{package.name}=={package.version}: {problem}", problem)
            return package, []

    async def _repository(self, package: PinnedPackage) -> Repository:
        archive, sha256 = await self._archive(package)
        files = read_sdist(archive, f"{package.name}=={package.version}")
        package = replace(package, sha256=sha256, python_path=package.python_path or python_path(files))
        directory = f"{self._options.out.stem}-repositories"
        relative = f"{directory}/{package.name}-{package.version}.git"
        (self._options.out.parent / directory).mkdir(parents=True, exist_ok=True)
        message = f"{package.name} {package.version}"
        commit = await make_repository(files, self._options.out.parent / relative, message)
        install = Install((*self._requirements, *package.requirements), package.python_path, package.pytest_args)
        return Repository(package, files, relative, commit, install)

    async def _archive(self, package: PinnedPackage) -> tuple[bytes, str]:
        """Return the source distribution and its sha256. If the package is pinned, the distribution must have the
        pinned hash; otherwise, the index's hash is used."""
        downloads = self._options.cache / "sdists"
        if package.sha256 and (data := cached_bytes(downloads, package.sha256)) is not None:
            return data, package.sha256
        async with open_index(downloads, url=self._options.index_url) as index:
            sdist = await index.find(package.name, package.version)
            if package.sha256 and sdist.sha256 != package.sha256:
                raise TaskError(
                    f"the index has {sdist.filename} with sha256 {sdist.sha256}, which differs from the pinned one"
                )
            return await index.download_sdist(sdist), sdist.sha256

    async def _searched(self, trial: PackageTrial, repository: Repository) -> Repository:
        options = self._options
        async with self._running:
            found = await find_bugs(
                trial,
                repository,
                want=options.per_package,
                tests=options.tests,
                modules=options.modules,
                progress=self._progress,
            )
        return replace(repository, package=replace(repository.package, mutations=found.mutations, flaky=found.flaky))

    async def _rows(self, trial: PackageTrial, repository: Repository) -> list[Mapping[str, JSON]]:
        """Run the unchanged package once, then every bug concurrently. Return a row for each bug that could be
        built."""
        mutations = repository.package.mutations
        tests = sorted({path for mutation in mutations for path in mutation.tests})
        if missing := set(tests) - set(test_files(repository.files)) - set(repository.files):
            raise TaskError(f"the test file {sorted(missing)[0]} does not exist")
        if not mutations:
            raise TaskError("no bug was found that the tests detect")
        async with self._running:
            base = await trial.run(tests, timeout_s=BASE_TIMEOUT_S)

        async def build_row(mutation: PinnedMutation) -> Mapping[str, JSON] | None:
            async with self._running:
                try:
                    row = await make_row(trial, repository, mutation, base)
                except (TaskError, GraderError) as problem:
                    self._note_problem(f"{repository.package.name}: {problem}", problem)
                    return None
            if len(row["FAIL_TO_PASS"]) != mutation.fail_to_pass:
                self._progress(
                    f"{mutation.id}: {len(row['FAIL_TO_PASS'])} tests detect the bug, not {mutation.fail_to_pass}"
                )
            self._progress(f"{row['instance_id']}: {len(row['FAIL_TO_PASS'])} F2P, {len(row['PASS_TO_PASS'])} P2P")
            return row

        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(build_row(mutation)) for mutation in mutations]
        return [row for job in jobs if (row := job.result()) is not None]

    def _note_problem(self, line: str, problem: Exception) -> None:
        self.problems.append(line)
        self.failures.append(problem)
        self._progress(line)


def _write_rows(out: Path, rows: Sequence[Mapping[str, JSON]]) -> None:
    """Write all rows to the file, which is replaced atomically: an interrupted build keeps the old file."""
    with writing(out), replaced(out) as lines:
        lines.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)


def builtin_ids(*, shuffle: bool, seed: int, max_items: int) -> list[str]:
    """Return the ids of the built-in bugs to use, in order."""
    ids = [bug.id for package in load_manifest().packages for bug in package.mutations]
    if shuffle:
        random.Random(seed).shuffle(ids)
    return ids[:max_items] if max_items else ids


async def builtin_tasks(cache: Path, ids: list[str], config: HermesAgentEnvConfig) -> Path:
    """Return the file of these built-in tasks, built once per machine and selection.

    Palaestra contains only the manifest: the first build downloads source distributions from the package index. Raises
    `ConfigError` if a task cannot be built.
    """
    text = dump_manifest(load_manifest()) + "\n".join(sorted(ids)) + inspect.getsource(problem_statement)
    name = f"built-in-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    async def build_into(fresh: Path) -> None:
        logger.warning("building %d tasks from real packages, which the first build downloads", len(ids))
        options = BuildOptions(out=fresh / TASKS_FILE, cache=cache, select=tuple(ids), parallel=os.cpu_count() or 1)
        async with make_pool(config) as pool:
            report = await build([], None, pool, options)
        if report.problems:
            raise ConfigError("not every built-in task could be built:\n" + "\n".join(report.problems))

    return await build_once(cache / "tasks" / name, build_into, timeout_s=_BUILTIN_TIMEOUT_S) / TASKS_FILE


@dataclass(frozen=True, slots=True)
class FoundBugs:
    """The bugs that were found, and the tests whose outcome differs between two runs."""

    mutations: tuple[PinnedMutation, ...]
    flaky: tuple[str, ...]


async def steady_base(trial: PackageTrial, tests: Sequence[str]) -> tuple[TestRun, tuple[str, ...]]:
    """Run the unchanged package twice. Return the first run and the tests whose outcomes differ.

    Raises `TaskError` if too few tests pass.
    """
    first = await trial.run(tests, timeout_s=BASE_TIMEOUT_S)
    second = await trial.run(tests, timeout_s=BASE_TIMEOUT_S)
    names = {*first.statuses, *second.statuses}
    flaky = tuple(sorted(name for name in names if first.statuses.get(name) is not second.statuses.get(name)))
    if sum(status is Status.PASSED for status in first.statuses.values()) <= MIN_PASS_TO_PASS:
        raise TaskError(f"too few tests pass in the unchanged package:\n{first.output[-1500:]}")
    return first, flaky


async def find_bugs(
    trial: PackageTrial,
    repository: Repository,
    *,
    want: int,
    tests: Sequence[str] = (),
    modules: Sequence[str] = (),
    max_tries: int = 120,
    progress: Callable[[str], None] = lambda line: None,
) -> FoundBugs:
    """Try candidates until `want` of them qualify as bugs, `max_tries` have run, or none are left. At most
    `_MAX_PER_KIND` bugs are of one kind, and no function gets two."""
    chosen = tuple(tests) or test_files(repository.files)
    base, flaky = await steady_base(trial, chosen)
    budget_s = 10 + 4 * sum(base.durations_s.values())
    kept: list[PinnedMutation] = []
    kinds: Counter[str] = Counter()
    functions: set[tuple[str, str]] = set()
    tried = 0
    for mutation in candidates(repository, modules):
        if len(kept) >= want or tried >= max_tries:
            break
        if kinds[mutation.kind] >= _MAX_PER_KIND or (mutation.path, mutation.function) in functions:
            continue
        tried += 1
        pinned = await _try(trial, repository, mutation, base, flaky, chosen, budget_s)
        progress(f"{repository.package.name}: {mutation.kind} {'kept' if pinned else 'dropped'}")
        if pinned:
            kept.append(pinned)
            kinds[mutation.kind] += 1
            functions.add((mutation.path, mutation.function))
    return FoundBugs(tuple(sorted(kept, key=lambda mutation: mutation.id)), flaky)


def candidates(repository: Repository, modules: Sequence[str] = ()) -> Iterator[Mutation]:
    """Yield every mutation of the package's modules, ordered by hash."""
    found = []
    for path in source_files(repository.files):
        if not modules or path in modules:
            try:
                found += find_mutations(repository.text(path), path)
            except (SyntaxError, UnicodeDecodeError):
                continue
    yield from sorted(found, key=_mutation_digest)


async def _try(
    trial: PackageTrial,
    repository: Repository,
    mutation: Mutation,
    base: TestRun,
    flaky: Sequence[str],
    tests: Sequence[str],
    budget_s: float,
) -> PinnedMutation | None:
    changed = {mutation.path: apply_mutation(repository.text(mutation.path), mutation)}
    try:
        run = await trial.run(tests, timeout_s=budget_s, changed=changed)
        found = flips(base, run, flaky)
    except (TaskError, GraderError):
        return None
    enough = len(found.pass_to_pass) >= max(MIN_PASS_TO_PASS, 2 * len(found.fail_to_pass))
    if not 1 <= len(found.fail_to_pass) <= MAX_FAIL_TO_PASS or not enough:
        return None
    if not any(name in run.failures and run.failures[name].line for name in found.fail_to_pass):
        return None  # the problem statement would have no failure to describe
    files = _relevant(found.fail_to_pass, found.pass_to_pass)
    data = repository.files[mutation.path].data
    return PinnedMutation(
        id=f"{mutation.kind}__{_mutation_digest(mutation)[:8]}",
        path=mutation.path,
        kind=mutation.kind,
        start=mutation.start,
        end=mutation.end,
        before=data[mutation.start : mutation.end].decode(),
        replacement=mutation.replacement,
        tests=files,
        fail_to_pass=len(found.fail_to_pass),
    )


def _relevant(broken: Sequence[str], passing: Sequence[str]) -> tuple[str, ...]:
    """Return the files of the broken tests, and one more file whose tests pass."""
    files = {name.split("::", 1)[0] for name in broken}
    others = sorted({name.split("::", 1)[0] for name in passing} - files)
    return tuple(sorted({*files, *others[:_EXTRA_TEST_FILES]}))


def _mutation_digest(mutation: Mutation) -> str:
    text = f"{mutation.path}\0{mutation.start}\0{mutation.end}\0{mutation.replacement}"
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()
