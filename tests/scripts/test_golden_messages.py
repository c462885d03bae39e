"""The golden messages: another object, another sentence or a message that nobody recorded fails the test."""

from __future__ import annotations

from collections import defaultdict

import pytest

import golden_messages
from golden_messages import check_message, plain, raises

RECORDED = "no file 'a.txt'; the folder has b.txt"


def test_a_message_is_that_of_the_file_and_contains_the_names() -> None:
    with raises(ValueError, "a.txt"):
        raise ValueError(RECORDED)
    check_message(f"before\n{RECORDED}\nafter", "a.txt")


@pytest.mark.skipif(golden_messages.writing, reason="the messages are being recorded")
@pytest.mark.parametrize(
    "message",
    [RECORDED.replace("b.txt", "c.txt"), RECORDED.replace("no", "there is no")],
    ids=["object", "sentence"],
)
def test_another_object_or_sentence_fails(message: str) -> None:
    with pytest.raises(AssertionError, match=r"scripts\.txt has another message"), raises(ValueError):
        raise ValueError(message)


def test_a_missing_name_or_another_kind_fails() -> None:
    with pytest.raises(AssertionError, match=r"c\.txt"):
        check_message(RECORDED, "c.txt")
    with pytest.raises(KeyError), raises(ValueError):
        raise KeyError(RECORDED)


def test_what_differs_between_runs_is_replaced() -> None:
    shown = plain("/tmp/pytest-of-root/pytest-1/popen-gw0/test_x0/a.py: 127.0.0.1:4321 in 20261129T105220Z-5759\n")
    assert shown == r"TMP/a.py: 127.0.0.1:PORT in RUN\n"


def test_every_message_belongs_to_a_test() -> None:
    tests: defaultdict[str, str] = defaultdict(str)
    for pattern in ("tests/**/test_*.py", "packages/*/tests/**/test_*.py", "extensions/*/tests/**/test_*.py"):
        for path in golden_messages.REPOSITORY.glob(pattern):
            tests[path.as_posix().rpartition("/tests/")[2]] += path.read_text(encoding="utf-8")
    for file in golden_messages.FOLDER.glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            path, _, rest = line.partition("::")
            name = rest.split("\t")[0].partition("[")[0]
            assert f"def {name}(" in tests[path], f"{file.name}: there is no test {path}::{name}"
