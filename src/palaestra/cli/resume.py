"""`palaestra resume RUN`: continue a run with its recorded settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import SettingsCommand, complete_runs, complete_settings
from palaestra.cli.run import with_old_imports
from palaestra.core.errors import ConfigError
from palaestra.core.exits import plural

if TYPE_CHECKING:
    from palaestra.core.types import JSON
    from palaestra.envs.form import Form
    from palaestra.rollouts.journal.reader import Recording


@click.command(
    "resume",
    cls=SettingsCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    help="""Continue a run that was killed or interrupted.

    \b
      palaestra resume last
      palaestra resume 20260101T000000Z-0a1b --max-cost 20
      palaestra resume last --tasks 200            # a finished run can be extended
      palaestra resume RUN --environment my_env.py:NAME     # if the environment's file has moved
      palaestra resume last --dry-run              # only show what is kept and what would be run

    RUN is a run's folder, an id or the beginning of one, or `last`. Settings come from the run's record; settings after
    RUN replace them. Keys and tokens are not recorded: set them again in variables, `.env` or flags. Finished groups
    are kept, and rollouts continue after their last finished turn.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def command(context: click.Context, run: str, settings: tuple[str, ...]) -> None:
    from palaestra.envs.config.command_line import first_word

    named, others = first_word(with_old_imports([run, *settings]), "RUN")
    context.exit(resume_run(named, others, f"palaestra resume {named}"))


def resume_run(run: str, settings: Sequence[str], prog: str) -> int:
    """Continue a run with its recorded settings and return the exit code. `settings` are flags that replace recorded
    settings. `--environment` in them names the environment to use."""
    from palaestra.envs.config.command_line import COMMANDS
    from palaestra.envs.run.command import run_command
    from palaestra.envs.run.replay_run import recorded_form, where_it_ran
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra.rollouts.observe.status import RunReader

    recording = open_recording(run)
    folder = recording.path.parent.resolve()
    if (folder / "training").is_dir():
        raise ConfigError(f"{folder} is a training run: continue it with `palaestra train --resume {run}`")
    status = RunReader(recording.path).read()
    click.echo(
        f"{folder}: kept {plural(status.groups_ended, 'group')} with {plural(status.rollouts, 'rollout')}, "
        f"{plural(status.groups_begun - status.groups_ended, 'group')} in progress",
        err=True,
    )
    verb = recording.meta.config.get("command") or "process"
    if verb not in COMMANDS:  # it becomes a word of a command line
        raise ConfigError(f"{folder} was recorded with the command {verb!r}, which cannot be continued")
    environment, settings = _environment(settings)
    form = recorded_form(recording, environment)
    recorded = settings_of(recording, form)
    with where_it_ran(recording):
        return run_command(form, [verb, "--resume", str(folder), *settings], prog=prog, recorded=recorded)


def settings_of(recording: Recording, form: Form) -> dict[str, JSON]:
    """Return the recorded settings that apply to a resumed run. If this user did not record the run on this machine, or
    its records have changed, only the settings that `decides` accepts apply, and the model servers do not."""
    from palaestra.envs.run.replay_run import decides
    from palaestra.rollouts.journal.origin import is_ours

    recorded = dict(recording.meta.config)
    if is_ours(recording):
        return recorded
    click.echo(
        "note: this run was not recorded here, or its records have changed: its settings for the machine, the "
        "model and other servers are not used; set them again",
        err=True,
    )
    said = dict(recorded.get("env") or {}).items()
    env = {name: value for name, value in said if decides(recording, form, name, value)}
    return {**recorded, "env": env, "openai": []}


def _environment(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--environment`, and the other words. Raises `ConfigError`."""
    rest, named = list(words), None
    for place, word in enumerate(rest):
        flag, equals, value = word.partition("=")
        if flag == "--environment":
            named = value if equals else "".join(rest[place + 1 : place + 2])
            if not named or named.startswith("--"):
                raise ConfigError("--environment needs a file as its value, FILE.py:NAME")
            del rest[place : place + (1 if equals else 2)]
            break
    return named, rest
