"""`palaestra verify RUN`: prove from its records that a run trains on exactly the sampled tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from palaestra.cli.completion import complete_runs
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import FAILED, report
from palaestra_slots.core.io import plugins

if TYPE_CHECKING:
    from palaestra.rollouts.journal.verify import RunVerdict
    from palaestra.rollouts.observe.training_steps import StepsVerdict

    ProveSteps = Callable[[Path], StepsVerdict]
    """Checks the steps of a training run in a folder."""


@click.command(
    "verify",
    help="""Prove from its records that a run trains on exactly the sampled tokens.

    \b
      palaestra verify runs/my_env--NAME/20260101T000000Z-0a1b
      palaestra verify RUN --groups my_env.jsonl      # also check the trainer's file
      palaestra verify RUN --rows rows.jsonl          # also check a file of `palaestra export --to rows`
      palaestra verify RUN --json

    RUN is a run's folder or journal, an id or `last`. The command checks four claims against every rollout's ledger.
    T1: each reply was sampled after exactly the tokens that the row has before it. T2: history was rewritten only where
    a rewrite is declared. T3: each sampled token is trained exactly once, and no other token is. T4: each trained token
    has the log-probability that the model server returned. The command stops at the first violation, prints where it
    is, and ends with exit code 1. For a run without token records, nothing can be proved: exit code 2.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--groups", type=HostPath(), help="The groups file, if not the one in RUN.")
@click.option("--rows", "exported", type=HostPath(exists=True), help="Also verify this file of exported rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, run: str, groups: Path | None, exported: Path | None, as_json: bool) -> None:
    from palaestra.rollouts.journal.reader import journal_of
    from palaestra.rollouts.journal.verify import verify_run
    from palaestra.rollouts.observe.training_steps import StepsVerdict

    journal = journal_of(run)
    beside = journal.with_name("groups.jsonl")
    lines = groups or (beside if beside.is_file() else None)
    if lines is not None and not lines.is_file():
        raise ConfigError(f"there is no {lines}: set --groups to the groups file whose path the run printed")
    verdict = verify_run(journal, lines, exported)
    prove = plugins.installed("palaestra.proofs").get("training")
    steps = StepsVerdict() if prove is None else cast("ProveSteps", plugins.load(prove))(journal.parent)
    violation = verdict.violation or steps.violation
    if as_json:
        trained = {"steps": steps.steps, "trained_groups": steps.groups}
        # Scripts compare these fields, so a notice is there only if it has a text.
        counted = {name: value for name, value in dataclasses.asdict(verdict).items() if name != "notice" or value}
        click.echo(json.dumps({**counted, **trained, "violation": violation, "ok": not violation}))
    else:
        _print_verdict(verdict, steps, lines, exported)
    if violation:
        report(violation)
        context.exit(FAILED)
    if not as_json:
        click.echo("ok: T1 to T4 hold")
        if verdict.notice:
            click.echo(f"warning: {verdict.notice}", err=True)


def _print_verdict(verdict: RunVerdict, steps: StepsVerdict, groups: Path | None, exported: Path | None) -> None:
    rewritten = ", ".join(f"{count} {reason}" for reason, count in sorted(verdict.reasons.items())) or "none"
    table = {
        "rollouts": f"{verdict.rollouts} ({verdict.without_tokens} without tokens)",
        "turns": f"{verdict.turns} in {verdict.segments} segments; further segments: {rewritten}",
        "tokens": f"{verdict.tokens}, of which sampled and trained: {verdict.trained}",
        "own rows": f"{verdict.own_rows} made by the environment: not provable",
        "groups": f"{verdict.rows} rows in {verdict.lines} lines" if groups else "no file checked",
        "rows": str(verdict.exported) if exported else "",
        "steps": f"{steps.steps}, trained on {steps.groups} groups" if steps.steps else "",
    }
    click.echo("\n".join(f"{name:<10} {text}" for name, text in table.items() if text))
