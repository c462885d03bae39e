"""The formats by name. A new one is a file with a class of the `Exporter` shape, and its line here.

A format of one's own needs no line: `--to package.module:Class` takes any. Nothing is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError
from palaestra.rollouts.export.exporter import Exporter

FORMATS = {
    "atropos": (
        "palaestra.rollouts.export.atropos_groups:AtroposExporter",
        "groups with tokens and scores, as a run writes",
    ),
    "openai": ("palaestra.rollouts.export.openai:OpenAIExporter", "messages and tools, as chat trainers read"),
    "sharegpt": ("palaestra.rollouts.export.sharegpt:ShareGPTExporter", "from/value turns with tags, in Hermes form"),
    "atif": ("palaestra.rollouts.export.atif.write:AtifExporter", "ATIF v1.7 trajectories, one per line"),
    "rows": ("palaestra.rollouts.export.token_rows:RowsExporter", "exact tokens for reinforcement learning"),
    "table": ("palaestra.rollouts.export.table:TableExporter", "one line per task: rewards and outcomes (CSV)"),
    "markdown": ("palaestra.rollouts.export.table:MarkdownExporter", "the same table, to paste into a page"),
}
"""Name: (where it is, what it is)."""


def exporter_named(name: str) -> Exporter:
    """The exporter of that name, or of that dotted path. Raises `ConfigError`, with the nearest name."""
    if not name:
        raise ConfigError(f"name the format to export to: --to, and one of {', '.join(FORMATS)}")
    path = FORMATS[name][0] if name in FORMATS else name
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"there is no export format {name!r}; there are {', '.join(FORMATS)}, and package.module:Class for one of "
            f"your own.{nearest(name, FORMATS)}"
        )
    try:
        exporter: Exporter = getattr(import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot load the export format {path}: {error}") from error
    missing = [each for each in ("name", "ending", "everything", "export") if not hasattr(exporter, each)]
    if missing:
        raise ConfigError(f"{path} is no export format: it lacks {', '.join(missing)}")
    return exporter
