"""Run tests of Django's own suite with its runner (`tests/runtests.py`), and report each test under all its names.

Dataset rows name a test as the runner prints it: as `test_a (module.Class)`, as `test_a (module.Class.test_a)` (Python
3.11 and newer), or by the first line of the test's docstring. Source: `parse_log_django` in
`swebench.harness.log_parsers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from palaestra.sandbox.slot import Slot
from palaestra.suites.grading.harness import alarms_in, run_harness
from palaestra.suites.grading.run_tests import HARNESS_DIR, HARNESS_ENVIRONMENT, FailedTest, Status, TestRun
from palaestra.suites.toolchain.toolchain import Toolchain

_SCRIPT = "tests/runtests.py"


async def run_django(
    slot: Slot,
    toolchain: Toolchain,
    repo_dir: str,
    files: Sequence[str],
    names: Sequence[str],
    *,
    timeout_s: float,
    watching: bool = True,
) -> TestRun:
    """Run the modules of these test files, and return the status of each name and of each node id that ran.

    Raises `GraderError`.
    """
    paths = {path.removeprefix("tests/").removesuffix(".py").replace("/", "."): path for path in files}
    plan = {
        "root": repo_dir,
        "script": _SCRIPT,
        "arguments": ["--verbosity=2", "--settings=test_sqlite", "--parallel=1", *paths],
        "python_path": [f"{repo_dir}/{path}".removesuffix("/.") for path in toolchain.python_path],
        "dependencies": list(toolchain.dependencies),
        "pycache": f"{HARNESS_DIR}/pycache",
        "watching": watching,
        "tests": [f"{repo_dir}/{path}" for path in files],
    }
    records, result = await run_harness(
        slot,
        toolchain.command,
        "unittest_reporter.py",
        plan,
        folder=HARNESS_DIR,
        env=HARNESS_ENVIRONMENT,
        timeout_s=timeout_s,
    )
    reported: dict[str, Status] = {}
    known_as: dict[str, tuple[str, ...]] = {}
    failures: dict[str, FailedTest] = {}
    for record in records:
        if record["kind"] == "test":
            module, _, rest = str(record.get("test_id", "")).partition("::")
            node_id = f"{paths[module]}::{rest}" if module in paths else ""
            for name in [*record["names"], *filter(None, [node_id])]:
                if record.get("error"):
                    failures[name] = FailedTest("", str(record["error"]), "", 0)
                known = reported.get(name)
                if known is None or known is Status.PASSED:
                    reported[name] = Status(record["status"])
            if node_id:
                known_as[node_id] = tuple(map(str, record["names"]))
    finish = next((record for record in records if record["kind"] == "finish"), None)
    return TestRun(
        statuses={name: reported.get(name, Status.MISSING) for name in (*names, *known_as)},
        complete=finish is not None,
        exit_status=None if finish is None else int(bool(finish.get("exit_status"))) or result.exit_code,
        timed_out=bool(result.metadata.get("timeout")),
        failures=failures,
        output=result.output,
        alarms=alarms_in(records),
        known_as=known_as,
    )
