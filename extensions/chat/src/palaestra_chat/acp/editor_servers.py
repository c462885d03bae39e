"""The MCP servers that an editor names for a session (`mcpServers` of `session/new` and its siblings).

They are started as those of the settings: a command runs on this machine and ends with the session, and the person is
asked before calls of tools that change something. Invariants: the editor's values are literal, so that `${NAME}` in
them does not read a variable of this process, and a server of the settings keeps its name. A server that does not start
leaves the session without its tools, and the person gets a notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from palaestra.tools.mcp.mcp_config import MCPServerConfig, configured
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON

try:
    from acp import schema
except ImportError:
    raise ConfigError(f"palaestra acp needs agent-client-protocol: {install_command('acp')}") from None

_DOLLAR = "PALAESTRA_DOLLAR"


def editor_servers(
    named: Sequence[object], taken: Collection[str], notify: Callable[[str], None]
) -> dict[str, MCPServerConfig]:
    """Return the settings of the servers that an editor names. `taken` has the names of the settings' own servers; an
    editor's server of such a name is left out, with a notice. Raises `ConfigError` for a server that cannot be used."""
    written: dict[str, dict[str, JSON]] = {}
    for server in named:
        name, settings = _server_settings(server)
        if name in taken:
            notify(f"The MCP server {name} of the settings is used, not the editor's server of this name.")
        elif name in written:
            raise ConfigError(f"two MCP servers of the editor are called {name}")
        else:
            written[name] = settings
    servers = configured(written)
    for each in servers.values():
        each.take_variables({_DOLLAR: "$"})
    return servers


async def opened_servers(servers: dict[str, MCPServerConfig], notify: Callable[[str], None]) -> MCPServers:
    """Return the started servers. A server that does not start becomes a notice."""
    started = MCPServers(servers, forgiving=True)
    await started.open()
    for each in started.installed():
        if each.problem:
            notify(f"{each.problem} The session goes on without its tools.")
    return started


def _server_settings(server: object) -> tuple[str, dict[str, JSON]]:
    """Return the name of a server for tools, and its settings as in a file."""
    if isinstance(server, schema.McpServerStdio):
        if "/" in server.command and not server.command.startswith("/"):
            raise ConfigError(
                f"MCP server '{server.name}': the command {server.command!r} depends on the current folder; the editor "
                "must name an absolute path"
            )
        return _server_name(server.name), {
            "command": _literal(server.command),
            "args": [_literal(each) for each in server.args],
            "env": {each.name: _literal(each.value) for each in server.env},
        }
    if isinstance(server, schema.HttpMcpServer):
        headers = {each.name: _literal(each.value) for each in server.headers}
        return _server_name(server.name), {"url": _literal(server.url), "headers": headers}
    name, kind = getattr(server, "name", ""), getattr(server, "type", type(server).__name__)
    raise ConfigError(f"MCP server '{name}': the transport {kind} is not supported; use stdio or http")


def _server_name(name: str) -> str:
    """Return an editor's name for a server, which may be any text, as a part of tool names."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")[:40]
    if not cleaned:
        raise ConfigError(f"the MCP server {name!r} needs a name with letters or digits")
    return cleaned


def _literal(text: str) -> str:
    """Return text whose `${NAME}` stays as it is when the settings' variables are replaced."""
    return text.replace("${", f"${{{_DOLLAR}}}{{")
