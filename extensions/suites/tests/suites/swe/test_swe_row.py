import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.row_tests import excuses, meant
from palaestra_suites.swe.swe_row import RowKind, SweRow, load_rows, parse_row
from palaestra_suites.toolchain.toolchain import Install

BUG = unified_diff.between("pkg/a.py", "def f(x):\n    return x + 1\n", "def f(x):\n    return x - 1\n")
TESTS = unified_diff.between("tests/test_a.py", "\n", "\ndef test_f():\n    pass\n")
ORACLE = {
    "repo": "owner/name",
    "base_commit": "0123456789abcdef",
    "problem_statement": "f is wrong",
    "text": "f is wrong, at length",
    "instance_id": "owner__name.01234567.kind__1",
    "FAIL_TO_PASS": ["tests/test_a.py::test_f"],
    "PASS_TO_PASS": ["tests/test_a.py::test_g[a b]"],
}
SMITH = {**ORACLE, "patch": BUG}
BENCH = {**ORACLE, "patch": BUG, "test_patch": TESTS}


def without(row: dict[str, object], *columns: str) -> dict[str, object]:
    return {key: value for key, value in row.items() if key not in columns}


def test_the_kind_of_a_row_tells_what_its_patch_is() -> None:
    assert [parse_row(each).kind for each in (SMITH, BENCH, ORACLE)] == [RowKind.SMITH, RowKind.BENCH, RowKind.ORACLE]
    row = parse_row(ORACLE)
    assert row.patch == ""
    assert row.install.editable


def test_an_explicit_kind_wins() -> None:
    assert parse_row({**BENCH, "kind": "swe-smith"}).kind is RowKind.SMITH
    with pytest.raises(TaskError, match="swe-nothing"):
        parse_row({**BENCH, "kind": "swe-nothing"})


def test_test_names_may_come_as_json_text() -> None:
    texts = {key: json.dumps(ORACLE[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    assert parse_row({**ORACLE, **texts}) == parse_row(ORACLE)


def test_node_ids_keep_their_order_and_are_named_once() -> None:
    both = ["t.py::b", "t.py::a"]
    assert parse_row({**ORACLE, "FAIL_TO_PASS": both, "PASS_TO_PASS": both}).node_ids == ("t.py::b", "t.py::a")


@pytest.mark.parametrize("column", ["instance_id", "repo", "base_commit", "FAIL_TO_PASS"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(TaskError, match=f"row 7 .*{column}"):
        parse_row(without(ORACLE, column), 7)


def test_a_smith_row_without_a_commit_starts_from_the_branch_of_its_name() -> None:
    assert parse_row(without(SMITH, "base_commit")).base_commit == SMITH["instance_id"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": ["test_f (module.Class)"]}, "not a pytest node id"),
        ({"FAIL_TO_PASS": ["../x.py::t"]}, "not a pytest node id"),
        ({"FAIL_TO_PASS": "not json"}, "_TO_PASS"),
        ({"PASS_TO_PASS": [1]}, "_TO_PASS"),
        ({"PASS_TO_PASS": "[" * 100_000}, "PASS_TO_PASS"),
        ({"repo": "../../etc"}, "owner/name"),
        ({"repo": "--upload-pack=x/y"}, "owner/name"),
        ({"base_commit": "-x"}, "base_commit"),
        ({"patch": "no diff"}, "unified diff"),
        ({"install": {"requirements": [], "shell": "x"}}, "install"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        parse_row({**SMITH, **change})


def test_a_progress_mark_among_the_tests_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    marked = {**BENCH, "PASS_TO_PASS": json.dumps([*ORACLE["PASS_TO_PASS"], "[100%]", "[ 50%]", "["])}
    assert parse_row(marked) == parse_row(BENCH)
    check_message(caplog.text, "owner__name.01234567.kind__1", "PASS_TO_PASS")
    with raises(TaskError, "FAIL_TO_PASS"):
        parse_row({**BENCH, "FAIL_TO_PASS": ["[100%]"]})


@pytest.mark.parametrize(
    ("test_file", "tests", "ending"),
    [
        ("tests/parse.zig", ["parse::empty", "parse::long"], ".zig"),
        ("CMakeLists", ["Suite.Case"], "files without an ending"),
    ],
)
def test_a_row_of_another_language_is_refused(test_file: str, tests: list[str], ending: str) -> None:
    patch = unified_diff.between(test_file, "a\n", "b\n")
    with raises(TaskError, "row 3", ending):
        parse_row({**BENCH, "test_patch": patch, "FAIL_TO_PASS": tests, "PASS_TO_PASS": []}, 3)


def test_names_without_files_are_python_if_the_tests_are() -> None:
    assert parse_row({**BENCH, "FAIL_TO_PASS": ["test_f"], "PASS_TO_PASS": []}).test_files == ("tests/test_a.py",)


def test_install_round_trips() -> None:
    install = Install(("a==1",), ("src",), ("-x",), editable=False)
    assert Install.parse(install.to_json()) == install


def test_bad_rows_are_collected_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [json.dumps(SMITH), "{torn", json.dumps(without(SMITH, "repo")), json.dumps({**SMITH, "instance_id": "b"})]
    path.write_text("\n".join(lines))
    found = list(load_rows(path))
    assert [row.instance_id for row in found if isinstance(row, SweRow)] == [SMITH["instance_id"], "b"]
    errors = [str(error) for error in found if isinstance(error, TaskError)]
    assert errors[0].startswith("row 2: not JSON")
    assert "row 3" in errors[1]


def test_repositories_lie_beside_the_file_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{**SMITH, "repo_path": "r/x.git"}]))
    (row,) = load_rows(path)
    assert isinstance(row, SweRow)
    assert row.repo_path == str(tmp_path / "r" / "x.git")


def test_an_absolute_path_of_a_repository_needs_a_folder_that_the_user_names(tmp_path: Path) -> None:
    private, data = tmp_path / "private", tmp_path / "data"
    private.mkdir()
    data.mkdir()
    (data / "link").symlink_to(private)
    rows = [{**SMITH, "repo_path": str(private)}, {**SMITH, "repo_path": "../private"}, {**SMITH, "repo_path": "link"}]
    (data / "rows.json").write_text(json.dumps(rows))
    for found in load_rows(data / "rows.json"):
        assert isinstance(found, TaskError)
        assert "setting repo_root" in str(found)
    allowed = list(load_rows(data / "rows.json", repo_root=private))
    assert [row.repo_path for row in allowed if isinstance(row, SweRow)] == [str(private)] * 3


def test_parquet_rows_are_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([SMITH]), tmp_path / "tasks.parquet")
    assert list(load_rows(tmp_path / "tasks.parquet")) == [parse_row(SMITH)]


@pytest.mark.parametrize(("name", "text"), [("t.json", "{}"), ("t.json", "[")])
def test_a_file_of_another_shape_is_one_clear_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        list(load_rows(tmp_path / name))


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with raises(ConfigError):
        list(load_rows(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("parser", "status", "changes", "official", "guarded", "label"),
    [
        ("pytest", Status.XFAIL_CALLED, {}, True, False, ["tests_excused"]),
        ("pytest", Status.SKIPPED, {}, False, False, []),
        ("django", Status.SKIPPED, {}, True, False, ["tests_excused"]),
        ("django", Status.XFAILED, {}, False, True, ["tests_excused"]),
        ("pytest", Status.PASSED, {"exit_status": 3}, False, True, ["command_failed"]),
        ("pytest", Status.PASSED, {"exit_status": 1, "collect_errors": {"other.py": "E"}}, True, True, []),
        ("pytest", Status.PASSED, {"complete": False}, True, False, []),
        ("pytest", Status.PASSED, {"complete": False, "exit_status": None}, False, False, []),
    ],
)
def test_the_official_verdict_is_that_of_the_published_parser(
    parser: str, status: Status, changes: Mapping[str, JSON], official: bool, guarded: bool, label: Sequence[str]
) -> None:
    row = parse_row({**BENCH, "log_parser": f"parse_log_{parser}"})
    failing, passing = row.node_ids
    run = replace(TestRun({failing: Status.PASSED, passing: status}, complete=True, exit_status=0), **changes)
    assert (row.official(run).resolved, row.verdict(run).resolved) == (official, guarded)
    assert [label.name for label in excuses(row, run)] == [*label]


def test_names_mean_the_tests_that_a_published_parser_lists_under_them() -> None:
    ids = ["t.py::test_a[one way]", "t.py::test_a[one more]", "t.py::test_p[/a/b/where]", "t.py::test_p[//x]",
           "t.py::test_b[MouseButton.LEFT-1]", "t.py::C::test_f[1]"]  # fmt: skip
    names = ["t.py::test_a[one", "t.py::test_p[/where]", "t.py::test_b[1-1]", "test_f", ids[3], "t.py::test_p[/x]"]
    assert dict(meant(names, ids)) == {
        names[0]: ids[:2], names[1]: [ids[2]], names[2]: [ids[4]], names[3]: [ids[5]], names[4]: [ids[3]], names[5]: [],
    }  # fmt: skip
