"""Which processes belong to a command: decided from process tables alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from palaestra_slots.sandbox.slotd.exec import process_tree
from palaestra_slots.sandbox.slotd.exec.process_tree import Command, ProcessStat, tree

COMMAND = Command(pid=10, started=100)


def process(pid: int, parent: int, session: int, started: int = 100, *, zombie: bool = False) -> ProcessStat:
    return ProcessStat(pid, parent, session, started, zombie)


def test_session_and_descendants_belong() -> None:
    table = [process(10, 1, 10), process(11, 10, 10), process(12, 11, 12), process(13, 1, 10)]
    assert tree(table, COMMAND, []) == {10, 11, 12, 13}


def test_what_cut_itself_loose_belongs_with_its_children() -> None:
    table = [process(10, 1, 10), process(20, 1, 20, 101), process(21, 20, 20, 102)]
    assert tree(table, COMMAND, []) == {10, 20, 21}


def test_daemons_of_earlier_calls_do_not_belong_nor_their_new_children() -> None:
    table = [process(5, 1, 5, 50), process(30, 5, 5, 200), process(10, 1, 10)]
    assert tree(table, COMMAND, []) == {10}


def test_within_one_tick_the_pid_tells_the_age() -> None:
    table = [process(9, 1, 9, 100), process(10, 1, 10, 100), process(11, 1, 11, 100)]
    assert tree(table, COMMAND, []) == {10, 11}


def test_other_commands_keep_their_own() -> None:
    table = [process(10, 1, 10), process(40, 1, 40, 150), process(41, 40, 40, 151), process(42, 1, 40, 152)]
    assert tree(table, COMMAND, [Command(40, 150)]) == {10}


def test_the_dead_are_not_killed_again() -> None:
    assert tree([process(10, 1, 10, zombie=True)], COMMAND, []) == set()


def test_what_was_there_at_a_moment_stays_with_its_new_children() -> None:
    old, older = process(11, 10, 10, 140), process(12, 10, 10, 150)
    new_child_of_old = process(20, 11, 10, 200)
    new, grandchild, loose = process(21, 10, 10, 150), process(22, 21, 22, 201), process(23, 1, 23, 151)
    table = [process(10, 1, 10), old, older, new_child_of_old, new, grandchild, loose]
    assert tree(table, COMMAND, [], after=(150, 12)) == {10, 21, 22, 23}
    assert tree(table, COMMAND, []) == {10, 11, 12, 20, 21, 22, 23}


def test_orphans_up_to_a_moment_stay() -> None:
    table = [process(10, 1, 10), process(30, 1, 10, 150), process(31, 1, 31, 149), process(32, 1, 10, 150)]
    assert tree(table, COMMAND, [], after=(150, 30)) == {10, 32}


def test_a_moment_is_told_by_the_youngest_process_of_then() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        noted = process_tree.note()
        _, then = process_tree.moment(noted)
        assert then >= child.pid
        [began] = [process.started for process in process_tree.processes() if process.pid == child.pid]
        inside = process_tree.inside(os.getpid(), noted_in(began, then))
        child.kill()
    assert inside[0] == began
    assert child.pid <= inside[1] <= then
    assert process_tree.inside(os.getpid(), noted_in(began + 1, then)) == (began + 1, 0)


def noted_in(tick: int, last: int) -> process_tree.Noted:
    """Within a tick, when a process had the last number that was given out."""
    return (tick + 0.5) / os.sysconf("SC_CLK_TCK"), b"0.00 0.00 0.00 1/100 %d\n" % last


def test_a_process_that_ends_is_known_before_it_is_dead() -> None:
    """Its first thread has ended, and another one still runs: as when a busy machine has not yet ended it."""
    program = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert not process_tree.is_exiting(os.getpid())
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while not process_tree.is_exiting(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        child.kill()
