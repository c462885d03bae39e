"""A real Ray cluster on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
"""The arguments of a node."""


@contextmanager
def ray_cluster(num_cpus: int = 1) -> Iterator[Any]:
    """Run a cluster of one node, its head, and yield it. Without Ray, the test skips."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    head = {**SMALL, "num_cpus": num_cpus, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        made.shutdown()


def processes_with(mark: bytes) -> list[int]:
    """The ids of the processes whose command line contains `mark`."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in command.read_bytes():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found
