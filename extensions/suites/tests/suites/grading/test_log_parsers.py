"""Log parsers: logs of many runners, and the same logs through SWE-bench's own parsers, if its package is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.grading.harness import Status
from palaestra_suites.grading.log_parsers import PARSERS, _published, has_run, parser

P, F, S = Status.PASSED, Status.FAILED, Status.SKIPPED

JUNIT = (
    '<testsuite name="s"><testcase name="a" classname="T"/><testcase name="b" classname="T"><failure/></testcase>'
    '<testcase name="c"><skipped/></testcase></testsuite>'
)
DOCTEST = (
    '<doctest binary="t"><TestCase name="c"><SubCase name="x"><Expression success="true"/></SubCase>'
    '<SubCase name="y"><Expression success="false"/></SubCase></TestCase></doctest>'
)
KARMA = "Starting browser Chrome\n  suite\n    ✔ first\n    ✖ second\n\nSUMMARY:\n  ✔ 1 test completed"

LOGS: list[tuple[str, str, dict[str, Status]]] = [
    ("parse_log_gotest", "=== RUN A\n--- PASS: TestA (0.00s)\n    --- FAIL: TestB/x_y (1.20s)\n--- SKIP: TestC (0s)",
     {"TestA": P, "TestB/x_y": F, "TestC": S}),
    ("parse_log_cargo", "test a::b ... ok\ntest c ... FAILED\ntest d ... ignored\ntest result: FAILED. 1 passed",
     {"a::b": P, "c": F}),
    ("parse_log_jest", "PASS a.test.js\n  suite\n    ✓ adds (3 ms)\n    ✕ takes (12ms)\n    ○ skipped later",
     {"adds": P, "takes": F, "skipped later": S}),
    ("parse_log_jest_json", "[PASSED] suite adds\n[FAILED] suite takes", {"suite adds": P, "suite takes": F}),
    ("parse_log_vitest", " ✓ a.test.ts > s > adds 2ms\n × a.test.ts > s > takes\n ↓ a.test.ts > s > later [skipped]",
     {"a.test.ts > s > adds": P, "a.test.ts > s > takes": F, "a.test.ts > s > later": S}),
    ("parse_log_tap", "TAP version 13\n# a\nok 1 should be equal\nnot ok 2 - should match\n1..2",
     {"should be equal": P, "- should match": F}),
    ("parse_log_karma", KARMA, {"suite > first": P, "suite > second": F}),
    ("parse_log_maven", "+ mvn -Dtest=A#a test\n[INFO] BUILD SUCCESS\n+ mvn -Dtest=B test\n[INFO] BUILD FAILURE",
     {"A#a": P, "B": F}),
    ("parse_log_gradle_custom", "a.T > one PASSED\na.T > two FAILED\na.T > three\n> Task :x\nPASSED",
     {"a.T > one": P, "a.T > two": F, "a.T > three": P}),
    ("parse_log_ant", "   [junit] [PASS] one\n   [junit] [FAIL] two\n   [junit] [ERR] three",
     {"one": P, "two": F, "three": F}),
    ("parse_log_redis", "[ok]: set works (3 ms)\n[err]: get fails in tests/a.tcl\n[skip]: slow one\n[ignore]: other",
     {"set works": P, "get fails": F, "slow one": S, "other": S}),
    ("parse_log_jq", "PASS: tests/jqtest\nFAIL: tests/optional", {"tests/jqtest": P, "tests/optional": F}),
    ("parse_log_micropython_test", "pass  basics/a.py\nFAIL  basics/b.py\nskip  io/c.py",
     {"basics/a.py": P, "basics/b.py": F, "io/c.py": S}),
    ("parse_log_googletest", "[ RUN    ] A.b\n[       OK ] A.b (0 ms)\n[  FAILED  ] A.c (1 ms)", {"A.b": P, "A.c": F}),
    ("parse_log_doctest", f"building\n{DOCTEST}\n", {"c > x": P, "c > y": F}),
    ("parse_log_phpunit", "Calc (Tests\\Calc)\n ✔ Adds\n ✘ Takes\n ↩ Later",
     {"Calc > Adds": P, "Calc > Takes": F, "Calc > Later": S}),
    ("parse_log_minitest", "CalcTest#test_adds = 0.00 s = .\nCalc. x = 0.1 s = .", {"Calc": P}),
    ("parse_log_cucumber", "features/a.feature ...\nfeatures/b.feature ..F", {"features/a.feature": P,
                                                                             "features/b.feature": F}),
    ("parse_log_ruby_unit", "  test: adds:\t.: (0.001)\n  takes:\tF\n  later:\tO", {"adds": P, "takes": F, "later": S}),
    ("parse_log_rspec_transformed_json", "Calc adds - passed\nCalc takes - failed", {"Calc adds": P, "Calc takes": F}),
    ("parse_log_carbon", "PASS a/b-test.js (3.2s)\nFAIL c-test.js", {"a/b-test.js": P, "c-test.js": F}),
    ("parse_log_react_pdf", "PASS a.test.js\nFAIL b.test.js (1.2 s)", {"a.test.js": P, "b.test.js": F}),
    ("parse_log_grommet", "PASS a.js (8 ms)\nFAIL b.js", {"a.js": P, "b.js": F}),
    ("parse_log_marked", "Failures:\n1) Hello should parse\n  Message:", {"Hello should parse": F}),
    ("parse_log_lighthouse_mocha", "running 2 test files\n  suite\n    inner\n      ✔ one (12ms)\n      1) two\n",
     {"suite - inner - one": P, "suite - inner - two": F}),
    ("ctest", "1/2 Test  #1: parse_tests ....   Passed    0.00 sec\n2/2 Test  #2: print ....***Failed    0.01 sec",
     {"parse_tests": P, "print": F}),
    ("junit", JUNIT, {"a (T)": P, "b (T)": F, "c": S}),
    ("gotest_json", '{"Action":"pass","Package":"p","Test":"TestA"}\n{"Action":"fail","Package":"p"}', {"TestA": P}),
    ("java_mvn", "[INFO] Tests run: 2, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.1 s - in a.T\n"
     "[ERROR] Tests run: 1, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.1 s <<< FAILURE! -- in a.U",
     {"a.T": P, "a.U": F}),
    ("parse_log_js_4", "  suite\n    ✔ one (3ms)\n    ✖ two\n    1) three", {"one": P, "two": F, "three": F}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "log", "expected"), LOGS, ids=[name for name, *_ in LOGS])
def test_a_log_is_read(name: str, log: str, expected: dict[str, Status]) -> None:
    assert parser(name)(log) == expected


@pytest.mark.parametrize(("name", "log", "expected"), LOGS, ids=[name for name, *_ in LOGS])
def test_colours_and_other_line_ends_change_nothing(name: str, log: str, expected: dict[str, Status]) -> None:
    coloured = log.replace("\n", "\x1b[0m\r\n\x1b[32m")
    assert parser(name)(coloured) == expected


RUNNER_LOGS = [
    json.loads(line) for line in Path(__file__).with_name("runner_logs.jsonl").read_text("utf-8").splitlines()
]
"""Logs of real runners, with the statuses that SWE-bench's parser reads in them (`benchmarks/runner_logs.py`)."""


def test_at_least_a_hundred_logs_are_compared() -> None:
    assert len(RUNNER_LOGS) + sum(name.startswith("parse_log_") for name, *_ in LOGS) >= 100


@pytest.mark.parametrize(
    "kept", RUNNER_LOGS, ids=[f"{kept['parser']}-{kept['runner']}-{kept['scenario']}" for kept in RUNNER_LOGS]
)
def test_the_log_of_a_real_runner_is_read_like_swebench_reads_it(kept: dict[str, JSON]) -> None:
    found = parser(str(kept["parser"]))(str(kept["log"])).items()
    words = {Status.XFAILED: "XFAIL"}
    assert {test: words.get(status, status.value.upper()) for test, status in found} == kept["statuses"]
    if importlib.util.find_spec("swebench") is not None:
        registry = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
        spec = SimpleNamespace(instance_id="o__n-1", version="1.0")
        assert registry[kept["parser"]](kept["log"], spec) == kept["statuses"]


RSPEC = """
Calc
  adds
    one and two
    one and three (FAILED - 1)
  takes one (PENDING: Temporarily skipped with xit)

Pending: (Failures listed here are expected and do not affect your suite's status)

  1) Calc takes one

Failures:

  1) Calc adds one and three
"""
MINITEST = (
    "Run options: -v --seed 1\n\n# Running:\n\nCalc::AddTest#test_0001_adds two = 1.5 = 0.00 s = .\n"
    "CalcTest#test_takes = 0.01 s = F\nCalcTest#test_later = 0.00 s = S\nCalcTest#test_raises = 0.00 s = E\n\n"
    "  1) Failure:\nCalcTest#test_takes [it_test.rb:9]:\n"
)


@pytest.mark.parametrize("name", ["ruby", "parse_log_rspec"])
def test_the_documentation_format_of_rspec(name: str) -> None:
    assert parser(name)(RSPEC) == {
        "Calc adds one and two": P,
        "Calc adds one and three": F,
        "Calc takes one": S,
    }


def test_the_verbose_format_of_minitest() -> None:
    assert parser("ruby")(MINITEST) == {
        "Calc::AddTest#test_0001_adds two = 1.5": P,
        "CalcTest#test_takes": F,
        "CalcTest#test_later": S,
        "CalcTest#test_raises": F,
    }


@pytest.mark.skipif(importlib.util.find_spec("swebench") is None, reason="the package swebench is not installed")
@pytest.mark.parametrize(("name", "log", "expected"), LOGS, ids=[name for name, *_ in LOGS])
def test_a_published_parser_reads_the_same(name: str, log: str, expected: dict[str, Status]) -> None:
    registry = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    if name not in registry:
        pytest.skip("not a parser of SWE-bench")
    found = registry[name](log, SimpleNamespace(instance_id="o__n-1", version="1.0"))
    assert found == {test: status.value.upper() for test, status in expected.items()}


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with raises(TaskError, "parse_log_of_nothing", "ant", "carbon"):
        parser("parse_log_of_nothing")


def test_a_log_of_failures_needs_a_sign_that_tests_ran() -> None:
    assert has_run("5 specs, 0 failures")
    assert has_run("  12 passing (3s)")
    assert not has_run("Executed 0 of 0")
    assert not has_run("Error: Cannot find module 'mocha'")


@pytest.mark.parametrize("name", PARSERS)
def test_a_log_without_a_test_is_no_error(name: str) -> None:
    assert parser(name)("") == {}
    assert parser(name)("\n\nStarting browser\n  a\n b\n x\n y\n") is not None


def test_a_foreign_parser_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that it cannot read lists no test."""
    folder = tmp_path / "swebench" / "harness"
    folder.mkdir(parents=True)
    (folder / "log_parsers.py").write_text(
        "import os\nPARSER_REGISTRY = {'parse_log_own': lambda log, spec: {log.split()[0]: 'PASSED', "
        "spec.instance_id: 'XFAIL', str(os.getpid()): 'FAILED'}}\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "swebench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _published.cache_clear()
    try:
        read = parser("parse_log_own", "o__n-1")
        found = read("\x1b[1madds\n")
        assert (found.pop("adds"), found.pop("o__n-1")) == (P, Status.XFAILED)
        assert str(os.getpid()) not in found
        assert read("") == {}
    finally:
        _published.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "swebench"]:
            monkeypatch.delitem(sys.modules, name, raising=False)


def test_xml_with_entities_is_not_read() -> None:
    bomb = JUNIT.replace("<testcase", '<!DOCTYPE x [<!ENTITY a "b">]><testcase', 1)
    assert PARSERS["junit"](bomb) == {}
