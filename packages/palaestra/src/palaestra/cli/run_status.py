"""`palaestra runs` lists the runs in this folder; `palaestra status RUN` prints the state of one, during the run or
afterwards."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.rollouts.observe.status import RunStatus

_SHOWN, _SHOWN_METRICS, _SHOWN_NODES = 5, 10, 20


@click.command(
    "status",
    help="""Show the state of a run.

    \b
      palaestra status                            # of the last run
      palaestra status runs/my_env--NAME/20260101T000000Z-0a1b
      palaestra status RUN --watch
      palaestra status RUN --json | jq .in_flight

    RUN is a run's folder, an id, `last`, or an evaluation set with all its runs; the command does not change it. It
    shows the rollouts in flight by stage, the nodes of a cluster with their busy slots, the rollouts that have been
    idle longest, the reward with and without the rollouts that infrastructure failures ended (with 95% intervals), the
    causes of those failures, the time of each stage, tokens, cost and disk.
    --watch repeats the output until the run has ended.
    """,
)
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("--watch", is_flag=True, help="Repeat until the run has ended.")
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between readings."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line per reading.")
def status_command(run: str, watch: bool, every: float, as_json: bool) -> None:
    from palaestra.envs.run.set_file import is_set, not_run, runs_of
    from palaestra.rollouts.journal.reader import find_run, journal_of, run_name
    from palaestra.rollouts.observe.status import RUNNING, RunReader, RunStatus
    from palaestra_slots.core.errors import ConfigError

    folder = find_run(run)
    whole, readers, found = is_set(folder), dict[Path, RunReader](), list[RunStatus]()
    while True:
        found.clear()
        paths = runs_of(folder) if whole else [journal_of(folder).parent]
        for path in paths:
            reader = readers.setdefault(path, RunReader(journal_of(path)))
            found.append(reader.read())
            if not found[-1].run_id:
                raise ConfigError(
                    f"{reader.journal} does not begin with the record of a run, so it has no state to show"
                )
        waiting = not_run(folder) if whole else {}
        if as_json:
            plain = [each.to_dict() for each in found]
            click.echo(json.dumps({"runs": plain, "not_run": waiting} if whole else plain[0]))
        else:
            _print(dict(zip(map(run_name, paths), found, strict=True)), waiting, clear=watch and sys.stdout.isatty())
        if not watch or all(each.state != RUNNING for each in found):
            return
        time.sleep(every)


def _print(found: Mapping[str, RunStatus], waiting: Mapping[str, str], *, clear: bool) -> None:
    from palaestra_slots.core.printable import printable

    if clear:
        click.clear()
    click.echo("\n\n".join("\n".join(_status_lines(name, each, time.time())) for name, each in found.items()))
    for name, reason in waiting.items():
        click.echo(printable(f"\nnot run    {name}{reason and ': '}{reason}"))


@click.command(
    "runs",
    help="""List the runs in this folder, the latest first.

    \b
      palaestra runs
      palaestra runs --limit 100 --json | jq -r '.[] | select(.state == "done") | .path'
      palaestra runs --table                             # pass@k, intervals, cost, time, tokens, coverage of every run
      palaestra runs RUN OTHER --format html -o runs.html

    Each line shows the run's id, state, kind (run, eval, feed or batch), finished groups, mean reward (for a batch, the
    share of samples that are kept), scored and planned rollouts, environment and model. Other commands take the id, or
    its beginning, as RUN; `last` is the first run in this list, `last:2` the second. The list includes named
    batches (data/NAME).

    With --table, one line per RUN (a run, or a folder of runs such as an evaluation set; by default all runs here)
    shows pass@1 and, for all rollouts per task, pass@k with their 95% intervals, the mean reward, how many tasks and
    rollouts have a score, cost, time and tokens. The row of a run of some of the environment's tasks gives the number
    of all, and pass@k that of the tasks which it covers. Rollouts that a content filter ended or that were asked again
    after a failure of the model server are counted, and different versions of the score are named. Scores that
    `palaestra grade` gave replace the recorded ones.
    """,
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@click.option("--table", is_flag=True, help="Print the table instead of the list.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "html", "csv", "markdown", "latex"]),
    default="text",
    show_default=True,
    help="The format of the table.",
)
@click.option("-o", "--out", "out", type=HostPath(dir_okay=False), help="Write the table to this file.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of runs to list."
)
@click.option(
    "--root",
    type=HostPath(exists=True, file_okay=False),
    help="The folder of the runs. [default: runs]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs_command(
    runs: tuple[str, ...], table: bool, form: str, out: Path | None, limit: int, root: Path | None, as_json: bool
) -> None:
    if runs or table or out or form != "text":
        _print_table(runs, root, form, out, as_json)
        return
    from palaestra.rollouts.journal.reader import JOURNAL_NAME, RUNS, list_runs, run_name
    from palaestra.rollouts.observe.status import RunReader

    folders = list_runs(root or RUNS)
    # Only those that are listed: each status reads a whole journal.
    found = [(folder, RunReader(folder / JOURNAL_NAME).read()) for folder in folders[:limit]]
    if as_json:
        click.echo(json.dumps([_fields(*each) for each in found], indent=2))
        return
    width = max((len(run_name(folder)) for folder, _ in found), default=0)
    for folder, status in found:
        click.echo(f"{run_name(folder):<{max(21, width)}}  {_run_line(status)}")
    if not folders:
        click.echo(f"there are no runs in {(root or RUNS).resolve()}", err=True)
    elif len(folders) > limit:
        click.echo(f"not listed: {plural(len(folders) - limit, 'older run')} (--limit)", err=True)


def _run_line(status: RunStatus) -> str:
    from palaestra.rollouts.observe.status import score_name
    from palaestra.rollouts.observe.verdicts import official_words

    mean = "-" if status.mean_reward is None else f"{status.mean_reward:.3f}"
    covered = f"{status.scored} of {status.planned} scored"
    covered += "" if status.official is None else f", {official_words(status.official_name)} {status.official:.3f}"
    covered += "" if status.recorded_mean is None else f", recorded {status.recorded_mean:.3f}"
    counts = f"{plural(status.groups_ended, 'group'):>10}  {score_name(status.kind):>6} {mean:<5} ({covered})"
    return f"{status.state:<11} {status.kind:<5} {counts}  {status.env} with {status.model}"


def _print_table(runs: tuple[str, ...], root: Path | None, form: str, out: Path | None, as_json: bool) -> None:
    from palaestra.envs.run.run_table import FORMATS, about, table_rows
    from palaestra.envs.run.run_table import as_json as row_as_json
    from palaestra.rollouts.journal.reader import RUNS, list_runs
    from palaestra_slots.core.errors import ConfigError
    from palaestra_slots.core.io.durable_files import replaced, writing

    # Named runs keep their order. Without a name, the runs of the usual folder are listed by environment and model.
    rows = table_rows(runs)
    if not runs:
        rows = sorted(table_rows(list_runs(root or RUNS)), key=lambda row: (row.environment, row.model))
    if not rows:
        raise ConfigError(f"there are no runs in {(root or RUNS).resolve()}")
    text = json.dumps([row_as_json(row) for row in rows], indent=2) + "\n" if as_json else FORMATS[form](rows)
    if out is None:
        click.echo(text, nl=False)
        if form == "text" and not as_json:
            click.echo(about(rows), err=True)
        return
    with writing(out.parent), replaced(out) as file:
        file.write(text.encode())
    click.echo(out)


def _fields(folder: Path, status: RunStatus) -> dict[str, JSON]:
    from palaestra.rollouts.journal.reader import run_name

    return {
        "id": run_name(folder),
        "path": str(folder),
        "state": status.state,
        "kind": status.kind,
        "groups": status.groups_ended,
        "rollouts": status.rollouts,
        "scored": status.scored,
        "planned": status.planned,
        "mean_reward": status.mean_reward,
        **({} if status.recorded_mean is None else {"recorded_mean_reward": status.recorded_mean}),
        **({} if status.official is None else {"official": status.official}),
        "env": status.env,
        "model": status.model,
    }


def _status_lines(name: str, status: RunStatus, now: float) -> list[str]:
    from palaestra.rollouts.observe.console import duration
    from palaestra.rollouts.observe.status import score_name

    # A killed run has no end in its journal, so its time counts until its last line.
    since = max(0.0, now - status.last_at) if status.state == "running" else 0.0
    failed = f", {status.groups_failed} failed" if status.groups_failed else ""
    flying = ", ".join(f"{stage} {count}" for stage, count in sorted(status.in_flight.items())) or "nothing"
    lines = [
        f"{status.kind:<10} {name}: {status.env} with {status.model}",
        f"state      {status.state} after {duration(status.seconds + since)}",
        f"groups     {status.groups_ended} ended of {status.groups_begun} begun{failed}",
        *([f"prepared   {_prepared(status)}"] if status.prepared else []),
        f"rollouts   {status.rollouts} ended: {_counts(status.outcomes)}; {status.discarded} attempts discarded",
        *([f"resumed    {status.resumed}"] if status.resumed else []),
        *([f"asked      {status.asked_again} again after a failure at the model server"] if status.asked_again else []),
        f"{score_name(status.kind):<10} {_reward(status)}",
        *_graded(status),
        *_verdicts(status),
        f"in flight  {flying}",
        *_nodes(status),
    ]
    for idle in status.oldest[:_SHOWN]:
        lines.append(f"  {duration(max(0.0, now - idle.since)):>7}  {idle.stage:<8} {idle.name}")
    for name, rate in status.blame.items():
        share = f"{100 * rate.share:.1f} % ({100 * rate.low:.1f} to {100 * rate.high:.1f} %)"
        lines.append(f"blame      {name} {rate.count}: {share}")
    if status.stages:
        times = (f"{name} {duration(each.p50_s)}/{duration(each.p95_s)}" for name, each in status.stages.items())
        lines.append(f"stages     {', '.join(times)} (median/95 %)")
    lines.append(f"tokens     {_token_usage(status)}")
    lines.append(f"disk       {_megabytes(status.disk_bytes)} used, {_megabytes(status.disk_free_bytes)} free")
    return lines


def _token_usage(status: RunStatus) -> str:
    if status.tokens_unknown:
        return "unknown, and so is the cost: the model server reports no usage"
    cost = "" if status.cost is None else f"; cost {status.cost:.4f}"
    if cost and status.unpriced_tokens:
        cost += f" plus the cost of {status.unpriced_tokens:,} tokens without a price"
    if status.uncounted:
        cost += f"; without {plural(status.uncounted, 'turn')} for which the model server reported no usage"
    return f"{status.prompt_tokens:,} read, {status.completion_tokens:,} written{cost}"


def _prepared(status: RunStatus) -> str:
    return f"{plural(status.prepared, 'workspace')}, {status.from_store} of them already prepared on this machine"


def _reward(status: RunStatus) -> str:
    from palaestra.rollouts.observe.intervals import in_words

    if status.mean_reward is None:
        return "none yet"
    lost = status.unscored
    covered = f"{status.scored} of {plural(status.planned, 'rollout')} scored"
    scored = f"{status.mean_reward:.3f}{in_words(status.mean_interval)}"
    with_unscored = f"{status.mean_with_unscored:.3f}{in_words(status.mean_with_unscored_interval)}"
    full = status.full
    share = (
        "" if full is None else f", {100 * full.share:.1f} % full{in_words((100 * full.low, 100 * full.high), '.1f')}"
    )
    return f"{scored}{share}; {covered}" + (f"; {with_unscored} with the {lost} unscored as 0" if lost else "")


def _graded(status: RunStatus) -> Iterator[str]:
    """Yield the lines about scores that `palaestra grade` gave and about different versions of the score, if any."""
    from palaestra.rollouts.observe.score_versions import REMEDY, mixed

    if status.graded:
        recorded = "none" if status.recorded_mean is None else f"{status.recorded_mean:.3f}"
        scores = f"the scores of {status.graded} of {plural(status.rollouts, 'rollout')}"
        yield f"graded     palaestra grade gave {scores}; the recorded mean is {recorded}"
    if warning := mixed(status.score_versions):
        yield f"WARNING    {warning}; {REMEDY}"


def _verdicts(status: RunStatus) -> Iterator[str]:
    """Yield the lines about official verdicts, labels and the environment's own metrics, if there are any."""
    from palaestra.rollouts.observe.intervals import in_words
    from palaestra.rollouts.observe.verdicts import OFFICIAL, labels_line

    if status.official is not None:
        named = "" if status.official_name == OFFICIAL else f"{status.official_name} "
        yield f"official   {named}{status.official:.3f}{in_words(status.official_interval)}"
    if status.labels:
        yield f"labels     {labels_line(status.labels)}"
    if status.metrics:
        shown = [f"{name} {value:.4g}" for name, value in list(status.metrics.items())[:_SHOWN_METRICS]]
        more = f" and {len(status.metrics) - len(shown)} more (--json)" if len(status.metrics) > len(shown) else ""
        yield f"metrics    {', '.join(shown)}{more}"


def _nodes(status: RunStatus) -> Iterator[str]:
    """Yield a line about the nodes of a cluster, and one per node, those that are lost at the end."""
    if not status.nodes:
        return
    used = [each for each in status.nodes if not each.lost]
    busy, slots = sum(each.in_flight for each in used), sum(each.slots for each in used)
    losses = sum(each.losses for each in status.nodes)
    lost = f"; a node was lost {plural(losses, 'time')}" if losses else ""
    yield f"nodes      {plural(len(used), 'node')}, {busy} of {slots} slots busy{lost}"
    # Lost nodes come last, and so are the first that a long list leaves out: their rollouts run elsewhere.
    for each in sorted(status.nodes, key=lambda each: (bool(each.lost), each.host, each.node))[:_SHOWN_NODES]:
        what = f"{each.in_flight} of {each.slots} slots busy, {plural(each.groups, 'group')}"
        what = f"lost: {each.lost}" if each.lost else what
        yield f"  {each.host} ({each.node[:8]})  {each.level}  {what}; {plural(each.rollouts, 'rollout')} ended"
    if len(status.nodes) > _SHOWN_NODES:
        yield f"  and {len(status.nodes) - _SHOWN_NODES} more (--json)"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
