"""A stand-in for a Kubernetes cluster of one node. It has the parts of the API that kubectl and the kubernetes backend
use for pods, and runs pods as processes of this machine.

The real kubectl talks to it: set `KUBECONFIG` to `FakeKubernetes.kubeconfig`, or run
`PYTHONPATH=tests python -m stand_ins.fake_kubernetes --image NAME`, which prints the variable. It listens on 127.0.0.1.
It needs root and the programs `unshare`, `nsenter` and `setpriv`; pods do not protect this machine from their commands.

It covers discovery, and pods: create, get, list, watch, delete, and exec over WebSocket and SPDY. Requests are checked
strictly: a field that is not in `SCHEMA` is refused, or dropped by a stand-in of an older version, as Kubernetes does.
Tests can forbid verbs, set a quota and a Pod Security level, make the node too small, and evict pods.

Sources: the Kubernetes API reference (core/v1, meta/v1), its API conventions, and the texts of kube-apiserver.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import signal
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiohttp import web

from palaestra_slots.core.io.http_server import Handler, listening
from palaestra_slots.core.types import JSON
from stand_ins.fake_kubernetes_exec import SPDY, SpdyConnection, answer_websocket
from stand_ins.fake_kubernetes_pod import PATH, PodNode, RunningPod, now
from stand_ins.served import served_in_thread

_HEAD_BYTES = 64 << 10
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

_RESOURCES = {"requests": dict, "limits": dict}
SCHEMA: Mapping[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": dict, "annotations": dict},
    "spec": {
        "activeDeadlineSeconds": int,
        "automountServiceAccountToken": bool,
        "enableServiceLinks": bool,
        "hostUsers": ("1.25", bool),
        "imagePullSecrets": [{"name": str}],
        "nodeSelector": dict,
        "priorityClassName": str,
        "restartPolicy": str,
        "runtimeClassName": str,
        "serviceAccountName": str,
        "terminationGracePeriodSeconds": int,
        "tolerations": [{"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": int}],
        "volumes": [{"name": str, "emptyDir": {"medium": str, "sizeLimit": str}}],
        "containers": [
            {
                "name": str,
                "image": str,
                "command": [str],
                "env": [{"name": str, "value": str}],
                "resources": _RESOURCES,
                "terminationMessagePolicy": str,
                "volumeMounts": [{"name": str, "mountPath": str}],
                "securityContext": {
                    "runAsUser": int,
                    "procMount": str,
                    "seccompProfile": {"type": str},
                    "appArmorProfile": ("1.30", {"type": str}),
                    "capabilities": {"add": [str], "drop": [str]},
                },
            }
        ],
    },
}
"""The fields of pods that the stand-in knows; a pair is a field with the version of Kubernetes that introduced it."""


class _Refusal(Exception):
    """A Status with a code other than 200."""

    def __init__(self, code: int, reason: str, message: str, details: JSON = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.details = code, reason, details

    @property
    def status(self) -> JSON:
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**head, "message": str(self), "reason": self.reason, "details": self.details, "code": self.code}


class FakeKubernetes:
    """The stand-in. `images` maps the images that its node can pull to the PATH of their containers. `version` is the
    cluster's, which also selects the kubectl of installations that have several."""

    def __init__(
        self,
        *,
        images: Mapping[str, str] | None = None,
        version: str = "1.33",
        cpus: float = 64.0,
        memory: int = 1 << 40,
        pod_security: str = "privileged",
    ) -> None:
        self._images = {"python:3.11": PATH} if images is None else dict(images)
        self._version, self._cpus, self._memory, self._security = version, cpus, memory, pod_security
        self.pull_s = 0.05
        self.forbidden: set[tuple[str, str]] = set()
        """Pairs of a verb and a resource, such as `("create", "pods/exec")`, that nobody may use."""
        self.quota: str | None = None
        """The reason of an exceeded quota, which refuses new pods."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """How often each verb was used with each resource."""
        self.pods: dict[tuple[str, str], RunningPod] = {}
        self.kubeconfig = ""
        self._number = 1
        self._watchers: set[asyncio.Queue[tuple[str, JSON]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeKubernetes:
        self.loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="fake-kubernetes-"))
        self._folder.chmod(0o755)
        app = web.Application(middlewares=[self._outer])
        pods = "/api/v1/namespaces/{namespace}/pods"
        app.add_routes(
            [
                web.get("/version", self._show_version),
                web.get("/api", self._versions),
                web.get("/apis", self._groups),
                web.get("/api/v1", self._resources),
                web.get(pods, self._list),
                web.post(pods, self._create),
                web.get(f"{pods}/{{name}}", self._get),
                web.delete(f"{pods}/{{name}}", self._delete),
                web.get(f"{pods}/{{name}}/exec", self._exec),
            ]
        )
        self._stack = contextlib.AsyncExitStack()
        url = await self._stack.enter_async_context(listening(app, "127.0.0.1", 0, shutdown_s=0.01))
        self._inner = urlsplit(url).port
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._stack.callback(server.close)
        self.kubeconfig = str(self._folder / "kubeconfig")
        port = server.sockets[0].getsockname()[1]
        Path(self.kubeconfig).write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{port}")))
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in list(self.pods.values()):
            await pod.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    # What tests do to the cluster

    def running(self) -> list[str]:
        """Return the names of the pods that run."""
        return [pod.name for pod in self.pods.values() if pod.is_running]

    async def evict(self, name: str, message: str = "The node was low on resource: memory.") -> None:
        """End a pod as a node under pressure does. Call it on `loop`."""
        (pod,) = [each for each in self.pods.values() if each.name == name]
        await pod.end("Evicted", message)

    async def run_pod(self, definition: JSON, namespace: str = "default") -> None:
        """Create a pod, as a Deployment would, and wait until it runs."""
        self._admit(self._checked(definition, strict=True), namespace)
        pod = self.pods[namespace, definition["metadata"]["name"]]
        async with asyncio.timeout(20):
            while not pod.is_running:  # noqa: ASYNC110 - for tests
                await asyncio.sleep(0.02)

    # Requests

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a SPDY exec, which aiohttp cannot, and pass every other connection on."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"upgrade: spdy/3.1" in head.lower():
                await self._exec_by_spdy(head.decode(), reader, writer)
            else:
                inner, outer = await asyncio.open_connection("127.0.0.1", self._inner)
                outer.write(head)
                await asyncio.gather(_copy(reader, outer), _copy(inner, writer))
        writer.close()

    async def _exec_by_spdy(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        url = urlsplit(target)
        query = parse_qs(url.query)
        _, _, _, _, namespace, _, name, _ = url.path.split("/")
        try:
            pod = self._exec_target(method, namespace, name, query.get("container", [None])[0])
        except _Refusal as refusal:
            body = json.dumps(refusal.status).encode()
            start = f"HTTP/1.1 {refusal.code} {refusal.reason}\r\nContent-Type: application/json\r\n"
            writer.write(f"{start}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
            return
        start = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
        writer.write(f"{start}X-Stream-Protocol-Version: {SPDY}\r\n\r\n".encode())
        channels = ["error", *(each for each in ("stdin", "stdout", "stderr") if query.get(each) == ["true"])]
        await SpdyConnection(reader, writer).serve(channels, lambda: pod.exec(query["command"]))

    @web.middleware
    async def _outer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except _Refusal as refusal:
            return web.json_response(refusal.status, status=refusal.code)
        except web.HTTPNotFound:
            missing = _Refusal(404, "NotFound", "the server could not find the requested resource")
            return web.json_response(missing.status, status=404)

    def _authorize(self, verb: str, resource: str, namespace: str, name: str = "") -> None:
        self.requests[verb, resource] += 1
        if (verb, resource) in self.forbidden:
            what = f"{resource.partition('/')[0]}{f' {json.dumps(name)}' if name else ''} is forbidden"
            who = f'User "system:anonymous" cannot {verb} resource "{resource}" in API group ""'
            raise _Refusal(403, "Forbidden", f'{what}: {who} in the namespace "{namespace}"')

    async def _show_version(self, request: web.Request) -> web.Response:
        major, minor = self._version.split(".")
        found = {"major": major, "minor": minor, "gitVersion": f"v{self._version}.0", "platform": "linux/amd64"}
        return web.json_response(found)

    async def _versions(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})

    async def _groups(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async def _resources(self, request: web.Request) -> web.Response:
        verbs = ["create", "delete", "get", "list", "watch"]
        pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": verbs}
        execs = {"name": "pods/exec", "singularName": "", "namespaced": True, "kind": "PodExecOptions"}
        resources = [{**pods, "shortNames": ["po"]}, {**execs, "verbs": ["create", "get"]}]
        return web.json_response({"kind": "APIResourceList", "groupVersion": "v1", "resources": resources})

    async def _create(self, request: web.Request) -> web.Response:
        namespace = request.match_info["namespace"]
        self._authorize("create", "pods", namespace)
        strict = request.query.get("fieldValidation") == "Strict"
        try:
            definition = json.loads(await request.read())
        except ValueError as error:
            raise _Refusal(400, "BadRequest", f"the body is not JSON: {error}") from None
        return web.json_response(self._admit(self._checked(definition, strict=strict), namespace), status=201)

    def _checked(self, definition: JSON, *, strict: bool) -> JSON:
        """Return a pod with only known fields. Raises `_Refusal` for a value of the wrong type, and if `strict`, for
        unknown fields."""
        unknown: list[str] = []
        known = _known(definition, SCHEMA, "", self._release, unknown)
        if unknown and strict and self._release >= (1, 25):
            problems = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise _Refusal(
                400, "BadRequest", f'Pod in version "v1" cannot be handled as a Pod: strict decoding error: {problems}'
            )
        if self._release < (1, 33):  # before, the feature gates UserNamespacesSupport and ProcMountType are off
            known["spec"].pop("hostUsers", None)
            for container in known["spec"].get("containers", ()):
                container.get("securityContext", {}).pop("procMount", None)
        return known

    @property
    def _release(self) -> tuple[int, ...]:
        return tuple(map(int, self._version.split(".")))

    def _admit(self, definition: JSON, namespace: str) -> JSON:
        """Validate a pod, store it, and give it to the node. Returns the stored pod."""
        name = definition["metadata"]["name"]
        problems = _invalid(definition)
        if problems:
            parts = [problem.partition(": ") for problem in problems]
            causes = [{"reason": "FieldValueInvalid", "field": part[0], "message": part[2]} for part in parts]
            details = {"name": name, "kind": "Pod", "causes": causes}
            raise _Refusal(422, "Invalid", f'Pod "{name}" is invalid: {", ".join(problems)}', details)
        if (namespace, name) in self.pods:
            raise _Refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        if self.quota is not None:
            raise _Refusal(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: {self.quota}')
        violations = _violations(definition) if self._security == "baseline" else []
        if violations:
            what = f'violates PodSecurity "{self._security}:latest": {", ".join(violations)}'
            raise _Refusal(403, "Forbidden", f'pods "{name}" is forbidden: {what}')
        definition["metadata"].update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
        pod = RunningPod(definition, self._changed)
        self.pods[namespace, name] = pod
        self._number += 1
        definition["metadata"]["resourceVersion"] = str(self._number)
        stored = json.loads(json.dumps(definition))
        self._emit("ADDED", definition)
        self._start_task(self._schedule(pod))
        return stored

    async def _schedule(self, pod: RunningPod) -> None:
        """Run a pod when the node has room for it."""
        key, noted = (pod.definition["metadata"]["namespace"], pod.name), ""
        while self.pods.get(key) is pod:
            used = [each.requests for each in self.pods.values() if each is not pod and _occupies(each)]
            cpus, memory = pod.requests
            short = "cpu" if cpus + sum(each[0] for each in used) > self._cpus else ""
            short = "memory" if memory + sum(each[1] for each in used) > self._memory else short
            if not short:
                await pod.run(PodNode(self._images, self._folder, self.pull_s, self._release))
                return
            message = f"0/1 nodes are available: 1 Insufficient {short}. preemption: 0/1 nodes are available: 1 No "
            message += "preemption victims found for incoming pod."
            if message != noted:
                pod.unschedulable(message)
                noted = message
            await asyncio.sleep(0.1)

    def _start_task(self, body: Any) -> None:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self, pod: RunningPod) -> None:
        self._number += 1
        pod.definition["metadata"]["resourceVersion"] = str(self._number)
        self._emit("MODIFIED", pod.definition)

    def _emit(self, kind: str, definition: JSON) -> None:
        event = (kind, json.loads(json.dumps(definition)))
        for watcher in self._watchers:
            watcher.put_nowait(event)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info["namespace"]
        selects = _selection(namespace, request.query)
        if request.query.get("watch") in ("true", "1"):
            self._authorize("watch", "pods", namespace)
            return await self._watch(request, selects)
        self._authorize("list", "pods", namespace)
        items = [pod.definition for pod in self.pods.values() if selects(pod.definition)]
        meta = {"resourceVersion": str(self._number)}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, selects: Callable[[JSON], bool]) -> web.StreamResponse:
        events: asyncio.Queue[tuple[str, JSON]] = asyncio.Queue()
        for pod in self.pods.values():
            events.put_nowait(("ADDED", json.loads(json.dumps(pod.definition))))
        self._watchers.add(events)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                while True:
                    kind, definition = await events.get()
                    if selects(definition):
                        await response.write(json.dumps({"type": kind, "object": definition}).encode() + b"\n")
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watchers.discard(events)
        return response

    def _find(self, namespace: str, name: str) -> RunningPod:
        if (namespace, name) not in self.pods:
            raise _Refusal(404, "NotFound", f'pods "{name}" not found')
        return self.pods[namespace, name]

    async def _get(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        self._authorize("get", "pods", namespace, name)
        return web.json_response(self._find(namespace, name).definition)

    async def _delete(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        self._authorize("delete", "pods", namespace, name)
        pod = self._find(namespace, name)
        options = json.loads(await request.read() or b"{}")
        grace_s = float(request.query.get("gracePeriodSeconds") or options.get("gracePeriodSeconds", 30))
        if "deletionTimestamp" not in pod.definition["metadata"]:
            pod.definition["metadata"]["deletionTimestamp"] = now()
            self._changed(pod)
            self._start_task(self._remove(pod, grace_s))
        return web.json_response(pod.definition)

    async def _remove(self, pod: RunningPod, grace_s: float) -> None:
        await pod.stop(grace_s)
        del self.pods[pod.definition["metadata"]["namespace"], pod.name]
        self._emit("DELETED", pod.definition)

    def _exec_target(self, method: str, namespace: str, name: str, container: str | None) -> RunningPod:
        """Return the pod for an exec. A WebSocket begins with a GET, which needs another verb than a POST."""
        self._authorize("get" if method == "GET" else "create", "pods/exec", namespace, name)
        pod = self._find(namespace, name)
        if not pod.has_container(container):
            raise _Refusal(400, "BadRequest", f"container {container} is not valid for pod {name}")
        if not pod.is_running:
            raise _Refusal(
                500, "InternalError", "Internal error occurred: unable to upgrade connection: container not found"
            )
        return pod

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        names = request.match_info
        pod = self._exec_target("GET", names["namespace"], names["name"], request.query.get("container"))
        return await answer_websocket(request, lambda: pod.exec(request.query.getall("command")))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_HEAD_BYTES):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


def _kubeconfig(url: str) -> JSON:
    name = "stand-in"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": url}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "users": [{"name": name, "user": {}}],
    }


def _occupies(pod: RunningPod) -> bool:
    """Return whether a pod takes up room on the node."""
    return "nodeName" in pod.definition["spec"] and pod.status["phase"] in ("Pending", "Running")


def _known(value: JSON, schema: Any, path: str, version: tuple[int, ...], unknown: list[str]) -> JSON:
    """Return the parts of a value that a schema knows, and add the paths of the other ones to `unknown`."""
    if isinstance(schema, tuple):
        return _known(value, schema[1], path, version, unknown)
    if isinstance(schema, list) and isinstance(value, list):
        return [_known(each, schema[0], f"{path}[{n}]", version, unknown) for n, each in enumerate(value)]
    if isinstance(schema, Mapping) and isinstance(value, dict):
        found = {}
        for name, inner in value.items():
            here = f"{path}.{name}" if path else name
            since = schema.get(name, ("99.0",))
            if isinstance(since, tuple) and version < tuple(map(int, since[0].split("."))):
                unknown.append(here)
            else:
                found[name] = _known(inner, schema[name], here, version, unknown)
        return found
    if isinstance(schema, type) and type(value) is schema:
        return value
    raise _Refusal(400, "BadRequest", f"json: cannot unmarshal {json.dumps(value)[:100]} into Go struct field {path}")


def _invalid(pod: JSON) -> list[str]:
    """Return what is wrong with a pod, by some of the checks of kube-apiserver (pkg/apis/core/validation)."""
    meta, spec = pod["metadata"], pod["spec"]
    problems = []
    if not _NAME.fullmatch(meta["name"]) or len(meta["name"]) > 253:
        problems.append(f'metadata.name: Invalid value: "{meta["name"]}": a lowercase RFC 1123 subdomain is needed')
    for name, value in meta.get("labels", {}).items():
        if not _LABEL_VALUE.fullmatch(value):
            problems.append(
                f'metadata.labels: Invalid value: "{value}": a valid label must be at most 63 characters ({name})'
            )
    if spec.get("activeDeadlineSeconds", 1) < 1:
        problems.append("spec.activeDeadlineSeconds: Invalid value: must be between 1 and 2147483647, inclusive")
    if not spec.get("containers"):
        problems.append("spec.containers: Required value")
    volumes = {each["name"] for each in spec.get("volumes", ())}
    for n, container in enumerate(spec.get("containers", ())):
        here, context = f"spec.containers[{n}]", container.get("securityContext", {})
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                problems.append(f'{here}.volumeMounts[0].name: Not found: "{mount["name"]}"')
        if context.get("procMount") == "Unmasked" and spec.get("hostUsers") is not False:
            problems.append(f'{here}.securityContext.procMount: Invalid value: "Unmasked": `hostUsers` must be false')
        resources = container.get("resources", {})
        for name, amount in resources.get("requests", {}).items():
            if not isinstance(amount, str) or not re.fullmatch(r"[0-9.]+(m|k|[KMGT]i?)?", amount):
                problems.append(f"{here}.resources.requests[{name}]: quantities must match the regular expression")
    return problems


def _violations(pod: JSON) -> list[str]:
    """Return how a pod violates the Pod Security level `baseline`."""
    found = []
    for container in pod["spec"]["containers"]:
        context = container.get("securityContext", {})
        added = sorted({"SYS_ADMIN", "NET_ADMIN"} & set(context.get("capabilities", {}).get("add", ())))
        if added:
            names = ", ".join(f'"{each}"' for each in added)
            where = "securityContext.capabilities.add"
            found.append(
                f'non-default capabilities (container "{container["name"]}" must not include {names} in {where})'
            )
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            found.append('seccompProfile (must not set securityContext.seccompProfile.type to "Unconfined")')
    return found


def _selection(namespace: str, query: Mapping[str, str]) -> Callable[[JSON], bool]:
    """Return whether a pod is in a namespace and matches the selectors of a request."""
    labels = dict(each.split("=", 1) for each in query.get("labelSelector", "").replace("==", "=").split(",") if each)
    field = query.get("fieldSelector", "")
    if field and not field.startswith("metadata.name="):
        raise _Refusal(400, "BadRequest", f"field label not supported: {field.partition('=')[0]}")
    name = field.partition("=")[2]

    def selects(pod: JSON) -> bool:
        meta = pod["metadata"]
        own = meta.get("labels", {})
        if meta["namespace"] != namespace or (name and meta["name"] != name):
            return False
        return all(own.get(key) == value for key, value in labels.items())

    return selects


def fake_kubernetes(**settings: Any) -> AbstractContextManager[FakeKubernetes]:
    """Run the stand-in in its own thread, for programs without a running event loop."""
    return served_in_thread(lambda: FakeKubernetes(**settings), "fake-kubernetes")


def main() -> None:
    """Serve until interrupted, and print the variable for kubectl."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--image", action="append", default=[], metavar="NAME",
        help="an image that the node can pull; its pods run in this machine's root directory; repeatable",
    )  # fmt: skip
    parser.add_argument("--version", default="1.33", help="the version of Kubernetes that the stand-in reports")
    given = parser.parse_args()
    images = dict.fromkeys(given.image, PATH) or None
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    with fake_kubernetes(images=images, version=given.version) as kubernetes:
        print(f"export KUBECONFIG={kubernetes.kubeconfig}", flush=True)
        over.wait()


if __name__ == "__main__":
    main()
