"""Recipes and the store: made once, kept, shared, evicted, rebuilt; never half."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, PrepareError
from palaestra_slots.core.types import JSON, Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Rung, SlotSpec, Snapshot
from palaestra_slots.sandbox.snapshots.cache import Prepared, Put, Recipe, RunStep
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

pytestmark = pytest.mark.slots

MADE = Recipe(
    steps=(
        Put("tool.sh", b"echo tool", mode=0o755),
        RunStep(
            "cat /proc/sys/kernel/random/uuid > made; mkdir d; ln -s made link; ln made hard; mkfifo p; touch -d @5 old"
        ),
        RunStep(
            "rm /etc/magic.mime /etc/mime.types; rm -r /etc/ssl; mkdir /etc/ssl; echo mine > /etc/ssl/mine; chmod 0 d"
        ),
    )
)
SHOW = "cat made; ./tool.sh; stat -c '%n %F %a %h %u %Y' * | grep -v made; ls -A /etc /etc/ssl; readlink link"

Body = Callable[[LocalBackend], Awaitable[None]]


def on(rung: Rung, *bodies: Body) -> None:
    """Each body with a backend, and so a slot server, of its own."""

    async def main() -> None:
        for body in bodies:
            try:
                async with LocalBackend(rung=rung) as backend:
                    await body(backend)
            except IsolationUnavailable as error:
                pytest.skip(str(error))

    asyncio.run(main())


async def shown(backend: LocalBackend, snapshot: Snapshot, command: str = SHOW) -> str:
    slot = await backend.create(SlotSpec(), "show", snapshot)
    try:
        return (await slot.execute(command)).output
    finally:
        await backend.destroy(slot)


def test_without_layers_a_recipe_is_prepared_in_every_run(tmp_path: Path) -> None:
    async def body(backend: LocalBackend) -> None:
        prepared = Prepared(backend, SnapshotStore(tmp_path / "store").open)
        recipe = Recipe(steps=(Put("f", b"x"), RunStep("echo y >> f")))
        assert await prepared.get(recipe) == await prepared.get(recipe)
        assert await shown(backend, await prepared.get(recipe), "cat f") == "xy\n"
        assert SnapshotStore(tmp_path / "store").entries() == []

    on(Rung.CONFINED, body)


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
def test_what_one_run_has_prepared_the_next_one_finds(rung: Rung, tmp_path: Path) -> None:
    seen: list[str] = []

    async def body(backend: LocalBackend) -> None:
        prepared = Prepared(backend, SnapshotStore(tmp_path / "store").open)
        first, again = await asyncio.gather(prepared.get(MADE), prepared.get(MADE))
        assert first == again
        seen.append(await shown(backend, first))

    on(rung, body, body)
    assert seen[0] == seen[1]
    assert "mine" in seen[0]
    assert len(SnapshotStore(tmp_path / "store").entries()) == 1


def test_a_slot_of_a_kept_snapshot_changes_nothing_but_itself(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")

    async def fill(backend: LocalBackend) -> None:
        await Prepared(backend, store.open).get(MADE)

    async def body(backend: LocalBackend) -> None:
        snapshot = await Prepared(backend, store.open).get(MADE)
        before = await shown(backend, snapshot)
        await shown(backend, snapshot, "rm -rf /workspace/*; echo x > /etc/ssl/mine; echo new > made")
        assert await shown(backend, snapshot) == before
        slot = await backend.create(SlotSpec(), "on top", snapshot)
        await slot.execute("echo top > made")
        sealed = await backend.seal(slot)
        assert [change.path for change in await backend.changes(sealed)] == ["/workspace/made"]
        assert await shown(backend, sealed, "cat made") == "top\n"

    on(Rung.FULL if os.geteuid() == 0 else Rung.USERNS, fill, body)


def test_what_is_lost_is_made_again(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")

    async def body(backend: LocalBackend) -> None:
        prepared = Prepared(backend, store.open)
        first = await shown(backend, await prepared.get(MADE), "cat made")
        os.kill(backend.server_pid, signal.SIGKILL)
        while (await _outcome(shown(backend, Snapshot("", (), SlotSpec()), "true")))[:4] == "Slot":
            pass
        assert await shown(backend, await prepared.get(MADE), "cat made") == first
        await backend.aclose()
        assert store.remove(store.entries()[0].key)
        await backend.start()
        assert await shown(backend, await prepared.get(MADE), "cat made") != first

    on(Rung.USERNS, body)


async def _outcome(call: Awaitable[object]) -> str:
    try:
        await call
    except Exception as error:
        return type(error).__name__
    return ""


async def test_two_runs_prepare_a_recipe_once(tmp_path: Path) -> None:
    async def one() -> str:
        async with LocalBackend(rung=Rung.USERNS) as backend:
            return await shown(
                backend, await Prepared(backend, SnapshotStore(tmp_path / "s").open).get(MADE), "cat made"
            )

    assert len(set(await asyncio.gather(one(), one()))) == 1


def test_what_is_in_use_is_not_evicted(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store", max_bytes=150_000)
    recipes = [Recipe(steps=(Put("data", os.urandom(100_000)),)) for _ in range(2)]

    async def body(backend: LocalBackend) -> None:
        for recipe in recipes:
            await Prepared(backend, store.open).get(recipe)
        assert len(store.entries()) == 1  # whoever has made one stands on its own copy, not on the disk
        store.max_bytes = 250_000
        held = [await Prepared(backend, store.open).get(recipe) for recipe in (*recipes, *recipes)][2:]
        store.max_bytes = 0
        assert store.evict() == []
        await backend.forget(held[0])
        assert store.evict() == [recipes[0].key(backend.rung)]

    on(Rung.USERNS, body)


def test_a_caller_that_gives_up_while_its_snapshot_is_kept_leaves_it_whole(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(SnapshotStore):
        def keep(self, path: Path, key: str, recipe: JSON) -> None:
            begun.set()
            go_on.wait()
            super().keep(path, key, recipe)

    store = Slow(tmp_path / "store")

    async def body(backend: LocalBackend) -> None:
        asking = asyncio.create_task(Prepared(backend, store.open).get(MADE))
        await asyncio.to_thread(begun.wait)
        asking.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        (entry,) = store.entries()
        assert store.is_whole(entry.key)
        assert store.halves() == []

    on(Rung.USERNS, body)


def test_what_is_taken_is_the_callers_to_forget(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store", max_bytes=1 << 30)

    async def body(backend: LocalBackend) -> None:
        async def never() -> Snapshot:
            raise AssertionError("it is there")

        prepared = Prepared(backend, store.open)
        await prepared.get(MADE)
        key = MADE.key(backend.rung)
        first, second = await prepared.take(MADE, never), await prepared.take(MADE, never)
        assert (first.found, second.found) == (True, True)
        await backend.forget(first.snapshot)
        assert not store.remove(key)
        await backend.forget(second.snapshot)
        assert store.remove(key)

    on(Rung.USERNS, body)


async def test_only_halves_that_nobody_holds_are_swept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    (store.folder / "new-dead" / "layers").mkdir(parents=True)
    (store.folder / "new-dead" / "layers").chmod(0)
    async with store.new() as path:
        assert store.sweep() == 1
        assert path.exists()
    assert list(store.folder.iterdir()) == []


def test_the_key_holds_all_that_goes_in() -> None:
    base = Recipe(steps=(Put("a", b"1"), RunStep("true")))
    others = [
        Recipe(steps=(Put("a", b"2"), RunStep("true"))), Recipe(steps=(Put("a", b"1", 0o700), RunStep("true"))),
        Recipe(steps=(RunStep("true"), Put("a", b"1"))), Recipe(steps=base.steps, version="2"),
        Recipe(SlotSpec(image="/opt"), base.steps), Recipe(SlotSpec(env=(("A", "1"),)), base.steps),
        Recipe(SlotSpec(limits=Limits(pids=9)), base.steps),
        Recipe(SlotSpec(mounts=(Mount("/opt", "/o"),)), base.steps),
    ]  # fmt: skip
    keys = {recipe.key(Rung.FULL) for recipe in (base, *others)} | {base.key(Rung.USERNS)}
    assert len(keys) == 10
    assert base.key(Rung.FULL) == Recipe(steps=(Put("a", b"1"), RunStep("true", timeout_s=9)), name="n").key(Rung.FULL)


def test_a_step_that_fails_says_which_and_leaves_no_slot(tmp_path: Path) -> None:
    async def body(backend: LocalBackend) -> None:
        prepared = Prepared(backend, SnapshotStore(tmp_path / "store").open)
        with pytest.raises(PrepareError, match=r"2 of 2 \('ls missing'\)(.|\n)*No such file"):
            await prepared.get(Recipe(steps=(RunStep("true"), RunStep("ls missing"))))
        assert backend.stats()["slots"] == 0
        assert SnapshotStore(tmp_path / "store").entries() == []

    on(Rung.USERNS, body)


def test_a_store_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        SnapshotStore(tmp_path / "open").open()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        SnapshotStore(tmp_path / "file").open()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_slots_cannot_start_from_is_named_and_done_without(tmp_path: Path) -> None:
    """The kernel stacks two overlays at most, and the store lies in two already."""
    below, mounted = tmp_path, []
    for name in ("one", "two"):
        parts = {part: tmp_path / f"{name}-{part}" for part in ("disk", "merged")}
        for part in parts.values():
            part.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(parts["disk"])], check=True)
        mounted.append(parts["disk"])
        (parts["disk"] / "upper").mkdir()
        (parts["disk"] / "work").mkdir()
        options = f"lowerdir={below},upperdir={parts['disk']}/upper,workdir={parts['disk']}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "none", str(parts["merged"])], check=True)
        below = parts["merged"]
        mounted.append(below)
    heard: list[str] = []

    async def body(backend: LocalBackend) -> None:
        prepared = Prepared(
            backend, SnapshotStore(below / "store").open, trouble=lambda error: heard.append(str(error))
        )
        assert await shown(backend, await prepared.get(Recipe(steps=(Put("f", b"x"),))), "cat f") == "x"

    try:
        on(Rung.FULL, body, body, body)
        assert [("Invalid argument" in text, str(below) in text) for text in heard] == [(True, True)] * 2
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_full_disk_is_named_and_nothing_half_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(tmp_path / "disk")], check=True)
    try:
        store = SnapshotStore(tmp_path / "disk")

        async def body(backend: LocalBackend) -> None:
            with pytest.raises(ConfigError, match=r"disk.*No space.*another folder"):
                await Prepared(backend, store.open).get(Recipe(steps=(Put("big", bytes(3 << 20)),)))

        on(Rung.USERNS, body)
        assert [path.name for path in store.folder.iterdir() if not path.name.startswith("turn-")] == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)
