"""`palaestra completion SHELL`: shell completion of environments, settings, runs and formats.

The shell scripts call the program, so completion knows the environments and runs of the current folder. If a file
cannot be read or an environment is unknown, the program reports no error and completes only what does not depend on it,
such as general flags and paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click
from click.shell_completion import CompletionItem, get_completion_class

from palaestra_slots.core.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.envs.config.command_line import CommandLine
    from palaestra.envs.config.fields import BaseEnvConfig
    from palaestra.envs.form import Form
    from palaestra_tokens.config import APIServerConfig

_PATH = CompletionItem("", type="file")


@click.command(
    "completion",
    help="""Print the completion script for a shell.

    \b
      eval "$(palaestra completion bash)"       # in ~/.bashrc
      eval "$(palaestra completion zsh)"        # in ~/.zshrc, after compinit
      palaestra completion fish > ~/.config/fish/completions/palaestra.fish

    The script completes commands and their flags, the names of environments, the settings of an environment (--env.*)
    and their values, runs, and export formats.
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    kind = get_completion_class(shell)
    assert kind is not None  # click has a class for each of the three shells
    click.echo(kind(click.get_current_context().find_root().command, {}, "palaestra", "_PALAESTRA_COMPLETE").source())


def complete_environments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of environments, and files."""
    from palaestra.envs.discovery import known_environments

    named = ((each.name, each.summary) for each in known_environments(Path.cwd()).values())
    files = ((path.name, "") for path in sorted(Path.cwd().glob("*_env.py")))
    return starting(incomplete, [*named, *files]) or [_PATH]


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the ids of runs, the latest first, and folders."""
    from palaestra.rollouts.journal.reader import LAST, list_runs, run_name

    folders = list_runs()
    runs = [(run_name(folder), folder.parent.name) for folder in folders]
    latest = [(LAST, f"{folder.parent.name}/{folder.name}") for folder in folders[:1]]
    return starting(incomplete, [*latest, *runs]) or [_PATH]


def complete_formats(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the formats of `export`."""
    from palaestra.rollouts.export.formats import FORMATS

    return starting(incomplete, ((name, summary) for name, (_, summary) in FORMATS.items()))


def complete_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a word after the subcommand. After a flag, it is the flag's value. If only flags precede it, it is ENV
    or RUN. Directly after ENV or RUN, it is a command of the environment. For `batch`, the shell completes paths."""
    from palaestra.envs.config.command_line import COMMANDS

    words = _words_before(context)
    if words[-1].startswith("-") and "=" not in words[-1]:
        return _flag_values(context, words[-1], incomplete)
    named, first = _environment_or_run(context), context.command.params[0]
    if context.command.name == "batch":
        return [_PATH]
    if named is None and isinstance(first, click.Argument):
        return first.shell_complete(context, incomplete)
    return starting(incomplete, ((name, "") for name in COMMANDS)) if words[-1] == named else []


class SettingsCommand(click.Command):
    """A command whose flags are settings of an environment. `own_flags` maps its additional flags to the settings that
    they set."""

    own_flags: ClassVar[Mapping[str, str]] = {}

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            from palaestra.envs.config.command_line import GENERAL_FLAGS

            form = _form(ctx)
            line = None if form is None else _command_line(form)
            known = GENERAL_FLAGS if line is None else line.known_flags()
            found += starting(incomplete, ((flag, line.about_flag(flag) if line else "") for flag in known))
            found += starting(incomplete, ((flag, "") for flag in self.own_flags))
        return list({item.value: item for item in found}.values())


def _words_before(context: click.Context) -> list[str]:
    """Return the words that precede the word to complete."""
    first = context.params.get("environment") or context.params.get("run")
    given = context.params.get("settings") or context.params.get("words") or ()
    return [*([first] if first else []), *given] or [""]


def _environment_or_run(context: click.Context) -> str | None:
    """Return the environment or run that the command line names, or None if it names none yet."""
    from palaestra.envs.config.command_line import first_word

    with contextlib.suppress(ConfigError):
        return first_word(_words_before(context), "ENV")[0] or None
    return None


def _flag_values(context: click.Context, flag: str, incomplete: str) -> list[CompletionItem]:
    """Return the possible values of an environment's flag. If they do not form a known list, the shell completes
    paths."""
    from palaestra_slots.core.config import SHORT_FORMS

    if flag == "--policy":
        return starting(incomplete, ((name, "") for name in ("oracle", "noop", "patch:", "replay:")))
    if flag == "--resume":
        return complete_runs(context, context.command.params[0], incomplete)
    own = context.command.own_flags if isinstance(context.command, SettingsCommand) else {}
    flag = own.get(flag, flag)
    # Known lists come before the form, because loading an environment can take seconds.
    listed = _LISTS.get(SHORT_FORMS.get(flag, flag.removeprefix("--")).partition(".")[2])
    if listed is not None:
        return starting(incomplete, ((name, "") for name in listed()))
    form = _form(context)
    choices = _command_line(form).choices(flag) if form is not None else []
    return starting(incomplete, ((name, "") for name in choices)) if choices else [_PATH]


def _isolations() -> Iterable[str]:
    from palaestra_slots.sandbox.slot import Rung

    return ["best", *(rung.label for rung in sorted(Rung, reverse=True))]


def _backends() -> Iterable[str]:
    from palaestra_slots.sandbox.backends.registry import backend_names

    return backend_names()


def _distributions() -> Iterable[str]:
    from palaestra.tools.registry.distributions import DISTRIBUTIONS

    return DISTRIBUTIONS


def _toolsets() -> Iterable[str]:
    from palaestra.tools.registry.toolsets import TOOLSETS

    return TOOLSETS


def _parsers() -> Iterable[str]:
    from palaestra_tokens.parsers import list_parsers

    return list_parsers()


_LISTS: Mapping[str, Callable[[], Iterable[str]]] = {
    "isolation": _isolations,
    "tool_pool_mode": _backends,
    "terminal_backend": _backends,
    "distribution": _distributions,
    "enabled_toolsets": _toolsets,
    "disabled_toolsets": _toolsets,
    "tool_parser": _parsers,
    "tool_call_parser": _parsers,
}
"""Settings whose type is plain text, but which have a known list of values."""


def _command_line(form: Form) -> CommandLine[BaseEnvConfig, APIServerConfig]:
    from palaestra.envs.run.command import command_line

    return command_line(form, "", None)


def _form(context: click.Context) -> Form | None:
    """Return the environment that the command line names, or the environment of the run to resume; None if it cannot be
    loaded."""
    from palaestra.envs.config.dotenv import exported, read_keys
    from palaestra.envs.discovery import load_environment
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra_slots.core.errors import PalaestraError

    with contextlib.suppress(PalaestraError), exported(read_keys(Path.cwd())):
        if context.command.name == "batch":
            return load_environment("batch", Path.cwd())
        named = _environment_or_run(context)
        if named is not None and context.command.name == "resume":
            from palaestra.envs.run.replay_run import recorded_form

            return recorded_form(open_recording(named), None)
        if named is not None:
            return load_environment(named, Path.cwd())
    return None


def starting(incomplete: str, found: Iterable[tuple[str, str]]) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=" ".join(about.split())[:80] or None)
        for name, about in found
        if name.startswith(incomplete)
    ]
