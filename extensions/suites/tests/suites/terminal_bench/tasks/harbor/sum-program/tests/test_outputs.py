import subprocess

import pytest


@pytest.mark.parametrize(("given", "wanted"), [("1 2 3", "6"), ("", "0"), ("-4\n5", "1")])
def test_sums(given, wanted):
    done = subprocess.run(["python3", "/app/total.py"], input=given, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == wanted
