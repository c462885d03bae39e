"""Rows in other languages than Python: how their columns are read, what is protected, and whole plays where the
programs of a language are on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Change, ExecutionResult
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.grading.log_parsers import counted
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.baseline import PreparedRow
from palaestra_suites.swe.command_tests import missing_programs, read_command
from palaestra_suites.swe.language_tests import falsify
from palaestra_suites.swe.languages import LANGUAGES, NOTE_TREE, PREPARED_TREE
from palaestra_suites.swe.protected import SETTINGS_CHANGED, TESTS_EDITED, protected
from palaestra_suites.swe.swe_row import SweRow, TestNames, parse_row
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import Source, roll_out

FIX = unified_diff.between("calc.go", "bug\n", "fix\n")
GO_TESTS = unified_diff.between("pkg/calc_test.go", "a\n", "b\n")
ROW: dict[str, JSON] = {
    "instance_id": "o__n-1", "repo": "o/n", "base_commit": "abc123", "problem_statement": "It is wrong.", "patch": FIX,
    "test_patch": GO_TESTS, "FAIL_TO_PASS": ["TestAdd"], "PASS_TO_PASS": ["TestDouble"],
}  # fmt: skip


def row(**columns: JSON) -> SweRow:
    return parse_row({**ROW, **columns})


@pytest.mark.parametrize(
    ("columns", "language", "parser"),
    [
        ({}, "go", "gotest"),
        ({"test_patch": unified_diff.between("test/a.test.js", "a\n", "b\n")}, "javascript", "node"),
        ({"test_patch": unified_diff.between("src/a.test.ts", "a\n", "b\n")}, "typescript", "node"),
        ({"test_patch": unified_diff.between("tests/a.rs", "a\n", "b\n")}, "rust", "cargo"),
        ({"log_parser": "parse_log_redis"}, "c", "parse_log_redis"),
        ({"language": "cpp"}, "c++", "c"),
        ({"repo_language": "ts"}, "typescript", "node"),
        ({"install_config": {"test_cmd": "go test", "log_parser": "parse_log_gotest"}}, "go", "parse_log_gotest"),
    ],
)
def test_the_language_of_a_row(columns: dict[str, JSON], language: str, parser: str) -> None:
    made = row(**columns)
    assert made.recipe is not None
    assert (made.names, made.recipe.language.name, made.recipe.parser) == (TestNames.LOG, language, parser)


def test_a_language_without_a_toolchain_is_refused_by_name() -> None:
    with raises(TaskError, "haskell", "python", "javascript"):
        row(language="haskell")


def test_a_script_of_swe_bench_5_is_split_at_its_markers() -> None:
    script = "\n".join((
        "#!/bin/bash", "set -uxo pipefail", "cd /testbed", "git checkout abc pkg/calc_test.go",
        "git apply -v - <<'EOF_1'", "+go generate ./evil", "EOF_1", "make tools", ": '>>>>> Start Test Output'",
        "go test -v ./pkg && cd /testbed", ": '>>>>> End Test Output'", "git checkout abc pkg/calc_test.go",
    ))  # fmt: skip
    recipe = row(eval_script=script, log_parser="parse_log_gotest", eval_type="pass_and_fail").recipe
    assert recipe is not None
    assert (recipe.build, recipe.tests) == (("make tools",), ("go test -v ./pkg && cd /testbed",))
    assert recipe.test_script("o/n", "/workspace") == "make tools\ngo test -v ./pkg && cd /workspace"


def test_the_columns_of_swe_bench_pro() -> None:
    columns: dict[str, JSON] = {
        **{name: value for name, value in ROW.items() if not name.endswith("_TO_PASS")},
        "fail_to_pass": "['TestAdd']", "pass_to_pass": "['TestDouble', \"TestIt's\"]", "repo_language": "go",
        "before_repo_set_cmd": "git reset --hard", "dockerhub_tag": "o.n-1", "requirements": "Add must add.",
        "selected_test_files_to_run": '["pkg/calc_test.go", "../x_test.go"]', "interface": "func Add",
    }  # fmt: skip
    made = parse_row(columns)
    assert (made.fail_to_pass, made.pass_to_pass) == (("TestAdd",), ("TestDouble", "TestIt's"))
    assert made.problem_statement == "It is wrong.\n\nRequirements:\nAdd must add.\n\nInterface:\nfunc Add"
    assert made.test_files == ("pkg/calc_test.go",)
    assert made.image_name == "o.n-1"


def test_rows_of_nemo_gym_are_unwrapped_and_those_of_r2e_gym_refused() -> None:
    metadata = {"instance_id": "o__n-1", "instance_dict": json.dumps(ROW)}
    assert parse_row({"responses_create_params": {"input": [], "metadata": metadata}}).repo == "o/n"
    with raises(TaskError, "R2E-Gym"):
        parse_row({"repo_name": "sympy", "expected_output_json": "{}", "docker_image": "x"})


@pytest.mark.parametrize(
    ("statuses", "exit_status", "official"),
    [
        ({"TestAdd": Status.PASSED, "TestDouble": Status.SKIPPED}, 0, True),
        ({"TestAdd": Status.SKIPPED, "TestDouble": Status.PASSED}, 0, False),
        ({"TestAdd": Status.PASSED, "TestDouble": Status.PASSED}, 1, False),
        ({"TestAdd": Status.PASSED, "TestDouble": Status.PASSED, "TestOther": Status.FAILED}, 1, True),
        ({"TestAdd": Status.PASSED}, 0, False),
    ],
)
def test_the_official_verdict_of_a_log(statuses: dict[str, Status], exit_status: int, official: bool) -> None:
    run = TestRun(statuses, complete=True, exit_status=exit_status)
    assert row().official(run).resolved is official


@pytest.mark.parametrize(
    ("published", "printed", "status"),
    [
        ("Calc > adds [0.05 ms]", "adds [0.31 ms]", Status.PASSED),
        ("Calc > adds [0.05 ms]", "adds", Status.PASSED),
        ("Calc > adds", "adds [12 ms]", Status.PASSED),
        ("Calc > adds [0.05 ms]", "doubles [0.05 ms]", Status.MISSING),
        ("Calc > takes 5 ms", "takes 6 ms", Status.MISSING),
    ],
)
def test_the_duration_of_a_test_is_not_part_of_its_name(published: str, printed: str, status: Status) -> None:
    """PHPUnit prints it if the repository's settings say so, and rows are published with it."""
    made = row(language="php", install_config={"test_cmd": "phpunit", "log_parser": "parse_log_phpunit"})
    log = ExecutionResult(True, f"Calc (Tests\\Calc)\n ✔ {printed}\n")
    assert read_command(made, log, [published]).statuses[published] is status


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("pkg/calc.go", None),
        ("pkg/calc_test.go", TESTS_EDITED),
        ("pkg/main_test.go", TESTS_EDITED),
        ("other/own_test.go", None),
        ("go.mod", SETTINGS_CHANGED),
    ],
)
def test_protected_paths_of_a_language(path: str, label: str | None) -> None:
    found = protected([Change(path, "file")], row(), ["go.mod", "pkg/calc.go", "pkg/calc_test.go"])
    assert found.labelled.get(path) == label


@pytest.mark.parametrize(
    ("language", "path", "added"),
    [
        ("go", "pkg/main_test.go", True),
        ("go", "pkg/example_test.go", True),
        ("go", "pkg/calc_test.go", False),
        ("go", "pkg/old_test.go", False),
        ("go", "go.mod", False),
        ("ruby", "pkg/calc_test.go", False),
        ("ruby", "pkg/test_helper.rb", False),
    ],
)
def test_new_tests_are_no_edited_tests(language: str, path: str, added: bool) -> None:
    """They are not in the guarded view if they are built with the row's tests."""
    found = protected([Change(path, "file")], row(language=language), ["pkg/calc_test.go", "pkg/old_test.go"])
    assert found.guarded == (path,)
    assert found.added == ({path} if added else set())


@pytest.mark.parametrize(
    ("made", "beside"),
    [
        (("build/Makefile", "build/cmake_install.cmake", "build/CTestTestfile.cmake"), "build/CMakeFiles"),
        (("out/a/sub/build.ninja",), "out/a/sub/CMakeFiles"),
        (("Makefile", "CPackConfig.cmake"), "CMakeFiles"),
        (("bd/build.ninja",), "bd/meson-private"),
        (("Makefile",), "config.status"),
        (("src/Makefile",), "src/.deps"),
    ],
)
def test_build_files_that_a_tool_made_are_in_no_view(made: tuple[str, ...], beside: str) -> None:
    row_in_c, written = row(language="c"), ("CMakeLists.txt", "build/extra.cmake", "tools/Makefile")
    changes = [Change(path, "file") for path in (*made, *written)]
    found = protected([*changes, Change(beside, "dir")], row_in_c, ["CMakeLists.txt"])
    assert set(found.left_out) - {beside} == set(made)
    assert set(found.labelled) == set(written)
    assert protected([*changes, Change(beside, "dir")], row_in_c, made).labelled.keys() >= set(made), "prepared ones"
    assert protected(changes, row_in_c, []).labelled.keys() >= set(made), "without the tool"


BUILD_FILES = {
    "javascript": (
        "package.json", ".mocharc.jsonc", ".mocharc.js", "jest.config.json", "karma.conf.js", "vitest.config.mts",
        "vitest.workspace.ts", "ava.config.mjs", ".babelrc.json", "babel.config.cjs", "tsconfig.base.json", ".npmrc",
        "test/mocha.opts", "packages/a/package.json", "gulpfile.js", "jest.setup.js", ".nycrc", "Makefile",
    ),
    "go": ("go.mod", "go.work", "vendor/x/y.go", "Makefile", "makefile"),
    "rust": ("Cargo.toml", "sub/Cargo.toml", "build.rs", ".cargo/config", ".cargo/config.toml", "rust-toolchain"),
    "java": ("pom.xml", "build.gradle.kts", "settings.gradle.kts", "gradlew", "mvnw", ".mvn/jvm.config",
             "gradle/wrapper/gradle-wrapper.properties", "buildSrc/src/A.java",
             "src/main/resources/META-INF/services/org.junit.platform.launcher.TestExecutionListener"),
    "c": ("Makefile", "GNUmakefile", "Makefile.am", "rules.mk", "CMakeLists.txt", "sub/CMakeLists.txt", "cmake/a.cmake",
          "CMakePresets.json", "configure", "configure.ac", "meson.build", "CTestCustom.cmake"),
    "ruby": ("Gemfile", "Rakefile", "tasks/test.rake", "calc.gemspec", ".rspec", "test/test_helper.rb"),
    "php": ("composer.json", "phpunit.xml", "phpunit.xml.dist", "phpunit-unit.xml", ".user.ini"),
}  # fmt: skip
SOURCES = {
    "javascript": ("lib/a.js", "src/config.js", "lib/webpack.js", "docs/a.md", "lib/conf/a.js"),
    "go": ("calc.go", "internal/vendor/a.go", "docs/build.md"),
    "rust": ("src/build/mod.rs", "src/config.toml.rs", "src/vendor/a.rs", "Cargo.lock"),
    "java": ("src/main/java/a/services/B.java", "src/main/java/a/gradle/C.java"),
    "c": ("src/make.c", "include/configure.h", "doc/Make.txt"),
    "ruby": ("lib/calc/rake.rb", "lib/calc_plugin.rb"),
    "php": ("src/Composer.php", "config/app.php"),
}


@pytest.mark.parametrize("language", BUILD_FILES)
def test_files_of_builds_and_runners_are_as_prepared_unless_the_reference_changes_them(language: str) -> None:
    made = row(language=language)
    for path in BUILD_FILES[language]:
        assert protected([Change(path, "file")], made, []).labelled == {path: SETTINGS_CHANGED}
        fixed = row(language=language, patch=unified_diff.between(path, "a\n", "b\n"))
        assert protected([Change(path, "file")], fixed, []).labelled == {}
    for path in SOURCES[language]:
        assert protected([Change(path, "file")], made, []).labelled == {}, path


@pytest.mark.parametrize(
    ("language", "path", "text", "falsified"),
    [
        ("javascript", "a.test.js", "it('adds', async () => {\n  assert.strictEqual(a(), 1) })",
         "it('adds', async () => { assert.strictEqual(1, 2);\n  assert.strictEqual(a(), 1) })"),
        ("typescript", "a.test.ts", 'test("it\'s", function (done) { expect(a()).toBe(1) })\nit("b", () => { b() })',
         'test("it\'s", function (done) { expect(1).toBe(2); expect(a()).toBe(1) })\n'
         'it("b", () => { expect(1).toBe(2); b() })'),
        ("javascript", "a.test.js", "it('a', () => { a().should.be.ok })",
         "it('a', () => { throw new Error('falsified'); a().should.be.ok })"),
        ("go", "a_test.go", "func TestA(tt *testing.T) {\n}\nfunc BenchmarkA(b *testing.B) {\n}",
         'func TestA(tt *testing.T) { tt.Error("falsified");\n}\nfunc BenchmarkA(b *testing.B) {\n}'),
        ("rust", "tests/a.rs", "#[tokio::test]\nasync fn a() -> R<()> {\n}\nfn helper() {\n}",
         "#[tokio::test]\nasync fn a() -> R<()> { assert_eq!(1, 2);\n}\nfn helper() {\n}"),
        ("java", "ATest.java", '@Test(timeout = 5)\npublic void a() throws Exception {\n}',
         '@Test(timeout = 5)\npublic void a() throws Exception { if (true) throw new AssertionError("falsified");\n}'),
        ("c++", "a_test.cpp", 'TEST_CASE("a (b)", "[c]") {\n  REQUIRE(a());\n}',
         'TEST_CASE("a (b)", "[c]") { REQUIRE(1 == 2);\n  REQUIRE(a());\n}'),
        ("c", "test_a.c", "int main(void) {\n}", "int main(void) { return 99;\n}"),
        ("ruby", "a_spec.rb", "it 'adds' do\n  expect(a).to eq(1)\nend",
         "it 'adds' do\nexpect(1).to eq(2)\n\n  expect(a).to eq(1)\nend"),
        ("php", "ATest.php", "public function testA(): void\n{ $this->assertSame(1, a()); }",
         "public function testA(): void\n{ $this->assertSame(1, 2); $this->assertSame(1, a()); }"),
    ],
)  # fmt: skip
def test_each_test_of_a_falsified_file_fails_first(language: str, path: str, text: str, falsified: str) -> None:
    assert falsify(LANGUAGES[language], {path: text, "data.json": text}) == {path: falsified}


@pytest.mark.parametrize(
    ("language", "path", "text", "falsified"),
    [
        ("javascript", "a.js", "it('}', () => { a(`}`); }) // }",
         "it('}', () => { a(`}`);  throw new Error('falsified');}) // }"),
        ("go", "a_test.go", "func TestA(t *testing.T) {\n\tif a() { b() }\n}\n",
         'func TestA(t *testing.T) {\n\tif a() { b() }\n t.Error("falsified");}\n'),
        ("c", "t.c", 'int main(void) { if (a()) { return 1; } puts("}"); return 0; }\n',
         'int main(void) { if (a()) { { (void)(1); return 99; } } puts("}"); { (void)(0); return 99; }  return 99;}\n'),
        ("rust", "t.rs", "#[test]\nfn a() { let c = '}'; b(c); }",
         "#[test]\nfn a() { let c = '}'; b(c);  assert_eq!(1, 2);}"),
        ("ruby", "t.rb", "  def test_a\n    assert_equal c, a { |b|\n    }\n  end\nend\n",
         "  def test_a\n    assert_equal c, a { |b|\n    }\n\nassert_equal 1, 2\n  end\nend\n"),
    ],
)  # fmt: skip
def test_each_test_of_a_falsified_file_fails_last(language: str, path: str, text: str, falsified: str) -> None:
    assert falsify(LANGUAGES[language], {path: text}, late=True) == {path: falsified}


PROGRAMS = ("bundle", "ruby", "rspec", "node", "npm", "cmake", "ctest", "make", "meson", "mvn", "gradlew")


@pytest.mark.parametrize(
    ("language", "prepared", "added", "runs"),
    [
        ("ruby", {"test/test_a.rb": ""}, {"Gemfile": "gem 'rake'\n"}, "ruby -Ilib -Itest test/test_a.rb -v"),
        ("ruby", {"Gemfile": ""}, {"gems.rb": ""}, "bundle exec ruby -Ilib -Itest test/test_a.rb -v"),
        ("ruby", {"spec/test_a.rb": ""}, {"test/own.rb": ""}, "rspec --format documentation test/test_a.rb"),
        ("ruby", {"test/test_a.rb": ""}, {"spec/own.rb": ""}, "ruby -Ilib -Itest test/test_a.rb -v"),
        ("javascript", {"package.json": '{"scripts": {"test": "node --test"}}'},
         {"package.json": '{"scripts": {"test": "vitest"}}'}, "node --test --test-reporter=tap test/test_a.rb"),
        ("javascript", {"package.json": '{"scripts": {"test": "x"}}'},
         {"package.json": '{"scripts": {"test": "node --test"}}'}, "npm test --silent"),
        ("c", {"Makefile": ""}, {"CMakeLists.txt": ""}, "make -j 2 check"),
        ("c++", {"Makefile": ""}, {"meson.build": ""}, "make -j 2 check"),
        ("c", {"meson.build": ""}, {"CMakeLists.txt": ""}, "meson setup build-palaestra"),
        ("java", {"build.gradle": ""}, {"pom.xml": ""}, "gradlew --offline test --info"),
    ],
)  # fmt: skip
def test_the_prepared_tree_decides_which_command_runs(
    language: str, prepared: dict[str, str], added: dict[str, str], runs: str, tmp_path: Path
) -> None:
    repository, tree, programs = (tmp_path / name for name in ("repository", "tree", "programs"))

    def write(folder: Path, files: dict[str, str]) -> None:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o755)

    def shell(script: str) -> str:
        argv = ["sh", "-c", script.replace(PREPARED_TREE, str(tree)), "sh", "test/test_a.rb"]
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.run(argv, cwd=repository, env=environment, capture_output=True, text=True, check=True).stdout

    write(programs, dict.fromkeys(PROGRAMS, '#!/bin/sh\necho "${0##*/} $*"\n'))
    write(repository, {**prepared, "gradlew": '#!/bin/sh\necho "gradlew $*"\n'})
    shell(NOTE_TREE)
    write(repository, added)
    assert shell(LANGUAGES[language].test).splitlines()[0] == runs


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("✔ a (1ms)\nℹ tests 3\nℹ pass 2\nℹ fail 1", 2),
        ("ok 1 - a\n# tests 3\n# pass  3", 3),
        ("  1 passing (3ms)\n  1 failing", 1),
        ("Tests:       1 failed, 2 passed, 3 total", 2),
        ("test result: ok. 4 passed; 0 failed\ntest result: ok. 1 passed; 0 failed", 5),
        ("100% tests passed, 0 tests failed out of 7", 7),
        ("5 runs, 5 assertions, 0 failures, 0 errors, 0 skips", 5),
        ("3 examples, 0 failures", 3),
        ("OK (2 tests, 2 assertions)", 2),
        ("ok  \tcalc\t0.003s", float("inf")),
        ("FAIL\tcalc [build failed]\n✔ a", None),
        ("✔ a\n✔ b", None),
    ],
)
def test_the_summary_of_a_runner(log: str, count: float | None) -> None:
    assert counted(log) == count


def test_a_log_is_compared_with_that_of_the_reference_solution() -> None:
    statuses = {"a": Status.PASSED, "b": Status.PASSED}
    run, cut = (TestRun(statuses, True, output=log) for log in ("✔ a\n✔ b\nℹ pass 1", "✔ a\n✔ b"))
    ends = PreparedRow(ends=True, counts=True)
    assert [(each.name, each.certain) for each in ends.compared(run).labels] == [("forgeable_log", False)]
    assert [(each.name, each.certain) for each in ends.compared(cut).labels] == [("session_cut_short", True)]
    for prepared in (PreparedRow(), PreparedRow(ends=True)):
        assert prepared.compared(run) == run
    assert PreparedRow().compared(cut) == cut


def test_a_name_without_the_file_that_ava_leaves_out() -> None:
    made = row(language="javascript")
    log = ExecutionResult(True, "ok 1 - handles x\n")
    assert read_command(made, log, ["parse › handles x"]).statuses["parse › handles x"] is Status.PASSED
    assert read_command(made, log, ["parse › other"]).statuses["parse › other"] is Status.MISSING


def test_a_toolchain_of_one_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ".cargo/bin/cargo"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    message = missing_programs(LANGUAGES["rust"], ["cargo"], "o__n-1")
    check_message(message, "cargo", program)


def test_products_are_in_no_view_unless_the_repository_has_them() -> None:
    made = row(test_patch=unified_diff.between("test/a.test.js", "a\n", "b\n"))
    changes = [Change("node_modules/x/index.js", "file"), Change("coverage/kept.js", "file")]
    found = protected(changes, made, ["coverage/kept.js", "test/a.test.js"])
    assert found.left_out == ("node_modules/x/index.js",)


C_CODE = "int add(int a, int b) {{ return a {} b; }}\n"
C_TESTS = (
    "#include <stdio.h>\nint add(int, int);\nint main(void) {\n"
    '    printf("%s: add\\n", add(1, 2) == 3 ? "PASS" : "FAIL");\n'
    '    printf("%s: zero\\n", add(0, 0) == 0 ? "PASS" : "FAIL");\n    return add(1, 2) != 3;\n}\n'
)


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.skipif(bool(LANGUAGES["c"].missing_programs()), reason="gcc or make is not installed")
@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_a_row_in_c(policy: str, reward: float, tmp_path: Path, installed_pytest: DependencyCache) -> None:
    make = "test: calc.c test_calc.c\n\tgcc -o run_tests calc.c test_calc.c && ./run_tests\n"
    source = Source.make(tmp_path / "source", {"calc.c": C_CODE.format("-"), "Makefile": make, "test_calc.c": "\n"})
    columns = source.row(
        patch=source.diff({"calc.c": C_CODE.format("+")}),
        test_patch=source.diff({"test_calc.c": C_TESTS}),
        FAIL_TO_PASS=["add"],
        PASS_TO_PASS=["zero"],
        language="c",
        install_config={"install": [], "test_cmd": ["make -s test"], "log_parser": "parse_log_jq"},
    )
    del columns["install"]
    (group,) = roll_out([columns], policy, tmp_path / "run", installed_pytest)
    assert not group.error, group.error
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.official) == (reward, reward), (trajectory.detail, trajectory.error)
    assert trajectory.detail["uncontrolled"] == []
