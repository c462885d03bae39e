"""Background processes for synchronous code: from threads, without a loop, and in reward functions that are bridged."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_contract import process_registry, use_session
from palaestra_contract.sync_process_registry import SharedProcesses
from palaestra_contract.tools.function_calls import ToolSession, cleanup_vm, handle_function_call
from palaestra_contract.tools.session_tasks import ToolSessionConfig
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable
from palaestra_slots.core.sync_bridge import bridged
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.notifications import MAX_NOTIFICATIONS, Notifications
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import Watch
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung
from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


def test_code_without_a_loop_has_the_whole_life_of_a_process() -> None:
    try:
        session = process_registry.spawn_local(
            "read word; echo got $word $NAME in $PWD", cwd="/tmp", task_id="sync-1", env_vars={"NAME": "x"}
        )
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    try:
        assert isinstance(process_registry, SharedProcesses)
        assert process_registry.get(session.id) is session
        assert process_registry.poll(session.id)["status"] == "running"
        assert process_registry.has_active_processes("sync-1")
        assert process_registry.has_active_for_session("sync-1")
        assert not process_registry.has_active_processes("sync-2")
        assert process_registry.submit_stdin(session.id, "it") == {
            "session_id": session.id, "status": "ok", "bytes_written": 3
        }  # fmt: skip
        waited = process_registry.wait(session.id, timeout=60)
        assert (waited["status"], waited["exit_code"], waited["output"]) == ("exited", 0, "got it x in /tmp\n")
        assert session.output_buffer == "got it x in /tmp\n"
        assert process_registry.read_log(session.id)["total_lines"] == 1
        assert process_registry.kill_process(session.id)["status"] == "already_exited"

        called: JSON = handle_function_call("terminal", {"command": "sleep 600", "background": True}, "sync-1")
        assert "session_id" in called
        assert [each["status"] for each in process_registry.list_sessions("sync-1")] == ["exited", "running"]
        assert process_registry.kill_all("sync-1") == 1
        assert process_registry.kill_all("sync-1") == 0
    finally:
        cleanup_vm("sync-1")
    assert process_registry.list_sessions("sync-1") == []
    assert process_registry.poll(session.id)["status"] in ("lost", "not_found")
    assert process_registry.poll("proc_000000000000") == {
        "session_id": "proc_000000000000",
        "status": "not_found",
        "error": "No process with ID proc_000000000000",
    }


def test_a_reward_function_asks_the_registry_of_its_own_loop(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        async def reward() -> JSON:  # as the contract has it: async, with synchronous calls in it
            polled = process_registry.poll(session_id)
            killed = process_registry.kill_all(desk.tools.task_id)
            return polled["status"], killed, process_registry.poll(session_id)["exit_code"]

        session_id = (await desk.call("terminal", command="sleep 600", background=True))["session_id"]
        assert await bridged(reward()) == ("running", 1, 143)
        assert await asyncio.to_thread(process_registry.wait, session_id) == process_registry_reply(session_id)
        with pytest.raises(RuntimeError, match=r"await ProcessRegistry\.poll there instead"):
            process_registry.poll(session_id)

    at_desk(scenario)


def process_registry_reply(session_id: str) -> JSON:
    reply = {"session_id": session_id, "status": "exited", "exit_code": 143}
    return {**reply, "output": "", "cursor": 0, "output_total_bytes": 0}


def test_a_registry_of_another_loop_is_asked_there(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        session_id = (await desk.call("terminal", command="sleep 600", background=True))["session_id"]

        async def elsewhere() -> JSON:
            return process_registry.poll(session_id)["status"]

        assert await asyncio.to_thread(lambda: asyncio.run(bridged(elsewhere()))) == "running"

    at_desk(scenario)


def test_a_registry_that_nobody_has_any_more_is_forgotten(at_desk: AtDesk) -> None:
    known: list[str] = []

    async def scenario(desk: Desk) -> None:
        registry = ProcessRegistry()
        known.append((await registry.spawn(desk.slot, "true", task_id="gone")).id)
        assert process_registry.get(known[0]) is not None

    at_desk(scenario)
    assert process_registry.get(known[0]) is None


def test_a_slot_that_somebody_has_runs_sessions_too(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        async def hook() -> JSON:
            session = process_registry.spawn_via_env(desk.slot, "read x; echo $x in $PWD; exit 5", cwd="/tmp")
            assert (session.task_id, session.session_key) == (desk.slot.trajectory_id,) * 2
            assert (session.exited, session.exit_code, session.pid_scope) == (False, None, "sandbox")
            process_registry.submit_stdin(session.id, "here")
            return process_registry.wait(session.id), session.exit_code

        waited, exit_code = await bridged(hook())
        assert (waited["exit_code"], exit_code, waited["output"]) == (5, 5, "here in /tmp\n")

        def beside() -> JSON:
            session = process_registry.spawn_via_env(desk.slot, "exec sleep 600", task_id="other", session_key="chat")
            assert process_registry.has_active_for_session("chat")
            return process_registry.kill_process(session.id)["status"], process_registry.kill_all("other")

        assert await asyncio.to_thread(beside) == ("killed", 0)
        with pytest.raises(RuntimeError, match=r"await ProcessRegistry\.spawn there instead"):
            process_registry.spawn_via_env(desk.slot, "true")
        with pytest.raises(NotADirectoryError):
            await asyncio.to_thread(process_registry.spawn_via_env, desk.slot, "true", "/etc/hostname")

    at_desk(scenario)


def test_synchronous_code_has_cursors_the_end_of_input_and_interrupts(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        def beside() -> None:
            session = process_registry.spawn_via_env(desk.slot, "cat; exit 4", session_key="chat")
            assert process_registry.write_stdin(session.id, "one\n")["status"] == "ok"
            polled = process_registry.poll(session.id, since=0)
            while "one" not in polled["output"]:
                polled = process_registry.poll(session.id, since=polled["cursor"])
            assert process_registry.poll(session.id, since=polled["cursor"])["output"] == ""
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(process_registry.wait, session.id)
                while not process_registry.interrupt(session_key="chat"):
                    time.sleep(0.01)
                assert waiting.result()["status"] == "interrupted"
            assert process_registry.interrupt(session_key="chat") == 0
            assert process_registry.has_active_for_session("chat")
            assert not process_registry.has_active_for_session("chat", max_age_s=0.0)
            process_registry.submit_stdin(session.id, "two", end=True)
            assert process_registry.wait(session.id)["exit_code"] == 4
            assert process_registry.poll(session.id, since=polled["cursor"])["output"] == "two\n"

        await asyncio.to_thread(beside)

    at_desk(scenario)


def test_what_is_told_waits_for_synchronous_code() -> None:
    try:
        address = {"platform": "local", "chat_id": "7"}
        watch = Watch(patterns=("ready",), interval_s=600, on_exit=True, address=address)
        session = process_registry.spawn_local("echo ready; read x; exit 3", task_id="told", watch=watch)
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    try:
        (watcher,) = (each for each in process_registry.pending_watchers if each["session_id"] == session.id)
        wanted: JSON = {"session_id": session.id, "check_interval": 600, "session_key": "told"}
        assert watcher == {**wanted, "notify_on_complete": True, **address}
        process_registry.pending_watchers.remove(watcher)
        assert watcher not in process_registry.pending_watchers
        about = {
            "session_id": session.id,
            "task_id": "told",
            "session_key": "told",
            "command": session.command,
            **address,
        }
        match = process_registry.completion_queue.get(timeout=60)
        assert match == {"type": "watch_match", "output": "ready", "exit_code": None, **about}
        process_registry.submit_stdin(session.id, "")
        assert process_registry.completion_queue.get(timeout=60) == {
            "type": "completion", "output": "ready\n", "exit_code": 3, **about
        }  # fmt: skip
    finally:
        cleanup_vm("told")


def test_where_nobody_reads_the_oldest_gives_way(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        told = Notifications()
        session = await ProcessRegistry(notifications=told).spawn(desk.slot, "true", task_id="t")
        for code in range(2):
            for _ in range(MAX_NOTIFICATIONS // 2 + code):
                told.add_event(session, "completion", "", code)
        codes = [told.completion_queue.get_nowait()["exit_code"] for _ in range(told.completion_queue.qsize())]
        assert codes == [0] * (MAX_NOTIFICATIONS // 2 - 1) + [1] * (MAX_NOTIFICATIONS // 2 + 1)

    at_desk(scenario)


HOLDER = """
    import sys, time
    from pathlib import Path
    from palaestra import ToolSession, ToolSessionConfig, handle_function_call, process_registry, use_session
    from palaestra_slots.processes.session import Watch
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.slot import Rung

    folder, path = Path(sys.argv[1]), Path(sys.argv[2])
    backend = LocalBackend(rung=Rung.USERNS, service="tools", service_directory=folder)
    use_session(ToolSession(backend=backend, config=ToolSessionConfig(checkpoint_path=path)))
    handle_function_call("write_file", {"path": "kept", "content": "kept\\n"}, "t")
    talks = process_registry.spawn_local(
        'while read -r x; do echo "<$x>"; done; exit 6', task_id="t", session_key="chat", watch=Watch(interval_s=900)
    )
    goes = process_registry.spawn_local("exec sleep 1000", task_id="t")
    process_registry.submit_stdin(talks.id, "a")
    print(talks.id, goes.id, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """A process that held the registry and was killed: where its slots stay, its checkpoint, and its session ids."""
    folder, path = tmp_path / "services", tmp_path / "processes.json"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ids = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
        errors = process.stderr.read()
    if "IsolationUnavailable" in errors:
        pytest.skip(errors.strip().splitlines()[-1])
    assert len(ids) == 2, errors
    try:
        yield folder, path, ids
    finally:
        use_session(ToolSession())
        asyncio.run(service(folder).end())


def service(folder: Path) -> LocalBackend:
    return LocalBackend(rung=Rung.USERNS, service="tools", service_directory=folder)


def test_processes_are_found_again_after_their_holder_was_killed(holder: tuple[Path, Path, list[str]]) -> None:
    folder, path, (talks, goes) = holder
    use_session(ToolSession(backend=service(folder), config=ToolSessionConfig(checkpoint_path=path)))
    assert process_registry.recover_from_checkpoint() == 2
    assert process_registry.has_active_for_session("chat")
    assert [each["session_id"] for each in process_registry.pending_watchers] == [talks]
    assert [each["detached"] for each in process_registry.list_sessions("t")] == [True, True]
    process_registry.submit_stdin(talks, "b")
    assert process_registry.write_stdin(talks, "c\n")["status"] == "ok"
    while "<c>" not in process_registry.poll(talks)["output_preview"]:
        time.sleep(0.01)
    polled = process_registry.poll(talks)
    assert (polled["output_preview"], polled["detached"]) == ("<a>\n<b>\n<c>\n", True)
    assert json.loads(handle_function_call("read_file", {"path": "kept"}, "t"))["content"] == "1|kept"
    fresh = process_registry.spawn_local("exec sleep 1000", task_id="t")
    assert fresh.id not in (talks, goes)
    use_session(
        ToolSession(backend=service(folder), config=ToolSessionConfig(checkpoint_path=path))
    )  # closing the one before leaves its slots
    assert json.loads(handle_function_call("terminal", {"command": "pgrep -c sleep"}, "t"))["output"] == "2\n"
    assert process_registry.recover_from_checkpoint() == 3
    assert process_registry.kill_process(goes)["status"] == "killed"
    assert process_registry.kill_all("t") == 2
    cleanup_vm("t")
    assert json.loads(path.read_text())["sessions"] == []
    assert "error" in json.loads(handle_function_call("read_file", {"path": "kept"}, "t"))


def test_a_pid_that_was_given_to_another_process_is_never_signalled(holder: tuple[Path, Path, list[str]]) -> None:
    folder, path, ids = holder
    asyncio.run(service(folder).end())  # what the checkpoint tells of is dead
    with ToolSession(backend=service(folder)) as later:
        later.handle("write_file", {"path": "kept", "content": "mine"}, "t")
        strangers = [later.spawn("t", "exec sleep 1000") for _ in ids]
    for record, stranger in zip(json.loads(path.read_text())["sessions"], strangers, strict=True):
        same = (record["slot_id"], record["status"]["process_id"], record["status"]["pid"])
        assert same == (stranger.slot_id, stranger.status.process_id, stranger.pid)
    use_session(ToolSession(backend=service(folder), config=ToolSessionConfig(checkpoint_path=path)))
    assert process_registry.recover_from_checkpoint() == 0
    for session_id in ids:
        assert "different process" in process_registry.kill_process(session_id)["error"]
    assert process_registry.kill_all() == 0
    assert process_registry.pending_watchers == []
    assert json.loads(handle_function_call("terminal", {"command": "pgrep -c sleep"}, "t"))["output"] == "2\n"


def test_a_checkpoint_needs_slots_that_stay(tmp_path: Path) -> None:
    with raises(ConfigError):
        ToolSession(config=ToolSessionConfig(checkpoint_path=tmp_path / "processes.json"))
    assert process_registry.recover_from_checkpoint() == 0
