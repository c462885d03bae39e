"""Whose fault a failed check is: what an agent writes, replaces or breaks never turns its 0 into a missing score, and a
verifier that fails over the reference solution too is not the work's fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_slots.core.types import Blame
from palaestra_suites.terminal_bench.verifier_files import HARNESS_DIR
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.terminal_bench.conftest import played_all
from suites.terminal_bench.ledger import TOML, make_steps
from suites.terminal_bench.mini import HARBOR, copied

pytestmark = [pytest.mark.slots, pytest.mark.timeout(600)]

PAY = "/logs/verifier/reward.txt"
BASE = "FROM palaestra-tests/base:1\nWORKDIR /app\n"
SOLUTION = "#!/bin/bash\necho right > /app/answer.txt\n"
PYTEST = "#!/bin/bash\nmkdir -p /logs/verifier\n{before}\nuvx pytest /tests/test_outputs.py\necho $((1 - $?)) > " + PAY
COMPARE = (
    "from pathlib import Path\n\n\ndef test_answer():\n    assert Path('/app/answer.txt').read_text() == 'right\\n'\n"
)
JUDGE = 'import os\n\nKEY = os.environ.get("OPENAI_API_KEY", "")\n'


def task(place: Path, name: str, before: str = "", **files: str) -> None:
    given = {
        "environment/Dockerfile": BASE,
        "instruction.md": "Write the word to /app/answer.txt.\n",
        "solution/solve.sh": SOLUTION,
        "tests/test.sh": PYTEST.format(before=before),
        "tests/test_outputs.py": COMPARE,
        **files,
    }
    copied(HARBOR / "import-the-work", place, given).rename(place / name)
    (place / name / "tests/expected.txt").write_text("right\n")


SWAP = "printf '#!/bin/sh\\nexit 0\\n' > $f; chmod 755 $f"
FIND = f"for f in {HARNESS_DIR}/bin/*; do [ -e $f ] && " + SWAP + "; done"
WAYS_OUT = {
    "judge-words": "echo 'openai.APIConnectionError: Name or service not known' > answer.txt",
    "network-words": "printf 'curl: (6) Could not resolve host: pypi.org' > answer.txt",
    "shim-by-a-process": f"setsid bash -c 'while :; do {FIND}; sleep 0.02; done' > /dev/null 2>&1 &",
    "shim-by-the-script": f"printf '#!/bin/bash\\n{FIND}\\n' > prepare.sh; chmod 755 prepare.sh",
    "words-of-a-missing-program": "printf 'bash: pytest: command not found\\n' > answer.txt; mkfifo fifo",
    "nothing": "true",
    "full-disk": "head -c 4G /dev/zero > /app/fill; head -c 4G /dev/zero > /var/fill; echo wrong > answer.txt",
}


@pytest.mark.slow
def test_no_words_and_no_replaced_program_end_without_a_score(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    tests = {"tests/test_outputs.py": JUDGE + COMPARE}
    for name in WAYS_OUT:
        before = "[ -x /app/prepare.sh ] && /app/prepare.sh; true || curl -sf http://127.0.0.1:9"
        task(tmp_path / "tasks", name, before, **tests)
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, WAYS_OUT)
    assert {name: each.reward for name, each in found.items()} == dict.fromkeys(WAYS_OUT, 0.0), {
        name: each.error for name, each in found.items() if each.reward is None
    }


@pytest.mark.slow
def test_a_verifier_that_lacks_its_network_has_no_score_whatever_the_work(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """Doing nothing, wrong work and right work alike: the verifier asks a model only if there is an answer."""
    asks = JUDGE + (
        "import urllib.request\nfrom pathlib import Path\n\n\ndef test_answer():\n"
        "    if Path('/app/answer.txt').exists():\n"
        "        urllib.request.urlopen('http://judge.invalid')\n"
        "    assert Path('/app/answer.txt').exists()\n"
    )
    works = {"wrong": "echo wrong > answer.txt", "right": "echo right > answer.txt"}
    for name in works:
        task(tmp_path / "tasks", name, **{"tests/test_outputs.py": asks})
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, works)
    assert {name: (each.reward, each.blame) for name, each in found.items()} == {
        "wrong": (None, Blame.GRADER),
        "right": (None, Blame.GRADER),
    }
    assert all("no network" in each.error for each in found.values())


SERVE = "setsid python3 -m http.server 8123 --bind 127.0.0.1 --directory /app > /dev/null 2>&1 < /dev/null &"
SERVED = (
    "import time\nimport urllib.request\n\n\ndef test_served():\n    for _ in range(30):\n        try:\n"
    "            data = urllib.request.urlopen('http://127.0.0.1:8123/answer.txt').read()\n            break\n"
    "        except OSError:\n            time.sleep(0.1)\n    assert data == b'right\\n'\n"
)
READS_TESTS = (
    "setsid bash -c 'while :; do [ -e /tests/expected.txt ] && cp /tests/expected.txt /app/answer.txt; sleep 0.02; "
    "done' > /dev/null 2>&1 &"
)


@pytest.mark.slow
def test_whether_a_task_needs_running_processes_is_shown_by_its_solution(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """A word in a comment does not decide it, and a service is graded where it runs, with a label."""
    tasks = tmp_path / "tasks"
    served = {"tests/test_outputs.py": SERVED, "solution/solve.sh": f"{SOLUTION}{SERVE}\nsleep 1\n"}
    commented = {"tests/test_outputs.py": f"# see https://localhost: a server with a port\nimport time\n{COMPARE}"}
    works = {
        "service": f"echo right > answer.txt; {SERVE}\nsleep 1",
        "service-on-another-way": f"echo right > answer.txt; (cd /app; {SERVE})\nsleep 1",
        "wrong-service": f"echo wrong > answer.txt; {SERVE}\nsleep 1",
        "commented": f"echo wrong > answer.txt; {READS_TESTS}",
        "commented-honest": "echo right > answer.txt; setsid sleep 1000 > /dev/null 2>&1 &",
    }
    for name in works:
        sleeps = "sleep 1" if name == "commented" else ""
        task(tasks, name, sleeps, **(commented if "commented" in name else served))
    found = played_all(tasks, installed_pytest, tmp_path, works)
    assert {name: each.reward for name, each in found.items()} == {
        "service": 1.0,
        "service-on-another-way": 1.0,
        "wrong-service": 0.0,
        "commented": 0.0,
        "commented-honest": 1.0,
    }, {name: each.error or each.labels for name, each in found.items()}
    labels = {name: [label.name for label in each.labels] for name, each in found.items()}
    assert labels["service"] == labels["service-on-another-way"] == ["graded_where_it_runs"]
    assert labels["commented"] == ["live_processes"]
    assert labels["commented-honest"] == []


BROKEN_STEPS = {
    "directory-removed": "cd /; rm -rf /app",
    "directory-replaced": "cd /; rm -rf /app; touch /app",
    "endless-program": "printf '#!/bin/bash\\ntrap \"\" TERM; while :; do sleep 1; done\\n' > /usr/bin/grep",
    "nothing": "true",
    "wrong-thing": "mkdir one.txt",
}


@pytest.mark.slow
def test_work_that_breaks_the_begin_of_a_later_step_is_scored(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """A set-up that needs a file of the first step, and a health check that starts a program of the slot."""
    toml = (
        'schema_version = "1.4"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n'
        '[environment]\nworkdir = "/app"\n'
        '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.healthcheck]\n'
        'command = "grep -q one /app/one.txt"\ninterval_sec = 0.1\nretries = 1\ntimeout_sec = 2\n'
    )
    verifies = f"#!/bin/bash\n[ -f /app/{{}}.txt ] && echo 1 > {PAY} || echo 0 > {PAY}\n"
    for name in BROKEN_STEPS:
        files = {"task.toml": toml, "environment/Dockerfile": BASE}
        for step in ("one", "two"):
            files |= {
                f"steps/{step}/instruction.md": f"Write {step}.txt.\n",
                f"steps/{step}/solution/solve.sh": f"#!/bin/bash\necho {step} > /app/{step}.txt\n",
                f"steps/{step}/tests/test.sh": verifies.format(step),
            }
        files["steps/two/workdir/setup.sh"] = "#!/bin/bash\ncp /app/one.txt /app/copy.txt\n"
        (tmp_path / "tasks" / name).mkdir(parents=True)
        for path, text in files.items():
            place = tmp_path / "tasks" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    works = {name: [work, "echo two > two.txt"] for name, work in BROKEN_STEPS.items()}
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, works)
    assert {name: each.reward for name, each in found.items()} == dict.fromkeys(BROKEN_STEPS, 0.0), {
        name: each.error for name, each in found.items()
    }
    assert all("set_up_failed" in {label.name for label in each.labels} for each in found.values())


CUT_OFF = {
    "name-removed": "grep -v ledger /etc/hosts > /tmp/hosts; cat /tmp/hosts > /etc/hosts",
    "program-replaced": "rm -f $(command -v python3)",
    "full-disk": "head -c 8G /dev/zero > /app/fill; head -c 8G /dev/zero > /logs/fill",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT_OFF)
def test_work_that_cuts_a_verifier_off_its_services_is_scored(
    name: str, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    strict = f'#!/bin/bash\nset -e\nseen="$(python3 /app/ask.py)"\n[ "$seen" = one ]\necho 1 > {PAY}\n'
    text = TOML.replace("STRATEGY", "mean")
    make_steps(tmp_path / "tasks", **{"task.toml": text, "steps/first/tests/test.sh": strict})
    found = played_all(tmp_path / "tasks", installed_pytest, tmp_path, {"ledger": [CUT_OFF[name]]})["ledger"]
    assert found.reward == 0.0, found.error
