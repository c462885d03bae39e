"""`palaestra verify RUN`: prove from what is stored that a run trains exactly what was sampled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from palaestra.cli.completion import complete_runs
from palaestra.core.errors import ConfigError
from palaestra.core.exits import FAILED, report


@click.command(
    "verify",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Prove from what is stored that a run trains exactly what was sampled.

    \b
      palaestra verify runs/my_env--NAME/20260101T000000Z-0a1b
      palaestra verify RUN --groups my_env.jsonl      # and that the trainer's file says the same
      palaestra verify RUN --rows rows.jsonl          # and a file of `palaestra export --to rows`
      palaestra verify RUN --json

    RUN is a run's folder or its journal. Derived again from every rollout's ledger: what the engine was given is what
    stands before each reply, token for token (T1); history was rewritten only where that is declared (T2); each sampled
    token is trained exactly once and no other (T3), with the engine's own log-probability (T4). The first violation is
    named with its place, and the exit code is 1. A run whose server only chatted has nothing to prove: exit code 2.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--groups", type=click.Path(path_type=Path), help="Another file of the groups than the one in RUN.")
@click.option("--rows", "exported", type=click.Path(path_type=Path, exists=True), help="A file of exported rows.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.pass_context
def command(context: click.Context, run: str, groups: Path | None, exported: Path | None, as_json: bool) -> None:
    from palaestra.rollouts.journal.reader import journal_of
    from palaestra.rollouts.journal.verify import verify_run

    journal = journal_of(run)
    beside = journal.with_name("groups.jsonl")
    lines = groups or (beside if beside.is_file() else None)
    if lines is not None and not lines.is_file():
        raise ConfigError(f"there is no {lines}: --groups names the file of groups that the run printed")
    verdict = verify_run(journal, lines, exported)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(verdict), "ok": verdict.ok}))
    else:
        rewritten = ", ".join(f"{count} {reason}" for reason, count in sorted(verdict.reasons.items())) or "none"
        click.echo(
            f"rollouts   {verdict.rollouts} ({verdict.without_tokens} without tokens)\n"
            f"turns      {verdict.turns} in {verdict.segments} segments; further segments: {rewritten}\n"
            f"tokens     {verdict.tokens}, of which sampled and trained: {verdict.trained}\n"
            f"own rows   {verdict.own_rows} made by the environment: not provable\n"
            f"groups     {f'{verdict.rows} rows in {verdict.lines} lines' if lines else 'no file looked at'}"
            f"{f'{chr(10)}rows       {verdict.exported}' if exported else ''}"
        )
    if not verdict.ok:
        report(verdict.violation)
        context.exit(FAILED)
    if not as_json:
        click.echo("ok: T1 to T4 hold")
