"""Opens a cluster for a run: sends the environment and its settings to every node, and prints the table of nodes."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra.envs.config.command_line import set_fields
from palaestra.envs.discovery import old_imports_allowed
from palaestra.envs.run.elsewhere import ClusterRequest
from palaestra_cloud.cluster.driver import Driver
from palaestra_cloud.cluster.launcher import Launcher, ProcessLauncher
from palaestra_cloud.cluster.messages import WorkerSetup
from palaestra_cloud.cluster.nodes import Terms
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.user_code import told

_FLUSH_S = 0.1
_FLUSHES_PER_S = 50
"""About how many messages of all nodes the driver takes per second; each costs it about a millisecond."""


@asynccontextmanager
async def on_ray(words: str, request: ClusterRequest) -> AsyncIterator[Driver]:
    """Open the Ray cluster at an address, HOST:PORT; without one, the cluster of this machine or of the job. Raises
    `ConfigError` if Ray is not installed, or there is no cluster."""
    try:
        from palaestra_cloud.cluster.ray_launcher import RayLauncher  # imports ray, which is an extra
    except ImportError as error:
        raise ConfigError(f"--on ray needs the extra `ray`: {install_command('ray')} ({error})") from error
    async with opened(RayLauncher(words), request) as driver:
        yield driver


@asynccontextmanager
async def on_processes(words: str, request: ClusterRequest) -> AsyncIterator[Driver]:
    """Open several workers on this machine: `--on processes:N`."""
    if not words.isdigit() or not 0 < int(words) <= 256:
        raise ConfigError(f"--on processes needs the number of workers, for example --on processes:4 (not {words!r})")
    async with opened(ProcessLauncher(int(words)), request) as driver:
        yield driver


@asynccontextmanager
async def opened(launcher: Launcher, request: ClusterRequest) -> AsyncIterator[Driver]:
    """Open the nodes that `launcher` finds. Raises `ConfigError` if none can be used."""
    try:
        nodes = await launcher.nodes()
        driver = Driver(launcher, Terms(setup_of(request, flush_seconds(len(nodes))), request.servers))
        try:
            request.stream.write(await driver.open(nodes))
            yield driver
        finally:
            await driver.aclose()
    finally:
        await launcher.aclose()


def flush_seconds(nodes: int) -> float:
    """Return how long events wait on each of so many nodes until they are sent."""
    return max(_FLUSH_S, nodes / _FLUSHES_PER_S)


def setup_of(request: ClusterRequest, flush_s: float) -> WorkerSetup:
    """Return what a worker needs to make the run's environment. Raises `ConfigError` for an environment that only this
    process has."""
    reference = request.form.reference
    if not reference:
        raise ConfigError(
            f"{request.form.name} was made in this process, so nodes cannot load it: put it into a file, and name that"
        )
    path = Path(reference.partition(":")[0])
    script = path.read_bytes() if path.suffix == ".py" and path.is_file() else None
    settings = set_fields(request.config), [set_fields(server) for server in request.servers]
    try:
        pickled = pickle.dumps(settings)
    except Exception as error:
        raise ConfigError(f"the settings cannot be sent to a node: {told(error)}") from error
    return WorkerSetup(
        reference=reference,
        script=script,
        compat=old_imports_allowed(),
        folder=str(Path.cwd()),
        settings=pickled,
        flush_s=flush_s,
    )
