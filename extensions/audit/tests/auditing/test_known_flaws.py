"""`palaestra audit` finds documented flaws of public benchmarks, each rebuilt small from its description.

Each task names its source. The rebuilt tasks have the flaw, and nothing else of the benchmark.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra_audit.records import Kind
from palaestra_audit.trials import clock_library

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(900)]

FLAWS = '''
import datetime
import itertools
import json

from palaestra import Say, Task, environment
from palaestra.grading import run_tests

CHECKS = {}
calls = itertools.count()
YEAR = datetime.date.today().year  # when the tests were written


def check(name):
    return lambda function: CHECKS.setdefault(name, function)


def code(path, text):
    return f"cat > {path} <<'END'\\n{text}END"


DB = json.dumps({"reservations": {"K1": {"cabin": "basic_economy", "status": "booked"}}})

COMMON = """def common(first, second):
    return sorted(set(first) & set(second))
"""

SPLIT = """def parse(text):
    found = {}
    for part in text.split(";"):
        key, value = part.split("=", 1)
        found[key.strip()] = value
    return found


def show(values):
    return ";".join(f"{key}={value}" for key, value in sorted(values.items()))
"""

FIXED = """def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
"""
WRONG = """def is_leap(year):
    return year % 4 == 0
"""
HISTORY = f"""git init -q . && git config user.name a && git config user.email a@b.c
{code("leap.py", WRONG)}
git add -A && git commit -q -m start && git branch later && git checkout -q later
{code("leap.py", FIXED)}
git commit -q -a -m 'Centuries are no leap years' && git checkout -q -
"""

CLAMP = """def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value
"""

ROTATE = """def _turned(sign, count):
    return chr((ord(sign) - 97 + count) % 26 + 97)


def rotate(text, count):
    return "".join(_turned(each, count) for each in text)
"""

FUTURE = """import datetime


def is_future(year):
    return year > datetime.date.today().year
"""


@environment(toolsets=["terminal"])
def flaws(kind: str):
    return (task for task in tasks() if task.id.startswith(kind))


def tasks():
    # tau-bench pays an agent that does nothing, because an impossible request leaves the database as it was
    # (Establishing Best Practices for Building Rigorous Agentic Benchmarks, arXiv 2507.02825).
    yield Task(id="pays_for_nothing/tau-bench", prompt="Cancel reservation K1. db.json has the reservations; "
               "basic economy cannot be cancelled.", files={"db.json": DB},
               solution=[Say("I am sorry, this fare cannot be cancelled.")])
    # FieldWorkArena only asks whether the last message is the assistant's
    # (How We Broke Top AI Agent Benchmarks, UC Berkeley RDI, April 2026).
    yield Task(id="pays_for_nothing/field-work-arena", prompt="How many people on the photo wear no helmet?",
               answer="3", solution=[Say("3")])
    # CAR-bench pays a refusal, because three of its four parts see no change (the same report).
    yield Task(id="pays_for_nothing/car-bench", prompt="Open the sun roof by half and say so.",
               files={"car.json": '{"roof": 0}'}, solution="printf '{\\"roof\\": 50}' > car.json")
    # Tests that must fail before the fix do not (SWE-bench issue 24).
    yield Task(id="pays_for_nothing/swe-bench-24", prompt="clamp(15, 0, 10) of clamp.py should be 10.",
               files={"clamp.py": CLAMP.replace("return high", "return low")}, solution=code("clamp.py", CLAMP))
    # The reference solution does not pass the tests, which ask a server on the internet (SWE-bench issue 26).
    yield Task(id="unsolvable/swe-bench-26", prompt="fetch.py should define status(url).", solution=code("fetch.py",
               "import urllib.request\\n\\n\\ndef status(url):\\n    return urllib.request.urlopen(url).status\\n"))
    # The tests of HumanEval accept wrong code (EvalPlus, arXiv 2305.01210).
    yield Task(id="weak/human-eval", prompt="Write common(first, second) in common.py: the sorted unique common "
               "elements of two lists. For example, common([3, 1, 2], [2, 3]) gives [2, 3].",
               solution=code("common.py", COMMON))
    # The tests see one of two changes of a fix (UTBoost, arXiv 2506.09289).
    yield Task(id="weak/utboost", prompt="parse and show of split.py fail for 'a=1=2' and for {'b': 1, 'a': 2}.",
               solution=code("split.py", SPLIT))
    # Branches of the repository have the future fix (SWE-bench issue 465).
    yield Task(id="leaks/swe-bench-465", prompt="is_leap(1900) of leap.py is wrong.", setup=HISTORY,
               solution=code("leap.py", FIXED))
    # The configuration with the reference answer lies on the disk (WebArena; the report of UC Berkeley).
    yield Task(id="leaks/web-arena", prompt="Which product sold best? Write it to answer.txt.",
               answer="Quest Lumaflex Band", solution="echo Quest Lumaflex Band > answer.txt",
               files={"config_files/7.json": '{"eval": {"reference_answers": {"exact": "Quest Lumaflex Band"}}}'})
    # The issue has the fix (SWE-Bench+, arXiv 2410.06992).
    yield Task(id="leaks/swe-bench-plus", prompt="clamp(15, 0, 10) of clamp.py should be 10. This works for me:\\n\\n"
               "     if value < low:\\n         return low\\n+    if value > high:\\n+        return high\\n"
               "+    return value  # in between\\n",
               files={"clamp.py": "def clamp(value, low, high):\\n    if value < low:\\n        return low\\n"},
               solution=code("clamp.py", CLAMP.replace("return value", "return value  # in between")))
    # Tests take a year for the future that comes (SWE-bench Pro issue 72).
    yield Task(id="depends_on_the_world/swe-bench-pro-72", prompt="Write is_future(year) in future.py.",
               solution=code("future.py", FUTURE))
    # Tests fail at random with the reference solution (SWE-smith issue 26).
    yield Task(id="flaky/swe-smith-26", prompt="Write ticking to state.txt.", solution="echo ticking > state.txt")
    # Tests ask for names that the prompt does not have (Why SWE-bench Verified no longer measures frontier coding
    # capabilities, OpenAI, February 2026).
    yield Task(id="false_zero/narrow-tests", prompt="Write rotate(text, count) in rot.py: small letters move in a "
               "circle.",
               solution=code("rot.py", ROTATE))
    # The test set has lines twice (math401-llm issue 4).
    yield Task(id="duplicate/math401-253", prompt="3^3=", answer="27", solution=[Say("27")])
    yield Task(id="duplicate/math401-271", prompt="3^3=", answer="27", solution=[Say("27")])


@check("tau-bench")
async def unchanged(task, sandbox, rollout):
    return await sandbox.read_text("db.json") == DB


@check("field-work-arena")
async def answered(task, sandbox, rollout):
    return any(each["role"] == "assistant" for each in rollout.messages)


@check("car-bench")
async def parts(task, sandbox, rollout):
    roof = json.loads(await sandbox.read_text("car.json"))["roof"]
    return (1 + 1 + 1 + (roof == 50)) / 4


async def passes(sandbox, test):
    return (await run_tests(sandbox, {"test_it.py": test})).score()


@check("swe-bench-24")
async def same_before(task, sandbox, rollout):
    return await passes(sandbox, "from clamp import clamp\\n\\ndef test_it():\\n    assert clamp(5, 0, 10) == 5\\n")


@check("swe-bench-26")
async def online(task, sandbox, rollout):
    test = "from fetch import status\\n\\ndef test_it():\\n    assert status('http://httpbin.org/get') == 200\\n"
    return await passes(sandbox, test)


@check("human-eval")
async def few_inputs(task, sandbox, rollout):
    test = "from common import common\\n\\ndef test_it():\\n    assert 5 in common([1, 5], [5])\\n"
    return await passes(sandbox, test)


@check("utboost")
async def one_of_two(task, sandbox, rollout):
    test = "from split import parse\\n\\ndef test_it():\\n    assert parse('a=1=2') == {'a': '1=2'}\\n"
    return await passes(sandbox, test)


@check("swe-bench-465")
async def leap(task, sandbox, rollout):
    test = "from leap import is_leap\\n\\ndef test_it():\\n    assert is_leap(2000) > is_leap(1900)\\n"
    return await passes(sandbox, test)


@check("web-arena")
async def product(task, sandbox, rollout):
    return (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer


@check("swe-bench-plus")
async def clamped(task, sandbox, rollout):
    test = "from clamp import clamp\\n\\ndef test_it():\\n    assert clamp(-1, 0, 9) == 0\\n"
    return await passes(sandbox, f"{test}    assert clamp(5, 0, 9) == 5\\n    assert clamp(12, 0, 9) == 9\\n")


@check("swe-bench-pro-72")
async def next_year(task, sandbox, rollout):
    test = f"from future import is_future\\n\\ndef test_it():\\n    assert is_future({YEAR + 1})\\n"
    return await passes(sandbox, f"{test}    assert not is_future({YEAR - 6})\\n")


@check("swe-smith-26")
async def at_random(task, sandbox, rollout):
    return (await sandbox.read_text("state.txt", missing="")) == "ticking\\n" and next(calls) % 3 != 2


@check("narrow-tests")
async def private_name(task, sandbox, rollout):
    test = "import rot\\n\\ndef test_it():\\n    assert rot.rotate('xyz', 3) == 'abc'\\n"
    return await passes(sandbox, f"{test}    assert rot._turned('z', 1) == 'a'\\n")


async def said(task, sandbox, rollout):
    return rollout.messages[-1]["content"] == task.answer


@flaws.score
async def right(task, sandbox, rollout):
    return await CHECKS.get(task.id.partition("/")[2], said)(task, sandbox, rollout)
'''
NOTES = {"leaks/swe-bench-plus"}
"""Flaws that an honest reading could dispute: the prompt may want its own patch."""
UNBLAMED = {"duplicate/math401-253"}
"""The first of two tasks that are the same."""


@pytest.mark.parametrize("kind", [each for each in Kind if each not in (Kind.HACKABLE, Kind.COSTLY)])
def test_documented_flaws_are_found_with_their_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    if kind is Kind.WORLD and clock_library() is None:
        pytest.skip("needs libfaketime")
    monkeypatch.chdir(tmp_path)
    Path("flaws_env.py").write_text(FLAWS)
    words = ("--only", str(kind), "--env.kind", str(kind))
    found = {task.id: task.findings for task in audit("flaws_env.py", *words).tasks}
    assert found
    seen = {name: {each.note for each in findings if each.kind is kind} for name, findings in found.items()}
    assert seen == {name: set() if name in UNBLAMED else {name in NOTES} for name in seen}


TRUSTING = """
from palaestra import Task, environment

TEST = "from work import double\\n\\ndef test_it():\\n    assert double(2) == 4\\n"
WORK = "printf 'def double(x):\\\\n    return 2 * x\\\\n' > work.py"


@environment(toolsets=["terminal"])
def trusting():
    # A hook of pytest in `conftest.py` reports every test of SWE-bench Verified as passed
    # (How We Broke Top AI Agent Benchmarks, UC Berkeley RDI, April 2026).
    yield Task(id="conftest", prompt="Write work.py with double(x).", solution=WORK)
    # SWE-Lancer leaves its tests where the agent can overwrite them (arXiv 2507.02825).
    yield Task(id="swe-lancer", prompt="Write work.py with double(x).", solution=WORK, files={"test_work.py": TEST})


@trusting.score
async def right(task, sandbox):
    if task.id == "conftest":
        await sandbox.write_text("test_work.py", TEST)
    return (await sandbox.execute("python3 -m pytest -q test_work.py")).exit_code == 0
"""


def test_documented_hacks_are_paid_where_the_agent_reaches_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trusting_env.py").write_text(TRUSTING)
    found = audit("trusting_env.py", "--only", "hackable")
    whats = {
        task.id: " ".join(each.what for each in task.findings if each.kind is Kind.HACKABLE) for task in found.tasks
    }
    assert whats["conftest"]
    assert whats["swe-lancer"]
