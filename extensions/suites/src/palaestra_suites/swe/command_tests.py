"""Install a repository in another language than Python, and run its tests with a command whose log lists them.

Invariant: everything runs in a slot. Installation has a network; tests have the slot's network, which is off in
grading.

Not covered: forged log lines. The log is the output of code under test (see `grading/log_parsers.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from palaestra.rollouts.grading.grader import Way, note_way
from palaestra_slots.core.errors import PrepareError
from palaestra_slots.sandbox.slot import ExecutionResult, Slot
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.grading.log_parsers import has_run, without_duration
from palaestra_suites.swe.failure_cause import cause_of_install, exceeds_limit_of_runner
from palaestra_suites.swe.languages import CACHE, Language
from palaestra_suites.swe.row_recipe import quoted
from palaestra_suites.swe.swe_row import RIGHT, SweRow
from palaestra_suites.toolchain.repository_venv import CERTIFICATES
from palaestra_suites.toolchain.toolchain import DEFAULT_PATH, Toolchain

_MOST_LOG_BYTES = 16 << 20
_SHOWN = 3000
_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
_HOME = f"{CACHE}/home"
_IMAGE_PROGRAMS = "/usr/local/go/bin:/usr/local/cargo/bin:/root/.cargo/bin"
"""Where images of data sets have toolchains that are outside the usual directories."""


def language_toolchain(language: Language, *, image: bool = False) -> Toolchain:
    """Return the toolchain of a language, whose programs are those of the slot's root file system. The image of a row
    has its packages in its own places, so none are named."""
    if image:
        return Toolchain(command=(), bin_dir=_IMAGE_PROGRAMS)
    path = {"PATH": f"{language.places}:{DEFAULT_PATH}"} if language.places else {}
    return Toolchain(command=(), variables={**path, **language.env})


def _environment(toolchain: Toolchain, repo_dir: str) -> dict[str, str]:
    home = {} if toolchain.bin_dir else {"HOME": _HOME}
    return {**toolchain.environment(repo_dir), **_ENVIRONMENT, **home}


async def check_programs(slot: Slot, language: Language, instance_id: str) -> None:
    """Raise `PrepareError` if the slot lacks a program of the language."""
    script = "for name; do command -v $name >/dev/null || echo $name; done"
    path = {"PATH": f"{language.places}:{_IMAGE_PROGRAMS}:{DEFAULT_PATH}".lstrip(":")}
    found = await slot.execute(["sh", "-c", script, "programs", *language.programs], cwd="/", env=path)
    if missing := found.output.split():
        raise PrepareError(missing_programs(language, missing, instance_id))


def missing_programs(language: Language, missing: Sequence[str], instance_id: str) -> str:
    """Return the message for missing programs of a language."""
    make = " ".join(f"--include {name}" for name in language.packages.split())
    found = language.elsewhere(missing)
    there = f" ({', '.join(found)} is of one user, whose directories slots do not contain)" if found else ""
    return (
        f"missing program: {', '.join(missing)}{there}; {instance_id}: install Debian's {language.packages}, or give a "
        f"root file system with --env.roots {language.name}=PATH (palaestra images make debian:12 {make})"
    )


async def install_language(
    slot: Slot, row: SweRow, toolchain: Toolchain, repo_dir: str, *, timeout_s: float, env: Mapping[str, str]
) -> None:
    """Run the row's installation in a preparation slot. Raises `PrepareError`, whose message begins with the cause."""
    recipe = row.recipe
    assert recipe is not None
    await check_programs(slot, recipe.language, row.instance_id)
    trust = {"NODE_EXTRA_CA_CERTS": CERTIFICATES, "SSL_CERT_FILE": CERTIFICATES, "CARGO_HTTP_CAINFO": CERTIFICATES}
    trust = trust if await slot.stat(CERTIFICATES) else {}
    variables = {**_environment(toolchain, repo_dir), **trust, **env}
    await slot.execute(["mkdir", "-p", _HOME], cwd="/")
    script = recipe.install_script()
    result = await slot.execute(script, cwd=repo_dir, env=variables, timeout_s=timeout_s)
    if not result.success:
        cause = cause_of_install(result) or "the installation failed"
        raise PrepareError(f"{cause}; {row.instance_id}: {result.error}\n{result.output[-_SHOWN:].strip()}")
    if recipe.prebuilds:
        await slot.execute(recipe.language.build, cwd=repo_dir, env=variables, timeout_s=timeout_s)


async def run_test_command(
    slot: Slot, toolchain: Toolchain, row: SweRow, repo_dir: str, names: Sequence[str], *, timeout_s: float
) -> TestRun:
    """Run the test command of a row and read its log. The result lists each of the `names`; a name that the log lacks
    is missing or, for a log that lists only failures, has passed if the log shows that tests ran."""
    recipe = row.recipe
    assert recipe is not None
    note_way(Way.RUN_TESTS)
    script = f"set -- {quoted(row.test_files)}\n{recipe.test_script(row.repo, repo_dir)}"
    result = await slot.execute(
        f"mkdir -p {_HOME}; {script}",
        cwd=repo_dir,
        env=_environment(toolchain, repo_dir),
        timeout_s=timeout_s,
        max_output_bytes=_MOST_LOG_BYTES,
        spill=False,
    )
    return await asyncio.to_thread(read_command, row, result, names)


def read_command(row: SweRow, result: ExecutionResult, names: Sequence[str]) -> TestRun:
    """Return the test run that the log of a row's test command describes.

    It has timed out if the command did, or if a runner's own time limit ended a test and one of the `names` has not
    passed: such limits are a few seconds, which a busy machine exceeds.
    """
    recipe = row.recipe
    assert recipe is not None
    found = recipe.read(result.output, row.instance_id)
    unnamed = Status.PASSED if recipe.fail_only and has_run(result.output) else Status.MISSING
    cut = {name: same for name in names if (same := _of_other_name(name, found)) is not None}
    statuses = {**dict.fromkeys(names, unnamed), **found, **cut}
    cut_off = bool(result.metadata.get("timeout"))
    late = exceeds_limit_of_runner(result.output) and any(statuses[name] not in RIGHT for name in names)
    return TestRun(
        statuses=statuses,
        complete=not cut_off,
        timed_out=cut_off or late,
        exit_status=result.exit_code,
        output=result.output,
    )


def _of_other_name(name: str, found: Mapping[str, Status]) -> Status | None:
    """Return the status of a test whose published name is not that of this log: it ends with the duration of the
    published run, it begins with a file that ava prints only for several files, or it was cut within its parameters and
    the tests that begin with it agree.
    Source: `_resolve_case` of `swebench.harness.grading` (5.0.2)."""
    if name in found:
        return None
    if (plain := without_duration(name)) in found:
        return found[plain]
    _, _, after_file = name.partition(" › ")  # ava leaves out the file if it runs only one
    for same in (after_file, f"- {after_file}", f"- {name}"):
        if after_file and same in found:
            return found[same]
    if name.count("[") <= name.count("]"):
        return None
    statuses = {status for test, status in found.items() if test.startswith(name)}
    return statuses.pop() if len(statuses) == 1 else None
