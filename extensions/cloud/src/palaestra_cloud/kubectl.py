"""Runs kubectl, the program with which the kubernetes backend reaches a cluster.

All requests except `kubectl exec` are raw requests of the Kubernetes API (`kubectl get --raw PATH`), which need neither
discovery nor schemas and are the same in all versions of kubectl. kubectl finds the cluster and logs in as
it does for its user, with the kubeconfig and with the log-in programs of clouds. It gets only the environment variables
that these may need, and no keys of model servers. Sources: kubectl's reference, and the API conventions of Kubernetes
(Status, watch).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON

_REQUEST_S = 60.0
_WATCH_S = 240
"""Seconds after which the server ends a watch, which then begins again."""
_LONGEST_EVENT = 16 << 20

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "HTTP_PROXY",
    "NO_PROXY", "https_proxy", "http_proxy", "no_proxy", "GOOGLE_APPLICATION_CREDENTIALS",
})  # fmt: skip
_PREFIXES = ("KUBE", "AWS_", "AZURE_", "CLOUDSDK_", "OCI_CLI_", "XDG_", "USE_GKE_")
"""The environment variables of kubectl and of the clouds' log-in programs."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The namespace of this process if it runs in a pod."""

_STATUS = re.compile(r"Error from server \((\w+)\): (.*)", re.DOTALL)
_INVALID = re.compile(r"The \S+(?: \S+)? is invalid: (.*)", re.DOTALL)
_MISSING_RIGHT = re.compile(
    r'User "([^"]*)" cannot (\w+) resource "([^"]*)".*?(?:in the namespace "([^"]*)")?$', re.DOTALL
)
_NO_CONTEXT = (
    "localhost:8080 was refused",
    "current-context is not set",
    "current-context must exist",
    "no configuration has been provided",
)


class KubernetesRefused(SandboxError):
    """A request that the cluster refused or did not answer. `reason` is the reason in the API's Status, such as
    `NotFound`; it is empty if there was no Status."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Kubectl:
    """The user's kubectl, for one namespace. `context` and `namespace` are those of the kubeconfig if they are None."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        self._program = ["kubectl", *([] if context is None else [f"--context={context}"])]
        self.context = context
        self._namespace = namespace

    @property
    def namespace(self) -> str:
        """The namespace of all requests; `find_namespace` must have run if none was given."""
        return self._namespace or "default"

    async def find_namespace(self) -> None:
        """Look up the context's namespace unless one was given. Raises `ConfigError` if kubectl has no context."""
        if self._namespace is not None:
            return
        view = await self._run_kubectl(["config", "view", "--minify", "--output=jsonpath={..namespace}"])
        if view[0] == 0:
            self._namespace = view[1] or "default"
        elif _ACCOUNT.exists() and self.context is None:  # kubectl then uses the service account of the pod
            self._namespace = _ACCOUNT.read_text().strip()
        else:
            raise ConfigError(self.explain(view[1])[0])

    async def list_pods(self, selector: str) -> list[JSON]:
        """Return the pods that a label selector matches. Raises `KubernetesRefused`."""
        return list((await self._request("get", self._pods_path(labelSelector=selector)))["items"])

    async def pod(self, name: str) -> JSON:
        """Return a pod. Raises `KubernetesRefused`."""
        return await self._request("get", self._pods_path(name))

    async def create(self, pod: JSON) -> JSON:
        """Create a pod, and return it as the cluster has stored it. A field that the cluster does not know is refused
        (by clusters from Kubernetes 1.25). Raises `KubernetesRefused`."""
        return await self._request("create", self._pods_path(fieldValidation="Strict"), json.dumps(pod).encode())

    async def delete(self, name: str) -> None:
        """Delete a pod. Does nothing if it is gone. Raises `KubernetesRefused`."""
        try:
            await self._request("delete", self._pods_path(name, gracePeriodSeconds="1"))
        except KubernetesRefused as error:
            if error.reason != "NotFound":
                raise

    async def watch(self, name: str) -> AsyncGenerator[tuple[str, JSON], None]:
        """Yield the events of a pod, `ADDED`, `MODIFIED` or `DELETED`, each with the pod. The first is its state now.
        Ends after a few minutes. Raises `KubernetesRefused`."""
        selector = {"fieldSelector": f"metadata.name={name}", "timeoutSeconds": str(_WATCH_S)}
        command = [*self._program, "get", "--raw", self._pods_path(watch="true", **selector)]
        process = await self._spawn(command)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async for line in process.stdout:
                event = _parse_answer(line.decode(errors="replace"))
                if event["type"] == "ERROR":
                    raise KubernetesRefused(f"the watch of the pod {name} failed: {event['object'].get('message')}")
                yield event["type"], event["object"]
            text = (await process.stderr.read()).decode(errors="replace").strip()
            if await process.wait() != 0:
                message, reason = self.explain(text)
                raise KubernetesRefused(message, reason)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())

    def exec_command(self, pod: str, container: str | None, call: Sequence[str]) -> list[str]:
        """Return the command that runs `call` in a container of a pod, with this process's streams."""
        which = [] if container is None else [f"--container={container}"]
        return [*self._program, "exec", "--stdin", f"--namespace={self.namespace}", pod, *which, "--", *call]

    async def _request(self, verb: str, path: str, body: bytes = b"") -> JSON:
        file = ["--filename=-"] if body else []
        status, text = await self._run_kubectl([verb, "--raw", path, *file], body)
        if status == 0:
            return _parse_answer(text)
        message, reason = self.explain(text)
        raise KubernetesRefused(message, reason)

    async def _run_kubectl(self, words: Sequence[str], stdin: bytes = b"") -> tuple[int, str]:
        """Run kubectl, and return its status and its output or, if it failed, its errors."""
        try:
            command = [*self._program, f"--request-timeout={_REQUEST_S / 2:g}s", *words]
            done = await run_process(command, stdin=stdin, timeout_s=_REQUEST_S, env=environment())
        except FileNotFoundError:
            raise ConfigError(
                "the backend kubernetes needs kubectl, which is not installed here: install the package "
                "kubernetes-client or kubectl"
            ) from None
        out = done.stderr if done.returncode else done.stdout
        return done.returncode, out.decode(errors="replace").strip()

    async def _spawn(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
            limit=_LONGEST_EVENT,
            start_new_session=True,
        )

    def _pods_path(self, pod: str | None = None, **query: str) -> str:
        path = f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods"
        path += "" if pod is None else f"/{quote(pod, safe='')}"
        return f"{path}?{urlencode(query)}" if query else path

    def explain(self, text: str) -> tuple[str, str]:
        """Return a message for an error of kubectl, with what to do next, and the reason in the API's Status."""
        found, invalid = _STATUS.search(text), _INVALID.search(text)
        reason, said = (found[1], found[2].strip()) if found else ("", text)
        where = "the current context" if self.context is None else f"the context {self.context}"
        right = _MISSING_RIGHT.search(said)
        if reason == "Forbidden" and right:
            user, verb, resource, namespace = right.groups()
            return (
                f"{user} may not {verb} {resource} in the namespace {namespace or self.namespace}: give it a Role with "
                f"the verb {verb} on the resource {resource} (docs/backends/kubernetes.md has the whole Role)"
            ), reason
        if "violates PodSecurity" in said:
            return (
                f"the namespace {self.namespace} does not admit these pods: {said}. Use a namespace whose Pod Security "
                "level admits them, or request the isolation level confined, which needs the level baseline"
            ), reason
        if "unknown field" in said:
            return f"the cluster is too old for these pods, or kubernetes_pod_spec is wrong: {said}", "UnknownField"
        if any(each in text for each in _NO_CONTEXT):
            return (
                "kubectl has no context: set KUBECONFIG, select one with `kubectl config use-context`, or set "
                "kubernetes_context"
            ), reason
        if self.context is not None and ("cannot locate context" in text or f'context "{self.context}"' in text):
            return (
                f"the kubeconfig has no context {self.context}: `kubectl config get-contexts` lists the contexts; set "
                "another kubernetes_context"
            ), reason
        if invalid:
            return f"Kubernetes refuses: {_short(invalid[1])}", "Invalid"
        if "Unauthorized" in said:
            return f"the cluster of {where} does not accept its credentials: log in again ({_short(said)})", reason
        if found:
            return f"Kubernetes refuses: {_short(said)}", reason
        return f"kubectl cannot reach the cluster of {where}: {_short(text)}. Try it: kubectl get pods", reason


def _parse_answer(text: str) -> JSON:
    """Return an answer of the API. Raises `KubernetesRefused` if it is not JSON, such as the page of a proxy."""
    try:
        return json.loads(text)
    except ValueError:
        raise KubernetesRefused(f"kubectl printed something else than an answer of the API: {_short(text)}") from None


def _short(text: str) -> str:
    return without_middle(text.strip().rstrip("."), 1000)


def environment() -> Mapping[str, str]:
    """Return the environment variables for kubectl."""
    return {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
