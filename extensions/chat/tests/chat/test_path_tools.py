"""The programs of a person's PATH in a real sandbox: those in folders of toolchains run; nothing else is visible."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palaestra_chat.path_tools import PathTools, tool_variables, tools_from
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec


def program(path: Path, text: str = "echo ran") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(tools: PathTools, home: Path, command: str) -> str:
    async def main() -> str:
        async with LocalBackend() as backend:
            spec = SlotSpec(mounts=tuple(tools.mounts), env=tool_variables(tools, home))
            return (await (await backend.create(spec, "t")).execute(command)).output

    return asyncio.run(main())


@pytest.mark.slots
def test_programs_of_toolchains_run_and_the_rest_of_the_home_directory_is_not_there(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "home" / "shop"
    program(home / ".local/share/uv/tools/fmt/bin/fmt", "echo formatted")
    program(home / ".local/bin/uv", "echo uv")
    (home / ".local/bin/fmt").symlink_to(home / ".local/share/uv/tools/fmt/bin/fmt")
    (home / ".local/bin/own").symlink_to(program(home / "src/own/own"))
    program(home / ".cargo/bin/cargo", 'echo "cargo $RUSTUP_HOME"')
    (home / ".rustup").mkdir()
    for secret in (".ssh/id", ".config/token", ".cargo/credentials.toml", "notes"):
        program(home / secret)
    program(project / ".venv/bin/tool")
    path = ":".join(str(home / each) for each in (".local/bin", ".cargo/bin", "shop/.venv/bin", "src/own"))
    tools = tools_from(f"{path}:/usr/bin:relative", home, project)
    assert tools.missing == [str(home / "src/own"), str(home / ".local/bin/own")]
    assert tools.path.startswith(":".join(path.split(":")[:3]) + ":/usr/bin:")
    touch = f"touch {home}/.local/bin/x {home}/.cargo/bin/x"
    output = run(tools, home, f"uv; fmt; cargo; own; find {home} -type f; {touch}")
    assert output.splitlines()[:3] == ["uv", "formatted", f"cargo {home}/.rustup"]
    shown = [line for line in output.splitlines() if line.startswith(str(home))]
    assert sorted(Path(line).name for line in shown) == ["cargo", "fmt", "uv"]
    assert output.count("Read-only file system") == 2


@pytest.mark.slots
def test_an_installation_of_python_keeps_its_packages(tmp_path: Path) -> None:
    home = tmp_path / "home"
    site = home / "miniconda3/lib/python3.11/site-packages"
    program(home / "miniconda3/bin/conda", f"cat {site}/mine.py")
    site.mkdir(parents=True)
    (site.parent / "os.py").write_text("")
    (site / "mine.py").write_text("mine\n")
    assert run(tools_from(f"{home}/miniconda3/condabin:{home}/miniconda3/bin", home, None), home, "conda") == "mine\n"


@pytest.mark.parametrize("chosen", [".ssh", ".config/bin", ".cargo", "private", "", ".local", ".local/share", ".gnupg"])
def test_a_project_cannot_choose_a_folder_by_path(tmp_path: Path, chosen: str) -> None:
    home = tmp_path / "home"
    program(home / chosen / "run")
    tools = tools_from(f"{home / chosen}:{tmp_path}", home, home / "shop")
    assert not tools.mounts
    assert set(tools.missing) == {str(home / chosen), str(tmp_path)}


def test_a_link_in_place_of_a_toolchain_leads_nowhere(tmp_path: Path) -> None:
    home = tmp_path / "home"
    program(home / ".ssh/run")
    (home / ".pyenv").symlink_to(home / ".ssh")
    program(home / ".local/bin/uv")
    (home / ".local/share").mkdir()
    (home / ".local/share/uv").symlink_to(home)
    (home / "tools").symlink_to(home / ".ssh")
    (home / "python").symlink_to(home / ".ssh")
    tools = tools_from(f"{home}/.pyenv:{home}/.local/bin", home, None)
    assert [mount.source for mount in tools.mounts] == [f"{home}/.local/bin"]
    assert tools.missing == [f"{home}/.ssh"]


def test_a_project_in_a_folder_of_tools_hides_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    program(home / ".pyenv/bin/pyenv")
    assert not tools_from(f"{home}/.pyenv/bin", home, home / ".pyenv/plugins").mounts
    assert not tools_from(f"{home}/.pyenv/bin", home, home / ".pyenv").mounts
