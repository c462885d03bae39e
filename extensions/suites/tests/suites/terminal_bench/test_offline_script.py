"""Test scripts without their bootstrap: installing lines go, everything else stays as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_messages import check_message
from palaestra_suites.terminal_bench.offline_script import lacks_network, offline, with_others
from suites.terminal_bench.mini import HARBOR, LEGACY


def test_the_stock_script_keeps_its_verdict_and_nothing_of_its_bootstrap() -> None:
    original = (HARBOR / "greeting/tests/test.sh").read_text()
    script = offline(original)
    assert script.pytest
    assert script.requirements == ()
    assert script.replaced == (
        "apt-get update",
        "apt-get install -y curl",
        "curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh",
        "source $HOME/.local/bin/env",
    )
    assert script.text.endswith(original[original.index("if [") :])


def test_the_older_stock_scripts() -> None:
    assert "\npytest $TEST_DIR/test_outputs.py -rA\n" in offline((LEGACY / "hello/run-tests.sh").read_text()).text
    old = offline((LEGACY / "older-bootstrap/run-tests.sh").read_text())
    check_message(old.text, "TEST_DIR/test_outputs.py")
    assert "curl" not in old.text.replace("# Install curl", "")
    assert old.requirements == ()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("apt-get update && apt-get install -y --no-install-recommends curl ca-certificates", ":"),
        ("sudo apt-get install -y curl > /dev/null", ":"),
        ("apt-get install -y \\\n  curl \\\n  wget", ":"),
        ("apt-get update -qq; apt install -y expect jq=1.6", "palaestra-needs expect jq"),
        ("apk add --no-cache bash", "palaestra-needs bash"),
        ("pip install pytest==8.4.1", ":"),
        ("pip3 install pytest 2>/dev/null || pip install pytest", ":"),
        ("pip install -q pytest || true", ":"),
        ("pip3 install --quiet pytest-json-ctrf==0.3.5 2>&1 | head -n 5 || true", ":"),
        ("pip install rich > install.log 2>&1 | tee -a log | tail -1", "palaestra-needs-python rich"),
        ("apt-get update -qq 2>&1 | tail -3 && apt-get install -y jq 2> errors.txt | cat", "palaestra-needs jq"),
        ("pip install pytest | sh", "pip install pytest | sh"),
        ("apt-get install -y jq || (true)", "apt-get install -y jq || (true)"),
        ("python3 -m pip install --quiet -r requirements.txt", ":"),
        ("pip install 'numpy>=2' pytest", "palaestra-needs-python 'numpy>=2'"),
        ("wget -qO- https://astral.sh/uv/install.sh | env UV_DIR=/x sh", ":"),
        ('. "$HOME/.local/bin/env"', ":"),
        ("source $HOME/.cargo/env", "[ ! -e $HOME/.cargo/env ] || . $HOME/.cargo/env"),
        ('. "$HOME/.cargo/env"', '[ ! -e "$HOME/.cargo/env" ] || . "$HOME/.cargo/env"'),
        ("pip install pytest && source ~/.cargo/env", "[ ! -e ~/.cargo/env ] || . ~/.cargo/env"),
        ('export PATH="$HOME/.local/bin:$PATH"', ":"),
        ("source .venv/bin/activate", ":"),
        ("python3 -m pytest /tests -q", "pytest /tests -q"),
        ("python -m pytest $TEST_DIR | tee /logs/x", "pytest $TEST_DIR | tee /logs/x"),
    ],
)
def test_installing_lines(line: str, wanted: str) -> None:
    assert offline(line + "\n").text == wanted + "\n"


def test_a_judge_without_a_network() -> None:
    failed = "anthropic.APIConnectionError: Connection error.\n"
    judge = "from anthropic import Anthropic\n"
    assert lacks_network("python /tests/judge.py\n", [judge], failed)
    assert not lacks_network("python /tests/judge.py\n", ["import calc\n"], failed)
    assert not lacks_network("", [judge], "0 of 3 facts\n")
    assert not lacks_network("", [judge], "NewConnectionError: HTTPConnection(host='127.0.0.1', port=80): refused\n")


def test_a_program_that_itself_runs_pytest_is_not_a_test_session() -> None:
    program = "python3 - <<'PY'\nimport subprocess\nsubprocess.run(['python', '-m', 'pytest', 'tests'])\nPY\n"
    assert not offline(f"{program}echo 1 > /logs/verifier/reward.txt\n").pytest
    assert offline(f"{program}pytest /tests\n").pytest
    assert offline("cat > run.sh <<END\npytest /tests\nEND\nbash run.sh\n").pytest


def test_filters_and_files_of_an_installation_are_not_packages() -> None:
    script = offline("pip install rich > install.log 2>&1 | head -n 5\npytest /tests\n")
    assert script.requirements == ("rich",)


@pytest.mark.parametrize(
    "line",
    [
        "curl -fs http://localhost:8080/health || exit 1",
        "apt list --installed | grep -q nginx && apt-get update || echo 0",
        "# apt-get install -y curl",
        "if pip show flask; then echo yes; fi",
        "cd /app && pip install . && flask run",
        "echo apt-get update",
        "",
    ],
)
def test_other_lines_stay(line: str) -> None:
    assert offline(line + "\n").text == line + "\n"


def test_packages_that_a_script_asks_for() -> None:
    text = (
        "uvx -p 3.13 -w pytest==8.4.1 -w 'numpy==2.3.1' --with requests pytest /tests\n"
        "pip3 install -q --target /x pandas scipy>=1 'pytest>=8'\n"
        "uv add pillow\n# pip install nothing\n"
    )
    assert offline(text).requirements == ("numpy==2.3.1", "requests", "pandas", "scipy>=1", "pillow")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("pytest /tests\n", True), ("uv run x\n", True), ("# pytest\necho 1\n", False), ("grep pytests x\n", False)],
)
def test_whether_a_script_starts_pytest(text: str, wanted: bool) -> None:
    assert offline(text).pytest is wanted


@pytest.mark.parametrize(
    ("text", "output", "wanted"),
    [
        ("git clone https://x.example/y\n", "fatal: Could not resolve host: x.example\n", True),
        ("git clone https://x.example/y\n", "1 failed\n", False),
        ("# curl\npytest /tests\n", "Temporary failure in name resolution\n", False),
        ("curl http://127.0.0.1/x\n", "wget: unable to resolve host address localhost\n", False),
        ("curl http://[::1]/x\n", "connect to ::1 port 80: Network is unreachable\n", False),
    ],
)
def test_a_script_that_fetches_is_told_from_work_that_does(text: str, output: str, wanted: bool) -> None:
    assert lacks_network(text, [], output) is wanted


def test_scripts_beside_it_are_changed_and_count() -> None:
    script = with_others(offline("bash /tests/run.sh\n"), {"run.sh": "uvx -w attrs pytest /tests\napt-get update\n"})
    assert (script.pytest, script.requirements) == (True, ("attrs",))
    assert script.replaced == ("apt-get update",)
    assert script.others == {"run.sh": "uvx -w attrs pytest /tests\n:\n"}


@given(st.text(alphabet="ab $|&;\\\n'\"#=-/", max_size=60))
def test_a_script_that_installs_nothing_is_the_same(text: str) -> None:
    assert offline(text).text.rstrip("\n") == "\n".join(text.splitlines()).rstrip("\n")
