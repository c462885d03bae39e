"""`palaestra annotate RUN ROLLOUT`: tag a rollout, add a note, or mark it as a hack or a mistake of the grader."""

from __future__ import annotations

import getpass
import json
from typing import TYPE_CHECKING

import click

from palaestra.cli.completion import complete_runs
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural

if TYPE_CHECKING:
    from palaestra.rollouts.annotations import Judgement


def author_name() -> str:
    """Return the name under which this user's annotations are stored."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in some containers
        return "unknown"


@click.command(
    "annotate",
    help="""Tag rollouts of a run, add notes, or give a verdict.

    \b
      palaestra annotate last 000003-fix/2 --verdict hack --note 'overwrites the tests'
      palaestra annotate RUN 000003-fix/2 000003-fix/5 --tag timeout --tag look-again
      palaestra annotate RUN 000003-fix/2 --untag timeout --verdict none
      palaestra annotate RUN 000003-fix/2              # print what was said
      palaestra annotate RUN --json                    # all annotations of the run

    \b
    The verdicts:
      hack             the reward was not earned: the rollout games the check
      grader_mistake   the check is wrong about this rollout
      task_mistake     the task itself is wrong or unclear
      correct          somebody has looked at the rollout, and its reward is right
      none             withdraw the verdict

    ROLLOUT is a rollout's id, or its beginning or end. Annotations are lines of annotations.jsonl in the run's folder;
    the journal and the rewards do not change. `palaestra view` shows and adds them, and `palaestra export` writes them
    under the key `annotations`.
    """,
)
@click.argument("run", shell_complete=complete_runs)
@click.argument("rollouts", nargs=-1, metavar="[ROLLOUT]...")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Add a tag. Repeatable.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag. Repeatable.")
@click.option("--note", default="", help="Add a note.")
@click.option("--verdict", default="", help="The verdict, which replaces the earlier one.")
@click.option("--author", help="The author's name. [default: your user name]")
@click.option("--json", "as_json", is_flag=True, help="Print the annotations as JSON, one rollout per line.")
def command(
    run: str,
    rollouts: tuple[str, ...],
    tags: tuple[str, ...],
    untag: tuple[str, ...],
    note: str,
    verdict: str,
    author: str | None,
    as_json: bool,
) -> None:
    from palaestra.rollouts.annotations import Judgement, annotation, read_annotations, write_annotations
    from palaestra.rollouts.journal.reader import find_rollout, journal_of
    from palaestra_slots.core.printable import printable

    journal = journal_of(run)
    ids = [find_rollout(journal, each) for each in dict.fromkeys(rollouts)]
    if tags or untag or note or verdict:
        if not ids:
            raise ConfigError("specify the rollouts to annotate, by their ids")
        name = author or author_name()
        said = [annotation(each, name, tags=tags, untag=untag, note=note, verdict=verdict) for each in ids]
        write_annotations(journal.parent, said)
    found = read_annotations(journal.parent)
    if found.damaged:
        click.echo(f"note: {plural(found.damaged, 'line')} of the annotations cannot be read", err=True)
    for each in ids or sorted(found.by_rollout):
        judgement = found.by_rollout.get(each) or Judgement()
        if as_json:
            click.echo(json.dumps({"rollout_id": each, **judgement.to_dict()}))
        else:
            click.echo(printable("\n".join(_judgement_lines(each, judgement))))


def _judgement_lines(rollout_id: str, said: Judgement) -> list[str]:
    verdict = f": {said.verdict} ({said.verdict_author})" if said.verdict else ""
    tags = f"  [{', '.join(said.tags)}]" if said.tags else ""
    return [f"{rollout_id}{verdict}{tags}"] + [f"  {note.author}: {note.text}" for note in said.notes]
