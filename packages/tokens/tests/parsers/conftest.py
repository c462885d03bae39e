"""`--hypothesis-profile=thorough` writes 10,000 outputs per format instead of 100, and tries as many examples.

Half an hour of one core; tests have no time limit then.
"""

import pytest
from hypothesis import settings

THOROUGH = 100_000

settings.register_profile("thorough", max_examples=THOROUGH, deadline=None, derandomize=False)


def pytest_itemcollected(item: pytest.Item) -> None:
    if settings.default.max_examples >= THOROUGH:
        item.add_marker(pytest.mark.timeout(0))
