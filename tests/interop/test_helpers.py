"""The helpers that environments import return the same as those of the original runtime."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from interop.peer import OURS, SCRIPTS, THEIRS, ended
from palaestra_slots.core.types import JSON

RUN = "import palaestra.compat, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, JSON], dict[str, JSON]]:
    """What the script prints under ours and under theirs."""
    out, script = tmp_path_factory.mktemp("helpers"), SCRIPTS / "helpers.py"

    async def go() -> list[dict[str, JSON]]:
        found = []
        for name, command in (("ours", [OURS, "-c", RUN, script]), ("theirs", [THEIRS, script])):
            done = await ended([*command, folder], out / name)
            assert done.code == 0, done.said
            found.append(json.loads(done.said.splitlines()[-1]))
        return found

    ours, theirs = asyncio.run(go())
    return ours, theirs


@pytest.mark.parametrize(
    "name",
    [
        *("rows", "texts", "open", "special", "sizes", "ids", "tokens", "calls", "any calls", "tags", "stripped"),
        *("truncated", "steps", "rewards", "stats", "spread", "advantages None", "advantages 0.5", "pass", "best"),
    ],
)
def test_a_helper_returns_the_same(name: str, both: tuple[dict[str, JSON], dict[str, JSON]]) -> None:
    ours, theirs = both
    assert ours[name] == theirs[name]
    assert theirs[name]
