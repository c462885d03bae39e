"""However much the agent makes, a check examines it within one time limit and gives a score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main

MUCH = """
from palaestra import Task, environment

SITE = "/usr/local/lib/python3.11/dist-packages"

def each(number, line):
    return f'''python3 -c "
import os
for place in ('l', '{SITE}'): os.makedirs(place, exist_ok=True)
open('n.txt', 'w')
for i in range({number}):
    {line}
"
'''

WORK = {
    "links-to-a-file": each(1500, "os.symlink('../n.txt', f'l/{i}')"),
    "links-to-nothing": each(20000, "os.symlink('nothing', f'l/{i}')"),
    "links-to-the-image": each(20000, "os.symlink('/etc/hostname', f'l/{i}')"),
    "links-in-a-chain": each(3000, "os.symlink('../n.txt' if not i else str(i - 1), f'l/{i}')"),
    "links-in-folders": each(2000, "os.mkdir(f'l/{i}'); os.symlink('../../n.txt', f'l/{i}/a.bin')"),
    "links-to-a-tree": each(300, "os.symlink('/usr/lib', f'l/{i}.txt')"),
    "hard-links": each(1500, "os.mkdir(f'l/{i}'); os.link('n.txt', f'l/{i}/answer.txt')"),
    "pth": each(300, f"open(f'{SITE}/z{{i}}.pth', 'w').write('import os\\\\n')"),
    "pth-that-sleeps": each(3, f"open(f'{SITE}/z{{i}}.pth', 'w').write('import time; time.sleep(99)\\\\n')"),
}

@environment(toolsets=["terminal"])
def much():
    for name, script in WORK.items():
        yield Task(id=name, prompt="Write the word to answer.txt.", solution=script + "echo a > answer.txt")

@much.score
async def right(task, sandbox):
    return await sandbox.read_text("answer.txt") == "a\\n"
"""


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_work_of_any_size_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("much_env.py").write_text(MUCH)
    assert main(["run", "much_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 0
    rows = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert len(rows) == 9
    assert {row["task_id"]: row["scores"] for row in rows} == {row["task_id"]: [1.0] for row in rows}
    labels = {row["task_id"]: str(row) for row in rows}
    assert "not_examined" in labels["pth"]
