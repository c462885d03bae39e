"""The clock and the time zone that an environment's own code reads in this process.

A score that asks for the year is such code. The programs of a sandbox see another clock by other means (`trials.py`).

Within `own_code_reads`, the modules of the author find other names for `time`, `datetime` and what they import from
them. In a trial on another machine these give its time; anywhere else, and for all other modules, the real one. So time
limits, journals and libraries keep the clock of this machine.

Not covered: clocks that the author's code reads through a library, or through a function that it keeps in an object,
and clocks that only count on, such as `time.monotonic`.
"""

from __future__ import annotations

import datetime
import gc
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_UNITS = {"": 1, "m": 60, "h": 3600, "d": 86_400, "y": 31_536_000}


@dataclass(slots=True)
class _Machine:
    """The clock of a trial as `faketime` names it. A given moment begins when the author's code first reads the clock,
    as it does for each program of the sandbox."""

    clock: str
    east_s: int | None
    _ahead_s: float | None = None

    def now(self) -> float:
        if self._ahead_s is None:
            self._ahead_s = _ahead_s(self.clock)
        return time.time() + self._ahead_s

    def local(self, seconds: float) -> datetime.datetime:
        if self.east_s is None:
            return datetime.datetime.fromtimestamp(seconds)
        zone = datetime.timezone(datetime.timedelta(seconds=self.east_s))
        return datetime.datetime.fromtimestamp(seconds, zone).replace(tzinfo=None)


_HERE = _Machine("", None)
_MACHINE: ContextVar[_Machine] = ContextVar("host_clock", default=_HERE)
"""A context variable, because trials are played concurrently; a score in a thread has it too."""


def _ahead_s(clock: str) -> float:
    if clock.startswith("@"):
        return time.mktime(time.strptime(clock[1:], "%Y-%m-%d %H:%M:%S")) - time.time()
    found = re.fullmatch(r"([+-]\d+)([mhdy]?)(?: x[\d.]+)?", clock)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


@contextmanager
def host_clock(clock: str, zone: str) -> Iterator[None]:
    """Let the author's code read another clock, and be in another time zone such as `EAST-14`, within the block. An
    empty text is the machine's own."""
    found = re.fullmatch(r"[A-Za-z]+([+-]?\d+)", zone)
    token = _MACHINE.set(_Machine(clock, -3600 * int(found[1]) if found else None) if clock or found else _HERE)
    try:
        yield
    finally:
        _MACHINE.reset(token)


class _Like(type):
    """The class of a class whose instances are those of the class below it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__bases__[0])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__bases__[0])


class _DateTime(datetime.datetime, metaclass=_Like):
    def __new__(cls, *values: Any, **named: Any) -> Any:
        return datetime.datetime(*values, **named)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(_MACHINE.get().now(), tz)

    @classmethod
    def today(cls) -> Any:
        return cls.now()

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def fromtimestamp(cls, timestamp: float, tz: datetime.tzinfo | None = None) -> Any:
        return _MACHINE.get().local(timestamp) if tz is None else datetime.datetime.fromtimestamp(timestamp, tz)


class _Date(datetime.date, metaclass=_Like):
    def __new__(cls, *values: Any, **named: Any) -> Any:
        return datetime.date(*values, **named)

    @classmethod
    def today(cls) -> Any:
        return _DateTime.now().date()

    @classmethod
    def fromtimestamp(cls, timestamp: float) -> Any:
        return _MACHINE.get().local(timestamp).date()


def _time() -> float:
    return _MACHINE.get().now()


def _time_ns() -> int:
    return int(_MACHINE.get().now() * 1e9)


def _gmtime(seconds: float | None = None) -> time.struct_time:
    return time.gmtime(_MACHINE.get().now() if seconds is None else seconds)


def _localtime(seconds: float | None = None) -> time.struct_time:
    machine = _MACHINE.get()
    moment = machine.now() if seconds is None else seconds
    return time.localtime(moment) if machine.east_s is None else time.gmtime(moment + machine.east_s)


def _strftime(form: str, moment: Any = None) -> str:
    return time.strftime(form, _localtime() if moment is None else moment)


def _ctime(seconds: float | None = None) -> str:
    return time.asctime(_localtime(seconds))


_OTHERS: Mapping[ModuleType, Mapping[str, Any]] = {
    time: {"time": _time, "time_ns": _time_ns, "gmtime": _gmtime, "localtime": _localtime, "strftime": _strftime,
           "ctime": _ctime},
    datetime: {"datetime": _DateTime, "date": _Date},
}  # fmt: skip


class _Module(ModuleType):
    """`time` or `datetime` for everybody, with other names for the author's modules in a trial on another machine."""

    def __init__(self, real: ModuleType, own: Collection[int]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update({name: value for name, value in vars(real).items() if name.startswith("__")})
        self.__dict__["_real"], self.__dict__["_own"] = real, own

    def __getattr__(self, name: str) -> Any:
        other = _OTHERS[self._real].get(name)
        # The frame is that of the function that reads the attribute, or that imports the name.
        if other is not None and _MACHINE.get() is not _HERE and id(sys._getframe(1).f_globals) in self._own:
            return other
        return getattr(self._real, name)


@contextmanager
def own_code_reads(files: Collection[Path]) -> Iterator[None]:
    """Let the loaded modules with these files read the clock of the trial, within the block."""
    scopes = _scopes(files)
    modules = {real: _Module(real, frozenset(scopes)) for real in _OTHERS}
    others = {id(real): made for real, made in modules.items()}
    others |= {id(getattr(real, name)): other for real, names in _OTHERS.items() for name, other in names.items()}
    changed = [
        (scope, name, value)
        for scope in scopes.values()
        for name, value in scope.items()
        if id(value) in others and not name.startswith("__")
    ]
    for scope, name, value in changed:
        scope[name] = others[id(value)]
    if scopes:
        sys.modules.update({real.__name__: made for real, made in modules.items()})  # for an import in a function
    try:
        yield
    finally:
        sys.modules.update({real.__name__: real for real in modules if scopes})
        for scope, name, value in changed:
            if scope.get(name) is others[id(value)]:
                scope[name] = value


def _scopes(files: Collection[Path]) -> dict[int, dict[str, Any]]:
    """Return the global names of the modules with these files. Some libraries load the author's file without an entry
    in `sys.modules`, so they are found by their functions."""
    every = {id(each.__globals__): each.__globals__ for each in gc.get_objects() if type(each) is FunctionType}
    places = {name: scope.get("__file__") for name, scope in every.items()}
    return {name: every[name] for name, place in places.items() if place and Path(str(place)).resolve() in files}
