"""Programming tasks out of rows: what tests become, and the one message of each row that cannot be used."""

from __future__ import annotations

import json

import pytest

from golden_messages import check_message
from palaestra.envs.datasets import Row
from palaestra_slots.core.errors import TaskError
from palaestra_suites.hermes_swe.programming_task import make_suite, parse_row

ROW: Row = {
    "task_id": "Python/0",
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "canonical_solution": "    return a + b\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3, 'it\\'s $1 \"off\"'\n",
}


def test_a_row_of_the_public_kind() -> None:
    task = parse_row(ROW, 1)
    assert task.id == "Python/0"
    assert task.solution == {"solution.py": 'def add(a, b):\n    """The sum."""\n    return a + b\n'}
    check_message(task.prompt, "Write", "add", "solution.py")
    assert "check" not in task.prompt
    assert task.suite.names == ("test_task",)
    assert task.suite.text.startswith("from solution import add\n")
    assert task.suite.text.endswith("    check(add)")


def test_columns_of_other_shapes() -> None:
    row = {
        "id": 3,
        "question": "Mend a.py",
        "tests": "import a\nassert a.x == 1\n",
        "files": json.dumps({"a.py": "x=2"}),
    }
    task = parse_row({**row, "solution": '{"a.py": "x = 1"}'}, 1, "question")
    assert (task.id, task.files, task.solution) == ("3", {"a.py": "x=2"}, {"a.py": "x = 1"})
    assert parse_row({**row, "solution": "x = 1"}, 1, "question").solution == {"solution.py": "x = 1"}
    assert parse_row(row, 1, "question").solution is None


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def test_a(): assert 1\nasync def test_b(x=1): assert x\n", ("test_a", "test_b")),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_c(self): pass\n", ("T::test_c",)),
        (
            "from unittest import TestCase, mock\nfrom unittest.mock import patch\nclass T(TestCase):\n"
            "    @patch('os.getcwd')\n    @mock.patch.object(str, 'upper')\n    def test_d(self, one, other): pass\n"
            "    @patch('os.sep', '/')\n    @patch('os.name', new='x')\n    def test_e(self): pass\n",
            ("T::test_d", "T::test_e"),
        ),
        (
            "from __future__ import annotations\nimport math\nassert math.sqrt(1) == 1\n",
            ("test_task",),
        ),
    ],
)
def test_tests_by_their_names(code: str, names: tuple[str, ...]) -> None:
    assert make_suite(code).names == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, r"row 7 \(Python/0\): column 'prompt' is missing or empty"),
        ({"test": None}, "column 'test' is missing or empty"),
        ({"test": "assert ("}, "its tests are not Python"),
        ({"test": "x = 1\n"}, "its tests assert nothing"),
        ({"test": "def test_a(tmp_path): pass\n"}, "its test test_a needs the fixture tmp_path"),
        ({"test": "@patch('os.sep', '/')\ndef test_a(mock): pass\n"}, "its test test_a needs the fixture mock"),
        ({"test": "import numpy\nassert numpy\n"}, "its tests import numpy, which is neither"),
        ({"files": "no mapping"}, "column 'files'"),
        ({"files": {"../a.py": ""}}, r"'../a.py' is not a path inside the workspace"),
        ({"prompt": f"Pass this:\n{ROW['test']}"}, "its prompt or its files contain its tests"),
        ({"entry_point": "no name"}, "its entry point 'no name' is not a name that Python can import"),
        ({"entry_point": "class"}, "its entry point 'class' is not a name"),
        ({"test": f"assert {'+'.join('1' * 20000)}"}, r"row 7 \(Python/0\): its Python or JSON is nested too deeply"),
        ({"files": {"test_add.py": ROW["test"]}}, "its prompt or its files contain its tests"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_message(change: Row, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse_row({**ROW, **change}, 7)
