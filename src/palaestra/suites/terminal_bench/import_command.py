"""`palaestra env import`: from what a user typed to a `Report`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.dotenv import read_dotenv
from palaestra.inference.config import APIServerConfig
from palaestra.suites.terminal_bench.check_tasks import Line, Proving, Report
from palaestra.suites.terminal_bench.find_tasks import LeftOut
from palaestra.suites.terminal_bench.tb_config import TerminalBench2EvalConfig
from palaestra.suites.terminal_bench.tb_env import TerminalBench2EvalEnv


def import_tasks(
    source: str, settings: Sequence[str], *, progress: Callable[[Line], None] = lambda line: None
) -> Report:
    """Try every task of a source. Raises `ConfigError` for a setting there is not, or a source without tasks."""
    parsed = CommandLine(
        prog=f"palaestra env import {source}",
        env_type=TerminalBench2EvalConfig,
        server_type=APIServerConfig,
        name="terminalbench_2",
        command="process",
    ).parse(["process", "--policy", "noop", *settings], os.environ, read_dotenv(Path.cwd()))
    if not isinstance(parsed, Parsed):
        raise ConfigError("settings only: --help and --show-config belong to palaestra run")
    config = parsed.env_config.model_copy(update={"dataset_name": source, "total_steps": -1})
    return asyncio.run(_import(config, progress))


async def _import(config: TerminalBench2EvalConfig, progress: Callable[[Line], None]) -> Report:
    async with make_pool(config) as pool:
        inner = TerminalBench2EvalEnv(config, [])
        await inner.sort_out()
        refused = [error for error in inner.left_out if isinstance(error, LeftOut)]
        return await Proving(inner.as_environment(), pool, progress=progress).run(refused)
