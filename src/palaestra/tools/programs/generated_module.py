"""The module `palaestra_tools`: for each tool of the agent a function of the same name, with the same parameters.

Its text is written into the slot, where any Python from 3.7 on may run it; nothing here is run here.

Invariant: a function says no more than the tool's schema does. Whether a call is right is checked where it is run.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable

from palaestra.tools.tool import ToolSchema

MODULE = "palaestra_tools"

_HEAD = '''\
"""The tools of this agent as functions. A call gives what the tool replies: a dict, or text.

What a tool refuses or fails at is in its reply under "error", as when it is called directly. RuntimeError is raised
where no call can be made any more.
"""

import json as _json
import os as _os
import socket as _socket
import struct as _struct
import threading as _threading

_LEFT_OUT = object()
_turn = _threading.Lock()
_channel = _socket.socket(fileno=int(_os.environ.pop("PALAESTRA_TOOLS_FD")))
_channel.set_inheritable(False)
_owner = _os.getpid()


def _exactly(count):
    data = bytearray()
    while len(data) < count:
        more = _channel.recv(min(count - len(data), 1 << 16))
        if not more:
            raise RuntimeError("the tools cannot be reached any more")
        data += more
    return bytes(data)


def _call(name, arguments):
    if _os.getpid() != _owner:
        raise RuntimeError("tools can be called by the program itself, not by processes that it has started")
    given = {key: value for key, value in arguments.items() if value is not _LEFT_OUT}
    request = _json.dumps({"tool": name, "arguments": given}).encode()
    with _turn:
        _channel.sendall(_struct.pack("!I", len(request)) + request)
        reply = _json.loads(_exactly(_struct.unpack("!I", _exactly(4))[0]).decode())
    if "refused" in reply:
        raise RuntimeError(reply["refused"])
    return reply["reply"]
'''


def module_text(schemas: Iterable[ToolSchema]) -> str:
    """The source of the module. A tool whose name no function can have is called by `call_tool(name, arguments)`."""
    functions = [_function(schema) for schema in schemas if _usable(schema.name)]
    any_tool = 'def call_tool(name, arguments=None):\n    """Call a tool by its name."""\n'
    return "\n\n".join([_HEAD, f"{any_tool}    return _call(name, dict(arguments or {{}}))\n", *functions])


def _function(schema: ToolSchema) -> str:
    """One function: required parameters first, then the others; what no parameter can be called goes by `**others`."""
    names = [name for name in schema.parameters if _usable(name)]
    required = [name for name in names if name in schema.required]
    optional = [f"{name}=_LEFT_OUT" for name in names if name not in schema.required]
    others = ["**others"] if len(names) < len(schema.parameters) else []
    given = ", ".join(f"{name!r}: {name}" for name in names)
    more = ", **others" if others else ""
    return (
        f"def {schema.name}({', '.join([*required, *optional, *others])}):\n"
        f"    {_documentation(schema)!r}\n"
        f"    return _call({schema.name!r}, dict({{{given}}}{more}))\n"
    )


def _documentation(schema: ToolSchema) -> str:
    told = (f"{name}: {each.get('description', '')}" for name, each in schema.parameters.items())
    return "\n".join([schema.description, "", *told])


def _usable(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
