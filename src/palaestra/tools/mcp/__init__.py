"""Tools of MCP servers: each server of a run is a toolset.

`config.py` is what a server can be told, `connection.py` one session with one, `server.py` a server through its
sessions, `replies.py` its results as replies, `servers.py` those of a run, `leash.py` what ends a server with us,
`tail.py` its last words.
"""
