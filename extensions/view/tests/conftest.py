"""One real run for all tests of the viewer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .fixing import real_run


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run: 3 tasks, 4 rollouts each, with exact tokens."""
    return asyncio.run(real_run(tmp_path_factory.mktemp("real"), tasks=3, group_size=4))
