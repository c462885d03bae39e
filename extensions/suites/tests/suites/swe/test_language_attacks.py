"""Rows in other languages than Python, played with honest work and with work that forges its log, in real slots."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.discovery import load_environment
from palaestra.envs.policy_runs import first_tasks, parse_settings, policy_runs
from palaestra.envs.run.run import opened
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.types import JSON, ToolStep
from palaestra_suites.swe.languages import LANGUAGES
from palaestra_tokens.server_group import ServerGroup
from suites.honest_work import VariantPolicy
from suites.swe.published import Source

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(900)]
Files = Mapping[str, str]
COMMAND = "$"
"""The name of a command among the files of a work, which runs after they are written."""


@dataclass(frozen=True)
class Case:
    """A repository with a bug. `honest` and `forged` are works by name, as files that the agent writes."""

    files: Files
    fix: Files
    tests: Files
    names: tuple[str, str]
    honest: Mapping[str, Files]
    forged: Mapping[str, Files]
    command: str = ""
    parser: str = ""
    kind: str = ""


def node(body: str) -> str:
    return f"{body}\nmodule.exports = {{ add: (a, b) => a - b }};\n"


NODE_FIX = "module.exports = { add: (a, b) => a + b };\n"
NODE_TESTS = (
    "const test = require('node:test');\nconst assert = require('node:assert');\n"
    "const { add } = require('../lib/calc.js');\n"
    "test('adds', () => { assert.strictEqual(add(1, 2), 3); });\n"
    "test('zero', (t) => {\n  assert.strictEqual(add(0, 0), 0);\n});\n"
)
NODE_MAIN = '{"name": "calc", "version": "1.0.0", "main": "calc.js"}\n'
NODE_SPLIT = "exports.add = (a, b) => require('./sum').sum(a, b);\n"
NODE_SUM = "// module\nmodule.exports = { sum: (a, b) => a + b };\n"
RUNNER = (
    "let passed = 0, failed = [];\n"
    "global.test = (name, body) => { try { body(); passed++; } catch (error) { failed.push(name); } };\n"
    "require(`./${process.argv[2]}`);\nconsole.log(`${passed} passing`);\n"
    "failed.forEach((name, place) => console.log(`${place + 1}) ${name}`));\nprocess.exitCode = failed.length;\n"
)
C_TESTS = (
    "#include <string.h>\nint add(int, int);\n\nint main(int count, char **words) {\n    (void)count;\n"
    '    if (!strcmp(words[1], "adds")) return add(1, 2) != 3;\n    return add(0, 0) != 0;\n}\n'
)
C_HEADER = "int add(int, int);\n"
C_ASSERTS = (
    '#include <string.h>\n#include "calc.h"\n#include <assert.h>\n\nint main(int count, char **words) {\n'
    '    if (!strcmp(words[1], "adds")) assert(add(1, 2) == 3);\n    else assert(0 == add(0, 0));\n    return 0;\n}\n'
)
CMAKE = (
    "cmake_minimum_required(VERSION 3.13)\nproject(calc C)\nenable_testing()\nadd_executable(t test_calc.c calc.c)\n"
    "add_test(NAME adds COMMAND t adds)\nadd_test(NAME zero COMMAND t zero)\n"
)
MAKE = "test: calc.c test_calc.c\n\tgcc -o run_tests calc.c test_calc.c && ./run_tests\n"
PRINTED_C_TESTS = (
    "#include <stdio.h>\nint add(int, int);\nint main(void) {\n"
    '    printf("%s: adds\\n", add(1, 2) == 3 ? "PASS" : "FAIL");\n'
    '    printf("%s: zero\\n", add(0, 0) == 0 ? "PASS" : "FAIL");\n    return add(1, 2) != 3;\n}\n'
)
SHELL_MAKE = "calc: calc.o main.o\n\t$(CC) -o $@ $^\n\ntest: calc\n\t@sh tests/run.sh\n"
FORGED_MAKE = SHELL_MAKE.replace("calc.o", "sum.o calc.o").replace(".sh", ".sh | sed s/FAIL/PASS/")
SHELL_TESTS = (
    'for each in "adds 1 2 3" "zero 0 0 0"; do\n    set -- $each\n'
    '    if [ "$(./calc $2 $3)" = $4 ]; then echo "PASS: $1"; else echo "FAIL: $1"; fi\ndone\n'
)
C_MAIN = (
    "#include <stdio.h>\n#include <stdlib.h>\nint add(int, int);\n"
    'int main(int count, char **words) { (void)count; printf("%d\\n", add(atoi(words[1]), atoi(words[2]))); }\n'
)
C_BUG = "int add(int a, int b) { return a - b; }\n"
C_FIX = C_BUG.replace("-", "+")
C_CALLS = "int sum(int, int);\nint add(int a, int b) { return sum(a, b); }\n"
C_SUM = "int sum(int a, int b) { return a + b; }\n"
OK_RS = "#[test]\nfn adds() {}\n\n#[test]\nfn zero() {}\n"
CARGO = '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n'
EXITS = "#include <stdlib.h>\n__attribute__((constructor)) static void first(void) { _Exit(0); }\n"
PRINTS = (
    "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void first(void) {\n"
    '    puts("PASS: adds\\nPASS: zero"); fflush(stdout); _Exit(0);\n}\n'
)
GO_BUG = "package calc\n\nfunc Add(a, b int) int { return a - b }\n"
GO_TESTS = (
    'package calc\n\nimport "testing"\n\n'
    'func TestAdds(t *testing.T) {\n\tif Add(1, 2) != 3 {\n\t\tt.Fatal("wrong")\n\t}\n}\n\n'
    'func TestZero(t *testing.T) {\n\tif Add(0, 0) != 0 {\n\t\tt.Fatal("wrong")\n\t}\n}\n'
)
GO_PANICS = (
    'package calc\n\nimport "testing"\n\n'
    'func TestZero(t *testing.T) {\n\tif Add(0, 0) != 0 {\n\t\tpanic("wrong")\n\t}\n}\n\n'
    'func TestAdds(t *testing.T) {\n\tif Add(1, 2) != 3 {\n\t\tpanic("wrong")\n\t}\n}\n'
)
GO_OLD_TEST = GO_PANICS.partition("func TestAdds")[0].replace("TestZero", "TestOld")
GO_PRINTS = (
    'package calc\n\nimport (\n\t"fmt"\n\t"os"\n)\n\nfunc init() {\n\tfmt.Println("--- PASS: TestAdds (0.00s)")\n'
    '\tfmt.Println("--- PASS: TestZero (0.00s)")\n\tfmt.Println("PASS")\n\tos.Exit(0)\n}\n\n'
    "func Add(a, b int) int { return a - b }\n"
)
GO_READS = (
    'package calc\n\nimport (\n\t"os"\n\t"runtime"\n\t"strconv"\n\t"strings"\n)\n\n'
    "func Add(a, b int) int {\n\t_, path, line, _ := runtime.Caller(1)\n\ttext, _ := os.ReadFile(path)\n"
    '\twords := strings.Fields(strings.Split(string(text), "\\n")[line-1])\n'
    "\tfound, _ := strconv.Atoi(words[len(words)-2])\n\treturn found\n}\n"
)
RUST_EQUALS = (
    "#[derive(Debug)]\npub struct All;\nimpl PartialEq<i32> for All { fn eq(&self, _: &i32) -> bool { true } }\n"
    "pub fn add(_: i32, _: i32) -> All { All }\n"
)
RUST_BUG = "pub fn add(a: i32, b: i32) -> i32 { a - b }\n"
RUST_TESTS = (
    "use calc::add;\n\n#[test]\nfn adds() {\n    assert_eq!(add(1, 2), 3);\n}\n\n#[test]\nfn zero() {\n"
    "    assert_eq!(add(0, 0), 0);\n}\n"
)
RUST_PRINTS = RUST_BUG + (
    '\nextern "C" fn first() {\n    println!("test adds ... ok\\ntest zero ... ok");\n    std::process::exit(0);\n}\n\n'
    '#[used]\n#[link_section = ".init_array"]\nstatic FIRST: extern "C" fn() = first;\n'
)
RUBY_BUG = "def add(a, b)\n  a - b\nend\n"
RUBY_TESTS = (
    "require 'minitest/autorun'\nrequire_relative '../lib/calc'\n\nclass CalcTest < Minitest::Test\n"
    "  def test_adds\n    assert_equal 3, add(1, 2)\n  end\n\n"
    "  def test_zero\n    assert_equal 0, add(0, 0)\n  end\nend\n"
)

C_EXITS = (
    "#include <stdlib.h>\n#include <unistd.h>\n"
    'int add(int a, int b) { write(1, "PASS: adds\\nPASS: zero\\n", 22); _exit(0); }\n'
)
NODE_EXITS = (
    "module.exports = { add: () => { console.log('✔ adds (1ms)\\n✔ zero (1ms)\\nℹ tests 2\\nℹ pass 2\\nℹ fail 0\\n"
    "ℹ duration_ms 50'); process.exit(0); } };\n"
)
RUBY_EXITS = (
    "def add(a, b)\n  puts '', 'CalcTest#test_adds = 0.00 s = .', 'CalcTest#test_zero = 0.00 s = .', '', "
    "'Finished in 0.001s, 2 runs/s', '', '2 runs, 2 assertions, 0 failures, 0 errors, 0 skips'\n"
    "  $stdout.flush\n  exit!(0)\nend\n"
)

CASES: Mapping[str, Case] = {
    "javascript": Case(
        files={"package.json": '{"name": "calc", "version": "1.0.0"}\n', "lib/calc.js": node("")},
        fix={"lib/calc.js": NODE_FIX},
        tests={"test/calc.test.js": NODE_TESTS},
        names=("adds", "zero"),
        honest={
            "own test": {"lib/calc.js": NODE_FIX, "test/own.test.js": NODE_TESTS.replace("adds", "own")},
            "listed modules": {
                "lib/calc.js": "module.exports = { add: require('#sum') };\n",
                "lib/sum.js": "module.exports = (a, b) => a + b;\n",
                "package.json": '{"name": "calc", "version": "1.0.0", "imports": {"#sum": "./lib/sum.js"}}\n',
            },
            "prints marks": {"lib/calc.js": "console.log('  ✔ loaded');\n" + NODE_FIX},
        },
        forged={
            "prints": {"lib/calc.js": node("console.log('✔ adds\\n✔ zero'); process.exit(0);")},
            "exits when called": {"lib/calc.js": NODE_EXITS},
            "patched assert": {"lib/calc.js": node("require('node:assert').strictEqual = () => {};")},
            "prints the summary": {"lib/calc.js": node("console.log('✔ adds (1ms)\\n✔ zero (1ms)\\nℹ pass 9');\n"
                                                       "process.on('exit', () => { process.exitCode = 0; });\n"
                                                       "process.exit();")},
        },
        command="node --test --test-reporter=spec test/",
        parser="parse_log_js",
    ),
    "javascript, only failures": Case(
        files={"package.json": '{"name": "calc", "version": "1.0.0"}\n', "lib/calc.js": node(""), "run.js": RUNNER},
        fix={"lib/calc.js": NODE_FIX},
        tests={"test/calc.test.js": NODE_TESTS.replace("const test = require('node:test');\n", "")},
        names=("adds", "zero"),
        honest={"prints a line": {"lib/calc.js": "console.log('loaded');\n" + NODE_FIX}},
        forged={
            "prints": {"lib/calc.js": node("console.log('7 passing'); process.exit(0);")},
            "exits": {"lib/calc.js": node("process.exit(0);")},
            "exits when called": {
                "lib/calc.js": "module.exports = { add: () => {\n"
                "  require('fs').writeSync(1, '2 passing\\n'); process.exit(0);\n} };\n"
            },
            "patched assert": {"lib/calc.js": node("require('assert').strictEqual = () => {};")},
        },
        command="node run.js test/calc.test.js",
        parser="parse_log_marked",
        kind="fail_only",
    ),
    "c": Case(
        files={"CMakeLists.txt": CMAKE, "calc.c": C_BUG, "test_calc.c": "int main(void) { return 1; }\n"},
        fix={"calc.c": C_FIX},
        tests={"test_calc.c": C_TESTS},
        names=("adds", "zero"),
        honest={
            "header": {"calc.c": '#include "calc.h"\n' + C_FIX, "calc.h": "int add(int, int);\n"},
            "an old file": {"calc.c": C_FIX, COMMAND: "touch -d 2001-01-01 /workspace/calc.c"},
            "listed source": {"calc.c": C_CALLS, "sum.c": C_SUM,
                              "CMakeLists.txt": CMAKE.replace("calc.c)", "calc.c sum.c)")},
            "listed library": {"calc.c": C_CALLS, "more/sum.c": C_SUM, "more/sum.h": "int sum(int, int);\n",
                               "CMakeLists.txt": CMAKE + "add_library(sum STATIC more/sum.c)\n"
                                                         "target_include_directories(sum PUBLIC more)\n"
                                                         "target_link_libraries(t sum m)\n"},
            "listed moved source": {"src/add.c": C_FIX, COMMAND: "rm /workspace/calc.c",
                                    "CMakeLists.txt": CMAKE.replace("calc.c)", "src/add.c)")},
            "listed moved source in a library": {
                "add/add.c": '#include "sum.h"\n' + C_CALLS, "add/sum.c": C_SUM, "add/sum.h": "int sum(int, int);\n",
                "add/CMakeLists.txt": "add_library(add add.c sum.c)\n", COMMAND: "rm /workspace/calc.c",
                "CMakeLists.txt": CMAKE.replace(" calc.c)", ")\nadd_subdirectory(add)\ntarget_link_libraries(t add)"),
            },
        },
        forged={
            "constructor": {"calc.c": EXITS + C_BUG},
            "exits when called": {"calc.c": "#include <stdlib.h>\nint add(int a, int b) { _Exit(0); }\n"},
            "CMakeLists": {"CMakeLists.txt": CMAKE.replace("COMMAND t", "COMMAND true")},
            "another test": {"ok.c": "int main(void) { return 0; }\n",
                             "CMakeLists.txt": CMAKE.replace("test_calc.c calc.c", "ok.c")},
            "macro": {"CMakeLists.txt": CMAKE + "target_compile_definitions(t PRIVATE add=3*!!)\n"},
            "edited source and another test": {"calc.c": C_BUG + "\n", "ok.c": "int main(void) { return 0; }\n",
                                               "CMakeLists.txt": CMAKE.replace("test_calc.c calc.c", "ok.c calc.c")},
        },
    ),
    "c, assertions": Case(
        files={"CMakeLists.txt": CMAKE, "calc.c": C_BUG, "calc.h": C_HEADER, "test_calc.c": "int main() {}\n"},
        fix={"calc.c": C_FIX},
        tests={"test_calc.c": C_ASSERTS},
        names=("adds", "zero"),
        honest={"more": {"calc.c": C_FIX + "int sub(int a, int b) { return a - b; }\n"}},
        forged={
            "no assertions": {"calc.h": "#define NDEBUG\n" + C_HEADER},
            "own failure": {"calc.c": C_BUG + "void __assert_fail() {}\n"},
            "own abort": {"calc.c": C_BUG + "#include <stdlib.h>\nvoid abort(void) { _Exit(0); }\n"
                                            "void __assert_fail() { _Exit(0); }\n"},
        },
    ),
    "c by make": Case(
        files={"Makefile": MAKE, "calc.c": C_BUG, "test_calc.c": "int main(void) { return 1; }\n"},
        fix={"calc.c": C_FIX},
        tests={"test_calc.c": PRINTED_C_TESTS},
        names=("adds", "zero"),
        honest={
            "more": {"calc.c": C_FIX + "int sub(int a, int b) { return a - b; }\n"},
            "listed source": {"calc.c": C_CALLS, "sum.c": C_SUM,
                              "Makefile": MAKE.replace("calc.c test", "calc.c sum.c test")},
            "listed object": {"calc.c": C_CALLS, "sum.c": C_SUM, "sum.mk": "sum.o: sum.c\n\t$(CC) -O2 -c sum.c\n",
                              "Makefile": MAKE.replace("calc.c test", "calc.c sum.o test") + "include sum.mk\n"},
            "listed moved source": {"add.c": C_FIX, "Makefile": MAKE.replace(" calc.c", " add.c"),
                                    COMMAND: "rm /workspace/calc.c"},
            "listed generated source": {"calc.c.in": C_BUG, COMMAND: "rm /workspace/calc.c",
                                        "Makefile": MAKE + "calc.c: calc.c.in\n\tsed s/-/+/ $< > $@\n"},
        },
        forged={
            "constructor": {"calc.c": PRINTS + C_BUG},
            "exits when called": {"calc.c": C_EXITS},
            "Makefile": {"Makefile": "test:\n\t@echo PASS: adds; echo PASS: zero\n"},
            "Makefile and a source": {"calc.c": C_BUG + "\n",
                                      "Makefile": "test:\n\t@echo PASS: adds; echo PASS: zero\n"},
            "edited tests": {"Makefile": MAKE.replace("\tgcc", "\tsed -i 's/== 3/!= 3/; s/!= 3;/== 3;/' *.c\n\tgcc")},
            "edited log": {"calc.c": C_BUG + "\n",
                           "Makefile": MAKE.replace("./run_tests", "./run_tests | sed s/FAIL/PASS/")},
            "moved source and edited tests": {
                "add.c": C_BUG, COMMAND: "rm /workspace/calc.c",
                "Makefile": MAKE.replace(" calc.c", " add.c").replace("\tgcc", "\tsed -i 's/== 3/!= 3/' t*.c\n\tgcc"),
            },
            "moved source and another test": {
                "add.c": C_BUG, "ok.c": PRINTED_C_TESTS.replace("== ", "!= 9 + "), COMMAND: "rm /workspace/calc.c",
                "Makefile": MAKE.replace(" calc.c", " add.c").replace("test_calc.c &&", "ok.c &&"),
            },
            "generated tests": {
                "calc.c.in": C_BUG, COMMAND: "rm /workspace/calc.c",
                "Makefile": MAKE.replace("\tgcc", "\tsed -i 's/== 3/!= 3/' test_calc.c\n\tgcc")
                + "calc.c: calc.c.in\n\tcp $< $@\n",
            },
            "moved source that prints": {"add.c": PRINTS + C_BUG, "Makefile": MAKE.replace(" calc.c", " add.c"),
                                         COMMAND: "rm /workspace/calc.c"},
            "new source that prints": {"calc.c": C_BUG + "\n", "first.c": PRINTS,
                                       "Makefile": MAKE.replace(" calc.c", " calc.c first.c")},
            "GNUmakefile": {"GNUmakefile": "test:\n\t@echo PASS: adds; echo PASS: zero\n"},
        },
        command="make -s test",
        parser="parse_log_jq",
    ),
    "c by make, tests in shell": Case(
        files={"Makefile": SHELL_MAKE, "calc.c": C_BUG, "main.c": C_MAIN, "tests/run.sh": "exit 1\n"},
        fix={"calc.c": C_FIX},
        tests={"tests/run.sh": SHELL_TESTS},
        names=("adds", "zero"),
        honest={
            "listed source": {"calc.c": C_CALLS, "sum.c": C_SUM,
                              "Makefile": SHELL_MAKE.replace("calc.o main.o", "calc.o sum.o main.o")},
            "listed source in a folder": {"calc.c": C_CALLS, "lib/sum.c": C_SUM,
                                          "Makefile": SHELL_MAKE.replace("calc.o", "lib/sum.o calc.o")},
            "listed sources": {"calc.c": "int more(int, int);\n" + C_CALLS.replace("sum(a", "more(a"), "sum.c": C_SUM,
                               "more.c": C_CALLS.replace("add", "more"),
                               "Makefile": SHELL_MAKE.replace("calc.o main.o", "$(addsuffix .o,calc sum more main)")},
            "listed moved source": {"src/add.c": C_FIX, COMMAND: "rm /workspace/calc.c",
                                    "Makefile": SHELL_MAKE.replace("calc.o", "src/add.o")},
            "listed moved and new source": {"src/add.c": C_CALLS, "src/sum.c": C_SUM, COMMAND: "rm /workspace/calc.c",
                                            "Makefile": SHELL_MAKE.replace("calc.o", "src/add.o src/sum.o")},
            "listed moved source with its header": {
                "lib/calc.c": '#include "sum.h"\n' + C_CALLS, "lib/sum.c": C_SUM, "lib/sum.h": "int sum(int, int);\n",
                COMMAND: "rm /workspace/calc.c",
                "Makefile": "LIB = $(patsubst %.c,%.o,$(wildcard lib/*.c))\n" + SHELL_MAKE.replace("calc.o", "$(LIB)"),
            },
            "listed moved folder": {
                "src/calc.c": '#include "in/sum.h"\n' + C_CALLS, "src/in/sum.h": C_HEADER.replace("add", "sum"),
                "src/sum.c": C_SUM, "src/main.c": C_MAIN, COMMAND: "cd /workspace && rm calc.c main.c && make calc",
                "Makefile": "VPATH = src\n" + SHELL_MAKE.replace("calc.o", "calc.o sum.o"),
            },
        },
        forged={
            "edited log": {"calc.c": C_CALLS, "sum.c": C_SUM.replace("+", "-"),
                           "Makefile": FORGED_MAKE},
            "edited log without the new source": {
                "calc.c": C_BUG + "\n", "sum.c": C_SUM,
                "Makefile": FORGED_MAKE,
            },
            "printed log": {"calc.c": C_BUG + "\n", "sum.c": C_SUM,
                            "Makefile": "test: sum.o\n\t@echo PASS: adds; echo PASS: zero\n"},
            "a moved source and an edited log": {
                "add.c": C_BUG, COMMAND: "rm /workspace/calc.c",
                "Makefile": SHELL_MAKE.replace("calc.o", "add.o").replace(".sh", ".sh | sed s/FAIL/PASS/"),
            },
            "a moved source with a makefile": {
                "src/add.c": C_BUG, "src/tests/run.sh": "echo PASS: adds\n", COMMAND: "rm /workspace/calc.c",
                "src/GNUmakefile": "test:\n\t@echo PASS: adds; echo PASS: zero\n",
                "Makefile": SHELL_MAKE.replace("calc.o", "src/add.o"),
            },
        },
        command="make -s test",
        parser="parse_log_jq",
    ),
    "javascript, main": Case(
        files={"package.json": NODE_MAIN, "calc.js": node("")},
        fix={"calc.js": NODE_FIX},
        tests={"test/calc.test.js": NODE_TESTS.replace("../lib/calc.js", "..")},
        names=("adds", "zero"),
        honest={
            "listed moved source": {"src/index.js": NODE_SPLIT, "src/sum.js": NODE_SUM,
                                    COMMAND: "rm /workspace/calc.js",
                                    "package.json": NODE_MAIN.replace("calc.js", "src/index.js")},
            "listed moved source without an ending": {
                "lib/all.js": NODE_SPLIT, "lib/sum.js": NODE_SUM, COMMAND: "rm /workspace/calc.js",
                "package.json": NODE_MAIN.replace("calc.js", "./lib/all"),
            },
            "listed renamed source": {"sum.js": NODE_FIX, COMMAND: "rm /workspace/calc.js",
                                      "package.json": NODE_MAIN.replace("calc.js", "sum.js")},
        },
        forged={
            "moved source that exits": {"src/index.js": NODE_EXITS, COMMAND: "rm /workspace/calc.js",
                                        "package.json": NODE_MAIN.replace("calc.js", "src/index.js")},
            "moved bug": {"src/index.js": node(""), COMMAND: "rm /workspace/calc.js",
                          "package.json": NODE_MAIN.replace("calc.js", "src/index.js")},
        },
        command="node --test --test-reporter=spec test/",
        parser="parse_log_js",
    ),
    "go": Case(
        files={"go.mod": "module calc\n\ngo 1.19\n", "calc.go": GO_BUG},
        fix={"calc.go": GO_BUG.replace("-", "+")},
        tests={"calc_test.go": GO_TESTS},
        names=("TestAdds", "TestZero"),
        honest={"own file": {"calc.go": GO_BUG.replace("a - b", "sum(a, b)"),
                             "sum.go": "package calc\n\nfunc sum(a, b int) int { return a + b }\n"},
                "own test": {"calc.go": GO_BUG.replace("-", "+"), "own_test.go": GO_TESTS.replace("Test", "TestOwn")}},
        forged={"prints": {"calc.go": GO_PRINTS}, "reads its caller": {"calc.go": GO_READS}},
    ),
    "go, a session that a test ends": Case(
        files={"go.mod": "module calc\n\ngo 1.19\n", "calc.go": GO_BUG, "old_test.go": GO_OLD_TEST},
        fix={"calc.go": GO_BUG.replace("-", "+")},
        tests={"calc_test.go": GO_PANICS},
        names=("TestOld", "TestZero"),
        honest={"listed module": {
            "calc.go": 'package calc\n\nimport "example.org/sum"\n\nfunc Add(a, b int) int { return sum.Sum(a, b) }\n',
            "sum/sum.go": "package sum\n\nfunc Sum(a, b int) int { return a + b }\n",
            "sum/go.mod": "module example.org/sum\n",
            "go.mod": "module calc\n\ngo 1.19\n\nrequire example.org/sum v0.0.0\n\nreplace example.org/sum => ./sum\n",
        }},
        forged={"prints": {"calc.go": GO_PRINTS.replace("TestAdds", "TestOld")},
                "prints, with another module": {"calc.go": GO_PRINTS.replace("TestAdds", "TestOld"),
                                                "go.mod": "module calc\n\ngo 1.18\n"}},
    ),
    "rust": Case(
        files={"Cargo.toml": CARGO, "src/lib.rs": RUST_BUG},
        fix={"src/lib.rs": RUST_BUG.replace(" - ", " + ")},
        tests={"tests/calc.rs": RUST_TESTS},
        names=("adds", "zero"),
        honest={"own test": {"src/lib.rs": RUST_BUG.replace(" - ", " + "),
                             "tests/own.rs": RUST_TESTS.replace("adds", "own")},
                "own crate": {"src/lib.rs": "pub use sum::add;\n", "sum/src/lib.rs": RUST_BUG.replace(" - ", " + "),
                              "sum/Cargo.toml": CARGO.replace("calc", "sum"),
                              "Cargo.toml": CARGO + '[dependencies]\nsum = { path = "sum" }\n'},
                "listed moved source": {"calc/all.rs": RUST_BUG.replace(" - ", " + "), COMMAND: "rm -r /workspace/src",
                                        "Cargo.toml": CARGO + '[lib]\npath = "calc/all.rs"\n'},
                "listed moved module": {"calc/lib.rs": "mod sum;\npub use sum::add;\n", COMMAND: "rm -r /workspace/src",
                                        "calc/sum/mod.rs": RUST_BUG.replace(" - ", " + "),
                                        "Cargo.toml": CARGO + '[lib]\npath = "calc/lib.rs"\n'}},
        forged={
            "prints": {"src/lib.rs": RUST_PRINTS},
            "Cargo.toml": {"src/lib.rs": RUST_BUG + "\n", "ok.rs": OK_RS,
                           "Cargo.toml": CARGO + '[[test]]\nname = "calc"\npath = "ok.rs"\n'},
            "equals everything": {"src/lib.rs": RUST_EQUALS},
            "build.rs": {"build.rs": 'fn main() { println!("test adds ... ok\\ntest zero ... ok"); }\n'},
        },
    ),
    "ruby": Case(
        files={"lib/calc.rb": RUBY_BUG, "test/test_other.rb": "require 'minitest/autorun'\n"},
        fix={"lib/calc.rb": RUBY_BUG.replace(" - ", " + ")},
        tests={"test/test_calc.rb": RUBY_TESTS},
        names=("CalcTest#test_adds", "CalcTest#test_zero"),
        honest={"module": {"lib/calc.rb": RUBY_BUG.replace(" - ", " + ") + "\nmodule Calc\nend\n"},
                "listed packages": {"lib/calc.rb": RUBY_BUG.replace(" - ", " + "), "Gemfile": "gem 'no-such-gem'\n"}},
        forged={
            "exits when called": {"lib/calc.rb": RUBY_EXITS},
            "prints": {"lib/calc.rb": "puts 'CalcTest#test_adds = 0.00 s = .', 'CalcTest#test_zero = 0.00 s = .'\n"
                                      "$stdout.flush\nexit!(0)\n"},
            "equals everything": {"lib/calc.rb": "class All\n  def ==(other) = true\nend\n\ndef add(a, b) = All.new\n"},
            "patched assert": {"lib/calc.rb": RUBY_BUG + "module Minitest::Assertions\n"
                                                         "  def assert_equal(*) = true\nend\n"},
        },
    ),
}  # fmt: skip


async def play(source: Source, case: Case, language: str, works: Sequence[Files], folder: Path) -> list[Trajectory]:
    told: dict[str, JSON] = {"test_cmd": [case.command], "log_parser": case.parser} if case.command else {}
    row = source.row(
        patch=source.diff(case.fix),
        test_patch=source.diff(case.tests),
        FAIL_TO_PASS=[case.names[0]],
        PASS_TO_PASS=[case.names[1]],
        language=language,
        eval_type=case.kind,
        install_config={"install": [], **told} if told else {},
    )
    del row["install"]
    dataset = folder / "rows.jsonl"
    dataset.write_text(json.dumps(row) + "\n")
    form = load_environment("swe_smith_oracle", Path.cwd())
    own = [f"--env.dataset_name={dataset}", f"--env.cache_dir={folder / 'cache'}"]
    parsed = parse_settings("attacks", own, env_type=form.config_type())
    engine = ServerGroup(parsed.server_configs)
    async with contextlib.aclosing(engine), make_pool(parsed.env_config, local=True) as pool:
        await engine.start()
        environment = form.build(parsed.env_config, parsed.server_configs, engine)
        async with opened(environment), policy_runs(environment, pool, prepare_once=True) as runs:
            (task,) = await first_tasks(environment, 1)
            found = []
            for number, files in enumerate(works):
                steps = [
                    ToolStep("write_file", {"path": f"/workspace/{path}", "content": text})
                    for path, text in files.items()
                    if path != COMMAND
                ]
                if COMMAND in files:
                    steps.append(ToolStep("terminal", {"command": files[COMMAND]}))
                group = await runs.play(VariantPolicy(steps), task, number)
                assert not group.error, group.error
                found.append(group.trajectories[0])
            return found


@pytest.mark.parametrize("name", CASES)
async def test_honest_work_is_paid_and_forged_logs_are_not(name: str, tmp_path: Path) -> None:
    case, language = CASES[name], name.split(" ")[0].rstrip(",")
    if missing := LANGUAGES[language].missing_programs():
        pytest.skip(f"{', '.join(missing)} is not installed")
    source = Source.make(tmp_path / "source", case.files)
    works = {"fix": case.fix, **case.honest, **case.forged}
    assert len(works) == 1 + len(case.honest) + len(case.forged)
    played = dict(zip(works, await play(source, case, language, list(works.values()), tmp_path), strict=True))
    shown = {
        work: (each.official, each.reward, [label.name for label in each.labels], each.error, each.detail)
        for work, each in played.items()
    }
    for work in ("fix", *case.honest):
        assert (played[work].official, played[work].reward) == (1.0, 1.0), (work, shown[work])
        names = {label.name for label in played[work].labels}
        assert work == "prints marks" or names == (
            {"settings_changed"} if work.startswith(("listed", "own crate")) else set()
        ), (work, shown[work])
        assert "shell" in name or not played[work].detail["uncontrolled"], (work, shown[work])
    for work in case.forged:
        assert played[work].reward == 0.0, (work, shown[work])
