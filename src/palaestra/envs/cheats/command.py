"""`palaestra env check`: from what a user typed to a `Proof`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.envs.adapters.forms import Form, form_of
from palaestra.envs.cheats.bank import BANK
from palaestra.envs.cheats.cheat import Cheat
from palaestra.envs.cheats.check import Check, Line, Proof
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import UNSAID, CommandLine, Parsed, set_fields
from palaestra.envs.config.dotenv import read_dotenv
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.discovery import load_environment
from palaestra.envs.run.batch import RunLine
from palaestra.envs.run.run import opened, started
from palaestra.inference.config import APIServerConfig
from palaestra.inference.server_group import ServerGroup


def check_environment(
    reference: str, settings: Sequence[str], *, tasks: int, only: Sequence[str] = (), quiet: bool = False
) -> Proof:
    """Check the environment that `reference` names. Raises `ConfigError` for a cheat or setting there is not."""
    form = form_of(load_environment(reference, Path.cwd()))
    parsed = _parsed(form, reference, settings, {})
    if not any(parsed.sources[f"env.{name}"] not in UNSAID for name in form.check_values()):
        parsed = _parsed(form, reference, settings, form.check_values())
    return asyncio.run(_check(form, parsed, tasks, cheats_named(only), quiet))


def _parsed(form: Form, reference: str, settings: Sequence[str], own: Mapping[str, JSON]) -> RunLine:
    config, _ = form.defaults()
    dotenv = read_dotenv(Path.cwd())
    parsed = CommandLine(
        prog=f"palaestra env check {reference}",
        env_type=form.config_type(),
        server_type=APIServerConfig,
        env_values={**(set_fields(config) if config is not None else {}), **own},
        name=form.name,
        command="process",
    ).parse(["process", "--policy", "noop", *settings], os.environ, dotenv)
    if not isinstance(parsed, Parsed):
        raise ConfigError("settings only: --help and --show-config belong to palaestra run")
    if isinstance(parsed.env_config, HermesAgentEnvConfig):
        parsed.env_config.take_variables({**dotenv, **os.environ})
    return parsed


def cheats_named(only: Sequence[str]) -> tuple[Cheat, ...]:
    """The cheats of these names; none named: all."""
    known = {cheat.name: cheat for cheat in BANK}
    for name in only:
        if name not in known:
            raise ConfigError(f"no cheat is called {name!r}.{nearest(name, known)}")
    return tuple(known[name] for name in only) or BANK


async def _check(form: Form, parsed: RunLine, tasks: int, cheats: Sequence[Cheat], quiet: bool) -> Proof:
    config = parsed.env_config

    def progress(line: Line) -> None:
        if not quiet:
            sys.stderr.write(f"{line.policy}: {'ok' if line.ok else 'PAID'} {line.error[:200]}\n")

    async with started(ServerGroup(parsed.server_configs)) as engine, make_pool(config) as pool:
        environment = form.build(config, parsed.server_configs, engine)
        async with opened(environment):
            return await Check(environment, pool, cheats, progress).run(tasks)
