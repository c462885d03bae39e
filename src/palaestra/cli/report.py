"""`palaestra report RUN`: write the HTML page of a run; a short name for `palaestra view RUN --html`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from palaestra.cli.completion import complete_runs
from palaestra.cli.host_path import HostPath


@click.command(
    "report",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Write the HTML report of a run, finished or not.

    \b
      palaestra report last
      palaestra report RUN --out report.html
      palaestra view RUN --html report.html    # the same page, with the exact tokens

    The report is the page of `palaestra view` in one file that opens without a server: scores with pass@k and
    categories, cost, failures, settings, training curves, and every rollout with its conversation. A run writes the
    report at its end; this command writes it again at any time from the journal, which is not changed. The report of a
    run with more than 2,000 rollouts contains the first 2,000. RUN is a run's folder, an id or `last`. The path goes to
    stdout.
    """,
)
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("--out", type=HostPath(dir_okay=False), help="The file to write. [default: RUN/report.html]")
@click.option("--json", "as_json", is_flag=True, help="Print the path, the run and its state as JSON.")
def command(run: str, out: Path | None, as_json: bool) -> None:
    from palaestra.core.errors import ConfigError
    from palaestra.rollouts.finished_run import open_run
    from palaestra.viewer.page_file import write_report

    found = open_run(run)
    path = out or found.path / "report.html"
    try:
        write_report(found.path, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; choose a different file with --out") from error
    facts = {"path": str(path), "run": str(found.path), "state": found.status.state}
    click.echo(json.dumps(facts) if as_json else path)
