"""Lets TRL train on the rollouts of an environment.

    trainer = GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, train_dataset=dataset(env),
        rollout_func=rollout_func(env), reward_funcs=reward,
    )

The agent loop, the slots and the grading work as in a run, and all steps together form one run's record. The trainer's
own model samples, in this process, so that every token is trained with the weights that sampled it. Tool output is
masked with `env_mask`; an unscored rollout has the reward None, which TRL leaves out of both the group's baseline and
the loss.

Needs the extra `trl`. Source: `GRPOTrainer` of TRL 1.16.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import palaestra
from palaestra import JSON, ConfigError, ExportedRow, Group, Session, SyncPlay, SyncSession, Trajectory
from palaestra_tokens import APIServerConfig, TransformersEngine

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import GRPOTrainer

TASK = "task_id"
"""The key in a prompt's messages that holds the task's id, because TRL passes only the prompt column to
`rollout_func`."""


def dataset(env: object, *, tasks: int | None = None, **settings: JSON) -> Dataset:
    """Return the tasks of an environment (the first `tasks`, or all) as a data set for TRL, one row per task.
    `settings` are those of `palaestra.Session`, except those that select a policy or a model."""
    from datasets import Dataset

    with Session(env, policy="noop", **settings) as session:
        found = session.tasks(tasks)
    rows = [{"prompt": [{**message, TASK: task.id} for message in task.messages()]} for task in found]
    return Dataset.from_list(rows)


def rollout_func(env: object, *, max_difference: float | None = 0.1, **settings: JSON) -> RolloutFunc:
    """Return a `rollout_func` that rolls out `env`. `settings` are those of `palaestra.Session`, except `policy`,
    `history`, and those that select a model or its server. The trainer sets the temperature, `top_p` and `top_k`; its
    `max_completion_length` is the default for `max_token_length`, the limit of one reply.

    Reward functions also get the columns `official` (the official verdict, or the reward if there is no other) and
    `labels` (the names of the labels of each rollout). After the rollouts of each step, the log-probabilities of the
    sampled tokens are compared with the trainer's own, which costs one forward pass. A row whose tokens differ by more
    than `max_difference` nats on average raises `ConfigError`; None disables the comparison.
    """
    return RolloutFunc(env, max_difference, settings)


def reward(*, completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the environment's rewards, with None for an unscored rollout. Pass this to TRL as a reward function."""
    if (environments := columns.get("environments")) is not None:
        rewards = [each._finish(said) for each, said in zip(environments, completions, strict=True)]
    else:
        rewards = columns["reward"]
    if (log := columns.get("log_metric")) is not None:
        log("unscored", rewards.count(None) / len(rewards))
        if (labels := columns.get("labels")) is not None:
            log("labelled", sum(map(bool, labels)) / len(labels))
        differences = [each for each in columns.get("logprob_difference", ()) if each is not None]
        if differences:
            log("logprob_difference", max(differences))
    return rewards


class EnvironmentFactory:
    """The result of `environment_factory`. Each call creates an environment in TRL's sense, which plays one rollout at
    a time. `close` ends the run; `path` is the run's folder."""

    def __init__(self, env: object, settings: Mapping[str, Any]) -> None:
        self._opened = ExitStack()
        self._session = self._opened.enter_context(Session(env, policy="caller", **settings))
        self.path = self._session.path
        try:
            if not (first := self._session.tasks(1)):
                raise ConfigError("The environment has no tasks.")
            tools = {each["function"]["name"]: _method(each["function"]) for each in self._session.tools(first[0])}
        except BaseException:
            self.close()
            raise
        self._kind: type[_Environment] = type("Played", (_Environment,), tools)

    def __call__(self) -> _Environment:
        return self._kind(self._session)

    def close(self) -> None:
        """End the run; rollouts that have not been scored are cancelled. Idempotent."""
        self._opened.close()


def environment_factory(env: object, **settings: Any) -> EnvironmentFactory:
    """Return an `environment_factory` for `env`. TRL's own loop samples and calls the environment's tools, in one slot
    per rollout; `reward` seals and grades the work. `settings` are those of `palaestra.Session`, except those that
    select a policy or a model.

    All tasks have the tools of the first task. Each rollout holds its slot until it is graded, so `slots` must be at
    least the number of rollouts in one generation.
    """
    return EnvironmentFactory(env, settings)


class _Environment:
    """Plays one rollout after another for TRL. A subclass has the tools as methods."""

    def __init__(self, session: SyncSession) -> None:
        self._session = session
        self._play: SyncPlay | None = None

    def reset(self, **row: Any) -> None:
        """Begin a rollout of the row's task."""
        if self._play is not None:  # TRL did not request its reward
            self._play.finish()
        self._play = self._session.play(_task_id(row["prompt"]))

    def _call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._play is not None, "TRL resets an environment before it calls a tool"
        return self._play.call(name, {key: value for key, value in arguments.items() if value is not None})

    def _finish(self, completion: Any) -> float | None:
        """Grade the rollout and return its reward, or None if the rollout cannot be scored."""
        play, self._play = self._play, None
        assert play is not None, "TRL resets an environment before it asks for a reward"
        last = completion[-1] if isinstance(completion, list) and completion else {"content": str(completion)}
        text = last.get("content") if last.get("role", "assistant") == "assistant" else ""
        return play.finish(text if isinstance(text, str) else "").reward


_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def _method(function: Mapping[str, Any]) -> Callable[..., str]:
    """Return the tool as a method with types and a docstring, from which TRL derives the tool's schema."""
    properties = function["parameters"].get("properties", {})
    required = function["parameters"].get("required", [])

    def call(self: _Environment, **arguments: Any) -> str:
        return self._call_tool(function["name"], arguments)

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name in sorted(properties, key=lambda name: name not in required):
        kind = _TYPES.get(properties[name].get("type", "string"), str)
        given = {} if name in required else {"default": None}
        annotation = kind if name in required else kind | None
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, **given))
    lines = [_single_line(function.get("description", function["name"])), "", "Args:"]
    lines += [f"    {name}: {_parameter_text(properties[name], name)}" for name in properties]
    lines += ["", "Returns:", "    The tool's reply."]
    call.__name__ = call.__qualname__ = function["name"]
    call.__doc__ = "\n".join(lines if properties else [lines[0], *lines[-3:]])
    call.__annotations__ = {each.name: each.annotation for each in parameters[1:]} | {"return": str}
    call.__signature__ = Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return call


def _single_line(text: str) -> str:
    return " ".join(text.split())


def _parameter_text(schema: Mapping[str, Any], name: str) -> str:
    choices = f" (choices: {json.dumps(schema['enum'])})" if "enum" in schema else ""
    return _single_line(schema.get("description") or name) + choices


class RolloutFunc:
    """The result of `rollout_func`. Its session opens with the first call and closes when training ends, or earlier
    with `close`. `path` is the run's folder."""

    def __init__(self, env: object, max_difference: float | None, settings: Mapping[str, JSON]) -> None:
        self._env = env
        self._max_difference = max_difference
        self._settings = settings
        self._session: SyncSession | None = None
        self._opened = ExitStack()
        self._engine: TransformersEngine
        self.path: Path | None = None

    def __call__(self, prompts: Sequence[JSON], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return one row per prompt, in the order of the prompts. Consecutive prompts of one task form groups of the
        trainer's size."""
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        wanted = [
            (task, min(size, count - done))
            for task, count in ((task, len(list(same))) for task, same in itertools.groupby(map(_task_id, prompts)))
            for done in range(0, count, size)
        ]
        with _sampling_model(trainer) as model:
            session = self._open_session(trainer, model)
            self._engine.policy_version = str(trainer.state.global_step)
            groups: dict[int, Group] = {}
            for each in dict.fromkeys(count for _, count in wanted):
                places = [place for place, (_, count) in enumerate(wanted) if count == each]
                found = session.roll_out(*(wanted[place][0] for place in places), group_size=each)
                groups |= zip(places, found, strict=True)
            filler = trainer.processing_class.eos_token_id
            rows = [row for place, (_, count) in enumerate(wanted) for row in _group_rows(groups[place], count, filler)]
            differences = self._compare(trainer, model, rows)
        return {
            "prompt_ids": [row["prompt_ids"] for row in rows],
            "completion_ids": [row["completion_ids"] for row in rows],
            "logprobs": [row["logprobs"] for row in rows],
            "env_mask": [row["mask"] for row in rows],
            "reward": [row["reward"] for row in rows],
            "rollout_id": [row["rollout_id"] for row in rows],
            "official": [row["official"] for row in rows],
            "labels": [row["labels"] for row in rows],
            "logprob_difference": differences,
        }

    def close(self) -> None:
        """End the run. The next call begins a new one. Idempotent."""
        self._session = None
        self._opened.close()

    def _open_session(self, trainer: GRPOTrainer, model: Any) -> SyncSession:
        if self._session is not None:
            return self._session
        if trainer.use_vllm:
            raise ConfigError("rollout_func samples with the trainer's own model: set use_vllm=False")
        args = trainer.args
        config = APIServerConfig(
            server_type="transformers",
            model_name=str(getattr(model.config, "_name_or_path", "") or "trl"),
            history="append",
            **{name: self._settings[name] for name in self._settings.keys() & APIServerConfig.model_fields.keys()},
        )
        self._engine = TransformersEngine(
            config, tokenizer=trainer.processing_class, make=lambda: model, seed=args.seed
        )
        cut = {"top_p": args.top_p, "top_k": args.top_k or 0, "logprobs_mode": "processed_logprobs"}
        settings = {
            "agent_temperature": args.temperature,
            "max_token_length": args.max_completion_length or 2048,
            "concurrency": 64,
            "extra_body": cut,
            **{name: value for name, value in self._settings.items() if name not in APIServerConfig.model_fields},
        }
        self._session = self._opened.enter_context(Session(self._env, server=self._engine, **settings))
        self.path = self._session.path
        trainer.add_callback(_closing(self.close))
        return self._session

    def _compare(self, trainer: GRPOTrainer, model: Any, rows: Sequence[dict[str, Any]]) -> list[float | None]:
        """Return each row's mean difference between sampler and trainer on its trained tokens. The value is None for a
        row without trained tokens, or if the comparison is disabled. Raises `ConfigError` for a mean of more than
        `max_difference`."""
        trained = [row for row in rows if any(row["mask"])]
        if self._max_difference is None or not trained:
            return [None] * len(rows)
        import torch
        from trl.trainer.utils import pad

        device = trainer.accelerator.device

        def padded(name: str, side: str) -> torch.Tensor:
            return pad([torch.tensor(row[name]) for row in trained], 0, padding_side=side).to(device)

        def ones(name: str, side: str) -> torch.Tensor:
            return pad([torch.ones(len(row[name]), dtype=torch.long) for row in trained], 0, padding_side=side)

        ids = torch.cat([padded("prompt_ids", "left"), padded("completion_ids", "right")], dim=1)
        attention = torch.cat([ones("prompt_ids", "left"), ones("completion_ids", "right")], dim=1).to(device)
        sampled, mask = padded("logprobs", "right"), padded("mask", "right")
        with torch.no_grad():
            own, _, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, attention, sampled.shape[1], batch_size=trainer.args.per_device_train_batch_size
            )
        found = iter((((own - sampled).abs() * mask).sum(dim=1) / mask.sum(dim=1)).tolist())
        differences = [next(found) if any(row["mask"]) else None for row in rows]
        largest = max(math.inf if math.isnan(each) else each for each in differences if each is not None)
        if largest > self._max_difference:
            raise ConfigError(
                f"The log-probabilities of sampler and trainer differ by {largest:.3g} nats on average in a row, "
                f"more than {self._max_difference:g} (max_difference): training would not use the weights or the "
                "precision that sampled the tokens. Train in float32, or raise max_difference."
            )
        return differences


def _task_id(prompt: JSON) -> str:
    found = prompt[-1].get(TASK) if isinstance(prompt, list) and prompt else None
    if not found:
        raise ConfigError(f"The prompt {str(prompt)[:100]!r} has no task id: make train_dataset with dataset(env).")
    return str(found)


def _group_rows(group: Group, count: int, filler: int) -> Iterator[dict[str, Any]]:
    """Yield `count` rows: the rows of the group's rollouts, and rows without a reward in place of missing rollouts."""
    rows = [_row(each, filler) for each in sorted(group.trajectories, key=lambda each: each.index)]
    yield from rows
    for index in range(len(rows), count):
        yield _unscored(f"{group.group_id}/{index}", filler)


def _row(trajectory: Trajectory, filler: int) -> dict[str, Any]:
    rows: list[ExportedRow] = palaestra.training_rows(trajectory) if trajectory.scored else []
    if not rows:
        return _unscored(trajectory.rollout_id, filler)
    if len(rows) > 1:
        raise ConfigError(
            f"Rollout {trajectory.rollout_id} has {len(rows)} rows ({', '.join(row.reason for row in rows)}), but TRL "
            "accepts one per rollout: disable sub-agents and compaction."
        )
    (row,) = rows
    fields = {name: getattr(row, name) for name in (*_LISTS, "reward", "rollout_id")}
    return {**fields, "official": trajectory.official_reward, "labels": [label.name for label in trajectory.labels]}


_LISTS = ("prompt_ids", "completion_ids", "mask", "logprobs")


def _unscored(rollout_id: str, filler: int) -> dict[str, Any]:
    """Return the row of an unscored rollout. Its tokens are fillers and are not trained on; TRL does not accept an
    empty row."""
    lists = dict(zip(_LISTS, ([filler], [filler], [0], [0.0]), strict=True))
    return {**lists, "reward": None, "rollout_id": rollout_id, "official": None, "labels": []}


@contextmanager
def _sampling_model(trainer: GRPOTrainer) -> Iterator[Any]:
    """Yield the trained model with its weights gathered and dropout disabled, so that it can sample in the block."""
    from trl.models import unwrap_model_for_generation

    training = trainer.model.training
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        model.eval()
        try:
            yield model
        finally:
            model.train(training)


def _closing(close: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class Closing(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: object, **__: object) -> None:
            close()

    return Closing()
