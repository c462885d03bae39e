"""The environment of `palaestra batch`: every row of a file is a prompt, and no answer is graded.

A sample that meets `require` scores 1. A sample that does not is discarded: it scores 0, and its record has the reason.
A task's id contains the number of its row, so that equal prompts in several rows are separate samples. It also contains
a hash of the row, so that a resumed batch detects a changed file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar, Literal

from palaestra.envs.config.build import agent_settings, kit, mcp_servers, network_policy
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.datasets import read_rows
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, Logged
from palaestra.rollouts.environment import GroupCollection
from palaestra.rollouts.export.batch import has_reasoning
from palaestra.rollouts.export.chat_messages import chat_messages
from palaestra.rollouts.export.duplicates import REPEATED, Duplicates
from palaestra.rollouts.export.exporter import DISCARDED
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import AgentSettings
from palaestra.tools.registry.registry import Kit
from palaestra_chat.batch.batch_files import write_batch_files
from palaestra_chat.batch.json_schema import JsonSchema
from palaestra_chat.batch.judge import Judge
from palaestra_slots.core.config import host_path, local_path, setting
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import JSON, Message, Outcome, Score, Task
from palaestra_slots.sandbox.images.reference import is_image_name, is_path
from palaestra_slots.sandbox.slot import WORKSPACE
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.server_group import ServerGroup

Requirement = Literal["reasoning", "natural", "known_tools", "tool_calls"]

REQUIREMENTS: Mapping[str, tuple[str, Callable[[Rollout], bool]]] = {
    "reasoning": ("no reply has any reasoning", lambda rollout: _reasons(rollout)),
    "natural": ("the agent did not finish on its own", lambda rollout: rollout.ending.outcome is Outcome.NATURAL),
    "known_tools": ("the agent called an unknown tool", lambda rollout: not unknown_tools(rollout)),
    "tool_calls": ("the agent called no tool", lambda rollout: any(turn.tool_names for turn in _turns(rollout))),
}
"""The conditions that `require` can name, each with the reason recorded for a discarded sample, and the test."""

NOT_JUDGED_GOOD = "the judge says that it does not meet the criterion"


_OF_CHECKS = frozenset({"graded_paths", "graded_programs", "grading", "live", "share_setup", "steps_per_eval"})


class BatchConfig(HermesAgentEnvConfig):
    """The settings of a batch: the common settings of agents, and the file of prompts."""

    read_by_code: ClassVar[bool] = False
    group_size: int = setting(1, "Samples per row.", ge=1)
    total_steps: int = setting(-1, "Maximum number of rows; -1: all.", ge=-1)
    max_num_workers: int = setting(64, "Maximum number of rows in progress concurrently.", ge=1)
    max_agent_turns: int = setting(10, "Maximum model calls per sample.", ge=1)
    include_messages: bool = setting(False, "Also keep the messages in groups.jsonl.")
    dataset_name: str | None = setting(None, "The file of prompts, or the name of a data set on the Hugging Face Hub.")
    batch_size: int = setting(100, "Number of rows per file batch_N.jsonl.", ge=1)
    require: list[Requirement] = setting(
        [],
        f"Discard samples that lack one of these: {', '.join(REQUIREMENTS)}. Discarded samples are not sampled again.",
    )
    tries: int = setting(
        1, "Sample a row again until a sample is kept, at most this many times. The others stay recorded.", ge=1
    )
    schema_file: str | None = host_path(
        None, "A file with a JSON schema. Discard samples whose last reply is not JSON that fits it."
    )
    judge: str | None = setting(
        None, "A criterion in words. A model judges each sample that meets the other conditions by it."
    )
    judge_model: str | None = setting(None, "The judge's model. Default: the batch's own model.")
    judge_base_url: str | None = setting(None, "The address of the judge's server. Default: the batch's own server.")
    judge_api_key: str | None = setting(None, "The API key of the judge's server. Default: the one of the batch.")
    unique: float | None = setting(
        None,
        "Discard samples whose conversation repeats an earlier row's: 1 if equal, 0.8 if about four fifths of it are.",
        gt=0,
        le=1,
    )
    lean: bool = setting(False, "Write neither the tools' schemas (they are in tools.json) nor counts of 0 in lines.")
    prefill_messages_file: str | None = host_path(
        None, "A file with a JSON list of messages to put before every prompt."
    )
    ephemeral_system_prompt: str | None = setting(None, "A system message that the written conversations leave out.")
    reasoning_disabled: bool = setting(False, "Ask the server not to reason.")
    providers_allowed: list[str] = setting([], "OpenRouter: only these providers.")
    providers_ignored: list[str] = setting([], "OpenRouter: none of these providers.")
    providers_order: list[str] = setting([], "OpenRouter: providers in the order in which they are tried.")
    provider_sort: str | None = setting(None, "OpenRouter: sort providers by price, throughput or latency.")

    def check_runnable(self, sources: Mapping[str, str] | None = None) -> None:
        super().check_runnable(sources)
        self.refuse_given(_OF_CHECKS, "in a batch, which only collects conversations: leave it out", sources or {})
        if not self.dataset_name:
            raise ConfigError("specify the file of prompts: palaestra batch FILE, or --env.dataset_name FILE")
        if self.system_prompt and self.ephemeral_system_prompt:
            raise ConfigError("set either system_prompt or ephemeral_system_prompt, not both")
        if self.reasoning_disabled and (self.reasoning_effort or self.max_reasoning_tokens):
            raise ConfigError("set either reasoning_disabled, or reasoning_effort and max_reasoning_tokens, not both")
        if not self.judge and (self.judge_model or self.judge_base_url or self.judge_api_key):
            raise ConfigError("a judge needs a criterion: --judge 'The answer is right and names its source.'")
        if self.unique is not None:
            Duplicates(self.unique)  # raises `ConfigError` without the package that it needs


class BatchForm:
    """The form of the batch environment, from which a command line builds and runs it."""

    name = "batch"
    reference = "batch"
    command = "process"
    about = "Run an agent over a file of prompts."

    def config_type(self) -> type[BatchConfig]:
        return BatchConfig

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return None, ()

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer) -> BatchEnvironment:
        assert isinstance(config, BatchConfig)
        return BatchEnvironment(config, servers)


batch = BatchForm()


class BatchEnvironment(EvaluatedEnvironment):
    """One task per row of the file."""

    name = BatchForm.name
    score_name = "kept"

    def __init__(self, config: BatchConfig, servers: Sequence[APIServerConfig] = ()) -> None:
        """Raises `ConfigError` if `prefill_messages_file`, `schema_file` or the judge's server cannot be used."""
        self.config = config
        self._prefill = _read_messages(config.prefill_messages_file) if config.prefill_messages_file else []
        self._schema = _read_schema(config.schema_file) if config.schema_file else None
        self._judge = Judge(config.judge, ServerGroup(_judge_settings(config, servers))) if config.judge else None
        self._mcp = mcp_servers(config)
        # Without `tries` the files alone leave duplicates out, by the order of the rows.
        self._kept = Duplicates(config.unique) if config.unique is not None and self.collects_groups else None

    @property
    def agent(self) -> AgentSettings:
        config = self.config
        settings = agent_settings(config)
        body = dict(settings.extra_body or {})
        if config.reasoning_disabled:
            body["reasoning"] = {"enabled": False}
        provider = {
            "only": config.providers_allowed,
            "ignore": config.providers_ignored,
            "order": config.providers_order,
            "sort": config.provider_sort,
        }
        if any(provider.values()):
            body["provider"] = {name: value for name, value in provider.items() if value}
        return replace(
            settings,
            system_prompt=settings.system_prompt or config.ephemeral_system_prompt,
            extra_body=body or None,
        )

    async def open(self) -> None:
        if self._mcp is not None:
            await self._mcp.open()
        if self._judge is not None:
            await self._judge.start()
        self.kit(Task(id="", prompt=""), random.Random(0))  # report wrong settings and files before a run begins
        if await anext(self.tasks(), None) is None:
            raise ConfigError(f"{self.config.dataset_name} has no rows")

    async def aclose(self) -> None:
        if self._mcp is not None:
            await self._mcp.aclose()
        if self._judge is not None:
            await self._judge.aclose()

    async def tasks(self) -> AsyncIterator[Task]:
        config = self.config
        assert config.dataset_name is not None
        for number, row in read_rows(config.dataset_name, split=config.dataset_split):
            yield self._task(number - 1, row)

    def _task(self, index: int, row: Mapping[str, JSON] | TaskError) -> Task:
        """Return the task of a row. The task of a bad row fails when it starts, so that the other tasks keep
        their numbers."""
        if isinstance(row, TaskError):
            return Task(id=f"{index}-unreadable", prompt="", data=row)
        digest = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:8]
        made = Task(id=f"{index}-{digest}", prompt="")
        try:
            prompt, image = _row_messages(row, self.config.prompt_field), self._image(row)
        except TaskError as problem:
            return replace(made, data=problem)
        cwd = row.get("cwd")
        return replace(
            made,
            prompt=[*self._prefill, *prompt],
            image=image,
            setup=_start_in(str(cwd)) if cwd else None,
            network=network_policy(self.config.allow_network),
        )

    def _image(self, row: Mapping[str, JSON]) -> str | None:
        """Return the row's image: a name, or a path below the folder of the rows. Raises `TaskError`."""
        image = str(row.get("image") or row.get("docker_image") or "")
        if not image or (is_image_name(image) and not is_path(image)):
            return image or None
        assert self.config.dataset_name is not None
        source = local_path(self.config.dataset_name).resolve()
        folder = source if source.is_dir() else source.parent
        if (
            source.exists()
            and is_path(image)
            and "\0" not in image
            and (place := (folder / image).resolve()).is_relative_to(folder)
        ):
            if not place.exists():
                raise TaskError(f"its image {image[:200]!r} does not exist in the folder of the rows, {folder}")
            return str(place)
        raise TaskError(
            f"its image {image[:200]!r} is neither the name of an image nor a path in the folder of the rows, "
            f"{folder}. Copy the image there and name it with ./, because rows cannot name other files of this machine"
        )

    def changed(self, number: int, was: str, now: str) -> str:
        return f"row {number} of {self.config.dataset_name}, counted from 0, has changed since the batch began"

    async def resolve(self, task: Task) -> Task:
        if isinstance(task.data, TaskError):
            raise task.data
        return task

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return kit(self.config, None, rng, (), self._mcp, self.shared)

    @property
    def collects_groups(self) -> bool:
        return self.config.tries > 1

    async def collect(self, task: Task, group: GroupCollection) -> int:
        """Play every sample until one is kept, at most `tries` times."""
        if not self.collects_groups:
            return group.wanted
        return sum(await asyncio.gather(*(self._sample(group.play) for _ in range(group.wanted))))

    async def _sample(self, play: Callable[[], Awaitable[Rollout]]) -> int:
        """Return how many times a sample was played. One without a score, whose server failed, is not played again."""
        for played in range(1, self.config.tries):
            score = (await play()).score
            if score is None or score.reward > 0:
                return played
        await play()
        return self.config.tries

    async def grade(self, rollout: Rollout) -> Score:
        lacking = [REQUIREMENTS[name][0] for name in self.config.require if not REQUIREMENTS[name][1](rollout)]
        detail: dict[str, JSON] = {}
        if self._schema is not None and (why := self._schema.problem(rollout.final_response)):
            lacking.append(why)
        if self._judge is not None and not lacking:
            verdict = await self._judge.verdict(rollout.messages)
            detail["judge"] = asdict(verdict)
            lacking += [] if verdict.meets else [NOT_JUDGED_GOOD]
        if self._kept is not None and not lacking:
            earlier = self._kept.repeats(rollout.rollout_id, rollout.messages)
            lacking += [REPEATED] if earlier not in ("", rollout.rollout_id) else []
        if lacking:
            detail[DISCARDED] = lacking
        if unknown := unknown_tools(rollout):
            detail["unknown_tools"] = unknown
        return Score(0.0 if lacking else 1.0, {}, detail)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return await self.grade(rollout)

    def write_files(self, folder: Path) -> Sequence[str]:
        report = write_batch_files(folder)
        lines = [f"samples {report.kept} kept, {sum(report.discarded.values())} discarded: {folder}/trajectories.jsonl"]
        lines += [f"discarded {count}: {reason}" for reason, count in report.discarded.most_common()]
        if report.without_reasoning and report.turns_with_reasoning:
            lines.append(
                f"{report.without_reasoning} kept samples have no reasoning; --require reasoning discards them"
            )
        return lines

    async def evaluate(self, evaluation: Evaluation) -> Logged:
        raise ConfigError("a batch has nothing to evaluate: run an environment with palaestra eval")


def _start_in(cwd: str) -> str:
    """Return a script that makes this directory the working directory of the agent's commands and relative paths."""
    path = shlex.quote(cwd)
    linked = f"cd / && rm -rf {WORKSPACE} && ln -s {path} {WORKSPACE}"
    return f"mkdir -p {path} || exit\n[ {path} -ef {WORKSPACE} ] || {{ {linked}; }}"


def _row_messages(row: Mapping[str, JSON], field: str) -> list[Message]:
    """Return the messages of a row's prompt, which is a string or a list of messages. Raises `TaskError`."""
    given = row.get(field)
    if isinstance(given, str) and given.strip():
        return [{"role": "user", "content": given}]
    if isinstance(given, list) and given and all(isinstance(each, dict) and each.get("role") for each in given):
        return [dict(each) for each in given]
    if field not in row:
        named = ", ".join(map(repr, row)) or "none"
        raise TaskError(f"it has no column {field!r} for the prompt (--prompt-field); its columns are: {named}")
    empty = "empty" if given in ("", [], None) else f"of the type {type(given).__name__}"
    raise TaskError(f"its column {field!r} is {empty}; it must be a string or a list of messages with roles")


def _read_messages(path: str) -> list[Message]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"prefill_messages_file {path} cannot be read: {problem}") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) and each.get("role") for each in value):
        raise ConfigError(f"prefill_messages_file {path} must hold a list of messages, each with a role")
    return value


def _judge_settings(config: BatchConfig, servers: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """Return the settings of the judge's server: its own, or those of the batch's servers with the judge's model.
    Raises `ConfigError` if there is no such server."""
    if config.judge_base_url:
        if not config.judge_model:
            raise ConfigError("name the model at the judge's server: --judge-model NAME")
        return [
            APIServerConfig(base_url=config.judge_base_url, model_name=config.judge_model, api_key=config.judge_api_key)
        ]
    own = [each for each in servers if each.server_type != "scripted"]
    if not own:
        raise ConfigError("a judge needs a model server: --judge-base-url http://HOST/v1 --judge-model NAME")
    changes = {"model_name": config.judge_model, "api_key": config.judge_api_key}
    return [each.model_copy(update={name: value for name, value in changes.items() if value}) for each in own]


def _read_schema(path: str) -> JsonSchema:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"schema_file {path} cannot be read: {problem}") from None
    return JsonSchema(value, path)


def _turns(rollout: Rollout) -> Sequence[JSON]:
    return rollout.result.turns if rollout.result is not None else ()


def _reasons(rollout: Rollout) -> bool:
    return any(has_reasoning(each) for each in chat_messages(rollout.messages) if each.role == "assistant")


def unknown_tools(rollout: Rollout) -> list[str]:
    """Return the tools that the agent called but does not have."""
    known = set(rollout.seat.kit.names)
    return sorted({name for turn in _turns(rollout) for name in turn.tool_names if name not in known})
