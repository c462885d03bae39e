"""Tools over HTTP: the tool server, which runs external tools, and the executor service, which runs all in slots.

`payloads.py` are the bodies, `leases.py` who is using what and for how long, `web.py` what both servers share,
`tool_server.py` and `link.py` the two ends of the first, `executor_service.py` and `artifacts.py` the second.
"""
