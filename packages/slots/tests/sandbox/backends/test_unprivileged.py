"""The same suite as a user without root, where this machine lets one make user namespaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.somebody import run_suite

pytestmark = [pytest.mark.slots, pytest.mark.slow]


@pytest.mark.skipif(os.geteuid() != 0, reason="already runs without root")
@pytest.mark.timeout(180)
def test_the_suite_of_the_local_backend_without_root() -> None:
    only = "not model and not unprivileged and (isolation or layers or lifetime or userns)"
    run_suite(Path(__file__).parent, only, "-W", "ignore::hypothesis.errors.HypothesisWarning")


@pytest.mark.skipif(os.geteuid() != 0, reason="already runs without root")
@pytest.mark.timeout(180)
def test_the_confined_rung_without_root() -> None:
    run_suite(Path(__file__).with_name("test_local_confined.py"), "")


@pytest.mark.skipif(os.geteuid() != 0, reason="already runs without root")
@pytest.mark.timeout(180)
def test_the_store_of_prepared_workspaces_without_root() -> None:
    run_suite(Path(__file__).parents[1] / "snapshots/test_cache.py", "")
