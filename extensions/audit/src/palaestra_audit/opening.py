"""Loads and opens an environment for the commands that play attacks on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from palaestra.envs.config.command_line import set_fields
from palaestra.envs.config.fields import UNSAID, HermesAgentEnvConfig
from palaestra.envs.discovery import load_environment
from palaestra.envs.form import Form
from palaestra.envs.policy_runs import parse_settings
from palaestra.envs.run.run import opened
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.environment import Environment
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Rung
from palaestra_tokens.server_group import ServerGroup

_LEAST_TURNS = 500
"""The least number of turns that a script may take; the limit of an environment is one for models."""


def load(command: str, reference: str, settings: Sequence[str]) -> tuple[Form, RunLine]:
    """Return the form that `reference` names, and its settings: those that it has for checks, unless the user sets one
    of them. Raises `ConfigError`."""
    form = load_environment(reference, Path.cwd())
    default, _ = form.defaults()
    values = set_fields(default) if default is not None else {}
    own, prog = form.check_values(), f"palaestra {command} {reference}"
    parsed = parse_settings(prog, settings, env_type=form.config_type(), env_values=values)
    if own and not any(parsed.sources[f"env.{name}"] not in UNSAID for name in own):
        parsed = parse_settings(prog, settings, env_type=form.config_type(), env_values={**values, **own})
    config = parsed.env_config
    if isinstance(config, HermesAgentEnvConfig):  # an attack follows all of a solution, which may have many steps
        config.max_agent_turns = max(config.max_agent_turns, _LEAST_TURNS)
    if config.isolation == Rung.NONE.label:
        raise ConfigError(
            f"{command} plays attacks, and isolation level none gives no protection; use a different level"
        )
    return form, parsed


@contextlib.asynccontextmanager
async def opened_environment(
    form: Form, parsed: RunLine, pool: SlotPool
) -> AsyncIterator[tuple[Environment, SlotPool]]:
    """Yield the environment, open, and the pool, also open."""
    engine = ServerGroup(parsed.server_configs)
    async with contextlib.aclosing(engine), pool:
        await engine.start()
        environment = form.build(parsed.env_config, parsed.server_configs, engine)
        async with opened(environment, parsed.env_config.only_tasks):
            yield environment, pool
