"""`Run` reads the groups, metrics and token rows of a run from disk."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.rollouts.journal.reader import LAST, RUNS, Recording, find_run, journal_of
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import PASSED, Figures, group_size
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.rollouts.observe.status import RunStatus


class Run:
    """A finished, stopped or running run, read from its folder. Iterating over it reads one group at a time. Scores
    that `palaestra grade` gave replace the recorded ones.

    `groups` and `metrics` are read on first use and do not change afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __iter__(self) -> Iterator[Group]:
        return iter(self.recording)

    def failed_tasks(self) -> list[str]:
        """Return the ids of the tasks with a rollout that earned less than the full reward or has no score, and of the
        tasks that began and did not end."""
        failed = [
            group.task_id
            for group in self
            if not group.trajectories or any(each.reward is None or each.reward < PASSED for each in group.trajectories)
        ]
        return [*dict.fromkeys([*failed, *self.recording.unfinished_tasks])]

    @cached_property
    def recording(self) -> Recording:
        """The index of the run's journal."""
        return Recording(journal_of(self.path))

    @cached_property
    def groups(self) -> list[Group]:
        """The finished groups, in the order of their tasks."""
        return located(self.recording, self.path)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rollouts of the finished groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of the whole run by name, which include the environment's own metrics once the run has ended.
        Tokens, `cost` and `seconds` are those of `status`, with the attempts that were discarded."""
        figures = Figures(group_size(self.recording.meta.config))
        for group in self:
            figures.add(group)
        figures.unfinished = self.recording.unfinished
        written, found = last_metrics(self.path / "metrics.jsonl"), figures.numbers()
        return (written | found if self.recording.grades else found | written) | self.status.usage_metrics

    @property
    def mean_reward(self) -> float | None:
        """The mean over the scored rollouts; None if there are none."""
        return self.metrics.get("reward/mean")

    @property
    def status(self) -> RunStatus:
        """The current state: work in flight, failures by cause, tokens, cost."""
        from palaestra.rollouts.observe.status import RunReader

        return RunReader(self.recording.path).read()

    def to_rows(self, *, placeholders: bool = False, counterfactual: bool = False) -> list[dict[str, JSON]]:
        """Return the exact tokens of the scored rollouts, as `palaestra export --to rows` writes them
        (`docs/training.md`).

        Rollouts that continue a rollout of another run are left out unless `counterfactual` is true. Raises
        `ConfigError` for a run whose model server returned no tokens, unless `placeholders` are allowed.
        """
        from palaestra.rollouts.export.token_rows import RowsExporter

        lines = io.BytesIO()
        options = replace(self.recording.meta, placeholders=placeholders, counterfactual=counterfactual)
        with python_names():
            RowsExporter().export(self, lines, options)
        return [json.loads(line) for line in lines.getvalue().splitlines()]

    def to_records(self) -> list[dict[str, JSON]]:
        """Return one plain mapping per rollout: ids, reward, outcome, error, tokens, seconds, and each metric by name.
        If any rollout has an official verdict or a label, all mappings have `official` and the names of `labels`."""
        rollouts = self.trajectories
        judged = any(each.official is not None or each.labels for each in rollouts)
        return [
            {
                "task_id": each.task_id,
                "rollout_id": each.rollout_id,
                "index": each.index,
                "reward": each.reward,
                **(
                    {"official": each.official_reward, "labels": [label.name for label in each.labels]}
                    if judged
                    else {}
                ),
                "outcome": each.outcome.value,
                "blame": each.blame.value if each.blame is not None else None,
                "error": each.error,
                "turns": len(each.turns),
                "prompt_tokens": each.prompt_tokens,
                "completion_tokens": each.completion_tokens,
                "cost": each.whole_cost,
                "duration_s": each.beside.duration_s,
                **each.metrics,
            }
            for each in rollouts
        ]

    def to_frame(self) -> Any:
        """Return the mappings of `to_records` as a pandas DataFrame. Raises `ConfigError` if pandas is not
        installed."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise ConfigError(
                f"to_frame needs pandas ({install_command('frame')}, or install pandas alone); to_records does not"
            ) from None
        return pandas.DataFrame(self.to_records())


def open_run(run: str | Path = LAST, *, root: str | Path = RUNS) -> Run:
    """Return the run that `run` names, as in `find_run`, for example by its folder, its journal or its id; `last` is
    the latest run below `root`. Raises `ConfigError` as `find_run` does, or if the run has no journal."""
    return Run(journal_of(find_run(run, root=root)).parent)


def located(groups: Iterable[Group], folder: Path) -> list[Group]:
    """Return the groups of the run in `folder`. Kept workspaces are named where they are now, if the run was moved."""
    found = list(groups)
    for trajectory in (each for group in found for each in group.trajectories):
        kept = Path(str(trajectory.beside.sandbox.get("workspace", "")))
        here = Path(folder, *kept.parts[-3:])
        if kept.parts and here != kept and here.is_dir():
            trajectory.beside.sandbox["workspace"] = str(here.resolve())
    return found
