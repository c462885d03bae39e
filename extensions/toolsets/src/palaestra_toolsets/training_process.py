"""One training run that an agent started: a folder, and a separate `palaestra train` process that works in it.

    request.json   the environment, the owner, the settings, and the id of the training process
    config.yaml    the environment's settings, for --config
    run/           the run's folder; its `training/` has the steps and checkpoints (docs/train.md)
    train.log      its progress and errors; result.json has its result
    lock           held (flock(2)) while the training process runs, so that any process can check whether it does
    ended          the reason, if the run was ended on request: stopped or interrupted

Invariant: at most one process trains in a folder. A training run outlives its starter, unless the starter stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.io.durable_files import read_lines, replaced
from palaestra_slots.core.types import JSON

REQUEST_SCHEMA = "palaestra.rl-run/1"
TRAIN = (sys.executable, "-P", "-m", "palaestra", "train")

READY_S = 60.0
"""The maximum time, in seconds, that `start` waits until training is ready. Loading a large model or checking an
environment may take longer."""
STOP_S = 60.0
"""The maximum time, in seconds, for training to finish its rollouts after SIGTERM. Then the process is killed."""
_KILL_S = 10.0
_POLL_S = 0.1
_LOCK_FD = 3
"""The descriptor that holds the lock in the training process."""
_LOG_BYTES = 2000
"""The maximum number of bytes from the log's end that an error shows."""

STARTING, RUNNING, COMPLETED, FAILED = "starting", "running", "completed", "failed"
STOPPED, INTERRUPTED = "stopped", "interrupted"


class TrainingRequest(msgspec.Struct, kw_only=True):
    """The request for a training run. `flags` are those of `palaestra train`, without the environment and its
    settings."""

    schema: str = REQUEST_SCHEMA
    run_id: str
    owner: str
    environment: str
    reference: str
    config: dict[str, JSON]
    settings: dict[str, JSON]
    flags: list[str]
    created: float
    started: float = 0.0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """The training run in a folder. Every method reads the folder again, so any process may use it."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.path / "run"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def request(self) -> TrainingRequest:
        """Read the request. Raises `ToolUnavailable` if the folder is damaged."""
        try:
            return msgspec.json.decode((self.path / "request.json").read_bytes(), type=TrainingRequest)
        except (OSError, msgspec.MsgspecError) as error:
            raise ToolUnavailable(f"the training run {self.id} cannot be read: {error}") from None

    def alive(self) -> bool:
        """Return whether a training process runs in this folder."""
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(self.request().pid, os.WNOHANG)  # reap it if it is a child of this process
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def status(self) -> str:
        """Return `starting`, `running`, `completed`, `stopped`, `interrupted` (ended together with the agent) or
        `failed`."""
        if self.alive():
            return RUNNING if (self.run / "training" / "settings.json").is_file() else STARTING
        if self.result() is not None:
            return COMPLETED
        try:
            return (self.path / "ended").read_text()
        except OSError:
            return FAILED

    def result(self) -> dict[str, JSON] | None:
        """Return the result of a training run that ended by itself: `TrainingReport.to_json`."""
        try:
            found = json.loads((self.path / "result.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def error(self) -> str:
        """Return the reason why training failed: its error message, or the end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_BYTES))
                text = file.read().decode("utf-8", "replace").strip()
        except OSError as error:
            return str(error)
        try:
            return str(json.loads(text.rpartition("\n")[2])["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return text or f"its process ended without a message; it may have been killed (its log is {self.log})"

    def lines(self) -> list[dict[str, JSON]]:
        """Return the metrics of steps and evaluations, in order. An incomplete last line is left out."""
        return list(read_lines(self.run / "training" / "steps.jsonl"))

    async def start(self, request: TrainingRequest, command: Sequence[str] = TRAIN) -> str:
        """Start training, or continue it from the last checkpoint, and wait until training is ready or has ended, but
        at most `READY_S` seconds. Returns the status. The caller must have checked that no process trains in this
        folder. `command` takes the arguments of `palaestra train`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = (self.run / "training" / "settings.json").is_file()
        for left in (self.path / "ended", self.path / "result.json"):
            left.unlink(missing_ok=True)
        if begun:
            words = ["--resume", str(self.run), *_only(request.flags, ("--tinker-url",))]
        else:
            shutil.rmtree(self.run, ignore_errors=True)
            with replaced(self.config) as file:
                file.write(json.dumps({"env": request.settings}, indent=2).encode())  # JSON is YAML
            config = ["--config", str(self.config)] if request.settings else []
            words = [request.reference, "--out", str(self.run), *config, *request.flags]
        request.started = time.time()
        self._write_request(request)  # first, so that a kill in between leaves a failed run, not an unknown process
        request.pid = await self._start_detached([*command, *words, "--json"])
        self._write_request(request)
        until = time.monotonic() + READY_S
        while (status := self.status()) == STARTING and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return status

    async def stop(self, why: str = STOPPED) -> None:
        """End training. The process gets at most `STOP_S` seconds to finish its rollouts. Idempotent."""
        if not self.alive():
            return
        (self.path / "ended").write_text(why)
        pid = self.request().pid
        for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, _KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
            until = time.monotonic() + patience_s
            while self.alive() and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def _start_detached(self, command: list[str]) -> int:
        """Start the process in its own session and let it inherit the lock. Returns its id. It is not a `Popen`,
        because it may outlive the event loop."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # only `alive` may hold the lock, for a moment
            written = os.O_WRONLY | os.O_CREAT
            return os.posix_spawn(  # noqa: ASYNC221 - it returns when the process exists
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(self.path / "result.json"), written | os.O_TRUNC, 0o600),
                    (os.POSIX_SPAWN_OPEN, 2, str(self.log), written | os.O_APPEND, 0o600),
                    (os.POSIX_SPAWN_DUP2, lock, _LOCK_FD),
                ],
                setsid=True,
            )
        finally:
            os.close(lock)

    def _write_request(self, request: TrainingRequest) -> None:
        with replaced(self.path / "request.json") as file:
            file.write(msgspec.json.format(msgspec.json.encode(request)))


def trainings(folder: Path) -> list[TrainingProcess]:
    """Return the training runs of a folder, the oldest first."""
    found = [TrainingProcess(path.parent) for path in folder.glob("*/request.json")]
    return sorted(found, key=lambda each: (each.request().created, each.id))


def words_of(settings: Mapping[str, JSON]) -> list[str]:
    """Return the settings as flags of `palaestra train`, without those that are None."""
    return [f"--{name.replace('_', '-')}={json.dumps(value) if isinstance(value, bool) else value}"
            for name, value in settings.items() if value is not None]  # fmt: skip


def _only(flags: Iterable[str], names: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if flag.partition("=")[0] in names]
