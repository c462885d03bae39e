"""`BaseEnv`: classes that collect their rollouts themselves, run by path against a chat server on the loopback."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra import Outcome
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import RunReport, run
from palaestra.rollouts.journal.reader import Recording
from palaestra_contract import BaseEnv, BaseEnvConfig, HermesAgentLoop
from palaestra_contract.scored_data import checked_row, format_trajectory
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

pytestmark = pytest.mark.slots


class Sums(BaseEnv):
    """One row per rollout. The item 1 wants 10 to be drawn next; 2 gives nothing, 3 breaks."""

    name = "sums"

    async def setup(self) -> None:
        self.left = [1, 2, 3]

    async def get_next_item(self) -> JSON:
        return self.left.pop(0) if self.left else None

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        await self.evaluate_log({"pass": 1.0})

    async def collect_trajectory(self, item: JSON) -> JSON:
        if item == 2:
            return None, []
        messages = [{"role": "user", "content": f"{item}?"}]
        reply = await self.server.chat_completion(messages=messages, max_tokens=5)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        if item == 3:
            raise RuntimeError("a bug of the environment")
        row = {"tokens": [item, 7], "masks": [-100, 7], "scores": item, "messages": messages}
        return {**row, "inference_logprobs": [1.0, -0.5], "overrides": {"of": item}}, [10] if item == 1 else []


class Groups(Sums):
    """Three rows per group, whatever was asked for, from one text completion."""

    name = "groups"

    async def setup(self) -> None:
        self.left = [1]

    async def collect_trajectories(self, item: JSON) -> JSON:
        done = await self.server.completion(prompt="1+1=", n=3)
        return {
            "tokens": [[5, index] for index in range(3)],
            "masks": [[-100, index] for index in range(3)],
            "scores": [float(choice.text) for choice in done.choices],
            "advantages": None,
            "group_overrides": {"temperature": 0.5},
        }, []


class Adding(Sums):
    """Has its rows collected as usual, and adds to the group."""

    async def collect_trajectories(self, item: JSON) -> JSON:
        group, backlog = await super().collect_trajectories(item)
        if group is not None:
            assert group["advantages"] == []
            group["group_overrides"] = {"temperature": 0.5}
        return group, backlog


def rolled_out(env: type[BaseEnv], folder: Path, *flags: str, answer: JSON = None) -> RunReport:
    async def scenario() -> RunReport:
        async with LoopbackServer(FakeAnswer(answer or completion("4"))) as server:
            line = CommandLine("test", form_of(env).config_type(), APIServerConfig)
            argv = ["process", "--openai.base_url", server.url, "--openai.model_name", "m", *flags]
            parsed = line.parse([*argv, "--env.data_path_to_save_groups", str(folder / "g.jsonl")], {})
            assert isinstance(parsed, Parsed)
            with (folder / "log").open("w") as stream:
                return await run(form_of(env), parsed, root=folder / "runs", stream=stream)

    return asyncio.run(scenario())


def lines(report: RunReport) -> list[dict[str, JSON]]:
    return [json.loads(line) for line in report.groups.read_text().splitlines()]


def test_one_row_per_rollout_and_the_backlog_before_the_data_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false", "--env.max_num_workers", "1"]
    report = rolled_out(Sums, tmp_path, *flags, "--env.include_messages", "true")
    first, *wanted_next = lines(report)
    assert [line["scores"] for line in (first, *wanted_next)] == [[1.0] * 2, [10.0] * 2, [10.0] * 2]
    assert (first["tokens"], first["masks"]) == ([[1, 7]] * 2, [[-100, 7]] * 2)
    assert first["inference_logprobs"] == [[1.0, -0.5]] * 2
    assert first["overrides"] == [{"of": 1}] * 2
    assert [message["content"] for message in first["messages"][0]] == ["1?", "4"]
    assert report.exit_code == 3  # what gave nothing and what broke were asked for and are not there
    journal = report.journal.read_text()
    assert "collect_trajectory gave nothing for item-3" in journal
    assert "on item-4 failed with RuntimeError: a bug of the environment" in journal
    assert caplog.text.count("a run that continues with --resume loses them") == 1


def test_a_group_in_one_go_is_as_large_as_it_came(tmp_path: Path) -> None:
    answer = {"choices": [{"index": index, "text": str(index), "finish_reason": "stop"} for index in range(3)]}
    report = rolled_out(Groups, tmp_path, "--env.group_size", "2", answer=answer)
    (line,) = lines(report)
    assert report.exit_code == 0
    assert (line["scores"], line["tokens"]) == ([0.0, 1.0, 2.0], [[5, 0], [5, 1], [5, 2]])
    assert line["group_overrides"]["temperature"] == 0.5
    assert line["token_source"] == "environment"


def test_a_class_may_add_to_the_group_that_comes_as_usual(tmp_path: Path) -> None:
    flags = ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false", "--env.max_num_workers", "1"]
    report = rolled_out(Adding, tmp_path, *flags)
    assert [line["scores"] for line in lines(report)] == [[1.0] * 2, [10.0] * 2, [10.0] * 2]
    for line in lines(report):
        assert line["inference_logprobs"] == [[1.0, -0.5]] * 2
        assert line["group_overrides"] == {"temperature": 0.5}
    assert report.exit_code == 3
    journal = report.journal.read_text()
    assert "collect_trajectories gave nothing for item-3" in journal
    assert "on item-4 failed with RuntimeError: a bug of the environment" in journal


class Looping(Sums):
    """Runs the agent loop itself: alone for a rollout, or twice for a group."""

    async def collect_trajectory(self, item: JSON) -> JSON:
        result = await HermesAgentLoop(self.server, [], set()).run([{"role": "user", "content": f"{item}?"}])
        return {"tokens": [1], "masks": [1], "scores": float(item), "messages": result.to_messages()}, []


class LoopingGroups(Looping):
    async def collect_trajectories(self, item: JSON) -> JSON:
        return await super().collect_trajectories(item)


@pytest.mark.parametrize("env", [Looping, LoopingGroups])
def test_a_rollout_ends_as_the_loop_that_the_class_runs(tmp_path: Path, env: type[BaseEnv]) -> None:
    cut = completion("4", "length")
    report = rolled_out(env, tmp_path, "--env.group_size", "2", "--env.max_num_workers", "1", answer=cut)
    groups = list(Recording(report.journal))
    assert {each.outcome for group in groups for each in group.trajectories} == {Outcome.LENGTH}


class Ending(Sums):
    """Its rows are as those of the sums; on the way to them it ends as nobody should."""

    async def collect_trajectory(self, item: JSON) -> JSON:
        row, _ = await super().collect_trajectory(1)
        if item == 1:
            sys.exit(0)
        if item == 2:
            work = asyncio.create_task(asyncio.sleep(60))
            work.cancel()
            await work
        return row, 5


def test_a_class_that_exits_or_is_cancelled_loses_that_rollout_alone(tmp_path: Path) -> None:
    report = rolled_out(Ending, tmp_path, "--env.group_size", "1", "--env.max_num_workers", "1")
    assert report.exit_code == 3
    journal = report.journal.read_text()
    for said in ("item-0 failed with SystemExit: 0", "item-1 failed with CancelledError: an awaited operation"):
        assert f"Ending.collect_trajectory on {said}" in journal
    assert "item-2 failed with TypeError: 'int' object is not iterable" in journal


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("nothing", "a row is str"),
        ({"tokens": [1], "scores": 1.0}, "lacks masks"),
        ({"tokens": [1], "masks": [1], "scores": "1"}, "scores in a row is str"),
        ({"tokens": [1, 2], "masks": [1], "scores": 1.0}, "2 tokens, 1 masks"),
        ({"tokens": [1], "masks": [1], "scores": 1.0, "inference_logprobs": [0.1, 0.2]}, "2 inference_logprobs"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_refused(row: JSON, said: str) -> None:
    with pytest.raises(TaskError, match=f"item-1: .*{said}"):
        checked_row(row, "item-1")


def test_a_class_that_collects_nothing_is_no_environment(capsys: pytest.CaptureFixture[str]) -> None:
    class Idle(BaseEnv):
        async def setup(self) -> None: ...
        async def get_next_item(self) -> JSON: ...
        async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON: ...

    with raises(ConfigError, "Idle", "collect_trajectory", "collect_trajectories"):
        form_of(Idle)
    with pytest.raises(SystemExit, match="2"):
        Idle.cli()
    check_message(capsys.readouterr().err, "error", "Idle", "lacks", "collect_trajectory")


def test_a_class_may_name_its_configuration_in_config_cls() -> None:
    class Settings(BaseEnvConfig):
        depth: int = 3

    class Named(BaseEnv):
        @classmethod
        def config_cls(cls) -> type:
            return Settings

    class Below(Named):
        pass

    class Own(Named):
        env_config_cls = BaseEnvConfig

    assert [each.config_init()[0].__class__ for each in (Named, Below, Own)] == [Settings, Settings, BaseEnvConfig]


def test_the_tokenizer_is_the_one_that_is_named(tmp_path: Path) -> None:
    from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(), tmp_path)
    named = Sums(BaseEnvConfig(tokenizer_name=str(tmp_path)), []).tokenizer
    assert named is not None
    assert named.decode(named.encode("4 + 4")) == "4 + 4"
    assert Sums(BaseEnvConfig(), []).tokenizer is None


def test_a_tokenizer_that_cannot_be_loaded_is_tried_once(tmp_path: Path) -> None:
    env = Sums(BaseEnvConfig(tokenizer_name=str(tmp_path / "later")), [])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"env\.tokenizer_name: .*later.*'none'"):
            _ = env.tokenizer
        (tmp_path / "later").mkdir(exist_ok=True)


class Remembering(Sums):
    """Looks at what is kept of its rollouts when the run ends."""

    name = "remembering"

    async def wandb_log(self, wandb_metrics: JSON = None) -> None:
        self.save_checkpoint(self.curr_step, {"left": [9], "shown": self.rollouts_for_wandb})
        await super().wandb_log({"kept": len(self.rollouts_for_wandb), "step": self.curr_step})


def test_what_is_shown_and_kept_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--env.group_size", "2", "--env.num_rollouts_to_keep", "1", "--env.max_num_workers", "1"]
    report = rolled_out(Remembering, tmp_path, *flags, "--env.ensure_scores_are_not_same", "false")
    metrics = json.loads((report.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (metrics["kept"], metrics["step"]) == (1, 5)
    again = Remembering(BaseEnvConfig(), [])
    again.curr_step = 5
    again.load_checkpoint()
    assert again.left == [9]
    assert vars(again)["shown"] == [[["[USER]\n10?\n\n[ASSISTANT]\n4", 10.0]]]
    again.curr_step = 6
    with raises(ConfigError):
        again.load_checkpoint()


def test_a_shown_rollout_has_thinking_calls_and_the_beginning_of_results() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    shown = format_trajectory(
        [
            {"role": "user", "content": "List."},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x" * 501},
        ]
    )
    user, thought, asked, result = shown.split("\n\n")
    assert (user, thought, asked) == ("[USER]\nList.", "[REASONING] Hm.", '[TOOL CALL] terminal({"command": "ls"})')
    assert result == f"[TOOL RESULT] {'x' * 500}..."


def test_an_items_own_id_is_its_name_and_0_is_one() -> None:
    env = Sums(BaseEnvConfig(), [])
    items: list[JSON] = [{"id": 0}, {"id": ""}, {"instance_id": None, "id": "a"}, "text"]
    assert [env.item_id(item, 7) for item in items] == ["0", "item-7", "a", "item-7"]
