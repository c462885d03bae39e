import sys

sys.path.insert(0, "/app")

from shapes import area


def test_area():
    assert area(3, 4) == 12
