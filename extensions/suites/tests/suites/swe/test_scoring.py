"""The tests decide: agents' changes graded as the environment grades them, over a sealed workspace."""

from collections.abc import Mapping

import pytest

from palaestra_slots.sandbox.slot import View
from palaestra_suites.grading.repository_tests import run_files
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.protected import protected
from palaestra_suites.swe.swe_row import RowVerdict, SweRow, parse_row
from palaestra_suites.swe.workspace import patch_of, start_history
from suites.bench import F2P, FILES, P2P, REPO, Bench, RunBench

pytestmark = [pytest.mark.slots, pytest.mark.slow]
FIXED = FILES["pkg/calc.py"].replace("return a - b", "return a + b")


def task() -> SweRow:
    return parse_row(
        {
            "repo": "o/n",
            "base_commit": "abc",
            "problem_statement": "p",
            "instance_id": "i",
            "FAIL_TO_PASS": list(F2P),
            "PASS_TO_PASS": list(P2P),
        }
    )


async def grade(bench: Bench, written: Mapping[str, str], command: str = "true") -> RowVerdict:
    """What the environment does after an agent has written these files and run this command."""
    row = task()
    agent = await bench.acquire("agent", snapshot=await bench.prepared())
    for path, text in written.items():
        await agent.write_text(path if path.startswith("/") else f"{REPO}/{path}", text)
    done = await agent.execute(command, cwd=REPO)
    assert done.success, done.output
    changes = await agent.changes()
    found = protected(changes, row, tuple(FILES), REPO)
    sealed = await bench.seal(agent, View(only=(REPO,), without=found.guarded))
    async with bench.slot(sealed) as slot:
        return row.verdict(await run_files(slot, bench.toolchain, REPO, row.test_files, timeout_s=30))


def test_the_fix_passes(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        score = await grade(bench, {"pkg/calc.py": FIXED})
        assert score.resolved
        assert (score.fail_to_pass, score.pass_to_pass) == ((1, 1), (3, 3))

    run_bench(scenario)


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"pkg/calc.py": FIXED.replace("a + b", "sum((a, b))")}, "true"),
        ({"pkg/helper.py": "plus = int.__add__\n", "pkg/calc.py": "from pkg.helper import plus\n" + FIXED}, "true"),
        ({}, "sed -i 's/return a - b/return b + a/' pkg/calc.py && git init -q . 2>/dev/null || true"),
        ({}, "cp -r pkg new && rm -rf pkg && mv new pkg && sed -i 's/a - b/a + b/' pkg/calc.py"),
    ],
    ids=["other text", "a new module", "by command", "a rewritten directory"],
)
def test_an_equivalent_fix_passes(run_bench: RunBench, files: dict[str, str], command: str) -> None:
    async def scenario(bench: Bench) -> None:
        score = await grade(bench, files, command)
        assert score.resolved, score

    run_bench(scenario)


def test_the_recorded_patch_has_no_test_files(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        agent = await bench.acquire("agent", snapshot=await bench.prepared())
        await start_history(agent, REPO)
        written = {"pkg/calc.py": FIXED, "tests/test_calc.py": "", "tests/test_hidden.py": "", "tests/new.py": ""}
        for path, text in written.items():
            await agent.write_text(f"{REPO}/{path}", text)
        patch = await patch_of(agent, REPO, tests={"tests/test_calc.py", "tests/test_hidden.py"})
        assert {file.path for file in unified_diff.parse(patch)} == {"pkg/calc.py", "tests/new.py"}

    run_bench(scenario)


def test_doing_nothing_fails(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        score = await grade(bench, {})
        assert not score.resolved
        assert (score.fail_to_pass, score.pass_to_pass) == ((0, 1), (3, 3))

    run_bench(scenario)


def test_half_a_fix_fails(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        half = FILES["pkg/calc.py"].replace("return a - b", "return a - b if a == 1 else a + b")
        score = await grade(bench, {"pkg/calc.py": half})
        assert not score.resolved
        assert score.fail_to_pass == (0, 1)

    run_bench(scenario)


def test_a_fix_that_breaks_something_else_fails(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        score = await grade(bench, {"pkg/calc.py": FIXED.replace("a - -a", "a + 1")})
        assert not score.resolved
        assert (score.fail_to_pass, score.pass_to_pass) == ((1, 1), (2, 3))

    run_bench(scenario)


SKIP = "import pytest\ndef pytest_collection_modifyitems(items):\n    items[:] = []\n"
PASS = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
    "    result = yield\n    result.get_result().outcome = 'passed'\n"
)


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"conftest.py": SKIP}, "rm -rf tests"),
        ({"conftest.py": PASS}, "true"),
        ({"tests/conftest.py": PASS}, "true"),
        ({"tests/test_calc.py": "def test_double(): pass\n"}, "true"),
        ({"pytest.ini": "[pytest]\naddopts = -p plant\n", "plant.py": PASS}, "true"),
        ({"sitecustomize.py": "import os; os._exit(0)\n"}, "true"),
        ({"pytest.py": "def main(*a, **k): pass\n"}, "true"),
        ({"/usr/lib/python3/dist-packages/x.pth": "import os; os._exit(0)\n"}, "true"),
        ({"evil.egg-info/entry_points.txt": "[pytest11]\nevil = plant\n", "plant.py": PASS}, "true"),
        ({}, "mkdir -p pkg/__pycache__ && echo x > pkg/__pycache__/calc.cpython-311.pyc"),
        ({}, "mv tests hidden && ln -s hidden tests && sed -i 's/== c/or True/' hidden/test_calc.py"),
        ({"pkg/calc.py": "import os\nos._exit(0)\n"}, "true"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_what_only_looks_like_a_fix_fails(run_bench: RunBench, files: dict[str, str], command: str) -> None:
    async def scenario(bench: Bench) -> None:
        score = await grade(bench, files, command)
        assert not score.resolved
        assert score.fail_to_pass == (0, 1)

    run_bench(scenario)
