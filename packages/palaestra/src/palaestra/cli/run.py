"""`palaestra run ENV [flags]`, and the same for evaluating an environment (`eval`) and for feeding a trainer (`feed`).

The environment's command line parses all words after ENV.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from palaestra.cli.completion import SettingsCommand, complete_environments, complete_settings


def front_door(verb: str, help_text: str, *words: str) -> click.Command:
    """Return a command that runs an environment. `words` come first on the command line that the environment parses,
    before the user's flags."""

    @click.command(
        verb,
        cls=SettingsCommand,
        context_settings={
            "ignore_unknown_options": True,
            # After ENV, a flag such as --help belongs to the environment's command line.
            "allow_interspersed_args": False,
        },
        help=help_text,
    )
    @click.argument("environment", metavar="ENV", shell_complete=complete_environments)
    @click.argument("settings", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_settings)
    @click.pass_context
    def command(context: click.Context, environment: str, settings: tuple[str, ...]) -> None:
        from palaestra.envs.config.command_line import check_general_flags, first_word

        environment, others = first_word([environment, *settings], "ENV")
        check_general_flags(others)
        if words == ("evaluate",) and (several := _several(environment, others)) is not None:
            context.exit(several)
        from palaestra.envs.config.dotenv import exported, read_keys
        from palaestra.envs.discovery import load_environment
        from palaestra.envs.run.command import run_command

        with exported(read_keys(Path.cwd())):  # first, because loading the script may read the variables
            form, prog = load_environment(environment, Path.cwd()), f"palaestra {verb} {environment}"
            code = run_command(form, [*words, *others], prog=prog, command="process")
        context.exit(code)

    return command


command = front_door(
    "run",
    """Roll out an environment and write its groups.

    \b
      palaestra run my_env.py --policy oracle                  # play the reference solutions
      palaestra run my_env.py:count_lines --tasks 5 --group 4
      palaestra run swe_smith_oracle --base-url http://localhost:8000/v1 --model NAME
      palaestra run my_env.py --help                           # the settings of that environment

    ENV is the path of a file, path.py:name for one of several environments in a file, or a name that
    `palaestra env list` shows. After ENV, write `evaluate`, `serve` (to a trainer) or `process`, which is the
    default, and then settings:

    \b
      --policy NAME      a scripted policy: oracle, noop, patch:FILE, replay:RUN
      --base-url URL     an OpenAI-compatible server      --model NAME   its model
      --task ID[,ID]     only these tasks, or patterns     --failed-of RUN  those that failed in RUN, or have no score
      --tasks N          maximum number of groups         --group N      rollouts per task
      --concurrency N    groups in progress at a time     --backend B    the slot backend
      --slots N          maximum number of slots in use; the default depends on memory and open files, up to 512
      --on ray[:ADDRESS] roll out on a Ray cluster, with one worker per node (docs/scaling.md; extra `ray`)
      --max-cost C       pause at this cost; needs --env.prompt_price and --env.completion_price, or --env.slot_prices
      --max-infra-rate R pause when infrastructure failures end more than this share of the last 100 rollouts (0.2)
      --metrics-port P   serve Prometheus metrics on localhost
      --resume RUN       continue a run (`palaestra resume RUN` needs no settings)
      --out FILE.jsonl   also write the groups here       --dry-run      only show what would be run
      --compat           run a script of Atropos or Hermes whose imports are not rewritten
      --json             print the result as JSON instead of the run's folder
      --env.FIELD V, --openai.FIELD V, --config FILE.yaml, --show-config
    """,
)


def _several(environment: str, others: Sequence[str]) -> int | None:
    """Evaluate several environments or models, and return the exit code; None for one environment and one model."""
    from palaestra.envs.config.command_line import flags_of, has_settings, is_flag

    models = [each for each in flags_of(others) if each[0].partition("=")[0] in ("--model", "-m", "--policy")]
    quoted = any(map(has_settings, (environment, *(word for each in models for word in each))))
    if len(models) < 2 and not quoted and (not others or is_flag(others[0])):
        return None  # a plain evaluation imports nothing of sets
    from palaestra.envs.run.evaluation_set import evaluate_set, split_words

    return evaluate_set(*split_words(environment, others))


eval_command = front_door(
    "eval",
    """Try every task several times and report how many are solved, with 95% intervals.

    \b
      palaestra eval my_env.py --samples 4 --base-url http://localhost:8000/v1 --model NAME
      palaestra eval endless_terminals --env.n 50 --policy oracle
      palaestra eval my_env.py --env.held_out 0.2 --policy oracle    # only the held-out tasks
      palaestra eval my_env.py --failed-of last --base-url http://localhost:8000/v1 --model NAME

    This is `palaestra run ENV evaluate`, with the same settings; --samples N sets how often each task is tried. The
    results and one line per rollout are written to the run's folder, below `evaluation`, and also to the folder
    --env.data_dir_to_save_evals if that is set.
    `palaestra compare RUN OTHER` compares two runs of the same tasks.

    \b
      palaestra eval A B "C --env.n 20" --model M1 --base-url URL1 --model M2 --base-url URL2 --max-cost 5

    With several environments or models, this plays an evaluation set: every model on every environment, as runs in one
    folder, with one table at the end (`palaestra runs --table SET` prints it again). An environment or a model in
    quotes may have settings of its own, such as --model "M --env.prompt_price 2". --policy NAME counts as a model.
    --max-cost is the budget of the whole set, and --failed-of may name an earlier set. `palaestra resume SET` continues
    the runs that are not finished.
    """,
    "evaluate",
)

feed_command = front_door(
    "feed",
    """Serve an environment's rollouts to a trainer, as fast as the trainer accepts them.

    \b
      palaestra serve api &                                                       # the trainer fetches them here
      palaestra feed my_env.py --base-url http://localhost:9001/v1 --model NAME
      palaestra feed my_env.py --to http://trainer:8000 --group 8 --base-url http://localhost:9001/v1 --model NAME

    This is `palaestra run ENV serve`, with the same settings; --to URL is the trajectory server, by default
    http://localhost:8000. The command runs until the trainer has all its batches, or for --tasks N groups.
    """,
    "serve",
)
