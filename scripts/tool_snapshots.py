"""Write the snapshots of tool schemas, which models see, and of toolsets and distributions, which users name.

    make snapshots

The tests compare the code with these files, so each change of a schema is visible in a commit.
"""

from __future__ import annotations

import json
from pathlib import Path

from palaestra.tools.registry.build import builtin_tools
from palaestra.tools.registry.distributions import list_distributions
from palaestra.tools.registry.toolsets import ALIASES, TOOL_ALIASES, TOOLSETS, resolve_toolsets
from palaestra_slots.core.types import JSON

TESTS = Path(__file__).parents[1] / "packages/palaestra/tests/tools"
SCHEMAS = TESTS / "golden"
GROUPS = TESTS / "groups.json"


def schemas() -> dict[str, JSON]:
    """Return each tool's OpenAI definition, by name."""
    return {tool.name: tool.schema.to_dict() for tool in builtin_tools()}


def groups() -> dict[str, JSON]:
    """Return the tools, toolsets or names that each toolset, distribution and alias stands for."""
    return {
        "toolsets": {name: resolve_toolsets([name]) for name in TOOLSETS},
        "distributions": {name: each["toolsets"] for name, each in list_distributions().items()},
        "toolset_aliases": dict(ALIASES),
        "tool_aliases": dict(TOOL_ALIASES),
    }


def text(value: JSON) -> str:
    """Return the text of a snapshot."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name, schema in schemas().items():
        (SCHEMAS / f"{name}.json").write_text(text(schema), encoding="utf-8")
    GROUPS.write_text(text(groups()), encoding="utf-8")


if __name__ == "__main__":
    main()
