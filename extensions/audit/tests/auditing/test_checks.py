"""What the checks of an audit decide without a trial."""

from __future__ import annotations

import pytest

from palaestra_audit.checks import _names


@pytest.mark.parametrize(
    ("solution", "place", "written", "named"),
    [
        ("mv a.txt b.txt", "/workspace/a.txt", "/workspace/b.txt", True),
        ("cp -r template/. out", "/workspace/template/x.py", "/workspace/out/x.py", True),
        ("cat /opt/data/x.csv > x.csv", "/opt/data/x.csv", "/workspace/x.csv", True),
        ("printf 'a fox' > fox.txt", "/workspace/.hidden/fox", "/workspace/fox.txt", False),
        ("printf x > src/a.py", "/workspace/src/old/a.py", "/workspace/src/a.py", False),
        ("cp x a.py", "the history of /workspace", "/workspace/a.py", False),
    ],
)
def test_a_file_that_the_solution_names_is_no_leak(solution: str, place: str, written: str, named: bool) -> None:
    assert _names(solution, place, written) is named
