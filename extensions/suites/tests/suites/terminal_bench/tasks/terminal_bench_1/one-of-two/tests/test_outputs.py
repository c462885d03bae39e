from pathlib import Path


def test_a():
    assert Path("/app/a").exists()


def test_b():
    assert Path("/app/b").exists()
