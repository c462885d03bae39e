"""`palaestra completion SHELL`, and what the commands offer to complete: environments, settings, runs, formats.

The scripts ask the program itself, so they know the environments and runs of the present folder. An unreadable file or
an unknown environment completes nothing; it is not an error here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from palaestra.envs.form import Form

_COMMANDS = ("process", "evaluate", "serve")
_PATH = CompletionItem("", type="file")


@click.command(
    "completion",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Print the completion script of a shell.

    \b
      eval "$(palaestra completion bash)"       # in ~/.bashrc
      eval "$(palaestra completion zsh)"        # in ~/.zshrc, after compinit
      palaestra completion fish > ~/.config/fish/completions/palaestra.fish

    It completes commands and their flags, the names of environments, the settings of an environment (--env.*) and
    their values, runs, and export formats.
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    from palaestra.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    click.echo(kind(cli, {}, "palaestra", "_PALAESTRA_COMPLETE").source())


def complete_environments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Environments by name, and files."""
    from palaestra.envs.discovery import known_environments

    named = ((each.name, each.summary) for each in known_environments(Path.cwd()).values())
    files = ((path.name, "") for path in sorted(Path.cwd().glob("*_env.py")))
    return _starting(incomplete, [*named, *files]) or [_PATH]


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs by id, the latest first, and folders."""
    from palaestra.rollouts.journal.reader import LAST, list_runs

    runs = [(folder.name, folder.parent.name) for folder in list_runs()]
    latest = [(LAST, f"{runs[0][1]}/{runs[0][0]}")] if runs else []
    return _starting(incomplete, [*latest, *runs]) or [_PATH]


def complete_formats(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Formats of `export`."""
    from palaestra.rollouts.export.exporter import FORMATS

    return _starting(incomplete, ((name, summary) for name, (_, summary) in FORMATS.items()))


def complete_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The word after ENV: a value of the flag before it, or the command of the environment."""
    given: tuple[str, ...] = context.params.get("settings") or ()
    if given and given[-1].startswith("-"):
        return _values(context, given[-1], incomplete)
    return [] if given else _starting(incomplete, ((name, "") for name in _COMMANDS))


class SettingsCommand(click.Command):
    """A command whose flags after its first word are settings of an environment."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-") and (form := _form(ctx)) is not None:
            from palaestra.envs.run.command import command_line

            line = command_line(form, "", None)
            found += _starting(incomplete, ((flag, line.about_flag(flag)) for flag in line.known_flags()))
        return list({item.value: item for item in found}.values())


def _values(context: click.Context, flag: str, incomplete: str) -> list[CompletionItem]:
    """The values of a flag of an environment, as far as there is a list of them."""
    from palaestra.envs.run.command import command_line

    if flag == "--policy":
        return _starting(incomplete, ((name, "") for name in ("oracle", "noop", "patch:", "replay:")))
    if flag == "--resume":
        return complete_runs(context, context.command.params[0], incomplete)
    form = _form(context)
    choices = command_line(form, "", None).choices(flag) if form is not None else []
    return _starting(incomplete, ((name, "") for name in choices)) if choices else [_PATH]


def _form(context: click.Context) -> Form | None:
    """The environment on the command line, or the one of the run that is resumed; None without one that loads."""
    from palaestra.core.errors import PalaestraError
    from palaestra.envs.config.layers import exported, read_dotenv
    from palaestra.envs.discovery import load_environment
    from palaestra.rollouts.journal.reader import open_recording

    with contextlib.suppress(PalaestraError), exported(read_dotenv(Path.cwd())):
        if (run := context.params.get("run")) is not None:
            from palaestra.envs.run.replay_run import recorded_form

            return recorded_form(open_recording(run), None)
        return load_environment(context.params.get("environment") or "", Path.cwd())
    return None


def _starting(incomplete: str, found: Iterable[tuple[str, str]]) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=" ".join(about.split())[:80] or None)
        for name, about in found
        if name.startswith(incomplete)
    ]
