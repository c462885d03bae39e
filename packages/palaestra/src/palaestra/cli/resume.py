"""`palaestra resume RUN` continues a run with its recorded settings, and `palaestra fork` one of its rollouts in a new
run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import SettingsCommand, complete_runs, complete_settings
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import Blame

if TYPE_CHECKING:
    from palaestra.envs.form import Form
    from palaestra.rollouts.journal.reader import Recording
    from palaestra_slots.core.types import JSON


@click.command(
    "resume",
    cls=SettingsCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    help="""Continue a run that was killed or interrupted.

    \b
      palaestra resume last
      palaestra resume 20260101T000000Z-0a1b --max-cost 20
      palaestra resume last --tasks 200            # a finished run can be extended
      palaestra resume RUN --environment my_env.py:NAME     # if the environment's file has moved
      palaestra resume last --dry-run              # only show what is kept and what would be run

    RUN is a run's folder, an id or the beginning of one, SET/RUN, or an evaluation set. `last` is the last run, or the
    whole set if that run is in one. Settings come from the run's record; settings after RUN replace them. Keys and
    tokens are not recorded: set them again in variables, `.env` or flags. Finished groups are kept, and rollouts
    continue after their last finished turn. Those that failed at the model server are asked again; those that a content
    filter ended are not.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def command(context: click.Context, run: str, settings: tuple[str, ...]) -> None:
    from palaestra.envs.config.command_line import first_word
    from palaestra.envs.run.set_file import find_set

    named, others = first_word([run, *settings], "RUN")
    if (folder := find_set(named)) is not None:
        from palaestra.envs.run.evaluation_set import resume_set  # most runs are in no set

        context.exit(resume_set(folder, others))
    context.exit(resume_run(named, others, f"palaestra resume {named}"))


@click.command(
    "fork",
    cls=SettingsCommand,
    context_settings={"ignore_unknown_options": True},
    help="""Continue a rollout of an earlier run after one of its turns, several times, as a new run.

    \b
      palaestra fork last 000003-fix/2 --turn 5 --times 16
      palaestra fork RUN ROLLOUT --turn 5 --model NAME --base-url URL     # another model or server
      palaestra fork RUN ROLLOUT --turn 0                                 # from the prompt
      palaestra fork RUN ROLLOUT --turn 5 --rebuild --environment my_env.py:NAME

    The rollouts of the new run are counterfactual: each begins with the turns 1 to N of ROLLOUT as they were recorded,
    and the model samples the rest anew. `palaestra view` then shows, next to the turns of ROLLOUT, how often it still
    succeeds from there. ROLLOUT is a rollout's id, or its beginning or end.

    The sandbox has the state after turn N. If the run kept its workspaces (--keep-workspaces) and no call follows turn
    N, that is the kept workspace, without its processes and /tmp. Otherwise, each rollout runs the recorded calls again
    in a fresh sandbox. The model sees the recorded results in any case; if a result differs now, the command reports
    the first call that differs. Calls that reach outside of this machine are not repeated.

    Settings come from the run's record, as in `palaestra resume`; settings after ROLLOUT replace them. If ROLLOUT ended
    at its limit of turns, raise the limit with --env.max_agent_turns. The new run is resumed, viewed and compared like
    any other, but its rollouts are not trained on: it has no groups.jsonl, and `palaestra export` leaves them out
    without --counterfactual.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("rollout")
@click.option("--turn", type=click.IntRange(min=0), required=True, help="The last recorded turn to keep; 0 for none.")
@click.option("--times", type=click.IntRange(min=1), default=16, show_default=True, help="The number of new rollouts.")
@click.option("--rebuild", is_flag=True, help="Run the recorded calls again even if a workspace was kept.")
@click.option("--seed", metavar="TEXT", help="The seed of a scripted policy's new replies. [default: a random one]")
@click.option("--environment", metavar="FILE.py:NAME", help="The environment's file, if it has moved.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
@click.pass_context
def fork_command(
    context: click.Context,
    run: str,
    rollout: str,
    turn: int,
    times: int,
    rebuild: bool,
    seed: str | None,
    environment: str | None,
    settings: tuple[str, ...],
) -> None:
    import msgspec

    from palaestra.envs.run.command import run_command
    from palaestra.envs.run.fork import settings_for
    from palaestra.envs.run.replay_run import recorded_form, where_it_ran
    from palaestra.rollouts.counterfactual import fork_of
    from palaestra.rollouts.journal.reader import RUNS, open_recording
    from palaestra_slots.core.printable import printable

    if any(word.partition("=")[0] == "--resume" for word in settings):
        raise ConfigError("--resume continues a run that exists: use `palaestra resume`")
    recording = open_recording(run)
    config = recording.meta.config
    if (config.get("env") or {}).get("agent"):
        raise ConfigError(f"{recording.path.parent} was run with an agent program, whose turns cannot be continued")
    # Absolute, as is `root` below, because the new run starts in the folder of the earlier one.
    begins = fork_of(recording.path.resolve(), rollout, turn, seed or secrets.token_hex(8))
    if rebuild:
        begins = msgspec.structs.replace(begins, workspace="")
    state = f"{plural(begins.calls, 'recorded call')} to run again in each sandbox"
    if begins.workspace:
        state = f"from the kept workspace {begins.workspace}, without its processes and /tmp"
    click.echo(printable(f"{begins.origin.rollout_id} of {recording.path.parent} after turn {turn}: {state}"), err=True)
    form = recorded_form(recording, environment)
    recorded = settings_for(settings_of(recording, form))
    words = ["process", *settings, "--group", str(times)]
    prog, root = f"palaestra fork {run} {rollout}", RUNS.resolve()
    with where_it_ran(recording):
        code = run_command(form, words, prog=prog, recorded=recorded, begins=begins, root=root)
    context.exit(code)


def resume_run(run: str, settings: Sequence[str], prog: str) -> int:
    """Continue a run with its recorded settings and return the exit code. `settings` are flags that replace recorded
    settings. `--environment` in them names the environment to use."""
    from palaestra.envs.config.command_line import COMMANDS
    from palaestra.envs.run.command import run_command
    from palaestra.envs.run.replay_run import recorded_form, where_it_ran
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra.rollouts.observe.status import RunReader, filtered_words

    recording = open_recording(run)
    folder = recording.path.parent.resolve()
    if (folder / "training").is_dir():
        raise ConfigError(f"{folder} is a training run: continue it with `palaestra train --resume {run}`")
    status = RunReader(recording.path).read()
    again = status.blame[Blame.ENGINE].count if Blame.ENGINE in status.blame else 0
    click.echo(
        f"{folder}: kept {plural(status.groups_ended, 'group')} with {plural(status.rollouts - again, 'rollout')}, "
        f"{plural(status.groups_begun - status.groups_ended, 'group')} in progress",
        err=True,
    )
    if again:
        click.echo(f"{plural(again, 'rollout')} that failed at the model server will be asked again", err=True)
    if status.filtered:
        click.echo(filtered_words(status.filtered, folder), err=True)
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
    # Read by hand: to click, all words after RUN are settings of the environment.
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
