"""Runs named tests of one text of Python inside a slot and reports each on a descriptor of its own.

This file is sent into the slot and run there by itself, with the standard library alone; nothing else imports it. Tests
are functions without arguments, or methods of classes, unittest's among them.

Input: one JSON object on standard input (`grading.py` writes it). Output: JSON lines on descriptor 3, each with the
run's nonce: `start` (no code of the workspace has run yet), `test` (one for each name), `finish`.

Invariant: the tests are in no file of the slot, and the standard library comes before the workspace.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import os
import sys
import traceback
import unittest
from typing import Any

_CHANNEL = 3
_MAX_TEXT = 1500
_FILE = "<tests>"


class Channel:
    """The descriptor that the verdict goes to. Each record is one write, so a crash can tear only the last one."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._nonce = nonce
        self._pid = os.getpid()
        os.set_inheritable(descriptor, False)

    def send(self, kind: str, **fields: object) -> None:
        if os.getpid() != self._pid:  # a test forked: what becomes of the child is not the test's outcome
            return
        line = json.dumps({"nonce": self._nonce, "kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def _loaded(text: str) -> tuple[dict[str, Any], str]:
    """The names that the tests define, and what kept them from being loaded."""
    linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(text, _FILE, "exec"), names)  # noqa: S102  the tests are text, and in no file
    except BaseException:
        return names, traceback.format_exc()
    return names, ""


def _outcome(names: dict[str, Any], name: str) -> str:
    """What is wrong with a test; empty when it passed."""
    owner, _, method = name.rpartition("::")
    try:
        found = names[owner.partition("::")[0] or method]
        if isinstance(found, type) and issubclass(found, unittest.TestCase):
            result = unittest.TestResult()
            unittest.TestSuite([found(method)]).run(result)
            bad = [text for _, text in (*result.failures, *result.errors)]
            passed = result.testsRun == 1 and not (bad or result.skipped or result.unexpectedSuccesses)
            return "" if passed and not result.expectedFailures else "".join(bad) or "it was not run"
        test = getattr(found(), method) if isinstance(found, type) else found
        answer = test()
        if inspect.iscoroutine(answer):
            asyncio.run(answer)
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> None:
    plan: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    channel = Channel(_CHANNEL, plan["nonce"])
    channel.send("start", python=sys.version.split()[0])
    os.chdir(plan["root"])
    sys.path.append(plan["root"])
    sys.pycache_prefix = os.path.join(here, "pycache")
    names, problem = _loaded(plan["tests"])
    for name in plan["names"]:
        error = problem or _outcome(names, name)
        channel.send("test", name=name, passed=not error, error=error[-_MAX_TEXT:])
    channel.send("finish")


if __name__ == "__main__":
    main()
