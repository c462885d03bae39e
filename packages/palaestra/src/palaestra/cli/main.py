"""The `palaestra` command itself: the table of subcommands, help, version, suggestions.

The module of a subcommand is imported only when the subcommand is used, so that `palaestra --help` stays fast.
Invariant: for an unknown word, the program exits with code 2, and suggests the nearest known word if one is near.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from palaestra import __version__
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.exits import DONE, USAGE, Program

COMMANDS = {
    "run": "Roll out an environment.",
    "eval": "Evaluate a model on an environment, with pass@k and intervals.",
    "chat": "Talk to an agent in the terminal, or send it one message.",
    "acp": "Serve agents to an editor over the Agent Client Protocol.",
    "batch": "Run an agent over a file of prompts.",
    "train": "Train a model on an environment's rollouts.",
    "feed": "Serve an environment's rollouts to a trainer.",
    "runs": "List the runs in this folder, the latest first.",
    "resume": "Continue a run that was killed or interrupted.",
    "status": "Show the state of a run: what is in flight, failures, cost.",
    "view": "Look at runs, rollouts and tokens in a browser.",
    "report": "Write the HTML report of a run, finished or not.",
    "annotate": "Tag rollouts, add notes, or give a verdict such as `hack`.",
    "export": "Write a run's rollouts in another program's format.",
    "compare": "Compare runs of the same tasks.",
    "verify": "Prove that a run trains on exactly the sampled tokens.",
    "grade": "Score the kept workspaces of a run again, without an agent.",
    "replay": "Replay a run without a model, and compare every observation.",
    "fork": "Continue a rollout from one of its turns, in a new run.",
    "env": "List, write, port and check environments.",
    "audit": "Find the faults of an environment's tasks, each with a witness.",
    "tasks": "Make verifiable tasks.",
    "images": "Make, pull, list and remove root file systems for slots.",
    "model": "Get, convert and make small models.",
    "tools": "List the tools and toolsets of agents.",
    "gateway": "Serve conversations on chat platforms, e-mail and HTTP.",
    "serve": "Run servers for trainers, slots, tools and models.",
    "slots": "List and clean up slots and workspaces on this machine.",
    "doctor": "Report what works here, or check backends or a model server.",
    "completion": "Print the completion script for a shell.",
}
"""Maps each subcommand to its help line."""

_OWN = {
    "run": "palaestra.cli.run:command",
    "eval": "palaestra.cli.run:eval_command",
    "feed": "palaestra.cli.run:feed_command",
    "runs": "palaestra.cli.run_status:runs_command",
    "resume": "palaestra.cli.resume:command",
    "status": "palaestra.cli.run_status:status_command",
    "export": "palaestra.cli.export:command",
    "compare": "palaestra.cli.compare:command",
    "verify": "palaestra.cli.verify:command",
    "grade": "palaestra.cli.grade:command",
    "replay": "palaestra.cli.replay:command",
    "fork": "palaestra.cli.resume:fork_command",
    "env": "palaestra.cli.env:command",
    "tasks": "palaestra.cli.plugin_group:tasks_command",
    "images": "palaestra.cli.plugin_group:images_command",
    "tools": "palaestra.cli.tools:command",
    "serve": "palaestra.cli.serve:command",
    "slots": "palaestra.cli.slots:command",
    "doctor": "palaestra.cli.doctor:command",
    "completion": "palaestra.cli.completion:command",
}
"""Maps each subcommand of this package to its module and function. The other subcommands are entry points in the
group `palaestra.commands` of extensions."""

COMPAT = "--compat"
_LOAD_ENVIRONMENTS = ("run", "eval", "feed", "train", "env", "audit", "resume", "replay", "grade", "fork")
"""The commands with the flag `--compat`."""

_EXAMPLES = """\b
  palaestra run terminal_test --policy oracle --tasks 2
  palaestra run my_env.py --base-url http://localhost:8000/v1 --model NAME
  palaestra doctor
"""

_EXIT_CODES = """\b
All commands: -q (errors only), -v (log, tracebacks), --no-color. With --json, errors are JSON too.

\b
Exit codes: 0 done, 1 failed, 2 usage or settings, 3 more unscored rollouts than allowed, or paused,
4 model server unreachable or refused, 5 isolation unavailable, 130 interrupted or drained."""


_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


_NEW_OBJECTS = 10_000
"""Objects between two collections. Python's own 700 collect a hundred times while modules load, and find nothing."""


class LazyGroup(click.Group):
    """A group that imports a subcommand only when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in _OWN:
            from palaestra.cli.plugin_group import command_of

            return command_of(cmd_name)
        module, _, name = _OWN[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise ConfigError(_unknown(args[0]))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, as click does, without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=f"Train and evaluate tool-using agents in isolated slots.\n\n{_EXAMPLES}",
    epilog=_EXIT_CODES,
)
@click.version_option(__version__, prog_name="palaestra")
def cli() -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, report failures, and return an exit code of `palaestra_slots.core.exits`. The console
    script calls this function."""
    gc.set_threshold(_NEW_OBJECTS)
    with Program(sys.argv[1:] if argv is None else argv) as program:
        try:
            # In its standalone mode, click would print errors and exit by itself, also with --json.
            program.exit_code = (
                cli.main(with_old_imports(program.words), prog_name="palaestra", standalone_mode=False) or DONE
            )
        except click.exceptions.NoArgsIsHelpError as error:  # a group without its subcommand: print its help
            click.echo(error.format_message(), err=True)
            return USAGE
        except click.UsageError as error:
            place = f" See `{error.ctx.command_path} --help`" if error.ctx is not None else ""
            raise ConfigError(f"{_in_words(error)}{place}") from None
        except click.ClickException as error:
            raise ConfigError(error.format_message()) from None
        except click.Abort:
            # click turns a KeyboardInterrupt into Abort, also outside of its standalone mode.
            raise KeyboardInterrupt from None
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not _is_somewhere():
                raise ConfigError(
                    "the current folder has been deleted: change to another one, such as `cd ~`"
                ) from None
            if error.errno in _NO_ACCESS and error.filename is not None:
                raise DiskError(f"cannot use {error.filename}: {error.strerror}") from None
            # An error that names a file is not about standard output.
            if error.errno not in _NO_ROOM or error.filename is not None:
                raise
            _silence()
            raise DiskError(f"cannot write the output: {error.strerror}") from None
    return program.exit_code


def with_old_imports(words: Sequence[str]) -> list[str]:
    """Return the words without `--compat`. If a command that loads environments has this flag, let scripts import
    names by their old module paths."""
    if COMPAT not in words or words[0] not in _LOAD_ENVIRONMENTS:
        return list(words)
    from palaestra.envs.discovery import allow_old_imports

    allow_old_imports()
    return [word for word in words if word != COMPAT]


def _is_somewhere() -> bool:
    """Return whether the current folder exists."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _silence() -> None:
    """Discard buffered stdout; otherwise Python would report the write error again at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _in_words(error: click.UsageError) -> str:
    """Return the message about a wrong flag or argument, with the nearest existing flag."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return f"{error.format_message().rstrip('.')}."
    from palaestra_slots.core.config import nearest

    flags = [flag for each in error.ctx.command.get_params(error.ctx) for flag in each.opts]
    return f"unknown flag {error.option_name}.{nearest(error.option_name, flags)}"


_OTHER_WORDS = {
    "list": "runs", "ls": "runs", "logs": "status", "show": "status", "start": "run",
    "new": "env new", "init": "env new", "check": "env check", "build": "tasks build",
    "evaluate": "eval", "rescore": "grade", "score": "grade", "clean": "slots clean",
}  # fmt: skip
"""Maps command names of other programs to the corresponding commands of this one."""


def _unknown(word: str) -> str:
    from palaestra_slots.core.config import nearest  # imported here, so that only this message loads pydantic

    hint = f" Did you mean {_OTHER_WORDS[word]}?" if word in _OTHER_WORDS else nearest(word, COMMANDS)
    return f"there is no command {word!r}.{hint} The commands are {', '.join(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
