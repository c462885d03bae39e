"""Slots inside ordinary containers: docker's default privileges, as root and as somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.containers import ROOT, Docker, docker
from sandbox.somebody import TWO_AT_ONCE

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("docker")]

SUITE = Path(__file__).with_name("test_local_confined.py").relative_to(ROOT)
OPTIONS = (
    "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::hypothesis.errors.HypothesisWarning",
    *TWO_AT_ONCE,
)  # fmt: skip

_LADDER = """
import asyncio
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_slots.sandbox.isolation.isolation_probe import probe

async def main():
    for step in await probe():
        print(step.rung.label, step.available, step.reason)
    async with LocalBackend() as backend:
        slot = await backend.create(SlotSpec(), "best")
        print("best", (await slot.execute("true")).metadata["rung"])
    try:
        await LocalBackend.from_isolation("best", require_sandbox=True).start()
    except IsolationUnavailable as error:
        print("refused", error)

asyncio.run(main())
"""


def _unconfined(what: str) -> tuple[str, str]:
    return ("--security-opt", f"{what}=unconfined")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Docker]:
    """One for all tests of this file."""
    with docker() as client:
        yield client


@pytest.mark.parametrize("options", [(), ("-u", "12345:12345")], ids=["as root", "as somebody"])
def test_the_suite_of_the_confined_rung_in_a_container(daemon: Docker, options: tuple[str, ...]) -> None:
    output = daemon.python(*OPTIONS, str(SUITE), options=options)
    assert " passed" in output
    assert "no isolation is available" not in output


def test_the_cases_of_abuse_in_a_container(daemon: Docker) -> None:
    output = daemon.python(*OPTIONS, "-k", "confined and not unprivileged", "tests/abuse")
    assert " passed" in output


@pytest.mark.parametrize("options", [(), ("-u", "12345:12345")], ids=["as root", "as somebody"])
def test_the_best_rung_of_a_container_is_confined_and_no_sandbox(daemon: Docker, options: tuple[str, ...]) -> None:
    lines = daemon.python("-c", _LADDER, options=options).splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["full", "False"], ["userns", "False"], ["confined", "True"], ["none", "True"],
    ]  # fmt: skip
    assert lines[4] == "best confined"
    assert lines[5].startswith("refused ")
    assert "full:" in lines[5]
    assert "userns:" in lines[5]


@pytest.mark.parametrize(
    ("best", "options"),
    [
        ("userns", ("-u", "12345", *_unconfined("seccomp"), *_unconfined("systempaths"))),
        ("userns", ("--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN")),
        ("full", ("--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN", "-v", "/sys/fs/cgroup:/sys/fs/cgroup")),
    ],
    ids=["userns for a user", "userns for root", "full"],
)
def test_a_container_with_more_rights_has_a_better_rung(daemon: Docker, best: str, options: tuple[str, ...]) -> None:
    assert f"best {best}" in daemon.python("-c", _LADDER, options=options).splitlines()


def test_without_capabilities_root_is_told_to_be_somebody_else(daemon: Docker) -> None:
    ladder = _LADDER[: _LADDER.index("    async with")] + "asyncio.run(main())\n"
    lines = daemon.python("-c", ladder, options=("--cap-drop", "ALL")).splitlines()
    assert [line.split()[1] for line in lines] == ["False", "False", "False", "True"]
    assert "run as another user" in lines[2]
