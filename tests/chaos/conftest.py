"""How long the storm lasts: `pytest tests/chaos --chaos-leases 300`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-leases", type=int, default=60, help="leases per storm; 300 is the long form")
    parser.addoption("--chaos-seed", type=int, default=7, help="which processes are killed, and when")
