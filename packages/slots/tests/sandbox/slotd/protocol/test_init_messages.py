"""Orders and reports as datagrams: what is written is what is read, and what no system call takes is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.protocol import init_messages
from palaestra_slots.sandbox.slotd.protocol.init_messages import InitReport, Order, ReportKind, Spawn

_text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
_name = _text.filter(lambda name: name and "=" not in name)
_places = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=8)


@given(
    st.integers(0, 2**32 - 1), _text.filter(bool), st.lists(_text), _text, st.dictionaries(_name, _text), _places,
    st.booleans(),
)  # fmt: skip
def test_a_command_arrives_as_it_was_sent(
    command: int, program: str, rest: list[str], cwd: str, env: dict[str, str], places: list[tuple[int, int]], tty: bool
) -> None:
    spawn = Spawn(command, [program, *rest], cwd, init_messages.env_block(env), places, tty)
    data = init_messages.encode_spawn(*spawn)
    assert init_messages.decode_order(data) == (Order.SPAWN, command, int(tty))
    assert init_messages.decode_spawn(data) == spawn


def test_bytes_that_are_no_text_survive() -> None:
    spawn = Spawn(1, ["echo", "\udcff"], "/\udc80", init_messages.env_block({"A": "\udcfe"}), [(0, 0)])
    assert b"\xff" in init_messages.encode_spawn(*spawn)
    assert init_messages.decode_spawn(init_messages.encode_spawn(*spawn)) == spawn


@pytest.mark.parametrize(
    ("argv", "cwd", "env"),
    [
        (["a\0b"], "/", {}), (["a"], "/\0", {}), (["a"], "/", {"A": "\0"}), (["\ud800"], "/", {}), ([""], "/", {}),
        (["a"], "/", {"": "x"}), (["a"], "/", {"A=B": "x"}), (["a"] * 70_000, "/", {}),
    ],
)  # fmt: skip
def test_what_no_system_call_takes_is_refused(argv: list[str], cwd: str, env: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        init_messages.encode_spawn(1, argv, cwd, init_messages.env_block(env), [])


def test_orders_without_strings() -> None:
    assert init_messages.decode_order(init_messages.encode(Order.SIGNAL, 7, 15)) == (Order.SIGNAL, 7, 15)
    assert init_messages.decode_order(init_messages.encode(Order.KILL, 8)) == (Order.KILL, 8, 0)


@pytest.mark.parametrize(
    "report",
    [
        InitReport(ReportKind.READY),
        InitReport(ReportKind.FAILED, value=13, text="mount overlay on /stage: Permission denied"),
        InitReport(ReportKind.EXIT, 2**32 - 1, -9, False, 1.25, 3 << 40),
        InitReport(ReportKind.NOT_STARTED, 3, 2, True),
        InitReport(ReportKind.KILLED, 4, flag=True),
    ],
)
def test_reports_arrive_as_they_were_sent(report: InitReport) -> None:
    assert init_messages.decode_report(init_messages.encode_report(report)) == report


@given(st.integers(0, 2**32 - 1), st.tuples(st.integers(0, 2**60), st.integers(0, 2**22)), *2 * [st.booleans()])
def test_what_to_kill_arrives_as_it_was_sent(command: int, after: tuple[int, int], spare: bool, at_end: bool) -> None:
    data = init_messages.encode_kill(command, after, spare, at_end)
    assert init_messages.decode_order(data) == (
        Order.KILL,
        command,
        init_messages.SPARE * spare | init_messages.AT_END * at_end,
    )
    assert init_messages.decode_moment(data) == after
    assert init_messages.decode_moment(init_messages.encode(Order.KILL, command)) == (0, 0)
