"""`palaestra report RUN`: write the HTML report of a run, finished or not."""

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

    The report shows scores with pass@k and categories, cost, failures, settings, training curves, and every finished
    group with its conversations. A run writes the report at its end; this command writes it again at any time from the
    journal, which is not changed. RUN is a run's folder, an id or `last`. The path goes to stdout.
    """,
)
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("--out", type=HostPath(dir_okay=False), help="The file to write. [default: RUN/report.html]")
@click.option("--json", "as_json", is_flag=True, help="Print the path, the run and its state as JSON.")
def command(run: str, out: Path | None, as_json: bool) -> None:
    from palaestra.core.errors import ConfigError
    from palaestra.rollouts.export.html import write_report
    from palaestra.rollouts.finished_run import open_run
    from palaestra.rollouts.observe.failures import Failures
    from palaestra.rollouts.observe.metrics import Figures, group_size
    from palaestra.rollouts.observe.verdicts import Verdicts
    from palaestra.trainers.charts import training_charts

    found = open_run(run)
    recording, path = found.recording, out or found.path / "report.html"
    figures, failures, verdicts = Figures(group_size(recording.meta.config)), Failures(), Verdicts()
    for group in recording:
        figures.add(group)
        failures.add(group)
        verdicts.add(group)
    figures.unfinished = recording.unfinished
    meta = {"env": recording.meta.env, "model": recording.meta.model, "started_at": recording.meta.started_at}
    meta |= {"run": str(found.path), "state": found.status.state}
    if recording.unfinished:
        meta["unfinished groups"] = recording.unfinished
    try:
        write_report(
            path,
            recording,
            meta,
            figures,
            own={name: value for name, value in found.metrics.items() if name.startswith("eval/")},
            causes=failures.causes(),
            verdicts=list(verdicts.lines()),
            config=recording.meta.config,
            charts=training_charts(found.path),
        )
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a different file with --out") from error
    facts = {"path": str(path), "run": str(found.path), "state": found.status.state}
    click.echo(json.dumps(facts) if as_json else path)
