"""GRPO of the real TRL on rollouts in slots: the reward rises, and each token is trained as it was sampled."""

from __future__ import annotations

import importlib.util
import inspect
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import one_segment, rollout, two_segments

import palaestra
from palaestra import ConfigError, Rollout, Slot, Task, environment
from palaestra.rollouts.journal.verify import verify_run
from palaestra_integrations import trl as integration
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [pytest.mark.slots, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

with_trl = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch"),
]

STEPS = 20
ROLLOUTS = 32


@environment(toolsets=[])
def note(n: int = 4) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"note-{i}", prompt="Write hello to note.txt", solution="echo hello > note.txt")


@note.tool
async def terminal(command: str, sandbox: Slot) -> str:
    """Run a command."""
    return (await sandbox.execute(command)).output


@note.score
async def written(rollout: Rollout, sandbox: Slot) -> float:
    """Half of the reward for a command that ran."""
    if (await sandbox.read_text("note.txt", missing="")).strip() == "hello":
        return 1.0
    assert rollout.result is not None
    replies = [message["content"] for message in rollout.result.messages if message["role"] == "tool"]
    return 0.5 * any('"error"' not in reply for reply in replies)


@environment(toolsets=[])
def half(n: int = 2) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"half-{i}", prompt="Say something")


@half.score
async def sometimes(rollout: Rollout) -> float:
    if rollout.index % 2:
        raise palaestra.GraderError("the check broke")
    return 1.0 + rollout.index


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes tool calls, not always well-formed."""
    out = tmp_path_factory.mktemp("model")
    make_tiny(out / "tiny", practice=150)
    return out / "tiny"


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer_of(
    folder: Path, env: object, func: Any = None, *, steps: int, rollouts: int = 8, group: int = 4, factory: Any = None
) -> Any:
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    args = GRPOConfig(
        "out",
        max_steps=steps,
        per_device_train_batch_size=rollouts,
        num_generations=group,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_completion_length=192,
        max_tool_calling_iterations=2,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template
    return GRPOTrainer(
        model=str(folder),
        args=args,
        train_dataset=integration.dataset(env),
        processing_class=tokenizer,
        rollout_func=func,
        environment_factory=factory,
        reward_funcs=integration.reward,
    )


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


class TestTraining:
    pytestmark = with_trl

    def test_the_reward_rises_and_the_log_probabilities_are_the_trainers(self, folder: Path) -> None:
        func = integration.rollout_func(note(), max_agent_turns=3, max_token_length=48)
        trainer = trainer_of(folder, note(), func, steps=STEPS, rollouts=ROLLOUTS, group=16)
        trainer.train()
        rewards = logged(trainer, "reward")
        assert len(rewards) == STEPS
        assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.1, rewards
        differences = logged(trainer, "logprob_difference")
        assert len(differences) == STEPS
        assert max(differences) < 1e-4
        assert logged(trainer, "unscored") == [0.0] * STEPS

        run = palaestra.open_run(func.path)
        assert run.status.state == "done"
        assert run.metrics["rollouts"] == STEPS * ROLLOUTS
        assert [group.trajectories[0].reward is not None for group in run.groups] == [True] * (STEPS * 2)
        rows = run.to_rows()
        assert [row["policy_version"] for row in rows] == [str(step) for step in range(STEPS) for _ in range(ROLLOUTS)]
        verdict = verify_run(run.path / "journal.jsonl", run.path / "groups.jsonl")
        assert (verdict.violation, verdict.rows) == ("", STEPS * ROLLOUTS)

    def test_tool_output_is_masked_and_every_sampled_token_is_trained(self, folder: Path) -> None:
        func = integration.rollout_func(note(n=2), max_agent_turns=3, max_token_length=48)
        trainer = trainer_of(folder, note(n=2), func, steps=1)
        prompts = [row["prompt"] for row in trainer.train_dataset for _ in range(4)]
        trainer.model.train()
        result = func(prompts, trainer)
        assert trainer.model.training
        func.close()
        rows = palaestra.open_run(func.path).to_rows()
        assert result["rollout_id"] == [row["rollout_id"] for row in rows]
        for name, column in (("completion_ids", "completion_ids"), ("mask", "env_mask"), ("logprobs", "logprobs")):
            assert result[column] == [row[name] for row in rows]
        texts = [
            trainer.processing_class.decode([token for token, on in zip(ids, mask, strict=True) if not on])
            for ids, mask in zip(result["completion_ids"], result["env_mask"], strict=True)
        ]
        assert any("<tool_response>" in text for text in texts)

    def test_an_unscored_rollout_is_left_out_and_never_zero(self, folder: Path) -> None:
        func = integration.rollout_func(half(), max_token_length=8, infra_retries=0)
        trainer = trainer_of(folder, half(), func, steps=1)
        trainer.train()
        assert logged(trainer, "unscored") == [0.5]
        assert logged(trainer, "reward") == [2.0]  # of 1, None, 3, None
        advantages = list(trainer._logs["advantages"])
        assert [round(abs(each), 3) > 0 for each in advantages] == [True, False] * 4
        assert sum(advantages) == pytest.approx(0.0, abs=1e-4)

    def test_a_difference_above_the_bound_stops_the_training(self, folder: Path) -> None:
        func = integration.rollout_func(half(), max_token_length=8, max_difference=0.0)
        trainer = trainer_of(folder, half(), func, steps=1)
        with pytest.raises(ConfigError, match="max_difference"):
            trainer.train()
        func.close()

    def test_a_prompt_that_names_no_task_is_refused(self, folder: Path) -> None:
        func = integration.rollout_func(half())
        trainer = trainer_of(folder, half(), func, steps=1)
        with pytest.raises(ConfigError, match="train_dataset"):
            func([[{"role": "user", "content": "Say something"}]], trainer)

    def test_trl_plays_the_rollouts_itself(self, folder: Path) -> None:
        factory = integration.environment_factory(note())
        trainer = trainer_of(folder, note(), factory=factory, steps=STEPS, rollouts=ROLLOUTS, group=16)
        trainer.train()
        factory.close()
        rewards = logged(trainer, "reward")
        assert len(rewards) == STEPS
        assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.1, rewards
        assert logged(trainer, "tools/call_frequency")[-1] > 0.2
        run = palaestra.open_run(factory.path)
        assert (run.status.state, run.metrics["rollouts"]) == ("done", STEPS * ROLLOUTS)
        assert run.mean_reward == pytest.approx(statistics.mean(rewards), abs=1e-4)


class TestEnvironmentFactory:
    def test_tools_are_methods_with_our_schema(self) -> None:
        factory = integration.environment_factory(palaestra.count_lines(n=2))
        try:
            played = factory()
            signature = inspect.signature(played.terminal)  # type: ignore[attr-defined]
            assert next(iter(signature.parameters)) == "command"
            assert signature.parameters["command"].annotation is str
            assert "    command: " in (played.terminal.__doc__ or "")  # type: ignore[attr-defined]
            played.reset(prompt=[{"role": "user", "content": "?", "task_id": "lines-1"}])
            assert '"exit_code": 0' in played.terminal(command="wc -l < a.txt > answer.txt")  # type: ignore[attr-defined]
            assert integration.reward(completions=[[{"role": "assistant", "content": "1"}]], environments=[played]) == [
                1.0
            ]
            played.reset(prompt=[{"role": "user", "content": "?", "task_id": "lines-0"}])
            played.reset(prompt=[{"role": "user", "content": "?", "task_id": "lines-1"}])
            assert integration.reward(completions=[[]], environments=[played]) == [0.0]
        finally:
            factory.close()
        assert palaestra.open_run(factory.path).metrics["rollouts"] == 3


def test_a_rollout_of_several_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 rows"):
        integration._row(rollout(0, [], ledger=two_segments().record()), 0)


def test_reward_functions_get_official_verdicts_and_labels() -> None:
    labels = [palaestra.Label("tests_edited", "test_a.py")]
    played = rollout(0, [], 0.0, ledger=one_segment().record(), official=1.0, labels=labels)
    unscored = rollout(1, [], None)
    group = palaestra.Group(group_id="g", number=0, task_id="t", trajectories=[played, unscored])
    rows = list(integration._group_rows(group, 2, 7))
    assert [(row["official"], row["labels"]) for row in rows] == [(1.0, ["tests_edited"]), (None, [])]
    logged: dict[str, float] = {}
    integration.reward(completions=[1, 2], reward=[0.0, None], labels=[["a"], []], log_metric=logged.__setitem__)
    assert logged == {"unscored": 0.5, "labelled": 0.5}


def test_what_was_not_rolled_out_trains_nothing() -> None:
    group = palaestra.Group(group_id="g", number=0, task_id="t", error="PrepareError: no")
    rows = list(integration._group_rows(group, 2, 7))
    assert [(row["completion_ids"], row["mask"], row["reward"]) for row in rows] == [([7], [0], None)] * 2
