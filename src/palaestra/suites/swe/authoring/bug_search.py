"""Find bugs that tests detect, for packages that the manifest does not pin.

The hash of a candidate's text gives its place in the order, so the same package gives the same tasks. A bug is kept if
some tests fail and many keep passing. For variety at most two bugs have the same kind, and one is in each function.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from palaestra.core.errors import GraderError, TaskError
from palaestra.suites.grading.run_tests import Status, TestRun
from palaestra.suites.swe.authoring.build_rows import BASE_TIMEOUT_S, Repository, flips
from palaestra.suites.swe.authoring.layout import source_files, test_files
from palaestra.suites.swe.authoring.manifest import PinnedMutation
from palaestra.suites.swe.authoring.mutations import Mutation, apply, find_mutations
from palaestra.suites.swe.authoring.package_trial import PackageTrial

MAX_FAIL_TO_PASS = 20
MIN_PASS_TO_PASS = 5
_MAX_PER_KIND = 2
_EXTRA_TEST_FILES = 1
_SLOWEST_TEST_S = 2.0


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
    """Try candidates until `want` of them are kept or `max_tries` have run."""
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
    """Every mutation of the package's modules, ordered by hash."""
    found = []
    for path in source_files(repository.files):
        if not modules or path in modules:
            try:
                found += find_mutations(repository.text(path), path)
            except (SyntaxError, UnicodeDecodeError):
                continue
    yield from sorted(found, key=_digest)


async def _try(
    trial: PackageTrial,
    repository: Repository,
    mutation: Mutation,
    base: TestRun,
    flaky: Sequence[str],
    tests: Sequence[str],
    budget_s: float,
) -> PinnedMutation | None:
    changed = {mutation.path: apply(repository.text(mutation.path), mutation)}
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
        id=f"{mutation.kind}__{_digest(mutation)[:8]}",
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
    """The files of the broken tests, and one more file whose tests pass."""
    files = {name.split("::", 1)[0] for name in broken}
    others = sorted({name.split("::", 1)[0] for name in passing} - files)
    return tuple(sorted({*files, *others[:_EXTRA_TEST_FILES]}))


def _digest(mutation: Mutation) -> str:
    text = f"{mutation.path}\0{mutation.start}\0{mutation.end}\0{mutation.replacement}"
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()
