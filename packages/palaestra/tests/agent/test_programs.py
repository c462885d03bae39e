"""What slots see of this machine when a program runs in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra.agent.programs import NpmProgram, PipProgram
from palaestra_slots.core.errors import ConfigError


class Installed(NpmProgram):
    @property
    def folder(self) -> Path:
        return Path(self.package)


async def test_a_node_in_a_home_does_not_show_the_home_to_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, agent = tmp_path / "home", tmp_path / "agent"
    for program in (home / "bin/node", agent / "node_modules/.bin/pi"):
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    (home / "lib").mkdir()
    monkeypatch.setenv("PATH", str(home / "bin"))
    mounts = await Installed("pi", str(agent), "1", ()).install()
    assert [mount.source for mount in mounts] == [str(agent), str(home / "bin"), str(home / "lib")]


@pytest.mark.slow
async def test_a_program_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")

    class Missing(PipProgram):
        @property
        def folder(self) -> Path:
            return tmp_path / "agent"

    program = Missing("mine", "no-such-agent-of-mine", "1.0", "mine", ())
    with pytest.raises(ConfigError, match="no-such-agent-of-mine"):
        await program.install()


@pytest.mark.parametrize("ending", ["exit 1", "exit 127", "kill -KILL $$", "kill -TERM $$", "exec sleep 60"])
def test_an_interrupted_installation_is_made_again_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    tools, agent, again = tmp_path / "bin", tmp_path / "agent", tmp_path / "again"
    tools.mkdir()
    npm = f"""#!/bin/sh
mkdir -p node_modules/.bin; touch node_modules/.bin/pi
[ -e {again} ] && exit
touch {again} half; ln -s / link; {ending}
"""
    for name, text in (("node", ""), ("npm", npm)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    program = Installed("pi", str(agent), "1", ())

    async def interrupted() -> None:
        async with asyncio.timeout(1):
            await program.install()

    with pytest.raises((ConfigError, TimeoutError)):
        asyncio.run(interrupted())
    assert program.binary.exists()
    asyncio.run(program.install())
    assert program.binary.exists()
    assert {each.name for each in agent.iterdir()} == {"node_modules", "install.lock"}
    again.unlink()  # another installation would fail
    asyncio.run(program.install())


async def test_an_agent_names_the_python_that_it_needs() -> None:
    program = PipProgram("mine", "mine", "1.0", (), python="3.99")
    with raises(ConfigError, "mine", "3.99"):
        await program.install()


async def test_slots_see_the_python_that_made_an_agents_environment(tmp_path: Path) -> None:
    python, agent = tmp_path / "python-3.13", tmp_path / "agent"
    for folder in (python / "bin", python / "lib", agent / "bin"):
        folder.mkdir(parents=True)
    (agent / "bin/mine").touch(0o755)
    (agent / "pyvenv.cfg").write_text(f"home = {python}/bin\nversion = 3.13.0\n")

    class Made(PipProgram):
        @property
        def folder(self) -> Path:
            return agent

    mounts = await Made("mine", "mine", "1.0", ()).install()
    assert [mount.source for mount in mounts] == [str(agent), str(python / "bin"), str(python / "lib")]


def test_an_agent_that_needs_bun_finds_it_beside_itself() -> None:
    program = NpmProgram("mine", "mine", "1", (), bun="1.4.5", node="22.23.3")
    assert program.path()["PATH"].split(":")[0] == str(program.folder / "node_modules/.bin")
