"""How many places of a run are tried: `pytest tests/crash --crash-points 250`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-points", type=int, default=9, help="places in a run at which something is killed")
