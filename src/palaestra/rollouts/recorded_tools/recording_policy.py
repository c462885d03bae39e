"""What a run, an executor or a tool session does about the world: `live`, `record`, `replay` or `fill`.

A run that is not `live` keeps what its rollouts were told in its own folder, so that `palaestra replay` needs
nothing else. Not for naming calls (`rollout.py`).

Invariant: `replay` never asks the world. A failure of the world raises and is not recorded: it is nobody's reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError, ToolUnavailable
from palaestra.rollouts.recorded_tools.recorded_session import Answers, Ask, NamedCall, RolloutWorld
from palaestra.rollouts.recorded_tools.recording_file import WORLD_NAME, Reader, Writer, recording_at, recording_in
from palaestra.tools.tool import ToolOutcome

MODES = ("record", "live", "replay", "fill")

End: TypeAlias = Callable[[], None]
Repeats: TypeAlias = Callable[[], bool]


class RunWorld:
    """The world of one run; without anything, the world itself. `close` ends its files. Implements `ToolRecordings`."""

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
        """A run goes on: what its earlier part recorded there is known to the rollouts that are taken up again."""
        self._before = Reader(path) if path.is_file() else None

    def keep(self, path: Path) -> None:
        """Record there what the rollouts are told from now on. The file is made with its first line."""
        kept = Writer(path)
        self._writers.append(kept)
        self._answers = Recorded(self._answers, kept)

    def rollout(self, rollout_id: str, repeats: Repeats = lambda: False) -> RolloutWorld:
        """The world as the attempt at a rollout that starts now sees it. `repeats` says whether it still does what an
        earlier part of the run had done."""
        answers = self._answers if self._before is None else Remembered(self._answers, self._before, repeats)
        return RolloutWorld(rollout_id, answers, replayed=self.replayed)

    async def commit(self) -> None:
        """Return once everything recorded so far is on the disk."""
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
    """The world itself; nothing is kept."""

    async def reply(self, call: NamedCall, ask: Ask) -> ToolOutcome:
        return await ask()


class Recorded:
    """The replies of `answers`, kept."""

    def __init__(self, answers: Answers, kept: Writer) -> None:
        self._answers = answers
        self._kept = kept

    async def reply(self, call: NamedCall, ask: Ask) -> ToolOutcome:
        outcome = await self._answers.reply(call, ask)
        self._kept.append(call.heard(outcome.reply))
        return outcome


class Remembered:
    """The replies of `answers`; while a rollout repeats itself, its own of then. Calls of a session are made again, so
    that the session is where it was."""

    def __init__(self, answers: Answers, before: Reader, repeats: Repeats) -> None:
        self._answers = answers
        self._before = before
        self._repeats = repeats

    async def reply(self, call: NamedCall, ask: Ask) -> ToolOutcome:
        if self._repeats() and not call.session:
            heard = self._before.find(call.key, call.rollout, call.n)
            if heard is not None and (heard.rollout, heard.n) == (call.rollout, call.n):
                return ToolOutcome.of(heard.reply)
        return await self._answers.reply(call, ask)


class Replayed:
    """A recording at `path`, and nothing else; None stands for one that is not there.

    What it lacks is an error for the model, or with `strict` the rollout's end.
    """

    def __init__(self, recording: Reader | None, path: Path, *, strict: bool) -> None:
        self._recording = recording
        self._path = path
        self._strict = strict

    async def reply(self, call: NamedCall, ask: Ask) -> ToolOutcome:
        heard = self._recording.find(call.key, call.rollout, call.n) if self._recording is not None else None
        if heard is not None:
            return ToolOutcome.of(heard.reply)
        after = " after the calls before it" if call.session else ""
        if not self._strict:
            return ToolOutcome.refused(
                f"{call.tool} is not available for this call{after}: no reply to it was recorded"
            )
        if self._recording is None:
            raise ToolUnavailable(f"{self._path} is not there, so nobody answers {call.tool} ({call.rollout})")
        raise ToolUnavailable(f"{self._path} has no reply to this call of {call.tool}{after} ({call.rollout})")


class Filled:
    """A recording that grows: the world is asked for what it lacks, once for equal calls at the same time.

    Calls of a session are always asked for: a browser that was never opened cannot go on where a recording ends.
    """

    def __init__(self, recording: Reader, added: Writer) -> None:
        self._recording = recording
        self._added = added
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def reply(self, call: NamedCall, ask: Ask) -> ToolOutcome:
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

    async def _ask(self, call: NamedCall, ask: Ask) -> ToolOutcome:
        outcome = await ask()
        self._added.append(call.heard(outcome.reply))
        return outcome


def open_world(mode: str, recording: str | Path | None = None, *, strict: bool = False) -> RunWorld:
    """The world in one of the modes: for a run, for `ToolExecutor(world=…)` or for `ToolSession(world=…)`.

    `recording` is a file (`birds.jsonl`) or a folder, such as a run's, that has or gets one: what `replay` and `fill`
    answer from, and where `record` and `fill` keep what is new. A run names none to record, and keeps everything in its
    own folder itself. `strict` ends a rollout with a call that the replayed one lacks. Raises `ConfigError`.
    """
    if mode not in MODES:
        raise ConfigError(f"world {mode!r} is none of {', '.join(MODES)}.{nearest(mode, MODES)}")
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
    """The world as a run recorded it, for playing the run again. What it lacks ends the rollout, blamed on the tool."""
    path = folder / WORLD_NAME
    reader = Reader(path) if path.is_file() else None
    end = reader.close if reader is not None else lambda: None
    return RunWorld(Replayed(reader, path, strict=True), end=end, replayed=True)
