"""Sessions on disk, so that a new registry finds the processes that an old one left running in slots that stay.

One JSON file, `{"schema": "palaestra.processes", "version": 1, "sessions": [...]}`, replaced as a whole whenever a
session comes or goes. It is not synchronised to the disk: processes do not outlive the machine either.

A session is the same process only if slot, number, pid and start are all the same. Numbers and pids are used again when
a slot server is started anew; the start tells them apart, so nobody's process is taken for another's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.processes.session import ProcessSession, Watch
from palaestra.sandbox.slot import Process, ProcessStatus, Slot

SCHEMA, VERSION = "palaestra.processes", 1
_KEPT = ("id", "command", "task_id", "session_key", "cwd", "slot_id", "started_at", "lost", "followed")
_IDENTITY = ("process_id", "pid", "started_s")


def save(path: Path, sessions: Iterable[ProcessSession]) -> None:
    """Write the sessions. Raises OSError."""
    records = [_record(session) for session in sessions]
    unfinished = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(json.dumps({"schema": SCHEMA, "version": VERSION, "sessions": records}), encoding="utf-8")
    unfinished.replace(path)


async def load(path: Path, slots: Iterable[Slot]) -> list[ProcessSession]:
    """The sessions of a file, with their processes where these slots have them still; `lost` says why not.

    No file is no sessions. Raises `ConfigError` for one that cannot be read.
    """
    by_name = {slot.slot_id: slot for slot in slots}
    running = {
        name: {process.process_id: process for process in await slot.processes()} for name, slot in by_name.items()
    }
    return [await _session(record, running) for record in _read(path)]


def _read(path: Path) -> list[dict[str, JSON]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema, version = content["schema"], content["version"]
        records: list[dict[str, JSON]] = content["sessions"]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no file of background processes ({error}); move it away to go on") from None
    if schema != SCHEMA or version > VERSION:
        raise ConfigError(f"{path} holds {schema} version {version}; this version reads {SCHEMA} up to {VERSION}")
    return records


async def _session(record: dict[str, JSON], running: dict[str, dict[int, Process]]) -> ProcessSession:
    status = ProcessStatus(**record["status"])
    known = {name: record[name] for name in _KEPT}
    watch = Watch(**{**record["watch"], "patterns": tuple(record["watch"]["patterns"])})
    session = ProcessSession(**known, process=None, status=status, watch=watch, recovered=True)
    if session.lost:
        return session
    in_slot = running.get(session.slot_id)
    process = None if in_slot is None else in_slot.get(status.process_id)
    if in_slot is None:
        session.lost = f"its slot {session.slot_id} was not there after a restart"
    elif process is None:
        session.lost = f"{session.slot_id} no longer knew it after a restart"
    else:
        await _attach(session, process)
    return session


async def _attach(session: ProcessSession, process: Process) -> None:
    found = await process.status()
    if any(getattr(found, name) != getattr(session.status, name) for name in _IDENTITY):
        session.lost = f"process {found.pid} of {session.slot_id} is another one after a restart"
        return
    session.process, session.status = process, found


def _record(session: ProcessSession) -> dict[str, JSON]:
    record: dict[str, JSON] = {name: getattr(session, name) for name in _KEPT}
    watch = {item.name: getattr(session.watch, item.name) for item in fields(Watch)}
    return {**record, "status": asdict(session.status), "watch": {**watch, "address": dict(session.watch.address)}}
