"""What an environment can be told: `BaseEnvConfig` and `HermesAgentEnvConfig`.

The fields and defaults are those that existing environment scripts and command lines use; a field of ours says why it
is there. A field that is accepted for their sake and changes nothing in this version is declared with `later`, and its
help says so. Not for: whom the agent asks, which is `palaestra.inference.config`.

Sizes are tokens where a name says tokens, else megabytes where the contract says so; durations are seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from palaestra.core.config import Settings, later
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.rollouts.watchdog import IDLE_LIMITS
from palaestra.sandbox.snapshots.folder import DEFAULT_MAX_BYTES
from palaestra.tools.mcp.mcp_config import MCPServerConfig, hand_over
from palaestra.tools.registry.distributions import find_distribution
from palaestra.tools.settings import ToolSettings

AVAILABLE_POOL_MODES = ("default", "local")
"""Where slots can come from in this version."""


class EvalHandlingEnum(Enum):
    """What training does while an evaluation runs. The name and the values are the contract's."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(Settings):
    """What every environment has: how many groups, how many at once, and where the results go."""

    group_size: int = Field(default=4, ge=1, description="Rollouts per task.")
    total_steps: int = Field(default=1000, ge=-1, description="Groups to process, at most; -1 means every task once.")
    max_num_workers: int = Field(default=-1, ge=-1, description="Groups in flight at once; -1 suits this machine.")
    max_token_length: int = Field(default=2048, ge=1, description="Most tokens that one model call may generate.")
    data_path_to_save_groups: str | None = Field(
        default=None, description="The JSONL file of the groups; a number is added rather than overwrite one."
    )
    data_dir_to_save_evals: str | None = Field(default=None, description="The folder that `evaluate` writes into.")
    include_messages: bool = Field(default=False, description="Keep each rollout's messages in the JSONL file.")
    ensure_scores_are_not_same: bool = Field(
        default=True,
        description="Leave groups of equal scores out of training data (off for groups of one).",
    )
    worker_timeout: float = Field(
        default=600,
        allow_inf_nan=False,
        description="Seconds of one rollout, without its waits for a slot or a failing server; 0 or less: no limit.",
    )
    tokenizer_name: str = Field(
        default="none",
        description="Tokenizer of a token-exact server, where --openai.tokenizer_name does not say; none: the model's.",
    )
    seed: int = Field(default=0, description="The seed of every random choice; equal seeds give equal runs.")
    max_failures: int = Field(
        default=0, ge=0, description="Unscored rollouts that a run may end with before its exit code becomes 3."
    )
    isolation: str = Field(
        default="best",
        description="Which rung of the ladder (see `palaestra doctor`): best, full, userns, confined, none.",
    )
    require_sandbox: bool = Field(default=False, description="Refuse to run below the `userns` rung.")
    keep_workspaces: bool = Field(
        default=True,
        description="Share prepared workspaces with other runs on this machine, where a task or environment declares "
        "what they are made from (its recipe); the others are prepared in every run.",
    )
    workspace_store: str | None = Field(
        default=None, description="The folder that keeps them; None: the user's own on this machine."
    )
    workspace_store_bytes: int = Field(
        default=DEFAULT_MAX_BYTES,
        ge=0,
        description="Bytes that they may take on disk; more, and those unused for longest go.",
    )
    acquire_timeout_s: float = Field(default=30, gt=0, description="Seconds to wait for a free slot.")
    infra_retries: int = Field(
        default=1, ge=0, description="Fresh attempts at a rollout that the world broke, before it stays unscored."
    )
    world: Literal["record", "live", "replay", "fill"] = Field(
        default="record",
        description="Tools that touch the world (web, browser, …): record keeps their replies in the run's folder, "
        "live does not, replay answers from world_file and asks nobody, fill asks for what is not in it and adds it.",
    )
    world_file: str | None = Field(
        default=None, description="The recording for replay and fill: a file, or the folder of a run."
    )
    world_miss: Literal["reply", "fail"] = Field(
        default="reply",
        description="A call that the replayed recording lacks: an error that the model reads, or the rollout's end, "
        "unscored.",
    )

    short_groups: Literal["smaller", "whole"] = Field(
        default="smaller",
        description="Groups that the world broke a rollout of: stay smaller, or are made whole by replacement (at most "
        "as many attempts more as a group has rollouts).",
    )
    max_infra_rate: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of the last 100 rollouts that the world may break before the run pauses (exit code 3).",
    )
    max_cost: float | None = Field(
        default=None, gt=0, description="The cost at which the run pauses (exit code 3); needs the two prices."
    )
    prompt_price: float | None = Field(default=None, ge=0, description="Price of a million prompt tokens.")
    completion_price: float | None = Field(default=None, ge=0, description="Price of a million completion tokens.")
    idle_limits: dict[str, float] = Field(
        default_factory=lambda: dict(IDLE_LIMITS),
        description=f"Seconds without a sign of life before a rollout is ended, by stage ({', '.join(IDLE_LIMITS)}); "
        "0: no limit.",
    )
    drain_s: float = Field(
        default=60, ge=0, description="Seconds that rollouts in flight have to finish after SIGTERM."
    )
    timings_from: str | None = Field(
        default=None,
        description="An earlier run's folder: tasks that were slow there begin first. A resumed run has its own.",
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Serve the run's numbers as Prometheus text on this port; 0: any."
    )
    metrics_host: str = Field(default="127.0.0.1", description="The address on which metrics_port listens.")
    otel_endpoint: str | None = Field(
        default=None,
        description="Send OpenTelemetry spans to this collector (OTLP over HTTP, http://localhost:4318; extra `otel`).",
    )
    otel_content: bool = Field(
        default=False, description="Put prompts, replies, arguments and results on the spans; off, they hold no text."
    )

    max_eval_workers: int = later(16, "Evaluation rollouts in flight at once.")
    max_num_workers_per_node: int = later(8, "Groups in flight per model server.")
    steps_per_eval: int = later(100, "Training steps between evaluations.")
    eval_handling: EvalHandlingEnum = later(EvalHandlingEnum.STOP_TRAIN, "What training does during an evaluation.")
    eval_limit_ratio: float = later(0.5, "Share of the workers an evaluation may take.")
    inference_weight: float = Field(
        default=1.0, ge=0, description="This environment's weight among those that feed the same trainer."
    )
    batch_size: int = later(-1, "Rollouts per trainer batch; -1 leaves it to the trainer.")
    max_batches_offpolicy: int = Field(
        default=3, ge=0, description="Batches that may be under way or wait for the trainer; one always may."
    )
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="Least share of a trainer's batch, 0 to 1."
    )
    use_wandb: bool = Field(
        default=True,
        description="Send the run's figures to Weights & Biases (extra `wandb`). Counts where a user or the "
        "environment says it; the default alone sends nothing.",
    )
    wandb_name: str | None = Field(
        default=None,
        description="The name that a trainer knows the environment by, and trackers the run; None: its own.",
    )
    wandb_mode: Literal["online", "offline"] | None = Field(
        default=None, description="Whether Weights & Biases is reached at once; None: where a key for it is stored."
    )
    use_trackio: bool = Field(default=False, description="Give the run's figures to Trackio (extra `trackio`).")
    tracker_project: str | None = Field(
        default=None, description="The project that trackers file the run under; None: the environment's name."
    )
    rollout_server_url: str = Field(
        default="http://localhost:8000", description="The trainer's trajectory server, which `serve` feeds."
    )
    allow_placeholder_tokens: bool = Field(
        default=False, description="Let `serve` send groups without sampled tokens, which train nothing."
    )
    num_rollouts_to_keep: int = Field(default=32, ge=1, description="Groups whose rollouts are kept to be shown.")
    num_rollouts_per_group_for_logging: int = Field(
        default=1, ge=-1, description="Rollouts kept of each group; -1 means all."
    )
    min_items_sent_before_logging: int = Field(
        default=2, ge=1, description="Groups that must have ended before the figures are logged again."
    )
    thinking_mode: bool = later(False, "Ask the model to think in its own tags.")
    reasoning_effort: str | None = later(None, "How hard a reasoning model should think.")
    max_reasoning_tokens: int | None = later(None, "Most tokens of reasoning per model call.")
    custom_thinking_prompt: str | None = later(None, "The text that asks for thinking.")

    @field_validator("data_path_to_save_groups")
    @classmethod
    def _groups_are_no_page(cls, path: str | None) -> str | None:
        if path is not None and path.endswith(".html"):
            raise ConfigError("the report of the run is to be there: name a .jsonl file, and it lies beside that")
        return path

    @field_validator("otel_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError("must be a URL of OTLP over HTTP, for example http://localhost:4318")
        return endpoint

    @field_validator("idle_limits")
    @classmethod
    def _limits_of_stages(cls, limits: dict[str, float]) -> dict[str, float]:
        """What is said about one stage leaves the others as they are."""
        for stage, seconds in limits.items():
            if stage not in IDLE_LIMITS:
                raise ConfigError(f"there is no stage {stage!r}; there are {', '.join(IDLE_LIMITS)}")
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"the limit of {stage} must be seconds, or 0 for none")
        return {**IDLE_LIMITS, **limits}

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> Self:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ConfigError("set both prompt_price and completion_price, per million tokens, or neither")
        if self.max_cost is not None and self.prompt_price is None:
            raise ConfigError("max_cost needs prompt_price and completion_price, per million tokens")
        return self

    @model_validator(mode="after")
    def _a_recording_to_replay(self) -> Self:
        if self.world in ("replay", "fill") and not self.world_file:
            raise ConfigError(f"world {self.world} needs world_file: a recording, or the folder of a run that has one")
        return self

    @model_validator(mode="after")
    def _a_group_of_one_is_kept(self) -> Self:
        """All scores of a group of one are equal, so by default that must not drop it."""
        if self.group_size == 1 and "ensure_scores_are_not_same" not in self.model_fields_set:
            # Not an assignment: the field stays "unset", so that a larger group_size from a later layer gets True.
            self.__dict__["ensure_scores_are_not_same"] = False
        return self

    @field_validator("isolation")
    @classmethod
    def _isolation_is_a_rung(cls, isolation: str) -> str:
        rungs = ("best", "full", "userns", "confined", "none")
        if isolation not in rungs:
            raise ConfigError(f"not one of {', '.join(rungs)}")
        return isolation


class HermesAgentEnvConfig(BaseEnvConfig, ToolSettings):
    """What environments with a tool-using agent have besides: tools, the agent's limits, slots, the data set."""

    enabled_toolsets: list[str] | None = Field(
        default=None, description="Toolsets the agent has, for example `terminal file`; None means all that work here."
    )
    disabled_toolsets: list[str] | None = Field(default=None, description="Toolsets taken away from those.")
    distribution: str | None = Field(
        default=None, description="A named random draw of toolsets, one per group, instead of enabled_toolsets."
    )
    strict_tools: bool = Field(
        default=False, description="Refuse to run without a tool that was asked for, instead of leaving it out."
    )
    mcp_servers: dict[str, MCPServerConfig] = Field(
        default_factory=dict,
        description="MCP servers by name, each a toolset mcp-NAME that every agent has. --mcp FILE reads mcpServers.",
    )
    max_agent_turns: int = Field(default=30, ge=1, description="Model calls per rollout, at most.")
    max_rollout_tokens: int | None = Field(
        default=None, gt=0, description="Tokens that one rollout may read and write, over all its model calls."
    )
    max_rollout_completion_tokens: int | None = Field(
        default=None, gt=0, description="Tokens that one rollout may write."
    )
    max_rollout_output_bytes: int | None = Field(
        default=None, gt=0, description="Bytes of tool results that one rollout may read."
    )
    max_rollout_cost: float | None = Field(
        default=None, gt=0, description="What one rollout may cost; needs the two prices."
    )
    system_prompt: str | None = Field(default=None, description="The system message; tools need not be named in it.")
    agent_temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of rollouts.")
    extra_body: dict[str, JSON] | None = Field(
        default=None, description="Further fields of every model request, as the provider names them."
    )

    memory_dir: str | None = Field(
        default=None,
        description="A folder for the tool memory; None refuses it: rollouts must not learn from each other.",
    )
    sessions_dir: str | None = Field(
        default=None, description="A folder of earlier conversations for the tool session_search; None refuses it."
    )

    tool_call_parser: str = Field(
        default="hermes",
        description="How a token-exact model writes tool calls, where --openai.tool_parser is not set.",
    )

    tool_pool_mode: str = Field(
        default="default", description="Where slots come from: `local`, or `default`, which means terminal_backend."
    )
    terminal_backend: str = Field(default="local", description="The backend that `default` stands for.")
    terminal_timeout: int = Field(default=120, ge=1, description="Seconds a command may take, unless the call says.")
    allow_network: bool = Field(default=True, description="Whether the agent's commands reach the network.")
    freeze_slots: bool = Field(default=False, description="Stop what runs in a rollout's slot while the model thinks.")
    share_setup: bool = Field(
        default=False, description="Run setup_trajectory_workspace once per group and fork, not once per rollout."
    )

    dataset_name: str | None = Field(default=None, description="The data set: a JSONL or Parquet file, or a name.")
    dataset_split: str = Field(default="train", description="The split of a named data set.")
    prompt_field: str = Field(default="prompt", description="The column that holds the prompt.")

    terminal_lifetime: int = later(3600, "Seconds an idle sandbox lives.")
    tool_pool_size: int = later(128, "Threads for tools; tools run on the event loop here.")
    nomad_address: str = later("http://localhost:4646", "Nomad: its API.")
    sandbox_job_id: str = later("atropos-sandbox", "Nomad: the job's name.")
    sandbox_image: str = later("atropos-sandbox:local", "Nomad: the container image.")
    slots_per_container: int = later(10, "Nomad: slots in one container.")
    min_containers: int = later(1, "Nomad: containers kept running.")
    max_containers: int = later(10, "Nomad: containers at most.")
    privileged: bool = later(False, "Nomad: privileged containers.")
    purge_job_on_start: bool = later(False, "Nomad: remove an old job first.")
    purge_job_on_shutdown: bool = later(True, "Nomad: remove the job at the end.")
    driver: str = later("docker", "Nomad: the task driver, `docker` or `singularity`.")
    singularity_image: str | None = later(None, "Nomad: the image file for singularity.")
    modal_app_name: str = later("atropos-sandbox", "Modal: the app.")
    modal_image: str = later("python:3.11", "Modal: the image.")
    modal_gpu: str | None = later(None, "Modal: the GPU type.")
    modal_cpu: float = later(1.0, "Modal: cores per sandbox.")
    modal_memory: int = later(2048, "Modal: megabytes per sandbox.")
    modal_slots_per_sandbox: int = later(10, "Modal: slots in one sandbox.")
    modal_min_sandboxes: int = later(1, "Modal: sandboxes kept running.")
    modal_max_sandboxes: int = later(5, "Modal: sandboxes at most.")
    modal_idle_timeout: int = later(120, "Modal: seconds until an idle sandbox ends.")
    modal_max_lifetime: int = later(3600, "Modal: seconds a sandbox lives.")
    modal_acquire_timeout: float = later(60, "Modal: seconds to wait for a slot.")
    modal_execution_timeout: float = later(30, "Modal: seconds a command may take.")
    modal_secrets: str = later("", "Modal: names of its secrets, separated by commas.")
    modal_env_vars: str = later("", "Modal: variables, K=V;K=V.")
    modal_workspace_base: str = later("/data", "Modal: where workspaces lie.")

    @field_validator("tool_pool_mode")
    @classmethod
    def _pool_mode_is_available(cls, mode: str) -> str:
        if mode not in AVAILABLE_POOL_MODES:
            raise ConfigError(f"not available in this version, which has {' and '.join(AVAILABLE_POOL_MODES)}")
        return mode

    @field_validator("terminal_backend")
    @classmethod
    def _backend_is_available(cls, backend: str) -> str:
        if backend != "local":
            raise ConfigError("not available in this version, which has local")
        return backend

    @field_validator("distribution")
    @classmethod
    def _distribution_is_known(cls, name: str | None) -> str | None:
        if name is not None:
            find_distribution(name)
        return name

    def take_variables(self, environ: Mapping[str, str]) -> None:
        """Hand over the environment variables that settings name. Raises `ConfigError` for one that is not set."""
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
            raise ConfigError("set either enabled_toolsets or distribution, not both")
        return self


class HeldOutConfig(HermesAgentEnvConfig):
    """Settings of environments that know their tasks by their ids.

    A task is drawn by its id and the seed alone, so it stays on its side whatever the order of the data set, whatever
    else is in it, and on whatever machine. With a share above zero no task is both trained on and evaluated.
    """

    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the tasks, drawn from the seed, that only `evaluate` has; 0: all serve both.",
    )

    def is_held_out(self, task_id: str) -> bool:
        """Whether the task is kept for `evaluate`."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.held_out * 2**64

    def serves(self, task_id: str, *, evaluating: bool) -> bool:
        """Whether `evaluate`, or else the other commands, take the task."""
        return self.held_out == 0 or self.is_held_out(task_id) == evaluating
