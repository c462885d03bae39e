"""Scores that read the clock of this machine: an audit changes it for them, and for nothing else."""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra.cli.main import main
from palaestra_audit.host_clock import host_clock, own_code_reads
from palaestra_audit.records import Kind
from palaestra_audit.trials import clock_library
from palaestra_slots.core.user_code import load_file

OWN = """
import datetime
import time as clock
from datetime import date, datetime as moment
from time import time


def years():
    import time as late
    from datetime import datetime as later

    return {
        moment.now().year, moment.now(datetime.UTC).year, datetime.date.today().year, date.today().year,
        moment.utcnow().year, moment.fromtimestamp(time()).year, clock.localtime().tm_year, int(clock.strftime("%Y")),
        clock.gmtime(clock.time_ns() / 1e9).tm_year, late.gmtime().tm_year, later.now().year,
    }


def hour():
    return moment.fromtimestamp(0).hour, clock.localtime(0).tm_hour


def is_moment(value):
    return isinstance(value, moment) and isinstance(moment(2020, 1, 1), moment) and type(moment.now()) is type(value)
"""


def test_only_the_authors_code_sees_the_clock_of_a_trial(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    own = load_file(path)
    years = vars(own)["years"]
    this = datetime.datetime.now().year
    with own_code_reads([path]):
        assert years() == {this}
        with host_clock("@2031-06-15 12:00:00", "EAST-14"):
            assert years() == {2031}
            assert vars(own)["hour"]() == (14, 14)
            assert vars(own)["is_moment"](datetime.datetime(2024, 2, 29))
            assert datetime.datetime.now().year == time.localtime().tm_year == this
        with host_clock("+730d", ""):
            assert years() == {(datetime.datetime.now() + datetime.timedelta(days=730)).year}
        with host_clock("+0 x4", ""):
            assert years() == {this}
    assert years() == {this}
    assert sys.modules["time"] is time
    assert vars(own)["moment"] is datetime.datetime


async def test_trials_that_are_played_concurrently_have_their_own_clocks(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    years = vars(load_file(path))["years"]

    async def seen(clock: str) -> set[int]:
        with host_clock(clock, ""):
            await asyncio.sleep(0)
            return await asyncio.to_thread(years)

    with own_code_reads([path]):
        both = await asyncio.gather(seen("@2031-06-15 12:00:00"), seen("@2042-06-15 12:00:00"))
    assert both == [{2031}, {2042}]


SCORES = """
import datetime
import time
from palaestra import Task, environment

YEAR = time.localtime().tm_year

@environment(toolsets=["terminal"])
def seasons():
    for name in ("this-year", "time", "zone", "same-year", "lasts"):
        yield Task(id=name, prompt="Write x and the year to a.txt.", solution="(echo x; date +%Y) > a.txt")

@seasons.score
async def right(task, sandbox):
    words = (await sandbox.read_text("a.txt", missing="")).split()
    if words[:1] != ["x"]:
        return False
    if task.id == "this-year":
        return datetime.date.today().year == YEAR
    if task.id == "time":
        return time.time() < time.mktime((YEAR + 1, 1, 1, 0, 0, 0, 0, 0, 0))
    if task.id == "zone":
        return datetime.datetime.fromtimestamp(0).hour == 0
    if task.id == "same-year":
        from datetime import datetime as moment

        return words[1:] == [str(moment.now().year)]
    return datetime.date.today().year >= 1970 and len(words) == 2
"""


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.skipif(clock_library() is None, reason="needs faketime")
def test_a_score_that_reads_the_clock_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seasons_env.py").write_text(SCORES)
    found = {task.id: task.findings for task in audit("seasons_env.py", "--only", str(Kind.WORLD)).tasks}
    assert {name for name, each in found.items() if each} == {"this-year", "time", "zone"}
    assert not any(each.note for findings in found.values() for each in findings)
    assert all("time zone" in each.what for each in found["zone"])
    witness = found["this-year"][0].id
    assert main(["audit", "replay", "found/audit.json", witness]) == 0
