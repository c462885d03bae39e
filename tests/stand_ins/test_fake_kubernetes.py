"""The stand-in of a Kubernetes cluster, with the real kubectl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stand_ins.fake_kubernetes import fake_kubernetes

pytestmark = [
    pytest.mark.slots,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in's pods need root"),
]

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one", "labels": {"app": "x"}},
    "spec": {"containers": [{"name": "main", "image": "python:3.11", "command": ["sleep", "600"]}]},
}


@pytest.mark.parametrize("websockets", ["true", "false"])
def test_kubectl_makes_lists_uses_and_deletes_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, websockets: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets)
    with fake_kubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig)

        def kubectl(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=60)

        made = kubectl("create", "--validate=false", "--filename=-", given=json.dumps(POD))
        assert made.stdout == "pod/one created\n", made.stderr
        assert kubectl("create", "--validate=false", "--filename=-", given=json.dumps(POD)).returncode == 1
        assert kubectl("wait", "--for=condition=Ready", "pod/one", "--timeout=20s").returncode == 0
        assert kubectl("get", "pods", "--selector=app=x", "--output=name").stdout == "pod/one\n"
        assert kubectl("get", "pods", "--selector=app=y", "--output=name").stdout == ""
        data = "x" * 1_000_000
        script = "echo error >&2; wc -c; ps -e | wc -l; exit 3"
        done = kubectl("exec", "--stdin", "one", "--", "sh", "-c", script, given=data)
        count, processes = done.stdout.split()
        assert (done.returncode, int(count)) == (3, len(data))
        assert int(processes) < 10, "a pod has its own processes"
        assert done.stderr.startswith("error\n")
        assert kubectl("delete", "pod", "one", "--now").returncode == 0
        assert 'pods "one" not found' in kubectl("exec", "one", "--", "true").stderr
        assert not cluster.pods
