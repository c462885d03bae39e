"""Runs one task of an allocation for the Nomad stand-in, as a process of this machine.

Events, their texts and the restart policy are those of Nomad's client (client/allocrunner/taskrunner).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from palaestra_slots.core.types import JSON

SECOND = 10**9
"""One second in nanoseconds, Nomad's unit of durations."""
_EVENTS = 10
"""The number of events that Nomad keeps for a task."""
_NEVER = "0001-01-01T00:00:00Z"


class Agent(Protocol):
    """The parts of the stand-in that a task uses. `images` are those of its docker driver, `pull_s` is the duration of
    a pull, and `crashing` makes every task end as soon as it has started."""

    folder: str
    images: set[str]
    pull_s: float
    crashing: bool

    def touch(self, *objects: JSON) -> Awaitable[int]: ...

    def client_status(self, allocation: JSON, status: str) -> Awaitable[None]: ...


class RunningTask:
    """One running task of an allocation."""

    def __init__(self, nomad: Agent, allocation: JSON, task: JSON, policy: JSON) -> None:
        self._nomad, self._allocation, self._task, self._policy = nomad, allocation, task, policy
        self._process: asyncio.subprocess.Process | None = None
        self._folder = Path(nomad.folder, allocation["ID"], task["Name"])
        self._stopping = asyncio.Event()
        self.log = self._folder / "stderr"
        self.state: JSON = {
            "State": "pending", "Failed": False, "Restarts": 0, "LastRestart": _NEVER, "StartedAt": _NEVER,
            "FinishedAt": _NEVER, "Events": [],
        }  # fmt: skip
        allocation["TaskStates"][task["Name"]] = self.state
        self.runner = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._event("Received", "Task received by client")
        await self._event("Task Setup", "Building Task Directory")
        starts: list[float] = []
        while not self._stopping.is_set():
            failure = await self._start()
            if failure is None:
                assert self._process is not None
                code = await self._process.wait()
                self._kill_group()
                ended = f"Exit Code: {max(code, 0)}" if code >= 0 else f"Exit Code: {128 - code}, Signal: {-code}"
                self.state["FinishedAt"] = _now()
                await self._event("Terminated", ended, {"exit_code": str(code)})
            else:
                await self._event("Driver Failure", failure, {"driver_error": failure})
            if self._stopping.is_set():
                break
            starts = [at for at in starts if time.monotonic() - at < self._policy["Interval"] / SECOND]
            starts.append(time.monotonic())
            delay_s = self._policy["Delay"] / SECOND
            if len(starts) > self._policy["Attempts"]:
                if self._policy["Mode"] == "fail":
                    self.state.update(State="dead", Failed=True)
                    await self._event("Not Restarting", "Exceeded allowed attempts")
                    await self._nomad.client_status(self._allocation, "failed")
                    return
                delay_s = self._policy["Interval"] / SECOND
            self.state.update(State="pending", Restarts=self.state["Restarts"] + 1, LastRestart=_now())
            await self._event("Restarting", f"Task restarting in {delay_s:g}s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
        self.state.update(State="dead", FinishedAt=_now())
        await self._event("Killed", "Task successfully killed")
        await self._nomad.client_status(self._allocation, "complete")

    async def _start(self) -> str | None:
        """Start the process; return the driver's error if that fails."""
        config = self._task["Config"]
        if self._task["Driver"] == "docker":
            image = config["image"]
            await self._event("Driver", "Downloading image", {"image": image})
            await asyncio.sleep(self._nomad.pull_s)
            if image not in self._nomad.images:
                return (
                    f"Failed to pull `{image}`: Error response from daemon: pull access denied for "
                    f"{image.split(':')[0]}, repository does not exist or may require 'docker login'"
                )
            words = [*config.get("entrypoint", ()), *config.get("args", ())]
        else:
            words = [config["command"], *config.get("args", ())]
        env = self._environment()
        command = [re.sub(r"\$\{([^}]+)\}", lambda found: env.get(found[1], found[0]), str(word)) for word in words]
        if self._nomad.crashing:
            command = ["python3", "-c", "import sys; sys.exit('the task is told to crash')"]
        (self._folder / "local").mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self._folder,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return f"failed to launch command with executor: {error}"
        self.state.update(State="running", StartedAt=_now())
        await self._event("Started", "Task started by client")
        await self._nomad.client_status(self._allocation, "running")
        return None

    def _environment(self) -> dict[str, str]:
        (port,) = self._allocation["AllocatedResources"]["Shared"]["Ports"]
        names = {f"NOMAD_PORT_{port['Label']}": str(port["Value"]), f"NOMAD_IP_{port['Label']}": port["HostIP"]}
        allocation = {
            "NOMAD_ALLOC_ID": self._allocation["ID"],
            "NOMAD_JOB_NAME": self._allocation["JobID"],
            "NOMAD_TASK_NAME": self._task["Name"],
            "NOMAD_TASK_DIR": str(self._folder / "local"),
        }
        return {"PATH": os.environ["PATH"], **allocation, **names, **(self._task.get("Env") or {})}

    async def _event(self, kind: str, message: str, details: JSON = None) -> None:
        event = {
            "Type": kind,
            "Time": time.time_ns(),
            "DisplayMessage": message,
            "Message": "",
            "Details": details or {},
        }
        self.state["Events"] = [*self.state["Events"], event][-_EVENTS:]
        await self._nomad.touch(self._allocation)

    async def stop(self) -> None:
        """Send SIGINT. Once the task has ended or `KillTimeout` has passed, send SIGKILL to its process group."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._task.get("KillTimeout", 5 * SECOND) / SECOND)
            self._kill_group()
        await asyncio.wait([self.runner])

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def crash(self) -> None:
        """Kill the process, as a fault of the node would."""
        self._kill_group()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
