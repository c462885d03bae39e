"""What a repository declares for its tests, which Python it allows, and the causes of failures."""

from __future__ import annotations

import pytest

from palaestra_suites.swe.declared import Declared, declared, required_python
from palaestra_suites.swe.failure_cause import cause_of
from palaestra_suites.toolchain.interpreters import Interpreter, allows, for_row, newest_date

PYPROJECT = """
[project]
requires-python = ">=3.9"
[project.optional-dependencies]
docs = ["sphinx"]
test = ["pytest-mock"]
[dependency-groups]
dev = ["ruff", {include-group = "tests"}]
tests = ["hypothesis>=6", "evil @ https://example.org/x.zip", {include-group = "dev"}]
[tool.poetry.group.test.dependencies]
time-machine = "^2.1"
[tool.hatch.envs.hatch-test]
extra-dependencies = ["trustme"]
"""
TOX = "[testenv]\nextras = test\ndeps =\n    -r requirements/tox.txt\n    freezegun>=1\n    --pre\n"


def test_places_are_tried_in_order_and_addresses_left_out() -> None:
    paths = ["requirements.txt", "requirements-dev.txt", "tests/requirements.txt", "src/a.py"]
    found = declared({"pyproject.toml": PYPROJECT, "tox.ini": TOX}, paths)
    assert found == [
        Declared("[dependency-groups] tests", ("hypothesis>=6", "ruff")),
        Declared("[dependency-groups] dev", ("ruff", "hypothesis>=6")),
        Declared("extra test", (".[test]",)),
        Declared("poetry group test", ("time-machine>=2.1",)),
        Declared("hatch environment hatch-test", ("trustme",)),
        Declared("tests/requirements.txt", ("-rtests/requirements.txt",)),
        Declared("requirements-dev.txt", ("-rrequirements-dev.txt",)),
        Declared("tox.ini [testenv]", (".[test]", "-rrequirements/tox.txt", "freezegun>=1")),
        Declared("requirements.txt", ("-rrequirements.txt",)),
    ]


def test_broken_files_declare_nothing() -> None:
    assert declared({"pyproject.toml": "[", "setup.cfg": "x", "tox.ini": "x"}, []) == []


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"pyproject.toml": PYPROJECT}, ">=3.9"),
        ({"pyproject.toml": '[tool.poetry.dependencies]\npython = "^3.8.1"'}, ">=3.8,<4"),
        ({"setup.cfg": "[options]\npython_requires = >=3.7\n"}, ">=3.7"),
        ({"setup.py": "setup(python_requires='>=3.6, <3.10')"}, ">=3.6, <3.10"),
        ({}, ""),
    ],
)
def test_the_required_python(texts: dict[str, str], expected: str) -> None:
    assert required_python(texts) == expected


@pytest.mark.parametrize(
    ("requires", "version", "expected"),
    [
        (">=3.12", (3, 11, 7), False), (">=3.11", (3, 11, 0), True), (">=3.8,<3.11", (3, 11, 7), False),
        ("!=3.11.*", (3, 11, 7), False), ("~=3.9", (3, 11, 7), True), ("~=3.9.1", (3, 11, 7), False),
        ("==3.11.*", (3, 11, 7), True), (">3.11", (3, 11, 7), True), ("", (3, 11, 7), True),
    ],
)  # fmt: skip
def test_versions_that_a_repository_allows(requires: str, version: tuple[int, ...], expected: bool) -> None:
    assert allows(requires, version) is expected


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [("2024-05-27T10:00:00Z", "2024-05-27"), ("2018-01-01", "2023-04-24"), ("", ""), ("yesterday", "")],
)
def test_packages_are_not_older_than_the_interpreter(created_at: str, expected: str) -> None:
    assert newest_date(created_at, (3, 11, 7)) == expected


@pytest.mark.parametrize(
    ("requires", "date", "expected"),
    [
        ("", "", "3.11.7"), ("", "2024-05-27", "3.11.7"), (">=3.12", "2022-01-01", "3.12.1"),
        ("", "2021-05-01", "3.9.18"), ("", "2016-05-01", "3.8.18"), (">=3.9", "2016-05-01", "3.9.18"),
        ("<3.8", "2016-05-01", "3.7.16"), ("<3", "2016-05-01", ""),
    ],
)  # fmt: skip
def test_a_row_gets_an_interpreter_that_is_not_younger_than_the_row(requires: str, date: str, expected: str) -> None:
    versions = ("3.11.7", "3.12.1", "3.11.7", "3.9.18", "3.8.18", "3.7.16")  # this Python first
    candidates = [Interpreter(version, tuple(map(int, version.split(".")))) for version in versions]
    found = for_row(candidates, requires, date)
    assert (found.label if found else "") == expected


@pytest.mark.parametrize(
    ("output", "exit_code", "cause"),
    [
        ("E  ModuleNotFoundError: No module named 'time_machine'", 2, "missing package: time_machine"),
        ("Error: Cannot find module 'tape'\nRequire stack:", 1, "missing package: tape"),
        ("E  fixture 'mocker' not found", 1, "missing pytest plugin: fixture mocker"),
        ("'asyncio' not found in `markers` configuration option", 2, "missing pytest plugin: marker asyncio"),
        ("ERROR: Package 'x' requires a different Python: 3.11.7 not in '>=3.12'", 1,
         "wrong Python: 3.11.7 not in '>=3.12'"),
        ("TypeError: required field \"lineno\" missing from alias", 1, 'wrong Python: required field "lineno" missing'),
        ("ImportError: cannot import name 'escape' from 'jinja2' (/v/lib/python3.9/site-packages/jinja2/__init__.py)",
         1, "wrong version of a package: jinja2"),
        ("ImportError: cannot import name 'escape' from 'jinja2' (/workspace/jinja2/__init__.py)", 1, ""),
        ("Killed", 137, "out of memory: raise the memory limit of the slots"),
        ("curl: (6) Could not resolve host: crates.io", 6, "no network: the tests or the installation need crates.io"),
        ("error: externally-managed-environment\n\n× This environment is externally managed", 1,
         "the root's Python belongs to its distribution, and pip may not install for it: remove the file "
         "EXTERNALLY-MANAGED below usr/lib from a root that stands for a Python image"),
        ("curl: (7) Failed to connect to 127.0.0.1 port 80\nsh: 1: served: not found", 7, "missing program: served"),
        ("curl: (7) Failed to connect to localhost port 80 after 0 ms", 7, ""),
        ("Err:1 http://deb.example/debian trixie InRelease\n  Temporary failure resolving 'deb.example'", 100,
         "no network: the tests or the installation need deb.example"),
        ("wget: unable to resolve host address ‘data.example’", 4,
         "no network: the tests or the installation need data.example"),
        ("cannot open URL 'https://cran.example/src/contrib/PACKAGES'\nExecution halted", 1,
         "no network: the tests or the installation need cran.example"),
        ("E: Version '8.5.0-2' for 'libcurl4-openssl-dev' was not found", 100,
         "no such version: Version '8.5.0-2' for 'libcurl4-openssl-dev'"),
        ("solve.sh: line 3:    12 Killed                  python train.py\nno model.bin", 1,
         "out of memory: raise the memory limit of the slots"),
        ("main.c:1:10: fatal error: zlib.h: No such file or directory", 2, "missing header: zlib.h"),
        ("bash: line 1: cargo: command not found", 127, "missing program: cargo"),
        ("npm error code ECONNRESET", 1, "no network"),
        ("Could not fetch URL https://index.example/simple/pillow/: There was a problem confirming the certificate: "
         "HTTPSConnectionPool(host='index.example', port=443): Max retries exceeded (Caused by SSLError("
         "SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed')))\n"
         "ERROR: No matching distribution found for pillow==12.2.0", 1,
         "no network: the certificate of index.example is not trusted here"),
        ("curl: (60) SSL certificate problem: unable to get local issuer certificate", 60,
         "no network: a certificate is not trusted here"),
        ("Could not find gem 'simplecov (> 0.2)' in locally installed gems.", 7, "missing package: simplecov (> 0.2)"),
        ("Cannot access central (https://x) in offline mode and the artifact com.google:truth:jar:1.1 has not been "
         "downloaded from it before.", 1, "missing package: com.google:truth:jar:1.1"),
        ('  Could not find a package configuration file provided by "Foo" with any of', 1, "missing package: Foo"),
        ("uv pip install … failed: Command timed out after 600s\n", None, "out of time: raise --env.install_timeout_s"),
        ("Error: Test timed out in 5000ms.", 1,
         "out of time: a limit of the tests or their runner ended a test (Test timed out in 5000ms)"),
        ("E assert 1 == 2", 1, ""),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure(output: str, exit_code: int, cause: str) -> None:
    assert cause_of(output, exit_code) == cause
