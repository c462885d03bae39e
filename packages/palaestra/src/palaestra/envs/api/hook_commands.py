"""Finds the commands of a reward hook that failed for lack of a network, a program, a file or trust in a host.

A hook often turns such a failure into reward 0, which then looks like the agent's. The cause is added to the score's
detail, from which the run reports it, and to the error if the hook raises.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, cast

from palaestra.rollouts.environment import MISSING
from palaestra.rollouts.grading.grader import Grading, Way, note_way
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import JSON, Network, Score
from palaestra_slots.sandbox.slot import ExecutionResult, Shell, Slot

_MOST_CAUSES = 5
_SHOWN_CHARS, _SHOWN_COMMAND = 160, 80
_NETWORK = re.compile(
    r"could not resolve|name resolution|name or service not known|nodename nor servname|no address associated"
    r"|network is unreachable|no route to host|unable to resolve|bad address '|getaddrinfo|failed to resolve"
    r"|could ?n[o']t connect to server|temporary failure resolving|failed to establish a new connection",
    re.IGNORECASE,
)
_TRUST = re.compile(
    r"certificate.?verify.?failed|ssl certificate problem|certificate verification failed"
    r"|confirming the ssl certificate",
    re.IGNORECASE,
)
_PROGRAM = re.compile(r": (?:command )?not found|no module named", re.IGNORECASE)
_FILE = re.compile(r"no such file or directory|file or directory not found", re.IGNORECASE)
_NOT_FOUND = 127
"""The exit code of a command whose program does not exist."""


class HookCommands:
    """Watches the commands that a reward hook runs in the slot of `grading`. `in_class` is true for class environments,
    whose settings differ."""

    def __init__(self, grading: Grading, *, in_class: bool) -> None:
        self._grading = grading
        self._in_class = in_class
        self._watched: _WatchedSlot | None = None
        self.causes: list[str] = []

    async def slot(self) -> Slot:
        """Return the grading slot, whose failed commands are examined."""
        slot = await self._grading.slot()
        if self._watched is None or self._watched.watched is not slot:
            self._watched = _WatchedSlot(slot, self)
        return cast("Slot", self._watched)

    def see(self, command: str | Sequence[str], done: ExecutionResult) -> None:
        """Note that the hook runs commands. If the command failed for want of a network, a program or a file, keep the
        cause."""
        note_way(Way.EXIT_CODE, _command_text(command))
        if done.success or len(self.causes) >= _MOST_CAUSES:
            return
        told = f"{done.output}\n{done.error}\n{done.metadata.get('stderr', '')}"
        found = self._cause(told, done.exit_code)
        if found is None:
            return
        line, advice = found
        cause = f"`{_command_text(command)}` failed: {one_line(line, _SHOWN_CHARS)}; {advice}"
        if cause not in self.causes:
            self.causes.append(cause)

    def _cause(self, told: str, exit_code: int) -> tuple[str, str] | None:
        """Return the line of the output that names the cause, and how to change it."""
        lines = [line.strip() for line in told.splitlines()]
        for pattern, advice in (
            (_NETWORK, self._network),
            (_TRUST, self._trust),
            (_PROGRAM, self._program),
            (_FILE, self._program if exit_code == _NOT_FOUND else self._missing_file_problem),
        ):
            # The last such line is about the failure; a command may have survived earlier ones.
            line = next((line for line in reversed(lines) if pattern.search(line)), None)
            if line is not None:
                return line, advice()
        return None

    def _network(self) -> str:
        if self._grading.spec.network == Network.ON:
            return "the check has a network, but it cannot reach this host"
        if self._in_class:
            return "the check has no network; set --env.allow_network true"
        return "the check has no network; give the task network=NetworkPolicy(grade=Network.ON)"

    def _trust(self) -> str:
        return "the check's sandbox does not trust the host's certificate; add its authority to the task's image"

    def _program(self) -> str:
        return "the check's sandbox lacks it; add it to the task's image or to the preparation"

    def _missing_file_problem(self) -> str:
        if self._grading.live:
            return "the file does not exist in the agent's sandbox"
        return "the agent did not leave the file, or the check shows the prepared version of it"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the causes to an error that the hook raises."""
        try:
            yield
        except Exception as error:
            if self.causes:
                error.add_note(f"its command {'; its command '.join(self.causes)}")
            raise

    def noted(self, score: Score) -> Score:
        """Return the score, with the causes in its detail if the reward is 0."""
        if score.reward or not self.causes:
            return score
        return replace(score, detail={**score.detail, MISSING: list(self.causes)})


def _command_text(command: str | Sequence[str]) -> str:
    return one_line(command if isinstance(command, str) else shlex.join(command), _SHOWN_COMMAND)


class _WatchedSlot:
    def __init__(self, slot: Slot, commands: HookCommands) -> None:
        self.watched = slot
        self._commands = commands

    def __getattr__(self, name: str) -> object:
        return getattr(self.watched, name)

    def __repr__(self) -> str:
        return repr(self.watched)

    async def execute(self, command: str | Sequence[str], **settings: Any) -> ExecutionResult:
        done = await self.watched.execute(command, **settings)
        if settings.get("verdict"):  # the hook reads the channel, which also tells why tests failed
            note_way(Way.RUN_TESTS)
        else:
            self._commands.see(command, done)
        return done

    async def call(self, function: str, *args: Any, **settings: Any) -> JSON:
        note_way(Way.OUTSIDE, function)
        return await self.watched.call(function, *args, **settings)

    @asynccontextmanager
    async def fork(self, **settings: Any) -> AsyncIterator[Slot]:
        async with self.watched.fork(**settings) as slot:
            yield cast("Slot", _WatchedSlot(slot, self._commands))

    async def shell(self, **settings: Any) -> Shell:
        return cast("Shell", _WatchedShell(await self.watched.shell(**settings), self._commands))


class _WatchedShell:
    def __init__(self, shell: Shell, commands: HookCommands) -> None:
        self._shell = shell
        self._commands = commands

    def __getattr__(self, name: str) -> object:
        return getattr(self._shell, name)

    async def run(self, command: str, **settings: Any) -> ExecutionResult:
        done = await self._shell.run(command, **settings)
        self._commands.see(command, done)
        return done
