"""Right work that could be scored 0: each way that is known is a case here, as each cheat is one in the bank."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from palaestra_suites.terminal_bench.import_tasks import Finding
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import HARBOR, copied

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

_SYSTEM_PYTHON = Path("/usr/bin/python3")


def _purelib() -> str:
    code = "import site; print(site.getsitepackages()[0])"
    return subprocess.run([_SYSTEM_PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="needs a Python in /usr")
@pytest.mark.parametrize("named", [False, True], ids=["not named", "named in the instruction"])
def test_tests_import_a_package_of_the_image(try_tasks: Try, tmp_path: Path, named: bool) -> None:
    """Also when the instruction names it, so that its absence would look like the work's fault."""
    instruction = (HARBOR / "greeting/instruction.md").read_text() + ("\nUse oursums.\n" if named else "")
    dockerfile = (HARBOR / "greeting/environment/Dockerfile").read_text()
    place = f"{_purelib()}/oursums"
    install = f"RUN mkdir -p {place} && echo 'def total(a, b): return a + b' > {place}/__init__.py\n"
    tests = (
        HARBOR / "greeting/tests/test_outputs.py"
    ).read_text() + "\n\nimport oursums\n\n\ndef test_sums():\n    assert oursums.total(1, 2) == 3\n"
    files = {
        "instruction.md": instruction,
        "environment/Dockerfile": f"{dockerfile}\n{install}",
        "tests/test_outputs.py": tests,
    }
    copied(HARBOR / "greeting", tmp_path, files)
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="needs a Python in /usr")
def test_an_image_with_the_report_plugin_of_the_stock_script(try_tasks: Try, tmp_path: Path) -> None:
    """The plugin adds the option `--ctrf`, as the launcher does."""
    place = _purelib()
    plugin = "def pytest_addoption(parser):\\n    parser.addoption('--ctrf')\\n"
    install = (
        f'RUN mkdir -p {place}/ctrf-1.dist-info && printf "{plugin}" > {place}/ctrfmain.py\n'
        f"RUN printf '[pytest11]\\nctrf = ctrfmain\\n' > {place}/ctrf-1.dist-info/entry_points.txt\n"
        f"RUN printf 'Name: ctrf\\nVersion: 1\\n' > {place}/ctrf-1.dist-info/METADATA\n"
    )
    dockerfile = (HARBOR / "greeting/environment/Dockerfile").read_text()
    copied(HARBOR / "greeting", tmp_path, {"environment/Dockerfile": f"{dockerfile}\n{install}"})
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason


def test_an_image_that_is_larger_than_the_memory_of_its_task(try_tasks: Try, tmp_path: Path) -> None:
    """Container tools do not build under the limits of the task's containers."""
    dockerfile = (HARBOR / "greeting/environment/Dockerfile").read_text()
    files = {
        "environment/Dockerfile": f"{dockerfile}\nRUN head -c 300M /dev/zero > /opt/large\n",
        "task.toml": "[environment]\nmemory_mb = 256\n",
    }
    copied(HARBOR / "greeting", tmp_path, files)
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="needs a Python in /usr")
def test_a_package_of_the_image_that_the_tests_cannot_reach_is_not_the_works_fault(
    try_tasks: Try, tmp_path: Path
) -> None:
    """In the agent's own slot the tests run on an interpreter that the agent cannot change."""
    place = f"{_purelib()}/oursums"
    install = f"RUN mkdir -p {place} && touch {place}/__init__.py\n"
    settings = (HARBOR / "greeting/task.toml").read_text().replace("[metadata]", '[metadata]\ngrading = "live"')
    files = {
        "instruction.md": (HARBOR / "greeting/instruction.md").read_text() + "\nUse oursums.\n",
        "environment/Dockerfile": f"{(HARBOR / 'greeting/environment/Dockerfile').read_text()}\n{install}",
        "tests/test_outputs.py": f"import oursums\n{(HARBOR / 'greeting/tests/test_outputs.py').read_text()}",
        "task.toml": settings,
    }
    copied(HARBOR / "greeting", tmp_path, files)
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.VERIFIER_FAILS, None, None), line.reason


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="needs a Python in /usr")
def test_tests_of_the_work_that_must_fail_on_a_bug(try_tasks: Try, tmp_path: Path) -> None:
    """The verifier runs the agent's tests on a program with a bug, where they have to fail."""
    script = """#!/bin/bash
cd /app
echo 'def double(n): return 2 * n' > double.py
python -m pytest -q test_double.py && right=1 || right=0
echo 'def double(n): return n + 2' > double.py
python -m pytest -q test_double.py && found=0 || found=1
echo "$((right * found))" > /logs/verifier/reward.txt
"""
    tests = "from double import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    files = {
        "instruction.md": "Write pytest tests of double.double, which doubles a number, to /app/test_double.py.",
        "solution/solve.sh": f"#!/bin/bash\ncat > /app/test_double.py <<'X'\n{tests}X\n",
        "tests/test.sh": script,
    }
    task = copied(HARBOR / "greeting", tmp_path, files)
    (task / "tests/test_outputs.py").unlink()
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason


def test_a_judge_that_only_work_makes_the_verifier_ask(try_tasks: Try, tmp_path: Path) -> None:
    """Over the prepared workspace the verifier ends before it asks, so the work seemed to break it."""
    judge = """
import os, sys, urllib.request
if not os.path.exists("/app/hello.txt"):
    open("/logs/verifier/reward.txt", "w").write("0")
    sys.exit()
key = os.environ.get("OUR_API_KEY")
urllib.request.urlopen("http://judge.example/grade")
"""
    files = {"tests/test.sh": f"#!/bin/bash\n{_SYSTEM_PYTHON} /tests/judge.py\n", "tests/judge.py": judge}
    copied(HARBOR / "greeting", tmp_path, files)
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.VERIFIER_FAILS, 0.0, None)
    assert line.reason.startswith("no network")


_SERVED = """\
import urllib.request


def test_served():
    assert b"hello" in urllib.request.urlopen("http://127.0.0.1:8123/greeting.txt", timeout=10).read()
"""
_SERVING = """\
printf '#!/bin/sh\\n' > /usr/bin/our-tool
chmod 755 /usr/bin/our-tool
mkdir -p PURELIB/debugger/vendored
touch PURELIB/debugger/vendored/sitecustomize.py
echo hello > greeting.txt
nohup /usr/bin/python3 -m http.server 8123 > server.log 2>&1 &
for i in 1 2 3 4 5 6 7 8 9 10; do
  /usr/bin/python3 -c "import socket; socket.create_connection(('127.0.0.1', 8123))" && break
  sleep 0.5
done
"""


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="needs a Python in /usr")
def test_a_service_of_an_agent_that_installs_a_second_program_of_a_name(try_tasks: Try, tmp_path: Path) -> None:
    """The system's `pip` next to that of an image's own Python is found after it, so it stands in for nothing.
    Python does not look for `sitecustomize` inside of packages."""
    dockerfile = (HARBOR / "greeting/environment/Dockerfile").read_text()
    place = "/usr/local/bin/our-tool"
    files = {
        "instruction.md": "Serve greeting.txt with hello in it over HTTP on port 8123.\n",
        "environment/Dockerfile": f"{dockerfile}\nRUN echo '#!/bin/sh' > {place} && chmod 755 {place}\n",
        "solution/solve.sh": _SERVING.replace("PURELIB", _purelib()),
        "tests/test_outputs.py": _SERVED,
    }
    copied(HARBOR / "greeting", tmp_path, files)
    line = try_tasks(tmp_path)["greeting"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason
