"""Named tests in real slots: what is reported, and whose fault silence is."""

from dataclasses import replace

import pytest

from palaestra_slots.core.errors import GraderError
from palaestra_slots.sandbox.slot import WORKSPACE
from palaestra_suites.grading.harness import Status, TestRun, alarms_in, read_records, reads_of_tests
from palaestra_suites.grading.repository_tests import run_files
from suites.bench import F2P, FILES, P2P, REPO, Bench, RunBench

pytestmark = [pytest.mark.slots, pytest.mark.slow]
NAMES = (*F2P, *P2P)


async def run_changed(bench: Bench, changed: dict[str, str], timeout_s: float = 30.0) -> TestRun:
    async with bench.slot() as slot:
        for path, text in {**FILES, **changed}.items():
            await slot.write_text(f"{REPO}/{path}", text)
        return await run_files(slot, bench.toolchain, REPO, ["tests/test_calc.py"], timeout_s=timeout_s)


def test_lines_that_are_no_records_of_the_run_are_passed_over() -> None:
    good = b'{"kind": "start"}'
    lines = [b"[" * 100_000, b"{", b"[1]", b'{"nonce": "m"}', b"9" * 5000, good]
    assert read_records(b"\n".join(lines)) == [{"kind": "start"}]


def test_a_session_that_ends_twice_is_forged() -> None:
    once, twice = '{"kind": "start"}\n{"kind": "finish"}', '\n{"kind": "finish"}'
    assert alarms_in(read_records(once.encode())) == ()
    assert alarms_in(read_records(f"{once}\n{once}".encode())) == (), "a script may start two sessions"
    (alarm,) = alarms_in(read_records((once + twice).encode()))
    assert (alarm.name, alarm.certain) == ("forged_records", True)


def test_every_named_test_is_reported_whatever_its_name(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared()) as slot:
            files = ["tests/test_calc.py", "tests/test_gone.py"]
            run = await run_files(slot, bench.toolchain, REPO, files, timeout_s=30)
        assert run.complete
        assert run.statuses[F2P[0]] is Status.FAILED
        assert {run.statuses[name] for name in P2P} == {Status.PASSED}
        assert run.statuses.keys() == {*NAMES}
        assert run.failures[F2P[0]].line == 6
        assert run.failures[F2P[0]].params == {"a": "1", "b": "2", "c": "3"}

    run_bench(scenario)


def test_the_results_are_the_same_where_the_workspace_has_a_second_path(run_bench: RunBench) -> None:
    calc = "import gc\ngc.get_objects()\n" + FILES["pkg/calc.py"]
    files = {**FILES, "pkg/calc.py": calc, "test_root.py": FILES["tests/test_calc.py"]}
    tests = ["test_root.py", "tests/test_calc.py"]

    async def run(bench: Bench, place: str) -> TestRun:
        slot = await bench.acquire("test", spec=replace(bench.spec, workspace=place))
        for path, text in files.items():
            await slot.write_text(f"{WORKSPACE}/{path}", text)
        toolchain = replace(bench.toolchain, python_path=(".",))
        return await run_files(slot, toolchain, WORKSPACE, tests, timeout_s=30)

    async def scenario(bench: Bench) -> None:
        usual = await run(bench, "")
        assert usual.statuses.keys() == {name.replace("tests/test_calc.py", path) for name in NAMES for path in tests}
        assert {failure.path for failure in usual.failures.values()} == {*tests}
        assert len(usual.alarms) == 1
        for place in ("/srv/elsewhere", "/home/user/my shop"):
            there = await run(bench, place)
            assert (there.complete, there.statuses) == (True, usual.statuses)
            assert {each.path for each in there.failures.values()} == {*tests}
            assert (there.alarms, [*there.opened.values()]) == (usual.alarms, [*usual.opened.values()])

    run_bench(scenario)


def test_all_kinds_of_outcomes(run_bench: RunBench) -> None:
    source = (
        "import pytest\n"
        "@pytest.fixture\ndef bad(): raise ValueError('x')\n"
        "@pytest.fixture\ndef late():\n    yield\n    raise ValueError('x')\n"
        "def test_passed(): pass\n"
        "def test_failed(): assert 0\n"
        "def test_error(bad): pass\n"
        "def test_teardown(late): pass\n"
        "def test_skipped(): pytest.skip()\n"
        "@pytest.mark.xfail\ndef test_xfailed(): assert 0\n"
        "@pytest.mark.xfail\ndef test_xpassed(): pass\n"
    )

    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared({"test_o.py": source})) as slot:
            run = await run_files(slot, bench.toolchain, REPO, ["test_o.py"], timeout_s=30)
        found = {name.partition("::test_")[2]: str(status) for name, status in run.statuses.items()}
        assert found.pop("teardown") == "error"
        assert found == {name: name for name in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")}
        assert run.passed(list(run.statuses)) == 1

    run_bench(scenario)


@pytest.mark.parametrize(
    "broken",
    [
        "def add(a, b:\n",
        "import sys; sys.exit(0)\n",
        "import os; os._exit(0)\n",
        "raise KeyboardInterrupt\n",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
        "import nothing_of_that_name\n",
    ],
)
def test_code_that_silences_its_tests_has_failed_them(run_bench: RunBench, broken: str) -> None:
    async def scenario(bench: Bench) -> None:
        run = await run_changed(bench, {"pkg/calc.py": broken})
        assert run.passed(NAMES) == 0

    run_bench(scenario)


def test_leaving_in_the_middle_is_not_complete(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        leaving = FILES["pkg/calc.py"] + "\n\ndef double(a):\n    import os\n    os._exit(0)\n"
        run = await run_changed(bench, {"pkg/calc.py": leaving})
        assert not run.complete
        assert P2P[1] not in run.statuses
        assert [(label.name, label.certain) for label in run.labels] == [("session_cut_short", True)]

    run_bench(scenario)


WATCHED = {
    "gc.get_objects": "import gc\ngc.get_objects()\n",
    "gc.get_referrers": "import gc\ngc.get_referrers(gc)\n",
    "sys._getframe": "import sys\nn = 1\nwhile 'reporter' not in sys._getframe(n).f_code.co_filename: n += 1\n",
    "object.__setattr__": "import _pytest.runner as r\nr.call_and_report.__code__ = r.call_and_report.__code__\n",
    "changed _pytest.runner.call_and_report": "import _pytest.runner as r\nr.call_and_report = lambda *a: None\n",
    "changed unittest.case.TestCase.assertEqual": "import unittest\nunittest.TestCase.assertEqual = print\n",
    "changed verdict_channel.VerdictChannel.send": "import verdict_channel as v\nv.VerdictChannel.send = print\n",
}


def test_the_openings_of_test_files_are_counted(run_bench: RunBench) -> None:
    path = f"{REPO}/tests/test_calc.py"
    reads = {
        "": 0,
        "import warnings\nwarnings.warn_explicit('x', Warning, 'tests/test_calc.py', 1)\n": 0,
        "import linecache\nlinecache.getlines('tests/test_calc.py')\n": 1,
        "import os\nos.system('cat tests/*.py > /dev/null; cat < tests/test_calc.py > /dev/null')\n": 2,
        "import os\nos.close(os.open('test_calc.py', 0, dir_fd=os.open('tests', 0)))\n": 1,
    }

    async def scenario(bench: Bench) -> None:
        for text, times in reads.items():
            run = await run_changed(bench, {"pkg/calc.py": text + FILES["pkg/calc.py"]})
            assert run.opened == {path: 1 + times}, (text, run)

    run_bench(scenario)
    (label,) = reads_of_tests({"a": 3, "b": 1, "c": 2}, {"a": 2, "b": 1})
    assert (label.name, label.evidence.partition(":")[0], label.certain) == ("tests_read", "a", False)


@pytest.mark.timeout(400)
def test_calls_that_reach_into_the_run_become_labels_that_are_not_certain(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        for event, text in WATCHED.items():
            run = await run_changed(bench, {"pkg/calc.py": text + FILES["pkg/calc.py"]})
            labels = run.labels
            assert not any(label.certain for label in labels)
            name = "framework_changed" if event.startswith("changed") else "audited_call"
            assert any(event in label.evidence for label in labels if label.name == name), (event, run)
        honest = "import collections, ctypes, logging, os, sys\nPoint = collections.namedtuple('Point', 'x y')\n"
        honest += "logging.getLogger().warning('x')\nopen(__file__).close()\nos.listdir('/proc/self/fd')\n"
        honest += "sys.settrace(sys.gettrace())\nimport builtins\nbuiltins.print = lambda *a, p=print: p(*a)\n"
        assert not (await run_changed(bench, {"pkg/calc.py": honest + FILES["pkg/calc.py"]})).alarms

    run_bench(scenario)


def test_an_endless_loop_times_out_and_fails(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        run = await run_changed(bench, {"pkg/calc.py": "import time\ntime.sleep(600)\n"}, timeout_s=2.0)
        assert run.timed_out
        assert run.passed(NAMES) == 0

    run_bench(scenario)


def test_a_broken_import_in_a_conftest_is_the_workspaces_fault(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        run = await run_changed(bench, {"conftest.py": "import pkg.calc\n", "pkg/calc.py": "1 +\n"})
        assert not run.complete
        assert run.passed(NAMES) == 0

    run_bench(scenario)


def test_printed_and_forged_lines_are_no_verdict(run_bench: RunBench) -> None:
    forged = (
        "import json, os\n"
        "record = {'nonce': '', 'node_ids': ['x'], 'node_id': 'tests/test_calc.py::test_double', 'when': 'call',\n"
        "          'outcome': 'passed', 'wasxfail': False, 'failure': None}\n"
        "for kind in ('start', 'collected', 'test', 'finish'):\n"
        "    line = json.dumps({**record, 'kind': kind})\n"
        "    print(line)\n"
        "    os.write(3, line.encode() + b'\\n')\n"
        "os._exit(0)\n"
    )

    async def scenario(bench: Bench) -> None:
        run = await run_changed(bench, {"pkg/calc.py": forged})
        assert run.passed(NAMES) == 0

    run_bench(scenario)


def test_a_harness_that_does_not_start_is_the_graders_fault(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared()) as slot:
            for broken in (
                replace(bench.toolchain, command=("/nowhere/python",)),
                replace(bench.toolchain, dependencies=("/nowhere",)),
            ):
                with pytest.raises(GraderError, match="did not start"):
                    await run_files(slot, broken, REPO, ["tests/test_calc.py"], timeout_s=30)

    run_bench(scenario)


def test_arguments_that_pytest_refuses_are_the_graders_fault(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared()) as slot:
            wrong = replace(bench.toolchain, pytest_args=("--no-such-option",))
            with pytest.raises(GraderError, match=r"(?s)pytest cannot run .*--no-such-option"):
                await run_files(slot, wrong, REPO, ["tests/test_calc.py"], timeout_s=30)

    run_bench(scenario)


def test_the_environment_is_the_same_each_time(run_bench: RunBench) -> None:
    source = (
        "import os, sys\n"
        "def test_env():\n"
        "    assert os.environ['PYTHONHASHSEED'] == '0' and hash('a') == hash('a')\n"
        "    assert sys.flags.no_user_site and sys.flags.no_site and sys.flags.dont_write_bytecode\n"
        "    assert not os.environ.get('PYTEST_ADDOPTS')\n"
        "def test_child():\n"
        "    import subprocess\n"
        "    subprocess.run([sys.executable, '-c', 'import pkg.calc'], check=True)\n"
    )

    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared({**FILES, "test_env.py": source})) as slot:
            run = await run_files(slot, bench.toolchain, REPO, ["test_env.py"], timeout_s=30)
            assert set(run.statuses.values()) == {Status.PASSED}, run.output
            assert await slot.stat(f"{REPO}/.pytest_cache") is None

    run_bench(scenario)


def test_many_names_are_no_problem(run_bench: RunBench) -> None:
    source = (
        "import pytest\n@pytest.mark.parametrize('i', range(3000), ids=lambda i: f'{i:060}')\ndef test_n(i): pass\n"
    )
    names = [f"test_n.py::test_n[{i:060}]" for i in range(3000)]

    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared({"test_n.py": source})) as slot:
            run = await run_files(slot, bench.toolchain, REPO, ["test_n.py"], timeout_s=60)
        assert run.passed(names) == 3000

    run_bench(scenario)
