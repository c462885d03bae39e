"""What slots see of this machine when a program runs in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palaestra.agent.programs import NpmProgram


class Installed(NpmProgram):
    @property
    def folder(self) -> Path:
        return Path(self.package)


def test_a_node_in_a_home_does_not_show_the_home_to_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, agent = tmp_path / "home", tmp_path / "agent"
    for program in (home / "bin/node", agent / "node_modules/.bin/pi"):
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    (home / "lib").mkdir()
    monkeypatch.setenv("PATH", str(home / "bin"))
    mounts = asyncio.run(Installed("pi", str(agent), "1", ()).install())
    assert [mount.source for mount in mounts] == [str(agent), str(home / "bin"), str(home / "lib")]
