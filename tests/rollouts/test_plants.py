"""The programs of a check start as they were prepared, whatever the agent put in their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaestra.cli.exits import run_guarded
from palaestra.cli.main import cli
from palaestra.rollouts.plants import planted
from palaestra.sandbox.base import Change

ENV = """
from palaestra import Task, environment

CHEAT = '''
cat > green <<'END'
#!/bin/sh
echo right
END
chmod 755 green
for d in /bin /usr/local/bin ~/.local/bin; do mkdir -p $d; rm -f $d/cat; cp green $d/cat; done
cp green /usr/local/bin/greet
echo 'print("right"); import os; os._exit(0)' > /usr/lib/python3/dist-packages/sitecustomize.py || true
echo /usr/lib/nothing.so > /etc/ld.so.preload
echo wrong > answer.txt
'''

@environment(toolsets=["terminal"])
def planting():
    yield Task(id="one", prompt="?", solution=CHEAT)

@planting.score
async def seen(sandbox):
    assert (await sandbox.execute("cat answer.txt")).output == "wrong\\n"
    assert (await sandbox.execute("python3 -c 'print(1)'")).output == "1\\n"
    assert (await sandbox.execute("greet")).output == "right\\n"
    return 0.25
"""


@pytest.mark.slots
def test_a_check_runs_its_own_programs_and_sees_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("planting_env.py").write_text(ENV)
    argv = ["run", "planting_env.py", "--policy", "oracle", "--env.group_size", "1"]
    assert run_guarded(lambda: cli.main(argv, standalone_mode=False)) == 0
    assert json.loads(Path("data/planting.jsonl").read_text())["scores"] == [0.25]


def test_the_path_alone_decides() -> None:
    kept = ["/workspace/bin/cat", "/workspace/sitecustomize.py", "/usr/bin/jq", "/etc/ld.so.conf", "/usr/bin/x/cat"]
    gone = ["/bin/sh", "/etc/ld.so.preload", "/usr/lib/python3/usercustomize.py", "/usr/local/bin/cat", "usr/bin/["]
    changes = [Change(path, "file") for path in (*kept, *gone)]
    assert planted(changes, "/workspace") == tuple(sorted(gone))
