"""Whether a run, an executor or a tool session records the replies of its tools or replays them: `live`, `record`,
`replay` or `fill`.

A run that is not `live` keeps all replies in its own folder, so that `palaestra replay` needs nothing else.

Invariant: `replay` never calls a tool that touches the world. An infrastructure failure raises and is not recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError, ToolUnavailable
from palaestra.rollouts.recorded_tools.recorded_session import Answers, Ask, KeyedCall, RolloutWorld
from palaestra.rollouts.recorded_tools.recording_file import WORLD_NAME, Reader, Writer, recording_at, recording_in
from palaestra.tools.tool import ToolOutcome

MODES = ("record", "live", "replay", "fill")

End: TypeAlias = Callable[[], None]
Repeats: TypeAlias = Callable[[], bool]


class RunWorld:
    """The recorded replies of one run, `live` by default. `close` closes the files. Implements `ToolRecordings`."""

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        added: Writer | None = None,
        end: End = lambda: None,
        replayed: bool = False,
    ) -> None:
        self.replayed = replayed
        self._answers = answers or Live()
        self._writers = [added] if added is not None else []
        self._end = end
        self._before: Reader | None = None

    def remember(self, path: Path) -> None:
        """Give continued rollouts the replies that an earlier part of the run recorded at `path`."""
        self._before = Reader(path) if path.is_file() else None

    def keep(self, path: Path) -> None:
        """Record all further replies at `path`. The file is created with its first line."""
        kept = Writer(path)
        self._writers.append(kept)
        self._answers = Recorded(self._answers, kept)

    def rollout(self, rollout_id: str, repeats: Repeats = lambda: False) -> RolloutWorld:
        """The recorded replies of a rollout that starts now. `repeats` returns whether it still repeats the turns of an
        earlier part of the run."""
        answers = self._answers if self._before is None else Remembered(self._answers, self._before, repeats)
        return RolloutWorld(rollout_id, answers, replayed=self.replayed)

    async def commit(self) -> None:
        """Return when all recorded replies are on the disk."""
        for writer in self._writers:
            await writer.commit()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        for writer in self._writers:
            writer.close()
        if self._before is not None:
            self._before.close()
        self._end()


class Live:
    """Calls the tools and records nothing."""

    async def reply(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        return await ask()


class Recorded:
    """The replies of `answers`, recorded."""

    def __init__(self, answers: Answers, kept: Writer) -> None:
        self._answers = answers
        self._kept = kept

    async def reply(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        outcome = await self._answers.reply(call, ask)
        self._kept.append(call.recorded(outcome.reply))
        return outcome


class Remembered:
    """The replies of `answers`, but the recorded ones while a rollout repeats its turns. Calls of a session are made
    again, to restore the session's state."""

    def __init__(self, answers: Answers, before: Reader, repeats: Repeats) -> None:
        self._answers = answers
        self._before = before
        self._repeats = repeats

    async def reply(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        if self._repeats() and not call.session:
            heard = self._before.find(call.key, call.rollout, call.n)
            if heard is not None and (heard.rollout, heard.n) == (call.rollout, call.n):
                return ToolOutcome.of(heard.reply)
        return await self._answers.reply(call, ask)


class Replayed:
    """Replies from the recording at `path` alone; `recording` is None if the file does not exist.

    A missing reply is an error for the model, or with `strict` the end of the rollout.
    """

    def __init__(self, recording: Reader | None, path: Path, *, strict: bool) -> None:
        self._recording = recording
        self._path = path
        self._strict = strict

    async def reply(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        heard = self._recording.find(call.key, call.rollout, call.n) if self._recording is not None else None
        if heard is not None:
            return ToolOutcome.of(heard.reply)
        after = " after the calls before it" if call.session else ""
        if not self._strict:
            return ToolOutcome.refused(
                f"{call.tool} is not available for this call{after}: no reply to it was recorded"
            )
        if self._recording is None:
            raise ToolUnavailable(f"{self._path} does not exist, so {call.tool} has no recorded reply ({call.rollout})")
        raise ToolUnavailable(f"{self._path} has no reply to this call of {call.tool}{after} ({call.rollout})")


class Filled:
    """Replies from a recording; calls that it lacks are made and added, once for equal concurrent calls.

    Calls of a session are always made: a browser that was never opened cannot continue where a recording ends.
    """

    def __init__(self, recording: Reader, added: Writer) -> None:
        self._recording = recording
        self._added = added
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def reply(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        if call.session:
            return await self._ask(call, ask)
        lock = self._asking.setdefault(call.key, asyncio.Lock())
        async with lock:
            heard = self._recording.find(call.key, call.rollout, call.n, failures=False)
            if heard is None:
                self._recording.catch_up()
                heard = self._recording.find(call.key, call.rollout, call.n, failures=False)
            if heard is not None:
                return ToolOutcome.of(heard.reply)
            return await self._ask(call, ask)

    async def _ask(self, call: KeyedCall, ask: Ask) -> ToolOutcome:
        outcome = await ask()
        self._added.append(call.recorded(outcome.reply))
        return outcome


def open_world(mode: str, recording: str | Path | None = None, *, strict: bool = False) -> RunWorld:
    """Recorded replies in one of the modes, for a run, `ToolExecutor(world=…)` or `ToolSession(world=…)`.

    `recording` is a file (`birds.jsonl`), or a folder such as a run's that holds one. `replay` and `fill` read it;
    `record` and `fill` add to it. A run passes no `recording` to `record` and keeps all replies in its own folder.
    `strict` ends a rollout that makes a call without a recorded reply. Raises `ConfigError`.
    """
    if mode not in MODES:
        raise ConfigError(f"world {mode!r} is not one of {', '.join(MODES)}.{nearest(mode, MODES)}")
    path = Path(recording) if recording else None
    if mode == "live" or (mode == "record" and path is None):
        return RunWorld()
    if path is None:
        raise ConfigError(f"world {mode} needs a recording: a file, or the folder of a run that has one")
    if mode == "replay":
        reader = Reader(recording_at(path))
        return RunWorld(Replayed(reader, reader.path, strict=strict), end=reader.close, replayed=True)
    added = Writer(recording_in(path))
    added.open()
    if mode == "record":
        return RunWorld(Recorded(Live(), added), added=added)
    reader = Reader(added.path)
    return RunWorld(Filled(reader, added), added=added, end=reader.close)


def world_of_run(folder: Path) -> RunWorld:
    """The replies that a run recorded, for replaying it. A missing reply ends the rollout as a failure of the tool."""
    path = folder / WORLD_NAME
    reader = Reader(path) if path.is_file() else None
    end = reader.close if reader is not None else lambda: None
    return RunWorld(Replayed(reader, path, strict=True), end=end, replayed=True)
