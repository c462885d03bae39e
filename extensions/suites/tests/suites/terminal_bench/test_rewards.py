"""Rewards that verifiers write, and what of a change is left out. No slots."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import GraderError
from palaestra_slots.sandbox.slot import Change
from palaestra_suites.terminal_bench.rewards import read_rewards, single
from palaestra_suites.terminal_bench.verifier_files import ALWAYS_HIDDEN, hidden_paths


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
    asked = hidden_paths(changes, (), script="bash -lc tool\n", about="It must work in a login shell.")
    assert len(asked) == len(ALWAYS_HIDDEN)
    assert len(hidden_paths(changes, (), script="pytest /tests\n")) == len(ALWAYS_HIDDEN)


def test_a_file_named_like_a_module_of_the_verifier_is_hidden_in_the_working_directory() -> None:
    changes = [Change("/app/check.py", "file"), Change("/app/src/check.py", "file")]
    found = hidden_paths(changes, (), script="", files=["check.py"], workdir="/app")
    assert found[len(ALWAYS_HIDDEN) :] == ("/app/check.py",)
    named = hidden_paths(changes, (), script="", files=["check.py"], workdir="/app", about="Write check.py.")
    assert named == ALWAYS_HIDDEN
