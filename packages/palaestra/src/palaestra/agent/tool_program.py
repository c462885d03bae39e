"""Lists and calls the environment's tools, for agents that can use only a shell. Standard library only.

    python3 tools.py
    python3 tools.py NAME '{"argument": "value"}'

This file is not imported: its text is run by the slot's own Python, 3.7 or newer. It prints a tool's reply, and exits
with status 1 if the call failed.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def ask(method: str, params: dict[str, object]) -> dict[str, object]:
    """Send one request to the MCP server and return the result. Exits with the server's error, if it sends one."""
    with open(os.environ["PALAESTRA_MCP_CONFIG"], encoding="utf-8") as file:
        (server,) = json.load(file)["mcpServers"].values()
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **server["headers"]}
    request = urllib.request.Request(server["url"], body, headers)  # noqa: S310  our own file names it
    with urllib.request.urlopen(request) as response:  # noqa: S310
        reply = json.load(response)
    if "error" in reply:
        sys.exit(reply["error"]["message"])
    found: dict[str, object] = reply["result"]
    return found


def main(words: list[str]) -> int:
    """List the tools, or call one."""
    if not words:
        sys.stdout.write(json.dumps(ask("tools/list", {})["tools"], indent=2) + "\n")
        return 0
    try:
        arguments = json.loads(words[1]) if len(words) > 1 else {}
    except ValueError as error:
        sys.exit(f"The arguments are not JSON: {error}")
    result = ask("tools/call", {"name": words[0], "arguments": arguments})
    for part in result["content"]:  # type: ignore[attr-defined]
        sys.stdout.write(part["text"] + "\n")
    return 1 if result["isError"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
