"""`palaestra tools`: list the tools, toolsets and distributions that are available here, and the missing ones."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra.tools.mcp.mcp_config import MCPServerConfig
    from palaestra.tools.registry.build import Installed
    from palaestra.tools.settings import ToolSettings


@click.command(
    "tools",
    help="""List the tools, toolsets and distributions that agents can use, and report what is missing here and why.

    \b
      palaestra tools
      palaestra tools --json | jq -r '.tools[] | select(.missing == null) | .name'
      palaestra tools --mcp mcp.json          # also starts the file's MCP servers and lists their tools

    FILE contains mcpServers in the usual format: command, args, env, cwd, or url and headers. ${NAME} in it stands for
    an environment variable. A server that cannot be used is listed with the reason.
    """,
)
@click.option(
    "--mcp",
    "files",
    type=HostPath(),
    multiple=True,
    metavar="FILE",
    help="Also list the tools of the MCP servers in this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with the full schemas.")
def command(files: tuple[Path, ...], as_json: bool) -> None:
    from palaestra.tools.registry.build import all_tools, get_available_toolsets, installed_tools
    from palaestra.tools.registry.distributions import list_distributions

    others = (*installed_tools(), *(asyncio.run(_of_servers(files)) if files else ()))
    settings = tool_settings()
    tools: list[dict[str, JSON]] = [
        {"name": tool.name, "toolset": tool.toolset, "missing": tool.missing(), **_schema(tool.schema.to_dict())}
        for tool in all_tools(settings, others)
    ]
    toolsets = [{"name": name, **each} for name, each in get_available_toolsets(settings, others).items()]
    distributions = [{"name": name, **each} for name, each in list_distributions().items()]
    if as_json:
        everything = {"tools": tools, "toolsets": toolsets, "distributions": distributions}
        click.echo(json.dumps(everything, indent=2, ensure_ascii=False))
        return
    for line in (*_tool_lines(tools), "", *_toolsets(toolsets), "", *_distributions(distributions)):
        click.echo(line)


def tool_settings() -> ToolSettings:
    """Return the tool settings in environment variables and the keys in `.env`, as a run reads them. Raises
    `ConfigError`."""
    from palaestra.envs.config.dotenv import DOTENV, read_keys
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import read_environ
    from palaestra_slots.core.config import merge

    told = ((DOTENV, read_keys(Path.cwd())), ("environment", os.environ))
    layers = [read_environ(variables, "env", HermesAgentEnvConfig, where) for where, variables in told]
    return merge(HermesAgentEnvConfig, layers).value


async def _of_servers(files: Iterable[Path]) -> tuple[Installed, ...]:
    """Start the MCP servers in these files, and return their tools."""
    from palaestra.tools.mcp.run_servers import MCPServers

    async with MCPServers(configured_servers(files), forgiving=True) as servers:
        return servers.installed()


def configured_servers(files: Iterable[Path]) -> dict[str, MCPServerConfig]:
    """Return the MCP servers in these files, with their variables expanded. Raises `ConfigError`."""
    from palaestra.envs.config.dotenv import read_keys
    from palaestra.tools.mcp.mcp_config import configured, hand_over, read_servers

    servers = configured({name: each for file in files for name, each in read_servers(file).items()})
    hand_over({**read_keys(Path.cwd()), **os.environ}, servers)
    return servers


def _schema(definition: dict[str, JSON]) -> dict[str, JSON]:
    function = definition["function"]
    return {"description": function["description"], "parameters": function["parameters"]}


def _tool_lines(tools: list[dict[str, JSON]]) -> Iterator[str]:
    yield "Tools"
    for tool in tools:
        if tool["missing"] is None:
            yield f"  {tool['name']:<16} {_first_line(tool['description'])}"
    reasons: dict[str, list[str]] = {}
    for tool in tools:
        if tool["missing"] is not None:
            reasons.setdefault(tool["missing"], []).append(tool["name"])
    if reasons:
        yield ""
        yield "Missing here"
    for reason, names in reasons.items():
        yield f"  {' '.join(names)}"
        yield f"      missing: {reason}"


def _toolsets(toolsets: Iterable[dict[str, JSON]]) -> Iterator[str]:
    yield "Toolsets"
    for toolset in toolsets:
        here = [name for name in toolset["tools"] if name not in toolset["missing"]]
        missing = f"({len(toolset['missing'])} missing)" if toolset["missing"] else ""
        yield f"  {toolset['name']:<16} {toolset['description']}: {' '.join([*here, missing])}".rstrip(" :")


def _distributions(distributions: Iterable[dict[str, JSON]]) -> Iterator[str]:
    yield "Distributions (chance of each toolset in percent)"
    for distribution in distributions:
        chances = (f"{name} {chance}" for name, chance in distribution["toolsets"].items())
        yield f"  {distribution['name']:<16} {', '.join(chances)}"


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 90 else line[:87] + "..."
