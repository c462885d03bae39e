"""A call of a Python function of the work, in a process of its own in the slot. It returns plain JSON to the caller.

The caller's assertions run on the host, out of the work's reach. Work that ends its process, patches a test library or
returns an object that equals everything gives no value, and `WorkError` is raised. The work can still return any JSON
value, so compare it with something that the work does not know.

Not covered: the process has the rights of the slot's user, and can read and change the slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from palaestra_slots.core.errors import WorkError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON

PACKAGES_DIR = "/opt/palaestra/packages"
"""Where a slot shows the Python packages that its task declares."""

_MOST_CHARS = 2000
_NO_PROGRAM = 127

# Workspace directories come last on the import path, so that no file of the work stands in for a standard module. After
# them come the packages of the task, and those that the agent installed with pip, which chooses this directory if it
# cannot write another. The reply goes to descriptor 3, which the work cannot confuse with what it prints.
# The functions that send the reply are looked up before the work is imported, because the work may replace them.
_PROGRAM = """
import asyncio, importlib, inspect, json, os, site, sys, traceback

def main():
    request = json.load(sys.stdin)
    reply = os.dup(3)
    os.close(3)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path += [os.path.join(os.getcwd(), path) for path in request["python_path"]]
    sys.path.append(site.getusersitepackages())
    encode, write, end = json.dumps, os.write, os._exit
    try:
        module, _, name = request["function"].partition(":")
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        value = value(*request["args"], **request["kwargs"])
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        text = encode({"value": value}, allow_nan=False)
    except BaseException:
        text = encode({"error": traceback.format_exc()})
    data = text.encode()
    while data:
        data = data[write(reply, data):]
    end(0)

main()
"""


def request(
    function: str, args: Sequence[JSON], kwargs: Mapping[str, JSON], python_path: Sequence[str]
) -> tuple[list[str], bytes]:
    """Return the command that calls `module:function` and its standard input. Raises ValueError for a name of another
    form, and TypeError for arguments that are not plain JSON."""
    module, separator, name = function.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{function!r:.100} is not a function: write package.module:function")
    if isinstance(args, str | bytes):
        raise TypeError(f"the arguments of {function} must be a list, such as [{args!r:.60}]")
    fields = {
        "function": function,
        "args": list(args),
        "kwargs": dict(kwargs),
        "python_path": [*python_path, PACKAGES_DIR],
    }
    return ["python3", "-I", "-B", "-c", _PROGRAM], json.dumps(fields).encode()


def value(function: str, reply: bytes, *, exit_code: int, output: str, error: str) -> JSON:
    """Return the value in the reply. Raises `WorkError` if the work gave none, and FileNotFoundError if the slot has no
    `python3`."""
    try:
        fields = json.loads(reply, parse_constant=_refuse)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and "value" in fields:
        return fields["value"]
    if isinstance(fields, dict) and "error" in fields:
        raise WorkError(f"{function} failed: {without_middle(str(fields['error']).strip(), _MOST_CHARS)}")
    # Without a reply, the exit code is the only sign that the shell did not find the program.
    if exit_code == _NO_PROGRAM and not reply:
        raise FileNotFoundError(f"python3 is missing in the sandbox; a call of {function} needs it")
    reason = error or "its process ended without an answer"
    raise WorkError(f"{function} returned nothing ({reason}): {without_middle(output.strip(), _MOST_CHARS)}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
