"""What `palaestra env import` reports for tasks that do not work here: each line begins with the cause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from palaestra_suites.terminal_bench.import_tasks import Finding
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import HARBOR, written

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

_DOWNLOADS = """\
curl -sS http://downloads.invalid/install.sh | sh
tool-of-the-download init
"""
_SOLUTIONS = {
    "downloads": (_DOWNLOADS, 900, "no network: the tests or the installation need downloads.invalid ("),
    "needs-a-program": ("tool-of-another-image init\n", 60, "missing program: tool-of-another-image ("),
    "gives-up": ("echo it has no licence\nexit 3\n", 60, "the solution ended with exit code 3: it has no licence\n"),
    "gives-up-later": ("echo it has no licence\nexit 3\n", 900, "the solution ended with exit code 3: it has no"),
    "never-ends": ("sleep 60\n", 2, "out of time: the solution still ran"),
}
"""The text of a solution, the seconds that the agent has, and the beginning of the reason."""

_DOCKERFILES = {
    "built-elsewhere": ("RUN tool-of-another-image\n", "missing program: tool-of-another-image\n"),
    "built-from-downloads": (
        f"RUN {_DOWNLOADS.splitlines()[0]}\nRUN {_DOWNLOADS.splitlines()[1]}\n",
        "no network: the tests or the installation need downloads.invalid\n",
    ),
}
"""Lines of a Dockerfile, and the beginning of the reason."""


def test_the_reason_begins_with_the_cause(try_tasks: Try, tmp_path: Path) -> None:
    greeting = HARBOR / "greeting"
    settings = (greeting / "task.toml").read_text()
    for name, (solution, seconds, _) in _SOLUTIONS.items():
        shutil.copytree(greeting, tmp_path / name)
        limited = settings.replace("timeout_sec = 120.0", f"timeout_sec = {seconds}", 1)
        written(tmp_path / name, {"solution/solve.sh": solution, "task.toml": limited})
    for name, (lines, _) in _DOCKERFILES.items():
        shutil.copytree(greeting, tmp_path / name)
        dockerfile = (greeting / "environment/Dockerfile").read_text()
        written(tmp_path / name, {"environment/Dockerfile": f"{dockerfile}\n{lines}"})
    found = try_tasks(tmp_path)
    for name, (_, _, begins) in _SOLUTIONS.items():
        assert (found[name].finding, found[name].solution) == (Finding.SOLUTION_FAILS, 0.0), name
        assert found[name].reason.startswith(begins), (name, found[name].reason)
    assert "test_outputs.py" in found["gives-up"].reason  # what the verifier printed follows
    for name, (_, begins) in _DOCKERFILES.items():
        assert found[name].finding is Finding.REFUSED, name
        assert found[name].reason.startswith(begins), (name, found[name].reason)


def test_the_reason_of_work_that_breaks_its_verifier_is_the_verifiers_output(try_tasks: Try, tmp_path: Path) -> None:
    shutil.copytree(HARBOR / "greeting", tmp_path / "greeting")
    script = "#!/bin/bash\nif [ -e /app/hello.txt ]; then echo it is there; our-judge; exit 3; fi\n"
    written(tmp_path / "greeting", {"tests/test.sh": f"{script}echo 0 > /logs/verifier/reward.txt\n"})
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.solution) == (Finding.VERIFIER_FAILS, None)
    assert line.reason.startswith("missing program: our-judge\n")
    assert "it is there" in line.reason
