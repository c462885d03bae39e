"""Runs one pod for the Kubernetes stand-in: as root, its processes are in their own process and mount namespaces, with
the capabilities of a container, and with a user namespace if the pod has `hostUsers: false`.

The root directory is this machine's, except for the pod's volumes. The seccomp and AppArmor profiles of a pod are not
applied. Phases, reasons and messages are those of the kubelet and of containerd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.types import JSON

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIRST_UID, _UIDS = 100_000, 65536
_LOG_BYTES = 2048
_RIGHTS = (
    "chown", "dac_override", "fsetid", "fowner", "mknod", "net_raw", "setgid", "setuid", "setfcap", "setpcap",
    "net_bind_service", "sys_chroot", "kill", "audit_write",
)  # fmt: skip
"""The capabilities of a container. Source: containerd, `oci.WithDefaultUnixCaps`."""

_USER_NAMESPACE = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit("unshare: " + os.strerror(ctypes.get_errno()))
os.write(1, b"unmapped\\n")
os.read(0, 1)
os.setgroups([])
os.setgid(0)
os.setuid(0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command in a new user namespace, when the parent has written the mapping of ids."""

_INIT = """
while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit; shift 2; done
shift; echo ready; exec "$@" </dev/null
"""
"""Mounts the volumes, reports that the namespaces can be entered, and runs the container's command."""


@dataclass(frozen=True, slots=True)
class PodNode:
    """What the stand-in's node has: `images` maps names to the PATH of their containers, `pull_s` is the duration of a
    pull."""

    images: dict[str, str]
    folder: Path
    pull_s: float
    version: tuple[int, ...]


class RunningPod:
    """One pod, whose `definition` is the stored object with its status. `changed` is called after each change."""

    def __init__(self, definition: JSON, changed: Callable[[RunningPod], None]) -> None:
        self.definition = definition
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._init = 0
        self._log = b""
        self._scratch: Path | None = None
        self._path = PATH
        self.status: JSON = {"phase": "Pending", "conditions": [], "qosClass": "BestEffort"}
        definition["status"] = self.status

    @property
    def name(self) -> str:
        return str(self.definition["metadata"]["name"])

    @property
    def is_running(self) -> bool:
        return bool(self.status["phase"] == "Running")

    @property
    def requests(self) -> tuple[float, int]:
        """The cores and the bytes that the pod requests."""
        wanted = (self._container.get("resources") or {}).get("requests") or {}
        return quantity(wanted.get("cpu", "0")), int(quantity(wanted.get("memory", "0")))

    @property
    def _container(self) -> JSON:
        return self.definition["spec"]["containers"][0]

    @property
    def _in_user_namespace(self) -> bool:
        return self.definition["spec"].get("hostUsers") is False

    def unschedulable(self, message: str) -> None:
        """Set the condition that no node has room."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.status["conditions"] = [condition]
        self._changed(self)

    async def run(self, node: PodNode) -> None:
        """Pull the image, run the pod's command, and record its end."""
        self.status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        self.definition["spec"]["nodeName"] = "stand-in"
        self._container_state({"waiting": {"reason": "ContainerCreating"}})
        await asyncio.sleep(node.pull_s)
        image = self._container["image"]
        if image not in node.images:
            cause = f'failed to pull and unpack image "{image}": pull access denied, repository does not exist'
            self._container_state({"waiting": {"reason": "ErrImagePull", "message": cause}})
            await asyncio.sleep(1)
            back_off = f'Back-off pulling image "{image}"' + (
                f": ErrImagePull: {cause}" if node.version >= (1, 32) else ""
            )
            self._container_state({"waiting": {"reason": "ImagePullBackOff", "message": back_off}})
            return
        command, path = self._container["command"], node.images[image]
        if shutil.which(command[0], path=path) is None:
            self._end("Failed", 128, "StartError", f"failed to create containerd task: {_not_found(command[0])}")
            return
        await self._start(node, path)
        assert self._process is not None
        self.status["conditions"] = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
        self.status["phase"] = "Running"
        self._container_state({"running": {"startedAt": now()}}, ready=True)
        limit = self.definition["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                code = await self._process.wait()
        except TimeoutError:
            await self.end("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            return
        if "deletionTimestamp" not in self.definition["metadata"] and self.status["phase"] == "Running":
            code = code if code >= 0 else 128 - code
            message = self._log.decode(errors="replace").strip() if code else ""
            self._end("Failed" if code else "Succeeded", code, "Error" if code else "Completed", message)

    async def _start(self, node: PodNode, path: str) -> None:
        folder = node.folder / self.name
        mounts: list[str] = []
        volumes = {each["name"] for each in self.definition["spec"].get("volumes") or () if "emptyDir" in each}
        for mount in self._container.get("volumeMounts") or ():
            assert mount["name"] in volumes
            source = folder / mount["name"]
            source.mkdir(parents=True, mode=0o777)
            source.chmod(0o1777)
            mounts += [str(source), mount["mountPath"]]
        self._scratch = folder
        isolate = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
        command = [*isolate, "sh", "-c", _INIT, "sh", *mounts, "--", *self._limited(), *self._container["command"]]
        if self._in_user_namespace:
            os.chown(folder, _FIRST_UID, _FIRST_UID)
            command = ["python3", "-I", "-S", "-c", _USER_NAMESPACE, *command]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(path),
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._path = path
        if self._in_user_namespace:
            await self._process.stdout.readline()
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{self._process.pid}/{name}").write_text(f"0 {_FIRST_UID} {_UIDS}")
            self._process.stdin.write(b"\n")
        line = await self._process.stdout.readline()
        assert line == b"ready\n", line + await self._process.stdout.read()
        pid = self._process.pid
        self._init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        asyncio.create_task(self._keep_log(self._process.stdout))  # noqa: RUF006 - it ends with the process

    async def _keep_log(self, output: asyncio.StreamReader) -> None:
        while piece := await output.read(4096):
            self._log = (self._log + piece)[-_LOG_BYTES:]

    def _limited(self) -> list[str]:
        """Return the prefix of commands that gives them the container's capabilities and no more."""
        context = self._container.get("securityContext") or {}
        added = [each.lower() for each in (context.get("capabilities") or {}).get("add", ())]
        kept = ",".join(f"+{name}" for name in (*_RIGHTS, *added))
        return ["setpriv", "--inh-caps=-all", f"--bounding-set=-all,{kept}", "--"]

    def _environment(self, path: str) -> dict[str, str]:
        own = {each["name"]: each["value"] for each in self._container.get("env") or ()}
        return {"PATH": path, "HOSTNAME": self.name, "HOME": "/root", **own}

    async def exec(self, words: Sequence[str]) -> asyncio.subprocess.Process | str:
        """Start a command in the container; return the runtime's error if it cannot start."""
        if shutil.which(words[0], path=self._path) is None:
            return f"error executing command in container: failed to exec in container: {_not_found(words[0])}"
        enter = ["nsenter", f"--target={self._init}", "--pid", "--mount"]
        enter += ["--user", "--setuid=0", "--setgid=0"] if self._in_user_namespace else []
        return await asyncio.create_subprocess_exec(
            *(*enter, *self._limited(), *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(self._path),
            cwd="/",
            start_new_session=True,
        )

    def has_container(self, name: str | None) -> bool:
        """Return whether the pod has a container of that name; None means the default one."""
        return name in (None, self._container["name"])

    async def stop(self, grace_s: float) -> None:
        """End the container: SIGTERM, and SIGKILL after `grace_s` seconds."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), grace_s)
        await self.kill()

    async def kill(self) -> None:
        """End every process of the pod, and remove its volumes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def end(self, reason: str, message: str) -> None:
        """End the pod as the kubelet does when it evicts one."""
        self.status.update(reason=reason, message=message)
        self._end("Failed", 137, "Error", "")
        await self.kill()

    def _end(self, phase: str, code: int, reason: str, message: str) -> None:
        self.status["phase"] = phase
        self.status["conditions"] = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False", "reason": f"Pod{phase}"},
        ]
        ended = {"exitCode": code, "reason": reason, "finishedAt": now()}
        self._container_state({"terminated": {**ended, "message": message} if message else ended})

    def _container_state(self, state: JSON, *, ready: bool = False) -> None:
        container = {"name": self._container["name"], "image": self._container["image"], "ready": ready, "state": state}
        self.status["containerStatuses"] = [{**container, "restartCount": 0}]
        self._changed(self)


def quantity(text: str) -> float:
    """Return the number that a quantity such as `500m` or `8Gi` stands for. Raises `ValueError`."""
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    digits = text.rstrip("".join(set("".join(units))))
    return float(digits) * units.get(text[len(digits) :], 1)


def _not_found(program: str) -> str:
    start = "OCI runtime exec failed: exec failed: unable to start container process"
    return f'{start}: exec: "{program}": executable file not found in $PATH: unknown'


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
