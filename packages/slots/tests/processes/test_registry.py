"""Background processes as sessions, in a real slot: output by cursor, input, exit codes, limits, who may what."""

from __future__ import annotations

import asyncio
import re

import pytest

from golden_messages import check_message, raises
from manual_clock import ManualClock
from palaestra_slots.core.errors import StaleLease
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import MAX_PROCESSES
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec
from processes.scenes import OnBackend, WithRegistry, wrote

pytestmark = pytest.mark.slots

SERVER = """
import http.server, sys
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"hello")
    def log_message(self, format, *args): print("asked", self.path)
server = http.server.HTTPServer(("127.0.0.1", 0), Echo)
print("port", server.server_port)
server.serve_forever()
"""


def test_a_server_is_started_asked_and_followed_by_cursor(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        await slot.write_text("server.py", SERVER)
        session = await registry.spawn(slot, "python3 server.py", task_id="t")
        await wrote(session, "\n")
        first = await registry.poll(session.id, since=0)
        assert first["status"] == "running"
        port = re.fullmatch(r"port (\d+)\n", first["output"])
        assert port is not None
        fetch = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port[1]}/x').read().decode())"
        assert (await slot.execute(["python3", "-c", fetch])).output == "hello\n"
        await wrote(session, "asked /x\n")
        second = await registry.poll(session.id, since=first["cursor"])
        assert second["output"] == "asked /x\n"
        third = await registry.poll(session.id, since=second["cursor"])
        assert (third["output"], third["cursor"]) == ("", second["cursor"])
        assert (await registry.poll(session.id))["output_preview"] == first["output"] + second["output"]
        ended = await registry.kill_process(session.id)
        assert (ended["status"], ended["exit_code"]) == ("killed", 143)
        assert (await registry.kill_process(session.id))["status"] == "already_exited"

    with_registry(scene)


def test_a_kill_from_inside_is_told_as_such(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, "echo up; exec sleep 1000", task_id="t")
        waiting = asyncio.ensure_future(registry.wait(session.id))
        await wrote(session, "up")
        await slot.execute(f"kill -9 {session.status.pid}")
        assert await waiting == {
            "session_id": session.id, "status": "exited", "exit_code": 137, "output": "up\n", "cursor": 3,
            "output_total_bytes": 3,
        }  # fmt: skip
        polled = await registry.poll(session.id)
        assert (polled["status"], polled["exit_code"]) == ("exited", 137)

    with_registry(scene)


def test_input_is_written_submitted_and_ended(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, 'while read -r x; do echo "<$x>"; done; echo over; exit 4', task_id="t")
        assert await registry.write_stdin(session.id, "ä") == {
            "session_id": session.id, "status": "ok", "bytes_written": 2
        }  # fmt: skip
        assert (await registry.submit_stdin(session.id, "b"))["bytes_written"] == 2
        await wrote(session, "<äb>\n")
        await registry.write_stdin(session.id, "last\n", end=True)
        ended = await registry.wait(session.id)
        assert (ended["output"], ended["exit_code"]) == ("<äb>\n<last>\nover\n", 4)
        assert (await registry.write_stdin(session.id, "x"))["status"] == "already_exited"
        deaf = await registry.spawn(slot, "exec <&-; echo closed; exec sleep 1000", task_id="t")
        await wrote(deaf, "closed")
        await slot.execute("true")  # by now the slot's first process, which started it, has let go of its input too
        check_message((await registry.write_stdin(deaf.id, "x"))["error"])

    with_registry(scene)


def test_a_terminal_of_the_contracts_size(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(
            slot, "stty size; printf '\\033[31mred\\033[0m\\n'; read x; echo got $x", task_id="t", use_pty=True
        )
        await wrote(session, "red")
        await registry.submit_stdin(session.id, "y")
        assert (await registry.wait(session.id))["output"] == "30 120\nred\ny\ngot y\n"

    with_registry(scene)


def test_what_was_dropped_is_counted_and_the_tail_is_there(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, "seq 1 300000", task_id="t")
        await registry.wait(session.id)
        whole = "".join(f"{n}\n" for n in range(1, 300_001))
        cursor, text = 0, ""
        while True:
            reply = await registry.poll(session.id, since=cursor)
            if cursor == 0:
                lost = reply["lost_bytes"]
            text, cursor = text + reply["output"], reply["cursor"]
            if "more_bytes" not in reply:
                break
        assert cursor == reply["output_total_bytes"] == len(whole)
        assert len(text) >= 200_000
        assert whole[lost:] == text
        log = await registry.read_log(session.id, limit=2)
        assert log["output"] == "299999\n300000"
        assert log["dropped_bytes"] >= len(whole) - 200_000
        assert log["showing"] == f"lines {log['total_lines'] - 1}-{log['total_lines']} of {log['total_lines']}"
        spilled = await slot.read_text(log["full_output_path"])
        assert spilled == whole[: log["full_output_bytes"]]

    with_registry(scene)


def test_a_log_is_read_from_its_end_or_from_a_line_on(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, "seq 1 10", task_id="t")
        await registry.wait(session.id)
        last = await registry.read_log(session.id, limit=3)
        assert (last["output"], last["total_lines"], last["showing"]) == ("8\n9\n10", 10, "lines 8-10 of 10")
        assert (await registry.read_log(session.id, offset=2, limit=2))["output"] == "3\n4"
        check_message((await registry.read_log(session.id, offset=50))["showing"], "10")

    with_registry(scene)


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (r"a\n\nb\n", ["a", "", "b"]),
        (r"a\r\nb\r\n", ["a", "b"]),
        (r"$ ls\r\n\033[?2004l\ra\r\n$ ", ["$ ls", "a", "$ "]),  # a shell in a terminal, with bracketed paste
        (r"a\r\n\033[?2004l\r", ["a"]),
        (r"1%%\r2%%\r3%%\n", ["1%", "2%", "3%"]),
        (r"a\342\200\250b\302\205c\n", ["a\u2028b\x85c"]),
        ("", []),
    ],
)
def test_a_log_has_the_lines_that_a_person_sees(with_registry: WithRegistry, written: str, lines: list[str]) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, f"printf '{written}'", task_id="t")
        await registry.wait(session.id)
        log = await registry.read_log(session.id)
        assert (str(log["output"]).split("\n") if lines else [], log["total_lines"]) == (lines, len(lines))

    with_registry(scene)


def test_a_wait_is_cut_to_the_limit_and_says_so(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, "echo up; exec sleep 1000", task_id="t")
        await wrote(session, "up")
        reply = await registry.wait(session.id, 600, limit_s=0.05)
        assert reply["status"] == "timeout"
        assert reply["timeout_note"].startswith("The wait of 600s was cut to the limit of 0.05s.")
        assert reply["output"] == "up\n"
        assert "exit_code" not in reply
        assert (await registry.wait(session.id, 0))["timeout_note"] == "Waited 0s; the process still runs."
        ended = await registry.spawn(slot, "true", task_id="t")
        reply = await registry.wait(ended.id, 600, limit_s=30)
        assert (reply["status"], reply["timeout_note"]) == ("exited", "The wait of 600s was cut to the limit of 30s.")
        assert "timeout_note" not in await registry.wait(ended.id, 20, limit_s=30)

    with_registry(scene)


def test_an_interrupt_ends_the_waits_of_one_conversation(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        one = await registry.spawn(slot, "exec sleep 1000", task_id="t", session_key="one")
        two = await registry.spawn(slot, "read x; exit 5", task_id="t", session_key="two")
        waits = [asyncio.ensure_future(registry.wait(session.id)) for session in (one, two)]
        await asyncio.sleep(0)  # each runs to where it waits
        assert registry.interrupt(session_key="one") == 1
        assert (await waits[0])["status"] == "interrupted"
        assert not waits[1].done()
        await registry.submit_stdin(two.id, "go on")
        assert (await waits[1])["exit_code"] == 5
        assert registry.interrupt() == 0

    with_registry(scene)


def test_a_task_reaches_its_own_sessions_alone(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        mine = await registry.spawn(slot, "exec sleep 1000", task_id="mine")
        other = await registry.spawn(slot, "exec sleep 1000", task_id="other")
        for reply in (
            await registry.poll(other.id, task_id="mine"),
            await registry.read_log(other.id, task_id="mine"),
            await registry.wait(other.id, task_id="mine"),
            await registry.kill_process(other.id, task_id="mine"),
            await registry.write_stdin(other.id, "x", task_id="mine"),
            await registry.submit_stdin(other.id, "x", task_id="mine"),
        ):
            assert (reply["status"], reply["error"]) == ("not_found", f"No process with ID {other.id}")
        assert [entry["session_id"] for entry in await registry.list_sessions("mine")] == [mine.id]
        assert await registry.kill_all("mine") == 1
        assert not await registry.has_active_processes("mine")
        assert await registry.has_active_for_session("other")
        assert not await registry.has_active_for_session("other", max_age_s=0)
        assert await registry.kill_all() == 1

    with_registry(scene)


def test_equal_runs_have_equal_ids(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        first = await registry.spawn(slot, "true", task_id="t")
        again = await ProcessRegistry().spawn(slot, "true", task_id="t")
        assert re.fullmatch("proc_[0-9a-f]{12}", first.id)
        assert first.id == again.id != (await registry.spawn(slot, "true", task_id="t")).id

    with_registry(scene)


def test_so_many_at_once_and_no_more(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        sessions = [await registry.spawn(slot, "read x; exit $x", task_id="t") for _ in range(MAX_PROCESSES)]
        assert MAX_PROCESSES == 64
        with raises(BlockingIOError, "64"):
            await registry.spawn(slot, "true", task_id="t")
        assert len(await registry.list_sessions("t")) == MAX_PROCESSES
        await asyncio.gather(*(registry.submit_stdin(session.id, str(n)) for n, session in enumerate(sessions)))
        ends = await asyncio.gather(*(registry.wait(session.id) for session in sessions))
        assert [end["exit_code"] for end in ends] == list(range(MAX_PROCESSES))
        await registry.spawn(slot, "true", task_id="t")
        assert len([session for session in sessions if registry.get(session.id) is None]) == 1

    with_registry(scene)


def test_what_has_ended_is_kept_for_a_time_that_begins_at_its_end(with_registry: WithRegistry) -> None:
    async def scene(_: ProcessRegistry, slot: Slot) -> None:
        clock = ManualClock()
        registry = ProcessRegistry(clock=clock)
        session = await registry.spawn(slot, "sleep 0.2", task_id="t")
        await registry.wait(session.id)
        assert session.status.duration_s >= 0.2
        clock.now = session.started_at + session.status.duration_s + 1799.9
        assert len(await registry.list_sessions()) == 1
        clock.now += 0.2
        assert await registry.list_sessions() == []
        assert await slot.processes() == []

    with_registry(scene)


def test_a_session_whose_process_the_slot_has_dropped_is_told_as_lost(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        session = await registry.spawn(slot, "exit 3", task_id="t")
        await session.reach().forget()
        reply = await registry.poll(session.id)
        assert reply["status"] == "lost"
        assert "dropped its record" in reply["error"]
        assert [entry["status"] for entry in await registry.list_sessions("t")] == ["lost"]
        assert not await registry.has_active_processes("t")

    with_registry(scene)


def test_the_end_of_a_slot_is_the_worlds_failure_to_its_task_alone(on_backend: OnBackend) -> None:
    async def scene(backend: LocalBackend) -> None:
        slot, registry = await backend.create(SlotSpec(), "t"), ProcessRegistry()
        session = await registry.spawn(slot, "exec sleep 1000", task_id="t")
        await backend.destroy(slot)
        with pytest.raises(StaleLease):
            await registry.poll(session.id, task_id="t")
        with pytest.raises(StaleLease):
            await registry.list_sessions("t")
        (entry,) = await registry.list_sessions()
        assert entry["status"] == "lost"
        assert await registry.kill_all() == 0

    on_backend(scene)


def test_what_is_no_longer_waited_for_leaves_no_process_without_a_session(with_registry: WithRegistry) -> None:
    """Wherever in the start the cancellation comes: what runs in the end is what there are sessions for."""

    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        for number in range(30):
            starting = asyncio.ensure_future(registry.spawn(slot, "exec sleep 1000", task_id="t"))
            for _ in range(number):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        running = {each.pid for each in await slot.processes() if (await each.status()).running}
        assert running == {each["pid"] for each in await registry.list_sessions("t")}

    with_registry(scene)


def test_a_session_is_called_by_its_task_and_place_whatever_other_tasks_do(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        alone = [(await registry.spawn(slot, "true", task_id="a")).id for _ in range(2)]
        beside = ProcessRegistry()
        mixed = [(await beside.spawn(slot, "true", task_id=task_id)).id for task_id in ("b", "a", "b", "a")]
        assert mixed[1::2] == alone
        assert len(set(mixed)) == 4

    with_registry(scene)
