"""Slots inside ordinary containers: docker's default privileges, as root and as somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.containers import ROOT, Docker, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300), pytest.mark.xdist_group("docker")]

SUITE = Path(__file__).with_name("test_local_confined.py").relative_to(ROOT)
OPTIONS = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::hypothesis.errors.HypothesisWarning")

_LADDER = """
import asyncio
from palaestra.core.errors import IsolationUnavailable
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.base import SlotSpec
from palaestra.sandbox.ladder import probe

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


@pytest.fixture(scope="module")
def daemon() -> Iterator[Docker]:
    """One for all tests of this file."""
    with docker() as client:
        yield client


@pytest.mark.parametrize("options", [(), ("-u", "12345:12345")], ids=["as root", "as somebody"])
def test_the_suite_of_the_confined_rung_in_a_container(daemon: Docker, options: tuple[str, ...]) -> None:
    output = daemon.python(*OPTIONS, str(SUITE), options=options)
    assert " passed" in output
    assert "no isolation can be had" not in output


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


def test_a_container_with_the_right_to_mount_has_the_full_rung(daemon: Docker) -> None:
    options = (
        "--cap-add",
        "SYS_ADMIN",
        "--security-opt",
        "seccomp=unconfined",
        "--security-opt",
        "apparmor=unconfined",
    )
    lines = daemon.python("-c", _LADDER, options=options).splitlines()
    assert lines[2].startswith("confined True")
