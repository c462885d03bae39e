"""Start the services of a rollout next to the agent's slot, and read what they leave.

Each service has a slot of its own over its own root file system; the slots of a rollout are one group of one lease, in
a network of their own, and end with the agent's slot. The names of the services are in `/etc/hosts` of each slot. The
files of a service are prepared once per task and run, and every rollout starts its services from them.

A service that cannot be started is the task's or the sandbox's failure, and such a rollout has no score. One that ends
later is not: the agent may have ended it.
"""

from __future__ import annotations

import asyncio
import itertools
import posixpath
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.rollouts.rollout import Rollout
from palaestra_slots.core.errors import InfraError, PrepareError, SandboxError, SlotEnded
from palaestra_slots.core.io.temporary_folder import TemporaryFolder
from palaestra_slots.core.types import JSON, AllowList, Limits, Network
from palaestra_slots.images.as_user import acting_as, as_user
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.slot_build import build_in_slot, limits_of_build
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_files import Unsupported
from palaestra_slots.images.task_root import TaskRoot
from palaestra_slots.sandbox.slot import GroupAddress, Process, Slot, SlotSource, SlotSpec, Snapshot
from palaestra_slots.sandbox.transfer import upload_dir
from palaestra_suites.terminal_bench.separate_verifier import Collected, copy_artifacts, join_artifacts, run_hooks
from palaestra_suites.terminal_bench.service import MAIN, Condition, HealthCheck, Restart, Service, in_order
from palaestra_suites.terminal_bench.terminal_task import Artifact, CollectHook

LOG_BYTES = 8 << 10
"""The last bytes of a service's output that the record of a rollout keeps."""

_FIRST_NUMBER = 2
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
_IDLE = (("sleep", "infinity"), ("tail", "-f", "/dev/null"))
_WAITS = ("sh", "-c", "sleep infinity")
_RESTART = """\
policy=$1 most=$2 count=0; shift 2
while :; do
  "$@"; code=$?
  if [ "$policy" = on-failure ] && [ "$code" = 0 ]; then exit 0; fi
  count=$((count + 1))
  if [ -n "$most" ] && [ "$count" -gt "$most" ]; then exit "$code"; fi
  echo "restart $count after exit code $code" >&2
  sleep 1
done
"""


@dataclass(frozen=True, slots=True)
class ResolvedService:
    """A service with its root file system."""

    service: Service
    root: TaskRoot

    @property
    def workdir(self) -> str:
        """The directory of its commands."""
        return self.service.workdir or self.root.config.workdir

    @property
    def user(self) -> str:
        """The user of its commands."""
        return self.root.config.user if self.service.user is None else self.service.user

    @property
    def env(self) -> dict[str, str]:
        """The variables of its commands."""
        return {**self.root.config.env, **self.service.env}

    @property
    def argv(self) -> tuple[str, ...]:
        """The program that it runs; empty for none, as in a `main` that only waits. As in Harbor's compose files, the
        command of `main` waits if nothing else is set, and its image's ENTRYPOINT gets this command."""
        service, config = self.service, self.root.config
        own = service.name != MAIN
        entrypoint = config.entrypoint if service.entrypoint is None else service.entrypoint
        command = service.command
        if command is None:
            command = _WAITS if not own else config.command if service.entrypoint is None else ()
        argv = (*entrypoint, *command)
        plain = (
            tuple(shlex.split(argv[2])) if argv[:2] in (("sh", "-c"), ("/bin/sh", "-c")) and len(argv) == 3 else argv
        )
        return () if not own and plain in _IDLE else argv


def started_by_image(recipe: ImageRecipe, root: TaskRoot, limits: Limits) -> list[Service]:
    """Return the service `main` of a task without a compose file, if its image has an ENTRYPOINT, otherwise none."""
    return [Service(MAIN, recipe, names=(MAIN,), limits=limits)] if root.config.entrypoint else []


class ServicePlan:
    """The services of one task in the order of their start, `main` among them, and where each one is in the network."""

    def __init__(self, services: Mapping[str, ResolvedService]) -> None:
        self.services = services
        self.order = [each.name for each in in_order({name: each.service for name, each in services.items()})]
        numbers = itertools.count(_FIRST_NUMBER)
        self.numbers = {MAIN: next(numbers), **{name: next(numbers) for name in sorted(services) if name != MAIN}}
        for name, each in services.items():
            if name != MAIN and not each.argv:
                raise Unsupported(f"the service {name} has no `command`, and its image is not known to have one")

    @property
    def starts(self) -> bool:
        """Whether something starts, or is waited for, before the agent."""
        main = self.services[MAIN]
        return self.is_group or bool(main.argv) or main.service.health is not None

    @property
    def is_group(self) -> bool:
        """Whether there are services besides `main`."""
        return len(self.services) > 1

    def hosts(self, name: str) -> str:
        """Return the lines of `/etc/hosts` that a service needs."""
        lines = [f"{address} {host}" for host, address in self.services[name].service.hosts]
        for other, each in self.services.items() if self.is_group else ():
            lines.append(
                f"{GroupAddress('', self.numbers[other], len(self.services)).address} {' '.join(each.service.names)}"
            )
        return "".join(f"{line}\n" for line in lines)

    def joined(self, spec: SlotSpec) -> SlotSpec:
        """Return the settings of a slot that reaches the other services: requests to them pass no proxy."""
        if not isinstance(spec.network, AllowList):
            return spec
        names = sorted(each for other in self.services.values() for each in other.service.names)
        local = ",".join(["localhost", "127.0.0.1", "::1", "198.19.0.0/24", *names])
        return replace(spec, env=tuple(sorted({**dict(spec.env), "no_proxy": local, "NO_PROXY": local}.items())))

    def leading(self, spec: SlotSpec, spare: int = 0) -> SlotSpec:
        """Return the settings of the agent's slot, which leads the group if there is one. The group has `spare` more
        places than services."""
        if not self.is_group:
            return spec
        return replace(self.joined(spec), group=GroupAddress("", self.numbers[MAIN], len(self.services) + spare))


async def set_up_service(slot: Slot, plan: ServicePlan, name: str) -> None:
    """Put the files that the compose file mounts, the directories, and the names of the other services into a slot.
    Raises `PrepareError`."""
    each = plan.services[name]
    folders = [*each.service.folders, each.workdir]
    await check_execute(slot, ["mkdir", "-p", *folders], f"the directories of the service {name} cannot be made")
    for source, target in sorted(each.service.copies, key=lambda copy: len(copy[1])):
        try:
            await slot.remove(target.rstrip("/"))  # a mount hides what the image has there
            if source.is_dir():
                await upload_dir(slot, source, target)
            else:
                await slot.make_dir(posixpath.dirname(target.rstrip("/")) or "/")
                await slot.upload(source, target)
        except InfraError:
            raise
        except OSError as error:
            raise PrepareError(f"{source.name} cannot be copied into the service {name}: {error}") from error
    if not plan.hosts(name):
        return
    known = await slot.read_text("/etc/hosts", missing="127.0.0.1 localhost\n")
    await slot.write_text("/etc/hosts", f"{known.rstrip()}\n{plan.hosts(name)}", mode=0o644)


class ServicesEnded(SandboxError):
    """Recorded work of several services is to be graded again, but only the files of the agent's slot were kept."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was collected from the services when the agent had ended: their artifacts, the problems of their hooks, and
    their exit codes and logs."""

    collected: Collected
    problems: Sequence[str]
    report: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class GroupLead:
    """The slot that leads a group of services. `name` begins the names of the others' slots, which `pool` leases;
    `slot` returns the lead. `start_s` limits the time to wait for a service. `closers` are called when the lead has
    ended."""

    name: str
    pool: SlotSource
    slot: Callable[[], Awaitable[Slot]]
    start_s: float
    closers: list[Callable[[], Awaitable[None]]]

    @classmethod
    def of_rollout(cls, rollout: Rollout) -> GroupLead:
        """Return the agent's slot of a rollout."""
        start_s, closers = rollout.task.data.task.recipe.build_timeout_s, rollout.workspace.closers
        return cls(rollout.rollout_id, rollout.run_context.workspaces.pool, rollout.sandbox, start_s, closers)


class ServiceGroup:
    """The running services of one agent's slot. `slots` and `processes` are by name; a service that only waits has no
    process."""

    def __init__(self, plan: ServicePlan, lead: GroupLead) -> None:
        self.plan = plan
        self.slots: dict[str, Slot] = {}
        self.processes: dict[str, Process] = {}
        self._lead = lead
        self._met: set[tuple[str, Condition]] = set()
        self._evidence: dict[str, Evidence] = {}

    async def start(self, spec: SlotSpec, prepared: Callable[[str], Awaitable[Snapshot]]) -> None:
        """Start all services, each when those for which it waits are ready, and wait until all are. `spec` has the
        settings of a service's slot besides those of the service; `prepared` returns the prepared files of a service.
        Raises `PrepareError` for a service that does not start."""
        snapshots = {name: await prepared(name) for name in self.plan.order if name != MAIN}  # while no slot is held
        self.slots[MAIN] = main = await self._lead.slot()

        async def make(name: str) -> None:
            own = self.plan.joined(service_spec(spec, self.plan.services[name]))
            label, number = f"{self._lead.name}:{name}", self.plan.numbers[name]
            self.slots[name] = await self._lead.pool.add(main, number, own, label, snapshots[name])

        for problem in await asyncio.gather(*map(make, snapshots), return_exceptions=True):
            if problem is not None:
                raise problem
        for name in self.plan.order:
            for other, condition in self.plan.services[name].service.after.items():
                await self._wait_for_condition(other, condition)
            await self._start_service(name)
        waited = {name for each in self.plan.services.values() for name in each.service.after}
        for name, each in self.plan.services.items():
            if each.service.health is not None:
                await self._wait_for_condition(name, Condition.HEALTHY)
            elif name in self.processes and name not in waited:
                await self._check_runs(name)

    async def _start_service(self, name: str) -> None:
        each, slot = self.plan.services[name], self.slots[name]
        if not each.argv:
            return
        argv = as_user(each.argv, each.user)
        if each.service.restart is not Restart.NEVER:
            most = "" if each.service.restarts is None else str(each.service.restarts)
            argv = ["/bin/sh", "-c", _RESTART, "restart", each.service.restart, most, *argv]
        try:
            self.processes[name] = await slot.spawn(argv, cwd=each.workdir, stdin=False)
        except InfraError:
            raise
        except OSError as error:
            raise PrepareError(f"the service {name} cannot be started: {error}") from error

    async def _wait_for_condition(self, name: str, condition: Condition) -> None:
        """Wait until a condition of a service is met. Raises `PrepareError` if it cannot be met any more."""
        if (name, condition) in self._met:
            return
        process = self.processes.get(name)
        if condition is Condition.HEALTHY:
            await self._wait_healthy(name)
        elif condition is Condition.COMPLETED and process is not None:
            status = await process.wait(self._lead.start_s)
            if status.running or status.exit_code:
                end = "has not ended" if status.running else f"ended with exit code {status.exit_code}"
                raise PrepareError(f"the service {name} {end}, but others wait for its end:\n{await self._log(name)}")
        self._met.add((name, condition))

    async def _wait_healthy(self, name: str) -> None:
        each = self.plan.services[name]
        check = each.service.health
        assert check is not None
        longest_s = min(check.longest_s, self._lead.start_s)

        async def runs() -> None:
            if name in self.processes:
                await self._check_runs(name)

        argv = as_user(check.command, each.user)
        said = await wait_healthy(self.slots[name], replace(check, command=tuple(argv)), each.workdir, longest_s, runs)
        if said is not None:
            log = await self._log(name)
            raise PrepareError(f"the service {name} is not healthy after {longest_s:g} s: {said}\n{log}")

    async def _check_runs(self, name: str) -> None:
        """Raise `PrepareError` if the program of a service has ended."""
        status = await self.processes[name].status()
        if not status.running:
            log = await self._log(name)
            raise PrepareError(f"the service {name} ended with exit code {status.exit_code} at its start:\n{log}")

    async def _log(self, name: str) -> str:
        process = self.processes.get(name)
        if process is None:
            return ""
        return (await process.read(-LOG_BYTES, max_bytes=LOG_BYTES)).data.decode("utf-8", "replace").strip()

    async def _place_of(self, hook: CollectHook) -> tuple[Slot, str]:
        """Return the slot of a hook, with the rights of its user, and its working directory."""
        each = self.plan.services[hook.service]
        return await acting_as(self.slots[hook.service], hook.user or each.user), each.workdir

    async def collect(self, step: str, hooks: Sequence[CollectHook], artifacts: Sequence[Artifact]) -> Evidence:
        """Run the hooks of the services and copy their artifacts, while the agent's processes are stopped. Later calls
        for the same step return the result of the first one, because the services may have ended or changed."""
        if step not in self._evidence:
            folder = await asyncio.to_thread(TemporaryFolder, "artifacts")

            async def clean() -> None:
                await asyncio.to_thread(folder.cleanup)

            self._lead.closers.append(clean)
            with suppress(SlotEnded):
                await self.slots[MAIN].freeze()
            self._evidence[step] = await self._collected(hooks, artifacts, folder.path)
        return self._evidence[step]

    async def _collected(self, hooks: Sequence[CollectHook], artifacts: Sequence[Artifact], folder: Path) -> Evidence:
        problems: list[str] = []
        found = Collected((), ())
        for name in self.plan.order:
            if name == MAIN:
                continue
            place = folder / name
            place.mkdir()
            try:
                problems += await run_hooks([each for each in hooks if each.service == name], self._place_of)
                own = await copy_artifacts(
                    self.slots[name], [each for each in artifacts if each.service == name], place
                )
            except SlotEnded:  # which the agent may have brought about
                own = Collected((), [f"the service {name} has ended its own sandbox"])
            found = join_artifacts(found, own)
        return Evidence(found, problems, await self.report())

    async def report(self) -> dict[str, JSON]:
        """Return the exit code of each service, None while it runs, and the end of its output."""
        found: dict[str, JSON] = {}
        for name, process in self.processes.items():
            try:
                status = await process.status()
                found[name] = {"exit_code": status.exit_code, "log": await self._log(name)}
            except InfraError as error:  # its slot has ended
                found[name] = {"exit_code": None, "log": str(error)[:200]}
        return found


async def wait_healthy(
    slot: Slot, check: HealthCheck, workdir: str, longest_s: float, runs: Callable[[], Awaitable[None]] | None = None
) -> str | None:
    """Try a check until it succeeds, at most `longest_s` seconds. Return what it said last if it never did, else None.
    A check that cannot start, for example because its directory is gone, has not succeeded. `runs` is called after each
    failure and raises an exception if there is nothing more to wait for. Raises `SandboxError` if a check that timed
    out could be ended only with everything in its slot, as on a machine that is far too busy."""
    limit_s = min(check.timeout_s, longest_s)
    deadline, pause = time.monotonic() + longest_s, _POLL_S
    while True:
        try:
            done = await slot.execute(check.command, cwd=workdir, timeout_s=limit_s, spill=False)
        except InfraError:
            raise
        except OSError as error:
            said = str(error)
        else:
            if done.success:
                return None
            if done.metadata.get("swept"):
                raise SandboxError(
                    f"a check took more than {limit_s:g} s and ended with all programs of {slot.slot_id}"
                )
            said = done.output[-300:].strip() or done.error
        if runs is not None:
            await runs()
        if time.monotonic() > deadline:
            return said
        await asyncio.sleep(pause)
        pause = min(2 * pause, check.interval_s, _LONGEST_POLL_S)


def service_spec(spec: SlotSpec, each: ResolvedService) -> SlotSpec:
    """Return the settings of a service's slot, from those that all services share."""
    network = spec.network if each.service.online else Network.OFF
    env = tuple(sorted(each.env.items()))
    return replace(spec, image=each.root.image, network=network, limits=each.service.limits, mounts=(), env=env)


async def prepared_files(rollout: Rollout, plan: ServicePlan, name: str, spec: SlotSpec) -> Snapshot:
    """Return the prepared files of a service, which the run prepares once per task. `spec` has the settings of a slot
    for preparation. Raises the errors of the build."""
    workspaces, each = rollout.run_context.workspaces, plan.services[name]
    spec = replace(service_spec(spec, each), limits=limits_of_build(each.service.limits))
    built: Snapshot | None = None
    if each.root.build_key is not None:

        async def build(slot: Slot) -> None:
            await build_in_slot(slot, each.service.recipe, each.root.base)

        built = await workspaces.shared(each.root.build_key, lambda: sealed_after(rollout, spec, None, build))

    async def fill(slot: Slot) -> None:
        await set_up_service(slot, plan, name)

    return await workspaces.shared(_service_key(rollout, name), lambda: sealed_after(rollout, spec, built, fill))


async def drop_lost(rollout: Rollout, plan: ServicePlan) -> None:
    """After a sandbox failure, let the next rollout prepare the files of the services again that were lost."""
    for name, each in plan.services.items():
        for key in (each.root.build_key, _service_key(rollout, name)):
            if key is not None:
                await rollout.run_context.workspaces.drop_lost(key)


def _service_key(rollout: Rollout, name: str) -> str:
    return f"{rollout.task.id}:service:{name}"


async def sealed_after(
    rollout: Rollout, spec: SlotSpec, snapshot: Snapshot | None, do: Callable[[Slot], Awaitable[object]]
) -> Snapshot:
    """Lease a slot, call `do`, and return the sealed slot. Raises the errors of `do`, and then releases the slot."""
    pool = rollout.run_context.workspaces.pool
    slot = await rollout.workspace.lease_slot(f"{rollout.rollout_id}:build", spec, snapshot)
    try:
        await do(slot)
    except BaseException:
        await asyncio.shield(pool.release(slot))
        raise
    return await pool.seal(slot)
