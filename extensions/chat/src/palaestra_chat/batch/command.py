"""`palaestra batch FILE [flags]`: run an agent over a file of prompts."""

from __future__ import annotations

import hashlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import click

from palaestra.cli.completion import SettingsCommand, complete_settings
from palaestra_slots.core.errors import ConfigError

SETTINGS = {
    "--dataset-file": "--env.dataset_name",
    "--batch-size": "--env.batch_size",
    "--distribution": "--env.distribution",
    "--toolsets": "--env.enabled_toolsets",
    "--max-turns": "--env.max_agent_turns",
    "--max-tokens": "--env.max_token_length",
    "--max-samples": "--tasks",
    "--num-workers": "--concurrency",
    "--require": "--env.require",
    "--tries": "--env.tries",
    "--schema": "--env.schema_file",
    "--judge": "--env.judge",
    "--judge-model": "--env.judge_model",
    "--judge-base-url": "--env.judge_base_url",
    "--judge-api-key": "--env.judge_api_key",
    "--unique": "--env.unique",
    "--lean": "--env.lean",
    "--prompt-field": "--env.prompt_field",
    "--api-key": "--openai.api_key",
    "--ephemeral-system-prompt": "--env.ephemeral_system_prompt",
    "--prefill-messages-file": "--env.prefill_messages_file",
    "--reasoning-effort": "--env.reasoning_effort",
    "--reasoning-disabled": "--env.reasoning_disabled",
    "--providers-allowed": "--env.providers_allowed",
    "--providers-ignored": "--env.providers_ignored",
    "--providers-order": "--env.providers_order",
    "--provider-sort": "--env.provider_sort",
}
"""The flags of `palaestra batch`, and the settings that they set. A flag may be written with `_` instead of `-`."""

WITHOUT_EFFECT = ("--verbose", "--log-prefix-chars")
"""Flags that existing scripts use and that have no effect, because they configure a log that this command does not
print."""

_HELP = """Run an agent over a file of prompts, and write the conversations.

\b
  palaestra batch prompts.jsonl --base-url http://localhost:8000/v1 --model NAME
  palaestra batch prompts.jsonl --distribution terminal_only --run-name first --num-workers 200
  palaestra batch --resume --run-name first             # continue; finished rows are not run again
  palaestra batch --list-distributions
  head -5 prompts.jsonl | palaestra batch - --policy noop

FILE is a JSONL, JSON, CSV or Parquet file, a folder of such files, a data set on the hub, or - for JSONL on stdin. A
row has a `prompt` (text or messages), and may have an `image` and a `cwd`.

\b
  --run-name NAME        write to data/NAME instead of a folder below runs/
  --distribution NAME    draw the toolsets of each row at random   --toolsets T …   or use these
  --require WHAT …       discard samples without WHAT: reasoning, natural (end), known_tools, tool_calls
  --schema FILE          discard samples whose last reply is not JSON that fits this JSON schema
  --judge CRITERION      discard samples that a model judges not to meet it   --judge-model M, --judge-base-url U
  --unique SIMILARITY    discard samples that repeat an earlier row's: 1 if equal, 0.8 if nearly
  --tries N              sample a row again until a sample is kept, at most N times
  --lean                 write neither tool schemas nor counts of 0 in each line
  --num-workers N        rows in progress at a time [64]           --max-samples N  at most N rows
  --max-turns N          model calls per row [10]                  --max-tokens N   tokens per reply
  --batch-size N         rows in one file batch_N.jsonl [100]      --group N        samples per row
  --prompt-field NAME    the column with the prompt                --max-cost C     pause at this cost
  --ephemeral-system-prompt TEXT, --prefill-messages-file FILE, --reasoning-effort E, --reasoning-disabled,
  --providers-allowed P …, --providers-ignored P …, --providers-order P …, --provider-sort S

All settings of `palaestra run` work too. The folder gets trajectories.jsonl, batch_N.jsonl, discarded.jsonl,
statistics.json and the journal, from which `palaestra export` makes every other format."""


class BatchCommand(SettingsCommand):
    """A click command that also completes the flags of `palaestra batch`."""

    own_flags: ClassVar[Mapping[str, str]] = {**SETTINGS, "--run-name": "", "--list-distributions": ""}


@click.command(
    "batch",
    cls=BatchCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    help=_HELP,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="FILE [FLAGS]", shell_complete=complete_settings)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    from palaestra.envs.discovery import load_environment
    from palaestra.envs.run.command import run_command
    from palaestra.rollouts.journal.reader import BATCHES

    if "--list-distributions" in (word.replace("_", "-") for word in words):
        click.echo(_distributions())
        return
    name, resumes, rest = _own_flags(words)
    folder = BATCHES / name if name else None
    with tempfile.TemporaryDirectory() as temporary:
        rest = list(_batch_settings(rest, Path(temporary) if "--dry-run" in rest else BATCHES))
        if resumes:
            from palaestra.cli.resume import resume_run

            context.exit(resume_run(str(folder), rest, "palaestra batch"))
        form = load_environment("batch", Path.cwd())
        context.exit(run_command(form, rest, prog="palaestra batch", command="process", folder=folder))


def _own_flags(words: Sequence[str]) -> tuple[str, bool, list[str]]:
    """Return the name of the run, whether `--resume` continues the run with this name, and the other words. Raises
    `ConfigError`."""
    name, resumes, rest, waiting = "", False, list[str](), list(words)
    while waiting:
        word = waiting.pop(0)
        written, _, value = word.partition("=")
        flag = _dashed(written)
        follows = bool(waiting) and not waiting[0].startswith("--")
        if flag == "--run-name":
            name = value or (waiting.pop(0) if follows else "")
            if not name or Path(name).name != name:
                raise ConfigError("--run-name needs the name of a folder in data/, without a slash")
        elif flag == "--resume" and not value and (not follows or name):
            resumes = True
        elif flag in WITHOUT_EFFECT:
            click.echo(f"note: {written} has no effect: progress is shown for the whole batch", err=True)
            waiting = waiting[follows and flag != "--verbose" :]
        else:
            rest.append(word)
    if resumes and not name:
        raise ConfigError("specify the batch to continue: --resume --run-name NAME, or --resume RUN")
    return name, resumes, rest


def _batch_settings(words: Sequence[str], stdin: Path) -> Iterator[str]:
    """Yield the words with the batch's flags replaced by settings, after a setting for the file. Rows from stdin are
    stored in the folder `stdin`."""
    files = list(itertools.takewhile(lambda word: word == "-" or not word.startswith("-"), words))
    if len(files) > 1:
        raise ConfigError(
            f"a batch takes one FILE, got {len(files)}: {' '.join(files)}. To use several files, put them in a folder"
        )
    if files:
        yield from ("--env.dataset_name", _kept_stdin(stdin) if files[0] == "-" else files[0])
    for word in words[len(files) :]:
        written, equals, value = word.partition("=")
        flag = _dashed(written)
        yield f"{SETTINGS.get(flag, flag)}{equals}{value}"


def _dashed(written: str) -> str:
    """Return a flag with dashes, `--run-name` for `--run_name`; dotted settings and values are unchanged."""
    return written.replace("_", "-") if written.startswith("--") and "." not in written else written


def _kept_stdin(folder: Path) -> str:
    """Store the rows of stdin in `folder`, so that the batch can be resumed, and return the path. Raises
    `DiskError`."""
    from palaestra_slots.core.io.durable_files import replaced, writing

    rows = sys.stdin.buffer.read()
    path = folder / f"stdin-{hashlib.sha256(rows).hexdigest()[:12]}.jsonl"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(rows)
    return str(path)


def _distributions() -> str:
    from palaestra.tools.registry.distributions import DISTRIBUTIONS

    lines = []
    for name, distribution in DISTRIBUTIONS.items():
        chances = ", ".join(f"{toolset} {chance} %" for toolset, chance in distribution.chances.items())
        lines.append(f"{name:<16} {distribution.description}: {chances}")
    return "\n".join(lines)
