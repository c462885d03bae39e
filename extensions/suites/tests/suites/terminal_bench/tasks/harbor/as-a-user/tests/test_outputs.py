import pwd
from pathlib import Path


def test_who():
    path = Path("/srv/worker/who.txt")
    assert path.read_text().strip() == "worker"
    assert path.owner() == "worker"
    assert pwd.getpwuid(path.stat().st_uid).pw_name == "worker"
