"""`palaestra replay RUN`: replay a run without a model or a network, and compare every observation."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra_slots.core.exits import FAILED, plural

if TYPE_CHECKING:
    from palaestra.rollouts.journal.reader import Recording
    from palaestra.rollouts.resume.replay import Comparison

_SHOWN = 20


@click.command(
    "replay",
    help="""Play a recorded run again, without a model and without a network.

    \b
      palaestra replay RUN                                       # an installed environment
      palaestra replay RUN --environment my_env.py:my_env        # an environment in a file
      palaestra replay RUN --tasks 10 --json

    RUN is a run's folder or journal, its id, or `last`. A journal cannot choose what runs here: the isolation comes
    from this command line, and so does the environment's file, unless you recorded the run on this machine. Values that
    differ from the recorded ones are printed. The agent's recorded turns are played through the same loop, tools and
    checks, in fresh slots, and every observation is compared with the recorded one. The first difference of each
    rollout is shown with its likely cause: time, pids, order, randomness, or other. The exit code is 1 if a cause is
    "other", or if a rollout has a different reward or ending or cannot be played; it is 2 if the run cannot be played.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--environment", metavar="FILE.py:NAME", help="The environment's file.")
@click.option(
    "--isolation", default="best", show_default=True, help="The isolation level: best, full, userns, confined or none."
)
@click.option("--tasks", type=click.IntRange(min=1), help="Replay only the first N tasks.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Maximum number of groups that run concurrently.")
@click.option("--network", is_flag=True, help="Give slots the network access that the tasks request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    run: str,
    environment: str | None,
    isolation: str,
    tasks: int | None,
    concurrency: int | None,
    network: bool,
    as_json: bool,
) -> None:
    from palaestra.envs.run.replay_run import ReplaySettings, differing, replay, replayable_form
    from palaestra.rollouts.journal.reader import Recording, journal_of
    from palaestra.rollouts.observe.console import make_console
    from palaestra_slots.core.printable import printable

    recording = Recording(journal_of(run).resolve())  # absolute: the replay changes the working directory
    settings = ReplaySettings(environment, tasks, concurrency, network, isolation)
    form = replayable_form(recording, environment)
    for line in differing(recording, form, settings):
        click.echo(f"note: {printable(line)}", err=True)
    with make_console(sys.stderr) as console:
        comparison = asyncio.run(replay(recording, form, settings, console))
    if as_json:
        click.echo(json.dumps({**comparison.to_dict(), "unfinished_groups": recording.unfinished}))
    else:
        click.echo("\n".join(_comparison_lines(comparison, recording)))
    if not comparison.ok:
        context.exit(FAILED)


def _comparison_lines(comparison: Comparison, recording: Recording) -> list[str]:
    from palaestra_slots.core.printable import one_line, printable

    rate = "none to compare" if comparison.rate is None else f"{100 * comparison.rate:.2f} % equal"
    kinds = ", ".join(f"{kind} {count}" for kind, count in comparison.kinds.most_common())
    lines = [
        f"rollouts      {comparison.rollouts} played; {comparison.not_recorded} recorded without a reward",
        f"observations  {comparison.observations}, {rate}{f'; different: {kinds}' if kinds else ''}",
        f"rewards       {comparison.rewards_equal} of {comparison.rewards} equal",
    ]
    if recording.unfinished:
        lines.append(f"left out      {plural(recording.unfinished, 'group')} that had not ended")
    for each in comparison.differences[:_SHOWN]:
        whose = f", sub-agent {each.subagent}" if each.subagent else ""
        lines.append(f"{each.rollout_id}{whose}, turn {each.turn}: {each.kind}")
        # Turn 0 is the opening, which answers no call.
        lines += [f"  call      {printable(each.call.strip())[:200]}"] if each.turn else []
        lines += [f"  recorded  {printable(each.recorded)}", f"  replayed  {printable(each.replayed)}"]
    for end in comparison.other_ends[:_SHOWN]:
        lines.append(f"{end.rollout_id}: {end.what} was {end.recorded}, is {one_line(end.replayed, 300)}")
    hidden = max(0, len(comparison.differences) - _SHOWN) + max(0, len(comparison.other_ends) - _SHOWN)
    return [*lines, f"… and {hidden} more; --json lists all of them"] if hidden else lines
