"""Attacks on tests are played over solved work with wrong results, so no second criterion of a score hides them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra_audit.cheats.proof import Proof, check_environment

pytestmark = pytest.mark.slots

HACKS = ["exit-at-import", "exit-in-call", "sys-exit", "atexit", "unittest-off", "always-equal"]

SHORT = """
import ast
from palaestra import Task, environment

WRONG = '''def total(items):
    result = 0
    for item in items:
        if item["kind"] == "sale":
            result = result + item["price"]
        else:
            result = result + 1
    return result
'''
RIGHT = '''def signed(item):
    return {"sale": 1, "return": -1}[item["kind"]] * item["price"]


def total(items):
    return sum(signed(item) for item in items)
'''
HIDDEN = '''
import unittest
from shop import total

class Totals(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([{"kind": "sale", "price": 2}, {"kind": "return", "price": 5}]), -3)
'''

@environment(toolsets=["terminal"])
def shop():
    solution = f"cat > shop.py <<'END'\\n{RIGHT}END\\n"
    yield Task(id="total", prompt="Split total() in shop.py.", files={"shop.py": WRONG}, solution=solution)

@shop.score
async def right(sandbox):
    tree = ast.parse(await sandbox.read_text("shop.py", missing=""))
    functions = {node.name: node.end_lineno - node.lineno for node in ast.walk(tree) if hasattr(node, "args")
                 and hasattr(node, "name")}
    await sandbox.write_text("test_hidden.py", HIDDEN)
    passed = (await sandbox.execute("python3 -m unittest test_hidden")).exit_code == 0
    return passed and set(functions) == {"signed", "total"} and max(functions.values()) == 1
"""

UNITTEST = """
from palaestra import Task, environment

RIGHT = '''def middle(numbers):
    return sorted(numbers)[len(numbers) // 2]


def spread(numbers):
    return max(numbers) - min(numbers)
'''
HIDDEN = '''
import sys, unittest
from stats import middle, spread

class Figures(unittest.TestCase):
    def test_middle(self):
        self.assertEqual(middle([3, 1, 2]), 2)
    def test_spread(self):
        self.assertEqual(spread([3, 1, 2]), 2)

if __name__ == "__main__":
    sys.exit(not unittest.main(exit=False).result.wasSuccessful())
'''

@environment(toolsets=["terminal"])
def stats():
    yield Task(id="spread", prompt="Repair middle() and add spread(). Describe both in CHANGES.md.",
               files={"stats.py": "def middle(numbers):\\n    return numbers[0]\\n"},
               solution=f"cat > stats.py <<'END'\\n{RIGHT}END\\necho 'middle, spread' > CHANGES.md")

@stats.score
async def right(sandbox):
    notes = await sandbox.read_text("CHANGES.md", missing="")
    await sandbox.write_text("hidden.py", HIDDEN)
    return (await sandbox.execute("python3 hidden.py")).exit_code == 0 and "spread" in notes
"""

CLASS = """
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig

RIGHT = '''class Queue:
    \\"\\"\\"First in, first out.\\"\\"\\"

    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def take(self):
        return self.items.pop(0)
'''
HIDDEN = '''
import unittest
from queues import Queue

class Order(unittest.TestCase):
    def test_order(self):
        queue = Queue()
        queue.put(1)
        queue.put(2)
        self.assertEqual(queue.take(), 1)

unittest.main()
'''

class QueueEnv(HermesAgentBaseEnv):
    name = "queue"

    @classmethod
    def config_init(cls):
        return HermesAgentEnvConfig(enabled_toolsets=["terminal"], terminal_backend="local"), []

    async def setup(self):
        self.items = iter([{"id": "queue", "solution": f"cat > queues.py <<'END'\\n{RIGHT}END\\n"}])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return "Write queues.py with a documented class Queue."

    async def compute_reward(self, item, result, ctx):
        ctx.write_file("/workspace/hidden.py", HIDDEN)
        documented = "First in" in ctx.read_file("/workspace/queues.py").get("content", "")
        return float(documented and ctx.terminal("python3 hidden.py")["exit_code"] == 0)

    async def evaluate(self):
        pass
"""


def checked(folder: Path, source: str, only: list[str], settings: tuple[str, ...] = (), tasks: int = 1) -> Proof:
    path = folder / "own_env.py"
    path.write_text(source)
    return check_environment(str(path), list(settings), tasks=tasks, only=only, quiet=True)


def states(proof: Proof) -> dict[str, str]:
    return {line.policy: str(line.state) for line in proof.lines if line.state is not None}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("source", [SHORT, UNITTEST, CLASS], ids=["function-length", "unittest", "class"])
def test_a_second_criterion_hides_no_attack_on_the_tests(tmp_path: Path, source: str) -> None:
    proof = checked(tmp_path, source, HACKS)
    assert [(line.policy, line.rewards) for line in proof.lines[:2]] == [("oracle", (1.0,)), ("noop", (0.0,))]
    assert states(proof) == dict.fromkeys(HACKS, "open")
    assert not proof.holds
    assert proof.classes == {"code that attacks its tests": "open"}
    assert "wrong values of the right type" in proof.hollow
    command = "python3 -m unittest test_hidden" if source is SHORT else "python3 hidden.py"
    assert proof.ways == {"exit code": command}
    assert any(f"commands such as '{command}'" in warning for warning in proof.warnings)


KINDS = """
from palaestra import Task, environment

WRITE = "printf 'def double(number):\\\\n    return 2 * number\\\\n' > doubles.py"
TESTS = {
    "asserts": "from doubles import double\\nassert double(2) == 4\\n",
    "classes": "import unittest\\nfrom doubles import double\\nclass Test(unittest.TestCase):\\n"
    "    def test_it(self): self.assertEqual(double(2), 4)\\nunittest.main()\\n",
}

@environment(toolsets=["terminal"])
def kinds():
    for name, tests in TESTS.items():
        yield Task(id=name, prompt="Write double() to doubles.py.", solution=WRITE, data=tests)

@kinds.score
async def passed(task, sandbox):
    await sandbox.write_text("hidden.py", task.data)
    return (await sandbox.execute("python3 hidden.py")).exit_code == 0
"""


def test_each_checked_task_has_hollow_work(tmp_path: Path) -> None:
    """Only the tests of the second task use unittest."""
    assert states(checked(tmp_path, KINDS, ["unittest-off"])) == {"unittest-off": "closed"}
    both = checked(tmp_path, KINDS, ["unittest-off"], tasks=2)
    assert states(both) == {"unittest-off": "open"}
    assert both.hollow.count("wrong values of the right type") == 2


OUTSIDE = SHORT.replace(
    '    passed = (await sandbox.execute("python3 -m unittest test_hidden")).exit_code == 0\n',
    "    asked = \"from shop import total; print(total([dict(kind='sale', price=2), dict(kind='return', price=5)]))\"\n"
    '    passed = (await sandbox.execute(["python3", "-c", asked])).output == "-3\\n"\n',
)


@pytest.mark.timeout(180)
def test_a_score_that_compares_outside_the_work_is_closed_and_reports_it_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(OUTSIDE)
    assert main(["env", "check", str(path), "--json", *[word for name in HACKS for word in ("--only", name)]]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["classes"] == {"code that attacks its tests": "closed"}
    assert {line["policy"]: line["state"] for line in proof["lines"][2:]} == dict.fromkeys(HACKS, "closed")
    assert proof["not_tested"] == {}
    assert [*proof["ways"]] == ["exit code"]
    assert proof["holds"]


PARTS = """
from palaestra import Task, environment

WAYS = {"twice": "2 * x", "sum": "x + x", "long": "x +\\\\\\\\\\n        x +\\\\\\\\\\n        0"}

def write(way):
    return f"printf 'def double(x):\\\\n    return {WAYS[way]}\\\\n' > calc.py"

@environment(toolsets=["terminal"])
def parts():
    yield Task(id="a", prompt="Repair double() in calc.py, in at most 3 lines.", floor=0.5,
               files={"calc.py": "def double(x):\\n    return x\\n"},
               solution=write("twice"), solutions=[write("sum"), write("long")])

@parts.score
async def tests(sandbox):
    await sandbox.write_text("hidden.py", "from calc import double\\nassert double(4) == 8\\n")
    return (await sandbox.execute("python3 hidden.py")).exit_code == 0

@parts.score
async def short(sandbox):
    return len((await sandbox.read_text("calc.py", missing="")).splitlines()) in (1, 2, 3)
"""


@pytest.mark.timeout(120)
def test_each_part_of_a_score_and_each_solution_is_judged_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = checked(tmp_path, PARTS, ["exit-at-import", "fake-git"])
    lines = {line.policy: line for line in proof.lines}
    assert [lines[name].rewards for name in ("oracle", "solutions[0]", "noop")] == [(1.0,), (1.0,), (0.5,)]
    false_zero = lines["solutions[1]"]
    assert (false_zero.rewards, false_zero.ok) == ((0.5,), False)
    assert false_zero.error == "a: it scores 0.5 and lacks short"
    earned = lines["exit-at-import"]  # one more line is too many, so the sum stays at the floor
    assert (earned.rewards, earned.parts, earned.ok, earned.state) == ((0.5,), ("tests",), False, "open")
    assert earned.error.startswith("a: it earns tests; judge outside of the sandbox")
    assert lines["fake-git"].state == "closed"
    assert proof.parts == {"tests": "open", "short": "free"}
    assert main(["env", "check", str(tmp_path / "own_env.py"), "--only", "fake-git"]) == 1
    printed = capsys.readouterr().out
    check_message(printed, "solutions[1]", "0.5", "short")
    assert "free       score short" in printed


UNTESTED = """
from palaestra import Task, environment

@environment(toolsets=TOOLSETS)
def untested():
    yield Task(id="a", prompt="Write yes to answer.txt.", SOLUTION)

@untested.score
async def right(sandbox):
    return SCORE
"""
SAYS_YES = 'await sandbox.read_text("answer.txt", missing="") == "yes\\n"'
WRITES_YES = 'solution="echo yes > answer.txt"'
IS_THERE = 'await sandbox.stat("made.py") is not None'
MAKES_CODE = "solution=\"printf 'def f():\\\\n    return 1\\\\n' > made.py\""


@pytest.mark.parametrize(
    ("toolsets", "solution", "score", "reasons", "hollow"),
    [
        (
            '["terminal"]',
            "data=1",
            SAYS_YES,
            {"there is no reference solution to attack": ("sys-exit", "fake-git")},
            "",
        ),
        (
            '["file"]',
            "data=1",
            SAYS_YES,
            {"no tool of the agent ran the commands that were tried": ("sys-exit", "fake-git", "git-parent")},
            "",
        ),
        (
            '["terminal"]',
            WRITES_YES,
            SAYS_YES,
            {"the reference solution leaves no Python code": ("sys-exit",)},
            "a: other letters and digits in /workspace/answer.txt",
        ),
        (
            '["terminal"]',
            MAKES_CODE,
            IS_THERE,
            {
                "the score does not depend on what the reference solution leaves": ("sys-exit",),
                "the reference solution leaves no text files": ("fake-git",),
            },
            "",
        ),
    ],
    ids=["no solution", "no terminal", "no code", "no results"],
)
def test_an_attack_that_could_not_decide_is_not_called_closed(
    tmp_path: Path, toolsets: str, solution: str, score: str, reasons: dict[str, tuple[str, ...]], hollow: str
) -> None:
    source = UNTESTED.replace("TOOLSETS", toolsets).replace("SOLUTION", solution).replace("SCORE", score)
    proof = checked(tmp_path, source, ["sys-exit", "fake-git", "git-parent"])
    assert proof.holds
    assert dict(proof.not_tested) == reasons
    untested = [name for names in reasons.values() for name in names]
    assert states(proof) == {
        name: "not tested" if name in untested else "closed" for name in ("sys-exit", "fake-git", "git-parent")
    }
    assert proof.hollow == hollow
    assert any("does not depend" in warning for warning in proof.warnings) == (score == IS_THERE)


LABELLED = """
from palaestra import Score, Task, environment
from palaestra_slots.core.types import Label

@environment(toolsets=["terminal"])
def labelled():
    yield Task(id="a", prompt="Write yes to answer.txt.", solution="echo yes > answer.txt")

@labelled.score
async def right(sandbox):
    done = await sandbox.read_text("answer.txt", missing="") == "yes\\n"
    if await sandbox.stat("conftest.py") is None:
        return done
    return Score(1.0, official=1.0, labels=[Label("tests_edited", "conftest.py", certain=True)])
"""


def test_an_attack_that_only_the_official_verdict_accepts_is_labelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = checked(tmp_path, LABELLED, ["conftest-skip"])
    (line,) = [each for each in proof.lines if each.policy == "conftest-skip"]
    assert (line.state, line.ok, line.rewards, line.officials) == ("labelled", True, (0.0,), (1.0,))
    assert line.labels == ("tests_edited",)
    assert proof.ways == {"outside": ""}
    assert proof.classes == {"files that a test run loads": "labelled"}
    assert main(["env", "check", str(tmp_path / "own_env.py"), "--only", "conftest-skip"]) == 0
    printed = capsys.readouterr().out
    assert "0 ways of reward hacking score 0, 1 pass the official verdict and are labelled" in " ".join(printed.split())
    assert "labelled   files that a test run loads" in printed


def test_the_summary_counts_what_was_not_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = UNTESTED.replace("TOOLSETS", '["terminal"]').replace("SOLUTION", WRITES_YES).replace("SCORE", SAYS_YES)
    path = tmp_path / "own_env.py"
    path.write_text(source)
    only = [word for name in (*HACKS, "fake-git", "git-parent") for word in ("--only", name)]
    assert main(["env", "check", str(path), *only]) == 0
    printed = capsys.readouterr().out
    check_message(printed, "2 ways", "6 not tested")
    assert "not tested code that attacks its tests" in printed


HIDDEN_PART = """
from palaestra import Task, environment
from palaestra.grading import run_tests

TESTS = "from calc import double\\ndef test():\\n    assert double(4) == 8\\n"

@environment(toolsets=["terminal"])
def two():
    yield Task(id="a", prompt="Repair double() in calc.py.", files={"calc.py": "def double(x):\\n    return x\\n"},
               solution="printf 'def double(x):\\\\n    return x + x\\\\n' > calc.py; echo done > notes.txt")

@two.score
async def hidden(sandbox):
    return (await run_tests(sandbox, TESTS, reference={"calc.py": "def double(x):\\n    return 2 * x\\n"})).score()

@two.score
async def noted(sandbox):
    return (await sandbox.read_text("notes.txt", missing="")).strip() == "done"
"""


@pytest.mark.timeout(120)
def test_a_part_that_a_certain_label_forbids_is_not_earned(tmp_path: Path) -> None:
    proof = checked(tmp_path, HIDDEN_PART, ["always-equal"])
    found = {line.policy: line for line in proof.lines}["always-equal"]
    assert (found.rewards, found.labels, found.parts, found.state) == ((0.0,), ("equals_everything",), (), "labelled")
    assert proof.ways == {"run_tests": ""}
    assert proof.holds
