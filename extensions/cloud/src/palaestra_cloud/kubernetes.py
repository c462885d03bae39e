"""Runs slots in pods of a Kubernetes cluster, which it reaches with the user's kubectl.

Each pod runs one slot server for as long as a `kubectl exec` lasts. With `image`, the backend makes pods of this image
and deletes them; tasks may have images of their own. With a selector, it uses pods that exist, such as those of a
Deployment, and never deletes one; an image of a task is then refused.

What isolates what: an ordinary pod has the rights of root in a container (`kubernetes_pod.py` has its spec), and its
slots are isolated from each other at `confined`. If `userns` is requested, pods are made with a user namespace of their
own (`hostUsers: false`), an unmasked /proc and the right to mount in it; a cluster that drops one of these fields is
refused. `full` needs the root of the node, which no pod of this backend has. A pod has no token of the cluster. Slots
with a network reach what the pod reaches, which the cluster's NetworkPolicy decides, if it has one; other slots have no
network. The container runtime of the cluster isolates the pod from its node.

A pod that ends, is evicted or whose node fails is a lost place, whose rollouts start again elsewhere. Pods end with
this process: they are deleted when the backend closes. If this process is killed, a pod ends by itself five minutes
after its stream has ended, and the next run on this machine deletes it. A deadline ends every pod.

Tested with kubectl 1.20 to 1.33 against a stand-in of the API server (tests/stand_ins), which runs pods as processes in
namespaces; not on a real cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence

from palaestra_cloud.kubectl import Kubectl, KubernetesRefused, environment
from palaestra_cloud.kubernetes_pod import (
    CONTAINER,
    LABEL,
    NO_ROOM,
    RUN,
    ExistingPods,
    PodOptions,
    end_reason,
    is_ready,
    manifest,
    needs_user_namespace,
    never_starts,
    pending_reason,
    weakened,
)
from palaestra_slots.core.errors import ConfigError, SandboxError, SlotLost
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.owner import is_alive, process_name, this_host
from palaestra_slots.sandbox.backends.remote import Place, PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.images.reference import is_image_name
from palaestra_slots.sandbox.remote.remote_client import RemoteClient, program
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Rung, SlotSpec

_DELETIONS = 8
"""The number of pods that are deleted concurrently; each deletion is a process of kubectl."""
_NOTICE_S = 3.0
"""Seconds in which the cluster notices that a container has ended."""
_NO_PYTHON = re.compile(r"executable file .*not found|no such file or directory", re.IGNORECASE)

_RECEIVE = """
import os, sys
size, source = int(sys.argv.pop(1)), b""
while len(source) < size:
    piece = os.read(0, size - len(source))
    if not piece:
        sys.exit("the stream ended before the slot server had arrived")
    source += piece
exec(compile(source, "launch", "exec"))
"""
"""Runs the program that arrives on standard input. The words of an exec are part of a URL, and proxies limit its
length, so the program is not one of them."""

_log = logging.getLogger(__name__)


class PodClient(RemoteClient):
    """A client whose server runs in a pod."""

    @property
    def variables(self) -> Mapping[str, str]:
        return environment()

    async def _deliver(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        with contextlib.suppress(OSError):  # the command has ended; reading will find its end and its log
            await self.loop.sock_sendall(stream, program().encode())
        await super()._deliver(stream)


class OwnPod:
    """A pod that the backend makes and deletes."""

    def __init__(self, kubectl: Kubectl, pod: JSON, start_s: float) -> None:
        self.name: str = pod["metadata"]["name"]
        self._kubectl, self._pod, self._start_s = kubectl, pod, start_s
        self._exists = False

    async def start(self) -> None:
        """Make the pod, and wait until it is ready. If that fails, no pod is left. Raises `ConfigError` if the cluster
        does not accept such pods, and `SandboxError` with the reason if the pod does not start."""
        self._exists = True
        try:
            await self._create_pod()
            async with asyncio.timeout(self._start_s):
                await self._wait_until_ready()
        except TimeoutError:
            reason = await self._state()
            await self.delete()
            raise SandboxError(
                f"the pod {self.name} was not ready within {self._start_s:g} s (kubernetes_start_s): {reason}"
            ) from None
        except BaseException:
            await self.delete()
            raise

    async def _create_pod(self) -> None:
        try:
            stored = await self._kubectl.create(self._pod)
        except KubernetesRefused as error:
            if error.reason in ("Forbidden", "UnknownField", "Invalid") and "exceeded quota" not in str(error):
                raise ConfigError(f"cannot make pods: {error}") from None
            raise
        lacks = weakened(stored) if "hostUsers" in self._pod["spec"] else []
        if lacks:
            raise ConfigError(
                f"the cluster does not support user namespaces of pods: it has dropped {' and '.join(lacks)} from the "
                "pod. Request the isolation level confined, or use Kubernetes 1.33 or newer"
            )

    async def _wait_until_ready(self) -> None:
        """Wait until the pod is ready. Raises `SandboxError` when it cannot become ready."""
        waits_for = ""
        while True:
            async with contextlib.aclosing(self._kubectl.watch(self.name)) as events:
                async for kind, pod in events:
                    if is_ready(pod):
                        return
                    waits_for = self._progress(kind, pod, waits_for)
            await asyncio.sleep(1)  # the server ends a watch after some minutes

    def _progress(self, kind: str, pod: JSON, before: str) -> str:
        """Return what the pod waits for; `before` is what it waited for at the last event. Raises `SandboxError` if the
        pod has ended or never starts."""
        ended = "it was deleted" if kind == "DELETED" else end_reason(pod)
        if ended is not None:
            raise SandboxError(f"the pod {self.name} has ended instead of starting: {ended}")
        waits_for = pending_reason(pod)
        if never_starts(pod):
            cause = f" ({before})" if "ErrImagePull" in before else ""  # old clusters do not repeat it in the back-off
            image = self._pod["spec"]["containers"][0]["image"]
            raise SandboxError(f"the pod {self.name} with the image {image} cannot start: {waits_for}{cause}")
        if waits_for != before and NO_ROOM in waits_for:
            _log.warning("waiting at most %g s for the pod %s: %s", self._start_s, self.name, waits_for)
        return waits_for

    async def _state(self) -> str:
        try:
            pod = await self._kubectl.pod(self.name)
        except SandboxError as error:
            return str(error)
        return end_reason(pod) or pending_reason(pod)

    async def end_reason(self, patience_s: float = 0.0) -> str | None:
        """Return why the pod has ended; None if it has not ended after `patience_s` seconds, in which the cluster may
        notice it."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                reason = end_reason(await self._kubectl.pod(self.name))
            except KubernetesRefused as error:
                return "it was deleted" if error.reason == "NotFound" else str(error)
            if reason is not None or time.monotonic() >= deadline:
                return reason
            await asyncio.sleep(0.2)

    async def delete(self) -> None:
        """Delete the pod, even if the caller is cancelled. A failure is only logged. Idempotent."""
        if self._exists:
            self._exists = False
            await asyncio.shield(asyncio.create_task(self._delete()))

    async def _delete(self) -> None:
        try:
            await self._kubectl.delete(self.name)
        except (SandboxError, ConfigError) as error:
            _log.warning("the pod %s could not be deleted; it ends by itself: %s", self.name, error)


class PodPlace(Place):
    """A pod that exists, or one that the backend makes for this place."""

    def __init__(
        self, backend: KubernetesBackend, spec: PlaceSpec, number: int, *, rung: Rung | None, require: Rung | None
    ) -> None:
        super().__init__(backend, spec, number, rung=rung, require=require)
        self._cluster = backend
        self._pod: OwnPod | None = None
        self._proving = False
        """Whether a level is being proved; the pod then outlives a server."""

    async def start(self) -> None:
        self._proving = True
        try:
            if self._pod is None and not self._cluster.uses_existing:
                await self._make_pod()
            await super().start()
        except BaseException:
            await self._end_pod()
            raise
        finally:
            self._proving = False

    async def aclose(self) -> None:
        lost = self._server is not None and self._server.ended
        await super().aclose()
        if not self._proving:
            await self._end_pod(lost=lost)

    async def _make_pod(self) -> None:
        self._pod = self._cluster.new_pod(self.spec)
        await self._pod.start()

    async def _end_pod(self, *, lost: bool = False) -> None:
        """Delete the pod, if there is one. If it was `lost`, log the reason first."""
        pod, self._pod = self._pod, None
        if pod is not None:
            async with self._cluster.deleting:
                reason = await pod.end_reason() if lost else None
                if reason is not None:
                    _log.warning("the pod %s has ended: %s", pod.name, reason)
                await pod.delete()

    async def _start_server(self, rung: Rung) -> None:
        name = self.spec.host
        if not self._cluster.uses_existing:
            if not self._proving:  # the server has died, and perhaps its pod with it
                await self._end_pod(lost=True)
                await self._make_pod()
            assert self._pod is not None
            name = self._pod.name
        settings = {"prefix": "", "first_epoch": self._last_epoch + 1}
        try:
            self._server = await PodClient.start_by(
                lambda call: self._cluster.exec_in(name, call),
                rung.label,
                settings,
                self._on_lost,
                silence_s=self._cluster.silence_s,
                gone_s=self._cluster.gone_s,
            )
        except SlotLost as error:
            message, reason = self._cluster.explain(str(error))
            if reason == "Forbidden":
                raise ConfigError(f"cannot run a slot server in the pod {name}: {message}") from None
            ended = None if self._pod is None else await self._pod.end_reason(_NOTICE_S)
            if ended is not None:
                raise SlotLost(f"the pod {name} has ended: {ended}") from None
            if _NO_PYTHON.search(str(error)):
                raise ConfigError(
                    f"the pod {name} has no python3, but needs Python 3.11 or newer ({error}). Select other pods, or "
                    "set kubernetes_container"
                ) from None
            raise


class KubernetesBackend(RemoteBackend):
    """Slots in pods: in `existing` ones, or in at most `pods` new pods of `image` and of the images of tasks. Raises
    `ConfigError` if both `image` and `existing` are given."""

    name = "kubernetes"
    relist_s = 15.0
    """Seconds between two listings of existing pods while one of them has no slot server."""

    def __init__(
        self,
        kubectl: Kubectl,
        *,
        image: str | None = None,
        existing: ExistingPods | None = None,
        pods: int = 1,
        slots_per_pod: int = 10,
        options: PodOptions | None = None,
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        if image is not None and existing is not None:
            raise ConfigError("kubernetes_image makes pods and kubernetes_selector uses existing ones: set one of them")
        super().__init__(image=image, places=pods, slots_per_place=slots_per_pod, rung=rung, require=require)
        self.deleting = asyncio.Semaphore(_DELETIONS)
        self._kubectl, self._options = kubectl, options or PodOptions()
        self._existing = existing
        self.run, self._count, self._listed_at = secrets.token_hex(5), 0, 0.0

    @classmethod
    def from_config(cls, config: JSON) -> KubernetesBackend:
        """Return the backend for the settings of a run."""
        rung, require = levels(config.isolation, config.require_sandbox)
        selector = config.kubernetes_selector
        return cls(
            Kubectl(config.kubernetes_context, config.kubernetes_namespace),
            image=config.kubernetes_image,
            existing=None if selector is None else ExistingPods(selector, config.kubernetes_container),
            pods=config.kubernetes_pods,
            slots_per_pod=config.kubernetes_slots_per_pod,
            options=PodOptions(
                cpus=config.kubernetes_cpus,
                memory=config.kubernetes_memory,
                disk=config.kubernetes_disk,
                start_s=config.kubernetes_start_s,
                deadline_s=config.kubernetes_deadline_s,
                spec=config.kubernetes_pod_spec,
            ),
            rung=rung,
            require=require,
        )

    @property
    def uses_existing(self) -> bool:
        """Whether the slots are in pods that somebody else made."""
        return self._existing is not None

    @property
    def credentials(self) -> str:
        return "the current context" if self._kubectl.context is None else f"context {self._kubectl.context}"

    @property
    def level_fix(self) -> str:
        if self.uses_existing:
            return "give the pods the fields in docs/backends/kubernetes.md, or request a lower level (isolation)"
        if self._wanted is Rung.FULL:
            return "request userns (isolation), the best level in a pod, whose root is not the root of its node"
        if needs_user_namespace(self._wanted, self._required):
            return "use nodes whose kernel and container runtime support user namespaces, or request the level confined"
        return "request the level userns (isolation), for which pods with a user namespace are made"

    async def check_hosts(self) -> None:
        """Check that the cluster answers, list the pods that exist, and delete those of dead runs on this machine.
        Raises `ConfigError`."""
        try:
            await self._kubectl.find_namespace()
            if self._existing is not None:
                await self._list_pods(self._existing.selector)
            else:
                await self._delete_leftovers()
        except KubernetesRefused as error:
            raise ConfigError(str(error)) from None

    async def check(self, host: str) -> None:
        await self.check_hosts()

    async def _list_pods(self, selector: str) -> None:
        """List the ready pods that `selector` matches. Raises `ConfigError` if there is none."""
        self._listed_at = time.monotonic()
        found = await self._kubectl.list_pods(selector)
        ready = [pod["metadata"]["name"] for pod in found if is_ready(pod)]
        if not ready:
            states = "; ".join(
                f"{pod['metadata']['name']}: {end_reason(pod) or pending_reason(pod)}" for pod in found[:3]
            )
            raise ConfigError(
                f"no pod in the namespace {self._kubectl.namespace} that matches {selector} is ready "
                f"({states or 'none matches'}). Try it: kubectl get pods --namespace={self._kubectl.namespace} "
                f"--selector={selector}"
            )
        self.hosts.replace(ready)
        self._most = len(ready)

    async def _delete_leftovers(self) -> None:
        """Delete the pods whose owner was a process on this machine that no longer runs."""
        for pod in await self._kubectl.list_pods(f"{LABEL}={_machine()}"):
            machine, _, process = (pod["metadata"].get("annotations") or {}).get(LABEL, "").partition("/")
            if machine == this_host() and not is_alive(process) and "deletionTimestamp" not in pod["metadata"]:
                name = pod["metadata"]["name"]
                _log.warning("deleting the pod %s, because the process that owned it is gone", name)
                await self._kubectl.delete(name)

    async def _choose(self, spec: SlotSpec, without: Collection[str] = ()) -> Place:
        if self._existing is not None and self._started and time.monotonic() > self._listed_at + self.relist_s:
            up = {place.spec.host for place in self._places.by_number.values() if place.is_up}
            if not up.issuperset(self.hosts.names):  # a pod may have been replaced by another
                try:
                    await self._list_pods(self._existing.selector)
                except (ConfigError, SandboxError) as error:
                    _log.warning("the pods could not be listed again: %s", error)
        return await super()._choose(spec, without)

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        if spec.mounts:
            raise ConfigError(f"the backend kubernetes cannot mount {spec.mounts[0].source}, which is on this machine")
        if self.uses_existing:
            if spec.image is not None:
                raise ConfigError(
                    f"pods that exist cannot use other images, but the task needs {spec.image}: leave out "
                    "kubernetes_selector, so that pods of that image are made"
                )
            return PlaceSpec()
        image = spec.image or self._image
        if image is None:
            raise ConfigError(
                "kubernetes needs pods: set kubernetes_image or kubernetes_selector, or use tasks with an image"
            )
        if not is_image_name(image):
            raise ConfigError(f"a pod's image is a name such as python:3.13, not {image[:200]!r}")
        return PlaceSpec(image=image)

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        return PodPlace(self, spec, number, rung=rung, require=self._required)

    def new_pod(self, spec: PlaceSpec) -> OwnPod:
        """Return a new pod, which does not exist yet."""
        self._count += 1
        pod = manifest(
            f"palaestra-{self.run}-{self._count}",
            spec.image or "",
            self._options,
            labels={LABEL: _machine(), RUN: self.run},
            owner=f"{this_host()}/{process_name(os.getpid())}",
            user_ns=needs_user_namespace(self._wanted, self._required),
        )
        return OwnPod(self._kubectl, pod, self._options.start_s)

    def explain(self, text: str) -> tuple[str, str]:
        """Return a message for an error of kubectl, with what to do next, and the reason in the API's Status."""
        return self._kubectl.explain(text)

    def exec_in(self, pod: str, call: Sequence[str]) -> Sequence[str]:
        """Return the command that runs the slot server's launcher in a pod; the launcher's source goes to its standard
        input."""
        python, (source, *arguments) = call[:4], call[4:]
        size = str(len(source.encode()))
        container = CONTAINER if self._existing is None else self._existing.container
        return self._kubectl.exec_command(pod, container, [*python, _RECEIVE, size, *arguments])


def _machine() -> str:
    """Return a name for this machine that is a label's value, which `this_host` is too long for together with a
    process."""
    return hashlib.sha256(this_host().encode()).hexdigest()[:16]
