"""The export formats by name.

To add a format, write a module with a class of the `Exporter` shape and add a line to `FORMATS`; `--to
package.module:Class` takes any other class. The module of a format is imported only when the format is used.
"""

from __future__ import annotations

from importlib import import_module

from palaestra.rollouts.export.exporter import Exporter
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError

FORMATS = {
    "atropos": (
        "palaestra.rollouts.export.atropos:AtroposExporter",
        "groups with tokens and scores, as a run writes them",
    ),
    "openai": ("palaestra.rollouts.export.openai:OpenAIExporter", "messages and tools, as chat trainers read them"),
    "sharegpt": ("palaestra.rollouts.export.sharegpt:ShareGPTExporter", "from/value turns with tags, in Hermes form"),
    "batch": ("palaestra.rollouts.export.batch:BatchExporter", "the rows of hermes-agent's batch runner"),
    "atif": ("palaestra.rollouts.export.atif:AtifExporter", "ATIF v1.7 trajectories, one per line"),
    "inspect": ("palaestra.rollouts.export.inspect_log:InspectExporter", "a log for Inspect's viewer (.eval)"),
    "rows": (
        "palaestra.rollouts.export.token_rows:RowsExporter",
        "exact tokens, for trainers that take token ids",
    ),
    "table": ("palaestra.rollouts.export.table:TableExporter", "one line per group: rewards and outcomes (CSV)"),
    "markdown": ("palaestra.rollouts.export.table:MarkdownExporter", "the same table as Markdown, to paste into pages"),
}
"""Maps a format's name to its class and its description."""


def exporter_named(name: str) -> Exporter:
    """Return the exporter with that name or dotted path. Raises `ConfigError`, which suggests the nearest name."""
    if not name:
        raise ConfigError(f"specify the export format with --to, as one of {', '.join(FORMATS)}")
    path = FORMATS[name][0] if name in FORMATS else name
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"unknown export format {name!r}; available: {', '.join(FORMATS)}, and package.module:Class for your "
            f"own.{nearest(name, FORMATS)}"
        )
    try:
        exporter: Exporter = getattr(import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot load the export format {path}: {error}") from error
    missing = [each for each in ("name", "ending", "everything", "export") if not hasattr(exporter, each)]
    if missing:
        raise ConfigError(f"{path} is not an export format: it lacks {', '.join(missing)}")
    return exporter
