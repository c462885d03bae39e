"""Tools of MCP servers, each of which is a toolset: `mcp_config` has the settings, `connection` one session with a
server, `mcp_server` a server over its sessions, `run_servers` several.
"""
