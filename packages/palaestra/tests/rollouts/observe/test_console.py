import io
import os
import pty
import subprocess
import sys

import pytest
from toy import tell

from golden_messages import check_message
from palaestra.rollouts.events import GroupFinished, GroupsPlanned, Note, RolloutEnded, TurnTaken
from palaestra.rollouts.observe.console import (
    Console,
    LiveConsole,
    PlainConsole,
    describe,
    duration,
    make_console,
)
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra_slots.core.types import Blame, Outcome


class HandClock:
    """Moves when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


def rollout(index=0, reward=1.0, **fields):
    given = {
        "rollout_id": f"r{index}",
        "group_id": "g0",
        "task_id": "t",
        "index": index,
        "messages": [],
        "outcome": Outcome.NATURAL,
        "reward": reward,
        "beside": Beside(duration_s=2.5),
    }
    return Trajectory(**(given | fields))


def group(*rollouts, number=0, task_id="fix-sort", error=""):
    return Group(group_id=f"g{number}", number=number, task_id=task_id, trajectories=list(rollouts), error=error)


def lost(index=0, error="the slot died"):
    return rollout(index, None, outcome=Outcome.INFRA_ERROR, blame=Blame.SANDBOX, error=error)


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def log():
    return io.StringIO()


def test_a_long_error_keeps_its_end():
    error = f"preparing t failed:\n{'hint: Using master' * 200}\nfatal: unable to access 'https://x': no such host"
    for line in (describe(group(error=error)), describe(group(lost(error=error)))):
        assert "preparing t failed: hint" in line
        check_message(line, "fatal", "access", "https://x")
        assert len(line) < 400


def test_a_log_gets_one_line_per_finished_group(log, clock):
    with make_console(log, clock=clock) as progress:
        tell(progress, GroupsPlanned(2, 2))
        for one in (rollout(0), rollout(1, 0.0)):
            tell(progress, RolloutEnded(trajectory=one))
        tell(progress, GroupFinished(group(rollout(0), rollout(1, 0.0))))
        tell(progress, GroupFinished(group(number=1, error="pip failed\nexit 1")))
        clock.now += 8
    assert log.getvalue().splitlines() == [
        "[1/2] fix-sort: reward 1 0 · 2.5s",
        "[2/2] fix-sort: not run: pip failed exit 1",
    ]


def test_a_log_lists_only_the_samples_of_a_batch_that_failed(log, clock):
    progress = PlainConsole(log, clock)
    progress.follow({}, "kept")
    for number in range(500):
        tell(progress, GroupFinished(group(rollout(0), number=number)))
    assert log.getvalue() == ""
    tell(progress, GroupFinished(group(number=500, error="unreadable row")))
    assert log.getvalue().splitlines() == ["[501] fix-sort: not run: unreadable row"]


def test_a_log_gets_a_status_line_every_ten_seconds_at_most(log, clock):
    progress = PlainConsole(log, clock)
    tell(progress, GroupsPlanned(10, 4))
    progress.in_flight["r1"] = "tool", 0.0
    for number in range(100):
        clock.now += 0.3
        tell(progress, TurnTaken(rollout_id="r0", turn=number, messages=[]))
    assert len(log.getvalue().splitlines()) == 2, "thirty seconds, the first of them silent"
    clock.now += 10
    tell(progress, RolloutEnded(trajectory=rollout(0)))
    last = log.getvalue().splitlines()[-1]
    assert last == (
        "groups 0/10 · rollouts 1/40 · running 1 tool · reward 1.000 (1 of 1 scored) · natural 1 · 1.5 rollouts/min"
        " · ETA 26m00s"
    )


def test_a_run_of_unknown_length_promises_no_end(log, clock):
    progress = PlainConsole(log, clock)
    tell(progress, GroupsPlanned(None, 4))
    clock.now += 11
    tell(progress, RolloutEnded(trajectory=rollout(0)))
    check_message(log.getvalue(), "groups")
    assert "ETA" not in log.getvalue()


def test_groups_that_could_not_start_count_towards_the_end(clock):
    progress = PlainConsole(io.StringIO(), clock)
    tell(progress, GroupsPlanned(4, 2))
    clock.now += 6
    tell(progress, GroupFinished(group(number=0, error="setup failed")))
    assert progress.eta_s == 18


def test_a_finished_group_says_whose_fault_an_unscored_rollout_was():
    assert describe(group(rollout(0), lost(1), lost(2))) == (
        "fix-sort: reward 1 – – · 2.5s; infra_error (sandbox): the slot died"
    )


def test_a_task_cannot_write_escape_sequences_to_the_terminal(log, clock):
    for progress in (PlainConsole(log, clock), LiveConsole(log, clock)):
        tell(progress, Note("\x1b]0;owned\x07note"))
        tell(progress, GroupFinished(group(lost(0, error="\x1b[2Jgone\r"), task_id="a\x1b[31mb\x9bc\n")))
    assert not {"\x07", "\x9b", "\r", "\x1b"} & set(log.getvalue())
    assert log.getvalue().count("ab\ufffdc: reward –") == 2


def test_a_closed_log_does_not_end_the_run(clock):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    progress = PlainConsole(stream, clock)
    tell(progress, Note("nobody reads this"))
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_stream_that_python_has_closed_does_not_end_the_run(clock):
    stream = io.StringIO()
    stream.close()
    tell(PlainConsole(stream, clock), Note("nobody reads this"))


def test_the_live_view_shows_counts_stages_and_results(log, clock):
    with make_console(log, enabled=True, clock=clock) as progress:
        tell(progress, GroupsPlanned(2, 2))
        progress.in_flight.update(r0=("model", 0.0), r1=("grade", 0.0))
        tell(progress, RolloutEnded(trajectory=rollout(2, 0.5)))
        tell(progress, Note("needs [bold]live?"))
        clock.now += 2
    shown = log.getvalue()
    assert "needs [bold]live?" in shown
    assert "groups 0/2 · rollouts 1/4" in shown
    assert "model 1  grade 1" in shown
    assert "reward 0.500 (1 of 1 scored) · natural 1" in shown
    assert "ETA 6.0s" in shown


def test_the_terminal_is_given_back_when_the_run_blows_up(log, clock):
    with pytest.raises(KeyError), make_console(log, enabled=True, clock=clock) as progress:  # noqa: PT012
        tell(progress, GroupsPlanned(1, 1))
        raise KeyError("bug")
    assert log.getvalue().rindex("\x1b[?25h") > log.getvalue().rindex("\x1b[?25l"), "the cursor is back"


def test_standard_output_stays_clean_while_the_live_view_is_up(log, clock, capsys):
    with make_console(log, enabled=True, clock=clock) as progress:
        tell(progress, GroupsPlanned(1, 1))
        print("data")
    assert capsys.readouterr().out == "data\n"


def test_who_listens():
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    assert isinstance(make_console(io.StringIO(), enabled=False), Console)
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as terminal:
        assert isinstance(make_console(terminal), LiveConsole)


def test_silence_is_silent(log):
    with make_console(log, enabled=False) as progress:
        tell(progress, GroupsPlanned(1, 1))
        tell(progress, Note("x"))
        tell(progress, GroupFinished(group(rollout())))
    assert log.getvalue() == ""


def test_rich_is_not_loaded_for_a_log():
    code = (
        "import io, sys; from palaestra.rollouts.observe.console import make_console; "
        "make_console(io.StringIO()).note('x'); sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.04, "40ms"), (0.0999, "0.1s"), (9.96, "10s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_an_error_is_printed_once_and_later_ones_refer_to_the_first(log, clock):
    progress = PlainConsole(log, clock)
    for number in range(2):
        name = f"{number:06d}-t"
        lost = [
            Trajectory(
                rollout_id=f"{name}/{index}", group_id=name, task_id="t", index=index, messages=[], reward=None,
                outcome=Outcome.INFRA_ERROR, blame=Blame.GRADER, error=f"scoring {name}/{index} failed: line 8",
            )
            for index in range(3)
        ]  # fmt: skip
        tell(progress, GroupFinished(Group(group_id=name, number=number, task_id="t", trajectories=lost)))
    first, second = log.getvalue().splitlines()
    assert first.count("line 8") == 1
    assert second == "[2] t: reward – – – · 0ms; infra_error (grader): same as 000000-t/0"
