"""What slots see of this machine when a program runs in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palaestra.agent.programs import NpmProgram, PipProgram
from palaestra.core.errors import ConfigError


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


@pytest.mark.slow
def test_a_program_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")

    class Missing(PipProgram):
        @property
        def folder(self) -> Path:
            return tmp_path / "agent"

    program = Missing("mine", "no-such-agent-of-mine", "1.0", "mine", ())
    with pytest.raises(ConfigError, match="no-such-agent-of-mine"):
        asyncio.run(program.install())
