"""`palaestra audit` over the suites' own formats: what only their environments know about a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra_audit.records import Kind, read_audit

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(600)]

TEST = """#!/bin/bash
if [ "$(cat /app/sum.txt)" = 12 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
FILES = {
    "task.toml": 'schema_version = "1.4"\n[metadata]\ncategory = "files"\n[agent]\ntimeout_sec = 60\n',
    "instruction.md": "Write the sum of the numbers of /app/numbers.txt to /app/sum.txt.\n",
    "environment/numbers.txt": "3\n4\n5\n",
    "environment/copied/check.sh": TEST,
    "solution/solve.sh": "#!/bin/bash\nawk '{ s += $1 } END { print s }' numbers.txt > sum.txt\n",
    "tests/test.sh": TEST,
}


def test_a_copy_of_the_verifier_in_reach_of_the_agent_is_a_leak_unless_the_prompt_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, more in {"told": " Try it with /app/copied/check.sh.\n", "secret": "", "sound": ""}.items():
        docker = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY numbers.txt /app/\n"
        docker += "" if name == "sound" else "COPY copied /app/copied\n"
        for path, content in {**FILES, "environment/Dockerfile": docker}.items():
            place = tmp_path / "tasks" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content + (more if path == "instruction.md" else ""))
    main(["audit", "tasks", "--only", "leaks", "--only", "weak", "--env.base_image", "host", "--out", "found"])
    found = {task.id: task.findings for task in read_audit(Path("found/audit.json")).tasks}
    assert {name: [(each.kind, each.note) for each in findings] for name, findings in found.items()} == {
        "told": [],
        "secret": [(Kind.LEAKS, False)],
        "sound": [],
    }, "the script of a reference solution is not a part of its work"
