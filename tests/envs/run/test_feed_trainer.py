"""`serve` from settings to a trainer's batches: a class environment, a token-exact server, our trajectory server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from talking import Talk, trainer

from golden_messages import check_message
from palaestra.agent.result import AgentResult
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.discovery import form_of
from palaestra.envs.run.evaluate import Gate, OnGroup
from palaestra.envs.run.run import RunReport, run, serve_limit
from palaestra.envs.run.run_folder import RunOutput, claim_folder
from palaestra.rollouts.events import RunStarted
from palaestra.rollouts.export.atropos import GroupsFile
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import Group, TokenRow, Trajectory
from palaestra.rollouts.runner import Totals
from palaestra_contract import HermesAgentBaseEnv
from palaestra_contract.tool_context import ToolContext
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import INTERRUPTED, read_failure
from palaestra_slots.core.types import JSON, Outcome
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer
from palaestra_train.atropos.trajectory_server import serving
from palaestra_train.feed import Serving, feed_settings, trainers_tracking


class Naming(HermesAgentBaseEnv):
    """Endless items; the reward is the length of the answer."""

    name = "naming"

    async def setup(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> JSON:
        return {"number": next(self.numbers)}

    def format_prompt(self, item: JSON) -> str:
        return f"Name {item['number']}."

    async def compute_reward(self, item: JSON, result: AgentResult, ctx: ToolContext) -> float:
        return float(len(result.messages[-1]["content"]))

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        return None


class Chatting(Naming):
    """Wants no tokens."""

    def _use_managed_server(self) -> bool:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(), out)
    return out


def command_line(env: type[HermesAgentBaseEnv], argv: Sequence[str]) -> Parsed[HermesAgentEnvConfig, APIServerConfig]:
    form = form_of(env)
    line = CommandLine("test", form.config_type(), APIServerConfig).parse(argv, {})
    assert isinstance(line, Parsed)
    return line


async def serve(env: type[HermesAgentBaseEnv], folder: Path, out: Path, api: str, *argv: str) -> RunReport:
    """One run of `serve`, whose model answers with words of different lengths."""
    tokenizer = load_tokenizer(str(folder))
    engine = ToyEngine(tokenizer, itertools.cycle(["one", "three", "seventeen"]), rate=0.2)
    async with TokenLoopback(engine, tokenizer) as server:
        flags = {
            "--openai.server_type": "vllm",
            "--openai.base_url": server.url,
            "--openai.model_name": "toy",
            "--env.tokenizer_name": str(folder),
            "--to": api,
            "--env.max_num_workers": "2",
        }
        line = command_line(env, ["serve", *itertools.chain(*flags.items()), *argv])
        with (out / "log").open("w") as stream:
            return await run(form_of(env), line, root=out / "runs", stream=stream)


async def train(api: Talk, steps: int, **changed: JSON) -> list[JSON]:
    """A trainer of so many steps; the groups it got."""
    await api.post("/register", trainer(starting_step=0, max_token_len=1 << 16, num_steps=steps, **changed))
    return await take(api, steps)


async def take(api: Talk, steps: int) -> list[JSON]:
    """The groups of so many batches of a trainer that is registered."""
    groups: list[JSON] = []
    for _ in range(steps):
        while (batch := (await api.get("/batch"))["batch"]) is None:  # noqa: ASYNC110 - the wire has nothing else
            await asyncio.sleep(0.01)
        groups += batch
    return groups


@pytest.mark.slots
@pytest.mark.parametrize("size", [1, 4])
async def test_a_trainer_gets_what_was_sampled_until_it_has_enough(folder: Path, tmp_path: Path, size: int) -> None:
    async with serving() as url, Talk(url) as api, asyncio.TaskGroup() as both:
        training = both.create_task(train(api, 2))
        report = await serve(Naming, folder, tmp_path, url, "--group", str(size))
        groups = await training
    assert report.exit_code == 0
    assert [len(group["tokens"]) for group in groups] == [size] * (8 // size)
    tokenizer = load_tokenizer(str(folder))
    for group in groups:
        for masks, logprobs, score in zip(group["masks"], group["inference_logprobs"], group["scores"], strict=True):
            said = tokenizer.decode([mask for mask in masks if mask != -100])
            assert said == {3.0: "one", 5.0: "three", 9.0: "seventeen"}[score] + "<|im_end|>"
            assert len(logprobs) == len(masks)
            assert all(logprob < 0 for logprob, mask in zip(logprobs, masks, strict=True) if mask != -100)
    journal = {line["group_id"]: line["tokens"] for line in map(json.loads, report.groups.read_text().splitlines())}
    assert all(group["tokens"] in journal.values() for group in groups)
    assert "has completed its 2 steps" in (tmp_path / "log").read_text()


@pytest.mark.slots
async def test_going_on_with_a_run_sends_only_what_the_trainer_lacks(folder: Path, tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.both(max_token_len=1 << 16, batch_size=8)
        first = await serve(Naming, folder, tmp_path, url, "--group", "2", "--tasks", "3")
        sent = first.folder / "deliveries.jsonl"
        sent.write_text("".join(sent.read_text().splitlines(keepends=True)[:2]) + '{"delivery_')
        await serve(Naming, folder, tmp_path, url, "--group", "2", "--tasks", "4", "--resume", str(first.folder))
        assert len(sent.read_text().splitlines()) == 5
        assert await api.get("/status") == {"current_step": 3, "queue_size": 4}
        groups = list((await api.get("/batch"))["batch"])
    prompts = [json.dumps(group["tokens"]) for group in groups]
    assert len(set(prompts)) == 4


@pytest.mark.slots
async def test_groups_that_ended_before_take_no_place_of_those_to_come(folder: Path, tmp_path: Path) -> None:
    """Twelve groups of one may be under way or wait. Thirty-six have ended, and two more are rolled out."""

    async def scenario() -> JSON:
        async with serving() as url, Talk(url) as api:
            await api.both(max_token_len=1 << 16, batch_size=4)
            await api.post("/disconnect-env", {"env_id": 0})
            training = asyncio.create_task(take(api, 9))
            first = await serve(Naming, folder, tmp_path, url, "--group", "1", "--tasks", "36")
            await training
            again = await serve(
                Naming, folder, tmp_path, url, "--group", "1", "--tasks", "38", "--resume", str(first.folder)
            )
            assert again.exit_code == 0
            return await api.get("/status")

    assert await asyncio.wait_for(scenario(), 120) == {"current_step": 12, "queue_size": 2}


@pytest.mark.slots
async def test_a_run_that_waits_for_its_trainer_ends_at_once_when_it_is_told_to(folder: Path, tmp_path: Path) -> None:
    """Nothing is in flight that would want time to finish."""
    async with serving() as url:
        waiting = asyncio.create_task(serve(Naming, folder, tmp_path, url, "--env.drain_s", "600"))
        while "waiting for the trainer" not in told(tmp_path / "log"):  # noqa: ASYNC110 - a file tells it
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        result = await asyncio.wait_for(waiting, 60)
    assert result.exit_code == INTERRUPTED


def told(log: Path) -> str:
    return log.read_text() if log.exists() else ""


@pytest.mark.slots
def test_tokens_that_nobody_sampled_are_not_sent(folder: Path, tmp_path: Path) -> None:
    async def scenario(*argv: str) -> int:
        async with serving() as url, Talk(url) as api:
            await api.both()
            await serve(Chatting, folder, tmp_path, url, "--group", "2", "--tasks", "1", *argv)
            return int((await api.get("/status"))["queue_size"])

    same = ("--env.ensure_scores_are_not_same", "false")
    with pytest.raises((ConfigError, ExceptionGroup)) as raised:
        asyncio.run(scenario(*same))
    failure = read_failure(raised.value)
    assert failure is not None
    assert (failure.exit_code, "allow_placeholder_tokens" in failure.message) == (2, True)
    assert asyncio.run(scenario(*same, "--env.allow_placeholder_tokens", "true")) == 1


def test_what_the_trainer_is_told() -> None:
    config = HermesAgentEnvConfig(group_size=8, inference_weight=0.5, min_batch_allocation=0.25, max_token_length=100)
    settings = feed_settings(config, "words")
    assert (settings.name, settings.group_size, settings.weight) == ("words", 8, 0.5)
    assert (settings.min_batch_allocation, settings.max_token_length) == (0.25, 100)
    assert feed_settings(HermesAgentEnvConfig(wandb_name="mine"), "words").name == "mine"


async def test_runs_are_tracked_where_their_trainer_is() -> None:
    async with serving() as url, Talk(url) as api:
        before = await trainers_tracking(url)
        await api.both()
        found = await trainers_tracking(url)
    assert await trainers_tracking(url) == {}, "nobody answers there any more"
    assert (before, found) == ({}, {"project": "p", "group": "g"})


def test_only_a_user_limits_how_many_groups_are_served() -> None:
    assert serve_limit(1000, "default") is None
    assert serve_limit(20, "config_init") is None
    assert serve_limit(-1, "command line") is None
    assert serve_limit(20, "command line") == 20


@pytest.mark.slots
async def test_what_is_too_long_for_the_trainer_is_said(folder: Path, tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.both(max_token_len=64, batch_size=8)
        await serve(Naming, folder, tmp_path, url, "--group", "2", "--tasks", "2")
    said = (tmp_path / "log").read_text()
    assert said.count("is not sent: its shortest rollout has") == 1
    assert "trainer accepts 64. Offer" in said
    assert "0 groups delivered" in said
    assert "2 had only rollouts" in said


def new_output(root: Path) -> RunOutput:
    folder = claim_folder(root, "e", "m")
    groups = GroupsFile(folder.groups, env="e", model="m")
    output = RunOutput(folder, Journal(folder.journal), {}, env="e", model="m", groups=groups)
    output.journal.append(RunStarted(run_id=folder.run_id, env="e", model="m", seed=0))
    return output


def scores_sent(rollouts: list[Trajectory], folder: Path) -> list[float] | None:
    """What of a group of three goes to a trainer that takes 8 tokens; None where nothing does."""
    group = Group(group_id="g", number=0, task_id="t", trajectories=rollouts)
    output = new_output(folder)
    try:
        line = Serving(BaseEnvConfig(group_size=3), output, print)._line(group, 8)
    finally:
        output.close("done")
    return line and line["scores"]


@pytest.mark.parametrize(("rewards", "sent"), [((0.0, 1.0, 1.0), None), ((0.0, 1.0, 0.5), [1.0, 0.5])])
def test_what_is_left_of_a_group_must_differ_too(
    rewards: Sequence[float], sent: list[float] | None, tmp_path: Path
) -> None:
    """The first rollout is too long for the trainer, and the others have equal scores, or have not."""
    rollouts = [
        Trajectory(
            rollout_id=f"g/{index}",
            group_id="g",
            task_id="t",
            index=index,
            messages=[],
            outcome=Outcome.NATURAL,
            reward=reward,
            row=TokenRow(tokens=[7] * length, masks=[7] * length, source="engine"),
        )
        for index, (reward, length) in enumerate(zip(rewards, (9, 3, 3), strict=True))
    ]
    assert scores_sent(rollouts, tmp_path) == sent


async def test_groups_of_equal_scores_are_told_of_once_and_counted(tmp_path: Path) -> None:
    output = new_output(tmp_path)
    notes: list[str] = []
    config = BaseEnvConfig(group_size=2)
    feeding = Serving(config, output, notes.append)

    async def roll_out(on_group: OnGroup, gate: Gate) -> Totals:
        for number in range(2):
            rollouts = [
                Trajectory(
                    rollout_id=f"{number}/{index}",
                    group_id=str(number),
                    task_id="t",
                    index=index,
                    messages=[],
                    outcome=Outcome.NATURAL,
                    reward=0.0,
                    row=TokenRow(tokens=[7], masks=[7], source="engine"),
                )
                for index in range(2)
            ]
            on_group(Group(group_id=str(number), number=number, task_id="t", trajectories=rollouts))
        return Totals()

    async with serving() as url, Talk(url) as api:
        await api.both()
        config.rollout_server_url = url
        try:
            await feeding.run(roll_out, lambda group: None)
        finally:
            output.close("done")
    (unsent,) = [note for note in notes if "not sent" in note]
    assert "group 0 is not sent" in unsent
    assert "ensure_scores_are_not_same" in unsent
    check_message(notes[-1])


@pytest.mark.parametrize(("silent", "sent"), [(1, [1.0, 0.5]), (3, None)])
def test_a_rollout_in_which_nothing_was_said_does_not_end_the_run(
    silent: int, sent: list[float] | None, tmp_path: Path
) -> None:
    """A prompt that is too long for the model has a score and no tokens, though its server is token-exact."""
    heard = TokenRow(tokens=[7] * 3, masks=[7] * 3, source="engine")
    rollouts = [
        Trajectory(
            rollout_id=f"g/{index}",
            group_id="g",
            task_id="t",
            index=index,
            messages=[],
            outcome=Outcome.BUDGET if index < silent else Outcome.NATURAL,
            reward=reward,
            row=(None if index else TokenRow(tokens=[7], masks=[-100])) if index < silent else heard,
        )
        for index, reward in enumerate((0.0, 1.0, 0.5))
    ]
    assert scores_sent(rollouts, tmp_path) == sent


@pytest.mark.slots
async def test_an_environment_is_evaluated_at_the_trainers_steps(folder: Path, tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api, asyncio.TaskGroup() as both:
        both.create_task(train(api, 4))
        flags = ["--group", "4", "--env.steps_per_eval", "2", "--env.eval_handling", "NONE"]
        report = await serve(Naming, folder, tmp_path, url, *flags)
    assert report.exit_code == 0
    steps = {int(each.name.removeprefix("step-")) for each in (report.folder / "evaluations").iterdir()}
    assert steps
    assert steps <= {2, 4}
    assert "it logged no metrics" in (tmp_path / "log").read_text()
