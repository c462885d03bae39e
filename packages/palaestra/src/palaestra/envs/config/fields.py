"""The settings of environments: `BaseEnvConfig` and `HermesAgentEnvConfig`.

Names and defaults are those that existing scripts and command lines use. Sizes are in the unit that the name or
description states; durations are in seconds. The settings of the model server are in `palaestra_tokens.config`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from enum import Enum
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra.tools.mcp.mcp_config import MCPServerConfig, hand_over
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.config import (
    ARGUMENT,
    COMMAND_LINE,
    DEFAULT,
    Settings,
    find_setting,
    host_path,
    nearest,
    setting,
    slot_path,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.admission import DEFAULT_STORE_BYTES
from palaestra_slots.sandbox.backends.registry import BUILTIN, backend_names, backend_words, require_read

LATER_BACKENDS = ("daytona", "slot_pool")
"""Slot backends that existing scripts name but that this version does not have. A run rejects them."""


class EvalHandlingEnum(Enum):
    """What a run does during an evaluation, with the names that existing scripts use."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


_MODIFIERS: tuple[tuple[str, str, tuple[JSON, ...]], ...] = (
    ("eval_limit_ratio", "eval_handling", (EvalHandlingEnum.LIMIT_TRAIN,)),
    ("metrics_host", "metrics_port", ()),
    ("metrics_token", "metrics_port", ()),
    ("otel_content", "otel_endpoint", ()),
    ("world_file", "world", ("replay", "fill")),
    ("world_miss", "world", ("replay", "fill")),
)
"""Settings that only change what another one does: the setting, the other one, and the values that it must have (any if
none are listed)."""

_REPLACED: Mapping[str, str] = {
    "acquire_timeout_s": "modal_acquire_timeout",
    "max_num_workers_per_node": "max_num_workers",
    "terminal_timeout": "modal_execution_timeout",
    "tool_pool_size": "slots",
}
"""Settings that another one replaces if both are set: the setting, and the other one."""

_OF_FEEDS = frozenset({
    "inference_weight", "max_batches_offpolicy", "min_batch_allocation", "rollout_server_token", "rollout_server_url",
})  # fmt: skip
_OF_EVALUATIONS = frozenset({"data_dir_to_save_evals", "eval_handling", "eval_limit_ratio", "max_eval_workers"})
_OF_TRAINING = frozenset({"eval_handling", "eval_limit_ratio", "steps_per_eval", "timings_from"})
"""Settings that only some commands read."""


DECLARED = "@environment"
"""The source of settings that a function environment itself declares."""

UNSAID = (DEFAULT, DECLARED, "config_init", "process", "evaluate")
"""Sources of settings that the user has not set."""

LIMITS = {
    "max_turns": "max_agent_turns",
    "time_limit": "worker_timeout",
    "tokens": "max_rollout_tokens",
    "system_prompt": "system_prompt",
    "temperature": "agent_temperature",
}
"""The settings that environments and tasks declare under names of their own."""


class BaseEnvConfig(Settings):
    """The settings of every environment: number and concurrency of groups, limits, and where results go."""

    ignores_unknown: ClassVar[bool] = True
    read_by_code: ClassVar[bool] = True
    """Whether code of the environment class, such as its own loop, may read any setting in any command."""
    unread: ClassVar[tuple[frozenset[str], str]] = (frozenset(), "")
    """Settings that environments of this kind do not read, and the end of the message that refuses them."""

    group_size: int = setting(4, "Rollouts per task.", ge=1)
    total_steps: int = setting(1000, "Maximum groups to process; -1 means every task once.", ge=-1)
    only_tasks: list[str] = setting(
        [], "Ids of the tasks to play, or patterns of ids such as `fix-*`, in the environment's order; empty: all."
    )
    max_num_workers: int = setting(
        -1, "Groups whose rollouts run concurrently; -1: a number that suits this machine.", ge=-1
    )
    max_token_length: int = setting(2048, "Maximum tokens that one model call may generate.", ge=1)
    data_path_to_save_groups: str | None = host_path(
        None, "A JSONL file for a copy of the groups. An existing file is kept: the new one gets a number."
    )
    data_dir_to_save_evals: str | None = host_path(None, "A folder for a copy of the results of `evaluate`.")
    include_messages: bool = setting(False, "Keep each rollout's messages in the JSONL file.")
    ensure_scores_are_not_same: bool = setting(
        True, "Leave groups with equal scores out of the training data (off for groups of one)."
    )
    worker_timeout: float = setting(
        600,
        "Time limit of one rollout in seconds, not counting waits for a slot or a failing server; 0 or less: no limit.",
        allow_inf_nan=False,
    )
    tokenizer_name: str = setting(
        "none", "Tokenizer for a token-exact server, unless --openai.tokenizer_name is set; none: the model's own."
    )
    agent: str | None = setting(
        None,
        "An agent that runs in the slot: codex, claude-code, opencode, pi, mini-swe-agent, or a command line. By "
        "default, Palaestra's own agent loop runs.",
    )
    seed: int = setting(0, "The seed of every random choice; the same seed makes the same choices.")
    max_failures: int = setting(0, "A run with more unscored rollouts than this ends with exit code 3.", ge=0)
    isolation: str = setting(
        "best", "The isolation level (see `palaestra doctor`): best, full, userns, confined, none."
    )
    require_sandbox: bool = setting(False, "Refuse isolation levels below `userns`.")
    host_ports: list[int] = setting(
        [],
        "Loopback ports of this machine that local slots with a network can reach, under the name `host.internal`.",
    )
    keep_workspaces: bool = setting(
        True, "Share prepared workspaces with other runs on this machine, if their task or environment has a cache key."
    )
    workspace_store: str | None = host_path(None, "The folder of shared workspaces; None: the user's cache folder.")
    workspace_store_bytes: int = setting(
        DEFAULT_STORE_BYTES,
        "Maximum disk space of shared workspaces in bytes; beyond it, the least recently used are deleted.",
        ge=0,
    )
    reward: Literal["official", "guarded", "strict"] = setting(
        "guarded",
        "The rule for rewards: official pays the benchmark's own verdict, guarded (the default) pays nothing for a "
        "label that is certain, and strict pays nothing for any of strict_labels.",
    )
    strict_labels: list[str] = setting(
        [], "Names of known labels for which `--env.reward strict` pays nothing; if empty, all labels."
    )
    slots: int | None = setting(
        None, "Maximum slots in use; None: as many as memory and open files allow, up to 512.", ge=1
    )
    on: str | None = setting(
        None,
        "Roll out on a cluster, one worker per node: ray or ray:HOST:PORT (extra `ray`), or processes:N of this "
        "machine; none: in this process. On a cluster, `slots` counts the slots of each node.",
    )
    save_workspaces: bool = setting(
        False,
        "Keep each rollout's sealed workspace in the run's folder, for `palaestra grade`.",
    )
    acquire_timeout_s: float = setting(30, "Seconds to wait for a free slot.", gt=0)
    infra_retries: int = setting(
        1, "Retries of a rollout whose sandbox or grader failed; then it stays unscored.", ge=0
    )
    world: Literal["record", "live", "replay", "fill"] = setting(
        "record",
        "Tools that reach outside (web, browser, …): record keeps their replies in the run's folder, live does not, "
        "replay answers from world_file only, and fill also makes calls that the file lacks and adds their replies.",
    )
    world_file: str | None = host_path(None, "The recording for replay and fill: a file, or the folder of a run.")
    world_miss: Literal["reply", "fail"] = setting(
        "reply",
        "What happens after a call that the recording lacks: with reply, the model gets an error; with fail, the "
        "rollout ends.",
    )

    short_groups: Literal["smaller", "whole"] = setting(
        "smaller",
        "What happens to a group with a rollout that an infrastructure failure ended: smaller keeps the "
        "rest, and whole replaces the rollout (at most as many times as the group has rollouts).",
    )
    max_infra_rate: float = setting(
        0.2, "Share of infrastructure failures in the last 100 rollouts that pauses the run (exit code 3).", ge=0, le=1
    )
    max_cost: float | None = setting(
        None, "The cost of tokens and slots at which the run pauses (exit code 3); needs token or slot prices.", gt=0
    )
    prompt_price: float | None = setting(None, "Price of a million prompt tokens.", ge=0)
    completion_price: float | None = setting(None, "Price of a million completion tokens.", ge=0)
    idle_limits: dict[str, float] = Field(
        default_factory=lambda: dict(IDLE_LIMITS),
        description=f"Seconds without a sign of life before a rollout is ended, by stage ({', '.join(IDLE_LIMITS)}); "
        "0: no limit.",
    )
    drain_s: float = setting(60, "Seconds that rollouts in flight get to finish after SIGTERM.", ge=0)
    timings_from: str | None = host_path(
        None,
        "The folder of an earlier run; tasks that were slow in it begin first. A resumed run uses its own timings.",
    )
    metrics_port: int | None = setting(
        None, "Serve the run's numbers as Prometheus text on this port; 0: any free port.", ge=0, le=65535
    )
    metrics_host: str = setting("127.0.0.1", "The address on which metrics_port listens.")
    metrics_token: str | None = setting(
        None,
        "The bearer token that callers of metrics_port must send; required unless metrics_host is a loopback address.",
    )
    otel_endpoint: str | None = setting(
        None, "Send OpenTelemetry spans to this collector (OTLP over HTTP, http://localhost:4318; extra `otel`)."
    )
    otel_content: bool = setting(False, "Put prompts, replies, arguments and results on the spans.")

    max_eval_workers: int = setting(
        16, "Maximum groups of an evaluation that run concurrently; unless set, as many as in a run.", ge=1
    )
    max_num_workers_per_node: int = setting(
        8, "Groups that run concurrently per model server; used if max_num_workers is not set.", ge=1
    )
    steps_per_eval: int = setting(
        100,
        "Steps between two evaluations on held-out items during a run; 0: none. `serve` counts the trainer's "
        "steps. `process` evaluates only if a user sets this, and counts finished groups.",
        ge=0,
    )
    eval_handling: EvalHandlingEnum = setting(
        EvalHandlingEnum.STOP_TRAIN,
        "What the run does during an evaluation: STOP_TRAIN begins no new group, LIMIT_TRAIN leaves eval_limit_ratio "
        "of the workers to the evaluation, and NONE changes nothing.",
    )
    eval_limit_ratio: float = setting(0.5, "The share of the workers that LIMIT_TRAIN takes from the run.", ge=0, le=1)
    inference_weight: float = setting(
        1.0, "Weight among the environments that feed the same trainer; negative: the smallest weight."
    )
    max_batches_offpolicy: int = setting(
        3, "Maximum batches in progress or waiting for the trainer; at least one is always allowed.", ge=0
    )
    min_batch_allocation: float | None = setting(None, "Minimum share of a trainer's batch, 0 to 1.", ge=0, le=1)
    use_wandb: bool = setting(
        True, "Send the run's metrics to Weights & Biases (extra `wandb`), if a user or the environment sets this."
    )
    wandb_name: str | None = setting(
        None, "The environment's name in a trainer and the run's name in trackers; None: the environment's own name."
    )
    wandb_mode: Literal["online", "offline"] | None = setting(
        None, "`online` sends metrics to Weights & Biases, `offline` stores them; None: `online` if a key is stored."
    )
    use_trackio: bool = setting(False, "Send the run's metrics to Trackio (extra `trackio`).")
    tracker_project: str | None = setting(None, "The run's project in trackers; None: the environment's name.")
    rollout_server_url: str = setting("http://localhost:8000", "The trainer's trajectory server, which `serve` feeds.")
    rollout_server_token: str | None = setting(None, "The token of the trajectory server, if it requires one.")
    allow_placeholder_tokens: bool = setting(
        False,
        "Let `serve` send groups without sampled tokens, which train nothing, and let managed_server() of a chat "
        "server make them.",
    )
    num_rollouts_to_keep: int = setting(32, "Number of groups whose rollouts trackers can show.", ge=1)
    num_rollouts_per_group_for_logging: int = setting(1, "Rollouts to show per group; -1: all.", ge=-1)
    min_items_sent_before_logging: int = setting(
        2, "Finished groups between two logs of the metrics; 0 or less: a log after every group."
    )
    thinking_mode: bool = setting(False, "Ask the agent, in its system message, to think inside <think> tags.")
    reasoning_effort: str | None = setting(None, "The value of reasoning_effort in every request of an agent.")
    max_reasoning_tokens: int | None = setting(
        None, "The value of reasoning.max_tokens, which OpenRouter reads, in every request of an agent.", gt=0
    )
    custom_thinking_prompt: str | None = setting(
        None, "The text before the system message, in place of thinking_mode's text."
    )

    @field_validator("only_tasks", mode="before")
    @classmethod
    def _tasks_are_a_list(cls, tasks: JSON) -> JSON:
        return [each.strip() for each in tasks.split(",") if each.strip()] if isinstance(tasks, str) else tasks

    @field_validator("data_path_to_save_groups")
    @classmethod
    def _groups_are_no_page(cls, path: str | None) -> str | None:
        if path is not None and path.endswith(".html"):
            raise ConfigError("the .html file next to the groups is the copy of the report; specify a .jsonl file")
        return path

    @field_validator("otel_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError("must be a URL of OTLP over HTTP, for example http://localhost:4318")
        return endpoint

    @field_validator("rollout_server_url")
    @classmethod
    def _trainer_has_an_address(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError("must be the address of a trajectory server, for example http://localhost:8000")
        return url

    @field_validator("idle_limits")
    @classmethod
    def _limits_of_stages(cls, limits: dict[str, float]) -> dict[str, float]:
        """Keep the defaults of stages that are not set."""
        for stage, seconds in limits.items():
            if stage not in IDLE_LIMITS:
                raise ConfigError(f"unknown stage {stage!r}; known stages are {', '.join(IDLE_LIMITS)}")
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"the limit of {stage} must be a number of seconds, or 0 for no limit")
        return {**IDLE_LIMITS, **limits}

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> Self:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ConfigError("set both prompt_price and completion_price, per million tokens, or neither")
        if self.max_cost is not None and not self._has_prices():
            raise ConfigError("max_cost needs prompt_price and completion_price, per million tokens, or slot_prices")
        return self

    def _has_prices(self) -> bool:
        return self.prompt_price is not None

    @model_validator(mode="after")
    def _a_recording_to_replay(self) -> Self:
        if self.world in ("replay", "fill") and not self.world_file:
            raise ConfigError(f"world {self.world} needs world_file: a recording, or the folder of a run that has one")
        return self

    @model_validator(mode="after")
    def _a_group_of_one_is_kept(self) -> Self:
        """By default, keep groups of one although their scores are always equal."""
        if self.group_size == 1 and "ensure_scores_are_not_same" not in self.model_fields_set:
            # Not an assignment, so that the field counts as unset and gets True if a later layer sets a larger
            # group_size.
            self.__dict__["ensure_scores_are_not_same"] = False
        return self

    @property
    def on_cluster(self) -> bool:
        """Whether the rollouts run on a cluster. `on` is `none` for a resumed run that was on one."""
        return self.on not in (None, "none")

    def evaluation_workers(self, workers: int) -> int:
        """Return the number of groups that an evaluation runs concurrently: as many as the run, which is `workers`, or
        `max_eval_workers` if that is set and smaller."""
        return min(workers, self.max_eval_workers) if "max_eval_workers" in self.model_fields_set else workers

    def check_runnable(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise `ConfigError` for settings with which no run can start. Called after all sources are merged, because a
        flag or a file may replace what a script sets. `sources` maps `env.FIELD` to the source of its value."""
        if self.strict_labels and self.reward != "strict":
            raise ConfigError(f"strict_labels has no effect with reward {self.reward}; set reward strict too")
        given = self._given_for_this_run(sources or {})
        # A setting that cannot have an effect is often a misspelled wish, so it is refused and not ignored.
        for name, base, values in _MODIFIERS:
            value = getattr(self, base)
            if name in given and (value not in values if values else value is None):
                known = " ".join((base, " or ".join(str(getattr(each, "value", each)) for each in values))).rstrip()
                raise ConfigError(f"{name} has no effect without {known}; set that too, or leave {name} out")
        for name, other in _REPLACED.items():
            if name in given and other in given:
                raise ConfigError(f"{name} has no effect next to {other}: set one of them")

    def check_command(self, command: str, sources: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a flag or an argument that this command (process, evaluate or serve) does not
        read."""
        if self.read_by_code:
            return
        unread = [self.unread]
        if command != "serve":
            unread.append((_OF_FEEDS, "unless a trainer is fed: use palaestra feed, or leave it out"))
        if command == "evaluate":
            unread.append((_OF_TRAINING, "in an evaluation: leave it out"))
        elif command == "process" and sources.get("env.steps_per_eval", DEFAULT) in UNSAID:
            unread.append(
                (_OF_EVALUATIONS, "without an evaluation during the run: set steps_per_eval, or leave it out")
            )
        for names, why in unread:
            self.refuse_given(names, why, sources)

    def refuse_given(self, names: Collection[str], why: str, sources: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a flag or an argument in `names`, which has no effect, with the reason `why`."""
        for name in self._given_for_this_run(sources):
            if name in names:
                raise ConfigError(f"{name} has no effect {why}")

    def _given_for_this_run(self, sources: Mapping[str, str]) -> list[str]:
        """Return the settings to which flags or arguments give a value other than the default. Files and variables do
        not count, because they may contain settings of several backends and commands."""
        given = (key.partition(".") for key, source in sources.items() if source in (COMMAND_LINE, ARGUMENT))
        said = ((name, find_setting(type(self), name)) for group, _, name in given if group == "env")
        return [
            name
            for name, field in said
            if field is not None and getattr(self, name) != field.get_default(call_default_factory=True)
        ]

    @field_validator("isolation")
    @classmethod
    def _isolation_is_a_level(cls, isolation: str) -> str:
        levels = ("best", "full", "userns", "confined", "none")
        if isolation not in levels:
            raise ConfigError(f"not one of {', '.join(levels)}")
        return isolation


class HermesAgentEnvConfig(BaseEnvConfig, ToolSettings):
    """Settings of environments whose agent uses tools: tools, limits of the agent, slots, and the data set."""

    parts: ClassVar[tuple[str, ...]] = (*ToolSettings.parts, "palaestra.backend_settings")

    enabled_toolsets: list[str] | None = setting(
        None, "The agent's toolsets, for example `terminal file`; None means all that work on this machine."
    )
    disabled_toolsets: list[str] | None = setting(None, "Toolsets to withhold from the agent.")
    distribution: str | None = setting(
        None, "A distribution from which each group's toolsets are drawn. Cannot be combined with enabled_toolsets."
    )
    strict_tools: bool = setting(False, "Refuse to run without a requested tool, instead of leaving it out.")
    mcp_servers: dict[str, MCPServerConfig] = setting(
        {}, "MCP servers by name. Each is a toolset mcp-NAME for every agent. --mcp FILE reads a file's mcpServers."
    )
    max_agent_turns: int = setting(30, "Maximum model calls per rollout.", ge=1)
    max_rollout_tokens: int | None = setting(
        None, "Maximum tokens that one rollout may read and write in all its model calls.", gt=0
    )
    max_rollout_completion_tokens: int | None = setting(None, "Maximum tokens that one rollout may write.", gt=0)
    max_rollout_output_bytes: int | None = setting(
        None, "Maximum bytes of tool results that one rollout may read.", gt=0
    )
    max_rollout_cost: float | None = setting(
        None, "The cost limit of one rollout; needs prompt_price and completion_price.", gt=0
    )
    system_prompt: str | None = setting(None, "The system message; it need not name the tools.")
    agent_temperature: float = setting(1.0, "Sampling temperature of rollouts.", ge=0)
    extra_body: dict[str, JSON] | None = setting(
        None, "Additional fields of every model request, as the provider defines them."
    )

    tool_call_parser: str = setting(
        "hermes", "The format of a token-exact model's tool calls, unless --openai.tool_parser is set."
    )

    tool_pool_mode: str = setting(
        "default",
        "The backend of the slots: local, docker, singularity, ssh, slurm, nomad, kubernetes, modal, a backend of "
        "another package, or `default` for terminal_backend.",
    )
    terminal_backend: str = setting("local", "The backend that `default` stands for.")
    creates_per_s: float | None = setting(
        None, "Maximum containers or sandboxes that all your runs on this machine start per second.", gt=0
    )
    max_starting: int | None = setting(
        None, "Maximum containers or sandboxes that all your runs on this machine start concurrently.", ge=1
    )
    slot_prices: dict[str, float] = setting(
        {}, "Price of an hour of a container or sandbox, by backend, for the report and max_cost, such as modal=0.14."
    )
    drain_file: str | None = host_path(
        None, "A file with named hosts that get no new slots, separated by white space. It may change during the run."
    )
    backend_options: dict[str, JSON] = setting({}, "Settings of a backend from another package, NAME: VALUE.")
    tool_pool_size: int = setting(
        128, "The name of `slots` in existing scripts; has no effect unless it is set and `slots` is not.", ge=1
    )
    terminal_timeout: int = setting(120, "Time limit of a command in seconds, unless the call sets one.", ge=1)
    allow_network: bool = setting(True, "Whether the agent's commands can reach the network.")
    freeze_slots: bool = setting(False, "Stop the processes in a rollout's slot while the model thinks.")
    grading: Literal["sealed", "live"] | None = setting(
        None,
        "live: score in the agent's own slot, with its processes, programs and network. sealed: score a sealed copy of "
        "the agent's files, without its processes. None: live for class environments, sealed for the built-in suites.",
    )
    graded_paths: list[str] = setting(
        [],
        "Paths that sealed grading shows as the agent left them, in addition to /workspace and temporary directories. "
        "`~` is the home in the sandbox, /root.",
    )
    graded_programs: list[str] = setting(
        [], "Names of programs below graded_paths that an agent may install or replace."
    )
    live: bool | None = setting(None, "true is short for `grading: live`, false for `grading: sealed`.")
    share_setup: bool = setting(
        False, "Run setup_trajectory_workspace once per group, and fork its result for each rollout."
    )

    dataset_name: str | None = host_path(None, "The data set: a JSONL or Parquet file, or a name.")
    dataset_split: str = setting("train", "The split of a named data set.")
    prompt_field: str = setting("prompt", "The column that holds the prompt.")

    def _check_prices(self) -> None:
        paid = {name for name in backend_words(self.slot_backend) if name != "local"}
        if unused := set(self.slot_prices) - paid:
            where = f"the slots are in {self.slot_backend}" if paid else "slots on this machine have no price"
            raise ConfigError(f"slot_prices has a price of {min(unused)}, but {where}: leave it out")

    @field_validator("graded_paths")
    @classmethod
    def _graded_paths_are_in_the_slot(cls, paths: list[str]) -> list[str]:
        return [slot_path(path) for path in paths]

    @field_validator("distribution")
    @classmethod
    def _distribution_is_known(cls, name: str | None) -> str | None:
        if name is not None:
            # Imported here, because few settings name one.
            from palaestra.tools.registry.distributions import find_distribution

            find_distribution(name)
        return name

    def _has_prices(self) -> bool:
        return bool(self.slot_prices) or super()._has_prices()

    @model_validator(mode="after")
    def _live_is_a_grading(self) -> Self:
        if self.live is not None:
            wanted = "live" if self.live else "sealed"
            if "grading" in self.model_fields_set and self.grading != wanted:
                raise ConfigError(f"live {str(self.live).lower()} contradicts grading {self.grading}: set one of them")
            self.__dict__["grading"] = wanted  # not an assignment, so that a later layer may still set it
        return self

    def take_variables(self, environ: Mapping[str, str]) -> None:
        """Pass on the environment variables that the settings of MCP servers name. Raises `ConfigError` if one of these
        variables is not set."""
        if self.mcp_servers:
            hand_over(environ, self.mcp_servers)

    @model_validator(mode="after")
    def _rollout_cost_needs_prices(self) -> Self:
        if self.max_rollout_cost is not None and self.prompt_price is None:
            raise ConfigError("max_rollout_cost needs prompt_price and completion_price, per million tokens")
        return self

    @model_validator(mode="after")
    def _one_source_of_toolsets(self) -> Self:
        if self.distribution and self.enabled_toolsets and "enabled_toolsets" in self.model_fields_set:
            raise ConfigError(
                "set either enabled_toolsets or distribution, not both (--env.enabled_toolsets null drops a list that "
                "the script sets)"
            )
        return self

    @property
    def modal_wait_s(self) -> float:
        """Seconds to wait for a slot of Modal: `modal_acquire_timeout`, unless only `acquire_timeout_s` is set."""
        only_general = (
            "acquire_timeout_s" in self.model_fields_set and "modal_acquire_timeout" not in self.model_fields_set
        )
        return self.acquire_timeout_s if only_general else float(getattr(self, "modal_acquire_timeout", 0))

    @property
    def slot_backend(self) -> str:
        """The backend that provides the slots. Its name is not checked before `check_runnable`."""
        return str(getattr(self, self._slot_setting))

    @property
    def _slot_setting(self) -> str:
        """The setting that names the backend."""
        return "terminal_backend" if self.tool_pool_mode == "default" else "tool_pool_mode"

    def check_runnable(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise `ConfigError` for a slot backend that this version does not have, and for a flag or an argument that
        the backend does not read. `sources` maps `env.FIELD` to the source of its value."""
        super().check_runnable(sources)
        # Only if somebody asked for this run: the default, or a line in a shared file, need not fit every level.
        said = (sources or {}).get("env.allow_network") in (COMMAND_LINE, ARGUMENT)
        if said and not self.allow_network and self.isolation == "none":
            raise ConfigError(
                "allow_network false has no effect with isolation none: request another level, or no level"
            )
        name = self._slot_setting
        unknown = [each for each in backend_words(self.slot_backend) if each not in BUILTIN]
        # Entry points are searched only for a name that is not ours, because the search reads every installed package.
        known = backend_names() if unknown else tuple(BUILTIN)
        value = next((each for each in unknown if each not in known), None)
        if value is None:
            require_read(self.slot_backend, self._given_for_this_run(sources or {}), self)
            if "slot_prices" in self._given_for_this_run(sources or {}):
                self._check_prices()
            return
        source = (sources or {}).get(f"env.{name}")
        what = "is not available in this version" if value in LATER_BACKENDS else "is unknown"
        raise ConfigError(
            f"{name} {value!r}{f' (from {source})' if source else ''} {what}.{nearest(value, known)} "
            f"Available: {', '.join(known)}. Set --env.{name} local"
        )


def limit_value(config: BaseEnvConfig, name: str, value: JSON) -> JSON:
    """Return a limit that an environment or a task declares as the settings hold it: "5" becomes 5. Raises
    `ConfigError`."""
    checked = config.model_copy()
    try:
        type(checked).__pydantic_validator__.validate_assignment(checked, LIMITS[name], value)
    except ValidationError as error:
        raise ConfigError(f"{name}={value!r:.100}: {error.errors()[0]['msg']}") from None
    return getattr(checked, LIMITS[name])


class HeldOutConfig(HermesAgentEnvConfig):
    """Settings of environments whose tasks have fixed ids. Only a task's id and the seed decide whether the task is
    held out, on every machine and independently of the rest of the data set."""

    read_by_code: ClassVar[bool] = False
    held_out: float = setting(
        0.0,
        "Share of the tasks, drawn with the seed, that only `evaluate` gets; 0: all commands get all tasks.",
        ge=0,
        lt=1,
    )

    def is_held_out(self, task_id: str) -> bool:
        """Return whether the task is held out, so that only `evaluate` uses it."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.held_out * 2**64

    def serves(self, task_id: str, *, evaluating: bool) -> bool:
        """Return whether `evaluate` or, if not `evaluating`, the other commands use the task. If no tasks are held out,
        all commands use all tasks."""
        return self.held_out == 0 or self.is_held_out(task_id) == evaluating


class ListedEnvConfig(HeldOutConfig):
    """Settings of environments with listed items."""

    dataset_fields: dict[str, str] = setting({}, "Columns to use for fields, as FIELD=COLUMN, such as prompt=question.")
