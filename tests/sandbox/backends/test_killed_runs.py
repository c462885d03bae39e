"""Processes with slots elsewhere that are killed at some moment. Those of Modal and Nomad have tests of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from programs import killed_after, nap, until
from sandbox.backends.test_conformance import python_image, sshd
from sandbox.containers import docker
from sandbox.python_image import make_python_root

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("backends")]

MOMENTS, NAP = 6, nap()
PROGRAM = """
import asyncio
from palaestra_slots.sandbox.backends.{module} import {backend}
from palaestra_slots.sandbox.slot import SlotSpec

async def main():
    async with {backend}({arguments}) as backend:
        slot = await backend.create(SlotSpec(), "killed")
        process = await slot.spawn("{nap}")
        print("running", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""

Left = Callable[[], list[str]]


def marked() -> list[str]:
    """The processes of this machine that run the command of the slots."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[:2] == NAP.split():
            found.append(str(process))
    return found


@pytest.fixture(params=["docker", "ssh", "singularity"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Left]]:
    """A program with a slot on the platform, and what of it is left there."""
    with ExitStack() as stack:
        if request.param == "docker":
            daemon = stack.enter_context(docker())
            daemon.load(make_python_root(tmp_path_factory.mktemp("root")), "python:here")
            listing = [*daemon.command.split(), "ps", "--all", "--quiet", "--filter", "label=palaestra.slots"]
            fields = ("docker", "DockerBackend", f"'python:here', hosts=['{daemon.address}']")
            yield filled(*fields), lambda: subprocess.check_output(listing, text=True).split()
        elif request.param == "ssh":
            options, server = stack.enter_context(sshd(tmp_path_factory.mktemp("ssh")))
            children = Path(f"/proc/{server}/task/{server}/children")
            yield (
                filled("ssh", "SSHBackend", f"['127.0.0.1'], options={options!r}"),
                lambda: children.read_text().split() + marked(),
            )
        else:
            image = python_image(tmp_path_factory)
            yield filled("singularity", "SingularityBackend", f"'{image}'"), marked


def filled(module: str, backend: str, arguments: str) -> str:
    return PROGRAM.format(module=module, backend=backend, arguments=arguments, nap=NAP)


def test_a_process_that_is_killed_at_any_moment_leaves_nothing(case: tuple[str, Left]) -> None:
    program, left = case
    command = [sys.executable, "-c", program]
    begun = time.monotonic()
    with killed_after(command, stdout=subprocess.PIPE, text=True) as whole:
        assert whole.stdout.readline() == "running\n"
        usual_s = time.monotonic() - begun
        until(lambda: bool(left()), "the command runs")  # first there is a shell
    for number in range(MOMENTS):
        with killed_after(command, stdout=subprocess.DEVNULL):
            time.sleep(usual_s * (0.2 + number / MOMENTS))
    until(lambda: not left(), "nothing of the slots is left")
