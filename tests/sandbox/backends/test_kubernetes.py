"""The kubernetes backend with the real kubectl, against the stand-in of a cluster, whose pods really run.

Without kubectl, or without root for the stand-in's pods, these tests skip.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
from palaestra.cli.main import main as palaestra
from palaestra.core.errors import ConfigError, IsolationUnavailable, SandboxError
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.sandbox.backends.kubectl import Kubectl
from palaestra.sandbox.backends.kubernetes import KubernetesBackend
from palaestra.sandbox.backends.kubernetes_pod import LABEL, PodOptions, manifest
from palaestra.sandbox.backends.registry import make_backend
from palaestra.sandbox.slot import Backend, Rung, Slot, SlotSpec
from palaestra.testing.backend_conformance import BackendConformance
from palaestra.testing.fake_kubernetes import FakeKubernetes, fake_kubernetes
from palaestra.testing.fake_kubernetes_pod import PATH
from programs import killed_after, nap, until

pytestmark = [
    pytest.mark.slots,
    pytest.mark.xdist_group("backends"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in's pods need root"),
]

IMAGE = "python:3.11"
ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def slow():
    yield Task(id="a", prompt="Count the lines", files={"a.txt": "x\\n" * 3}, solution="sleep 2; wc -l < a.txt > b.txt")

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
    return KubernetesBackend(Kubectl(), **{"image": IMAGE, **settings})


def evict(cluster: FakeKubernetes, name: str) -> None:
    asyncio.run_coroutine_threadsafe(cluster.evict(name), cluster.loop).result(20)


class TestKubernetes(BackendConformance):
    cluster: ClassVar[FakeKubernetes]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with fake_kubernetes() as cls.cluster, pytest.MonkeyPatch.context() as patch:
            set_home(patch, tmp_path_factory.mktemp("home"), cls.cluster)
            yield from cls.running()
            until(lambda: not cls.cluster.pods, "the pods are deleted")

    @classmethod
    def make_backend(cls) -> Backend:
        return backend()

    async def end_place(self, slot: Slot) -> None:
        (name,) = self.cluster.running()
        evict(self.cluster, name)
