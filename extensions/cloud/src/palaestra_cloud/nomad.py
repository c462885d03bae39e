"""Runs slots in the allocations of a Nomad job, with many slots in each allocation.

The job has one task group `sandbox` with one task `sandbox-server`, which listens on a port that Nomad assigns; the
secret for the port is in the job. The driver `docker` runs the image's Python; `raw_exec` runs the node's Python, and
gives the slots the isolation that the node allows. The slot server's files travel over the port
(`port_server.py`), which accepts no requests from the users of slots. The job is scaled up as slots need
allocations, and down when the allocations with the highest numbers are idle.

A run owns its job. If another live run has a job of the same name, this run's job gets a different name, or the start
fails if `purge_job_on_start` is set. A job that has had no open stream for `unattended_s` seconds is considered
abandoned; the next run with the same `sandbox_job_id` removes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from palaestra_cloud.nomad_api import (
    NomadAccess,
    NomadAPI,
    NomadRefused,
    log_tail,
    placement_problem,
    task_problem,
)
from palaestra_cloud.port_client import PortClient, ask, deliver, program
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.remote import Place, PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.images.reference import is_path
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec, Snapshot

if TYPE_CHECKING:
    from palaestra_slots.sandbox.pool import SlotPoolConfig

GROUP, TASK, PORT = "sandbox", "sandbox-server", "slots"
OWNER = "palaestra_owner"
"""The key in a job's metadata whose value names the run that owns the job."""

DRIVERS = ("docker", "raw_exec")
_PORT_INSIDE = 8080
_START_S = 600.0
"""Seconds that an allocation may take to start, including the image pull, as long as nothing has failed."""
_SECOND = 10**9

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NomadBackendConfig:
    """The backend's settings, with the names and defaults of Atropos and Hermes. Durations are in seconds. `cpu` is in
    MHz and `memory` in MB, both for one container."""

    nomad_address: str = "http://localhost:4646"
    sandbox_job_id: str = "atropos-sandbox"
    sandbox_image: str = "atropos-sandbox:local"
    slots_per_container: int = 10
    min_containers: int = 1
    max_containers: int = 10
    privileged: bool = False
    acquire_timeout_s: float = 30.0
    purge_job_on_start: bool = False
    purge_job_on_shutdown: bool = True
    driver: str = "docker"
    datacenter: str = "dc1"
    cpu: int = 500
    memory: int = 512
    scale_cooldown_s: float = 60.0
    health_check_interval_s: float = 30.0
    """The maximum number of seconds that one request for the job's allocations waits for a change."""
    unattended_s: float = 60.0
    """Seconds without an open stream after which the Palaestra run that started a job is considered dead."""
    access: NomadAccess = NomadAccess()

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise ConfigError(f"unknown driver {self.driver!r} for the nomad backend; use {' or '.join(DRIVERS)}")
        if self.privileged and self.driver != "docker":
            raise ConfigError("privileged is a setting of Nomad's docker driver: leave it out with raw_exec")
        if not 0 <= self.min_containers <= self.max_containers or self.max_containers < 1:
            raise ConfigError("nomad: max_containers must be at least 1, and min_containers from 0 to max_containers")

    @classmethod
    def from_agent_env_config(cls, config: JSON) -> NomadBackendConfig:
        """Return the backend's settings from a run's configuration."""
        return cls(
            nomad_address=config.nomad_address,
            sandbox_job_id=config.sandbox_job_id,
            sandbox_image=config.sandbox_image,
            slots_per_container=config.slots_per_container,
            min_containers=config.min_containers,
            max_containers=config.max_containers,
            privileged=config.privileged,
            acquire_timeout_s=config.acquire_timeout_s,
            purge_job_on_start=config.purge_job_on_start,
            purge_job_on_shutdown=config.purge_job_on_shutdown,
            driver=config.driver,
            datacenter=config.nomad_datacenter,
            cpu=config.nomad_cpu,
            memory=config.nomad_memory,
            scale_cooldown_s=config.nomad_scale_cooldown,
            access=NomadAccess(
                token=config.nomad_token,
                namespace=config.nomad_namespace,
                region=config.nomad_region,
                ca_cert=config.nomad_ca_cert,
                client_cert=config.nomad_client_cert,
                client_key=config.nomad_client_key,
                tls_server_name=config.nomad_tls_server_name,
            ),
        )


@dataclass
class Allocation:
    """One allocation of a job. `number` is the number in the allocation's name."""

    allocation_id: str
    number: int
    address: tuple[str, int] | None = None
    state: Mapping[str, JSON] = field(default_factory=dict)
    taken: bool = False
    leaving: bool = False
    free_since: float = 0.0
    restarts: int = 0
    """The task's restart count when the task last worked."""

    @property
    def is_running(self) -> bool:
        return self.state.get("State") == "running" and not self.leaving

    @property
    def problem(self) -> str | None:
        """The reason why the allocation does not start; None if there is none."""
        return task_problem(self.state, self.restarts)


def job_specification(config: NomadBackendConfig, name: str, image: str | None, meta: JSON, token: str) -> JSON:
    """Return the job in the format of Nomad's API (api-docs/json-jobs); durations are in nanoseconds."""
    docker = config.driver == "docker"
    host = "0.0.0.0" if docker else f"${{NOMAD_IP_{PORT}}}"  # noqa: S104 - inside the container
    arguments = ["-I", "-S", "-c", program(), host, f"${{NOMAD_PORT_{PORT}}}", str(config.slots_per_container)]
    settings: dict[str, JSON] = {"command": "python3", "args": arguments}
    if docker:
        settings = {
            "image": image, "entrypoint": ["python3"], "args": arguments, "ports": [PORT],
            "privileged": config.privileged,
        }  # fmt: skip
    port: dict[str, JSON] = {"Label": PORT, "To": _PORT_INSIDE} if docker else {"Label": PORT}
    task = {
        "Name": TASK,
        "Driver": config.driver,
        "Config": settings,
        "Env": {"PALAESTRA_TOKEN": token},
        "Resources": {"CPU": config.cpu, "MemoryMB": config.memory},
        "KillTimeout": 5 * _SECOND,
    }
    group = {
        "Name": GROUP,
        "Count": max(1, config.min_containers),
        # A crash is reported after two restarts. Later restarts are delayed, so a broken image hardly loads a node.
        "RestartPolicy": {"Attempts": 3, "Interval": 60 * _SECOND, "Delay": 1 * _SECOND, "Mode": "delay"},
        "Networks": [{"DynamicPorts": [port]}],
        "Tasks": [task],
    }
    return {
        "ID": name,
        "Name": name,
        "Type": "service",
        "Datacenters": [config.datacenter],
        **({"Namespace": config.access.namespace} if config.access.namespace else {}),
        **({"Region": config.access.region} if config.access.region else {}),
        "Meta": meta,
        "Update": {"MaxParallel": 0},  # no deployments, which would forbid scaling while they last
        "TaskGroups": [group],
    }


class NomadJob:
    """One job of this run, and its allocations."""

    def __init__(
        self,
        api: NomadAPI,
        config: NomadBackendConfig,
        image: str | None,
        owner: str,
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        self._api, self._config, self._image, self._owner = api, config, image, owner
        self._tidy = tidy
        self._token = secrets.token_urlsafe(24)
        self._allocations: dict[str, Allocation] = {}
        self._changed = asyncio.Condition()
        self._scaling = asyncio.Lock()
        self._count = max(1, config.min_containers)
        self._waiting = 0
        self._unplaced: str | None = None
        self._watching: asyncio.Task[None] | None = None
        self.name = ""

    @property
    def size(self) -> int:
        """The number of allocations that the job requests."""
        return self._count

    async def register(self, name: str) -> None:
        """Register the job under `name`, or under a name unique to this run if another live run has a job of that name.

        Raises `SandboxError` with the reason if Nomad cannot place the job, and `ConfigError` as `_free_name` does.
        """
        self.name = await self._free_name(name)
        job = self._specification()
        plan = await self._api.post(f"/v1/job/{self.name}/plan", {"Job": job, "Diff": False})
        failed = (plan.get("FailedTGAllocs") or {}).get(GROUP)
        if failed is not None:
            raise SandboxError(f"Nomad cannot place the job {self.name}: {placement_problem(failed)}")
        request = {"Job": job, "EnforceIndex": True, "JobModifyIndex": int(plan.get("JobModifyIndex") or 0)}
        await self._api.post("/v1/jobs", request)
        self._watching = asyncio.create_task(self._watch())

    def _specification(self) -> JSON:
        meta = {OWNER: self._owner, "palaestra_host": socket.gethostname(), "palaestra_pid": str(os.getpid())}
        return job_specification(self._config, self.name, self._image, meta, self._token)

    async def _free_name(self, name: str) -> str:
        """Return `name` if no live run uses it, otherwise a name for this run alone. A job called `name` whose run is
        gone is removed.

        Raises `ConfigError` if a live run uses `name` and `purge_job_on_start` is set, or if this library did not make
        the job and `purge_job_on_start` is not set.
        """
        job = await self._api.find(f"/v1/job/{name}")
        if job is None or job.get("Stop") or job.get("Status") == "dead":
            return name
        if not (job.get("Meta") or {}).get(OWNER):
            if not self._config.purge_job_on_start:
                raise ConfigError(
                    f"Nomad has a job {name} that this library did not make: set sandbox_job_id to another name, or "
                    "set purge_job_on_start to remove the job"
                )
        elif await is_attended(self._api, job, self._config.unattended_s):
            if self._config.purge_job_on_start:
                meta = job["Meta"]
                where = f"{meta.get('palaestra_host')} (process {meta.get('palaestra_pid')})"
                raise ConfigError(f"the job {name} belongs to a live run on {where}: set another sandbox_job_id")
            return f"{name}-{self._owner[:8]}"
        await remove(self._api, name)
        return name

    async def aclose(self, *, purge: bool) -> None:
        """Stop the job with every allocation. If `purge` is true, also remove the job from Nomad's list. A failure is
        only logged. Idempotent."""
        if self._watching is None:
            return
        watching, self._watching = self._watching, None
        await end_tasks(watching)
        try:
            await self._api.delete(f"/v1/job/{self.name}", purge=str(purge).lower())
        except SandboxError as error:
            _log.warning("the Nomad job %s could not be stopped; the next run will remove it: %s", self.name, error)

    async def take(self) -> Allocation:
        """Return a free allocation whose server answers, starting one if necessary. Raises `SandboxError` if none can
        start, or if none answers in time."""
        self._waiting += 1
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    await self._scale_up()
                    allocation = await self._next_allocation()
                    if await self._answers(allocation):
                        return allocation
        except TimeoutError:
            raise SandboxError(
                f"no allocation of the Nomad job {self.name} answered within {_START_S:g} s; see `nomad job status "
                f"{self.name}`"
            ) from None
        finally:
            self._waiting -= 1

    def give_back(self, allocation: Allocation, idle_since: float | None) -> None:
        """Free an allocation that has had no slot since the monotonic time `idle_since`; None means now."""
        allocation.taken = False
        allocation.free_since = time.monotonic() if idle_since is None else idle_since

    async def connect(
        self, allocation: Allocation, rung: str, settings: JSON, on_lost: JSON, silence_s: float
    ) -> PortClient:
        """Start a new slot server in the allocation, and return a client connected to it."""
        assert allocation.address is not None
        return await PortClient.connect(allocation.address, self._token, rung, settings, on_lost, silence_s=silence_s)

    async def _next_allocation(self) -> Allocation:
        """Wait for an allocation that runs, and take it. Raises `SandboxError` if every free allocation has failed, or
        if there is none and Nomad cannot place more."""
        async with self._changed:
            while True:
                free = [each for each in self._allocations.values() if not each.taken and not each.leaving]
                running = [each for each in free if each.is_running and each.problem is None]
                if running:
                    found = min(running, key=lambda each: each.number)
                    found.taken = True
                    return found
                broken = next((each for each in free if each.problem is not None), None)
                if broken is not None and all(each.problem is not None for each in free):
                    raise SandboxError(await self._explain(broken))
                if self._unplaced is not None and not free:
                    raise SandboxError(f"Nomad cannot place more allocations of the job {self.name}: {self._unplaced}")
                await self._changed.wait()

    async def _explain(self, allocation: Allocation) -> str:
        log = await log_tail(self._api, allocation.allocation_id, TASK)
        tail = f"; its log ends with: {log[-500:]}" if log else ""
        what = self._config.sandbox_image if self._image is None else self._image
        image = f" (image {what})" if self._config.driver == "docker" else ""
        return f"the task of the Nomad job {self.name}{image} does not run: {allocation.problem}{tail}"

    async def _answers(self, allocation: Allocation) -> bool:
        """Send the server its files if it lacks them. Return False, after a short pause, if the server does not answer
        yet."""
        try:
            if allocation.address is None:
                allocation.address = await address_of(self._api, allocation.allocation_id)
            await deliver(allocation.address, self._token)
        except (OSError, SandboxError) as error:
            _log.info("allocation %s does not answer yet: %s", allocation.allocation_id, error)
            allocation.taken = False
            await asyncio.sleep(0.2)
            return False
        except BaseException:
            allocation.taken = False
            raise
        allocation.restarts = int(allocation.state.get("Restarts") or 0)
        return True

    async def _scale_up(self) -> None:
        async with self._scaling:
            taken = sum(each.taken for each in self._allocations.values())
            wanted = min(self._config.max_containers, taken + self._waiting)
            if wanted > self._count:
                await self._scale(wanted)

    async def _scale(self, count: int) -> None:
        before = self._count
        request = {"Count": count, "Target": {"Group": GROUP}, "Message": f"{self._waiting} places are wanted"}
        answer = await self._api.post(f"/v1/job/{self.name}/scale", request)
        self._count, self._unplaced = count, None
        if count > before and answer.get("EvalID"):
            self._unplaced = await self._failed_placement(answer["EvalID"])
            if self._unplaced is not None:
                await self._api.post(f"/v1/job/{self.name}/scale", {**request, "Count": before})
                self._count = before

    async def _failed_placement(self, evaluation: str) -> str | None:
        """Return the reason why an evaluation placed too few allocations; None if it placed them all."""
        found, index = await self._api.get(f"/v1/evaluation/{evaluation}"), 1
        for _ in range(10):
            if found["Status"] not in ("pending", "blocked") or found.get("FailedTGAllocs"):
                break
            found, index = await self._api.wait(f"/v1/evaluation/{evaluation}", index, 2.0)
        failed = (found.get("FailedTGAllocs") or {}).get(GROUP)
        return None if failed is None else placement_problem(failed)

    async def _shrink(self) -> None:
        """Scale the job down, but not below `min_containers`. Nomad stops the allocation with the highest number first,
        so that allocation must have been free for `scale_cooldown_s` seconds. While a caller waits for an allocation,
        the job is not scaled down."""
        async with self._scaling:
            numbered = {each.number: each for each in self._allocations.values()}
            count, now = self._count, time.monotonic()
            while count > max(1, self._config.min_containers) and not self._waiting:
                last = numbered.get(count - 1)
                if last is None or last.taken or now - last.free_since < self._config.scale_cooldown_s:
                    break
                last.leaving = True
                count -= 1
            if count < self._count:
                await self._scale(count)

    async def _watch(self) -> None:
        """Update the allocations from Nomad's reports, and scale the job down when allocations are idle."""
        index = 0
        wait_s = max(0.1, min(self._config.health_check_interval_s, self._config.scale_cooldown_s))
        while True:
            try:
                found, latest = await self._api.wait(f"/v1/job/{self.name}/allocations", index, wait_s)
                index = latest if latest >= index else 0  # a restored cluster begins again at a lower index
                self._update_allocations(found)
                await self._tidy()
                await self._shrink()
            except SandboxError as error:
                _log.warning("the allocations of the Nomad job %s could not be listed: %s", self.name, error)
                await asyncio.sleep(1.0)
            async with self._changed:
                self._changed.notify_all()

    def _update_allocations(self, stubs: JSON) -> None:
        wanted = [each for each in stubs if each.get("DesiredStatus") == "run" and each["TaskGroup"] == GROUP]
        ended = ("complete", "failed", "lost", "unknown")
        present = {each["ID"]: each for each in wanted if each.get("ClientStatus") not in ended or _failed(each)}
        for gone in self._allocations.keys() - present.keys():
            del self._allocations[gone]
        for allocation_id, stub in present.items():
            allocation = self._allocations.get(allocation_id)
            if allocation is None:
                allocation = Allocation(allocation_id, _allocation_number(stub["Name"]), free_since=time.monotonic())
                self._allocations[allocation_id] = allocation
            allocation.state = (stub.get("TaskStates") or {}).get(TASK) or {}


def _failed(stub: Mapping[str, JSON]) -> bool:
    """Return whether an allocation has failed and has no successor. Such an allocation is kept to report why it
    failed."""
    return stub.get("ClientStatus") == "failed" and not stub.get("NextAllocation")


def _allocation_number(name: str) -> int:
    """Return the number in the name of an allocation, `job.group[number]`."""
    found = re.search(r"\[(\d+)\]$", name)
    return int(found[1]) if found else 0


async def address_of(api: NomadAPI, allocation_id: str) -> tuple[str, int]:
    """Return the address and port of an allocation's server. Raises `SandboxError` if Nomad has assigned none."""
    found = await api.get(f"/v1/allocation/{allocation_id}")
    shared = (found.get("AllocatedResources") or {}).get("Shared") or {}
    for port in shared.get("Ports") or ():
        if port.get("Label") == PORT:
            return str(port["HostIP"]), int(port["Value"])
    raise SandboxError(f"Nomad did not assign the port {PORT!r} to allocation {allocation_id}")


async def is_attended(api: NomadAPI, job: Mapping[str, JSON], unattended_s: float) -> bool:
    """Return whether the run that owns a job is live: the job has an open stream, had one in the last `unattended_s`
    seconds, or is still starting.

    A job whose server cannot be reached from here counts as attended.
    """
    age_s = time.time() - int(job.get("SubmitTime") or 0) / _SECOND
    if age_s < unattended_s:
        return True
    task = job["TaskGroups"][0]["Tasks"][0]
    token = (task.get("Env") or {}).get("PALAESTRA_TOKEN", "")
    for stub in await api.get(f"/v1/job/{job['ID']}/allocations"):
        if stub.get("ClientStatus") == "pending" and age_s < _START_S:
            return True
        if stub.get("ClientStatus") != "running":
            continue
        try:
            status, health = await ask(await address_of(api, stub["ID"]), token, "GET", "/health")
        except OSError:
            return True
        if status == 200 and (health["streams"] or health["unattended_s"] < unattended_s):
            return True
    return False


async def remove(api: NomadAPI, name: str) -> None:
    """Stop a job and remove it from Nomad."""
    await api.delete(f"/v1/job/{name}", purge="true")
    _log.warning("removed the Nomad job %s, which belongs to no live run", name)


class NomadPlace(Place):
    """The slot server of one allocation."""

    def __init__(
        self, backend: NomadBackend, spec: PlaceSpec, number: int, *, rung: Rung | None, require: Rung | None
    ) -> None:
        super().__init__(backend, spec, number, rung=rung, require=require)
        self._nomad = backend
        self._held: tuple[NomadJob, Allocation] | None = None
        self._holding = asyncio.Lock()
        self.idle_since: float | None = None

    @property
    def number(self) -> int:
        """The number of the place's allocation; 0 if it has none."""
        return 0 if self._held is None else self._held[1].number

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        self.idle_since = None
        return await super().create(spec, trajectory_id, snapshot)

    async def start(self) -> None:
        """Take an allocation before any isolation level is tried, so that a missing allocation is not blamed on the
        level."""
        async with self._holding:
            if self._server is None:
                await self._hold()
        await super().start()

    async def _hold(self) -> tuple[NomadJob, Allocation]:
        if self._held is None:
            job = await self._nomad.job(self.spec.image)
            self._held = job, await job.take()
        return self._held

    async def _start_server(self, rung: Rung) -> None:
        if self._server is not None:  # the server has ended, perhaps with its allocation
            self._give_back()
        job, allocation = await self._hold()
        settings = {"prefix": "", "first_epoch": self._last_epoch + 1}
        self._server = await job.connect(allocation, rung.label, settings, self._on_lost, self._backend.silence_s)

    async def aclose(self) -> None:
        await super().aclose()
        self._give_back()

    def _give_back(self) -> None:
        if self._held is not None:
            job, allocation = self._held
            self._held = None
            job.give_back(allocation, self.idle_since)


class NomadBackend(RemoteBackend):
    """Slots in Nomad jobs, with one job for each image."""

    name = "nomad"

    def __init__(
        self, config: NomadBackendConfig | None = None, *, rung: Rung | None = None, require: Rung | None = None
    ) -> None:
        self.config = config or NomadBackendConfig()
        if self.config.min_containers == 0:
            _log.warning("min_containers 0: Nomad ends a job without containers, so one container stays")
        self.purge = self.config.purge_job_on_shutdown
        """Whether closing this backend also removes its jobs from Nomad's list."""
        image = self.config.sandbox_image if self.config.driver == "docker" else None
        super().__init__(
            image=image,
            places=self.config.max_containers,
            slots_per_place=self.config.slots_per_container,
            rung=rung,
            require=require,
        )
        self.image_kinds = () if image is None else ("name",)
        self.owner = secrets.token_hex(16)
        self._api = NomadAPI(self.config.nomad_address, self.config.access, throttled=self.gate.throttled)
        self._jobs: dict[str | None, asyncio.Task[NomadJob]] = {}

    @classmethod
    def from_config(cls, config: JSON) -> NomadBackend:
        """Return the backend for the settings of a run."""
        rung, require = levels(config.isolation, config.require_sandbox)
        return cls(NomadBackendConfig.from_agent_env_config(config), rung=rung, require=require)

    @classmethod
    def of_pool(cls, config: SlotPoolConfig) -> NomadBackend:
        """Return the backend for the settings of a pool."""
        settings = NomadBackendConfig(
            nomad_address=config.nomad_address,
            sandbox_job_id=config.job_id,
            sandbox_image=config.image,
            slots_per_container=config.slots_per_container,
            min_containers=config.min_containers,
            max_containers=config.max_containers,
            privileged=config.privileged,
            acquire_timeout_s=config.acquire_timeout,
            purge_job_on_start=config.purge_job_on_start,
            purge_job_on_shutdown=False,
            driver=config.driver,
            datacenter=config.datacenter,
            cpu=config.cpu,
            memory=config.memory,
            scale_cooldown_s=config.scale_cooldown,
            health_check_interval_s=config.health_check_interval,
        )
        return cls(settings)

    @property
    def credentials(self) -> str:
        return "no token" if self.config.access.token is None else "a token"

    async def check(self, host: str) -> None:
        await self._api.check()
        await self._sweep()

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        if self.config.driver != "docker" and spec.image is not None:
            raise ConfigError(f"Nomad's raw_exec driver cannot use images, but the task needs {spec.image}; use docker")
        if spec.image is not None and is_path(spec.image):
            raise ConfigError(f"the nomad backend needs an image by name, but {spec.image} is a path")
        if spec.mounts:
            raise ConfigError(f"the nomad backend cannot mount {spec.mounts[0].source}, which is on this machine")
        return PlaceSpec(image=spec.image or self._image)

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        return NomadPlace(self, spec, number, rung=rung, require=self._required)

    async def job(self, image: str | None) -> NomadJob:
        """Return the job whose servers have the image, registering the job first if necessary."""
        task = self._jobs.get(image)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._jobs[image] = asyncio.create_task(self._register(image))
        return await asyncio.shield(task)

    async def _register(self, image: str | None) -> NomadJob:
        job = NomadJob(self._api, self.config, image, self.owner, self._tidy)
        name = self.config.sandbox_job_id
        if image != self._image:
            name = f"{name}-{hashlib.sha256(str(image).encode()).hexdigest()[:8]}"
        try:
            await job.register(name)
        except NomadRefused as refused:
            if "Enforcing job modify index" not in str(refused):
                raise
            await job.register(f"{name}-{self.owner[:8]}")  # another run has just registered the name
        return job

    async def _sweep(self) -> None:
        """Remove the jobs of runs that are gone and had the same `sandbox_job_id`, including their jobs for other
        images."""
        own = self.config.sandbox_job_id
        for stub in await self._api.get("/v1/jobs", prefix=own):
            if stub.get("Status") == "dead" or not re.fullmatch(rf"{re.escape(own)}(-[0-9a-f]{{8}})*", stub["ID"]):
                continue
            job = await self._api.find(f"/v1/job/{stub['ID']}")
            if job is None or not (job.get("Meta") or {}).get(OWNER):
                continue
            if not await is_attended(self._api, job, self.config.unattended_s):
                await remove(self._api, stub["ID"])

    def _is_spare(self, place: Place) -> bool:
        """Return whether an idle place should end, because its server has ended or it has been idle for
        `scale_cooldown_s` seconds. Nomad stops the allocations with the highest numbers first, so a place with a
        running server should end only if its allocation's number is at least `min_containers`."""
        assert isinstance(place, NomadPlace)
        if not place.is_up:
            return True
        now = time.monotonic()
        place.idle_since = now if place.idle_since is None else place.idle_since
        return place.number >= max(1, self.config.min_containers) and (
            now - place.idle_since >= self.config.scale_cooldown_s
        )

    async def aclose(self) -> None:
        """End every place, and stop this run's jobs. Idempotent."""
        await super().aclose()
        jobs, self._jobs = self._jobs, {}
        for task in jobs.values():
            if not task.done():
                task.cancel()
        for job in await asyncio.gather(*jobs.values(), return_exceptions=True):
            if isinstance(job, NomadJob):
                await job.aclose(purge=self.purge)
        await self._api.aclose()
