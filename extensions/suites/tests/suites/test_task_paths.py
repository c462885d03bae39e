"""What a published task is about, read from its own texts."""

from __future__ import annotations

import pytest

from palaestra_suites.task_paths import scope_of


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("Write it to /app/answer.txt.", ("/app/answer.txt",)),
        ("Put the keys into ~/.ssh/config and $HOME/notes", ("/home/user/.ssh/config", "/home/user/notes")),
        ("See https://host/usr/share/doc and a/b/c, and look around in /etc and /usr/local/bin", ()),
        ('assert Path("/etc/nginx/nginx.conf").is_file()', ("/etc/nginx/nginx.conf",)),
        ("cat /tests/expected.txt /proc/self/mem /solution/solve.sh", ()),
        ("#!/bin/bash\n/usr/bin/python3 -m x > /srv/data/x; ls /usr/lib/python3", ("/srv/data/x",)),
        ("make -C /app/src install", ("/app/src",)),
    ],
)
def test_a_task_is_about_the_paths_that_it_names(text: str, paths: tuple[str, ...]) -> None:
    assert scope_of([text], "/home/user").paths == paths


def test_new_programs_are_named_by_words_and_paths() -> None:
    words = scope_of(["Build pmars.", "run(['/usr/local/bin/x-tool', '--help'])", "g++ -o a"]).words
    assert {"pmars", "x-tool", "g++"} <= words
    assert "jq" not in words
