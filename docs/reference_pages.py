"""Generates the reference pages from the code: commands, settings, Python, errors and exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

import palaestra
from palaestra.cli.main import COMMANDS, cli
from palaestra.envs.config.fields import BaseEnvConfig, HeldOutConfig, HermesAgentEnvConfig
from palaestra.inference.config import APIServerConfig
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core import errors

TOPICS = {
    "Running": ("palaestra.envs.run", "palaestra.rollouts"),
    "Sandboxes": ("palaestra_slots.sandbox",),
    "Agents and tools": ("palaestra.agent", "palaestra.tools", "palaestra_slots.processes"),
    "Models and tokens": ("palaestra.inference",),
    "Environments": ("palaestra.envs", "palaestra.suites"),
    "Errors": ("palaestra_slots.core.errors",),
    "Common types": ("palaestra",),
}
"""Topics of the Python reference, with the packages whose public names belong to each topic; the first topic that fits
counts."""


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, lines in {
        "commands": _commands(),
        "settings": _settings(),
        "python": _python(),
        "errors": _errors(),
    }.items():
        page, text = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not page.exists() or page.read_text() != text:  # Sphinx does not rebuild an unchanged page
            page.write_text(text)


def _commands() -> Iterator[str]:
    yield "# Commands\n\nThe help of every command, as `palaestra COMMAND --help` prints it.\n"
    context = click.Context(cli, info_name="palaestra")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield from _command(command, name, context, "##")


def _command(command: click.Command, name: str, parent: click.Context, heading: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
    yield f"\n{heading} {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _command(found, inner, context, heading + "#")


def _settings() -> Iterator[str]:
    yield "# Settings\n"
    yield (
        "Every setting is a flag (`--env.NAME`, `--openai.NAME`), a key of a YAML file, and an environment variable "
        "(`PALAESTRA_ENV_NAME`, `PALAESTRA_OPENAI_NAME`). `palaestra run ENV --help-all` lists the settings of an "
        "environment."
    )
    seen: set[str] = set()
    for title, model, prefix in (
        ("Run", BaseEnvConfig, "env"),
        ("Tools", ToolSettings, "env"),
        ("Agent and sandboxes", HermesAgentEnvConfig, "env"),
        ("Held-out tasks", HeldOutConfig, "env"),
        ("Model server", APIServerConfig, "openai"),
    ):
        yield f"\n## {title}\n"
        for name, field in model.model_fields.items():
            if f"{prefix}.{name}" in seen:
                continue
            seen.add(f"{prefix}.{name}")
            kind = inspect.formatannotation(field.annotation).replace("typing.", "")
            value = field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else f"default `{value!r}`"
            text = (field.description or "").replace("<", r"\<")
            yield f"`--{prefix}.{name}`\n: {text} (`{kind}`, {default})\n"


def _python() -> Iterator[str]:
    yield "# Python\n\nImport public names from `palaestra`. [Python](../python.md) shows how to use them.\n"
    topics: dict[str, list[str]] = {title: [] for title in TOPICS}
    for name in sorted(palaestra.__all__, key=str.lower):
        module = getattr(getattr(palaestra, name), "__module__", "palaestra")
        titles = (
            title
            for title, packages in TOPICS.items()
            if any(module == package or module.startswith(f"{package}.") for package in packages)
        )
        topics["Errors" if module == errors.__name__ else next(titles, "Common types")].append(name)
    for title, names in topics.items():
        yield f"\n## {title}\n"
        for name in names:
            found = getattr(palaestra, name)
            kind = "exception" if inspect.isclass(found) and issubclass(found, Exception) else "class"
            if not inspect.isclass(found) or found.__module__ == "builtins":
                kind = "function" if inspect.isfunction(found) else "data"
            directive = f"auto{kind}" if kind != "data" else "py:data"  # a value has only its class's docstring
            yield f"```{{eval-rst}}\n.. {directive}:: palaestra.{name}\n```\n"


def _errors() -> Iterator[str]:
    yield "# Errors\n\nAll errors that Palaestra raises, and the exit code of a command that ends with each error.\n"
    yield "| error | kind of | exit code | blame | meaning |\n|---|---|---|---|---|"
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.PalaestraError):
            kinds = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
            blame = getattr(error, "blame", None)
            meaning = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split()).replace("|", "\\|")
            yield f"| `{name}` | {kinds} | {error.exit_code} | {blame.value if blame else ''} | {meaning} |"
