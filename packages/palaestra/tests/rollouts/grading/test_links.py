"""No link of the agent makes its answer equal to what a check wrote to a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.scripts import groups_file, need_level
from palaestra.cli.main import main
from palaestra.rollouts.grading.links import NamedFiles
from palaestra_slots.core.types import Task

LINKED = """
from palaestra import Task, environment

LONG = '''python3 -c "
import os
for _ in range(20):
    os.mkdir('a' * 250)
    os.chdir('a' * 250)
open('answer.txt', 'w')"
'''
WORK = {
    "expected-to-answer": "echo a > answer.txt; ln -s answer.txt expected.txt",
    "expected-to-missing-answer": "ln -s answer.txt expected.txt",
    "answer-to-expected": "ln -s expected.txt answer.txt",
    "answer-to-own-expected": "echo a > expected.txt; ln -s expected.txt answer.txt",
    "answer-to-scratch": "ln -s /tmp/expected.txt answer.txt; ln -s /dev/shm/expected.txt shm; ln -s shm expected.txt",
    "scratch-to-answer": "echo a > answer.txt; for d in /tmp /dev/shm; do ln -s $PWD/answer.txt $d/expected.txt; done",
    "directory": "echo a > answer.txt; ln -s $PWD /tmp/reference",
    "device": "for f in answer.txt expected.txt /tmp/expected.txt; do ln -s /dev/null $f; done",
    "met-elsewhere": "for f in answer.txt expected.txt; do ln -s /var/tmp/both $f; done",
    "hard": "echo a > /tmp/answer.txt; ln /tmp/answer.txt /tmp/expected.txt; echo a > answer.txt; "
            "ln answer.txt expected.txt",
    "lines": "ln -s 'x\\vfile /workspace/z' aaa; echo a > answer.txt; ln -s answer.txt expected.txt",
    "long": LONG + "echo a > answer.txt; ln -s answer.txt expected.txt",
    "empty": "for d in /tmp /dev/shm; do ln -s $PWD $d/reference; done; mkdir out; ln -s out ref",
    "kernel": "ln -s /proc out.txt; ln -s /proc/kmsg answer.txt; ln -s /sys expected.txt",
    "named-like-the-copy": "echo a > answer.txt; ln -s answer.txt .palaestra-copy; ln -s answer.txt expected.txt",
    "honest-file": "echo right > answer.txt",
    "honest-link": "mkdir -p made; echo right > made/result; ln -s made/result answer.txt; ln -s made current",
    "honest-scratch": "echo right > /tmp/result; ln -s /tmp/result answer.txt; ln -s /nowhere broken",
}

@environment(toolsets=["terminal"])
def linked():
    for name, script in WORK.items():
        yield Task(id=name, prompt="Write the word to answer.txt.", solution=script, paths=["/tmp"])

@linked.score
async def right(task, sandbox):
    same = []
    scratch = ("/tmp/expected.txt", "/tmp/reference/answer.txt", "/dev/shm/expected.txt")
    for expected in ("expected.txt", *(() if sandbox.rung.label == "confined" else scratch)):  # which has no /tmp
        answer = "/tmp/answer.txt" if task.id == "hard" and expected.startswith("/tmp") else "answer.txt"
        await sandbox.execute(f"mkdir -p $(dirname {expected}); echo right > {expected}")
        same.append((await sandbox.execute(["cmp", "-s", expected, answer])).success)
        await sandbox.write_text(expected, "right\\n")
        same.append((await sandbox.execute(["cmp", "-s", expected, answer])).success)
    return all(same) if task.id.startswith("honest") else any(same)
"""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_a_link_does_not_make_an_answer_right(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("linked_env.py").write_text(LINKED)
    argv = ["run", "linked_env.py", "--policy", "oracle", "--env.group_size", "1", "--env.isolation", level]
    assert main(argv) == 0
    rows = [json.loads(line) for line in groups_file().read_text().splitlines()]
    honest = ["honest-file", "honest-link", *(["honest-scratch"] if level != "confined" else ())]
    assert [row["task_id"] for row in rows if row["scores"] == [1.0]] == honest
    assert [row["scores"] for row in rows].count([0.0]) == 18 - len(honest)


@pytest.mark.parametrize(
    ("link", "kind", "end", "equated"),
    [
        ("/workspace/answer.txt", "file", "/workspace/result", True),
        ("/workspace/expected.txt", "file", "/workspace/answer.txt", True),
        ("/workspace/answer.txt", "none", "expected.txt", True),
        ("/workspace/any", "none", "/dev/null", True),
        ("/tmp/reference", "dir", "/workspace", True),
        ("/workspace/node_modules/.bin/tool", "file", "/workspace/node_modules/tool/cli.js", False),
        ("/workspace/venv/lib64", "dir", "/workspace/venv/lib", False),
        ("/workspace/reference", "dir", "/workspace/made", False),
        ("/workspace/reference", "dir", "/", True),
        ("/workspace/input.csv", "file", "/workspace/answer.txt", False),
    ],
)
def test_only_links_between_named_files_and_others_are_replaced(link: str, kind: str, end: str, equated: bool) -> None:
    named = NamedFiles(Task(id="a", prompt="Read input.csv and write the word to answer.txt."))
    assert named.equates(link, kind, end, named.directories(["/workspace/answer.txt"])) is equated


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        ("Write it to `the answer`.", "/workspace/the answer"),
        ("Write it to build/out/answer.", "/workspace/build/out/answer"),
        ("Write it to ~/answer.", "/root/answer"),
        ([{"role": "user", "content": [{"type": "text", "text": "Write it to\nanswer.txt"}]}], "/workspace/answer.txt"),
        ([{"role": "user", "content": [{"type": "text", "text": "answer.txt"}, "is it"]}], "/workspace/answer.txt"),
    ],
)
def test_a_name_counts_wherever_the_messages_have_it(prompt: Any, end: str) -> None:
    named = NamedFiles(Task(id="a", prompt=prompt))
    assert named.equates("/workspace/expected", "file", end, named.directories([]))
    assert named.equates("/workspace/expected", "dir", end, named.directories([]))


@pytest.mark.parametrize("link", ["/workspace/node_modules/.bin/eslint", "/workspace/.venv/bin/python"])
def test_links_of_installed_packages_stay(link: str) -> None:
    named = NamedFiles(Task(id="a", prompt="Make `node_modules/.bin/eslint` pass, then call it from .venv/bin/python."))
    assert not named.equates(link, "file", "/workspace/node_modules/eslint/bin/eslint.js", [])


def test_a_link_that_a_task_asks_for_stays() -> None:
    named = NamedFiles(Task(id="a", prompt="Make latest a symbolic link to the newest log."))
    assert not named.equates("/workspace/latest", "file", "/workspace/log.7", [])
    assert not named.equates("/workspace/latest", "none", "/opt/log.7", [])
    assert named.equates("/workspace/expected", "file", "/workspace/latest", [])
    assert not named.equates("/workspace/latest", "none", "/dev/shm/log.7", [])
    assert named.equates("/workspace/latest", "none", "../dev/fd/3", [])
    assert named.equates("/workspace/other", "dir", "/proc/7", [])


def test_links_through_which_an_asked_link_leads_stay() -> None:
    named = NamedFiles(Task(id="a", prompt="Make current a symbolic link to the newest release, with its app.conf."))
    links = {
        "/workspace/current": "releases/latest/files",
        "/workspace/releases/latest": "../releases/newest",
        "/workspace/releases/newest": "/tmp/v10",
        "/tmp/v10": "/workspace/releases/v10",
        "/workspace/reference": "releases/v10",
    }
    asked = named.passed(links)
    assert asked == {"/workspace/releases/latest", "/workspace/releases/newest"}
    answers = named.directories(["/workspace/releases/v10/app.conf"])
    for link in links:
        replaced = named.equates(link, "dir", "/workspace/releases/v10", answers, asked)
        assert replaced is (link in ("/tmp/v10", "/workspace/reference"))
    assert named.equates("/workspace/releases/latest", "file", "/proc/7/status", answers, asked)
    loop = {"/workspace/current": "other", "/workspace/other": "current"}
    assert named.passed(loop) == {"/workspace/other"}
    other = NamedFiles(Task(id="a", prompt="Write the newest release to current."))
    assert not other.passed(links)


@pytest.mark.parametrize(
    ("prompt", "link", "end", "stays"),
    [
        ("Send access.log to stdout.", "/workspace/logs/access.log", "/dev/stdout", True),
        ("Send the logs to standard output.", "/var/log/nginx/access.log", "/proc/self/fd/1", True),
        ("Write the word to answer.txt, and nothing to stdout.", "/workspace/answer.txt", "/proc/self/fd/0", False),
        ("Write the word to answer.txt, and nothing to stdout.", "/workspace/expected.txt", "/dev/stdout", False),
        ("Make out a link to /proc/self/fd/1.", "/workspace/out", "/proc/self/fd/1", True),
        ("Link answer.txt to /dev/stdin.", "/workspace/answer.txt", "/dev/stdin", False),
        ("Link answer.txt to /dev/fd/3.", "/workspace/answer.txt", "/dev/fd/3", False),
        ("Mask a.service.", "/etc/systemd/system/a.service", "/dev/null", True),
        ("Write the word to answer.txt.", "/workspace/answer.txt", "/dev/null", False),
        ("Make /etc/mtab a link to /proc/mounts.", "/etc/mtab", "/proc/mounts", True),
    ],
)
def test_a_link_to_a_file_of_the_kernel_stays_if_a_task_asks_for_it(
    prompt: str, link: str, end: str, stays: bool
) -> None:
    named = NamedFiles(Task(id="a", prompt=prompt))
    assert named.equates(link, "none", end, []) is not stays


def test_a_link_to_a_file_of_the_image_stays() -> None:
    named = NamedFiles(Task(id="a", prompt="Set the time zone to Europe/Berlin."))
    assert not named.equates("/etc/localtime", "file", "/usr/share/zoneinfo/Europe/Berlin", [])
    assert named.equates("/tmp/expected", "file", "/workspace/Europe/Berlin", ["/workspace"])
