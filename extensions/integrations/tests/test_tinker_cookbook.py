"""The Tinker cookbook's Harbor recipe in our slots, and its training loop on our environments."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from note_environment import NOTE

from palaestra_tokens.testing.tiny_model import make_tiny
from palaestra_tokens.tokenizers import load_tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.slots, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
harbor_tools = pytest.importorskip("tinker_cookbook.recipes.harbor_rl.harbor_tools")

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs  # noqa: E402
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages  # noqa: E402
from tinker_cookbook.rl.rollout_strategy import FailFast  # noqa: E402
from tinker_cookbook.rl.rollouts import do_group_rollout  # noqa: E402

from palaestra_integrations import tinker as cookbook  # noqa: E402


async def solved(tests: Path, command: str) -> float:
    """The recipe's reward for an agent that runs one command."""
    from palaestra_integrations.tinker import sandbox_factory

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

    from palaestra_integrations.tinker import sandbox_factory

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


SCORE = """@note.score
async def some(rollout: Rollout) -> float:
    if rollout.index == 3:
        raise OSError("the grader is broken")
    replies = [each["content"] for each in rollout.result.messages if each["role"] == "tool"]
    return 0.5 * any('"error"' not in reply for reply in replies) + 0.25 * (rollout.index % 2)
"""


CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo hello"}}\n</tool_call><|im_end|>'


class Policy(TokenCompleter):
    """Calls the tool in every other conversation, then ends each; `asked` is what it was asked and said."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(str(folder))
        self.asked: list[tuple[list[int], list[int]]] = []

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        prompt = model_input.to_ints()
        begins = "hello\n" not in self.tokenizer.decode(prompt)
        ids = list(self.tokenizer.encode(CALL if begins and len(self.asked) % 2 else "Done.<|im_end|>"))
        assert ids[-1] in stop
        self.asked.append((prompt, ids))
        return TokensWithLogprobs(ids, [-0.5] * len(ids), "stop", f"seq-{len(self.asked)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(out, practice=60, hidden=64, layers=2)
    return out


@pytest.fixture
def env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    yield str(tmp_path / "note_env.py")
    cookbook.close()


def rolled_out(folder: Path, env: str, strategy: Any) -> tuple[Policy, Any]:
    policy = Policy(folder)
    settings = {"max_agent_turns": 3}
    builder = pickle.loads(pickle.dumps(cookbook.EnvGroupBuilder(env, "note-1", str(folder), 4, settings)))

    return policy, asyncio.run(do_group_rollout(builder, policy, strategy))


def test_our_loop_samples_with_the_policy_of_the_cookbook(folder: Path, env_file: str) -> None:
    policy, group = rolled_out(folder, env_file, cookbook.RolloutStrategy())
    assert len(group.trajectories_G) == 3
    assert [each.error_type for each in group.rollout_errors] == ["infra_error/grader"]
    sampled = [(each.ob.to_ints(), each.ac.tokens) for one in group.trajectories_G for each in one.transitions]
    assert all(each in policy.asked for each in sampled)
    assert all(each.ac.sequence_id for one in group.trajectories_G for each in one.transitions)
    assert len(sampled) > 3, "no rollout had a second turn"
    assert all(
        each.ac.logprobs == [-0.5] * len(each.ac.tokens) for one in group.trajectories_G for each in one.transitions
    )
    rewards = group.get_total_rewards()
    assert set(rewards) <= {0.0, 0.25, 0.5, 0.75}
    data, _ = assemble_training_data([group], compute_advantages([group]))
    assert sum(sum(each.loss_fn_inputs["mask"].data) for each in data) == sum(len(ids) for _, ids in sampled)


def test_the_loop_of_the_cookbook_steps_our_environments(folder: Path, env_file: str) -> None:
    """Each environment is a rollout of its own, so none has the index 3."""
    policy, group = rolled_out(folder, env_file, FailFast())
    assert len(group.trajectories_G) == 4
    assert not group.rollout_errors
    assert 0.5 in group.get_total_rewards()
    assert all(one.transitions[-1].episode_done for one in group.trajectories_G)
    steps = [(each.ob.to_ints(), each.ac.tokens) for one in group.trajectories_G for each in one.transitions]
    assert sorted(steps) == sorted(policy.asked)


@pytest.mark.timeout(600)
def test_the_training_loop_of_the_cookbook_trains_on_an_environment(
    folder: Path, env_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/tinker.md, against `palaestra serve tinker`."""
    page = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()
    (example,) = [block for block in code_blocks(page) if "DatasetBuilder" in block]
    command = (sys.executable, "-m", "palaestra", "serve", "tinker", str(folder), "--name", f"{folder}/", "--port", "0")
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            program = example.replace("http://127.0.0.1:8010", url).replace("/tmp/tiny/", f"{folder}/")
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "note-log" / "metrics.jsonl").read_text().splitlines()]
    assert sum("env/all/reward/total" in line for line in lines) == 2


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
