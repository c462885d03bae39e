"""Messages that tests compare with golden files, so that a better sentence changes one line of a file and no test.

A test names the kind of error and the objects that its message must contain; the sentence is in
`tests/messages/FAMILY.txt`, a line for each message of a test. `pytest --write-messages PATHS` writes the lines of
these tests again. Paths, ports and identifiers that differ between runs are replaced.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "messages"
writing = False
"""Whether messages are written instead of compared: `--write-messages`."""

_VARIES = [
    (re.compile(r"/tmp/(pytest-of-\w+/pytest-\d+|tmp\w+/t)/(popen-gw\d+/)?[\w.-]+"), "TMP"),  # `t`: `run_suite`'s
    (re.compile(r"/tmp/tmp\w+"), "TMP"),
    (re.compile(re.escape(str(REPOSITORY))), "REPOSITORY"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), "PORT"),
    (re.compile(r"\b\d{8}T\d{6}Z-[0-9a-f]{4}\b"), "RUN"),
    (re.compile(r"(?<=\.py, line )\d+|(?<=\.py:)\d+(?= )"), "N"),
    (re.compile(r"(?<=· )[\d.]+m?s\b"), "TIME"),
    (re.compile(r"(?<=at byte )\d+|(?<=\bslot-)\d+"), "N"),
    (re.compile(r"\b(0x)?(?=[0-9a-f]*\d)([0-9a-f]{4}){3,}\b"), "HEX"),
]
_seen: Counter[str] = Counter()


@contextmanager
def raises(kind: type[BaseException], *names: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of this kind, whose message contains the names and is that of the golden file."""
    with pytest.raises(kind) as caught:
        yield caught
    check_message([str(caught.value)], *names)


def check_message(text: str | Iterable[str], *names: object) -> None:
    """Compare a message with the golden file: those lines of a text, or those texts, that contain all the names."""
    parts = text.splitlines() if isinstance(text, str) else list(text)
    message = "\n".join(part for part in parts if all(str(name) in part for name in names))
    assert message, f"no message contains {names}: {text!r}"
    file, key = _place(os.environ["PYTEST_CURRENT_TEST"])
    _seen[key] += 1
    new = plain(message)
    if writing:
        _write(file, key, _seen[key], new)
    else:
        old = _read(file).get((key, _seen[key]))
        assert new == old, f"{file.name} has another message: pytest --write-messages accepts the new one"


def plain(message: str) -> str:
    """Return a message as one line, without what differs between runs."""
    for pattern, word in _VARIES:
        message = pattern.sub(word, message)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in message)


def _place(current_test: str) -> tuple[Path, str]:
    """Return the golden file of a test, and the test's name in it."""
    node = re.sub(r"(@[\w./-]+)? \(\w+\)$", "", current_test)  # with the group of pytest-xdist
    path, _, test = node.partition("::")
    package, _, inside = path.partition("tests/")
    folder = inside.partition("/")[0].removesuffix(".py")
    family = folder if package in ("", "packages/palaestra/") else package.split("/")[1]
    return FOLDER / f"{family}.txt", f"{inside}::{test}"


def _read(file: Path) -> dict[tuple[str, int], str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    fields = [line.split("\t") for line in lines]
    return {(key, int(number)): message for key, number, message in fields}


def _write(file: Path, key: str, number: int, message: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist write the same files
        kept = {place: each for place, each in _read(file).items() if place[0] != key or place[1] < number}
        kept[key, number] = message
        lines = [f"{key}\t{number}\t{each}\n" for (key, number), each in sorted(kept.items())]
        file.write_text("".join(lines), encoding="utf-8")
