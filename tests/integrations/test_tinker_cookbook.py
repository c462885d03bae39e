"""The Tinker cookbook's Harbor recipe in our slots: its own tool, reward and group builder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slots, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
harbor_tools = pytest.importorskip("tinker_cookbook.recipes.harbor_rl.harbor_tools")


async def solved(tests: Path, command: str) -> float:
    """The recipe's reward for an agent that runs one command."""
    from palaestra.integrations.tinker import sandbox_factory

    sandbox = await sandbox_factory()(tests.parent / "environment", 120)
    try:
        await sandbox.run_command(command)
        reward, _ = await harbor_tools.HarborReward(tests, sandbox)([])
        return float(reward)
    finally:
        await sandbox.cleanup()


@pytest.fixture
def tests_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "task" / "tests"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "expected.txt").write_text("42\n")
    (folder / "test.sh").write_text(
        "cmp /workspace/answer.txt /tests/data/expected.txt && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n"
    )
    return folder


def test_the_recipe_grades_work_in_slots(tests_folder: Path) -> None:
    assert asyncio.run(solved(tests_folder, "echo 42 > /workspace/answer.txt")) == 1.0
    assert asyncio.run(solved(tests_folder, "echo 41 > /workspace/answer.txt")) == 0.0


def test_a_sandbox_is_what_the_cookbook_expects(tmp_path: Path) -> None:
    asyncio.run(used(tmp_path))


async def used(tmp_path: Path) -> None:
    from tinker_cookbook.sandbox import SandboxInterface, SandboxTerminatedError

    from palaestra.integrations.tinker import sandbox_factory

    sandbox = await sandbox_factory(memory="256MB")(tmp_path, 120)
    assert isinstance(sandbox, SandboxInterface)
    both = await sandbox.run_command("echo out; echo err >&2; exit 3")
    assert (both.stdout, both.stderr, both.exit_code) == ("out\n", "err\n", 3)
    assert (await sandbox.run_command("sleep 60", timeout=1)).exit_code == 124
    assert len((await sandbox.run_command("yes | head -c 100000", max_output_bytes=1000)).stdout) < 2000
    assert (await sandbox.write_file("/tests/a/run.sh", "echo ran", executable=True)).exit_code == 0
    assert (await sandbox.run_command("/tests/a/run.sh")).stdout == "ran\n"
    assert (await sandbox.read_file("/tests/a/run.sh")).stdout == "echo ran"
    assert (await sandbox.read_file("/missing")).exit_code == 1
    await sandbox.send_heartbeat()
    await sandbox.cleanup()
    await sandbox.cleanup()
    with pytest.raises(SandboxTerminatedError):
        await sandbox.run_command("true")
