"""Which processes belong to a command: decided from process tables alone."""

from __future__ import annotations

from palaestra.sandbox.slotd.killing import Command, Process, tree

COMMAND = Command(pid=10, started=100)


def process(pid: int, parent: int, session: int, started: int = 100, *, zombie: bool = False) -> Process:
    return Process(pid, parent, session, started, zombie)


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
