"""`AgentEnvConfig`: the settings of environments whose agent writes its tool calls as text.

The contract's fields and defaults; those of a backend or a service that this version does not have are kept, so that
existing scripts run, and a run that sets one says so. What would weaken isolation if ignored is not ignored.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from palaestra.core.config import later
from palaestra.core.errors import ConfigError
from palaestra.envs.config import AVAILABLE_POOL_MODES, HermesAgentEnvConfig

CONTRACT_POOL_MODES = ("nomad", "modal", "docker_direct")
"""What scripts of the contract may name. Refused when a run starts, so that a flag can still say `local`."""


class AgentEnvConfig(HermesAgentEnvConfig):
    """What an `AgentEnv` can be told."""

    agent_max_steps: int = Field(default=50, ge=1, description="Model calls per rollout, at most.")
    agent_temperature: float = Field(default=0.7, ge=0, description="Sampling temperature of rollouts.")
    agent_max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of one reply; None leaves it to the model server."
    )
    agent_tool_delay_s: float = Field(default=0.0, ge=0, description="Seconds between one tool call and the next.")
    enabled_toolsets: list[str] | None = Field(
        default_factory=lambda: ["default"], description="Toolsets the agent has; `default` is terminal and file."
    )
    disabled_toolsets: list[str] | None = Field(default_factory=list, description="Toolsets taken away from those.")
    require_stateful_sandbox: bool = Field(
        default=False, description="Refuse slots without process isolation: the same as require_sandbox here."
    )
    tool_server_url: str | None = Field(
        default=None, description="Where external tools run: an address of `palaestra serve tools`, or inprocess."
    )
    tool_server_token: str | None = Field(default=None, description="The bearer token of the tool server.")

    max_agent_turns: int = later(50, "Use agent_max_steps.")
    max_token_length: int = later(2048, "Use agent_max_tokens.")
    tool_batch_window_ms: int = later(20, "Milliseconds to wait for a batch; calls are sent one by one, at once.")
    tool_max_batch_size: int = later(200, "Calls in one batch.")
    sandbox_job_id: str = later("atropos-sandbox-agent-env", "Nomad: the job's name.")

    @field_validator("tool_pool_mode")
    @classmethod
    def _pool_mode_is_available(cls, mode: str) -> str:
        known = (*AVAILABLE_POOL_MODES, *CONTRACT_POOL_MODES)
        if mode not in known:
            raise ConfigError(f"not one of {', '.join(known)}")
        return mode

    @model_validator(mode="after")
    def _stateful_tools_are_isolated_too(self) -> Self:
        if self.require_stateful_sandbox:
            self.__dict__["require_sandbox"] = (
                True  # not an assignment: what was set stays told apart from what was not
            )
        return self

    def check_runnable(self) -> None:
        """Raises `ConfigError` for a place of slots that this version does not have."""
        if self.tool_pool_mode not in AVAILABLE_POOL_MODES:
            raise ConfigError(
                f"tool_pool_mode {self.tool_pool_mode!r} is not available in this version, which has "
                f"{' and '.join(AVAILABLE_POOL_MODES)}: pass --env.tool_pool_mode local"
            )
