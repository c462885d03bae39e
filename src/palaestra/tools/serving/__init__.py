"""Tools over HTTP: `tool_server` runs external tools and `tool_server_client` calls them; `executor_service` runs all
tools in slots and gives access to `artifacts`. `payloads` has the request and reply bodies, `http_common` the shared
code.
"""
