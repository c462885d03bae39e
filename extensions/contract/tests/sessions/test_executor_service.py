"""The executor service over HTTP, with real slots: sharing, order, leases, artifacts, tokens, the end."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import tarfile
from collections.abc import Awaitable, Callable

import pytest

from golden_messages import check_message
from palaestra.tools.registry.build import build_tool_registry
from palaestra_contract.tools.executor import ToolExecutor
from palaestra_contract.tools.executor_service import ExecutorService
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Slot
from sessions.asking import Client
from sessions.held_clock import HeldClock

pytestmark = pytest.mark.slots


class Scene:
    """A running service."""

    def __init__(self, service: ExecutorService, executor: ToolExecutor, clock: HeldClock, url: str) -> None:
        self.service, self.executor, self.clock, self.url = service, executor, clock, url
        self.client = Client(url)

    async def slot_of(self, trajectory_id: str) -> Slot:
        """The slot of a call that is under way, once it has it."""
        while (slot := self.executor.slot_of(trajectory_id)) is None:  # noqa: ASYNC110 - passes the turn on
            await asyncio.sleep(0)
        return slot


Play = Callable[[Scene], Awaitable[None]]


def run(play: Play, *, slots: int = 8, token: str | None = None) -> None:
    async def main() -> None:
        clock = HeldClock()
        config = SlotPoolConfig(max_slots=slots, acquire_timeout=0.05)
        async with (
            SlotPool(config, LocalBackend()) as pool,
            ToolExecutor(pool, build_tool_registry(["default"])) as executor,
        ):
            service = ExecutorService(executor, pool, token=token, lease_s=100.0, clock=clock)
            async with service.serving() as url:
                scene = Scene(service, executor, clock, url)
                async with scene.client:
                    await play(scene)

    try:
        asyncio.run(main())
    except IsolationUnavailable as error:
        pytest.skip(str(error))


def test_clients_share_slots_by_trajectory_and_release_ends_them() -> None:
    async def play(scene: Scene) -> None:
        one = scene.client
        async with Client(scene.url) as other:
            assert await one.get("/health") == (200, {"status": "ok"})
            await one.bash("t1", "echo first > a.txt")
            assert await other.bash("t1", "cat a.txt") == "first\n"
            assert await other.bash("t2", "cat a.txt 2>/dev/null || echo none") == "none\n"
            failed = await one.call("t1", "bash", {"command": "exit 3"})
            assert (failed["success"], failed["metadata"]["exit_code"]) == (False, 3)
            policy = await one.call("t1", "terminal", {"command": "true", "allow_network": True})
            assert policy["success"]
            assert "Unknown tool" in (await one.call("t1", "nothing", {}))["error"]
            status, told = await one.get("/status")
            assert status == 200
            assert told["pool"]["acquired_slots"] == 2
            assert (told["total_requests"], told["total_errors"], told["queue_size"]) == (6, 2, 0)
            assert await one.post("/release", {"trajectory_id": "t1", "reset_workspace": True}) == (
                200,
                {"status": "ok"},
            )
            assert await other.bash("t1", "ls") == ""

    run(play)


def test_a_call_that_sleeps_holds_up_no_other_and_ends_with_its_client() -> None:
    async def play(scene: Scene) -> None:
        sleeping = asyncio.create_task(scene.client.bash("slow", "echo begun > begun; exec sleep 600"))
        others = [scene.client.bash(f"t{n}", f"echo {n}") for n in range(5)]
        assert await asyncio.gather(*others) == [f"{n}\n" for n in range(5)]
        assert not sleeping.done()
        assert scene.executor.queue_size() == 1
        sleeping.cancel()
        await asyncio.gather(sleeping, return_exceptions=True)
        assert await scene.client.bash("slow", "while pgrep -x sleep > /dev/null; do :; done; echo gone") == "gone\n"
        short = await scene.client.call("slow", "bash", {"command": "sleep 600", "timeout": 600}, timeout_s=1)
        assert (short["success"], short["metadata"]["exit_code"]) == (False, 124)

    run(play)


def test_a_client_that_never_comes_back_loses_its_slot_and_learns_of_it() -> None:
    async def play(scene: Scene) -> None:
        assert await scene.client.bash("gone", "echo kept > a; echo here") == "here\n"
        status, refused = await scene.client.post(
            "/execute", {"trajectory_id": "next", "tool": {"name": "bash", "arguments": {"command": "ls"}}}
        )
        assert (status, refused["error"]) == (503, "AcquireTimeout")
        await scene.clock.pass_by(99.0)
        assert await scene.client.bash("gone", "cat a") == "kept\n"
        await scene.clock.pass_by(99.0)
        assert scene.executor.slot_of("gone") is not None
        await scene.clock.pass_by(2.0)
        assert scene.executor.slot_of("gone") is None
        assert await scene.client.bash("next", "echo mine") == "mine\n"
        status, late = await scene.client.post(
            "/execute", {"trajectory_id": "gone", "tool": {"name": "bash", "arguments": {"command": "ls"}}}
        )
        assert (status, late["error"]) == (409, "StaleLease")
        check_message(late["detail"], "Release")
        assert (await scene.client.post("/artifacts/list", {"trajectory_id": "gone"}))[0] == 409
        for trajectory_id in ("gone", "next"):
            await scene.client.post("/release", {"trajectory_id": trajectory_id})
        assert await scene.client.bash("gone", "ls") == ""

    run(play, slots=1)


def test_a_call_under_way_does_not_expire() -> None:
    async def play(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.client.bash("t1", "while [ ! -e go ]; do sleep 0.01; done; echo done"))
        slot = await scene.slot_of("t1")
        await scene.clock.pass_by(1000.0)
        await slot.write_text("go", "")
        assert await waiting == "done\n"

    run(play)


def test_artifacts_come_whole_or_with_the_status_that_says_why_not() -> None:
    data = bytes(range(256)) * 40

    async def play(scene: Scene) -> None:
        ask = scene.client.post
        assert (await ask("/artifacts/read", {"trajectory_id": "t1", "path": "a"}))[0] == 404  # nothing has run
        await scene.client.bash(
            "t1",
            "mkdir -p 'd/e f'; echo text > d/a.txt; echo b > 'd/e f/b'; mkfifo d/fifo; chmod 750 d/a.txt; "
            "ln -s /etc/passwd out; ln -s /workspace/d/a.txt in; ln -s . loop",
        )
        slot = scene.executor.slot_of("t1")
        assert slot is not None
        await slot.write_bytes("blob.bin", data)

        async def read(path: str, **more: JSON) -> tuple[int, JSON]:
            return await ask("/artifacts/read", {"trajectory_id": "t1", "path": path, **more})

        status, whole = await read("blob.bin", encoding="base64", include_sha256=True)
        assert (status, base64.b64decode(whole["content"])) == (200, data)
        assert (whole["bytes"], whole["file_size"], whole["truncated"]) == (len(data), len(data), False)
        assert whole["sha256"] == hashlib.sha256(data).hexdigest()
        status, part = await read("/workspace/in", max_bytes=2)
        assert (part["content"], part["truncated"], part["file_size"], part["path"]) == ("te", True, 5, "d/a.txt")
        assert part["mime"] == "text/plain"
        assert (await read("loop/loop/d/a.txt"))[1]["content"] == "text\n"
        for path, wanted in [
            ("/etc/passwd", 403),
            ("../etc", 403),
            ("out", 403),
            ("none", 404),
            ("d", 400),
            ("d/fifo", 400),
            ("", 400),
        ]:
            status, refused = await read(path)
            assert (path, status, refused["success"]) == (path, wanted, False)
            assert refused["error"]

        status, listed = await ask("/artifacts/list", {"trajectory_id": "t1", "path": "d", "recursive": True})
        assert [(each["path"], each["is_dir"]) for each in listed["entries"]] == [
            ("d/a.txt", False),
            ("d/e f", True),
            ("d/e f/b", False),
            ("d/fifo", False),
        ]
        status, few = await ask("/artifacts/list", {"trajectory_id": "t1", "max_entries": 1})
        assert (len(few["entries"]), few["truncated"]) == (1, True)
        assert (await ask("/artifacts/list", {"trajectory_id": "t1", "path": "blob.bin"}))[0] == 400

        status, packed = await ask("/artifacts/archive", {"trajectory_id": "t1"})
        raw = gzip.decompress(base64.b64decode(packed["content"]))
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            assert sorted(tar.getnames()) == ["blob.bin", "d", "d/a.txt", "d/e f", "d/e f/b", "in", "loop", "out"]
            assert tar.getmember("d/a.txt").mode == 0o750
            assert tar.getmember("out").linkname == "/etc/passwd"
            blob = tar.extractfile("blob.bin")
            assert blob is not None
            assert blob.read() == data
        assert (await ask("/artifacts/archive", {"trajectory_id": "t1", "max_bytes": 50}))[0] == 413
        assert (await ask("/artifacts/archive", {"trajectory_id": "t1", "max_entries": 3}))[0] == 413
        await slot.write_bytes("huge", b"")
        await scene.client.bash("t1", "truncate -s 65M huge")
        assert (await read("huge"))[0] == 413

    run(play)


def test_artifacts_of_any_name_and_depth() -> None:
    make = "import os\nos.mkdir('deep'); os.chdir('deep')\nfor _ in range(1500): os.mkdir('n'); os.chdir('n')\n"
    make += "os.chdir('/workspace'); os.close(os.open(b'\\xff\\n', os.O_CREAT))"

    async def play(scene: Scene) -> None:
        await scene.client.bash("t1", f'python3 -c "{make}"')
        status, listed = await scene.client.post("/artifacts/list", {"trajectory_id": "t1", "recursive": True})
        assert status == 200, listed
        assert len(listed["entries"]) == 1502
        assert "?\n" in [each["path"] for each in listed["entries"]]
        status, packed = await scene.client.post("/artifacts/archive", {"trajectory_id": "t1"})
        assert (status, packed.get("entry_count")) == (200, 1502), packed

    run(play)


def test_a_token_is_wanted_where_there_is_one() -> None:
    async def play(scene: Scene) -> None:
        release = {"trajectory_id": "t1"}
        assert (await scene.client.get("/health"))[0] == 200
        assert (await scene.client.get("/status"))[0] == 401
        status, refused = await scene.client.post("/release", release)
        assert (status, "no bearer token" in refused["detail"]) == (401, True)
        async with Client(scene.url, "wrong") as wrong, Client(scene.url, "sesame") as right:
            status, refused = await wrong.post("/release", release)
            assert status == 401
            check_message(refused["detail"], "token")
            assert "sesame" not in str(refused)
            assert (await right.post("/release", release))[0] == 200
            status, refused = await right.post("/execute", {"tool": {"name": "bash"}})
            assert (status, "trajectory_id: Field required" in refused["detail"]) == (422, True)

    run(play, token="sesame")


def test_a_web_page_may_not_run_commands_where_there_is_no_token() -> None:
    async def play(scene: Scene) -> None:
        async with Client(scene.url, headers={"Origin": "http://example.org"}) as page:
            body = {"trajectory_id": "t1", "tool": {"name": "bash", "arguments": {"command": "ls"}}}
            assert (await page.post("/execute", body))[0] == 403
            assert (await page.get("/health"))[0] == 200

    run(play)


def test_the_end_waits_for_what_is_under_way_and_takes_nothing_new() -> None:
    async def play(scene: Scene) -> None:
        call = asyncio.create_task(scene.client.bash("t1", "while [ ! -e go ]; do sleep 0.01; done; echo done"))
        slot = await scene.slot_of("t1")
        drained = asyncio.create_task(scene.service.drain(30))
        await asyncio.sleep(0)
        assert (await scene.client.get("/health"))[0] == 503
        body = {"trajectory_id": "t2", "tool": {"name": "bash", "arguments": {"command": "ls"}}}
        assert (await scene.client.post("/execute", body))[1]["error"] == "Draining"
        await slot.write_text("go", "")
        assert await call == "done\n"
        assert await drained == 0

    run(play)
