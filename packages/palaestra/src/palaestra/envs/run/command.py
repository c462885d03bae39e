"""Reads an environment's command line and runs the environment. The modules that a run needs are imported only once the
line is valid.

`palaestra run` calls `run_command`; scripts of environments call `main`, which also turns errors into exit codes. The
answer goes to stdout: the path of the run's folder, the result as JSON, a plan, help or the settings. Everything else
goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.envs.config.command_line import Answer, CommandLine, Parsed, set_fields
from palaestra.envs.config.dotenv import exported, read_keys, shell_variables
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.form import Form
from palaestra_slots.core.exits import Program, ended_by_second_interrupt
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig, ServerBaseline

if TYPE_CHECKING:
    from palaestra.rollouts.counterfactual import Counterfactual


def main(form: Form, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run an environment as its script's command line specifies, report a failure, and return the exit code."""
    with Program(sys.argv[1:] if argv is None else argv) as program:
        program.exit_code = run_command(form, program.words, prog=prog)
    return program.exit_code


def run_command(
    form: Form,
    argv: Sequence[str],
    *,
    prog: str | None = None,
    command: str | None = None,
    recorded: Mapping[str, JSON] | None = None,
    folder: Path | None = None,
    begins: Counterfactual | None = None,
    root: Path = Path("runs"),
) -> int:
    """Run an environment as `argv` specifies, and return the exit code. If `argv` names no command, the form's default
    command is used or, if the form has none, `command`. The settings of a `recorded` run apply unless `argv` sets
    others. A new run is stored in `folder`, if one is given, and otherwise below `root`. With `begins`, the run is
    counterfactual."""
    dotenv = read_keys(Path.cwd())
    with exported(dotenv):
        line = command_line(form, prog or f"python {Path(sys.argv[0]).name}", command, argv=argv)
        parsed = line.parse(argv, shell_variables(dotenv), dotenv, recorded)
        if isinstance(parsed, Answer):
            sys.stdout.write(parsed.text)
            return 0
        take_variables(parsed, dotenv)
        for notice in parsed.notices:
            sys.stderr.write(f"note: {notice}\n")
        if parsed.dry_run:
            from palaestra.envs.run.dry_run import plan_run

            plan = asyncio.run(plan_run(form, parsed))
            sys.stdout.write(f"{json.dumps(asdict(plan)) if parsed.as_json else plan}\n")
            return 0
        from palaestra.envs.run.run import run

        running = run(form, parsed, root=root, folder=folder, begins=begins)
        report = asyncio.run(ended_by_second_interrupt(running))
    sys.stdout.write(f"{json.dumps(report.to_json()) if parsed.as_json else report.folder}\n")
    return report.exit_code


def command_line(
    form: Form,
    prog: str,
    command: str | None,
    servers: Sequence[ServerBaseline] = (),
    argv: Sequence[str] | None = None,
) -> CommandLine[BaseEnvConfig, APIServerConfig]:
    """Return the command line of an environment, with the environment's own defaults. `servers` replace the
    environment's own servers. Unknown flags in `argv` are rejected before the environment computes its defaults."""
    line = CommandLine(
        prog=prog,
        env_type=form.config_type(),
        server_type=APIServerConfig,
        command=form.command or command,
        about=form.about,
    )
    if argv is not None:
        line.check_flags(argv)
    config, own = form.defaults()
    return replace(
        line,
        env_values=set_fields(config) if config is not None else {},
        server_values=[set_fields(server) for server in servers or own],
    )


def take_variables(parsed: Parsed[BaseEnvConfig, APIServerConfig], dotenv: Mapping[str, str]) -> None:
    """Pass on the environment variables that the settings of an agent environment name. Variables of the process take
    precedence over those of a `.env` file."""
    if isinstance(parsed.env_config, HermesAgentEnvConfig):
        parsed.env_config.take_variables({**dotenv, **os.environ})
