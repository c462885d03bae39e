"""Describes the pods of the kubernetes backend, and reads why a pod does not start or has ended.

A pod of this library has one container, which waits for slot servers. It has no token of the cluster, no service
variables, and an empty directory for the slots' files. It ends by itself when no slot server has run in it for
`UNATTENDED_S` seconds, and at the latest at its deadline. Fields and reasons: the Kubernetes API reference, `core/v1`,
and the kubelet's `pkg/kubelet/images` and `pkg/kubelet/kuberuntime`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Rung

LABEL = "palaestra.slots"
"""The label whose value names the machine of a pod's owner, and the annotation that names the owner itself."""
RUN = "palaestra.run"
"""The label whose value is the run that made a pod."""
CONTAINER = "slots"
UNATTENDED_S = 300
NO_ROOM = "no node has room for it"
_GRACE_S = 5

_OWN = frozenset({
    "containers", "initContainers", "ephemeralContainers", "restartPolicy", "hostNetwork", "hostPID", "hostIPC",
    "hostUsers", "shareProcessNamespace", "automountServiceAccountToken", "activeDeadlineSeconds", "securityContext",
    "volumes", "enableServiceLinks", "terminationGracePeriodSeconds",
})  # fmt: skip
"""The fields of a pod's spec that a user cannot set, because the isolation or the lifetime depends on them."""

_NEVER_STARTS = frozenset({
    "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError", "CrashLoopBackOff", "ImageInspectError", "SignatureValidationFailed",
})  # fmt: skip

WAITING = """
import os, signal, sys, time
if sys.version_info < (3, 11):
    sys.exit("python3 is %d.%d in the image, but the slot server needs 3.11 or newer" % sys.version_info[:2])
ends = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes whose parent has ended are children of the first one
used_at, most_s = time.monotonic(), float(sys.argv[1])
while signal.sigtimedwait(ends, most_s / 20) is None:
    if any(each.isdecimal() and int(each) != os.getpid() for each in os.listdir("/proc")):
        used_at = time.monotonic()
    elif time.monotonic() > used_at + most_s:
        break
"""
"""The container's program. It runs in the image's Python."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """How pods are made. `cpus`, `memory` and `disk` (in the notation of Kubernetes: `8Gi`) are the requests and the
    limits of one pod with all its slots; None means neither. A pod that is not ready after `start_s` seconds is an
    error, and `deadline_s` ends a pod in any case. `spec` holds additional fields of the pod's spec, such as
    `nodeSelector`.

    Raises `ConfigError` if `spec` has a field on which the isolation or the lifetime of pods depends.
    """

    cpus: float | None = None
    memory: str | None = None
    disk: str | None = None
    start_s: float = 600.0
    deadline_s: float = 86400.0
    spec: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refused = sorted(_OWN.intersection(self.spec))
        if refused:
            raise ConfigError(
                f"kubernetes_pod_spec cannot set {', '.join(refused)}: Palaestra sets them. Leave them out"
            )


class ExistingPods(NamedTuple):
    """The pods that a label selector matches, and the name of the container to use; None means their default one."""

    selector: str
    container: str | None = None


def needs_user_namespace(wanted: Rung | None, required: Rung | None) -> bool:
    """Return whether the levels that were asked for need a pod with a user namespace of its own."""
    return any(level is not None and level >= Rung.USERNS for level in (wanted, required))


def manifest(
    name: str, image: str, options: PodOptions, *, labels: Mapping[str, str], owner: str, user_ns: bool
) -> JSON:
    """Return a pod in the format of the API.

    With `user_ns`, root in the pod is nobody on the node, and may mount and make namespaces in the pod, so the slots
    reach `userns`. Without it, the pod has the usual rights of root in a container.
    """
    limits = {"cpu": options.cpus and f"{options.cpus:g}", "memory": options.memory, "ephemeral-storage": options.disk}
    limits = {resource: amount for resource, amount in limits.items() if amount is not None}
    rights: dict[str, JSON] = {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    if user_ns:
        rights = {
            "runAsUser": 0,
            "procMount": "Unmasked",
            "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"},
            "capabilities": {"add": ["SYS_ADMIN", "NET_ADMIN"]},
        }
    container = {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", "-I", "-S", "-c", WAITING, str(UNATTENDED_S)],
        "resources": {"requests": limits, "limits": limits},
        "securityContext": rights,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Slots keep their files here, because an overlay on the container's own overlay is slow or refused.
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],  # noqa: S108 - in the pod
    }
    spec = {
        **options.spec,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "activeDeadlineSeconds": int(options.deadline_s),
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {} if options.disk is None else {"sizeLimit": options.disk}}],
        **({"hostUsers": False} if user_ns else {}),
    }
    notes = {
        LABEL: owner,
        # A moved pod is a lost pod, so autoscalers should not empty its node.
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    about = {"name": name, "labels": {"app.kubernetes.io/managed-by": "palaestra", **labels}, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def weakened(stored: JSON) -> list[str]:
    """Return the fields for a user namespace that a cluster has dropped from a stored pod."""
    spec = stored["spec"]
    rights = spec["containers"][0].get("securityContext") or {}
    lacks = [] if spec.get("hostUsers") is False else ["hostUsers"]
    return lacks if rights.get("procMount") == "Unmasked" else [*lacks, "procMount"]


def is_ready(pod: JSON) -> bool:
    """Return whether a pod's containers run and the pod is not being deleted."""
    if "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = pod["status"].get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def pending_reason(pod: JSON) -> str:
    """Return what a pod that is not ready waits for, as far as the cluster reports it."""
    status = pod["status"]
    for each in status.get("conditions") or []:
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f"{NO_ROOM}: {each.get('message') or each.get('reason')}"
    for each in status.get("containerStatuses") or []:
        waiting = each["state"].get("waiting")
        if waiting:
            return ": ".join(word for word in (waiting.get("reason"), waiting.get("message")) if word)
    return f"its phase is {status.get('phase', 'unknown')}"


def never_starts(pod: JSON) -> bool:
    """Return whether a pod waits for something that only a change of the pod or the cluster can give it."""
    states = [each["state"] for each in pod["status"].get("containerStatuses") or []]
    return any((state.get("waiting") or {}).get("reason") in _NEVER_STARTS for state in states)


def end_reason(pod: JSON) -> str | None:
    """Return why a pod has ended, such as an eviction; None if it has not ended."""
    status = pod["status"]
    if status.get("phase") not in ("Failed", "Succeeded"):
        return "it is being deleted" if "deletionTimestamp" in pod["metadata"] else None
    words = [status.get("reason"), status.get("message")]
    for each in status.get("containerStatuses") or []:
        ended = each["state"].get("terminated")
        if ended:
            words += [ended.get("reason"), ended.get("message") or f"exit status {ended.get('exitCode')}"]
    return ": ".join(word.strip() for word in words if word) or f"its phase is {status['phase']}"
