"""Lets agents of Harbor play our rollouts: `palaestra run ENV --agent harbor:NAME` or `--agent harbor:MODULE:CLASS`.

The agent's `setup` and `run` are called in this process, with the rollout's slot as their environment. A model call of
the agent, from here or from the slot, goes to the recording endpoint, as the model calls of every third-party agent do.
Its commands with their output are the rollout's log. Harbor's installed agents install themselves in each slot, which
takes a network.

This process's environment variables are hidden from the agent, so that no key of this machine gets into a slot.

Needs the package `harbor`. Source: `BaseAgent`, `BaseInstalledAgent` and `AgentFactory` of Harbor 0.26.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig, MCPServerConfig
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.paths import TrialPaths

from palaestra import JSON, AgentAssignment, ConfigError, HostedAgent, Slot
from palaestra_integrations.harbor import PalaestraEnvironment
from palaestra_suites import TaskSandbox

_POLICIES = {"oracle": "oracle", "nop": "noop"}
"""Agents of Harbor that call no model, with the policy that takes the place of each."""

_MODEL, _TOOLS, _KEY = "policy", "environment", "PALAESTRA_KEY"


def harbor_agent(name: str) -> HarborAgent:
    """Return the agent of Harbor with this name, or of the class `MODULE:CLASS`. Its options may follow, as in
    `terminus-2?max_turns=20&parser_name=xml`. Raises `ConfigError`."""
    name, _, query = name.partition("?")
    if name in _POLICIES:
        raise ConfigError(f"Harbor's agent {name} calls no model: use --policy {_POLICIES[name]}")
    try:
        found = AgentFactory.get_agent_class_from_config(AgentConfig(name=name))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"Harbor has no agent {name!r:.100}: {error}") from error
    if not issubclass(found, BaseAgent):
        raise ConfigError(f"{name} is not an agent of Harbor, which is a subclass of BaseAgent")
    options = {key: _value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    try:
        found.parse_options(options)
    except ValueError as error:
        raise ConfigError(f"the options of Harbor's agent {name} are not valid: {error}") from error
    return HarborAgent(name, found, options)


def _value(text: str) -> JSON:
    try:
        return json.loads(text)
    except ValueError:
        return text


class HarborAgent(HostedAgent):
    """An agent of Harbor that works in our slots."""

    def __init__(self, name: str, kind: type[BaseAgent], options: Mapping[str, JSON]) -> None:
        self._name, self._options = name, options
        self._kind: Any = type(kind.__name__, (_WithoutOurVariables, kind), {"__module__": kind.__module__})

    @property
    def name(self) -> str:
        return f"harbor:{self._name}"

    async def work(
        self, slot: Slot, here: AgentAssignment, in_slot: AgentAssignment, log: Callable[[bytes], None]
    ) -> None:
        """Set the agent up in the slot and let it work there. Raises `ConfigError` if the agent cannot be created, or
        if it cannot call the environment's tools."""
        with TemporaryDirectory(prefix="palaestra-harbor-") as folder:
            paths = TrialPaths(trial_dir=Path(folder))
            environment = SlotEnvironment(slot, paths, log)
            installed = issubclass(self._kind, BaseInstalledAgent)
            agent = await asyncio.to_thread(self._create_agent, in_slot if installed else here, paths.agent_dir)
            await environment.ensure_dirs([str(agent.environment_logs_dir)])
            await agent.setup(environment)
            await agent.run(in_slot.prompt, environment, AgentContext())

    def _create_agent(self, assignment: AgentAssignment, logs: Path) -> Any:
        """Create the agent. It runs in a thread, because some of the agents import large packages."""
        logs.mkdir(parents=True, exist_ok=True)
        spec = self._kind.MODEL_CONNECTION
        provider = (spec.default_provider if spec is not None else None) or "openai"
        url = assignment.url if provider == "anthropic" else assignment.openai_url
        given = {**self._options, **({} if spec is None else {"base_url": url})}
        servers = self._servers(assignment)
        try:
            return self._kind(
                logs_dir=logs,
                model_name=f"{provider}/{_MODEL}",
                mcp_servers=servers,
                extra_env=_agent_variables(assignment),
                **given,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the agent {self.name} cannot be created: {error}") from error

    def _servers(self, assignment: AgentAssignment) -> list[MCPServerConfig]:
        if not assignment.tools_url:
            return []
        if not self._kind.capabilities.mcp_http_headers:
            raise ConfigError(
                f"the environment has tools, but the agent {self.name} sends no headers to MCP servers, so it cannot "
                "call them: use another agent, or an environment without tools of its own"
            )
        headers = {"Authorization": f"Bearer ${{{_KEY}}}"}
        return [MCPServerConfig(name=_TOOLS, transport="streamable-http", url=assignment.tools_url, headers=headers)]


class _WithoutOurVariables:
    """Before a class of Harbor, it hides this process's environment variables from the agent."""

    _extra_env: dict[str, str]

    def _env_sources(self) -> tuple[Mapping[str, str], ...]:
        return (self._extra_env,)


def _agent_variables(assignment: AgentAssignment) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": assignment.openai_url,
        "OPENAI_API_BASE": assignment.openai_url,
        "OPENAI_API_KEY": assignment.key,
        "ANTHROPIC_BASE_URL": assignment.url,
        "ANTHROPIC_API_KEY": assignment.key,
        _KEY: assignment.key,
    }


class SlotEnvironment(PalaestraEnvironment):
    """The slot of a rollout, which the rollout starts and ends. `log` takes each command with its output."""

    def __init__(self, slot: Slot, paths: TrialPaths, log: Callable[[bytes], None]) -> None:
        super().__init__(
            environment_dir=paths.trial_dir,
            environment_name="rollout",
            session_id=slot.slot_id,
            trial_paths=paths,
            task_env_config=EnvironmentConfig(),
        )
        self._box = TaskSandbox.of_slot(slot)
        self._log = log

    def _validate_definition(self) -> None:
        """The slot runs already."""

    async def start(self, force_build: bool) -> None:
        """The rollout has started the slot."""

    async def stop(self, delete: bool) -> None:
        """The rollout ends the slot."""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in the slot, and log it. Raises RuntimeError after the timeout."""
        self._log(f"$ {command}\n".encode(errors="replace"))
        done = await super().exec(command, cwd, env, timeout_sec, user)
        self._log(f"{done.stdout or ''}{done.stderr or ''}".encode(errors="replace"))
        return done
