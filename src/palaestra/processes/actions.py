"""What can be done with one session, each answered with an object in the contract's shape.

`status` is running or exited (of `poll`), exited, timeout or interrupted (of `wait`), killed or already_exited (of
`kill`), ok (of `write`), error, and lost: the session is known, its process cannot be reached any more. Times are
seconds, sizes bytes unless the name says otherwise. The slot's own failures (`InfraError`) are raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from palaestra.core.types import JSON
from palaestra.processes import output
from palaestra.processes.session import FORGOTTEN, KILL_GRACE_S, MAX_OUTPUT_CHARS, ProcessSession, SessionLost
from palaestra.sandbox.slot import ProcessStatus

PREVIEW_CHARS, LISTED_CHARS, WAITED_CHARS = 1000, 200, 2000
MAX_NEW_BYTES = 20_000
"""How much one `poll` with a cursor gives; the next goes on from there."""

WRITE_PATIENCE_S = 10.0
"""How long a write waits for the process to read."""

Reply = dict[str, JSON]


async def reaching(session: ProcessSession, action: Callable[[ProcessSession], Awaitable[Reply]]) -> Reply:
    """One of the actions below; a session whose process cannot be reached any more is answered with that."""
    try:
        return await action(session)
    except ProcessLookupError:
        session.lose(FORGOTTEN)
    except SessionLost:
        pass
    error = f"The process of {session.id} cannot be reached any more: {session.lost}."
    return {"session_id": session.id, "command": session.command, "status": "lost", "error": error}


async def poll(session: ProcessSession, since: int | None = None) -> Reply:
    """How it is, with the end of its output, or with what it wrote after the cursor `since`."""
    status = await session.refresh()
    reply: Reply = {"session_id": session.id, "command": session.command, **_state(status)}
    if since is None:
        reply |= await _tail(session, status, "output_preview", PREVIEW_CHARS)
    else:
        reply |= await _new_output(session, status, since)
    reply |= {"output_total_bytes": status.output_total_bytes, **_full_output(status)}
    if session.recovered:
        reply |= {"detached": True, "note": "Found again after a restart."}
    return reply | _notices(session)


async def log(session: ProcessSession, offset: int = 0, limit: int = 200) -> Reply:
    """Lines of the output that is kept: the last `limit` ones, or `limit` ones after `offset`."""
    status = await session.refresh()
    kept = await output.tail(session.reach(), MAX_OUTPUT_CHARS, running=status.running)
    lines = kept.text.splitlines()
    first = max(0, len(lines) - limit) if offset <= 0 else min(offset, len(lines))
    shown = lines[first : first + limit]
    showing = f"lines {first + 1}-{first + len(shown)} of {len(lines)}" if shown else f"no lines of {len(lines)}"
    reply: Reply = {"session_id": session.id, "status": _word(status), "output": "\n".join(shown)}
    reply |= {"total_lines": len(lines), "showing": showing, "cursor": kept.end}
    if kept.start:
        reply["dropped_bytes"] = kept.start
        reply["note"] = "Lines are counted from the first one that is kept."
    return reply | _full_output(status) | _notices(session)


async def wait(session: ProcessSession, timeout_s: float | None, limit_s: float) -> Reply:
    """Until it has ended, `timeout_s` (at most `limit_s`) is over, or somebody interrupts. No polling."""
    patience_s = limit_s if timeout_s is None else min(max(timeout_s, 0.0), limit_s)
    interrupted = await _ended_or_interrupted(session, patience_s)
    status = await session.refresh()
    word = "exited" if not status.running else "interrupted" if interrupted else "timeout"
    reply: Reply = {"session_id": session.id, "status": word}
    if not status.running:
        reply["exit_code"] = status.exit_code
    reply |= await _tail(session, status, "output", WAITED_CHARS)
    reply["output_total_bytes"] = status.output_total_bytes
    if word == "timeout":
        clamped = (
            f"The wait of {timeout_s:g}s was cut to the limit of {limit_s:g}s. " if _above(timeout_s, limit_s) else ""
        )
        reply["timeout_note"] = f"{clamped}Waited {patience_s:g}s; the process still runs."
    elif word == "interrupted":
        reply["note"] = "The wait was interrupted; the process still runs."
    return reply | _full_output(status) | _notices(session)


async def kill(session: ProcessSession, grace_s: float = KILL_GRACE_S) -> Reply:
    """End it and everything that it has started: SIGTERM, `grace_s`, SIGKILL; answered when nothing of it lives."""
    before = await session.refresh()
    status = session.status = await session.reach().kill(grace_s) if before.running else before
    word = "killed" if before.running else "already_exited"
    return {"session_id": session.id, "status": word, "exit_code": status.exit_code} | _notices(session)


async def write(session: ProcessSession, data: bytes, *, end: bool = False) -> Reply:
    """Write to its input, and close that if this is the `end`."""
    if not (await session.refresh()).running:
        error = "The process has ended; nothing was written."
        return {"session_id": session.id, "status": "already_exited", "error": error}
    try:
        async with asyncio.timeout(WRITE_PATIENCE_S):
            await session.reach().write(data)
            if end:
                await session.reach().close_input()
    except BrokenPipeError:
        return {"session_id": session.id, "status": "error", "error": "The process has closed its input."}
    except TimeoutError:
        error = f"The process has not read all of it in {WRITE_PATIENCE_S:g}s; a part may have been written."
        return {"session_id": session.id, "status": "error", "error": error}
    return {"session_id": session.id, "status": "ok", "bytes_written": len(data)}


async def submit(session: ProcessSession, data: bytes, *, end: bool = False) -> Reply:
    """Write a line: what the Enter key sends on a terminal, a newline to a pipe."""
    return await write(session, data + (b"\r" if session.status.terminal else b"\n"), end=end)


async def summary(session: ProcessSession) -> Reply:
    """One entry of a list."""
    status = await session.refresh()
    started = datetime.fromtimestamp(session.started_at, UTC).isoformat(timespec="seconds")
    reply: Reply = {"session_id": session.id, "command": session.command[:LISTED_CHARS], "cwd": session.cwd}
    reply |= {**_state(status), "started_at": started, **({"detached": True} if session.detached else {})}
    return reply | await _tail(session, status, "output_preview", LISTED_CHARS) | _notices(session)


async def _tail(session: ProcessSession, status: ProcessStatus, name: str, chars: int) -> Reply:
    """The last characters of the output under `name`, and the cursor after them."""
    end = await output.tail(session.reach(), output.LONGEST_CHARACTER * chars, running=status.running)
    return {name: end.text[-chars:], "cursor": end.end}


async def _new_output(session: ProcessSession, status: ProcessStatus, since: int) -> Reply:
    new = await output.read_text(session.reach(), since, max_bytes=MAX_NEW_BYTES, running=status.running)
    reply: Reply = {"output": new.text, "cursor": new.end}
    if new.lost:
        reply["lost_bytes"] = new.lost
    if new.more and status.output_total_bytes > new.end:
        reply["more_bytes"] = status.output_total_bytes - new.end
    return reply


async def _ended_or_interrupted(session: ProcessSession, patience_s: float) -> bool:
    """Wait for the end, for so long; whether an interrupt came first."""
    interrupt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ending = asyncio.ensure_future(session.reach().wait(patience_s))
    either: list[asyncio.Future[JSON]] = [interrupt, ending]
    session.waiting.add(interrupt)
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return True
        ending.result()
        return False
    finally:
        session.waiting.discard(interrupt)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


def _state(status: ProcessStatus) -> Reply:
    reply: Reply = {"status": _word(status), "pid": status.pid, "uptime_seconds": int(status.duration_s)}
    return reply if status.running else reply | {"exit_code": status.exit_code}


def _word(status: ProcessStatus) -> str:
    return "running" if status.running else "exited"


def _full_output(status: ProcessStatus) -> Reply:
    if status.full_output_path is None:
        return {}
    return {"full_output_path": status.full_output_path, "full_output_bytes": status.full_output_bytes}


def _notices(session: ProcessSession) -> Reply:
    """What was told of the session since the last reply, once."""
    notices = list(session.notices)
    session.notices.clear()
    return {"notices": notices} if notices else {}


def _above(timeout_s: float | None, limit_s: float) -> bool:
    return timeout_s is not None and timeout_s > limit_s
