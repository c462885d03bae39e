import os


def test_mode():
    assert os.stat("/app/deep/down").st_mode & 0o777 == 0o700
