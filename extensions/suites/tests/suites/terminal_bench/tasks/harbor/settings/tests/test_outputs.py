import os


def test_colour():
    with open("/app/colour.txt") as file:
        assert file.read().split() == [os.environ["WANTED"], "noted"]
