"""Rewards that verifiers write, and what of a change is left out. No slots."""

from __future__ import annotations

import pytest

from palaestra.core.errors import GraderError
from palaestra.sandbox.slot import Change
from palaestra.suites.task_paths import scope_of
from palaestra.suites.terminal_bench.rewards import read_rewards, single
from palaestra.suites.terminal_bench.verifier_files import (
    ALWAYS_HIDDEN,
    SearchedFolders,
    ShadowScope,
    hidden_paths,
    python_folders,
    shadows,
)


@pytest.mark.parametrize(
    ("json_file", "text_file", "reward"),
    [
        (None, b"1\n", 1.0),
        (None, b" 0.25 ", 0.25),
        (b'{"reward": 0.5, "style": 1}', b"1", 0.5),
        (b'{"a": 1, "b": 0}', None, 0.5),
        (b'{"passed": true}', None, 1.0),
    ],
)
def test_rewards(json_file: bytes | None, text_file: bytes | None, reward: float) -> None:
    assert single(read_rewards(json_file, text_file)) == reward


@pytest.mark.parametrize(
    ("json_file", "text_file", "message"),
    [
        (None, None, "neither reward.json nor reward.txt"),
        (None, b" \n", "reward.txt is empty"),
        (b"", b"1", "reward.json is empty"),
        (None, b"nan", "holds nan"),
        (None, b"1e309", "holds inf"),
        (b'{"reward": 1' + b"0" * 400 + b"}", None, "holds inf"),
        (None, b"yes", "reward.txt .*'yes'"),
        (b"[1]", None, "must be an object of numbers"),
        (b"{}", None, "must be an object of numbers"),
        (b'{"reward": "1"}', None, "reward .*'1'"),
        (b'{"reward": NaN}', None, "holds nan"),
        (b"{", None, "reward.json is not JSON"),
    ],
)
def test_what_is_no_reward_is_the_graders_failure(
    json_file: bytes | None, text_file: bytes | None, message: str
) -> None:
    with pytest.raises(GraderError, match=message):
        read_rewards(json_file, text_file)


@pytest.mark.parametrize(
    ("path", "hidden"),
    [("/conftest.py", True), ("/app/conftest.py", False), ("/root/.bashrc", False), ("/usr/bin/git", True)],
)
def test_what_could_speak_for_the_verifier_is_hidden_paths(path: str, hidden: bool) -> None:
    found = hidden_paths([Change(path, "file")], ["/usr/bin/git"], script="pytest /tests\n")
    assert found[: len(ALWAYS_HIDDEN)] == ALWAYS_HIDDEN
    assert (path in found) is hidden


def test_start_up_files_are_left_out_where_the_verifier_reads_them() -> None:
    changes = [Change("/root/.bashrc", "file"), Change("/etc/profile.d/x\n.sh", "file")]
    assert len(hidden_paths(changes, (), script="source ~/.bashrc\npytest\n")) == len(ALWAYS_HIDDEN) + 2


@pytest.mark.parametrize(
    ("path", "script", "hidden"),
    [
        ("/app/json.py", "python3 - <<'END'\nimport json\nEND\n", True),
        ("/app/re/__init__.py", "python3 -c 'import re'\n", True),
        ("/app/enum.cpython-311-x86_64-linux-gnu.so", "python3 -u -c 'import re'\n", True),
        ("/srv/json.py", "cd /srv && python3 -m json.tool x\n", True),
        ("/app/src/json.py", "true; cd src && python3 -m json.tool x\n", True),
        ("/app/src/json.py", "SRC=/app/src\ncd \"$SRC\"\npython3 -c 'import json'\n", True),
        ("/tmp/json.py", "cp /tests/check.py /tmp/check.py\npython3 /tmp/check.py\n", True),
        ("/carried/json.py", "cp /tests/check.py /tmp/check.py\npython3 /tmp/check.py\n", True),
        ("/app/json.py", "cp /tests/check.py .\npython3 check.py\n", True),
        ("/srv/json.py", "python3 -m json.tool x\n", False),
        ("/app/json.py", "python3 /tests/check.py\n", False),
        ("/app/json.py", "python3 /app/main.py --check\n", False),
        ("/app/shapes.py", "python3 -c 'import shapes'\n", False),
        ("/app/queue.py", "python3 -c 'import queue'\n", False),
        ("/app/pkg/json.py", "python3 -c 'import json'\n", False),
        ("/app/test/data.py", "python3 -c 'import json'\n", False),
    ],
)
def test_modules_that_python_in_the_script_would_import_first(path: str, script: str, hidden: bool) -> None:
    words = scope_of(["Write a module `/app/queue.py`.", script]).words
    scope = ShadowScope("/app", (), words, (), "/carried")
    modules = python_folders(script, "/app", [path, "/app/main.py"])
    folders = SearchedFolders(modules)
    assert shadows(Change(path, "file"), folders, scope) is hidden


def test_a_script_with_many_directories_is_read_in_time() -> None:
    script = "".join(f"cd d{number}\n" for number in range(60)) + "python3 run.py\n"
    code = "".join(f"run(['python3', 'x{number}.py'], cwd='e{number}')\n" for number in range(200))
    assert "/app" in python_folders(script, "/app", ())
    assert "/app/e1" in python_folders("", "/app", (), code)
    assert len(python_folders(script, "/app", (), code)) < 1000


@pytest.mark.parametrize(
    ("path", "hidden"),
    [("/app/bin/cmp", True), ("/app/bin/grep", False), ("/app/bin/tool", False), ("/app/lib/libc.so.6", True),
     ("/app/lib/libown.so.1", False), ("/app/lib/ld-linux-x86-64.so.2", True), ("/app/cmp", False)],
)  # fmt: skip
def test_programs_and_libraries_of_the_image_come_first(path: str, hidden: bool) -> None:
    scope = ShadowScope("/app", ("/app/bin/grep",), {"cmp", "tool"}, (), "/carried")
    folders = SearchedFolders(programs={"/app/bin": {"cmp", "grep"}}, libraries={"/app/lib": {"libc.so.6"}})
    assert shadows(Change(path, "file"), folders, scope) is hidden
