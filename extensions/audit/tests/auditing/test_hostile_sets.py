"""What a set's author writes costs at most that author's own task."""

from __future__ import annotations

import hashlib
import os
import random
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra.cli.main import main
from palaestra_audit import audit as audit_program
from palaestra_audit import checks
from palaestra_audit.cheats.hollow_work import hunks
from palaestra_audit.cheats.proof import cheats_named
from palaestra_audit.records import Kind, read_audit
from palaestra_audit.stated_answers import states

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

REWARD = "/logs/verifier/reward.txt"


def write_task(name: bytes | str, *, docker: str = "", solution: str = "echo right > out.txt", test: str = "") -> None:
    """Write a Harbor task below `tasks`, whose out.txt should have the word `right`."""
    files = {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Write the word of the day to /app/out.txt.",
        "environment/Dockerfile": f"FROM debian:12\nWORKDIR /app\n{docker}",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": test or f"#!/bin/bash\ngrep -qx right /app/out.txt\necho $((! $?)) > {REWARD}\n",
    }
    for file, content in files.items():
        path = Path("tasks") / os.fsdecode(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_lines_that_differ_are_those_of_difflib_unless_very_many_are_alike() -> None:
    rng = random.Random(0)
    for _ in range(300):
        old, new = ([rng.choice((b"a", b"b", b"c", b"d")) for _ in range(rng.randrange(12))] for _ in range(2))
        made = list(old)
        for first, last, begin, end in reversed(hunks(old, new)):
            made[first:last] = new[begin:end]
        assert made == new
    old = [b"%d" % each for each in range(300)]
    new = [*old[:20], b"x", *old[21:200], b"y", b"z", *old[200:]]
    expected = [tuple(each[1:]) for each in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
                if each[0] != "equal"]  # fmt: skip
    assert hunks(old, new) == expected
    alike = [b"0"] * 100_000
    assert hunks([b"0", *alike, b"0"], [b"1", *alike, b"2"]) == [(0, 100_002, 0, 100_002)]
    assert hunks(alike, alike) == []


def test_a_long_text_is_read_in_time_that_grows_with_its_length() -> None:
    assert not states("answer_" * 300_000, "B")
    assert states("x " * 300_000 + "the answer: B", "B")
    assert states("Answer: B, " * 20_000, "B")


@pytest.mark.slow
def test_names_that_are_no_text_and_have_line_breaks_cost_only_their_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [b"bad\xff", "two\n::error file=a::owned\n[9] evil: ok", "good"]
    for name in names:
        write_task(name)
    found = audit("tasks", "--only", "unsolvable", "--env.base_image", "host")
    assert [task.complete for task in found.tasks] == [False, True, True]
    assert "bad" in found.tasks[0].id
    out, err = capsys.readouterr()
    assert [line for line in (out + err).splitlines() if line.lstrip().startswith(("::", "[9]"))] == []


@pytest.mark.slow
def test_a_folder_that_is_no_whole_task_is_named_as_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "no_tests"):
        write_task(name)
    Path("tasks/no_tests/tests/test.sh").unlink()
    Path("tasks/no_tests/tests").rmdir()
    words = ["audit", "tasks", "--only", "unsolvable", "--env.base_image", "host", "--out", "found"]
    for _ in range(2):
        assert main(words) == 3
        found = read_audit(Path("found"))
        assert [(task.id, task.complete) for task in found.tasks] == [("good", True), ("no_tests", False)]
        assert "is missing" in found.tasks[1].untried[0].why
    assert main([*words, "--tasks", "1"]) == 3
    assert [task.id for task in read_audit(Path("found")).tasks] == ["good", "no_tests"]


@pytest.mark.slow
def test_reports_are_not_written_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task("a")
    victim = Path("victim")
    victim.write_text("mine")
    Path("found").mkdir()
    for name in ("audit.json.link", "audit.html", "audit.sarif", "badge.svg"):
        Path("found", name).symlink_to(victim.resolve())
    audit("tasks", "--only", "unsolvable", "--badge", "--env.base_image", "host")
    assert victim.read_text() == "mine"
    assert "<html" in Path("found/audit.html").read_text()


@pytest.mark.slow
def test_a_budget_ends_a_task_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task("hangs", test=f"#!/bin/bash\necho 1 > {REWARD}\nsleep 86400\n")
    Path("tasks/hangs/task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 86400\n')
    assert main(["audit", "tasks", "--budget", "5s", "--env.base_image", "host", "--out", "found"]) == 3
    found = read_audit(Path("found"))
    assert (found.left, [task.complete for task in found.tasks]) == (1, [False])


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "right " * 20
    slow = "RUN printf '#!/bin/sh\\nsleep 30\\n' > /usr/local/bin/find && chmod +x /usr/local/bin/find\n"
    copied = f"RUN printf '{long}' > /app/.copy\n"
    for name, docker in {"slow": slow + copied, "quick": copied}.items():
        write_task(name, docker=docker, solution=f"printf '{long}' > out.txt",
                   test=f"#!/bin/bash\ngrep -q 'right right' /app/out.txt\necho $((! $?)) > {REWARD}\n")  # fmt: skip
    monkeypatch.setattr(checks, "_WAIT_S", 5.0)
    found = {task.id: task for task in audit("tasks", "--only", "leaks", "--env.base_image", "host").tasks}
    assert found["slow"].findings == []
    assert any("took more than" in each.why for each in found["slow"].untried)
    (leak,) = (each for each in found["quick"].findings if each.places == ["/app/.copy"])
    capsys.readouterr()
    assert main(["audit", "replay", "found", leak.id]) == 0
    assert long.strip() in capsys.readouterr().out


@pytest.mark.slow
def test_work_that_nobody_asks_for_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = r"printf 'one\ntwo\nthree\n'"
    write_task("scratch", solution=f"mkdir -p /tmp/z; {lines} > /tmp/z/names.txt; echo right > out.txt")
    write_task("optional", solution=f"{lines} > notes.txt; echo right > out.txt")
    write_task("asked", solution=f"{lines} > notes.txt; echo right > out.txt")
    for name, more in {
        "optional": "You may keep notes in /app/notes.txt.",
        "asked": "Write /app/notes.txt too.",
    }.items():
        path = Path("tasks", name, "instruction.md")
        path.write_text(f"{path.read_text()} {more}")
    found = audit("tasks", "--only", "weak", "--env.base_image", "host")
    certain = {task.id for task, each in found.findings() if each.kind is Kind.WEAK and not each.note}
    assert certain == {"asked"}


@pytest.mark.slow
def test_checks_that_trust_what_the_task_left_for_the_agent_are_hackable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digest = hashlib.sha256(b"right\n").hexdigest()
    listed = f"RUN printf '{digest}  out.txt\\n' > /app/.wanted.sha256\n"
    own = "cd /app && sha256sum --status -c"
    for name, (docker, condition) in {
        "program": ("RUN printf 'grep -qx right /app/out.txt\\n' > /app/check.sh\n", "bash /app/check.sh"),
        "settings": ("RUN printf 'FILE=/app/out.txt\\n' > /app/of.sh\n", "source /app/of.sh; grep -qx right $FILE"),
        "checksums": (listed, f"{own} .wanted.sha256"),
        "sound": (listed, f"echo '{digest}  out.txt' | ({own})"),
    }.items():
        test = f"#!/bin/bash\nif {condition}; then echo 1 > {REWARD}; else echo 0 > {REWARD}; fi\n"
        write_task(name, docker=docker, test=test)
    monkeypatch.setattr(audit_program, "BANK", cheats_named(["prepared-programs", "checksums"]))
    found = audit("tasks", "--only", "hackable", "--env.base_image", "host")
    said = {task.id: [(each.what.partition(":")[0], each.note) for each in task.findings] for task in found.tasks}
    assert said == {
        "program": [("prepared-programs earns a reward by the benchmark's own protocol, and none here", True)],
        "settings": [("prepared-programs earns a reward", False)],
        "checksums": [("checksums earns a reward", False)],
        "sound": [],
    }
