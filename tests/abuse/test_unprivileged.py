"""The same cases as a user without root: there the rung `userns` stands alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.somebody import run_suite

pytestmark = [pytest.mark.slots, pytest.mark.slow]


@pytest.mark.skipif(os.geteuid() != 0, reason="already runs without root")
@pytest.mark.timeout(180)
def test_the_cases_without_root() -> None:
    run_suite(Path(__file__).parent, "userns and not unprivileged")
