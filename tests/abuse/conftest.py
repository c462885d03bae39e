"""Every case runs on every protecting rung that this machine has, and must say which of them contain it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from abuse.arena import Arena, Ground
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.slot import Rung

RUNGS = (Rung.FULL, Rung.USERNS, Rung.CONFINED)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contained_on(*rungs): the rungs that promise to hold this case")


@pytest.fixture(scope="session", params=RUNGS, ids=lambda rung: str(rung.label))
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """The backend of one rung."""
    made = Ground(request.param)
    try:
        made.runner.run(made.backend.start())
    except IsolationUnavailable as error:
        made.close()
        if "slot server has ended" in str(error):  # a bug of ours, not a lack of the machine's
            raise
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def arena(request: pytest.FixtureRequest, ground: Ground) -> Arena:
    """The place of one case. A case that does not name its rungs is a mistake."""
    marker = request.node.get_closest_marker("contained_on")
    assert marker is not None, f"{request.node.name} does not say which rungs contain it"
    return Arena(ground, ground.rung.label in marker.args)
