"""The kubernetes backend with the real kubectl, against the stand-in of a cluster, whose pods really run.

Without kubectl, or without root for the stand-in's pods, these tests skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from envs.scripts import groups_file
from golden_messages import raises
from palaestra.cli.main import main as palaestra
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_cloud.kubectl import Kubectl
from palaestra_cloud.kubernetes import KubernetesBackend
from palaestra_cloud.kubernetes_pod import LABEL, ExistingPods, PodOptions, manifest
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.slot import Backend, Rung, Slot, SlotSpec
from palaestra_slots.testing.backend_conformance import BackendConformance
from programs import killed_after, nap, until
from stand_ins.fake_kubernetes import FakeKubernetes, fake_kubernetes
from stand_ins.fake_kubernetes_pod import PATH

pytestmark = [
    pytest.mark.slots,
    pytest.mark.xdist_group("backends"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in's pods need root"),
]

IMAGE = "python:3.11"


def old_python() -> Path | None:
    """A Python that is too old for the slot server, of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions")
    with contextlib.suppress(PermissionError):  # tests also run as a user without a home
        return next(iter(sorted(versions.glob("3.[89].*/bin/python3"))), None)
    return None


OLD_PYTHON = old_python()
OLD_IMAGE = {"images": {IMAGE: f"{OLD_PYTHON and OLD_PYTHON.parent}:{PATH}"}}
USERNS = {"rung": Rung.USERNS}
ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def slow():
    for number in range(4):
        files = {"a.txt": "x\\n" * 3}
        yield Task(id=f"{number}", prompt="Count the lines", files=files, solution="sleep 1; wc -l < a.txt > b.txt")

@slow.score
async def counted(sandbox):
    return (await sandbox.read_text("b.txt", missing="")).strip() == "3"
"""


def set_home(monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: FakeKubernetes) -> None:
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig)
    monkeypatch.setenv("HOME", str(folder))  # of kubectl's cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A patch for `set_home`, with a home of kubectl."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return monkeypatch


def backend(**settings: Any) -> KubernetesBackend:
    """A backend that does not try better levels first, unless `settings` ask for another one."""
    return KubernetesBackend(Kubectl(), **{"image": IMAGE, "rung": Rung.CONFINED, **settings})


def evict(cluster: FakeKubernetes, name: str) -> None:
    asyncio.run_coroutine_threadsafe(cluster.evict(name), cluster.loop).result(20)


class TestKubernetes(BackendConformance):
    cluster: ClassVar[FakeKubernetes]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with fake_kubernetes() as cls.cluster, pytest.MonkeyPatch.context() as patch:
            set_home(patch, tmp_path_factory.mktemp("home"), cls.cluster)
            patch.setenv("API_KEY", "secret")
            yield from cls.running()
            until(lambda: not cls.cluster.pods, "the pods are deleted")

    @classmethod
    def make_backend(cls) -> Backend:
        return backend(rung=None)

    async def end_place(self, slot: Slot) -> None:
        (name,) = self.cluster.running()
        evict(self.cluster, name)

    def test_slots_run_in_a_pod_without_this_process_s_variables_and_without_a_token_of_the_cluster(self) -> None:
        async def body(slot: Slot) -> None:
            assert "secret" not in (await slot.execute("env")).output
            (name,) = self.cluster.running()
            spec = self.cluster.pods["default", name].definition["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert "hostUsers" not in spec
            found = Path("/proc").glob("[0-9]*/environ")
            kubectl = [path.read_bytes() for path in found if is_exec_in(path.with_name("cmdline"), name)]
            assert kubectl
            assert all(b"KUBECONFIG" in each and b"secret" not in each for each in kubectl)

        self.in_slot(body)


def is_exec_in(command: Path, pod: str) -> bool:
    try:
        words = command.read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0].rpartition(b"/")[2].startswith(b"kubectl") and b"exec" in words and pod.encode() in words


@pytest.mark.slow
def test_rollouts_of_an_evicted_pod_run_in_another_one(
    tmp_path: Path, home: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.chdir(tmp_path)
    Path("slow_env.py").write_text(ENVIRONMENT)
    settings = {"image": IMAGE, "pods": "2", "slots_per_pod": "2"}
    words = [word for name, value in settings.items() for word in (f"--env.kubernetes_{name}", value)]
    words += ["--env.isolation", "confined"]
    used: set[str] = set()

    def evict_one(cluster: FakeKubernetes) -> None:
        until(lambda: len(cluster.running()) == 2, "two pods run")
        used.update(cluster.running())
        evict(cluster, min(used))

    with fake_kubernetes() as cluster:
        set_home(home, tmp_path, cluster)
        evicting = threading.Thread(target=evict_one, args=[cluster])
        evicting.start()
        assert (
            palaestra(["run", "slow_env.py", "--policy", "oracle", "--backend", "kubernetes", *words, "--group", "1"])
            == 0
        )
        evicting.join()
        until(lambda: not cluster.pods, "the pods are deleted")
    groups = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0]] * 4
    assert re.search(r"the pod palaestra-\w+-\d has ended: Evicted: The node was low on resource", caplog.text)


@pytest.mark.slow
async def test_pods_of_a_killed_process_have_no_commands_and_are_deleted_at_the_next_start(
    tmp_path: Path, home: pytest.MonkeyPatch
) -> None:
    command = nap()
    program = f"""
import asyncio
from palaestra_cloud.kubectl import Kubectl
from palaestra_cloud.kubernetes import KubernetesBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec

async def main():
    async with KubernetesBackend(Kubectl(), image="{IMAGE}", rung=Rung.CONFINED) as backend:
        await (await backend.create(SlotSpec(), "killed")).spawn("{command}")
        print("running", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""

    def commands() -> list[str]:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in found.splitlines() if line == command]

    with fake_kubernetes() as cluster:
        set_home(home, tmp_path, cluster)
        with killed_after([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout.readline() == "running\n"
            until(lambda: bool(commands()), "the command runs")
        until(lambda: not commands(), "the command has ended with the process")
        (left,) = cluster.running()

        async def main() -> None:
            elsewhere = manifest("elsewhere", IMAGE, PodOptions(), labels={LABEL: "0123"}, owner="x/1-0", user_ns=False)
            on_cluster = cluster.run_pod(elsewhere)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(on_cluster, cluster.loop))
            async with backend():
                until(lambda: left not in cluster.running(), "the pod is deleted")
                assert "elsewhere" in cluster.running()

        await main()


def run(home: pytest.MonkeyPatch, body: Any, **settings: Any) -> None:
    async def main() -> None:
        async with FakeKubernetes(**settings) as cluster:
            home.setenv("KUBECONFIG", cluster.kubeconfig)
            await body(cluster)

    asyncio.run(main())


def test_a_pod_with_a_user_namespace_has_slots_at_userns_over_spdy(home: pytest.MonkeyPatch) -> None:
    """The other tests use WebSockets if kubectl is 1.31 or newer."""
    home.setenv("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false")

    async def body(cluster: FakeKubernetes) -> None:
        async with backend(rung=Rung.USERNS) as pods:
            assert pods.rung is Rung.USERNS
            slot = await pods.create(SlotSpec(), "t")
            await slot.write_text("a", "x" * 3_000_000)
            assert (await slot.execute("wc -c < a")).output.strip() == "3000000"
            snapshot = await pods.checkpoint(slot)
            fork = await pods.create(SlotSpec(), "fork", snapshot)
            assert (await fork.execute("wc -c < a")).output.strip() == "3000000"
        assert cluster.requests["get", "pods/exec"] == 0

    run(home, body)


def test_full_is_refused_with_the_level_that_pods_have(home: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        with pytest.raises(IsolationUnavailable, match="request userns"):
            await backend(rung=Rung.FULL).start()
        until_deleted = asyncio.create_task(deleted(cluster))
        await asyncio.wait_for(until_deleted, 20)

    run(home, body)


async def deleted(cluster: FakeKubernetes) -> None:
    while cluster.pods:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("cluster", "settings", "error", "reason"),
    [
        (
            {"version": "1.29"},
            {"image": "no:1"},
            SandboxError,
            r"image no:1 cannot start: ImagePullBack.*access denied",
        ),
        ({"images": {IMAGE: "/nowhere"}}, {}, SandboxError, r'StartError.*exec: "python3": executable file not found'),
        (OLD_IMAGE, {}, SandboxError, r"python3 is 3\.\d+ in the image, but the slot server needs 3.11"),
        (
            {"memory": 1 << 30},
            {"options": PodOptions(memory="2Gi", start_s=1.5)},
            SandboxError,
            r"not ready within 1.5 s \(kubernetes_start_s\): no node has room for it: 0/1 nodes.*Insufficient memory",
        ),
        ({"version": "1.31"}, USERNS, ConfigError, r"has dropped hostUsers and procMount.*1.33"),
        ({"version": "1.29"}, USERNS, ConfigError, r"too old.*unknown field.*appArmorProfile"),
        ({"pod_security": "baseline"}, USERNS, ConfigError, r"does not admit.*level baseline"),
        ({}, {"options": PodOptions(spec={"nodeSelectors": {}})}, ConfigError, r"pod_spec.*spec.nodeSelectors"),
        ({}, {"options": PodOptions(memory="much")}, ConfigError, r"resources.requests\[memory\]"),
    ],
    ids=[
        "image",
        "no-python",
        "old-python",
        "no-room",
        "no-user-namespaces",
        "old-cluster",
        "pod-security",
        "unknown-field",
        "invalid-quantity",
    ],
)
def test_a_pod_that_does_not_start_is_reported_with_the_reason_and_deleted(
    home: pytest.MonkeyPatch, cluster: Any, settings: Any, error: type[Exception], reason: str
) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        with pytest.raises(error, match=reason):
            await asyncio.wait_for(backend(**settings).start(), 20)
        await asyncio.wait_for(deleted(cluster), 20)

    if cluster is OLD_IMAGE and OLD_PYTHON is None:
        pytest.skip("there is no Python older than 3.11 here")
    run(home, body, **cluster)


@pytest.mark.parametrize(
    "right", [("list", "pods"), ("create", "pods"), ("get", "pods/exec"), ("delete", "pods")], ids="-".join
)
def test_a_missing_right_is_named(
    home: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, right: tuple[str, str]
) -> None:
    verb, resource = right

    async def body(cluster: FakeKubernetes) -> None:
        cluster.forbidden = {right, ("create", "pods/exec")} if resource == "pods/exec" else {right}
        found = caplog.text
        if verb == "delete":
            async with backend():
                pass
            found = caplog.text
            cluster.forbidden.clear()
        else:
            with pytest.raises((ConfigError, SandboxError)) as failure:
                await backend().start()
            found = str(failure.value)
        assert re.search(rf"may not (get|create|{verb}) {resource}", found)
        assert re.search(rf"verb (get|create|{verb}) on the resource {resource}", found)

    run(home, body)


def test_a_quota_is_a_failure_of_the_cluster_and_not_of_the_settings(home: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        cluster.quota = "pods, requested: pods=1, used: pods=2, limited: pods=2"
        with pytest.raises(SandboxError, match="exceeded quota: pods"):
            await backend().start()

    run(home, body)


def test_a_cluster_that_cannot_be_reached_is_named(home: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start(**settings: Any) -> None:
        await KubernetesBackend(Kubectl(**settings), image=IMAGE).start()

    with raises(ConfigError, "KUBECONFIG"):
        asyncio.run(start())
    away = {"apiVersion": "v1", "kind": "Config", "current-context": "away", "users": [{"name": "u", "user": {}}]}
    away["clusters"] = [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}]
    away["contexts"] = [{"name": "away", "context": {"cluster": "c", "user": "u"}}]
    (tmp_path / "config").write_text(json.dumps(away))
    home.setenv("KUBECONFIG", str(tmp_path / "config"))
    with raises(ConfigError):
        asyncio.run(start())
    with pytest.raises(ConfigError, match=r"no context other: .*get-contexts"):
        asyncio.run(start(context="other"))
    home.setenv("PATH", str(tmp_path))
    with raises(ConfigError):
        asyncio.run(start())


def deployed(name: str) -> Any:
    """A pod as a Deployment of a user makes it."""
    container = {"name": "main", "image": IMAGE, "command": ["python3", "-c", "import time; time.sleep(600)"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "slots"}},
        "spec": {"containers": [container]},
    }


@pytest.mark.slow
def test_existing_pods_are_used_and_left_and_their_replacements_are_found(home: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        for name in ("one", "two"):
            await cluster.run_pod(deployed(name))
        config = HermesAgentEnvConfig(kubernetes_selector="app=slots", kubernetes_slots_per_pod=2, isolation="confined")
        async with make_backend("kubernetes", config) as pods:
            slots = [await pods.create(SlotSpec(), f"t{number}") for number in range(4)]
            assert (pods.capacity, pods.stats()["containers"]) == (4, 2)
            await cluster.run_pod(deployed("three"))
            await cluster.evict("one")
            for slot in slots:
                await pods.destroy(slot)
            pods.relist_s = 0.0
            slots = [await pods.create(SlotSpec(), f"t{number}") for number in range(4)]
            assert all([(await slot.execute("true")).exit_code == 0 for slot in slots])
            with pytest.raises(ConfigError, match="leave out kubernetes_selector"):
                await pods.create(SlotSpec(image="other:1"), "t")
        assert cluster.running() == ["two", "three"]

    run(home, body)


def test_existing_pods_that_cannot_be_used_are_named(home: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        select = {"image": None, "existing": ExistingPods("app=slots")}
        with raises(ConfigError, "default", "app=slots"):
            await backend(**select).start()
        await cluster.run_pod(deployed("one"))
        with pytest.raises(SandboxError, match="container other is not"):
            await backend(image=None, existing=ExistingPods("app=slots", "other")).start()

    run(home, body)


def test_settings_that_exclude_each_other_are_refused() -> None:
    for settings, says in (
        ({"kubernetes_image": IMAGE, "kubernetes_selector": "app=slots"}, "set one of them"),
        ({"kubernetes_image": IMAGE, "kubernetes_pod_spec": {"hostPID": True}}, "cannot set hostPID"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_backend("kubernetes", HermesAgentEnvConfig(**settings))
    with raises(ConfigError):
        backend().place_spec(SlotSpec(image="/root"))
    with raises(ConfigError, "kubernetes_image", "kubernetes_selector"):
        backend(image=None).place_spec(SlotSpec())


@pytest.mark.parametrize("user_ns", [False, True])
def test_kubectl_knows_every_field_of_our_pods(user_ns: bool) -> None:
    """`kubectl set env` reads a pod into the types of Kubernetes, and drops fields that these do not have."""
    options = PodOptions(cpus=2, memory="8Gi", disk="50Gi", spec={"nodeSelector": {"pool": "slots"}})
    pod = manifest("x", IMAGE, options, labels={"a": "b"}, owner="o", user_ns=user_ns)
    command = ["kubectl", "set", "env", "--local", "--filename=-", "--output=json", "--dry-run=client", "X=Y"]
    done = subprocess.run(command, input=json.dumps(pod), capture_output=True, text=True, check=True)
    stored = json.loads(done.stdout)
    missing = list(lacking(pod, stored, "pod"))
    old = not {"pod.spec.hostUsers", "pod.spec.containers.0.securityContext.appArmorProfile"}.isdisjoint(missing)
    if old and user_ns:
        pytest.skip("this kubectl is older than the fields for user namespaces")
    assert missing == []


def lacking(value: Any, found: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in found:
                yield f"{path}.{name}"
            else:
                yield from lacking(inner, found[name], f"{path}.{name}")
    elif isinstance(value, list):
        for number, (inner, other) in enumerate(zip(value, found, strict=True)):
            yield from lacking(inner, other, f"{path}.{number}")
    elif value != found:
        yield path


@pytest.mark.slow
def test_a_pod_ends_by_itself_when_no_server_has_run_in_it_for_a_while(home: pytest.MonkeyPatch) -> None:
    async def body(cluster: FakeKubernetes) -> None:
        for name in ("used", "unused"):
            pod = manifest(name, IMAGE, PodOptions(), labels={}, owner="o", user_ns=False)
            pod["spec"]["containers"][0]["command"][-1] = "1"
            await cluster.run_pod(pod)
        reader = await asyncio.create_subprocess_exec(
            "kubectl", "exec", "--stdin", "used", "--", "cat", stdin=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            while "unused" in cluster.running():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert cluster.pods["default", "unused"].status["phase"] == "Succeeded"
        assert cluster.running() == ["used"]
        reader.kill()
        await reader.wait()
        async with asyncio.timeout(30):
            while cluster.running():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    run(home, body)
