"""The format `atropos`: the groups file that a run writes, made again from its journal, line for line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import IO

from palaestra.rollouts.export.atropos import encode_line, group_line
from palaestra.rollouts.export.exporter import UNSCORED, ExportMeta, ExportReport
from palaestra.rollouts.records import Group


class AtroposExporter:
    """One line per group. Unscored rollouts stand only in its key `rollouts`, whatever was asked for.

    The run's own settings decide what they decided then: whether messages are in the lines, and whether groups of equal
    scores, which teach a policy gradient nothing, are left out.
    """

    name = "atropos"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines."""
        report = ExportReport()
        settings = meta.config.get("env")
        settings = settings if isinstance(settings, Mapping) else {}
        differing = settings.get("ensure_scores_are_not_same", False) and not meta.everything
        for group in groups:
            scored = group.scored
            report.left_out.update({UNSCORED: len(group.trajectories) - len(scored)})
            if differing and group.same_scores:
                report.left_out["in a group of equal scores"] += len(scored)
                continue
            line = group_line(group, env=meta.env, model=meta.model, messages=settings.get("include_messages", True))
            if line is not None:
                out.write(encode_line(line))
                report.records += 1
                report.rollouts += len(scored)
        return report
