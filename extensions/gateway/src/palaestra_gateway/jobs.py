"""The tool `cronjob`, and the jobs that it schedules: prompts that run as turns of the chat that created them.

Jobs are rows in the mailbox. When a job is due, one transaction adds its message to the incoming messages and stores
its next time; from then on it is a message like any other. So a run begins exactly once, even if the gateway is killed
or its clock changes, and it is answered like a person's message.

Invariant: a run is skipped and reported to the chat if it is more than `LATE_S` late because the gateway was down, if
the job's earlier run is unfinished, or if the person may not start a turn. Of several missed runs, at most one runs.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime

import msgspec

from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun
from palaestra_gateway.mailbox import Mailbox, Outgoing, add_incoming, add_outgoing
from palaestra_gateway.messaging import ORIGIN, Messaging
from palaestra_gateway.platform import ChatAddress, Incoming
from palaestra_gateway.schedules import Schedule, parse
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.types import JSON
from palaestra_toolsets.unavailable import CRONJOB

logger = logging.getLogger(__name__)

MOST_JOBS = 20
"""The maximum number of jobs of one session. There is a limit because a scheduled turn may create further jobs."""
LATE_S = 600.0
CHECK_S = 1.0
LOCAL = "local"
DOWN, BUSY = "The gateway was not running then.", "The job's earlier run had not finished."
_MOST_COUNTED = 1000
_LIST = "select body from jobs where session_key = ? order by id"


class Job(msgspec.Struct):
    """A job. `schedule` is as the model wrote it and counts from `since`; times are seconds since the epoch. `next_at`
    is None while the job is paused. `deliver` is `origin`, `local` or a target of `send_message`."""

    id: str
    session_key: str
    address: ChatAddress
    user_id: str
    prompt: str
    schedule: str
    since: float
    next_at: float | None
    name: str = ""
    repeat: int | None = None
    deliver: str = ORIGIN
    skills: list[str] = []
    runs: int = 0

    @property
    def title(self) -> str:
        return self.name or self.id


class Jobs:
    """The jobs of a gateway. `enqueue` queues a message that is in the mailbox, given its session key, address and row.
    `wake` sends the mailbox's messages for a chat. `user_of` returns the id of the person in a conversation. `refusal`
    returns why a person on a platform may not start a turn now, or the empty string."""

    def __init__(
        self,
        mailbox: Mailbox,
        messaging: Messaging,
        clock: Clock,
        *,
        enqueue: Callable[[str, ChatAddress, int], None],
        wake: Callable[[ChatAddress], None],
        user_of: Callable[[str], str],
        refusal: Callable[[str, str], Awaitable[str]],
    ) -> None:
        self._mailbox, self._messaging, self._clock = mailbox, messaging, clock
        self._enqueue, self._wake, self._user_of, self._refusal = enqueue, wake, user_of, refusal
        self.tool: FunctionTool = replace(CRONJOB[0], run=self._run, missing=lambda: None, touches_world=True)
        self._actions = {
            "create": self._create, "list": self._list, "update": self._update, "pause": self._pause,
            "resume": self._resume, "remove": self._remove, "run": self._run_now,
        }  # fmt: skip

    # The schedule

    async def run_due(self) -> None:
        """Begin the jobs that are due, for as long as the gateway runs."""
        while True:
            now = self._clock.wall()
            for job in await due(self._mailbox, now):
                if job.address.platform not in self._messaging.platforms:
                    continue
                try:
                    await self._begin_run(job, now)
                except ValueError as error:  # the job's time does not exist in the gateway's new time zone
                    logger.warning("job %s is paused: %s", job.id, error)
                    await self._stored(msgspec.structs.replace(job, next_at=None))
            await self._clock.sleep(CHECK_S)

    async def _begin_run(self, job: Job, now: float) -> None:
        """Begin the run of a job that is due, or report the run as missed. Stores the job's next time, or removes the
        job after its last run."""
        schedule = parse_again(job)
        times: list[float] = []
        at = job.next_at
        while at is not None and at <= now and len(times) < _MOST_COUNTED:
            times.append(at)
            at = schedule.after(at)
        if at is not None and at <= now:  # more runs were missed than the loop counts
            at = schedule.after(now)
        deliver = await self._delivery_address(job)
        refusal = await self._refusal(job.address.platform, job.user_id)

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            stored = _find(connection, job.id)
            if stored is None or stored.next_at != job.next_at:  # the job was removed or changed in the meantime
                return 0, 0
            row = 0
            why = refusal or (BUSY if _is_busy(connection, job) else DOWN if now - times[-1] > LATE_S else "")
            if not why:
                row = add_incoming(connection, _job_message(job, f"{times[-1]:.0f}", deliver), job.session_key, now)
            missed = len(times) - (1 if row else 0)
            runs = stored.runs + (1 if row else 0)
            if at is None or (job.repeat is not None and runs >= job.repeat):
                connection.execute("delete from jobs where id = ?", (job.id,))
            else:
                _store(connection, msgspec.structs.replace(stored, runs=runs, next_at=at))
            if missed:
                text = _missed(job, times, missed, why or DOWN, at)
                add_outgoing(connection, [Outgoing(f"missed-{job.id}-{times[-1]:.0f}", job.address, text)], now)
            return row, missed

        row, missed = await self._mailbox.do(work, synced=True)
        if missed:
            self._wake(job.address)
        if row:
            self._enqueue(job.session_key, job.address, row)

    async def _delivery_address(self, job: Job) -> ChatAddress | None:
        """Return the chat that gets the answer, or None. A target that is no longer allowed is replaced by the job's
        chat."""
        if job.deliver == LOCAL:
            return None
        if job.deliver != ORIGIN:
            try:
                return await self._messaging.address(job.session_key, job.deliver)
            except ToolMistake as mistake:
                logger.warning("job %s: %s", job.id, mistake)
        return job.address

    # The tool

    async def _run(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        try:
            return await self._actions[str(arguments["action"])](arguments, run)
        except ValueError as error:  # an invalid schedule
            raise error if isinstance(error, ToolMistake) else ToolMistake(str(error)) from None

    async def _create(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        prompt, schedule = str(arguments.get("prompt") or ""), str(arguments.get("schedule") or "")
        if not prompt.strip() or not schedule.strip():
            raise ToolMistake("create needs prompt and schedule")
        session = await self._mailbox.session(run.session_key)
        if session is None:
            raise ToolMistake("jobs can be created only in a chat of the gateway")
        now = self._clock.wall()
        job = Job(
            id=secrets.token_hex(4), session_key=run.session_key, address=session.address,
            user_id=self._user_of(run.task_id), prompt=prompt, schedule=schedule, since=now,
            next_at=parse(schedule, now).after(now),
        )  # fmt: skip
        job = await self._changed(job, arguments)

        def work(connection: sqlite3.Connection) -> bool:
            if len(connection.execute(_LIST, (run.session_key,)).fetchall()) >= MOST_JOBS:
                return False
            _store(connection, job)
            return True

        if not await self._mailbox.do(work, synced=True):
            raise ToolMistake(f"this chat has {MOST_JOBS} jobs, which is the maximum; remove one first")
        return {"success": True, "job": job_json(job)}

    async def _changed(self, job: Job, arguments: Mapping[str, JSON]) -> Job:
        """Return the job with the changes that the optional arguments request. Raises `ToolMistake` for a chat that may
        not be written to."""
        changes = {name: arguments[name] for name in ("name", "repeat", "deliver", "skills") if arguments.get(name)}
        job = msgspec.structs.replace(job, **changes)
        if job.deliver == ORIGIN and self._messaging.platforms[job.address.platform].limits.requests:
            raise ToolMistake("no answer can be sent to this chat later; set deliver to local or to another chat")
        if job.deliver not in (ORIGIN, LOCAL):
            await self._messaging.address(job.session_key, job.deliver)
        return job

    async def _list(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return {"success": True, "jobs": [job_json(job) for job in await self.of_session(run.session_key)]}

    async def of_session(self, session_key: str) -> list[Job]:
        rows = await self._mailbox.do(lambda connection: connection.execute(_LIST, (session_key,)).fetchall())
        return [msgspec.msgpack.decode(body, type=Job) for (body,) in rows]

    async def _update(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        job = await self._changed(await self._job(arguments, run), arguments)
        if arguments.get("prompt"):
            job.prompt = str(arguments["prompt"])
        if arguments.get("schedule"):
            now = self._clock.wall()
            job.schedule, job.since = str(arguments["schedule"]), now
            job.next_at = parse(job.schedule, now).after(now)
        return await self._stored(job)

    async def _pause(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return await self._stored(msgspec.structs.replace(await self._job(arguments, run), next_at=None))

    async def _resume(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        job = await self._job(arguments, run)
        job.next_at = parse_again(job).after(self._clock.wall())
        if job.next_at is None:
            raise ToolMistake("this job's time has passed; give the job a new schedule with update")
        return await self._stored(job)

    async def _remove(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        job = await self._job(arguments, run)
        await remove(self._mailbox, job.id)
        return {"success": True, "removed": job.id}

    async def _run_now(self, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        """Run a job once more, in addition to its schedule; its turn follows the turn that requests it."""
        job = await self._job(arguments, run)
        deliver, now = await self._delivery_address(job), self._clock.wall()

        def work(connection: sqlite3.Connection) -> int:
            if _is_busy(connection, job):
                return 0
            return add_incoming(connection, _job_message(job, f"{now:.3f}", deliver), job.session_key, now)

        row = await self._mailbox.do(work, synced=True)
        if not row:
            raise ToolMistake("a run of this job is already waiting or running")
        self._enqueue(job.session_key, job.address, row)
        return {"success": True, "job_id": job.id, "status": "runs after this turn"}

    async def _job(self, arguments: Mapping[str, JSON], run: ToolRun) -> Job:
        """Return the job of this chat that `job_id` names. Raises `ToolMistake`."""
        jobs = {job.id: job for job in await self.of_session(run.session_key)}
        name = str(arguments.get("job_id") or "")
        if name not in jobs:
            raise ToolMistake(f"this chat has no job {name!r}; its jobs are {', '.join(jobs) or 'none'}")
        return jobs[name]

    async def _stored(self, job: Job) -> ToolReply:
        await self._mailbox.do(lambda connection: _store(connection, job), synced=True)
        return {"success": True, "job": job_json(job)}


def job_json(job: Job) -> dict[str, JSON]:
    """Return a job as JSON for the model and the owner."""
    return {
        "job_id": job.id, "name": job.name, "schedule": job.schedule, "prompt": job.prompt, "deliver": job.deliver,
        "repeat": job.repeat, "skills": job.skills, "runs": job.runs,
        "state": "paused" if job.next_at is None else "on",
        "next_run": None if job.next_at is None else _time(job.next_at),
    }  # fmt: skip


def parse_again(job: Job) -> Schedule:
    """Return the schedule of a stored job, which was valid when the job was created."""
    return parse(job.schedule, job.since)


async def due(mailbox: Mailbox, now: float) -> list[Job]:
    query = "select body from jobs where next_at <= ? order by next_at"
    rows = await mailbox.do(lambda connection: connection.execute(query, (now,)).fetchall())
    return [msgspec.msgpack.decode(body, type=Job) for (body,) in rows]


async def all_jobs(mailbox: Mailbox) -> list[Job]:
    """Return every job of a gateway."""
    rows = await mailbox.do(lambda connection: connection.execute("select body from jobs order by next_at").fetchall())
    return [msgspec.msgpack.decode(body, type=Job) for (body,) in rows]


async def remove(mailbox: Mailbox, job_id: str) -> bool:
    """Remove a job; returns whether it existed."""
    query = "delete from jobs where id = ?"
    return bool(await mailbox.do(lambda connection: connection.execute(query, (job_id,)).rowcount, synced=True))


def _store(connection: sqlite3.Connection, job: Job) -> None:
    values = (job.id, job.session_key, job.next_at, msgspec.msgpack.encode(job))
    connection.execute("insert or replace into jobs values (?, ?, ?, ?)", values)


def _find(connection: sqlite3.Connection, job_id: str) -> Job | None:
    row = connection.execute("select body from jobs where id = ?", (job_id,)).fetchone()
    return None if row is None else msgspec.msgpack.decode(row[0], type=Job)


def _is_busy(connection: sqlite3.Connection, job: Job) -> bool:
    """Return whether a run of the job is still unanswered."""
    query = "select 1 from incoming where session_key = ? and done = 0 and substr(message_id, 1, ?) = ?"
    stem = _stem(job)
    return connection.execute(query, (job.session_key, len(stem), stem)).fetchone() is not None


def _stem(job: Job) -> str:
    return f"job:{job.id}:"


def _job_message(job: Job, at: str, deliver: ChatAddress | None) -> Incoming:
    """Return the message of one run. The message's id contains the run's time, so that no run happens twice."""
    skills = f" Read these skills first: {', '.join(job.skills)}." if job.skills else ""
    note = f"Scheduled job {job.title} ({job.schedule}). Perhaps nobody is there to answer questions.{skills}"
    text = f"[{note}]\n\n{job.prompt}"
    return Incoming(
        job.address, f"{_stem(job)}{at}", job.user_id, text, trusted=True, job=job.title, deliver=deliver
    )  # fmt: skip


def _missed(job: Job, times: list[float], missed: int, why: str, following: float | None) -> str:
    count = "a run was" if missed == 1 else f"{missed if len(times) < _MOST_COUNTED else 'many'} runs were"
    last = times[-1] if missed == len(times) else times[-2]
    more = "" if following is None else f" The next one is at {_time(following)}."
    return f"(Scheduled job {job.title}: {count} missed, the last at {_time(last)}. {why}{more})"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
