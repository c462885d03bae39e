"""Every failure has one exit code and one message; bugs keep their traceback."""

import asyncio
import logging
import signal
import subprocess
import sys
import time

import pytest

from golden_messages import check_message
from palaestra_slots.core.errors import (
    ConfigError,
    EngineRefused,
    EngineUnavailable,
    GraderError,
    IsolationUnavailable,
    PalaestraError,
    TaskError,
)
from palaestra_slots.core.exits import Program, read_failure, report_failure


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (TaskError("x"), 2),
        (EngineUnavailable("x"), 4),
        (EngineRefused("x"), 4),
        (IsolationUnavailable("x"), 5),
        (GraderError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_has_the_designs_exit_code(error: BaseException, code: int) -> None:
    failure = read_failure(error)
    assert failure is not None
    assert failure.exit_code == code


def test_a_bug_is_not_a_failure() -> None:
    assert read_failure(KeyError("x")) is None
    assert read_failure(SystemExit(3)) is None


def test_a_group_of_failures_is_one_failure_that_says_each_thing_once() -> None:
    group = BaseExceptionGroup(
        "tasks", [EngineUnavailable("down"), ExceptionGroup("inner", [EngineUnavailable("down")])]
    )
    failure = read_failure(group)
    assert failure is not None
    assert (failure.exit_code, failure.message) == (4, "down")


def test_one_bug_in_a_group_makes_it_a_bug() -> None:
    assert read_failure(ExceptionGroup("tasks", [ConfigError("x"), TypeError("bug")])) is None


def test_an_interrupt_in_a_group_is_an_interrupt() -> None:
    group = BaseExceptionGroup("tasks", [KeyboardInterrupt(), asyncio.CancelledError()])
    failure = read_failure(group)
    assert failure is not None
    assert failure.exit_code == 130


def test_a_failure_is_reported_and_a_bug_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(ConfigError("no such file")) == 2
    check_message(capsys.readouterr().err, "error")
    with pytest.raises(ZeroDivisionError):
        report_failure(ZeroDivisionError())


def test_an_error_without_a_message_is_still_named() -> None:
    failure = read_failure(PalaestraError())
    assert failure is not None
    assert failure.message == "PalaestraError"


@pytest.mark.parametrize(("flags", "lines"), [([], 3), (["-v"], 20), (["-q"], 0)])
def test_a_failing_hook_is_one_line_without_v(flags: list[str], lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("palaestra_slots.anything")
    with Program(flags):
        for number in range(8):
            try:
                try:
                    {}["x"]
                except KeyError as error:
                    raise RuntimeError("wrapped") from error
            except RuntimeError:
                logger.warning("tool %s failed in task %d", "look", number, exc_info=True)
        logger.warning("left out: %s", "a")
        logger.warning("left out: %s", "a")
        logger.info("not shown")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines if lines < 20 else len(said) > lines
    if not flags:
        check_message(said[0], "KeyError")
        assert said[1:] == ["left out: a"] * 2


_BLOCKED = """
import asyncio, sys, threading
from palaestra_slots.core.exits import Program, ended_by_second_interrupt

async def work():
    print("blocked", flush=True)
    while True:
        try: {hook}
        except BaseException: pass

asyncio.run(ended_by_second_interrupt(work(), 0.1))
"""


@pytest.mark.parametrize("hook", ["threading.Event().wait()", "sum(range(1000))", "await asyncio.sleep(60)"])
def test_the_second_interrupt_ends_a_process_whose_hook_does_not_return(hook: str) -> None:
    argv = [sys.executable, "-c", _BLOCKED.format(hook=hook)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.wait(20) == 130
