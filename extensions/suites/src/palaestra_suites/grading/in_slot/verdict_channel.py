"""What every harness uses: its plan, the verdict channel, and the reports on code that reaches into the test run.

`VerdictChannel` writes the records of a test run to the verdict descriptor, which is separate from standard output. The
audit hook (`watch`) is installed before any code of the workspace runs and cannot be removed. It reports each event
once for each workspace file that causes it. `Framework` reports replaced functions of the test framework. Honest code
may cause each of these reports, so they become labels and no more. Sources: the audit events table of Python, and
PEP 578.
"""

from __future__ import annotations

import json
import os
import random
import sys
import unittest  # noqa: F401  pytest imports it too late for `Framework`
from types import FrameType
from typing import Any

DESCRIPTOR = 3
"""The descriptor from which `Slot.execute(verdict=True)` reads the verdict."""
VARIABLE = "PALAESTRA_VERDICT"
"""The variable that names the socket of `verdict_broker.py`."""

_WATCHED = frozenset(
    {"gc.get_objects", "gc.get_referrers", "sys._current_frames", "sys._getframe", "object.__setattr__", "open"}
)
_MOST_FRAMES = 8
_FRAMEWORK = ("_pytest", "pytest", "pluggy", "unittest", "verdict_channel", "pytest_reporter", "__main__")
"""Modules whose functions the work has no reason to replace. `__main__` is the harness."""


def read_plan() -> dict[str, Any]:
    """Return the plan from standard input, which is empty from now on. Take this folder off the import path."""
    plan: dict[str, Any] = json.load(sys.stdin)
    plan["python_path"] = [os.path.normpath(os.path.join(plan["root"], path)) for path in plan["python_path"]]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    return plan


def hide() -> None:
    """Let no other process of the same user take descriptors of this one (`pidfd_getfd`) or write to its memory."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):  # a Python without ctypes
        pass


class VerdictChannel:
    """Sends JSON lines. A crash can tear only the last line.

    The descriptor moves to a high number; otherwise code that writes to every low descriptor would add records. The
    functions that `send` needs are stored at the start, before workspace code can replace them.
    """

    def __init__(self, descriptor: int = DESCRIPTOR) -> None:
        hide()
        self._pid = os.getpid()
        self._write, self._encode, self._getpid = os.write, json.JSONEncoder().encode, os.getpid
        self._descriptor = random.randrange(300, 900)
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)

    def send(self, kind: str, **fields: object) -> None:
        if self._getpid() != self._pid:  # a test has forked: the outcome of the child is not the outcome of the test
            return
        line = self._encode({"kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[self._write(self._descriptor, line) :]


class _Here(Exception):
    pass


def watch(channel: VerdictChannel, root: str, without: list[str]) -> None:
    """Report events that code below `root`, but not at paths that begin with one of `without`, causes from now on."""
    if not hasattr(sys, "addaudithook"):  # Python 3.7, which the images of old repositories have
        return
    send, watched = channel.send, _WATCHED
    seen: set[tuple[str, str]] = set()
    prefix, own = root.rstrip("/") + "/", os.path.dirname(os.path.abspath(__file__)) + "/"
    trusted = (own, *without)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in watched or not _matters(event, args, own):
            return
        try:
            raise _Here  # gets a frame without causing an audit event
        except _Here as here:
            traceback = here.__traceback__
            frame = traceback.tb_frame.f_back if traceback is not None else None
        path = _caller(frame, prefix, trusted, 1 if event == "sys._getframe" else _MOST_FRAMES)
        if path is not None and (event, path) not in seen:
            seen.add((event, path))
            send("alarm", event=event, path=path[len(prefix) :])

    sys.addaudithook(hook)


def _matters(event: str, args: tuple[Any, ...], own: str) -> bool:
    if event == "open":
        name = os.fsdecode(args[0]) if args and isinstance(args[0], (str, bytes, os.PathLike)) else ""
        return name.startswith("/proc/") and name.endswith("/mem")
    if event == "object.__setattr__":
        return len(args) > 1 and args[1] == "__code__"
    if event == "sys._getframe":
        wanted = args[0].f_code.co_filename if args and isinstance(args[0], FrameType) else ""
        return wanted.startswith(own) or "/_pytest/" in wanted or "/pluggy/" in wanted
    return True


def _caller(frame: FrameType | None, prefix: str, trusted: tuple[str, ...], most: int) -> str | None:
    """Return the first workspace file, outside of the `trusted` places, among the `most` innermost frames, or None. An
    import has no caller, because modules may import tests."""
    for _ in range(most):
        name = frame.f_code.co_filename if frame is not None else ""
        if frame is None or name == "<frozen importlib._bootstrap>":
            return None
        if name.startswith(prefix) and not name.startswith(trusted):
            return name
        frame = frame.f_back
    return None


class Framework:
    """The functions of the test framework as they were before the workspace's code ran. None is known before `note`."""

    def __init__(self, channel: VerdictChannel) -> None:
        self._send = channel.send
        self._owners: list[tuple[str, object, dict[str, object]]] = []
        self._reported: set[str] = set()
        self._own: list[object] = []

    def note(self) -> None:
        """Note the functions as they are now."""
        # A plugin of pytest itself, which replaces methods of other classes while pytest starts, perhaps after this
        # note.
        legacy = sys.modules.get("_pytest.legacypath")
        self._own = [each for each in vars(legacy).values() if callable(each)] if legacy is not None else []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _FRAMEWORK:
                self._record_attributes(name, module)
                for attribute, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == name:
                        self._record_attributes(f"{name}.{attribute}", value)

    def _record_attributes(self, name: str, owner: object) -> None:
        kept = {key: value for key, value in vars(owner).items() if callable(value) or hasattr(value, "__get__")}
        self._owners.append((name, owner, kept))

    def check(self) -> None:
        """Report replaced functions."""
        for name, owner, before in self._owners:
            now = vars(owner)
            for key, value in before.items():
                place = f"{name}.{key}"
                changed = now.get(key) is not value and not any(now.get(key) is each for each in self._own)
                if changed and place not in self._reported:
                    self._reported.add(place)
                    self._send("alarm", event=f"changed {place}", path="")
