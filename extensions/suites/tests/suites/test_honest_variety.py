"""Unusual and correct work is accepted by both verdicts. `benchmarks/honest_variety.py` also plays the repositories."""

from __future__ import annotations

import asyncio

import pytest

from suites.honest_variety import PROGRAMS, SWE, Work, play_works

AUDITED = next(work for work in PROGRAMS if work.labels)
QUICK = [AUDITED, next(work for work in PROGRAMS if work.task == "ledger")]


def test_there_are_many_works_with_their_own_names() -> None:
    works = [*SWE, *PROGRAMS]
    assert len({(work.task, work.name) for work in works}) == len(works) >= 60
    assert len({work.task for work in works}) == 17


def played(works: list[Work]) -> None:
    found = asyncio.run(play_works(works, None))
    assert len(found) == len(works)
    assert [each for each in found if not each.paid or each.unexpected] == []
    assert {each.name for each in found if each.labels} == {work.name for work in works if work.labels}


@pytest.mark.slots
def test_both_verdicts_accept_unusual_programs() -> None:
    played(QUICK)


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_verdicts_accept_all_programs() -> None:
    played([work for work in PROGRAMS if work not in QUICK])
