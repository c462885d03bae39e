"""Report, over the verdict channel, actions of workspace code that hardly any code needs except to attack the test run.

The hook is installed before any code of the workspace runs and cannot be removed. It reports each event once for each
workspace file that causes it. The host decides whether that is tampering, because it knows which events honest code of
the same repository causes. Sources: the audit events table of Python, and PEP 578.
"""

from __future__ import annotations

import os
import sys
import unittest  # noqa: F401  pytest imports it too late for `Framework`
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palaestra.suites.grading.in_slot.verdict_channel import VerdictChannel

_WATCHED = frozenset(
    {
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
        "sys._getframe",
        "sys._current_frames",
        "sys._current_exceptions",
        "sys.settrace",
        "sys.setprofile",
        "sys.addaudithook",
        "sys.monitoring.register_callback",
        "code.__new__",
        "object.__setattr__",
        "open",
        "os.listdir",
        "os.scandir",
        "ctypes.dlopen",
        "ctypes.addressof",
        "ctypes.string_at",
        "ctypes.wstring_at",
        "ctypes.cdata",
        "ctypes.cdata/buffer",
        "ctypes.dlsym/handle",
        "ctypes.call_function",
        "ctypes.PyObj_FromPtr",
    }
)
_OF_PROCESSES = ("/mem", "/maps", "/smaps", "/environ", "/fd", "/fdinfo", "/pagemap", "/auxv", "/cmdline")
_MOST_FRAMES = 8
_FRAMEWORK = ("_pytest", "pytest", "pluggy", "unittest", "verdict_channel", "audit_hook", "pytest_reporter", "__main__")
"""Modules whose functions the work has no reason to replace. `__main__` is the harness."""
_RESULTS = ("_pytest.reports.", "_pytest.runner.", "verdict_channel.", "unittest.result.", "unittest.case.")


class _Here(Exception):
    pass


def install(channel: VerdictChannel, root: str, without: list[str] | None = None) -> None:
    """Report events that code below `root`, but not below `without`, causes from now on."""
    if not hasattr(sys, "addaudithook"):  # Python 3.7, which the images of old repositories have
        return
    send, watched = channel.send, _WATCHED
    seen: set[tuple[str, str]] = set()
    prefix, own = root.rstrip("/") + "/", os.path.dirname(os.path.abspath(__file__)) + "/"
    trusted = tuple(place.rstrip("/") + "/" for place in [own, *(without or [])])

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in watched:
            return
        try:
            raise _Here  # gets a frame without causing an audit event
        except _Here as here:
            traceback = here.__traceback__
            frame = traceback.tb_frame.f_back if traceback is not None else None
        if not _matters(event, args, frame, own):
            return
        path = _caller(frame, prefix, trusted, 1 if event in ("sys._getframe", "code.__new__") else _MOST_FRAMES)
        if path is None or (event, path) in seen:
            return
        seen.add((event, path))
        send("alarm", event=event, path=path[len(prefix) :])

    sys.addaudithook(hook)


def _matters(event: str, args: tuple[Any, ...], frame: FrameType | None, own: str) -> bool:
    if event in ("open", "os.listdir", "os.scandir"):
        path = args[0] if args and isinstance(args[0], str) else ""
        return path.startswith("/proc/") and path.rstrip("/").endswith(_OF_PROCESSES)
    if event == "object.__setattr__":
        return len(args) > 1 and args[1] == "__code__"
    if event == "sys._getframe":
        wanted = args[0].f_code.co_filename if args and isinstance(args[0], FrameType) else ""
        return wanted.startswith(own) or "/_pytest/" in wanted or "/pluggy/" in wanted
    return True


def _caller(frame: FrameType | None, prefix: str, trusted: tuple[str, ...], most: int) -> str | None:
    """Return the first workspace file, outside of the `trusted` folders, among the `most` innermost frames, or None."""
    for _ in range(most):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if name.startswith(prefix) and not name.startswith(trusted):
            return name
        frame = frame.f_back
    return None


class Framework:
    """The functions of the test framework and of `builtins` as they were before the workspace's code ran."""

    def __init__(self, channel: VerdictChannel) -> None:
        self._send = channel.send
        self._owners: list[tuple[str, object, dict[str, object], frozenset[str]]] = []
        self._reported: set[str] = set()
        legacy = sys.modules.get("_pytest.legacypath")
        self._own = [each for each in vars(legacy).values() if callable(each)] if legacy is not None else []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in (*_FRAMEWORK, "builtins"):
                self._add(name, module)
                for attribute, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == name and name != "builtins":
                        self._add(f"{name}.{attribute}", value)

    def _add(self, name: str, owner: object) -> None:
        kept = {key: value for key, value in vars(owner).items() if callable(value) or hasattr(value, "__get__")}
        self._owners.append((name, owner, kept, frozenset(vars(owner))))

    def check(self) -> None:
        """Report replaced functions, and attributes that were added to result classes."""
        for name, owner, before, known in self._owners:
            now = vars(owner)
            for key in now if isinstance(owner, type) and name.startswith(_RESULTS) else ():
                if key not in known:
                    self._report(f"{name}.{key}")
            for key, value in before.items():
                changed = now.get(key) is not value and not any(now.get(key) is each for each in self._own)
                if changed:
                    self._report(f"{name}.{key}")

    def _report(self, name: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._send("alarm", event=f"changed {name}", path="")
