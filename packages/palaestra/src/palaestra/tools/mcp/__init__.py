"""Tools of MCP servers. Each server is a toolset: `mcp_config` has the settings, `connection` is one session with a
server, `mcp_server` one server across sessions, and `run_servers` several servers.
"""
