"""The worker of one node: a process that owns the node's slots, agent loops and prepared workspaces.

    python -m palaestra_cloud.cluster.worker

It reads messages from stdin and writes messages to stdout (`messages.py`), and ends when stdin ends. So whatever
started it may be killed at any moment: nothing stays behind, as after any other run that is killed. What the
environment prints goes to stderr. It plays groups with the classes of a run on one machine; only the journal is
elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from palaestra.envs.config.build import make_pool, make_prepared, make_recorded_tools
from palaestra.envs.discovery import allow_old_imports, load_environment
from palaestra.envs.run.evaluate import EvaluatedEnvironment
from palaestra.envs.run.run import opened
from palaestra.rollouts.group import GroupRun
from palaestra.rollouts.journal.journal import EventStream
from palaestra.rollouts.limits import RunLimits
from palaestra.rollouts.schedule import Places
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_cloud.cluster.event_outbox import EventOutbox, ForwardedJournal, Forwarding
from palaestra_cloud.cluster.messages import (
    FAILED,
    FINISHED,
    Cancel,
    Failure,
    FromWorker,
    GroupWork,
    NodeRefused,
    PlayGroup,
    Ready,
    Stop,
    StreamEnded,
    WorkerSetup,
    framed,
    read_frame,
    this_process,
    to_worker,
    unpacked,
)
from palaestra_slots.core.errors import ConfigError, DiskError, PalaestraError
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import told
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup

logger = logging.getLogger(__name__)

_MOST_BUFFERED = 1 << 20


@dataclass(frozen=True, slots=True)
class _Node:
    """What all groups of this worker share."""

    environment: EvaluatedEnvironment
    context: RunContext
    pool: SlotPool
    places: Places


class Worker:
    """Plays groups for the driver at the other end of two streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Play groups until the driver has gone."""
        await self._send_to_driver(this_process())
        try:
            setup = to_worker(await read_frame(self._reader))
            if not isinstance(setup, WorkerSetup):
                raise StreamEnded(f"{type(setup).__name__} came before the setup")
            await self._serve(setup)
        except StreamEnded as error:
            logger.info("the worker ends: %s", error)
        except PalaestraError as error:
            await self._send_to_driver(NodeRefused(told_briefly(error), error.exit_code))

    async def _serve(self, setup: WorkerSetup) -> None:
        async with AsyncExitStack() as stack:
            outbox = EventOutbox(self._send_to_driver, setup.flush_s)
            node = await stack.enter_async_context(_opened_node(setup, outbox))
            gc.freeze()  # modules and settings live as long as the worker
            await self._send_to_driver(Ready(int(node.pool.rung), node.pool.limit.slots))
            sending = asyncio.create_task(outbox.run(), name="outbox")
            try:
                while True:
                    self._obey(to_worker(await read_frame(self._reader)), node, outbox)
            finally:
                for each in self._playing.values():
                    each.cancel()
                await asyncio.gather(*self._playing.values(), return_exceptions=True)
                sending.cancel()

    def _obey(self, message: WorkerSetup | PlayGroup | Cancel | Stop, node: _Node, outbox: EventOutbox) -> None:
        match message:
            case PlayGroup(key=key, work=work, unheard=unheard):
                task = asyncio.create_task(_play_group(node, outbox, key, work, unheard), name=f"play-{key}")
                self._playing[key] = task
                task.add_done_callback(lambda _: self._playing.pop(key, None))
            case Cancel(key=key) if key in self._playing:
                self._playing[key].cancel()
            case Stop(reason=reason, message=text, spent=spent):
                node.context.limits.stop_as(reason, text, spent)
            case _:
                pass

    async def _send_to_driver(self, message: FromWorker) -> None:
        async with self._sending:
            try:
                self._writer.write(framed(message))
                await self._writer.drain()
            except ConnectionError as error:
                raise StreamEnded("the driver has gone") from error


def told_briefly(error: BaseException) -> str:
    """Return the text of one of our errors, or the type and text of any other error."""
    return str(error) if isinstance(error, PalaestraError) else told(error)


async def _play_group(node: _Node, outbox: EventOutbox, key: int, work: bytes, unheard: Collection[int]) -> None:
    """Play one group, and report its end even if it failed."""
    try:
        group = _unpacked(work)
        events = EventStream(ForwardedJournal(outbox, key), Forwarding(outbox, key, unheard))
        context = replace(node.context, events=events, settings=group.settings, earlier=group.earlier)
        await GroupRun(node.environment, context, group.number, group.task, node.places).play()
    except asyncio.CancelledError:
        pass  # its records are on their way
    except BaseException as error:
        logger.debug("play %d failed", key, exc_info=True)
        failure = Failure(told_briefly(error), isinstance(error, ConfigError), isinstance(error, DiskError))
        outbox.put(key, FAILED, -1, msgspec.json.encode(failure))
        if not isinstance(error, Exception):
            raise
        return
    outbox.put(key, FINISHED, -1, b"")


def _unpacked(work: bytes) -> GroupWork:
    try:
        return unpacked(work)
    except Exception as error:
        raise ConfigError(
            f"a task cannot be read on this node: {told(error)}. Its data must not use classes of modules that only "
            "the driver's machine has"
        ) from error


@asynccontextmanager
async def _opened_node(setup: WorkerSetup, outbox: EventOutbox) -> AsyncIterator[_Node]:
    """Open the environment, the model client and the slots of this node. Raises the errors of a run's start."""
    with ExitStack() as files:
        folder = Path(setup.folder)
        os.chdir(folder if folder.is_dir() and os.access(folder, os.X_OK) else _scratch(files))
        if setup.compat:
            allow_old_imports()
        form = load_environment(_script_here(setup, files), Path.cwd())
        env_values, server_values = _unpickled_settings(setup)
        config = form.config_type()(**env_values)
        servers = [APIServerConfig(**values) for values in server_values]
        async with AsyncExitStack() as stack:
            engine = ServerGroup(servers)
            stack.push_async_callback(engine.aclose)
            await engine.start()
            pool = await stack.enter_async_context(make_pool(config))
            environment = form.build(config, servers, engine)
            await stack.enter_async_context(opened(environment, config.only_tasks))
            await environment.set_up()
            if environment.collects_groups:
                raise ConfigError(
                    f"{environment.name} collects its groups itself and may keep state that other nodes do not have, "
                    "so it cannot run on a cluster"
                )
            recorded_tools = make_recorded_tools(config)
            stack.callback(recorded_tools.close)
            environment.use_recordings(recorded_tools)
            workspaces = Workspaces(pool, make_prepared(config, pool.backend, _not_kept))
            stack.push_async_callback(workspaces.aclose)
            context = RunContext(
                engine=engine,
                workspaces=workspaces,
                events=EventStream(ForwardedJournal(outbox, -1)),
                settings=RunSettings(seed=config.seed, group_size=config.group_size),
                limits=RunLimits(max_cost=config.max_cost),
                recorded_tools=recorded_tools,
            )
            yield _Node(environment, context, pool, Places(pool.limit.slots, 1 << 60))


def _not_kept(error: ConfigError) -> None:
    logger.warning("a prepared workspace is not kept for other runs: %s", error)


def _scratch(files: ExitStack) -> Path:
    """Return a new temporary folder. Most workers need none, so that most workers that are killed leave none."""
    return Path(files.enter_context(tempfile.TemporaryDirectory(prefix="palaestra-worker-")))


def _script_here(setup: WorkerSetup, files: ExitStack) -> str:
    """Return the reference by which this node loads the environment. If this node lacks the driver's file, or has
    another one at its path, a copy is loaded."""
    if setup.script is None:
        return setup.reference
    path, colon, name = setup.reference.partition(":")
    here = Path(path)
    try:
        if here.read_bytes() == setup.script:
            return setup.reference
    except OSError:
        pass
    copy = _scratch(files) / here.name
    copy.write_bytes(setup.script)
    return f"{copy}{colon}{name}"


def _unpickled_settings(setup: WorkerSetup) -> tuple[dict[str, JSON], list[dict[str, JSON]]]:
    try:
        env, servers = pickle.loads(setup.settings)  # noqa: S301 - from the driver, which started this process
    except Exception as error:
        raise ConfigError(f"the run's settings cannot be read on this node: {told(error)}") from error
    return env, servers


async def streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Take stdin and stdout for messages. What the environment's code prints then goes to stderr, and it has nothing to
    read."""
    loop = asyncio.get_running_loop()
    messages = os.dup(1)
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=_MOST_BUFFERED)
    await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), os.fdopen(os.dup(0), "rb", 0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    transport, protocol = await loop.connect_write_pipe(
        partial(asyncio.streams.FlowControlMixin, loop), os.fdopen(messages, "wb", 0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def _main() -> None:
    await Worker(*await streams()).run()


def main() -> None:
    """Run a worker on this process's stdin and stdout."""
    logging.basicConfig(level=os.environ.get("PALAESTRA_WORKER_LOG", "WARNING"), stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the driver's terminal: the driver says what ends
    asyncio.run(_main())


if __name__ == "__main__":
    main()
