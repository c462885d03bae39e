"""Running an environment from a command line: one assembly of engine, pool and journal for every form.

`main` is what `palaestra run` and every environment script call. It returns the exit code: 0 done, 3 finished with more
unscored rollouts than allowed, or paused, 130 drained; errors raise and are turned into their code by `guarded`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.exits import DONE, TOO_MANY_FAILURES, run_guarded
from palaestra.core.types import JSON
from palaestra.envs.adapters.forms import Form, form_of
from palaestra.envs.config.build import make_pool, make_prepared, make_world, server_settings
from palaestra.envs.config.command_line import Answer, CommandLine, set_fields
from palaestra.envs.config.dotenv import read_dotenv
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.discovery import load_environment, reference_of
from palaestra.envs.run.batch import Batch, RunLine, make_stops, recorded, say_on
from palaestra.envs.run.report_metrics import make_reporting
from palaestra.envs.run.run_folder import Output, RunFolder, claim_folder, resumed_folder
from palaestra.inference.config import APIServerConfig
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.journal.journal import JOURNAL_SCHEMA, Journal, RunResumed, without_secrets
from palaestra.rollouts.observe.tracing.exporter import traced
from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
from palaestra.rollouts.resume.state import read_finished, repair
from palaestra.rollouts.runner import Totals
from palaestra.sandbox.isolation.isolation_probe import warning


def main(environment: object, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run an environment (a function form or a class) as the command line says, and return the exit code."""
    return run_guarded(lambda: _main(environment, sys.argv[1:] if argv is None else argv, prog), _report)


def run_environment(reference: str, argv: Sequence[str], *, prog: str) -> int:
    """Run the environment that `reference` names; `process` where no command is said. Errors are the caller's."""
    return _main(load_environment(reference, Path.cwd()), argv, prog, "process")


def _report(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")


def _main(environment: object, argv: Sequence[str], prog: str | None, command: str | None = None) -> int:
    form = form_of(environment)
    config, servers = form.defaults()
    dotenv = read_dotenv(Path.cwd())
    parsed = CommandLine(
        prog=prog or f"python {Path(sys.argv[0]).name}",
        env_type=form.config_type(),
        server_type=APIServerConfig,
        env_values=set_fields(config) if config is not None else {},
        server_values=[set_fields(server) for server in servers],
        name=form.name,
        command=form.command or command,
        about=form.about,
    ).parse(argv, os.environ, dotenv)
    if isinstance(parsed, Answer):
        sys.stdout.write(parsed.text)
        return 0
    if isinstance(parsed.env_config, HermesAgentEnvConfig):
        parsed.env_config.take_variables({**dotenv, **os.environ})
    for notice in parsed.notices:
        sys.stderr.write(f"note: {notice}\n")
    return asyncio.run(run(form, parsed, reference=reference_of(environment))).exit_code


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run came to and where it lies."""

    exit_code: int
    totals: Totals
    folder: Path
    journal: Path
    groups: Path
    report: Path


async def run(
    form: Form, parsed: RunLine, *, root: Path = Path("runs"), stream: TextIO | None = None, reference: str = ""
) -> RunReport:
    """Run to the end and say where things lie. What was finished is kept, whatever ends the run.

    Nothing is written before model server, slots and environment have been found to work. `reference` names the
    environment for whoever plays the run again; see `loading.reference_of`.
    """
    stream = stream or sys.stderr
    config = parsed.env_config
    servers = server_settings(config, parsed.server_configs)
    async with started(ServerGroup(servers)) as engine, make_pool(config) as pool:
        prepared = make_prepared(config, pool.backend)
        environment = form.build(config, servers, engine)
        async with opened(environment), closed(make_world(config)) as world:
            output = _open_output(form, parsed, engine, root, reference)
            if parsed.resume is not None:
                world.remember(output.folder.world)
            if config.world != "live":
                world.keep(output.folder.world)
            environment.world = world
            stream.write(f"run {output.folder.path}: {form.name} with {engine.name}, isolation {pool.rung.label}\n")
            if weak := warning(pool.rung):
                stream.write(f"WARNING: isolation {pool.rung.label}: {weak}\n")
            stops = make_stops(config, output, parsed.resume is not None)
            reporting = await make_reporting(parsed, output, say_on(stream))
            async with traced(
                config.otel_endpoint,
                reporting.say,
                env=form.name,
                model=engine.name,
                provider=servers[0].server_type,
                run_id=output.folder.run_id,
                content=config.otel_content,
            ) as tracing:
                batch = Batch(environment, parsed, engine, pool, output, stops, world, reporting, tracing, prepared)
                totals = await recorded(batch, stream)
    return RunReport(
        exit_code=stops.exit_code if stops.reason else TOO_MANY_FAILURES if _unfinished(totals, config) else DONE,
        totals=totals,
        folder=output.folder.path,
        journal=output.folder.journal,
        groups=output.groups.path,
        report=output.report,
    )


@asynccontextmanager
async def started(engine: ServerGroup) -> AsyncIterator[ServerGroup]:
    """The engine, started and in the end closed."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


@asynccontextmanager
async def closed(world: RunWorld) -> AsyncIterator[RunWorld]:
    """The world of a run, in the end closed."""
    try:
        yield world
    finally:
        world.close()


@asynccontextmanager
async def opened(environment: Environment) -> AsyncIterator[None]:
    """The environment, opened and in the end closed."""
    try:
        await environment.open()
        yield
    finally:
        try:
            await environment.aclose()
        finally:
            await environment.shared.aclose()


def _open_output(form: Form, parsed: RunLine, engine: ServerGroup, root: Path, reference: str) -> Output:
    config = parsed.env_config
    if parsed.resume is not None:
        return _reopen_output(form, parsed, engine, parsed.resume, reference)
    groups_path = Path(config.data_path_to_save_groups) if config.data_path_to_save_groups else None
    output = Output(
        claim_folder(root, form.name, engine.name),
        env=form.name,
        model=engine.name,
        groups_path=groups_path,
        settings={"environment": reference, "folder": str(Path.cwd()), **_settings(parsed)},
        messages=config.include_messages,
    )
    output.start(config.seed)
    return output


def _reopen_output(form: Form, parsed: RunLine, engine: ServerGroup, path: Path, reference: str) -> Output:
    """The output of an earlier run, to go on with. Raises `ConfigError` when it was a run of something else."""
    folder, evaluates = resumed_folder(path), parsed.command == "evaluate"
    journal = Journal(folder.journal)  # before anything is read: who has it, has the run
    try:
        torn = repair(folder.journal)
        finished = read_finished(folder.journal)
        was, now = finished.run, {"env": form.name, "model": engine.name, "seed": parsed.env_config.seed}
        if (was.config.get("command", parsed.command) == "evaluate") != evaluates:
            kind, other = ("a run", "an evaluation") if evaluates else ("an evaluation", "a run")
            raise ConfigError(
                f"{path} is {kind}, which cannot go on as {other}: say the command that it was begun with"
            )
        for name, value in now.items():
            if getattr(was, name) != value:
                raise ConfigError(
                    f"{path} was run with {name} {getattr(was, name)!r}, not {value!r}: say the same again"
                )
        output = Output(
            replace(folder, run_id=was.run_id),
            env=form.name,
            model=engine.name,
            groups_path=None,
            settings=was.config,
            messages=parsed.env_config.include_messages,
            groups_file=_groups_file(was.config, folder),
            journal=journal,
        )
    except BaseException:
        journal.close()
        raise
    output.finished = finished
    config = {**was.config, **_settings(parsed), "environment": reference, "folder": str(Path.cwd())}
    journal.append(RunResumed(at=time.time(), schema=JOURNAL_SCHEMA, torn=torn, config=config))
    return output


def _groups_file(recorded: Mapping[str, JSON], folder: RunFolder) -> Path:
    """Where the groups of a run that goes on are written: where they were, but in its own folder where that place is
    gone, or is that of the run of which this one is a copy."""
    path, first = Path(recorded.get("groups_file", "")), Path(recorded.get("run_folder", folder.path))
    copied = first.exists() and not first.samefile(folder.path)
    return path if path.is_absolute() and path.parent.is_dir() and not copied else folder.groups


def _unfinished(totals: Totals, config: BaseEnvConfig) -> bool:
    return totals.failed + totals.failed_groups * config.group_size > config.max_failures


def _settings(parsed: RunLine) -> dict[str, JSON]:
    """The merged configuration with the source of each value, secrets left out."""
    values = {
        "command": parsed.command,
        "env": parsed.env_config.recorded(),
        "openai": [server.recorded() for server in parsed.server_configs],
        "sources": dict(parsed.sources),
    }
    cleaned: dict[str, JSON] = msgspec.to_builtins(without_secrets(values))
    return cleaned
