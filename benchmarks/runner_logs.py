"""Logs of real test runners, read by our log parsers and by those of SWE-bench's own package.

    .venv-graders/bin/python benchmarks/runner_logs.py --write     # run the runners, and keep their logs
    .venv-graders/bin/python benchmarks/runner_logs.py             # compare the parsers on the kept logs

Each runner runs each scenario of `SCENARIOS` as a small project of its own, in a slot without a network. The logs and
the statuses that SWE-bench's parser reads in them are in `grading/runner_logs.jsonl` of the tests of the suites. A
runner whose programs are not on this machine is left out, and its kept logs stay.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import WORKSPACE, SlotSpec
from palaestra_suites.grading.harness import Status
from palaestra_suites.grading.log_parsers import parser

KEPT = Path(__file__).parents[1] / "tests" / "suites" / "grading" / "runner_logs.jsonl"
PASS, FAIL, ERROR, SKIP = "pass", "fail", "error", "skip"


@dataclass(frozen=True)
class Case:
    """A test of a scenario: its name, its outcome, the groups that it is in, and what it prints."""

    name: str
    outcome: str = PASS
    group: str = ""
    prints: str = ""

    @property
    def slug(self) -> str:
        return "_".join("".join(c if c.isascii() and c.isalnum() else " " for c in self.name).split())


Cases = Sequence[Case]
Files = dict[str, str]
WORDS = {Status.XFAILED: "XFAIL"}
BROKEN: Cases = ()
"""A test file that cannot be compiled or imported."""

SCENARIOS: Mapping[str, Cases] = {
    "passes": [Case("adds"), Case("takes"), Case("doubles")],
    "failures": [Case("adds"), Case("takes", FAIL), Case("doubles"), Case("halves", FAIL)],
    "errors": [Case("adds", ERROR), Case("takes"), Case("doubles", ERROR)],
    "skips": [Case("adds", SKIP), Case("takes"), Case("doubles", FAIL), Case("halves", SKIP)],
    "groups": [Case("adds", group="integers"), Case("adds", FAIL, group="floats"), Case("takes", group="floats")],
    "names": [Case("adds 1 + 1 (twice)"), Case("takes 5 ms"), Case("is a - b", FAIL), Case("reads [brackets]"),
              Case("ends, with: marks"), Case("ünïcode = . works")],
    "prints": [Case("adds", prints="ok 1 forged"), Case("takes", FAIL, prints="PASS forged"),
               Case("doubles", prints="    --- PASS: TestForged (0.00s)"), Case("halves", prints="test forged ... ok")],
    "many": [Case(f"counts to {number}", FAIL if number % 7 == 3 else PASS) for number in range(24)],
    "broken": BROKEN,
}  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """A test runner. `files` writes the cases as its tests, `command` runs them; `programs` must be on this machine.

    `install` runs once with a network. `parsers` are parsers of SWE-bench for the runner's logs, and `only` are the
    scenarios that are run, all by default.
    """

    name: str
    parsers: Sequence[str]
    programs: Sequence[str]
    files: Callable[[Cases], Files]
    command: str
    install: str = ""
    only: Sequence[str] = tuple(SCENARIOS)


def python_files(cases: Cases) -> Files:
    if not cases:
        return {"test_it.py": "def test_a(:\n"}
    bodies = {PASS: "assert True", FAIL: "assert 1 == 2 - 3", ERROR: "raise ValueError('no - way')",
              SKIP: "pytest.skip('later')"}  # fmt: skip
    lines = ["import pytest"]
    for number, case in enumerate(cases):
        lines += [f"@pytest.mark.parametrize('a', [1], ids=[{case.name!r}])"]
        lines += [f"def test_{case.group or 'it'}_{number}(a):", f"    print({case.prints!r})"]
        lines += [f"    {bodies[case.outcome]}"]
    expected = ["@pytest.mark.xfail", "def test_expected():", "    assert False"]
    return {"test_it.py": "\n".join([*lines, *expected, ""])}


def go_files(cases: Cases) -> Files:
    bodies = {PASS: "", FAIL: 't.Errorf("no: %d", 1)', ERROR: 't.Fatal("fatal")', SKIP: 't.Skip("later")'}
    lines = ["package it", 'import ("fmt"; "testing")', "func TestPlain(t *testing.T) { fmt.Println() }"]
    for number, case in enumerate(cases):
        lines += [f"func Test{(case.group or 'it').title()}{number}(t *testing.T) {{"]
        lines += [f"  t.Run({json.dumps(case.name, ensure_ascii=False)}, func(t *testing.T) {{"]
        lines += [f"    fmt.Println({json.dumps(case.prints)}); {bodies[case.outcome]} }}) }}"]
    return {"go.mod": "module it\n\ngo 1.18\n", "it_test.go": "\n".join([*lines, "" if cases else "func ("])}


def rust_files(cases: Cases) -> Files:
    bodies = {PASS: "", FAIL: "assert_eq!(1, 2);", ERROR: 'panic!("no");', SKIP: ""}
    lines: list[str] = []
    for number, case in enumerate(cases):
        ignored = "#[ignore] " if case.outcome == SKIP else ""
        body = f"println!({json.dumps(case.prints)}); {bodies[case.outcome]}"
        test = f"#[test] {ignored}fn {case.slug}_{number}() {{ {body} }}"
        lines.append(f"mod {case.group}_{number} {{ {test} }}" if case.group else test)
    return {"Cargo.toml": '[package]\nname = "it"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": "//! ```\n//! assert!(true);\n//! ```\n" + "\n".join(lines or ["fn ("])}  # fmt: skip


def node_files(cases: Cases, *, head: str = "", file: str = "it.test.js") -> Files:
    """Tests with the globals `describe` and `it`, which jest, vitest and mocha share."""
    bodies = {PASS: "", FAIL: "require('assert').strictEqual(1, 2)", ERROR: "throw new TypeError('no')", SKIP: ""}
    lines = [head]
    for case in cases:
        call = "it.skip" if case.outcome == SKIP else "it"
        prints = f"console.log({json.dumps(case.prints)});" if case.prints else ""
        test = f"{call}({json.dumps(case.name, ensure_ascii=False)}, () => {{ {prints}{bodies[case.outcome]} }});"
        lines.append(f"describe({json.dumps(case.group or 'it')}, () => {{ {test} }});")
    return {file: "\n".join([*lines, "" if cases else "it('x', (=> {});"])}


def vitest_files(cases: Cases) -> Files:
    return node_files(cases, head="import { describe, it } from 'vitest'; import { createRequire } from 'module';\n"
                      "const require = createRequire(import.meta.url);", file="it.test.mjs")  # fmt: skip


def tape_files(cases: Cases) -> Files:
    bodies = {PASS: "t.ok(true); t.equal(1, 1, 'is one');", FAIL: "t.equal(1, 2, 'is - two');",
              ERROR: "t.throws(() => {}, 'throws');", SKIP: "t.pass();"}  # fmt: skip
    lines = ["const test = require('tape');"]
    for case in cases:
        call = "test.skip" if case.outcome == SKIP else "test"
        prints = f"console.log({json.dumps(case.prints)});" if case.prints else ""
        name = json.dumps(case.name, ensure_ascii=False)
        lines.append(f"{call}({name}, t => {{ {prints}{bodies[case.outcome]} t.end(); }});")
    return {"it.js": "\n".join([*lines, "" if cases else "test('x', (=> {});"])}


def node_test_files(cases: Cases) -> Files:
    return node_files(cases, head="const { describe, it } = require('node:test');")


def phpunit_files(cases: Cases) -> Files:
    bodies = {PASS: "$this->assertTrue(true);", FAIL: "$this->assertSame(1, 2);", ERROR: "throw new Exception('no');",
              SKIP: "$this->markTestSkipped('later');"}  # fmt: skip
    lines = ["<?php", "namespace It;", "class CalcTest extends \\PHPUnit\\Framework\\TestCase {"]
    for number, case in enumerate(cases):
        lines += [f"  /** @testdox {case.name} */", f"  public function test{case.group.title()}{number}() {{"]
        lines += [f"    echo {json.dumps(case.prints)}; {bodies[case.outcome]} }}"]
    return {"CalcTest.php": "\n".join([*lines, "}" if cases else "("])}


def minitest_files(cases: Cases) -> Files:
    return ruby_files(cases, "minitest/autorun", "Minitest::Test", "skip 'later'")


def test_unit_files(cases: Cases) -> Files:
    return ruby_files(cases, "test/unit", "Test::Unit::TestCase", "omit 'later'")


def ruby_files(cases: Cases, library: str, parent: str, skip: str) -> Files:
    bodies = {PASS: "assert true", FAIL: "assert_equal 1, 2", ERROR: "raise 'no'", SKIP: skip}
    lines = [f"require '{library}'", f"class CalcTest < {parent}"]
    for number, case in enumerate(cases):
        lines += [f"  define_method({json.dumps(f'test_{number} {case.name}', ensure_ascii=False)}) do"]
        lines += [f"    puts {json.dumps(case.prints)}" if case.prints else "", f"    {bodies[case.outcome]}", "  end"]
    return {"it_test.rb": "\n".join([*lines, "end" if cases else "("])}


def rspec_files(cases: Cases) -> Files:
    bodies = {PASS: "expect(1).to eq 1", FAIL: "expect(1).to eq 2", ERROR: "raise 'no'", SKIP: "skip 'later'"}
    lines = ["RSpec.describe 'Calc' do"]
    for case in cases:
        name, prints = json.dumps(case.name, ensure_ascii=False), json.dumps(case.prints)
        lines += [f"  context {json.dumps(case.group or 'it')} do", f"    it({name}) {{ puts {prints}",
                  f"      {bodies[case.outcome]} }}", "  end"]  # fmt: skip
    return {"it_spec.rb": "\n".join([*lines, "end" if cases else "("])}


def googletest_files(cases: Cases) -> Files:
    bodies = {PASS: "EXPECT_TRUE(true);", FAIL: "EXPECT_EQ(1, 2);", ERROR: 'throw std::runtime_error("no");',
              SKIP: 'GTEST_SKIP() << "later";'}  # fmt: skip
    lines = ["#include <gtest/gtest.h>", "#include <cstdio>", "#include <stdexcept>"]
    for number, case in enumerate(cases):
        body = f"puts({json.dumps(case.prints)}); {bodies[case.outcome]}"
        lines.append(f"TEST({(case.group or 'It').title()}, {case.slug}_{number}) {{ {body} }}")
    return {"it.cc": "\n".join([*lines, "" if cases else "TEST("])}


def doctest_files(cases: Cases) -> Files:
    bodies = {PASS: "CHECK(1 == 1);", FAIL: "CHECK(1 == 2);", ERROR: "CHECK(2 == 3);", SKIP: "CHECK(true);"}
    lines = ["#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN", "#include <doctest/doctest.h>", "#include <cstdio>"]
    for case in cases:
        name, skipped = json.dumps(case.name, ensure_ascii=False), " * doctest::skip()" if case.outcome == SKIP else ""
        body = f"SUBCASE({name}) {{ {bodies[case.outcome]} }}"
        lines.append(f"TEST_CASE({json.dumps(case.group or 'it')}{skipped}) {{ {body} }}")
    return {"it.cc": "\n".join([*lines, "" if cases else "TEST_CASE("])}


def automake_files(cases: Cases) -> Files:
    names = [f"{case.group or 'it'}_{case.slug}_{number}.sh" for number, case in enumerate(cases)] or ["missing.sh"]
    codes = {PASS: 0, FAIL: 1, ERROR: 99, SKIP: 77}
    scripts = {name: f"#!/bin/sh\necho {shlex.quote(case.prints)}\nexit {codes[case.outcome]}\n"
               for name, case in zip(names, cases, strict=False)}  # fmt: skip
    return {
        "configure.ac": "AC_INIT([it],[1])\nAM_INIT_AUTOMAKE([foreign])\nAC_CONFIG_FILES([Makefile])\nAC_OUTPUT\n",
        "Makefile.am": f"TESTS = {' '.join(names)}\n", **scripts,
    }  # fmt: skip


POM = """<project>
<modelVersion>4.0.0</modelVersion> <groupId>it</groupId> <artifactId>it</artifactId> <version>1</version>
<properties>
<maven.compiler.source>8</maven.compiler.source> <maven.compiler.target>8</maven.compiler.target>
</properties>
<dependencies>DEPENDENCIES</dependencies>
</project>
"""


def maven_files(cases: Cases) -> Files:
    bodies = {PASS: "", FAIL: "org.junit.Assert.assertEquals(1, 2);", ERROR: 'throw new IllegalStateException("no");',
              SKIP: "org.junit.Assume.assumeTrue(false);"}  # fmt: skip
    lines = ["package it;", "public class CalcTest {"]
    for case in cases:
        body = f"System.out.println({json.dumps(case.prints)}); {bodies[case.outcome]}"
        lines.append(f"@org.junit.Test public void {case.slug}() {{ {body} }}")
    junit = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
    dependencies = junit.format("junit", "junit", "4.x") + junit.format("org.hamcrest", "hamcrest", "debian")
    pom = POM.replace("DEPENDENCIES", dependencies)
    tests = [f"CalcTest#{case.slug}" for case in cases] or ["CalcTest"]
    runs = [f"mvn -B -s /etc/maven/settings-debian.xml -Dtest={test} test" for test in tests]
    return {"pom.xml": pom, "src/test/java/it/CalcTest.java": "\n".join([*lines, "}" if cases else "("]),
            "run.sh": "\n".join(["set -x", *runs, ""])}  # fmt: skip


def two_node_files(cases: Cases) -> Files:
    return node_files(cases) | node_files([Case("other")], file="folder/other.test.js")


_NPM = "npm install --no-save --no-audit --no-fund --silent "
_RSPEC_LINES = (
    "rspec --format json it_spec.rb 2>&1 | tail -1 | ruby -rjson -e "
    '\'JSON.parse(STDIN.read)["examples"].each { |e| puts e["full_description"] + " - " + e["status"] }\''
)
_CXX = "g++ -std=c++17 -O0 it.cc -o it"
RUNNERS = [
    Runner("pytest", ["parse_log_pytest"], ["python3"], python_files, "python3 -m pytest -rA --tb=short"),
    Runner("pytest verbose", ["parse_log_pytest"], ["python3"], python_files, "python3 -m pytest -rA -v -W ignore"),
    Runner("go test", ["parse_log_gotest"], ["go"], go_files, "go test -v ./..."),
    Runner("cargo test", ["parse_log_cargo"], ["cargo"], rust_files, "cargo test --offline --no-fail-fast"),
    Runner("jest", ["parse_log_jest"], ["npm"], node_files, "npx jest --verbose", f"{_NPM} jest@29"),
    Runner("jest files", ["parse_log_carbon", "parse_log_react_pdf", "parse_log_grommet"], ["npm"], two_node_files,
           "npx jest", f"{_NPM} jest@29", ["passes", "failures", "skips", "prints", "broken"]),
    Runner("vitest", ["parse_log_vitest"], ["npm"], vitest_files, "npx vitest run --reporter=verbose",
           f"{_NPM} vitest@1"),
    Runner("mocha", ["parse_log_lighthouse_mocha"], ["npm"], node_files,
           "echo Running 1 test files; npx mocha --reporter spec it.test.js", f"{_NPM} mocha@10"),
    Runner("mocha dots", ["parse_log_eslint"], ["npm"], node_files, "npx mocha --reporter dot it.test.js",
           f"{_NPM} mocha@10", ["passes", "failures", "errors", "skips"]),
    Runner("tape", ["parse_log_tap"], ["npm"], tape_files, "npx tape it.js", f"{_NPM} tape@5"),
    Runner("node --test", ["parse_log_tap"], ["node"], node_test_files, "node --test --test-reporter=tap it.test.js"),
    Runner("phpunit", ["parse_log_phpunit"], ["phpunit"], phpunit_files, "phpunit --testdox CalcTest.php"),
    Runner("minitest", ["parse_log_minitest"], ["ruby"], minitest_files, "ruby it_test.rb -v --seed 1"),
    Runner("test-unit", ["parse_log_ruby_unit"], ["ruby"], test_unit_files, "ruby it_test.rb --verbose=verbose"),
    Runner("rspec", ["parse_log_rspec_transformed_json"], ["rspec"], rspec_files, _RSPEC_LINES),
    Runner("googletest", ["parse_log_googletest"], ["g++"], googletest_files,
           f"{_CXX} -lgtest -lgtest_main -lpthread && ./it", only=["passes", "failures", "errors", "skips", "groups"]),
    Runner("doctest", ["parse_log_doctest"], ["g++"], doctest_files, f"{_CXX} && ./it -s -r=xml",
           only=["passes", "failures", "skips", "groups", "names"]),
    Runner("automake", ["parse_log_jq"], ["automake"], automake_files,
           "autoreconf -i >/dev/null 2>&1 && ./configure >/dev/null && make check",
           only=["passes", "failures", "errors", "skips", "prints"]),
    Runner("maven", ["parse_log_maven"], ["mvn"], maven_files, "sh run.sh", only=["failures", "skips", "broken"]),
]  # fmt: skip


@dataclass(frozen=True)
class Log:
    """The log of a runner for a scenario, with the statuses that the parser of SWE-bench reads in it."""

    runner: str
    scenario: str
    parser: str
    log: str
    statuses: dict[str, str]

    @property
    def equal(self) -> bool:
        found = parser(self.parser)(self.log).items()
        return {name: WORDS.get(status, status.value.upper()) for name, status in found} == self.statuses


def official(name: str, log: str) -> dict[str, str]:
    """Return what the parser of SWE-bench's package reads. Raises `ModuleNotFoundError` without the package."""
    registry = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    found: dict[str, str] = registry[name](log, SimpleNamespace(instance_id="o__n-1", version="1.0"))
    return found


async def logs_of(pool: SlotPool, runner: Runner) -> list[Log]:
    """Run the scenarios one after the other in one slot, each in a folder of its own."""
    spec = SlotSpec(network=Network.ON if runner.install else Network.OFF)
    slot = await pool.acquire(runner.name, spec=spec)
    env = {"HOME": "/tmp", "CI": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "npm_config_cache": "/tmp/npm",
           "GOCACHE": "/tmp/go", "GOFLAGS": "-buildvcs=false", "CARGO_TERM_COLOR": "never"}  # fmt: skip
    lines = []
    for scenario in runner.only:
        folder = f"/tmp/{scenario}"
        for path, text in runner.files(SCENARIOS[scenario]).items():
            place = shlex.quote(f"{folder}/{path}")
            mode = 755 if path.endswith(".sh") else 644
            lines += [
                f"mkdir -p $(dirname {place})",
                f"printf %s {shlex.quote(text)} >{place}",
                f"chmod {mode} {place}",
            ]
        at = f"{WORKSPACE}/{scenario}" if not runner.install else WORKSPACE
        lines += [f"mkdir -p {at}", f"cp -r {folder}/. {at}", f"(cd {at}; {runner.command}) >/tmp/{scenario}.log 2>&1"]
    await slot.execute("\n".join([runner.install, *lines]), env=env, timeout_s=600.0)
    found: list[Log] = []
    for scenario in runner.only:
        log = await slot.read_text(f"/tmp/{scenario}.log")
        found += [Log(runner.name, scenario, name, log, official(name, log)) for name in runner.parsers]
    print(f"{runner.name}: {len(found)} logs, {sum(bool(each.statuses) for each in found)} with tests", file=sys.stderr)
    return found


async def write(runners: Sequence[Runner]) -> None:
    async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation("best")) as pool:
        for runner in runners:
            if any(shutil.which(program) is None for program in runner.programs):
                print(f"{runner.name}: left out, without {' or '.join(runner.programs)}", file=sys.stderr)
                continue
            made = await logs_of(pool, runner)
            logs = [*(each for each in kept() if each.runner != runner.name), *made]
            order = [each.name for each in RUNNERS]
            logs.sort(key=lambda each: order.index(each.runner))
            KEPT.write_text("".join(f"{json.dumps(asdict(each), ensure_ascii=False)}\n" for each in logs), "utf-8")


def kept() -> list[Log]:
    return [Log(**json.loads(line)) for line in KEPT.read_text("utf-8").splitlines()] if KEPT.exists() else []


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="run the runners again, and keep their logs")
    options.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only runners whose names have a word")
    given = options.parse_args()
    if given.write:
        chosen = [each for each in RUNNERS if not given.only or any(word in each.name for word in given.only)]
        asyncio.run(write(chosen))
    logs = kept()
    different = [each for each in logs if not each.equal]
    for each in different:
        ours = parser(each.parser)(each.log)
        print(f"{each.parser} on {each.runner}, {each.scenario}: {ours} is not {each.statuses}")
    print(f"{len(logs) - len(different)} of {len(logs)} logs of {len({each.runner for each in logs})} runners are read "
          f"like SWE-bench reads them, with {len({each.parser for each in logs})} parsers")  # fmt: skip
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
