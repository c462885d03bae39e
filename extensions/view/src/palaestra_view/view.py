"""`palaestra view [RUN]` shows runs, rollouts and tokens in a browser, and `palaestra report RUN` writes that page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra.envs.config.host_path import HostPath
from palaestra_view.annotate import author_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from palaestra_view.runs import OpenRuns
    from palaestra_view.token_texts import TokenTexts


@click.command(
    "view",
    help="""Look at runs, rollouts and tokens in a browser.

    \b
      palaestra view                          # all runs in this folder
      palaestra view last
      palaestra view RUN --html run.html      # one file, to send or to keep
      palaestra view RUN --html group.html --rollout '000003-*'
      palaestra view logs/task.eval           # an Inspect log; also ATIF, conversations

    RUN is a run's folder, an id or `last`, or a folder with runs. It may also be a file of another program, or a folder
    of such files: Inspect logs (.eval, .json), ATIF documents, and JSON lines with messages. The page shows scores with
    their intervals, every
    conversation, the exact tokens with mask and log-probabilities, and where the rollouts of a group part. It follows a
    run that is still going on. The server listens on 127.0.0.1 only, and its address contains a token. It writes
    only the annotations that you make; its index of large runs is in ~/.cache/palaestra/view.
    """,
)
@click.argument("run", default="", shell_complete=complete_runs)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port. [default: a free one]")
@click.option("--no-open", is_flag=True, help="Do not open the browser.")
@click.option(
    "--tokenizer",
    metavar="NAME",
    help="The tokenizer for the texts of tokens: a folder or a model's name. [default: the run's own, if you made the "
    "run on this machine and its tokenizer is a folder]",
)
@click.option("--html", type=HostPath(dir_okay=False), help="Write one self-contained file instead of serving.")
@click.option(
    "--rollout", "rollouts", multiple=True, metavar="PATTERN", help="With --html: only these rollouts. Repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address, or the path of the file, as JSON.")
def command(
    run: str,
    port: int,
    no_open: bool,
    tokenizer: str | None,
    html: Path | None,
    rollouts: tuple[str, ...],
    as_json: bool,
) -> None:
    from palaestra_slots.core.errors import ConfigError
    from palaestra_view.runs import index_store, open_runs
    from palaestra_view.token_texts import TokenTexts

    if rollouts and html is None:
        raise ConfigError("--rollout chooses the rollouts of a file: set --html too")
    if html is not None:
        from palaestra.envs.run.set_file import is_set
        from palaestra.rollouts.journal.reader import find_run
        from palaestra_view.page_file import Chosen, write_page

        folder = find_run(run or "last")
        if is_set(folder):

            def page_of(place: Path, page: Path) -> None:
                one = open_runs(str(place), index_store())
                try:
                    write_page(page, one, Chosen(rollouts), TokenTexts(one, tokenizer))
                finally:
                    one.close()

            _write_set(html, folder, page_of, as_json)
            return
        runs = open_runs(run or "last", index_store())
        _name_problems(runs)
        if not runs.run_name:
            _say_which(list(runs), runs.root)
        path = write_page(html, runs, Chosen(rollouts), TokenTexts(runs, tokenizer))
        click.echo(json.dumps({"path": str(path)}) if as_json else path)
        return
    runs = open_runs(run, index_store())
    _name_problems(runs)
    asyncio.run(_serve_viewer(runs, TokenTexts(runs, tokenizer), port, opens=not no_open, as_json=as_json))


@click.command(
    "report",
    help="""Write the HTML report of a run, finished or not.

    \b
      palaestra report last
      palaestra report RUN --out report.html
      palaestra view RUN --html report.html    # the same page, with the exact tokens

    The report is the page of `palaestra view` in one file that opens without a server: scores with pass@k and
    categories, cost, failures, settings, training curves, and every rollout with its conversation. A run writes the
    report at its end; this command writes it again at any time from the journal, which is not changed. The report of a
    run with more than 2,000 rollouts contains the first 2,000. RUN is a run's folder, an id or `last`. Of an evaluation
    set, the file is the table, with a page for each run next to it. The path goes to stdout.
    """,
)
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("--out", type=HostPath(dir_okay=False), help="The file to write. [default: RUN/report.html]")
@click.option("--json", "as_json", is_flag=True, help="Print the path, the run and its state as JSON.")
def report_command(run: str, out: Path | None, as_json: bool) -> None:
    from palaestra.envs.run.set_file import is_set
    from palaestra.rollouts.finished_run import open_run
    from palaestra.rollouts.journal.reader import find_run
    from palaestra_slots.core.errors import ConfigError
    from palaestra_view.page_file import write_report

    folder = find_run(run)
    if is_set(folder):
        _write_set(out or folder / "report.html", folder, write_report, as_json)
        return
    found = open_run(run)
    path = out or found.path / "report.html"
    try:
        write_report(found.path, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; choose a different file with --out") from error
    facts = {"path": str(path), "run": str(found.path), "state": found.status.state}
    click.echo(json.dumps(facts) if as_json else path)


def _write_set(path: Path, folder: Path, write_run: Callable[[Path, Path], None], as_json: bool) -> None:
    from palaestra_slots.core.printable import printable
    from palaestra_view.set_pages import write_set

    for problem in write_set(path, folder, write_run):
        click.echo(printable(problem), err=True)
    click.echo(json.dumps({"path": str(path), "set": str(folder)}) if as_json else path)


def _say_which(names: Sequence[str], root: Path) -> None:
    if len(names) > 1:
        from palaestra_slots.core.printable import printable

        others = f"choose another one with `palaestra view {root}/NAME --html FILE`"
        click.echo(printable(f"{root} has {len(names)} runs; the file has only {names[0]}: {others}"), err=True)


def _name_problems(runs: OpenRuns) -> None:
    """Name each run or file that cannot be shown. The page names them too."""
    from palaestra_slots.core.printable import one_line

    for name, reason in runs.problems.items():
        click.echo(f"{one_line(name, 200)} cannot be shown: {one_line(reason, 500)}", err=True)


async def _serve_viewer(runs: OpenRuns, texts: TokenTexts, port: int, *, opens: bool, as_json: bool) -> None:
    import secrets
    import webbrowser
    from urllib.parse import urlencode

    from palaestra_view.server import Viewer, serving_viewer

    token = secrets.token_urlsafe(24)
    async with serving_viewer(Viewer(runs, token, texts, author_name()), token, port) as url:
        address = f"{url}/?token={token}" + (f"#/run?{urlencode({'run': runs.run_name})}" if runs.run_name else "")
        click.echo(json.dumps({"url": address}) if as_json else address)
        click.echo("Ctrl-C stops the viewer", err=True)
        if opens:
            # A text browser would block the server until it is closed.
            await asyncio.to_thread(webbrowser.open, address)
        await asyncio.Event().wait()
