"""`palaestra tools`: the tools and toolsets that an agent can have here."""

from __future__ import annotations

import json

import click

from palaestra.core.types import JSON


@click.command(
    "tools",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""List the tools and toolsets an agent can have.

    \b
      palaestra tools
      palaestra tools --json | jq '.tools[].name'
    """,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, with the full schemas.")
def command(as_json: bool) -> None:
    from palaestra.tools.registry import builtin_tools
    from palaestra.tools.toolsets import TOOLSETS, resolve_toolsets

    tools: list[dict[str, JSON]] = [
        {"name": tool.name, "toolset": tool.toolset, "missing": tool.missing(), **_schema(tool.schema.to_dict())}
        for tool in builtin_tools()
    ]
    toolsets = [
        {"name": name, "description": toolset.description, "tools": resolve_toolsets([name])}
        for name, toolset in TOOLSETS.items()
    ]
    if as_json:
        click.echo(json.dumps({"tools": tools, "toolsets": toolsets}, indent=2))
        return
    click.echo("Tools")
    for tool in tools:
        note = f"  (not here: {tool['missing']})" if tool["missing"] else ""
        click.echo(f"  {tool['name']:<14} {_first_line(tool['description'])}{note}")
    click.echo("\nToolsets")
    for toolset in toolsets:
        click.echo(f"  {toolset['name']:<14} {toolset['description']}: {' '.join(toolset['tools'])}")


def _schema(definition: dict[str, JSON]) -> dict[str, JSON]:
    function = definition["function"]
    return {"description": function["description"], "parameters": function["parameters"]}


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 90 else line[:87] + "..."
