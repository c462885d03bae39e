"""Connects to a slot server through the standard input and output of a command, such as `docker run -i`, `ssh` or
`apptainer exec`.

The server's files travel over the stream, so the container or other machine needs only Python 3.11 or newer. The server
ends when the command ends, and the command ends when its standard input ends. Nothing is therefore left running after
this process, however it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import socket
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from palaestra_slots.core.errors import SlotLost
from palaestra_slots.sandbox.local.client import OnLost, SlotClient
from palaestra_slots.sandbox.remote import launch
from palaestra_slots.sandbox.slotd.protocol.frames import Fields, ProtocolError

Command = Callable[[Sequence[str]], Sequence[str]]
"""Returns the local command that runs the given command elsewhere and connects standard input and output to it."""

SILENCE_S = 60.0
"""Seconds without an answer after which a slot server counts as gone."""

GONE_S = 300.0
"""Seconds without a request from its client after which a slot server ends, because a network that fails does not close
the stream."""

_BEATS = 4  # requests to the server per `silence_s`, which check whether the server answers
_START_S = 900.0  # the platform may pull an image

_SLOTD = Path(__file__).parents[1] / "slotd"


class DistantClient(SlotClient):
    """A client that notices when its server is silent, because a network or a platform can hang without closing the
    stream."""

    _beating: asyncio.Task[None] | None = None

    async def launch_within(self, start_s: float, rung: str, settings: Fields, silence_s: float) -> None:
        """Start the server, and check from then on whether it answers. Raises `SlotLost` if it has not started within
        `start_s` seconds."""
        try:
            async with asyncio.timeout(start_s):
                await self._launch(rung, settings)
        except TimeoutError:
            raise SlotLost(f"no slot server has started within {start_s:g} s") from None
        self.beat(silence_s)

    def beat(self, silence_s: float) -> None:
        """Send the server requests at intervals, and end the connection when the server has not answered for
        `silence_s` seconds."""
        self._beating = asyncio.create_task(self._beat(silence_s))

    async def _beat(self, silence_s: float) -> None:
        while not self.ended:
            await asyncio.sleep(silence_s / _BEATS)
            # This changes nothing. It shows that the server answers, and shows `launch` that the client is alive.
            answer = asyncio.create_task(self.call("forget", {"layers": []}))
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([answer], timeout=silence_s)
            if not answer.done():
                self._end(SlotLost(f"the slot server has not answered for {silence_s:g} s"))

    async def aclose(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
        await super().aclose()
        if beating is not None:
            # A cancelled request waits for its answer, which a silent server never sends, so the stream is closed
            # before.
            await asyncio.gather(beating, return_exceptions=True)


class RemoteClient(DistantClient):
    """A client of a server that a command starts; the command runs Python elsewhere and forwards its streams."""

    def __init__(self, on_lost: OnLost, command: Command, gone_s: float) -> None:
        super().__init__(on_lost)
        self._command, self._gone_s = command, gone_s

    @classmethod
    async def start_by(
        cls,
        command: Command,
        rung: str,
        settings: Fields,
        on_lost: OnLost,
        *,
        silence_s: float = SILENCE_S,
        gone_s: float = GONE_S,
    ) -> Self:
        """Start a server with a command. If the command ends instead, raises `SlotLost` with the end of its standard
        error."""
        client = cls(on_lost, command, gone_s)
        await client.launch_within(_START_S, rung, settings, silence_s)
        return client

    @property
    def variables(self) -> Mapping[str, str] | None:
        """The environment variables of the command; None means those of this process."""
        return None

    async def _spawn(self, stream: socket.socket, rung: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        fd = stream.fileno()
        command = self._command(call_of(rung, self._gone_s))
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=fd, stdout=fd, stderr=self._log, env=self.variables, start_new_session=True
        )

    async def _deliver(self, stream: socket.socket) -> None:
        await send_server(stream)

    def _end(self, error: Exception | None = None) -> None:
        if isinstance(error, ProtocolError):
            error = SlotLost(f"something else writes to its standard output, perhaps a login script ({error})")
        super()._end(error)


async def send_server(stream: socket.socket) -> None:
    """Send the slot server's files in the form that `launch` reads."""
    stream.setblocking(False)
    with contextlib.suppress(OSError):  # the command has ended; reading will find its end and its log
        await asyncio.get_running_loop().sock_sendall(stream, archive())


def call_of(rung: str, silence_s: float | None = None) -> list[str]:
    """Return the command that runs `launch` in a container or on another machine."""
    silence = [] if silence_s is None else [str(silence_s)]
    return ["python3", "-I", "-S", "-c", program(), rung, *silence]


@functools.cache
def program() -> str:
    """Return the source of `launch`."""
    return Path(launch.__file__).read_text()


@functools.cache
def archive() -> bytes:
    """Return the slot server's files in the form that `launch` reads."""
    data = packed({f"slotd/{path.relative_to(_SLOTD)}": path for path in slotd_files()})
    return b"%d\n%s" % (len(data), data)


def slotd_files() -> list[Path]:
    """Return the files of the slot server: its source files and the compiled init programs."""
    files = [path for path in sorted(_SLOTD.rglob("*")) if path.is_file()]
    return [path for path in files if path.suffix in (".py", ".c", ".h") or path.name.startswith("init-")]


def packed(paths: Mapping[str, Path | None]) -> bytes:
    """Return a compressed tar archive. `paths` maps names in the archive to files; None stands for an empty file."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=6) as files:
        for name, path in paths.items():
            content = b"" if path is None else path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if path is not None and path.suffix == "" else 0o644
            files.addfile(entry, io.BytesIO(content))
    return archive.getvalue()
