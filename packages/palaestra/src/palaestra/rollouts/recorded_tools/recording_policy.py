"""The policies by which a run, an executor or a tool session records or replays its tools' replies: `live`, `record`,
`replay` and `fill`.

A run that is not `live` keeps all replies in its own folder, so that `palaestra replay` needs nothing else.

Invariant: `replay` never calls a tool that reaches outside this machine. An infrastructure failure is raised and not
recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

from palaestra.rollouts.journal.reader import WORLD_NAME
from palaestra.rollouts.recorded_tools.recorded_session import (
    MODEL,
    Ask,
    Policy,
    RolloutWorld,
    judges,
    reports_failure,
    unpaid,
)
from palaestra.rollouts.recorded_tools.recording_file import (
    Reader,
    RecordedCall,
    Writer,
    recording_at,
    recording_in,
)
from palaestra.tools.tool import ToolOutcome
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, DiskError, ToolUnavailable
from palaestra_slots.core.types import JSON

_MOST_VERDICTS = 100_000

MODES = ("record", "live", "replay", "fill")

Repeats: TypeAlias = Callable[[], bool]


async def live(call: RecordedCall, ask: Ask) -> ToolOutcome:
    """Answer a call with the policy `live`: call the tool."""
    return await ask()


class RunWorld:
    """The recorded replies of one run, `live` by default. `close` closes the files. Implements `ToolRecordings`."""

    def __init__(
        self,
        policy: Policy = live,
        *,
        reader: Reader | None = None,
        added: Writer | None = None,
        kept: Writer | None = None,
        replayed: bool = False,
        asks_models: bool = True,
    ) -> None:
        self.replayed = replayed
        self._asks_models = asks_models
        self._verdicts: dict[tuple[str, int], JSON] = {}
        self._judging: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._policy = policy
        self._readers = [reader] if reader is not None else []
        self._kept = [kept] if kept is not None else []
        self._added = [added] if added is not None else []
        self._before: Reader | None = None

    def remember(self, path: Path) -> None:
        """Let continued rollouts use the replies that an earlier part of the run recorded at `path`."""
        if path.is_file():
            self._before = Reader(path)
            self._readers.append(self._before)

    def keep(self, path: Path) -> None:
        """Record all further replies at `path`. The file is created with its first line."""
        self._kept.append(Writer(path))

    def rollout(self, rollout_id: str, repeats: Repeats = lambda: False) -> RolloutWorld:
        """Return the recorded replies for a rollout that starts now. `repeats` returns whether the rollout still
        repeats turns of an earlier part of the run."""
        return RolloutWorld(rollout_id, partial(self._answer_call, repeats), replayed=self.replayed)

    async def _answer_call(self, repeats: Repeats, call: RecordedCall, ask: Ask) -> ToolOutcome:
        # calls of a session are made again, because they restore the session's state
        judging = self._asks_models and judges(call)
        if self._before is not None and (repeats() or judging) and not call.session:
            heard = self._before.find(call.key, call.rollout, call.n)
            # Only the rollout's own reply: `find` also returns those of other rollouts, which this one has not seen.
            if heard is not None and (heard.rollout, heard.n) == (call.rollout, call.n):
                return ToolOutcome.of(heard.reply)
        outcome = await (self._verdict(call, ask) if judging else self._policy(call, ask))
        for writer in self._kept:
            record_call(call, outcome, writer)
        return outcome

    async def _verdict(self, call: RecordedCall, ask: Ask) -> ToolOutcome:
        """Answer a judge's question, which this run asks only once: the `n`th time in each rollout counts apart, so
        that several verdicts on the same work differ."""
        key = call.key, call.n
        async with self._judging.setdefault(key, asyncio.Lock()):
            known = self._verdicts.get(key) or (None if self._before is None else _exact(self._before, call))
            if known is not None:
                return unpaid(known)
            outcome = await self._policy(call, ask)
            if not outcome.failed:
                if len(self._verdicts) >= _MOST_VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
                self._verdicts[key] = outcome.reply
            return outcome

    async def commit(self) -> None:
        """Return once all recorded replies are on the disk."""
        for writer in (*self._added, *self._kept):
            await writer.commit()

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        for writer in (*self._added, *self._kept):
            writer.close()
        for reader in self._readers:
            reader.close()


def record_call(call: RecordedCall, outcome: ToolOutcome, writer: Writer) -> None:
    """Write the call with its reply."""
    call.reply, call.failed = outcome.reply, reports_failure(outcome.reply)
    writer.append(call)


def replaying(recording: Reader | None, path: Path, *, strict: bool) -> Policy:
    """Return a policy that answers only from the recording at `path`; `recording` is None if the file does not exist.

    If a reply is missing, the model gets an error or, with `strict`, the rollout ends.
    """

    async def reply(call: RecordedCall, ask: Ask) -> ToolOutcome:
        heard = recording.find(call.key, call.rollout, call.n) if recording is not None else None
        if heard is not None:
            return ToolOutcome.of(heard.reply)
        after = " after the calls before it" if call.session else ""
        if not strict:
            return ToolOutcome.refused(
                f"{call.tool} is not available for this call{after}: no reply to it was recorded"
            )
        if recording is None:
            raise ToolUnavailable(f"{path} does not exist, so {call.tool} has no recorded reply ({call.rollout})")
        raise ToolUnavailable(f"{path} has no reply to this call of {call.tool}{after} ({call.rollout})")

    return reply


def filling(recording: Reader, added: Writer) -> Policy:
    """Return a policy that answers from the successful calls of a recording. A call that is not among them is made, and
    its reply is added; equal concurrent calls are made only once, unless they fail.

    Calls of a session are always made, because a browser that was never opened cannot continue where a recording ends.
    """
    # Weak, so that the locks of calls that nobody waits for do not add up over a long run.
    asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask_and_record(call: RecordedCall, ask: Ask) -> ToolOutcome:
        outcome = await ask()
        record_call(call, outcome, added)
        return outcome

    async def reply(call: RecordedCall, ask: Ask) -> ToolOutcome:
        if call.session:
            return await ask_and_record(call, ask)
        lock = asking.setdefault(call.key, asyncio.Lock())
        async with lock:
            heard = recording.find(call.key, call.rollout, call.n, failures=False)
            if heard is None:
                # Another rollout may have added the reply while this one waited for the lock, as may another run on the
                # same file.
                recording.catch_up()
                heard = recording.find(call.key, call.rollout, call.n, failures=False)
            return await ask_and_record(call, ask) if heard is None else ToolOutcome.of(heard.reply)

    return reply


def open_world(mode: str, recording: str | Path | None = None, *, strict: bool = False) -> RunWorld:
    """Return recorded replies in one of the modes, for a run, `ToolExecutor(world=…)` or `ToolSession(world=…)`.

    `recording` is a file (`birds.jsonl`), or a folder that has one, such as a run's. `replay` and `fill` read it;
    `record` and `fill` add to it. Only `replay` and `fill` require it, because a run keeps all replies in its own
    folder anyway. With `strict`, the mode `replay` ends a rollout that makes a call without a recorded reply. Raises
    `ConfigError`.
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
        policy = replaying(reader, reader.path, strict=strict)
        return RunWorld(policy, reader=reader, replayed=True, asks_models=False)
    added = Writer(recording_in(path))
    # Now, so that a file that cannot be written ends the run before it begins.
    added.open()
    if mode == "record":
        return RunWorld(kept=added)
    reader = Reader(added.path)
    return RunWorld(filling(reader, added), reader=reader, added=added)


def world_of_run(folder: Path) -> RunWorld:
    """Return the replies that a run recorded, for replaying the run. A missing reply ends the rollout as a tool
    failure."""
    path = folder / WORLD_NAME
    reader = Reader(path) if path.is_file() else None
    return RunWorld(replaying(reader, path, strict=True), reader=reader, replayed=True, asks_models=False)


def world_of_grading(folder: Path) -> RunWorld:
    """Return the replies that a run recorded, for grading its work again. Only a model is asked for a missing reply,
    which is added to the recording if that can be written."""
    path = folder / WORLD_NAME
    reader, added = Reader(path) if path.is_file() else None, Writer(path)
    others = replaying(reader, path, strict=True)

    async def reply(call: RecordedCall, ask: Ask) -> ToolOutcome:
        if call.tool != MODEL:
            return await others(call, ask)
        known = None if reader is None else _exact(reader, call)
        if known is not None:
            return unpaid(known)
        outcome = await ask()
        with contextlib.suppress(ConfigError, DiskError):  # somebody else's run, for example
            record_call(call, outcome, added)
        return outcome

    return RunWorld(reply, reader=reader, added=added, replayed=True)


def _exact(recording: Reader, call: RecordedCall) -> JSON:
    """Return the reply to the same question, asked as often before, in any rollout; None if there is none."""
    heard = recording.find(call.key, call.rollout, call.n, failures=False)
    return heard.reply if heard is not None and heard.n == call.n else None
