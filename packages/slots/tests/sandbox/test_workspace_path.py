"""A second path of the workspace: the same files under both, in commands, processes, shells, checkpoints and forks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Rung, SlotSpec, decode_lease, encode_lease

pytestmark = pytest.mark.slots

PLACES = ("/home/user/my shop", "/tmp/a/b", "/usr/local/src/p", "/data")


def with_backend(rung: Rung, body: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def main() -> None:
        backend = LocalBackend(rung=rung)
        try:
            await backend.start()
        except (IsolationUnavailable, SandboxError) as error:
            pytest.skip(str(error))
        try:
            await body(backend)
        finally:
            await backend.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS])
def test_the_workspace_has_both_paths_in_every_slot_that_starts_from_it(rung: Rung) -> None:
    async def body(backend: LocalBackend) -> None:
        for place in PLACES:
            slot = await backend.create(SlotSpec(workspace=place), "t")
            assert slot.workspace_dir == place
            done = await slot.execute("pwd; realpath .; echo one > /workspace/a; mkdir d; cat a; cd /workspace && ls")
            assert done.output == f"{place}\n{place}\none\na\nd\n"
            await slot.write_bytes(f"{place}/b", b"two")
            assert await slot.read_bytes("b") == await slot.read_bytes("/workspace/b") == b"two"
            assert (await slot.execute("pwd", cwd=f"{place}/d")).output == f"{place}/d\n"
            process = await slot.spawn("pwd")
            await process.wait()
            assert (await process.read()).data == f"{place}\n".encode()
            assert (await (await slot.shell()).run("pwd")).output == f"{place}\n"
            snapshot = await backend.checkpoint(slot)
            paths = {change.path for change in await backend.changes(snapshot)}
            assert {"/workspace/a", "/workspace/b", "/workspace/d"} <= paths
            assert not any(path.startswith(place) for path in paths)
            again = await backend.create(snapshot.spec, "again", snapshot)
            assert (await again.execute("pwd; cat a b; ls /workspace")).output == f"{place}\none\ntwoa\nb\nd\n"

    with_backend(rung, body)


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS])
def test_nothing_around_the_second_path_is_visible(rung: Rung, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    project = tmp_path / "project"
    project.mkdir()
    (project / "theirs").write_text("host")

    async def body(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(workspace=str(project)), "t")
        done = await slot.execute(f"ls -A . {tmp_path}; echo x > new; echo x > ../beside")
        assert done.output == f".:\n\n{tmp_path}:\nproject\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["project", "secret"]
        assert [path.name for path in project.iterdir()] == ["theirs"]

    with_backend(rung, body)


def test_a_link_in_place_of_the_workspace_leads_nowhere_outside_the_slot() -> None:
    async def body(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(), "t")
        await slot.execute("cd /; rm -rf /workspace; ln -s /../../host/etc /workspace; ln -s /etc /home/user")
        spec = SlotSpec(workspace="/home/user/shop")
        again = await backend.create(spec, "again", await backend.seal(slot))
        done = await again.execute("pwd; ls -A; echo x > x; ls /workspace")
        assert done.output == "/home/user/shop\nx\n"

    with_backend(Rung.USERNS, body)


@pytest.mark.parametrize(
    "path",
    [
        "/", "/usr", "/usr/local", "/usr/local/bin", "/usr/lib/x/y", "/etc", "/etc/app", "/workspace", "/workspace/x",
        "/tmp", "/root", "/home", "/var/lib", "/proc/x", "/dev/shm/x", "/lib64/x", "relative", "/a/../etc", "/a//b", "",
    ],
)  # fmt: skip
def test_a_part_of_the_system_is_refused(path: str) -> None:
    if not path:
        assert SlotSpec(workspace=path).workspace == ""
        return
    with pytest.raises(ConfigError, match="workspace"):
        SlotSpec(workspace=path)


def test_a_level_without_mounts_refuses_it() -> None:
    async def body(backend: LocalBackend) -> None:
        assert not backend.places_workspace
        with pytest.raises(ConfigError, match="userns or full"):
            await backend.create(SlotSpec(workspace="/home/user/shop"), "t")
        assert (await backend.create(SlotSpec(), "t")).workspace_dir == "/workspace"

    with_backend(Rung.NONE, body)


def test_a_service_keeps_the_path_of_its_slots() -> None:
    spec = SlotSpec(workspace="/home/user/shop")
    assert decode_lease(encode_lease("t", spec)) == ("t", spec)


def test_a_slot_begins_with_directories_and_changes_only_its_own(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "theirs").write_text("host\n")
    copies = tuple(Mount(str(tmp_path / name), f"/workspace/{name}") for name in ("a", "b/c"))
    spec = SlotSpec(workspace="/home/user/shop", copies=copies)
    assert decode_lease(encode_lease("t", spec)) == ("t", spec)

    async def body(backend: LocalBackend) -> None:
        if not backend.copies_folders:
            with pytest.raises(ConfigError, match="begin with"):
                await backend.create(replace(spec, workspace=""), "t")
            return
        slot = await backend.create(spec, "t")
        command = "cat a/theirs /workspace/b/c/theirs; echo more >> a/theirs; rm b/c/theirs; echo new > b/c/new"
        assert (await slot.execute(command)).output == "host\nhost\n"
        snapshot = await backend.checkpoint(slot)
        await slot.execute("rm -rf a/* b/c/*")
        again = await backend.create(snapshot.spec, "again", snapshot)
        assert (await again.execute("cat a/* b/c/*; ls -A b/c")).output == "host\nmore\nnew\nnew\n"
        other = Mount(str(tmp_path / "b"), "/workspace/later")
        more = replace(snapshot.spec, copies=(other, *copies))
        third = await backend.create(more, "third", replace(snapshot, continued=True))
        assert (await third.execute("cat a/* later/c/*")).output == "host\nmore\nhost\n"
        assert [path.read_text() for path in sorted(tmp_path.rglob("theirs"))] == ["host\n"] * 2
        assert not list(tmp_path.rglob("new"))

    for rung in (Rung.FULL, Rung.USERNS, Rung.NONE):
        with_backend(rung, body)


def test_a_link_in_place_of_such_a_directory_leads_nowhere_outside_the_slot(tmp_path: Path) -> None:
    async def body(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(), "t")
        await slot.execute("ln -s /../../../../slots a; ln -s /etc b; mkdir /home/user")
        snapshot = await backend.seal(slot)
        copies = (Mount(str(tmp_path), "/workspace/a"), Mount(str(tmp_path), "/workspace/b"))
        again = await backend.create(SlotSpec(copies=copies), "again", snapshot)
        assert (await again.execute("echo x > a/x; ls -l / | grep -c slots; cat a/x; ls -A b")).output == "0\nx\n"

    with_backend(Rung.FULL, body)
