"""Named tests in real slots: what is reported, and whose fault silence is."""

from dataclasses import replace

import pytest

from palaestra.core.errors import GraderError
from palaestra.suites.grading.falsified import alarm_labels, ended_early
from palaestra.suites.grading.harness import alarms_in, read_records
from palaestra.suites.grading.run_tests import Status, TestRun, run_files, run_tests
from suites.bench import F2P, FILES, P2P, REPO, Bench, RunBench

pytestmark = [pytest.mark.slots, pytest.mark.slow]
NAMES = (*F2P, *P2P)


async def run_changed(bench: Bench, changed: dict[str, str], timeout_s: float = 30.0) -> TestRun:
    async with bench.slot() as slot:
        for path, text in {**FILES, **changed}.items():
            await slot.write_text(f"{REPO}/{path}", text)
        return await run_tests(slot, bench.toolchain, REPO, NAMES, timeout_s=timeout_s)


def test_lines_that_are_no_records_of_the_run_are_passed_over() -> None:
    good = b'{"kind": "start"}'
    lines = [b"[" * 100_000, b"{", b"[1]", b'{"nonce": "m"}', b"9" * 5000, good]
    assert read_records(b"\n".join(lines)) == [{"kind": "start"}]


def test_a_session_that_ends_twice_is_forged() -> None:
    once, twice = '{"kind": "start"}\n{"kind": "finish"}', '\n{"kind": "finish"}'
    assert alarms_in(read_records(once.encode())) == frozenset()
    assert alarms_in(read_records(f"{once}\n{once}".encode())) == frozenset(), "a script may start two sessions"
    (alarm,) = alarms_in(read_records((once + twice).encode()))
    assert (alarm.label, alarm.certain) == ("forged_records", True)


def test_every_named_test_is_reported_whatever_its_name(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared()) as slot:
            names = (*NAMES, "tests/test_calc.py::test_none", "tests/test_gone.py::test_x")
            run = await run_tests(slot, bench.toolchain, REPO, names, timeout_s=30)
        assert run.complete
        assert run.statuses[F2P[0]] is Status.FAILED
        assert {run.statuses[name] for name in P2P} == {Status.PASSED}
        assert {run.statuses[name] for name in names[-2:]} == {Status.MISSING}
        assert run.failures[F2P[0]].line == 6
        assert run.failures[F2P[0]].params == {"a": "1", "b": "2", "c": "3"}

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
        assert run.statuses[P2P[1]] is Status.MISSING
        assert [(label.name, label.certain) for label in ended_early(run)] == [("session_cut_short", True)]

    run_bench(scenario)


WATCHED = {
    "gc.get_objects": "import gc\ngc.get_objects()\n",
    "gc.get_referrers": "import gc\ngc.get_referrers(gc)\n",
    "sys._getframe": "import sys\nn = 1\nwhile 'reporter' not in sys._getframe(n).f_code.co_filename: n += 1\n",
    "object.__setattr__": "import _pytest.runner as r\nr.call_and_report.__code__ = r.call_and_report.__code__\n",
    f"open {REPO}/tests/test_calc.py": "import linecache\nlinecache.getlines('tests/test_calc.py')\n",
    "changed _pytest.runner.call_and_report": "import _pytest.runner as r\nr.call_and_report = lambda *a: None\n",
    "changed unittest.case.TestCase.assertEqual": "import unittest\nunittest.TestCase.assertEqual = print\n",
    "changed verdict_channel.VerdictChannel.send": "import verdict_channel as v\nv.VerdictChannel.send = print\n",
}


@pytest.mark.timeout(400)
def test_calls_that_reach_into_the_run_become_labels_that_are_not_certain(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        for event, text in WATCHED.items():
            run = await run_changed(bench, {"pkg/calc.py": text + FILES["pkg/calc.py"]})
            assert event in {alarm.event for alarm in run.alarms}, (event, run)
            labels = alarm_labels(run.alarms)
            assert not any(label.certain for label in labels)
            name = "framework_changed" if event.startswith("changed") else "audited_call"
            assert any(event in label.evidence for label in labels if label.name == name)
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
                    await run_tests(slot, broken, REPO, NAMES, timeout_s=30)

    run_bench(scenario)


def test_arguments_that_pytest_refuses_are_the_graders_fault(run_bench: RunBench) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared()) as slot:
            wrong = replace(bench.toolchain, pytest_args=("--no-such-option",))
            with pytest.raises(GraderError, match="canary"):
                await run_tests(slot, wrong, REPO, NAMES, timeout_s=30)

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


def test_compiled_files_count_only_outside_the_workspace(run_bench: RunBench) -> None:
    source = (
        "import sys\n"
        "sys.path.append('/tmp/own')\n"
        "def test_workspace():\n"
        "    from pkg import planted\n"
        "    import other\n"
        "    assert (planted.VALUE, other.VALUE) == ('source', 'source')\n"
        "def test_library():\n"
        "    import colorsys\n"
        "    assert type(colorsys.__loader__).__name__ == '_CompiledLoader'\n"
    )
    plant = (
        "import py_compile, sys\n"
        "for place in sys.argv[1:]:\n"
        "    open(place, 'w').write('VALUE = \"planted\"\\n')\n"
        "    py_compile.compile(place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
        "    open(place, 'w').write('VALUE = \"source\"\\n')\n"
    )

    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared({**FILES, "test_compiled.py": source})) as slot:
            await slot.make_dir("/tmp/own")
            places = [f"{REPO}/pkg/planted.py", "/tmp/own/other.py"]
            planted = await slot.execute([bench.toolchain.command[0], "-c", plant, *places], timeout_s=30)
            assert planted.metadata["exit_code"] == 0, planted.output
            run = await run_files(slot, bench.toolchain, REPO, ["test_compiled.py"], timeout_s=30)
            assert set(run.statuses.values()) == {Status.PASSED}, run.failures

    run_bench(scenario)


def test_many_names_are_no_problem(run_bench: RunBench) -> None:
    source = (
        "import pytest\n@pytest.mark.parametrize('i', range(3000), ids=lambda i: f'{i:060}')\ndef test_n(i): pass\n"
    )
    names = [f"test_n.py::test_n[{i:060}]" for i in range(3000)]

    async def scenario(bench: Bench) -> None:
        async with bench.slot(await bench.prepared({"test_n.py": source})) as slot:
            run = await run_tests(slot, bench.toolchain, REPO, names, timeout_s=60)
        assert run.passed(names) == 3000

    run_bench(scenario)
