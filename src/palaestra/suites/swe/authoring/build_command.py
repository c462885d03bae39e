"""`palaestra tasks build swe`: from packages to a file of verified task rows.

With pinned packages nothing is searched: each bug is put in, its tests run once, and the row is written. Packages that
no manifest pins are searched first. Rows lie in rounds over the packages, so that the first rows of a file are varied.

Invariant: a row is written only when its tests were seen to fail with the bug and to pass without it, here.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from palaestra.core.errors import ConfigError, GraderError, InfraError, TaskError
from palaestra.core.io.append_file import writing
from palaestra.core.io.atomic_file import replaced
from palaestra.core.types import JSON
from palaestra.sandbox.slot import SlotSource
from palaestra.suites.swe.authoring.bug_search import find_bugs
from palaestra.suites.swe.authoring.build_rows import BASE_TIMEOUT_S, Repository, make_row
from palaestra.suites.swe.authoring.layout import python_path, test_files
from palaestra.suites.swe.authoring.manifest import Manifest, PinnedMutation, PinnedPackage, load_manifest
from palaestra.suites.swe.authoring.package_index import cached_bytes, open_index
from palaestra.suites.swe.authoring.package_trial import Trial, open_trial
from palaestra.suites.swe.authoring.sdist import make_repository, read_sdist
from palaestra.suites.swe.install import DependencyCache
from palaestra.suites.swe.swe_rows import Install

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. `parallel` runs of tests go on at once; `per_package` bugs are searched in unpinned packages.

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
class BuildReport:
    """What was built: the rows in order, what could not be built and why, and the packages with their bugs pinned."""

    rows: tuple[Mapping[str, JSON], ...]
    problems: tuple[str, ...]
    manifest: Manifest


async def build(
    packages: Sequence[str],
    manifest: Path | None,
    slots: SlotSource,
    options: BuildOptions,
    progress: Callable[[str], None] = lambda line: None,
) -> BuildReport:
    """Build rows for these packages (`name==version`; none: all of the manifest) and write them to `options.out`.

    Raises `ConfigError` for what was asked wrongly, `InfraError` when nothing could be built for lack of the world.
    """
    pinned = load_manifest(manifest)
    wanted = pick(_named(packages, pinned, options), options.limit, options.select)
    builder = _Builder(pinned.requirements, slots, options, progress)
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(builder.package(package)) for package in wanted]
    done = [job.result() for job in jobs]
    rows = tuple(row for round_ in zip_longest(*(rows for _, rows in done)) for row in round_ if row is not None)
    if builder.failures and not rows:
        raise builder.failures[0]
    _write(options.out, rows)
    return BuildReport(rows, tuple(builder.problems), Manifest(pinned.requirements, tuple(found for found, _ in done)))


def pick(packages: Sequence[PinnedPackage], limit: int = 0, select: Sequence[str] = ()) -> list[PinnedPackage]:
    """The packages with only the bugs to build: those selected, at most `limit`, taken in rounds over the packages.

    Raises `ConfigError` for a name in `select` that is neither a package nor a bug.
    """
    known = {package.name for package in packages} | {bug.id for package in packages for bug in package.mutations}
    if unknown := set(select) - known:
        raise ConfigError(f"nothing to build is called {', '.join(sorted(unknown))}")
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


def _named(packages: Sequence[str], pinned: Manifest, options: BuildOptions) -> list[PinnedPackage]:
    """What the names stand for: pinned packages, or bare ones to be searched."""
    if not packages:
        return list(pinned.packages)
    known = {(package.name, package.version): package for package in pinned.packages}
    found = []
    for text in packages:
        match = _REQUIREMENT.fullmatch(text)
        if not match:
            raise ConfigError(f"--package wants NAME==VERSION, not {text!r}")
        name, version = match[1], match[2]
        bare = PinnedPackage(name, version, sha256="", python_path=(), requirements=options.requirements)
        found.append(known.get((name, version), bare))
    return found


class _Builder:
    """One build: what its packages share."""

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
        """The package with its bugs pinned, and a row for each that could be built."""
        try:
            repository = await self._repository(package)
            toolchain = await self._dependencies.toolchain(repository.install)
            async with open_trial(self._slots, package.name, repository.files, toolchain) as trial:
                if not package.mutations:
                    repository = await self._searched(trial, repository)
                return repository.package, await self._rows(trial, repository)
        except (InfraError, ConfigError) as problem:
            self._note(f"{package.name}=={package.version}: {problem}", problem)
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
        """The sdist, and its sha256: the pinned one, or for a package that is not pinned the index's."""
        downloads = self._options.cache / "sdists"
        if package.sha256 and (data := cached_bytes(downloads, package.sha256)) is not None:
            return data, package.sha256
        async with open_index(downloads, url=self._options.index_url) as index:
            sdist = await index.find(package.name, package.version)
            if package.sha256 and sdist.sha256 != package.sha256:
                raise TaskError(
                    f"the index now has {sdist.filename} with sha256 {sdist.sha256}, which is not the pinned"
                )
            return await index.download(sdist), sdist.sha256

    async def _searched(self, trial: Trial, repository: Repository) -> Repository:
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

    async def _rows(self, trial: Trial, repository: Repository) -> list[Mapping[str, JSON]]:
        """Run the unchanged package once, then every bug, as many at a time as allowed."""
        mutations = repository.package.mutations
        tests = sorted({path for mutation in mutations for path in mutation.tests})
        if missing := set(tests) - set(test_files(repository.files)) - set(repository.files):
            raise TaskError(f"there is no test file {sorted(missing)[0]}")
        if not mutations:
            raise TaskError("no bug was found that tests notice cleanly")
        async with self._running:
            base = await trial.run(tests, timeout_s=BASE_TIMEOUT_S)

        async def one(mutation: PinnedMutation) -> Mapping[str, JSON] | None:
            async with self._running:
                try:
                    row = await make_row(trial, repository, mutation, base)
                except (TaskError, GraderError) as problem:
                    self._note(f"{repository.package.name}: {problem}", problem)
                    return None
            if len(row["FAIL_TO_PASS"]) != mutation.fail_to_pass:
                self._progress(
                    f"{mutation.id}: {len(row['FAIL_TO_PASS'])} tests notice it, not {mutation.fail_to_pass}"
                )
            self._progress(f"{row['instance_id']}: {len(row['FAIL_TO_PASS'])} F2P, {len(row['PASS_TO_PASS'])} P2P")
            return row

        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(one(mutation)) for mutation in mutations]
        return [row for job in jobs if (row := job.result()) is not None]

    def _note(self, line: str, problem: Exception) -> None:
        self.problems.append(line)
        self.failures.append(problem)
        self._progress(line)


def _write(out: Path, rows: Sequence[Mapping[str, JSON]]) -> None:
    """All rows or the old file: a build that is broken off leaves no half of one."""
    with writing(out), replaced(out) as lines:
        lines.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)
